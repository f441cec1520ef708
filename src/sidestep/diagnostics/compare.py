"""Several runs side by side: which of them are one setting with other seeds, and what came of each.

Runs whose configs are equal but for the seed are a group. What tells the groups apart is found in
the configs; differences between groups are taken seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.diagnostics.runs import RunData, read_run
from sidestep.diagnostics.statistics import (
    Interval,
    collapse_step,
    first_reach,
    interval,
    last_tenth,
    paired_difference,
)
from sidestep.diagnostics.summary import mean
from sidestep.errors import UsageError

# They change what is written or waited for, not what is learned.
WITHOUT_EFFECT = (
    "seed",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "rollout.timeout_s",
    "log.sinks",
    "log.project",
    "train.numerics_every",
)
# Of [task], these leave the rewards of training what they are.
TASK_WITHOUT_EFFECT = ("task.eval_path", "task.eval_size", "task.overlong_tokens")
TARGET_SHARE = 0.9  # of the best group's reward


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of one setting. `runs`: by seed; a seed may have several (bounded lag is not exact)."""

    label: str
    settings: Mapping[str, Any]
    runs: Mapping[int, Sequence[RunData]]

    def all_runs(self) -> list[RunData]:
        return [run for seed in sorted(self.runs) for run in self.runs[seed]]

    def by_seed(self, measure: Callable[[RunData], float | None]) -> dict[int, float]:
        """One value a seed: the mean over its runs that have the value."""
        found = {}
        for seed, runs in self.runs.items():
            value = mean([v for v in map(measure, runs) if v is not None])
            if value is not None:
                found[seed] = value
        return found

    def interval(self, measure: Callable[[RunData], float | None]) -> Interval | None:
        values = self.by_seed(measure)
        return interval([values[seed] for seed in sorted(values)]) if values else None


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A line of the comparison. Intervals are over seeds; None where no run has the value.

    difference: reward_last less that of the first group, over the seeds they share; None for it.
    samples, seconds: to the target, over the seeds that reach it.
    """

    label: str
    num_seeds: int
    num_runs: int
    reward_last: Interval | None
    difference: Interval | None
    accuracy: Interval | None
    num_reached: int
    samples: Interval | None
    seconds: Interval | None
    num_collapsed: int
    cosine: Interval | None
    ess: Interval | None
    lag: Interval | None
    tokens_per_s: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Groups in the order their first runs were given. target: the reward that `samples` and
    `seconds` are counted to; None if no run has a reward.
    """

    groups: Sequence[RunGroup]
    differing: Sequence[str]
    rows: Sequence[GroupRow]
    target: float | None


def compare(run_dirs: Sequence[Path | str]) -> Comparison:
    """Read the run folders, group them and measure each group.

    Raises UsageError for fewer than two runs, one given twice, a folder that is no run or has no
    finished step, and for runs of different tasks: their rewards do not compare.
    """
    if len(run_dirs) < 2:
        raise UsageError(
            f"{len(run_dirs)} run is nothing to compare: give two or more run folders, "
            f"or look at one with: sidestep report RUN"
        )
    runs: dict[Path, RunData] = {}
    for folder in run_dirs:
        place = Path(folder).resolve()
        if place in runs:
            raise UsageError(f"{folder} is given twice: name each run folder once")
        run = read_run(folder)
        if not run.rows:
            raise UsageError(f"{folder} has no finished step yet: metrics.jsonl is empty")
        runs[place] = run
    _check_tasks(list(runs.values()))
    groups, differing = group_runs(list(runs.values()))
    finals = [group.interval(reward_last) for group in groups]
    best = max((final.mean for final in finals if final is not None), default=None)
    target = None if best is None else TARGET_SHARE * best
    rows = [_row(group, groups[0], target) for group in groups]
    return Comparison(groups, differing, rows, target)


def group_runs(runs: Sequence[RunData]) -> tuple[list[RunGroup], list[str]]:
    """Groups of equal settings, and the dotted keys in which groups differ."""
    settings = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for values in settings for name in values))
    differing = [
        name
        for name in names
        if name not in WITHOUT_EFFECT
        and any(values.get(name) != settings[0].get(name) for values in settings)
    ]
    members: dict[str, dict[int, list[RunData]]] = {}
    chosen: dict[str, dict[str, Any]] = {}
    for run, values in zip(runs, settings, strict=True):
        own = {name: values.get(name) for name in differing}
        label = _label(own)
        chosen[label] = own
        members.setdefault(label, {}).setdefault(_seed(run), []).append(run)
    return [RunGroup(label, chosen[label], members[label]) for label in members], differing


