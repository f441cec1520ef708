"""Ratios of two policies on the sampled tokens, and what they measure. _B sequences, _T tokens.

Two bounds, in this order: the log-ratio before exp (a gap of 100 would overflow to inf, and
bounding inf afterwards gives a NaN gradient), then the value of a KL estimate. Beyond either bound
the gradient is 0.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def bounded_log_ratio(
    logprobs_BT: torch.Tensor, anchor_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """clamp(logprobs - anchor, -20, 20) in float32, and 0 where mask_BT is 0.

    Gradient goes to `logprobs_BT` only. What stands at masked positions (-inf, NaN) reaches neither
    value nor gradient; a NaN at a trained position stays NaN, so that it cannot pass unseen.
    Both sides must be at the same temperature and over the same tokens.
    Raises ValueError if shapes differ.
    """
    if not logprobs_BT.shape == anchor_logprobs_BT.shape == mask_BT.shape:
        raise ValueError(
            f"logprobs_BT {tuple(logprobs_BT.shape)}, anchor_logprobs_BT "
            f"{tuple(anchor_logprobs_BT.shape)} and mask_BT {tuple(mask_BT.shape)} must have one "
            f"shape"
        )
    difference_BT = widened(logprobs_BT) - widened(anchor_logprobs_BT.detach())
    return bounded(torch.where(mask_BT != 0, difference_BT, 0.0))


def importance_ratio(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), the log-ratio bounded to +-20 first: between 2e-9 and 4.9e8."""
    return bounded(log_ratio_BT).exp()


def k1(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token, x sampled by p, from d = log p(x) - log q(x): d, bounded to +-10.

    Unbiased inside the bound; can be negative. Source: Schulman, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html (2020).
    """
    return bounded(log_ratio_BT).clamp(-MAX_KL, MAX_KL)


def k2(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token, x sampled by p, from d = log p(x) - log q(x): d^2 / 2 <= 10.

    Biased (it is never negative), but as a loss its gradient is that of the divergence. Source: as
    `k1`.
    """
    return (bounded(log_ratio_BT).square() / 2.0).clamp(max=MAX_KL)


def k3(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token, x sampled by p, from d = log p(x) - log q(x): exp(-d) - 1 + d <= 10.

    Unbiased inside the bounds, never negative. For a penalty towards a reference model p is the
    trained policy and q the reference. Source: as `k1`.
    """
    d_BT = bounded(log_ratio_BT)
    # expm1 keeps the digits (and the sign) that exp(-d) - 1 loses near 0, where a healthy run is.
    return (torch.expm1(-d_BT) + d_BT).clamp(max=MAX_KL)


def effective_sample_size_fraction(ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (N sum w^2) over the N trained tokens: 1 for equal weights, 1/N if one has all.

    A scalar without gradient; 0 if there is no trained token or every weight is 0.
    """
    weights = widened(ratio_BT.detach())[mask_BT != 0]
    if weights.numel() == 0:
        return weights.new_zeros(())
    # Dividing by the largest changes nothing in the fraction and keeps the squares inside float32.
    scaled = weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    squares = scaled.square().sum()
    return torch.where(squares > 0, scaled.sum().square() / (weights.numel() * squares), 0.0)


def widened(values: torch.Tensor) -> torch.Tensor:
    """At least float32: half precision is widened before anything is subtracted."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """clamp(log_ratio, -20, 20), at least float32. Always before exp."""
    return widened(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
