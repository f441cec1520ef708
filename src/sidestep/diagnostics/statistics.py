"""Statistics over seeds and along a run: intervals, pairing, collapse, time to a target.

The unit is the seed: steps of one run depend on each other and say nothing about another run.
Rewards of a run are one value a step; None where a step has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sidestep.diagnostics.summary import COLLAPSE_SHARE, mean, moving_mean

LEVEL = 0.95
RESAMPLES = 10_000
# Up to here all n^n resamples are counted, so that the interval is exact and needs no dice.
MOST_EXACT = 6


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over `num` seeds and the ends of its interval; None for one seed: nothing is known."""

    mean: float
    low: float | None
    high: float | None
    num: int
    worst: float  # the lowest of the values

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(values: Sequence[float], *, level: float = LEVEL) -> Interval:
    """Mean of one value a seed and its percentile bootstrap interval (Efron 1979).

    Up to 6 values every resample is counted; above, 10,000 are drawn with a fixed seed. With three
    seeds the interval is within their range and so too narrow: it shows spread, it proves little.

    Raises ValueError for no values, or one that is not finite.
    """
    if not values:
        raise ValueError("values is empty: an interval needs one value a seed")
    if not all(math.isfinite(value) for value in values):
        raise ValueError(f"values {list(values)} are not all finite")
    centre = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(centre, None, None, 1, values[0])
    tail = 100.0 * (1.0 - level) / 2.0
    means = _resampled_means(values)
    # Between two resamples the outer one: the interval is too narrow already.
    low = np.percentile(means, tail, method="lower")
    high = np.percentile(means, 100.0 - tail, method="higher")
    return Interval(centre, float(low), float(high), len(values), min(values))


def _resampled_means(values: Sequence[float]) -> np.ndarray:
    num = len(values)
    array = np.asarray(values, dtype=np.float64)
    if num <= MOST_EXACT:
        chosen = np.array(list(itertools.product(range(num), repeat=num)))
    else:
        chosen = np.random.default_rng(0).integers(num, size=(RESAMPLES, num))
    means: np.ndarray = array[chosen].mean(axis=1)
    return means


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, level: float = LEVEL
) -> Interval | None:
    """Interval of ours - theirs over the seeds that both have; None without one.

    Runs of one seed see the same prompts and random numbers, so their difference is steadier than
    the difference of two means.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        return None
    return interval([ours[seed] - theirs[seed] for seed in shared], level=level)


def smoothing_window(num_steps: int) -> int:
    """A twentieth of the run, at least one step: what rewards are averaged over before judging."""
    return max(1, num_steps // 20)


def last_tenth(rewards: Sequence[float | None]) -> float | None:
    """Mean of the last tenth of the steps, at least one."""
    return mean([value for value in rewards[-max(1, len(rewards) // 10) :] if value is not None])


def collapse_step(
    rewards: Sequence[float | None], window: int | None = None, *, share: float = COLLAPSE_SHARE
) -> int | None:
    """First step from which the reward stays under `share` of its own peak to the end; or None.

    The reward is the mean over the last `window` steps (default: `smoothing_window`); the peak is
    the highest of it before. It must stay down for `window` steps at least: noise in the last step
    is no collapse. A reward that never was above 0 has no peak to fall from.
    """
    window = smoothing_window(len(rewards)) if window is None else window
    smooth = moving_mean(rewards, window)[window - 1 :]
    peak, since = 0.0, None
    for i, value in enumerate(smooth):
        if value is None:
            continue
        peak = max(peak, value)
        if value >= share * peak:
            since = None
        elif since is None:
            since = i
    if since is None or len(smooth) - since < window:
        return None
    return since + window - 1


def first_reach(
    rewards: Sequence[float | None], target: float, window: int | None = None
) -> int | None:
    """Number of steps after which the mean reward over the last `window` steps (default:
    `smoothing_window`) is `target` or more for the first time; None if it never is.
    """
    window = smoothing_window(len(rewards)) if window is None else window
    smooth = moving_mean(rewards, window)
    for i in range(window - 1, len(smooth)):
        value = smooth[i]
        if value is not None and value >= target:
            return i + 1
    return None


@dataclass(frozen=True, slots=True)
class Band:
    """Mean of several runs at each step, between the lowest and the highest of them."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


def band(curves: Sequence[Sequence[float | None]], window: int = 1) -> Band:
    """Curves of several seeds, each smoothed over `window` steps, as one band.

    A run that ended early counts as long as it goes.
    """
    smooth = [moving_mean(curve, window) for curve in curves]
    columns = [
        [value for value in column if value is not None]
        for column in itertools.zip_longest(*smooth)
    ]
    return Band(
        mean=[mean(column) for column in columns],
        low=[min(column, default=None) for column in columns],
        high=[max(column, default=None) for column in columns],
    )
