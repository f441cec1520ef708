"""One reward for a completion: exact match, or the weighted sum of several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sidestep.errors import UsageError
from sidestep.tasks.protocol import Judgement
from sidestep.types import Example


@dataclass(frozen=True, slots=True)
class Scores:
    """values: one finite number per completion. problems: as in `Judgement`."""

    values: tuple[float, ...]
    problems: tuple[str, ...]


class Reward(Protocol):
    """Something that scores completions. `score` may be called from several threads at once."""

    name: str

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Raises RewardError for a fault that must end the run."""

    def close(self) -> None:
        """End what it started. Safe to call twice."""


class RewardedTask:
    """Rows with one or several rewards. The reward of a completion is the weighted sum."""

    def __init__(
        self,
        train: Sequence[Example],
        held_out: Sequence[Example],
        rewards: Sequence[Reward],
        weights: Sequence[float],
        notices: Sequence[str] = (),
    ) -> None:
        self.train, self.held_out, self.notices = train, held_out, notices
        self._rewards = tuple(zip(rewards, weights, strict=True))

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return list(self.judge(examples, completions).rewards)

    def judge(self, examples: Sequence[Example], completions: Sequence[str]) -> Judgement:
        totals = [0.0] * len(examples)
        problems: list[list[str]] = [[] for _ in examples]
        parts = {}
        for reward, weight in self._rewards:
            scores = reward.score(examples, completions)
            parts[reward.name] = scores.values
            for i, (value, problem) in enumerate(zip(scores.values, scores.problems, strict=True)):
                totals[i] += weight * value
                if problem:
                    problems[i].append(problem)
        return Judgement(tuple(totals), parts, tuple(map("; ".join, problems)))

    def close(self) -> None:
        for reward, _ in self._rewards:
            reward.close()


class AnswerFinder:
    """Finds the answer in a completion: all of it, or with an expression the last match.

    Of the match its first group, or the whole match if the expression has no group. Without spaces
    around it. Raises UsageError for an expression that does not compile.
    """

    def __init__(self, answer_regex: str | None) -> None:
        self._pattern = None if answer_regex is None else _compiled(answer_regex)

    def __call__(self, completion: str) -> str | None:
        """The answer, None if there is none."""
        if self._pattern is None:
            return completion.strip()
        last: re.Match[str] | None = None
        for last in self._pattern.finditer(completion):  # noqa: B007
            pass
        if last is None:
            return None
        found: str | None = last[1] if self._pattern.groups else last[0]
        return None if found is None else found.strip()


class ExactReward:
    """1.0 if the answer of the completion equals that of the row, else 0.0.

    Spaces around both answers do not matter.
    """

    name = "exact"

    def __init__(self, answer_of: AnswerFinder) -> None:
        self._answer_of = answer_of

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        values = tuple(
            float(self._answer_of(completion) == example.columns["answer"].strip())
            for example, completion in zip(examples, completions, strict=True)
        )
        return Scores(values, ("",) * len(values))

    def close(self) -> None:
        pass


def _compiled(answer_regex: str) -> re.Pattern[str]:
    try:
        return re.compile(answer_regex)
    except re.error as error:
        at = "" if error.pos is None else f" at character {error.pos + 1}"
        raise UsageError(
            f"task.answer_regex {answer_regex!r}: not a regular expression ({error.msg}{at}); "
            "in TOML write it in single quotes, so that backslashes stay"
        ) from error
