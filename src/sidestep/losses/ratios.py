"""Ratios of two policies on the sampled tokens, and what they measure. _B sequences, _T tokens.

Two bounds, in this order: the log-ratio before exp (a gap of 100 would overflow to inf, and
bounding inf afterwards gives a NaN gradient), then the value of a KL estimate. Beyond either bound
the gradient is 0. Half-precision inputs are widened to float32 before anything is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    difference_BT = _wide(logprobs_BT) - _wide(anchor_logprobs_BT.detach())
    return _bound(torch.where(mask_BT != 0, difference_BT, 0.0))


def importance_ratio(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), the log-ratio bounded to +-20 first: between 2e-9 and 4.9e8."""
    return _bound(log_ratio_BT).exp()


def k1(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token, x sampled by p, from d = log p(x) - log q(x): d, bounded to +-10.

    Unbiased inside the bound; can be negative. Source: Schulman, "Approximating KL Divergence",
    joschu.net/blog/kl-approx.html (2020).
    """
    return _bound(log_ratio_BT).clamp(-MAX_KL, MAX_KL)


def k3(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """KL(p || q) per token, x sampled by p, from d = log p(x) - log q(x): exp(-d) - 1 + d <= 10.

    Unbiased inside the bounds, never negative. For a penalty towards a reference model p is the
    trained policy and q the reference. Source: as `k1`.
    """
    d_BT = _bound(log_ratio_BT)
    # expm1 keeps the digits (and the sign) that exp(-d) - 1 loses near 0, where a healthy run is.
    return (torch.expm1(-d_BT) + d_BT).clamp(max=MAX_KL)


def effective_sample_size_fraction(ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (N sum w^2) over the N trained tokens: 1 for equal weights, 1/N if one has all.

    A scalar without gradient; 0 if there is no trained token or every weight is 0.
    """
    weights = _wide(ratio_BT.detach())[mask_BT != 0]
    if weights.numel() == 0:
        return weights.new_zeros(())
    # Dividing by the largest changes nothing in the fraction and keeps the squares inside float32.
    scaled = weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)
    squares = scaled.square().sum()
    return torch.where(squares > 0, scaled.sum().square() / (weights.numel() * squares), 0.0)


@dataclass(frozen=True, slots=True)
class RatioSums:
    """Sums over trained tokens behind the ratio/* metrics; `a + b` is that of both together.

    rho = pi_theta / pi_mu (current over behaviour), bounded. Without a token the metrics are None.
    """

    num_tokens: int = 0
    num_clipped: int = 0
    sum_rho: float = 0.0
    sum_rho_squared: float = 0.0
    sum_drift: float = 0.0
    sum_kl: float = 0.0

    def __add__(self, other: RatioSums) -> RatioSums:
        return RatioSums(
            num_tokens=self.num_tokens + other.num_tokens,
            num_clipped=self.num_clipped + other.num_clipped,
            sum_rho=self.sum_rho + other.sum_rho,
            sum_rho_squared=self.sum_rho_squared + other.sum_rho_squared,
            sum_drift=self.sum_drift + other.sum_drift,
            sum_kl=self.sum_kl + other.sum_kl,
        )

    @property
    def ess(self) -> float | None:
        """Effective sample size as a share of the N tokens: (sum rho)^2 / (N sum rho^2)."""
        return self._mean(self.sum_rho**2 / self.sum_rho_squared) if self.num_tokens else None

    @property
    def clip_fraction(self) -> float | None:
        """Share of trained tokens whose gradient the clip cut."""
        return self._mean(self.num_clipped)

    @property
    def kl_behaviour(self) -> float | None:
        """KL(behaviour || current), nats per token: mean of rho - 1 - log rho, each at most 10."""
        return self._mean(self.sum_kl)

    @property
    def drift(self) -> float | None:
        """Mean of |rho - 1|: what `handle.note(drift=...)` asks for."""
        return self._mean(self.sum_drift)

    def _mean(self, total: float) -> float | None:
        return total / self.num_tokens if self.num_tokens else None


def ratio_sums(
    behaviour_log_ratio_BT: torch.Tensor, clipped_BT: torch.Tensor, mask_BT: torch.Tensor
) -> RatioSums:
    """The record of one micro-batch, summed in float64 on the CPU so that no device differs.

    behaviour_log_ratio_BT: log pi_theta - log pi_mu, whatever the anchor of the loss is.
    clipped_BT: True where the policy loss cuts the gradient (`clip_is_active`).
    A log-ratio of NaN at a trained position makes the sums NaN.
    """
    mask = mask_BT.cpu() != 0
    log_rho = _bound(behaviour_log_ratio_BT.detach().cpu().double()[mask])
    rho = log_rho.exp()
    return RatioSums(
        num_tokens=int(mask.sum()),
        num_clipped=int(clipped_BT.cpu()[mask].sum()),
        sum_rho=float(rho.sum()),
        sum_rho_squared=float(rho.square().sum()),
        sum_drift=float((rho - 1.0).abs().sum()),
        sum_kl=float(k3(-log_rho).sum()),
    )


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _bound(log_ratio: torch.Tensor) -> torch.Tensor:
    return _wide(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
