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


_OFF_POLICY: tuple[Metric, ...] = (
    Metric(
        "ratio/ess",
        "fraction",
        "effective sample size of the ratios current / behaviour over trained tokens: "
        "(sum w)^2 / (n sum w^2); 1 means on policy",
    ),
    Metric(
        "ratio/ess_sequences",
        "fraction",
        "the same of the products of the ratios over each sequence "
        "(`train.ess_learning_rate` reads it)",
    ),
    Metric(
        "ratio/clip_fraction",
        "fraction",
        "share of trained tokens at which the loss's own rule held the gradient back",
    ),
    Metric("ratio/clip_fraction_low", "fraction", "the part of it whose ratio was too small"),
    Metric("ratio/clip_fraction_high", "fraction", "the part of it whose ratio was too large"),
    Metric(
        "ratio/kl_behaviour",
        "nats",
        "KL divergence per token from the behaviour policy to the current one, "
        "estimated on the trained tokens (k3: never negative)",
    ),
    Metric("ratio/kl_behaviour_k1", "nats", "the same by k1: can be negative"),
    Metric(
        "ratio/chi_squared",
        "1",
        "mean of (ratio - 1)^2 over trained tokens: the variance of importance weights",
    ),
    Metric("ratio/drift", "1", "mean of abs(ratio - 1) over trained tokens"),
    Metric("ratio/q01", "1", "ratio below which 1 % of the trained tokens lie"),
    Metric("ratio/q10", "1", "the same for 10 %"),
    Metric("ratio/q50", "1", "the same for half of them"),
    Metric("ratio/q90", "1", "the same for 90 %"),
    Metric("ratio/q99", "1", "the same for 99 %"),
    Metric(
        "ratio/masked_fraction",
        "fraction",
        "share of trained tokens that a correction dropped; 1 means that nothing was left",
    ),
)

_EVALUATION: tuple[Metric, ...] = (
    Metric(
        "accuracy/eval",
        "fraction",
        "mean reward of one greedy answer to each held-out row with the weights after this step; "
        "null where the step was not evaluated",
    ),
    Metric("eval/length_mean", "tokens", "mean length of these answers, end token included"),
    Metric(
        "eval/truncated_fraction",
        "fraction",
        "share of these answers that were cut at `engine.max_new_tokens`",
    ),
    Metric(
        "eval/sampled_mean",
        "reward",
        "mean reward of `eval.samples` sampled answers to each held-out row; null without them",
    ),
    Metric(
        "eval/pass_at",
        "fraction",
        "chance that one of k sampled answers has a reward of at least `eval.pass_reward`, by k: "
        "without bias, 1 - C(n - c, k) / C(n, k) for c of n samples that pass; mean over rows",
        "mapping",
    ),
    Metric(
        "time/eval_s", "s", "time of the evaluation whose result is in this row; overlaps training"
    ),
)

EVALUATION: tuple[str, ...] = tuple(metric.name for metric in _EVALUATION)

