"""What a run comes down to: the few numbers a person asks for first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sidestep.diagnostics.runs import RunData

# A reward that ends under this share of its own peak has collapsed (study.md's definition of
# collapse).
COLLAPSE_SHARE = 0.5
# Above this share of groups with equal rewards there is next to nothing to learn from.
MANY_EQUAL = 0.9


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Rewards are means over a tenth of the recorded steps (at least one); None where nothing was
    recorded.
    """

    num_steps: int
    planned_steps: int | None
    reward_first: float | None
    reward_last: float | None
    reward_peak: float | None
    accuracy_first: float | None
    accuracy_last: float | None
    lag_mean: float | None
    lag_max: float | None
    tokens_by_lag: dict[int, float]
    steps_by_regime: dict[str, int]
    num_alarms: int
    equal_rewards_last: float | None
    tokens_per_s: float | None
    elapsed_s: float | None

    @property
    def is_complete(self) -> bool:
        return self.planned_steps is not None and self.num_steps >= self.planned_steps

    @property
    def num_skips(self) -> int:
        return self.steps_by_regime.get("skip", 0)

    @property
    def has_collapsed(self) -> bool:
        """The reward ended under half of its own peak."""
        if self.reward_last is None or self.reward_peak is None:
            return False
        return self.reward_last < COLLAPSE_SHARE * self.reward_peak

    def verdict(self) -> str:
        """One line for people."""
        of_planned = "" if self.planned_steps is None else f" of {self.planned_steps}"
        parts = [f"{self.num_steps}{of_planned} steps"]
        if self.reward_first is not None and self.reward_last is not None:
            parts.append(
                f"reward {self.reward_first:.2f} \N{RIGHTWARDS ARROW} {self.reward_last:.2f}"
            )
        if self.accuracy_last is not None:
            began = (
                ""
                if self.accuracy_first is None
                else f"{self.accuracy_first:.2f} \N{RIGHTWARDS ARROW} "
            )
            parts.append(f"held-out accuracy {began}{self.accuracy_last:.2f}")
        if self.lag_mean is not None and self.lag_max is not None:
            parts.append(f"mean lag {self.lag_mean:.1f} (max {self.lag_max:g})")
        parts.append(f"{self.num_skips} skipped")
        if self.has_collapsed:
            parts.append(f"reward collapsed from {self.reward_peak:.2f}")
        if self.num_alarms:
            parts.append(f"alarm in {self.num_alarms} steps")
        return ", ".join(parts)


def summarise(run: RunData) -> RunSummary:
    """Read the summary off a run's rows. Lag is weighted by tokens wherever the run recorded a
    histogram.
    """
    rewards = run.values("reward/mean")
    window = max(1, len(rewards) // 10)
    smooth = moving_mean(rewards, window)
    tokens_by_lag = sum_histograms(run.values("lag/histogram"))
    return RunSummary(
        num_steps=len(run.rows),
        planned_steps=run.setting("train.steps"),
        reward_first=mean(rewards[:window]),
        reward_last=mean(rewards[-window:]),
        reward_peak=max(
            (value for value in smooth[window - 1 :] if value is not None), default=None
        ),
        accuracy_first=next(iter(run.values("accuracy/eval_start")), None),
        accuracy_last=next(reversed(run.values("accuracy/eval")), None),
        lag_mean=weighted_mean(tokens_by_lag) if tokens_by_lag else mean(run.values("lag/mean")),
        lag_max=max(run.values("lag/max"), default=None),
        tokens_by_lag=tokens_by_lag,
        steps_by_regime=dict(Counter(run.values("align/regime"))),
        num_alarms=run.values("alarm/level").count("alarm"),
        equal_rewards_last=mean(run.values("groups/equal_reward_fraction")[-window:]),
        tokens_per_s=mean(run.values("tokens/s")),
        elapsed_s=next(reversed(run.values("time/elapsed_s")), None),
    )


def equal_rewards(summary: RunSummary) -> str:
    """What to do where nearly all groups have equal rewards; empty where they do not."""
    share, reward = summary.equal_rewards_last, summary.reward_last
    if share is None or share <= MANY_EQUAL or reward is None:
        return ""
    return (
        f"In {share:.0%} of the groups of the last tenth all rewards are equal (mean "
        f"{reward:.2f}): they teach nothing. If the task is not solved, its prompts are too easy "
        f"or too hard for this model: change them, engine.temperature or rollout.group_size"
    )


def sum_histograms(histograms: Sequence[dict[str, float]]) -> dict[int, float]:
    """Add up objects of lag -> tokens; keys become numbers, in order."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        for lag, tokens in histogram.items():
            total[int(lag)] += int(tokens)
    return {lag: float(total[lag]) for lag in sorted(total)}


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def weighted_mean(weights: dict[int, float]) -> float | None:
    """Mean of the keys, each counted as often as its value says; None if all weights are 0."""
    total = math.fsum(weights.values())
    return math.fsum(key * weight for key, weight in weights.items()) / total if total else None


def moving_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """Mean over the last `window` entries at each position, over fewer at the start; missing
    entries are left out. Time is linear in the length, whatever the window.
    """
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(value is not None for value in values)]
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        start = max(0, end - window)
        count = counts[end] - counts[start]
        means.append((sums[end] - sums[start]) / count if count else None)
    return means
