"""The policy term: loss per token from ratio and advantage. _B sequences, _T tokens."""

from __future__ import annotations

import torch


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
    _check(clip_low, clip_high)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def clip_is_active(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """True where `ppo_objective` cuts the gradient.

    A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low. Raises ValueError like it.
    """
    _check(clip_low, clip_high)
    above_BT = (advantages_BT > 0) & (ratio_BT > 1.0 + clip_high)
    below_BT = (advantages_BT < 0) & (ratio_BT < 1.0 - clip_low)
    return above_BT | below_BT


def _check(clip_low: float, clip_high: float) -> None:
    if not 0.0 < clip_low < 1.0:
        raise ValueError(
            f"clip_low is {clip_low!r}: it must be between 0 and 1 (ratios stop at 1 - clip_low)"
        )
    if not clip_high > 0.0:
        raise ValueError(
            f"clip_high is {clip_high!r}: it must be above 0 (ratios stop at 1 + clip_high)"
        )
