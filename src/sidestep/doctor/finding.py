"""A finding, and the table of all there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

# Everything `doctor` can find beyond the rules of `sidestep.config.rules`, which are errors too.
# code -> what happens, for docs/doctor.md.
CODES: Mapping[str, str] = {
    "dead_clip": "the anchor is the current policy: the ratio is always 1 and no clip or gate acts",
    "double_count": "staleness is counted twice: w on top of rho, or two weights",
    "correction_never_applied": "a filter reads w where w is always 1",
    "uncorrected": "the anchor leaves staleness to a weight, and nothing multiplies by it",
    "anchor_unused": "the loss divides by the behaviour policy; the anchor does nothing",
    "kl_without_gradient": "k1 in the loss pulls nowhere",
    "loss_setting": "a loss or correction refuses the value of its setting",
    "stacked_lag": "several optimizer steps on a batch add to `rollout.max_lag`",
    "aggregation": "a loss per sequence is averaged over tokens",
    "spread_weights": "weights per token are averaged over the sequence by a loss per sequence",
    "truncated_sampling": "top-p or top-k: samples are not of the distribution in the loss",
    "equal_rewards_likely": "many groups will have equal rewards and teach nothing",
    "dropped_signal": "groups are dropped that the advantage could learn from",
    "reward_scale": "advantages have the scale of the reward, and so has the learning rate",
    "token_budget": "the context leaves little or nothing for prompts",
    "learning_rate_lag": "the learning rate is large for the lag",
    "bfloat16_logprobs": "rounding makes ratios of an unchanged policy differ from 1",
    "bfloat16_updates": "most updates are smaller than what bfloat16 weights can take up",
    "control_snapshot": "the cosine depends on what control did before",
    "control_overridden": "SIDESTEP_MODE overrides `control.mode`",
    "threads_oversubscribed": "two processes have more threads than there are cores",
    "threads_spin": "idle OpenMP threads spin and take the cores from the other process",
    "missing_extra": "an optional package that the config asks for is not installed",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    code: stable, for tests and scripts. keys: config keys or environment variables it is about.
    message: what happens, one line. fix: what to set instead.
    """

    code: str
    severity: Literal["error", "warning"]
    keys: tuple[str, ...]
    message: str
    fix: str

    @property
    def line(self) -> str:
        return f"{self.message} ({self.fix})"

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)


def warning(code: str, keys: tuple[str, ...], message: str, fix: str) -> Finding:
    return Finding(code, "warning", keys, message, fix)