METRICS: tuple[Metric, ...] = (
    Metric(
        "step", "steps", "which trainer iteration this row is about, from 0; skipped ones count"
    ),
    Metric(
        "version", "steps", "changes of the weights so far, this step's included; a skip is none"
    ),
    Metric("loss", "nats", "the loss that was differentiated, summed as `loss.aggregation` says"),
    Metric(
        "learning_rate", "1", "learning rate of this step's (last) optimizer step, before damping"
    ),
    # Rewards and completions
    Metric("reward/mean", "reward", "mean reward of the task over the completions of this step"),
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
        "reward/problems",
        "completions",
        "completions trained on whose reward could not be told and was taken as 0, by what was "
        "wrong: no answer found, a time limit",
        "mapping",
    ),
    # Evaluation
    *_EVALUATION,
    *(
        Metric(
            f"{metric.name}_start",
            metric.unit,
            f"`{metric.name}` with the weights before the first step; in the row of step 0 alone",
            metric.kind,
        )
        for metric in _EVALUATION
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
        "alignment of the last two optimizer steps that share one rollout batch: innocent, and "
        "never acted on",
    ),
    Metric("align/regime", "text", "pass, project, damp, skip or undefined", "text"),
    Metric(
        "align/decision",
        "text",
        "the regime that the measurement calls for: another one than `align/regime` only with "
        "`control.mode` = observe, which changes nothing",
        "text",
    ),
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
    Metric(
        "align/removed",
        "fraction",
        "share of the product of gradient and reference that was taken out; below 0 where the "
        "secant put something in",
    ),
    Metric(
        "align/curvature",
        "1 / weight^2",
        "curvature along the reference, with `control.strength` = secant",
    ),
    Metric(
        "align/expected",
        "cosine",
        "the cosine that fresh data would show, 2h / (1 + h) with h that of the two halves of this "
        "batch; null but every `control.expected_every` steps",
    ),
    Metric("align/excess", "cosine", "`align/cosine` minus `align/expected`"),
    Metric("alarm/level", "text", "ok, watch, or alarm: likely to collapse", "text"),
    Metric(
        "alarm/reason", "text", "the signs that the alarm's rule sees, with their limits", "text"
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
    Metric(
        "lag/bound",
        "versions",
        "largest lag that this run allows: `rollout.max_lag`, or more "
        "with several optimizer steps on a batch",
    ),
    Metric(
        "lag/histogram", "tokens", "trained tokens by lag: an object whose keys are lags", "mapping"
    ),
    # Off-policy correction
    *_OFF_POLICY,
    *(
        Metric(
            f"{metric.name}_by_lag",
            metric.unit,
            f"`{metric.name}` by lag: an object whose keys are lag buckets",
            "mapping",
        )
        for metric in _OFF_POLICY
    ),
    Metric(
        "ratio/masked_tokens",
        "tokens",
        "trained tokens that a correction dropped, by reason",
        "mapping",
    ),
    Metric(
        "ratio/dropped_sequences",
        "sequences",
        "sequences of which a correction dropped every token, by reason",
        "mapping",
    ),
    Metric(
        "ratio/dropped_sequences_by_lag",
        "sequences",
        "the same by reason and lag bucket of the oldest token",
        "mapping",
    ),
    # Rounding, which is not lag: the same weights, another batch shape or precision
    Metric(
        "numerics/batch_shape_mean",
        "nats",
        "mean over one group's trained tokens of abs(log-probability in the step's batch minus "
        "that of the sequence alone): what the batch's shape does, every `train.numerics_every` "
        "steps",
    ),
    Metric("numerics/batch_shape_max", "nats", "the largest of these differences"),
    Metric(
        "numerics/precision_mean",
        "nats",
        "mean of abs(log-probability in the step's precision minus that in float32), both of the "
        "sequence alone",
    ),
    Metric("numerics/precision_max", "nats", "the largest of these differences"),
    Metric(
        "kl/reference",
        "nats",
        "KL penalty per token to the reference model by `loss.kl_estimate`, before `loss.kl_coef`; "
        "null without one in the loss",
    ),
    Metric(
        "reward/added",
        "reward",
        "what is added to the rewards before advantages, mean over trained completions: "
        "`overlong` (`task.overlong_tokens`), `kl` (`loss.kl_place`)",
        "mapping",
    ),
    # Work done
    Metric("groups/trained", "groups", "groups trained on in this step"),
    Metric("groups/dropped", "groups", "groups dropped since the row before"),
    Metric("groups/dropped_by_reason", "groups", "the same by reason", "mapping"),
    Metric(
        "groups/trained_by_difficulty",
        "groups",
        "groups trained on by mean reward: 0 (none right), quarters, 1 (all right)",
        "mapping",
    ),
    Metric("groups/dropped_by_difficulty", "groups", "groups dropped, by mean reward", "mapping"),
    Metric(
        "groups/trained_by_prompt_length",
        "groups",
        "groups trained on by tokens of the prompt",
        "mapping",
    ),
    Metric(
        "groups/dropped_by_prompt_length",
        "groups",
        "groups dropped, by tokens of the prompt",
        "mapping",
    ),
    Metric(
        "completion/untrained",
        "completions",
        "completions of the trained groups without a token in the loss, by reason: "
        "truncated (`rollout.mask_truncated`), empty",
        "mapping",
    ),
    Metric(
        "train/optimizer_steps", "steps", "optimizer steps on this step's rollout batch, skips too"
    ),
    Metric(
        "tokens/generated",
        "tokens",
        "completion tokens of the groups that reached this step or were dropped",
    ),
    Metric("tokens/trained", "tokens", "completion tokens in this step's loss"),
    Metric(
        "tokens/computed",
        "tokens",
        "positions that a pass over the batch computes: prompts (once per packed row) and padding "
        "too",
    ),
    Metric("tokens/padding_fraction", "fraction", "the share of them that is padding"),
    Metric(
        "memory/trainer_peak_bytes",
        "bytes",
        "largest resident size of the trainer's process since it started",
    ),
    Metric(
        "memory/device_peak_bytes",
        "bytes",
        "largest memory that torch held on the trainer's CUDA device; null elsewhere",
    ),
    Metric("samples/s", "samples/s", "completions trained on per second of `time/step_s`"),
    Metric("tokens/s", "tokens/s", "tokens trained on per second of `time/step_s`"),
    # Time
    Metric(
        "time/step_s", "s", "wall-clock time from the end of the step before to the end of this one"
    ),
    Metric(
        "time/generate_s", "s", "time the engine sampled for this step's groups; overlaps training"
    ),
    Metric(
        "time/reward_s",
        "s",
        "time spent scoring completions since the row before; overlaps training",
    ),
    Metric("time/train_s", "s", "time of loss, backward, control and optimizer"),
    Metric(
        "time/train_cpu_s",
        "s",
        "CPU time of it, all threads together: steadier on a busy machine",
    ),
    Metric(
        "time/cpu_s",
        "s",
        "CPU time of the trainer's process, all threads together, in `time/step_s`; a GPU's and "
        "an engine process's time is not in it",
    ),
    Metric("time/wait_for_groups_s", "s", "time the trainer waited for groups before this step"),
    Metric(
        "time/wait_for_places_s",
        "s",
        "time the rollout loop waited for a free place since the row before",
    ),
    Metric("time/weight_sync_s", "s", "time to publish this step's weights"),
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

REWARD_PART = Metric(
    "reward/<name>",
    "reward",
    "mean of the reward of that name (of `task.rewards`, or the task's own) before its weight",
)


def find_metric(name: str) -> Metric | None:
    """The metric of a name in metrics.jsonl; names of rewards are the task's."""
    part = REWARD_PART if name.startswith("reward/") else None
    return BY_NAME.get(name, part)


# Keys of groups.jsonl (written by trainer/metrics.py: group_row).
GROUP_KEYS: dict[str, str] = {
    "step": "step that trained on the group, from 0; null if it was dropped",
    "index": "number of the group in the order of admission, which its random numbers follow from",
    "prompt_index": "row of the task's data, from 0",
    "prompt": "the prompt: text, or the list of chat messages",
    "prompt_tokens": "its length in tokens",
    "rewards": "one reward per completion",
    "lengths": "tokens of each completion, end token included",
    "oldest_version": "smallest version that sampled one of its tokens",
    "newest_version": "largest such version",
    "completions": "text of the first two completions",
    "dropped": "why it was not trained on; null if it was",
}
