"""What a task is: rows to train on, rows held out, and a score for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sidestep.types import Example


class Task(Protocol):
    """`train` and `held_out` share no row. `score` may be called from several threads at once."""

    @property
    def train(self) -> Sequence[Example]:
        """Rows a run trains on; it goes through them in reshuffled epochs."""

    @property
    def held_out(self) -> Sequence[Example]:
        """Rows for evaluation only; may be empty."""

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        """One finite reward per completion; `completions[i]` answers the row `examples[i]`."""
