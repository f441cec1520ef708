"""A broken rule between config keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. `code`: stable, for tests. `keys`: those it is about, the one to blame first.

    what, fix: without a full stop; both in one line are the message.
    """

    code: str
    keys: tuple[str, ...]
    what: str
    fix: str

    @property
    def message(self) -> str:
        return f"{self.what}: {self.fix}"