def _seed(run: RunData) -> int:
    seed = run.config.get("seed", 0)
    if not isinstance(seed, int):
        raise UsageError(f"{run.path}: seed = {seed!r} in its config.toml is no whole number")
    return seed


def _settings(run: RunData) -> dict[str, Any]:
    """The config by dotted names; what is not set is not there."""
    flat: dict[str, Any] = {}
    for section, value in run.config.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": inner for key, inner in value.items()}
        else:
            flat[section] = value
    return flat


def _label(settings: Mapping[str, Any]) -> str:
    """`max_lag=8, mode=observe`; with the section where two keys share a name."""
    if not settings:
        return "all runs"
    names = [key.rpartition(".")[2] for key in settings]
    parts = []
    for key, value in settings.items():
        short = key.rpartition(".")[2]
        name = short if names.count(short) == 1 else key
        parts.append(f"{name}={'-' if value is None else value}")
    return ", ".join(parts)


def _check_tasks(runs: Sequence[RunData]) -> None:
    def task(run: RunData) -> dict[str, Any]:
        settings = _settings(run).items()
        return {k: v for k, v in settings if k.startswith("task.") and k not in TASK_WITHOUT_EFFECT}

    first = task(runs[0])
    for run in runs[1:]:
        own = task(run)
        for key in sorted(first.keys() | own.keys()):
            if first.get(key) != own.get(key):
                raise UsageError(
                    f"{runs[0].path} and {run.path} are of different tasks ({key} = "
                    f"{first.get(key)!r} and {own.get(key)!r}): their rewards do not compare; "
                    f"compare the runs of one task at a time"
                )


# ---- what is measured of a run ----


def reward_last(run: RunData) -> float | None:
    """Mean reward of the last tenth of the steps."""
    return last_tenth(run.column("reward/mean"))


def accuracy_last(run: RunData) -> float | None:
    """The last held-out accuracy."""
    return next(reversed(run.values("accuracy/eval")), None)


def has_collapsed(run: RunData) -> bool:
    """Whether the reward fell under half of its own peak and stayed."""
    return collapse_step(run.column("reward/mean")) is not None


def samples_per_step(run: RunData) -> int:
    """Completions that a step is trained on."""
    per_step = run.setting("rollout.group_size"), run.setting("rollout.groups_per_step")
    return math.prod(int(value) for value in per_step if value is not None)


def samples_to(target: float) -> Callable[[RunData], float | None]:
    """Completions until the smoothed reward is `target`; None if it never is."""

    def measure(run: RunData) -> float | None:
        steps = first_reach(run.column("reward/mean"), target)
        return None if steps is None else float(steps * samples_per_step(run))

    return measure


def seconds_to(target: float) -> Callable[[RunData], float | None]:
    """Wall-clock seconds until then."""

    def measure(run: RunData) -> float | None:
        steps = first_reach(run.column("reward/mean"), target)
        return None if steps is None else run.column("time/elapsed_s")[steps - 1]

    return measure


def mean_of(name: str) -> Callable[[RunData], float | None]:
    """Mean of a metric over the steps that have it."""
    return lambda run: mean(run.values(name))


def _row(group: RunGroup, first: RunGroup, target: float | None) -> GroupRow:
    reached = group.by_seed(samples_to(target)) if target is not None else {}
    return GroupRow(
        label=group.label,
        num_seeds=len(group.runs),
        num_runs=len(group.all_runs()),
        reward_last=group.interval(reward_last),
        difference=None
        if group is first
        else paired_difference(group.by_seed(reward_last), first.by_seed(reward_last)),
        accuracy=group.interval(accuracy_last),
        num_reached=len(reached),
        samples=interval(list(reached.values())) if reached else None,
        seconds=group.interval(seconds_to(target)) if target is not None else None,
        num_collapsed=sum(has_collapsed(run) for run in group.all_runs()),
        cosine=group.interval(mean_of("align/cosine")),
        ess=group.interval(mean_of("ratio/ess")),
        lag=group.interval(mean_of("lag/mean")),
        tokens_per_s=group.interval(mean_of("tokens/s")),
    )
