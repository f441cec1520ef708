"""Clipped policy losses on the ratio r = pi_theta / pi_p. _B sequences, _T tokens.

Every policy loss of this package is a function (inputs, options) -> PolicyTerm: loss per token, and
where the loss's own rule acts. `registry.POLICIES` has them by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestep.losses.inputs import PolicyInputs, PolicyTerm, row_mean
from sidestep.losses.options import option, require_above
from sidestep.losses.ratios import importance_ratio

PPO_SOURCE = "arXiv 1707.06347; symmetric"
GSPO_SOURCE = "arXiv 2507.18071"


@dataclass(frozen=True, slots=True)
class PPOOptions:
    clip_low: float = option(0.2, "ratios stop at 1 - clip_low", PPO_SOURCE)
    clip_high: float = option(0.2, "ratios stop at 1 + clip_high", PPO_SOURCE)

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class DualClipOptions:
    clip_low: float = option(0.2, "ratios stop at 1 - clip_low", PPO_SOURCE)
    clip_high: float = option(0.2, "ratios stop at 1 + clip_high", PPO_SOURCE)
    dual_clip: float = option(3.0, "for A < 0 the loss stops at -dual_clip * A", "arXiv 1912.09729")

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        require_above("dual_clip", self.dual_clip, 1.0)


@dataclass(frozen=True, slots=True)
class GSPOOptions:
    clip_low: float = option(3e-4, "sequence ratios stop at 1 - clip_low", GSPO_SOURCE)
    clip_high: float = option(4e-4, "sequence ratios stop at 1 + clip_high", GSPO_SOURCE)

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)


def ppo_objective(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): loss_BT, to be minimised.

    The gradient is -r A grad log pi_theta, and 0 where the clip is active (`clip_is_active`): once
    a token has moved far enough in the direction its advantage asks for, it is left alone; the way
    back is always open.
    Raises ValueError unless 0 < clip_low < 1 and clip_high > 0.
    Source: PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476.
    """
    check_clip(clip_low, clip_high)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def clip_is_active(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """True where `ppo_objective` cuts the gradient.

    A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. Raises ValueError like it.
    """
    check_clip(clip_low, clip_high)
    below_BT, above_BT = clip_sides(ratio_BT, advantages_BT, 1.0 - clip_low, 1.0 + clip_high)
    return below_BT | above_BT


def clip_sides(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a clip to [low, high] cuts the gradient: (A < 0 and r < low, A > 0 and r > high)."""
    return (advantages_BT < 0) & (ratio_BT < low), (advantages_BT > 0) & (ratio_BT > high)


def ppo(inputs: PolicyInputs, options: PPOOptions) -> PolicyTerm:
    """`ppo_objective` of r: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    ratio_BT, advantages_BT = importance_ratio(inputs.log_ratio()), inputs.advantages()
    loss_BT = ppo_objective(ratio_BT, advantages_BT, options.clip_low, options.clip_high)
    bounds = 1.0 - options.clip_low, 1.0 + options.clip_high
    return PolicyTerm(loss_BT, *clip_sides(ratio_BT.detach(), advantages_BT, *bounds))


def dual_clip(inputs: PolicyInputs, options: DualClipOptions) -> PolicyTerm:
    """PPO whose loss stops at -dual_clip A where A < 0.

    PPO bounds no loss where A < 0 and r is large; here that gradient ends at r = dual_clip (counted
    as the high side). For A >= 0 it is PPO.
    Source: arXiv 1912.09729.
    """
    ratio_BT, advantages_BT = importance_ratio(inputs.log_ratio()), inputs.advantages()
    loss_BT = ppo_objective(ratio_BT, advantages_BT, options.clip_low, options.clip_high)
    bounded_BT = torch.minimum(loss_BT, -options.dual_clip * advantages_BT)
    negative_BT = advantages_BT < 0
    bounds = 1.0 - options.clip_low, 1.0 + options.clip_high
    low_BT, high_BT = clip_sides(ratio_BT.detach(), advantages_BT, *bounds)
    dual_BT = negative_BT & (ratio_BT.detach() > options.dual_clip)
    return PolicyTerm(torch.where(negative_BT, bounded_BT, loss_BT), low_BT, high_BT | dual_BT)


def gspo(inputs: PolicyInputs, options: GSPOOptions) -> PolicyTerm:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the row of log r).

    Every token carries the loss of its whole sequence, so aggregation "sequence" gives the paper's
    mean over sequences. With one token a row it is PPO.
    Source: arXiv 2507.18071.
    """
    log_ratio_BT, advantages_BT = inputs.log_ratio(), inputs.advantages()
    ratio_B1 = importance_ratio(row_mean(log_ratio_BT, inputs.mask_BT))
    ratio_BT = ratio_B1.expand_as(log_ratio_BT)
    loss_BT = ppo_objective(ratio_BT, advantages_BT, options.clip_low, options.clip_high)
    bounds = 1.0 - options.clip_low, 1.0 + options.clip_high
    return PolicyTerm(loss_BT, *clip_sides(ratio_BT.detach(), advantages_BT, *bounds))


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless 0 < clip_low < 1 and clip_high > 0."""
    if not 0.0 < clip_low < 1.0:
        raise ValueError(
            f"clip_low is {clip_low!r}: it must be between 0 and 1 (ratios stop at 1 - clip_low)"
        )
    if not clip_high > 0.0:
        raise ValueError(
            f"clip_high is {clip_high!r}: it must be above 0 (ratios stop at 1 + clip_high)"
        )
