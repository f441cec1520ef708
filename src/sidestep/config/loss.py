"""The `[loss]` section: names and settings of `sidestep.losses`, which this package cannot import.

`tests/config/test_config_losses.py` keeps both equal. A setting that is None has the default of its
loss or correction; where that comes from: docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from sidestep.config.section import Section

Policy = Literal[
    "ppo", "dual_clip", "gspo", "sapo", "cispo", "dis", "dppo_tv", "topr", "m2po", "bapo"
]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
Anchor = Literal["behaviour", "proximal", "loglinear", "recomputed"]
Correction = Literal["none", "importance", "tis", "icepop", "sequence_mis", "geometric", "opsm"]
# Not strict: TOML has lists, no tuples.
Corrections = Annotated[tuple[Correction, ...], Field(strict=False, min_length=1)]
KLEstimate = Literal["k1", "k2", "k3"]

# What can be set of a policy loss or a correction, by its name there. Losses not listed: nothing.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "ppo": ("clip_low", "clip_high"),
    "dual_clip": ("clip_low", "clip_high", "dual_clip"),
    "gspo": ("clip_low", "clip_high"),
    "sapo": ("tau_positive", "tau_negative"),
    "cispo": ("cap",),
    "dis": ("clip_low", "clip_high"),
    "dppo_tv": ("delta",),
    "m2po": ("tau",),
    "bapo": (
        "positive_share",
        "low_start",
        "low_stop",
        "low_step",
        "high_start",
        "high_stop",
        "high_step",
    ),
    "importance": ("cap",),
    "tis": ("cap",),
    "icepop": ("low", "high"),
    "sequence_mis": ("low", "high"),
    "geometric": ("low", "high"),
    "opsm": ("delta",),
}


def option_key(owner: str, option: str) -> str:
    """The key of an option of a loss in `[loss]`: `tis_cap`; clips have one for all losses."""
    return option if option in ("clip_low", "clip_high", "dual_clip") else f"{owner}_{option}"


class LossConfig(Section):
    """The policy-gradient loss. Equations: docs/losses.md."""

    policy: Policy = Field("ppo", description="loss per token")
    advantage: Advantage = Field("grpo", description="the baseline of a reward")
    anchor: Anchor = Field(
        "behaviour",
        description="log-probabilities the ratio is taken to; "
        "recomputed: the current ones, ratio always 1",
    )
    correction: Correction | Corrections = Field(
        "none", description="weight or filter for stale data; a list combines several"
    )
    aggregation: Literal["token", "sequence", "constant"] = "token"
    kl_coef: float = Field(
        0.0, ge=0.0, description="of the KL penalty to the reference model; 0: no such model"
    )
    kl_place: Literal["loss", "reward"] = "loss"
    kl_estimate: KLEstimate | None = Field(
        None, description="absent: k3 in the loss, k1 in the reward"
    )
    clip_low: float | None = Field(
        None, gt=0.0, lt=1.0, description="of ppo, dual_clip, gspo and dis; absent: its own default"
    )
    clip_high: float | None = Field(None, gt=0.0, description="as clip_low")
    dual_clip: float | None = None
    sapo_tau_positive: float | None = None
    sapo_tau_negative: float | None = None
    cispo_cap: float | None = None
    dppo_tv_delta: float | None = None
    m2po_tau: float | None = None
    bapo_positive_share: float | None = None
    bapo_low_start: float | None = None
    bapo_low_stop: float | None = None
    bapo_low_step: float | None = None
    bapo_high_start: float | None = None
    bapo_high_stop: float | None = None
    bapo_high_step: float | None = None
    importance_cap: float | None = None
    tis_cap: float | None = None
    icepop_low: float | None = None
    icepop_high: float | None = None
    sequence_mis_low: float | None = None
    sequence_mis_high: float | None = None
    geometric_low: float | None = None
    geometric_high: float | None = None
    opsm_delta: float | None = None

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections by name, one or several."""
        return (self.correction,) if isinstance(self.correction, str) else self.correction

    @property
    def kl_estimator(self) -> KLEstimate:
        """The estimate of the KL penalty: as set, else the one that fits its place."""
        return self.kl_estimate or ("k1" if self.kl_place == "reward" else "k3")

    def options_of(self, owner: str) -> dict[str, float]:
        """What is set of the options of a policy loss or a correction, by their names there."""
        values = {
            option: getattr(self, option_key(owner, option)) for option in OPTIONS.get(owner, ())
        }
        return {option: value for option, value in values.items() if value is not None}
