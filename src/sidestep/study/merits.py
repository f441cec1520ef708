"""The figures of merit of a study (docs/study.md), from its finished cells.

Learning rates are chosen on the pilot seeds and judged on the others. Without pilot seeds
both are the same, which flatters every method; the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sidestep.diagnostics.compare import samples_per_step
from sidestep.diagnostics.statistics import Interval, first_reach, interval, paired_difference
from sidestep.diagnostics.summary import mean
from sidestep.study.declaration import Study
from sidestep.study.grid import Cell
from sidestep.study.outcome import Result

CAP = 4  # times what the synchronous run needs
SHARE_90 = 0.9

Results = Mapping[Cell, Result]


@dataclass(frozen=True, slots=True)
class Synchronous:
    """The baseline at lag 0 and its best learning rate: what everything is compared with.

    reward: mean over seeds of the last tenth. target: the share of it to reach. samples: mean to
    the target, None if no seed reaches it.
    """

    learning_rate: float
    reward: float
    target: float
    samples: float | None
    by_seed: Mapping[int, float]

    @property
    def cap(self) -> float:
        """Samples after which a run has not reached the target, whatever comes."""
        return float("inf") if self.samples is None else CAP * self.samples


@dataclass(frozen=True, slots=True)
class Merit:
    """A method at a lag on a task, over the reported seeds. docs/study.md says what each is.

    Lengths are mean update lengths per sample. samples, cpu_s, steps_to_90: of seeds that do not
    get there, the cap or what the run had; `num_reached` and `num_reached_90` say how many do.
    """

    task: str
    method: str
    lag: int
    num_seeds: int
    best_rate: float
    reward: Interval
    gap_at_best: Interval | None
    gap_at_equal: Interval | None
    accuracy: Interval | None
    worst_reward: float
    worst_of_all_rates: float
    stability: Interval
    stable_for_all_seeds: float
    rate_for_samples: float
    samples: Interval
    samples_ratio: float | None
    cpu_s: Interval | None
    num_reached: int
    steps_to_90: Interval
    num_reached_90: int
    num_collapsed: int
    num_cells: int
    cost: float | None

    def flat(self) -> dict[str, Any]:
        """One value a column; an interval has three, also one that does not exist: the columns are
        the same for every merit.
        """
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if "Interval" in str(field.type):
                ends = (None, None, None) if value is None else (value.mean, value.low, value.high)
                names = (field.name, f"{field.name}_low", f"{field.name}_high")
                columns |= zip(names, ends, strict=True)
            else:
                columns[field.name] = value
        return columns


def synchronous(study: Study, results: Results, task: str) -> Synchronous | None:
    """None as long as no reported seed of it is finished."""
    place = _Place(study, results, task, study.baseline, 0)
    rate = place.best_rate(lambda result: result.row["reward_last"] or 0.0)
    if rate is None:
        return None
    cells = place.reported(rate)
    by_seed = {result.cell.seed: result.row["reward_last"] or 0.0 for result in cells}
    if not by_seed:
        return None
    reward = sum(by_seed.values()) / len(by_seed)
    target = study.target * reward
    reached = [samples for result in cells if (samples := samples_to(result, target)) is not None]
    return Synchronous(rate, reward, target, mean(reached), by_seed)


def merits(study: Study, results: Results) -> list[Merit]:
    """Every method at every lag on every task that has a reported seed finished, with the
    synchronous runs of the task.
    """
    found = []
    for task in study.tasks:
        reference = synchronous(study, results, task)
        if reference is None:
            continue
        for method in study.methods:
            for lag in study.lags:
                merit = _merit(_Place(study, results, task, method, lag), reference)
                if merit is not None:
                    found.append(merit)
    return found


def samples_to(result: Result, target: float) -> int | None:
    """Samples until the smoothed reward is `target`; None if it never is."""
    steps = first_reach(result.rewards, target)
    return None if steps is None else steps * samples_per_step(result.run)


def is_stable(result: Result, reference: Synchronous) -> bool:
    """Whether a run reaches the target before the cap and neither fails nor collapses."""
    samples = samples_to(result, reference.target)
    reached = samples is not None and samples <= reference.cap
    return reached and result.row["collapse_step"] is None


class _Place:
    """The finished cells of one method at one lag on one task."""

    def __init__(self, study: Study, results: Results, task: str, method: str, lag: int) -> None:
        self.study, self.results = study, results
        self.task, self.method, self.lag = task, method, lag
        self.all = [
            result
            for cell, result in sorted(results.items())
            if (cell.task, cell.method, cell.lag) == (task, method, lag)
        ]

    def reported(self, rate: float | None = None) -> list[Result]:
        """Of the reported seeds, at one learning rate or at all."""
        return [
            result
            for result in self.all
            if result.cell.seed in self.study.seeds
            and (rate is None or result.cell.learning_rate == rate)
        ]

    def best_rate(self, merit: Callable[[Result], float]) -> float | None:
        """The learning rate with the highest mean of `merit`; of equal ones the lowest."""
        pilots = [result for result in self.all if result.cell.seed in self.study.pilot_seeds]
        judged: dict[float, list[float]] = {}
        for result in pilots or self.reported():
            judged.setdefault(result.cell.learning_rate, []).append(merit(result))
        means = {rate: sum(values) / len(values) for rate, values in sorted(judged.items())}
        return max(means, key=lambda rate: means[rate]) if means else None


def _merit(place: _Place, reference: Synchronous) -> Merit | None:
    best = place.best_rate(lambda result: result.row["reward_last"] or 0.0)
    quickest = place.best_rate(lambda result: -_capped_samples(result, reference))
    if best is None or quickest is None or not place.reported(best):
        return None
    at_best, at_quickest = place.reported(best), place.reported(quickest)
    cells = place.reported()
    rewards = {result.cell.seed: result.row["reward_last"] or 0.0 for result in at_best}
    equal = place.reported(reference.learning_rate)
    samples = [_capped_samples(result, reference) for result in at_quickest]
    accuracies = [r.row["accuracy_last"] for r in at_best if r.row["accuracy_last"] is not None]
    mean_samples = sum(samples) / len(samples)
    target_90 = SHARE_90 * reference.reward
    steps_90 = [first_reach(result.rewards, target_90) for result in at_best]
    return Merit(
        task=place.task,
        method=place.method,
        lag=place.lag,
        num_seeds=len(rewards),
        best_rate=best,
        reward=interval(list(rewards.values())),
        gap_at_best=paired_difference(rewards, reference.by_seed),
        gap_at_equal=paired_difference(
            {result.cell.seed: result.row["reward_last"] or 0.0 for result in equal},
            reference.by_seed,
        ),
        accuracy=interval(accuracies) if accuracies else None,
        worst_reward=min(rewards.values()),
        worst_of_all_rates=min(result.row["reward_last"] or 0.0 for result in cells),
        stability=_stability(cells, reference),
        stable_for_all_seeds=_stable_for_all(cells, reference),
        rate_for_samples=quickest,
        samples=interval(samples),
        samples_ratio=None if reference.samples is None else mean_samples / reference.samples,
        cpu_s=_cpu_seconds(at_quickest, reference),
        num_reached=sum(_reaches(result, reference) for result in at_quickest),
        steps_to_90=interval(
            [
                float(len(result.rewards) if steps is None else steps)
                for result, steps in zip(at_best, steps_90, strict=True)
            ]
        ),
        num_reached_90=sum(steps is not None for steps in steps_90),
        num_collapsed=sum(result.row["collapse_step"] is not None for result in cells),
        num_cells=len(cells),
        cost=_cost(place, cells),
    )


def _reaches(result: Result, reference: Synchronous) -> bool:
    samples = samples_to(result, reference.target)
    return samples is not None and samples <= reference.cap


def _capped_samples(result: Result, reference: Synchronous) -> float:
    """Samples to the target; the cap, or all that were planned if these are fewer, without it."""
    samples = samples_to(result, reference.target)
    planned = result.row["steps_planned"] or len(result.rewards)
    cap = min(reference.cap, float(planned * samples_per_step(result.run)))
    return cap if samples is None else min(float(samples), cap)


def _cpu_seconds(results: Sequence[Result], reference: Synchronous) -> Interval | None:
    """CPU seconds of the steps until the target, or of the whole run; None where not all say."""
    seconds = []
    for result in results:
        spent = result.run.column("time/cpu_s")
        if not spent or None in spent:
            return None
        seconds.append(math.fsum(spent[: first_reach(result.rewards, reference.target)]))
    return interval(seconds) if seconds else None


def _stability(cells: Sequence[Result], reference: Synchronous) -> Interval:
    """For each seed the longest mean update of a stable run, 0 without one; over the seeds."""
    longest = {result.cell.seed: 0.0 for result in cells}
    for result in cells:
        if is_stable(result, reference):
            seed = result.cell.seed
            longest[seed] = max(longest[seed], result.row["update_length"])
    return interval(list(longest.values()))


def _stable_for_all(cells: Sequence[Result], reference: Synchronous) -> float:
    """The longest mean update of a learning rate at which no seed is unstable; 0 without one."""
    longest = 0.0
    for rate in {result.cell.learning_rate for result in cells}:
        at_rate = [result for result in cells if result.cell.learning_rate == rate]
        if all(is_stable(result, reference) for result in at_rate):
            lengths = [result.row["update_length"] for result in at_rate]
            longest = max(longest, sum(lengths) / len(lengths))
    return longest


def _cost(place: _Place, cells: Iterable[Result]) -> float | None:
    """CPU time of training a step as a multiple of the baseline's at the same places."""
    ratios = []
    for result in cells:
        base = place.results.get(result.cell.at(place.study.baseline))
        if base is not None and base.row["train_cpu_s"] and result.row["train_cpu_s"]:
            ratios.append(result.row["train_cpu_s"] / base.row["train_cpu_s"])
    return mean(ratios)
