"""What the ratio is taken to: one function per anchor. _B sequences, _T tokens.

`loss.anchor` in a recipe names one. An anchor is a constant: no gradient flows into it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

Anchor = Literal["behaviour", "recomputed"]


def behaviour_anchor(behaviour_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi_mu, as the engine reported it with the token: the ratio is pi_theta / pi_mu.

    That ratio is the whole correction for stale data: a weight pi_p / pi_mu on top counts it twice.
    """
    return behaviour_logprobs_BT.detach()


def recomputed_anchor(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi_theta of this very forward pass, "naive asynchrony": the ratio is exactly 1.

    So no clip ever acts, and the gradient is -A grad log pi_theta without any correction for stale
    data. It is here to show what that does.
    """
    return logprobs_BT.detach()


def anchor_logprobs(
    anchor: Anchor, logprobs_BT: torch.Tensor, behaviour_logprobs_BT: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of the anchor of that name. Raises ValueError for an unknown name."""
    if anchor == "behaviour":
        return behaviour_anchor(behaviour_logprobs_BT)
    if anchor == "recomputed":
        return recomputed_anchor(logprobs_BT)
    raise ValueError(f"anchor is {anchor!r}: it must be one of {', '.join(get_args(Anchor))}")
