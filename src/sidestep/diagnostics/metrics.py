"""Every name that may appear in metrics.jsonl: its unit, its type and what it means. The one home
of these facts.

`python -m sidestep.diagnostics.metrics` prints the page docs/metrics.md. A test keeps the two
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "text", "mapping", "names"]

KIND_IN_WORDS: dict[Kind, str] = {
    "number": "a number",
    "text": "a text",
    "mapping": "a mapping to finite numbers",
    "names": "a list of metric names",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One name of metrics.jsonl. Of whatever kind: null means that the step has no value."""

    name: str
    unit: str
    meaning: str
    kind: Kind = "number"


METRICS: tuple[Metric, ...] = (
    Metric(
        "step", "steps", "which trainer iteration this row is about, from 0; skipped ones count"
    ),
    Metric(
        "version", "steps", "changes of the weights so far, this step's included; a skip is none"
    ),
    Metric("loss", "nats", "the loss that was differentiated, summed as `loss.aggregation` says"),
    Metric("learning_rate", "1", "learning rate of this step's optimizer, before damping"),
    # Rewards and completions
    Metric("reward/mean", "reward", "mean reward over the completions of this step"),
    Metric("reward/std", "reward", "standard deviation of the reward over the completions"),
    Metric(
        "groups/equal_reward_fraction",
        "fraction",
        "share of this step's groups whose rewards are all equal: "
        "they carry no group-normalised advantage",
    ),
    Metric(
        "completion/length_mean", "tokens", "mean length of the completions, end token included"
    ),
    Metric(
        "completion/truncated_fraction",
        "fraction",
        "share of the completions that were cut at `engine.max_new_tokens`",
    ),
    Metric(
        "accuracy/eval",
        "fraction",
        "mean reward of one greedy answer to each held-out row with the weights after this step; "
        "null where the step was not evaluated",
    ),
    # Alignment of updates and what the control did
    Metric(
        "align/cosine",
        "cosine",
        "cosine between this step's raw gradient and the reference (the previous gradient, "
        "unless told otherwise); above 0 means: continues the same way",
    ),
    Metric(
        "align/cosine_applied",
        "cosine",
        "the same after control, against the same reference; null on a skip",
    ),
    Metric(
        "align/cosine_within_batch",
        "cosine",
        "alignment of optimizer steps that share one rollout batch: innocent, and never acted on",
    ),
    Metric("align/regime", "text", "pass, project, damp, skip or undefined", "text"),
    Metric(
        "align/reason",
        "text",
        "why the regime is what it is; null where the cosine says it all",
        "text",
    ),
    Metric(
        "align/skips_in_a_row",
        "steps",
        "skipped steps up to and with this one, since the last change",
    ),
    Metric("grad/norm_raw", "1", "length of the gradient before control and clipping"),
    Metric("grad/norm_applied", "1", "length of the gradient after control, before clipping"),
    Metric(
        "grad/clip_factor", "1", "what clipping multiplied the gradient with; 1 means not clipped"
    ),
    # Lag
    Metric(
        "lag/mean",
        "versions",
        "mean over trained tokens: trainer's version minus the token's version",
    ),
    Metric("lag/max", "versions", "largest lag of a trained token"),
    Metric("lag/bound", "versions", "largest lag that this run allows (`rollout.max_lag`)"),
    Metric(
        "lag/histogram", "tokens", "trained tokens by lag: an object whose keys are lags", "mapping"
    ),
    # Off-policy correction
    Metric(
        "ratio/ess",
        "fraction",
        "effective sample size of the ratios current / behaviour over trained tokens: "
        "(sum w)^2 / (n sum w^2); 1 means on policy",
    ),
    Metric(
        "ratio/clip_fraction",
        "fraction",
        "share of trained tokens at which the clip cut the gradient",
    ),
    Metric(
        "ratio/kl_behaviour",
        "nats",
        "KL divergence per token from the behaviour policy to the current one, "
        "estimated on the trained tokens",
    ),
    # Work done
    Metric("groups/trained", "groups", "groups trained on in this step"),
    Metric("groups/dropped", "groups", "groups dropped since the row before"),
    Metric(
        "tokens/generated",
        "tokens",
        "completion tokens of the groups that reached this step or were dropped",
    ),
    Metric("tokens/trained", "tokens", "completion tokens in this step's loss"),
    Metric("samples/s", "samples/s", "completions trained on per second of `time/step_s`"),
    Metric("tokens/s", "tokens/s", "tokens trained on per second of `time/step_s`"),
    # Time
    Metric(
        "time/step_s", "s", "wall-clock time from the end of the step before to the end of this one"
    ),
    Metric(
        "time/generate_s", "s", "time the engine sampled for this step's groups; overlaps training"
    ),
    Metric("time/reward_s", "s", "time spent scoring this step's completions; overlaps training"),
    Metric("time/train_s", "s", "time of loss, backward, control and optimizer"),
    Metric("time/wait_for_groups_s", "s", "time the trainer waited for groups before this step"),
    Metric(
        "time/wait_for_places_s",
        "s",
        "time the rollout loop waited for a free place since the row before",
    ),
    Metric("time/weight_sync_s", "s", "time to publish this step's weights"),
    Metric(
        "time/eval_s", "s", "time of the evaluation whose result is in this row; overlaps training"
    ),
    Metric(
        "time/elapsed_s", "s", "wall-clock time since the run started, earlier sessions included"
    ),
    # Written by the recorder itself
    Metric(
        "not_finite",
        "text",
        "names of metrics that were NaN or infinite in this step: JSON has no such numbers, "
        "so they read null; absent when there are none",
        "names",
    ),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}

_INTRODUCTION = """\
# Metrics

<!-- Generated: .venv/bin/python -m sidestep.diagnostics.metrics > docs/metrics.md -->

What each name in a run folder's `metrics.jsonl` means. The file has one JSON object a step, in
order, and every line is valid JSON. `null` means that the step has no value. The numbers are in the
TensorBoard files too, under the same names. *Lag* is counted in versions, that is in changes of the
weights, and over tokens.

| name | unit | meaning |
|---|---|---|
"""


def metrics_page() -> str:
    """The Markdown text of docs/metrics.md."""
    lines = (f"| `{metric.name}` | {metric.unit} | {metric.meaning} |\n" for metric in METRICS)
    return _INTRODUCTION + "".join(lines)


if __name__ == "__main__":
    print(metrics_page(), end="")
