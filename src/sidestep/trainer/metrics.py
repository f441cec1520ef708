"""From what a step did to the rows of metrics.jsonl and groups.jsonl. Names and units:
diagnostics/metrics.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sidestep.trainer.step import StepReport, mean_lag
from sidestep.types import Group

TEXTS_KEPT = 2  # completions of a group whose text goes into groups.jsonl


class Timings:
    """Seconds by name since the last `collect`. Names are metric names without `time/`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def collect(self) -> dict[str, float]:
        collected, self._seconds = self._seconds, {}
        return {f"time/{name}": seconds for name, seconds in collected.items()}


def step_row(
    step: int,
    report: StepReport,
    groups: Sequence[Group],
    dropped: Sequence[Group],
    max_lag: int,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """One row of metrics.jsonl. `seconds` are the collected timings, `time/step_s` among them."""
    rewards = [reward for group in groups for reward in group.rewards]
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion.token_ids) for completion in completions]
    num_cut = sum(completion.finish_reason == "length" for completion in completions)
    num_trained = sum(report.lag_counts.values())
    num_dropped_tokens = sum(len(c.token_ids) for group in dropped for c in group.completions)
    control = report.control
    return {
        "step": step,
        "version": report.version,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "groups/equal_reward_fraction": statistics.fmean(
            len(set(group.rewards)) == 1 for group in groups
        ),
        "completion/length_mean": statistics.fmean(lengths),
        "completion/truncated_fraction": num_cut / len(completions),
        "accuracy/eval": None,
        "align/cosine": control and control.cosine,
        "align/cosine_applied": control and control.cosine_applied,
        "align/cosine_within_batch": control and control.cosine_within_batch,
        "align/regime": control.regime if control else "undefined",
        "align/reason": control.reason if control else "no trained token: no optimizer step",
        "align/skips_in_a_row": control and control.skips_in_a_row,
        "grad/norm_raw": control and control.norm_raw,
        "grad/norm_applied": control and control.norm_applied,
        "grad/clip_factor": control and control.clip_factor,
        "lag/mean": mean_lag(report.lag_counts) if num_trained else None,
        "lag/max": max(report.lag_counts, default=None),
        "lag/bound": max_lag,
        "lag/histogram": report.lag_counts,
        "ratio/ess": report.ratios.ess,
        "ratio/clip_fraction": report.ratios.clip_fraction,
        "ratio/kl_behaviour": report.ratios.kl_behaviour,
        "groups/trained": len(groups),
        "groups/dropped": len(dropped),
        "tokens/generated": sum(lengths) + num_dropped_tokens,
        "tokens/trained": num_trained,
        "samples/s": len(completions) / seconds["time/step_s"],
        "tokens/s": num_trained / seconds["time/step_s"],
        "time/generate_s": sum(group.generate_s for group in groups),
        "time/train_s": report.train_s,
        **seconds,
    }


def group_row(group: Group, step: int | None, dropped: str | None) -> dict[str, Any]:
    """One row of groups.jsonl: trained on in `step`, or dropped for a reason."""
    versions = [version for completion in group.completions for version in completion.versions]
    prompt = group.prompt.example.prompt
    return {
        "step": step,
        "index": group.index,
        "prompt_index": group.prompt.index,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "rewards": list(group.rewards),
        "lengths": [len(completion.token_ids) for completion in group.completions],
        "oldest_version": min(versions),
        "newest_version": max(versions),
        "completions": [completion.text for completion in group.completions[:TEXTS_KEPT]],
        "dropped": dropped,
    }
