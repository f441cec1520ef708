"""What the ratio is taken to: one function per anchor. _B sequences, _T tokens.

`loss.anchor` in a recipe names one. An anchor is a constant: no gradient flows into it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from sidestep.losses.ratios import widened

Anchor = Literal["behaviour", "proximal", "loglinear", "recomputed"]


def behaviour_anchor(behaviour_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi_mu, as the engine reported it with the token: the ratio is pi_theta / pi_mu.

    That ratio is the whole correction for stale data: a weight pi_p / pi_mu on top counts it twice.
    """
    return behaviour_logprobs_BT.detach()


def proximal_anchor(proximal_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi_p of a forward pass before the first optimizer step on the batch (decoupled PPO).

    The clip bounds the steps taken on this batch; the staleness before them is in w = pi_p / pi_mu,
    which a correction must apply. With one step a batch the ratio is always 1.
    Source: arXiv 2505.24298.
    """
    return proximal_logprobs_BT.detach()


def loglinear_anchor(
    logprobs_BT: torch.Tensor, behaviour_logprobs_BT: torch.Tensor, lag_BT: torch.Tensor
) -> torch.Tensor:
    """log p = a log mu + (1 - a) sg(log theta), a = 1 / lag, and 1 at lag 0: no forward pass.

    lag_BT: the trainer's version minus the token's. r = rho^a and w = rho^(1 - a): at lag 0 and 1
    this is the behaviour anchor, at a long lag the current policy.
    Source: A-3PO, arXiv 2512.06547.
    """
    behaviour_BT = widened(behaviour_logprobs_BT.detach())
    share_BT = 1.0 - 1.0 / lag_BT.to(behaviour_BT.dtype).clamp(min=1.0)
    # As a step from mu: exact where theta equals mu, whatever the lag.
    return behaviour_BT + share_BT * (widened(logprobs_BT.detach()) - behaviour_BT)


def recomputed_anchor(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi_theta of this very forward pass, "naive asynchrony": the ratio is exactly 1.

    So no clip ever acts, and without a correction the gradient is -A grad log pi_theta, blind to
    stale data.
    """
    return logprobs_BT.detach()


def anchor_logprobs(
    anchor: Anchor,
    logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    *,
    proximal_logprobs_BT: torch.Tensor | None = None,
    lag_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities of the anchor of that name.

    Raises ValueError for an unknown name, for "proximal" without proximal_logprobs_BT and for
    "loglinear" without lag_BT.
    """
    if anchor == "behaviour":
        return behaviour_anchor(behaviour_logprobs_BT)
    if anchor == "recomputed":
        return recomputed_anchor(logprobs_BT)
    if anchor == "proximal":
        if proximal_logprobs_BT is None:
            raise ValueError("anchor 'proximal' needs proximal_logprobs_BT: a forward pass before")
        return proximal_anchor(proximal_logprobs_BT)
    if anchor == "loglinear":
        if lag_BT is None:
            raise ValueError("anchor 'loglinear' needs lag_BT: trainer's version minus the token's")
        return loglinear_anchor(logprobs_BT, behaviour_logprobs_BT, lag_BT)
    raise ValueError(f"anchor is {anchor!r}: it must be one of {', '.join(get_args(Anchor))}")
