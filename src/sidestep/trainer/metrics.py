"""From what a step did to the rows of metrics.jsonl and groups.jsonl. Names and units:
diagnostics/metrics.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sidestep.diagnostics.metrics import EVALUATION
from sidestep.losses import LagTable, OffPolicySums
from sidestep.trainer.accounting import group_counts
from sidestep.trainer.scoring import reward_metrics
from sidestep.trainer.step import StepReport, mean_lag
from sidestep.types import Group

TEXTS_KEPT = 2  # completions of a group whose text goes into groups.jsonl

# What is measured about trained tokens, in total and by lag bucket. Names are metric names.
OFF_POLICY: Mapping[str, Callable[[OffPolicySums], float | None]] = {
    "ratio/ess": lambda sums: sums.ratios.ess,
    "ratio/ess_sequences": lambda sums: sums.sequences.ess,
    "ratio/clip_fraction": lambda sums: sums.ratios.clip_fraction,
    "ratio/clip_fraction_low": lambda sums: sums.ratios.clip_fraction_low,
    "ratio/clip_fraction_high": lambda sums: sums.ratios.clip_fraction_high,
    "ratio/kl_behaviour": lambda sums: sums.ratios.kl_behaviour,
    "ratio/kl_behaviour_k1": lambda sums: sums.ratios.kl_behaviour_k1,
    "ratio/chi_squared": lambda sums: sums.ratios.chi_squared,
    "ratio/drift": lambda sums: sums.ratios.drift,
    "ratio/q01": lambda sums: sums.ratio_quantile(0.01),
    "ratio/q10": lambda sums: sums.ratio_quantile(0.1),
    "ratio/q50": lambda sums: sums.ratio_quantile(0.5),
    "ratio/q90": lambda sums: sums.ratio_quantile(0.9),
    "ratio/q99": lambda sums: sums.ratio_quantile(0.99),
    "ratio/masked_fraction": lambda sums: sums.masked_fraction,
}


# Measured every `train.numerics_every` steps; a row has no value in between.
NUMERICS = (
    "numerics/batch_shape_mean",
    "numerics/batch_shape_max",
    "numerics/precision_mean",
    "numerics/precision_max",
)


class Timings:
    """Seconds by name since the last `collect`. Names are metric names without `time/`."""

    NAMES = (
        "step_s",
        "cpu_s",
        "reward_s",
        "wait_for_groups_s",
        "wait_for_places_s",
        "weight_sync_s",
    )

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(self.NAMES, 0.0)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] += seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def collect(self) -> dict[str, float]:
        collected, self._seconds = self._seconds, dict.fromkeys(self.NAMES, 0.0)
        return {f"time/{name}": seconds for name, seconds in collected.items()}


def step_row(
    step: int,
    report: StepReport,
    groups: Sequence[Group],
    dropped: Sequence[Group],
    max_lag: int,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """One row of metrics.jsonl. `seconds` are the collected timings, `time/step_s` among them.

    max_lag: in steps, as `rollout.max_lag`.
    """
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    num_cut = sum(completion.finish_reason == "length" for completion in completions)
    num_trained = sum(report.lag_counts.values())
    num_dropped_tokens = sum(len(c.token_ids) for group in dropped for c in group.completions)
    control, last = report.control, report.last_control
    # Each step before may have added as many versions, and each optimizer step of this one more.
    bound = (max_lag + 1) * report.num_optimizer_steps - 1
    return {
        "step": step,
        "version": report.version,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        **reward_metrics(groups),
        "groups/equal_reward_fraction": statistics.fmean(
            len(set(group.rewards)) == 1 for group in groups
        ),
        "completion/length_mean": statistics.fmean(lengths),
        "completion/truncated_fraction": num_cut / len(completions),
        **dict.fromkeys(EVALUATION),
        "align/cosine": control and control.cosine,
        "align/cosine_applied": control and control.cosine_applied,
        "align/cosine_within_batch": last and last.cosine_within_batch,
        "align/regime": control.regime if control else "undefined",
        "align/decision": control and control.decision,
        "align/reason": control.reason if control else "no trained token: no optimizer step",
        "align/skips_in_a_row": control and control.skips_in_a_row,
        "align/removed": control and control.removed,
        "align/curvature": control and control.curvature,
        "align/expected": control and control.expected,
        "align/excess": control and control.excess,
        "alarm/level": report.alarm and report.alarm.level,
        "alarm/reason": report.alarm and (report.alarm.reason or None),
        "grad/norm_raw": control and control.norm_gradient,
        "grad/norm_applied": control and control.norm_applied,
        "grad/clip_factor": control and control.clip_factor,
        "lag/mean": mean_lag(report.lag_counts) if num_trained else None,
        "lag/max": max(report.lag_counts, default=None),
        "lag/bound": bound,
        "lag/histogram": report.lag_counts,
        **off_policy_metrics(report.off_policy),
        "kl/reference": report.kl_reference,
        "reward/added": report.added_to_reward,
        "train/optimizer_steps": report.num_optimizer_steps,
        "groups/trained": len(groups),
        "groups/dropped": len(dropped),
        **group_counts(groups, dropped),
        "completion/untrained": report.untrained,
        "tokens/generated": sum(lengths) + num_dropped_tokens,
        "tokens/trained": num_trained,
        **dict.fromkeys(NUMERICS),
        **report.numerics,
        **report.work,
        "samples/s": len(completions) / seconds["time/step_s"],
        "tokens/s": num_trained / seconds["time/step_s"],
        "time/generate_s": sum(group.generate_s for group in groups),
        "time/train_s": report.train_s,
        "time/train_cpu_s": report.train_cpu_s,
        **seconds,
    }


def off_policy_metrics(table: LagTable) -> dict[str, Any]:
    """The `ratio/*` metrics: over all trained tokens, and by lag bucket under `..._by_lag`."""
    total = table.total
    metrics: dict[str, Any] = {}
    for name, measure in OFF_POLICY.items():
        metrics[name] = measure(total)
        by_lag = {bucket: measure(sums) for bucket, sums in table.by_lag.items()}
        # A bucket without sequences of its own has no value there; a mapping has finite numbers.
        metrics[f"{name}_by_lag"] = {
            bucket: value
            for bucket, value in by_lag.items()
            if value is not None and math.isfinite(value)
        }
    metrics["ratio/masked_tokens"] = dict(total.drops.tokens)
    metrics["ratio/dropped_sequences"] = dict(total.drops.sequences)
    metrics["ratio/dropped_sequences_by_lag"] = {
        f"{reason}, lag {bucket}": count
        for bucket, sums in table.by_lag.items()
        for reason, count in sums.drops.sequences.items()
        if count
    }
    return metrics


def group_row(group: Group, step: int | None, dropped: str | None) -> dict[str, Any]:
    """One row of groups.jsonl: trained on in `step`, or dropped for a reason."""
    versions = [version for completion in group.completions for version in completion.versions]
    prompt = group.prompt.example.prompt
    return {
        "step": step,
        "index": group.index,
        "prompt_index": group.prompt.index,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "prompt_tokens": len(group.prompt.token_ids),
        "rewards": list(group.rewards),
        "lengths": [len(completion.token_ids) for completion in group.completions],
        "oldest_version": min(versions),
        "newest_version": max(versions),
        "completions": [completion.text for completion in group.completions[:TEXTS_KEPT]],
        "dropped": dropped,
    }
