"""Checks of the host that an adapter changes: its version, and that the place is still there."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Host:
    """A trainer as it was looked at.

    package: its name on the package index, and how to get it.
    oldest: the oldest version with the place; anything older is refused.
    tested: the newest version that was looked at; of a newer one a warning says so.
    """

    package: str
    oldest: str
    tested: str

    def require(self, module: str) -> ModuleType:
        """The host's module. Raises ImportError naming the package, ValueError for its version."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            raise ImportError(
                f"{self.package} is needed here: pip install '{self.package}>={self.oldest}' "
                "(docs/integrations.md)"
            ) from None
        if _numbers(found) < _numbers(self.oldest):
            raise ValueError(
                f"{self.package} {found} is older than {self.oldest}, the oldest version that "
                "this adapter knows: upgrade it, or attach to its optimizer with sidestep.attach"
            )
        if _numbers(found) > _numbers(self.tested):
            _log.warning(
                "%s %s is newer than %s, the last version this adapter was tested with; the place "
                "it attaches to is still there",
                self.package,
                found,
                self.tested,
            )
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise  # something the host itself needs
            raise self._moved(module, "there is no such module") from error

    def place(
        self, owner: Any, name: str, takes: Sequence[str] = (), uses: Sequence[str] = ()
    ) -> Callable[..., Any]:
        """`owner.name`, a function whose first parameters are `takes` and whose body names `uses`.

        Raises ValueError, naming what is different, where the host has changed.
        """
        where = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        found = getattr(owner, name, None)
        if not callable(found):
            raise self._moved(where, "there is no such function")
        parameters = [*inspect.signature(found).parameters]
        if parameters[: len(takes)] != list(takes):
            raise self._moved(where, f"it takes {parameters}, not {list(takes)}")
        code = getattr(inspect.unwrap(found), "__code__", None)
        known = () if code is None else code.co_names
        missing = [name for name in uses if name not in known]
        if missing:
            raise self._moved(where, f"it does not use {missing[0]!r} any more")
        return found  # type: ignore[no-any-return]

    def _moved(self, where: str, what: str) -> ValueError:
        return ValueError(
            f"{self.package}: the place to attach to has moved: {where}: {what}. This adapter "
            f"knows {self.package} {self.oldest} to {self.tested}; use sidestep.attach on its "
            "optimizer, or sidestep.integrations.auto, and report it"
        )


@dataclass(slots=True)
class Patches:
    """Attributes of a host that were replaced, to be put back."""

    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, new)

    def undo(self) -> None:
        """Put everything back, the last one first."""
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def __bool__(self) -> bool:
        return bool(self._undo)


_ABSENT = object()


def _numbers(text: str) -> tuple[int, ...]:
    """The release numbers of a version: "0.9.1rc1+cpu" is (0, 9, 1)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
