"""What a task is: rows to train on, rows held out, and a score for an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class Judgement:
    """Rewards of some completions, and where they come from.

    rewards: one finite number per completion: the weighted sum of `parts`.
    parts: by the name of each reward, its own values before weighting, one per completion.
    problems: one per completion: why a reward could not be told and was taken as 0
        ("math: no answer found"); "" if nothing is wrong. A wrong answer is no problem.
    """

    rewards: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@runtime_checkable
class FullTask(Task, Protocol):
    """A task that has more to tell. Runs work with either: `as_full`."""

    def judge(self, examples: Sequence[Example], completions: Sequence[str]) -> Judgement:
        """As `score`, with parts and problems."""

    @property
    def notices(self) -> Sequence[str]:
        """What was decided about the rows while reading them, a line each, for people."""

    def close(self) -> None:
        """End what the task started. Safe to call twice."""


def as_full(task: Task) -> FullTask:
    """`task`, with what it lacks added: no parts, no problems, no notices, nothing to close."""
    return task if isinstance(task, FullTask) else _Plain(task)


class _Plain:
    def __init__(self, task: Task) -> None:
        self._task = task
        self.notices: Sequence[str] = ()

    @property
    def train(self) -> Sequence[Example]:
        return self._task.train

    @property
    def held_out(self) -> Sequence[Example]:
        return self._task.held_out

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return self._task.score(examples, completions)

    def judge(self, examples: Sequence[Example], completions: Sequence[str]) -> Judgement:
        rewards = tuple(self._task.score(examples, completions))
        return Judgement(rewards, problems=("",) * len(rewards))

    def close(self) -> None:
        pass
