"""Settings of a loss: frozen records whose fields say what they mean and whose the default is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting of a loss, for tables and error messages."""

    name: str
    default: float | None
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a loss that has nothing to set."""


def option(default: float | None, meaning: str, source: str) -> Any:
    """A dataclass field with a default, what it means, and where the default comes from."""
    return field(default=default, metadata={"meaning": meaning, "source": source})


def options_of(record: type) -> tuple[Option, ...]:
    """The settings of an options record, in order."""
    found = []
    for entry in fields(record):
        default: Any = entry.default
        found.append(
            Option(entry.name, default, entry.metadata["meaning"], entry.metadata["source"])
        )
    return tuple(found)


def make_options(record: type[Record], **values: float | None) -> Record:
    """An options record from the values that are not None; the others keep their default.

    Raises ValueError for a name that the record does not have, and for a value it refuses.
    """
    known = [entry.name for entry in options_of(record)]
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            has = ", ".join(known) or "no options"
            raise ValueError(f"{name} is {value!r}, but {record.__name__} has {has}: leave it out")
    return record(**given)


def require_above(name: str, value: float, bound: float = 0.0) -> None:
    """Raises ValueError unless value > bound (infinity is allowed)."""
    if not value > bound:
        raise ValueError(f"{name} is {value!r}: it must be above {bound:g}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError unless low < value < high."""
    if not low < value < high:
        raise ValueError(f"{name} is {value!r}: it must be between {low:g} and {high:g}")


def require_finite(name: str, value: float) -> None:
    """Raises ValueError unless the value is a finite number."""
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: it must be a finite number")


def require_band(low: float, high: float) -> None:
    """Raises ValueError unless 0 <= low < high, as bounds on a weight (not on its inverse)."""
    if not 0.0 <= low < high:
        raise ValueError(
            f"low is {low!r} and high is {high!r}: they are bounds on the weight itself and must "
            f"be 0 <= low < high"
        )
