"""How far the trained data is from the current policy: sums per micro-batch that add up.

All about rho = pi_theta / pi_mu (current over behaviour) on trained tokens, whatever the anchor of
the loss is. Sums are in float64 on the CPU, so that no device differs.
_B sequences, _T tokens, _N trained tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch

from sidestep.losses.corrections import Correction
from sidestep.losses.histogram import count_log_ratios, quantile
from sidestep.losses.inputs import PolicyInputs, PolicyTerm
from sidestep.losses.ratios import bounded, k1, k3

# Upper ends of the lag buckets. Each is twice as wide as the one before: what matters about a lag
# is its order of magnitude, and a metric per lag would be a metric per `rollout.max_lag`.
_BUCKET_ENDS = (0, 1, 2, 4, 8, 16)
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")


class Additive:
    """A frozen record whose fields add: numbers, records, and counts by name."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        pairs = {
            entry.name: (getattr(self, entry.name), getattr(other, entry.name))
            for entry in fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        }
        return type(self)(**{name: _plus(*pair) for name, pair in pairs.items()})


@dataclass(frozen=True, slots=True)
class RatioSums(Additive):
    """Sums over trained tokens behind the ratio/* metrics; `a + b` is that of both together.

    rho = pi_theta / pi_mu (current over behaviour), bounded. Without a token the metrics are None.
    """

    num_tokens: int = 0
    num_clipped: int = 0
    sum_rho: float = 0.0
    sum_rho_squared: float = 0.0
    sum_drift: float = 0.0
    sum_kl: float = 0.0
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    sum_k1: float = 0.0
    sum_drift_squared: float = 0.0

    @property
    def ess(self) -> float | None:
        """Effective sample size as a share of the N tokens: (sum rho)^2 / (N sum rho^2)."""
        return self._mean(self.sum_rho**2 / self.sum_rho_squared) if self.num_tokens else None

    @property
    def clip_fraction(self) -> float | None:
        """Share of trained tokens whose gradient the loss's own rule held back."""
        return self._mean(self.num_clipped)

    @property
    def clip_fraction_low(self) -> float | None:
        """The part of `clip_fraction` whose ratio was too small."""
        return self._mean(self.num_clipped_low)

    @property
    def clip_fraction_high(self) -> float | None:
        """The part of `clip_fraction` whose ratio was too large."""
        return self._mean(self.num_clipped_high)

    @property
    def kl_behaviour(self) -> float | None:
        """KL(behaviour || current), nats per token: mean of rho - 1 - log rho, each at most 10."""
        return self._mean(self.sum_kl)

    @property
    def kl_behaviour_k1(self) -> float | None:
        """The same by k1: mean of -log rho, each within +-10. Can be negative."""
        return self._mean(self.sum_k1)

    @property
    def chi_squared(self) -> float | None:
        """chi^2(current || behaviour): mean of (rho - 1)^2, the variance of the weights."""
        return self._mean(self.sum_drift_squared)

    @property
    def drift(self) -> float | None:
        """Mean of |rho - 1|: what `handle.note(drift=...)` asks for."""
        return self._mean(self.sum_drift)

    def _mean(self, total: float) -> float | None:
        return total / self.num_tokens if self.num_tokens else None


@dataclass(frozen=True, slots=True)
class SequenceSums(Additive):
    """Sums over sequences of the product of rho over their trained tokens, bounded to e^+-20."""

    num_sequences: int = 0
    sum_rho: float = 0.0
    sum_rho_squared: float = 0.0

    @property
    def ess(self) -> float | None:
        """Effective sample size as a share of the sequences; None without any. VCPO reads it."""
        if not self.num_sequences:
            return None
        return self.sum_rho**2 / (self.num_sequences * self.sum_rho_squared)


@dataclass(frozen=True, slots=True)
class DropCounts(Additive):
    """What corrections dropped, by reason; something dropped for two reasons counts under both.

    A sequence is dropped for a reason if all its trained tokens are. num_tokens: dropped for any.
    """

    num_tokens: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    sequences: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OffPolicySums(Additive):
    """Everything about some tokens and sequences; `a + b` is that of both together."""

    ratios: RatioSums = RatioSums()
    sequences: SequenceSums = SequenceSums()
    drops: DropCounts = DropCounts()
    log_ratio_counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def masked_fraction(self) -> float | None:
        """Share of trained tokens that a correction dropped; 1.0 says that nothing was left."""
        num_tokens = self.ratios.num_tokens
        return self.drops.num_tokens / num_tokens if num_tokens else None

    def ratio_quantile(self, share: float) -> float | None:
        """The rho below which `share` of the trained tokens lie; its logarithm is right to 1 %.

        (Or to 1e-4, where it is smaller than 0.01.) None without a token.
        """
        value = quantile(self.log_ratio_counts, share)
        return None if value is None else math.exp(value)


@dataclass(frozen=True, slots=True)
class LagTable(Additive):
    """`OffPolicySums` by lag bucket. Tokens are in the bucket of their own lag, sequences in that
    of their oldest trained token.
    """

    by_lag: Mapping[str, OffPolicySums] = field(default_factory=dict)

    @property
    def total(self) -> OffPolicySums:
        """Over all lags."""
        return sum(self.by_lag.values(), OffPolicySums())


def lag_bucket(lag: int) -> str:
    """The bucket of a lag: one of `LAG_BUCKETS`. Raises ValueError if it is negative."""
    if lag < 0:
        raise ValueError(f"lag is {lag}: a token cannot be newer than the trainer")
    return LAG_BUCKETS[sum(lag > end for end in _BUCKET_ENDS)]


def off_policy_sums(
    inputs: PolicyInputs, term: PolicyTerm, correction: Correction, lag_BT: torch.Tensor
) -> LagTable:
    """The record of one micro-batch, by lag.

    lag_BT: the trainer's version minus the token's; read at trained tokens only.
    Raises ValueError if a trained token's lag is negative.
    """
    mask_BT = inputs.mask_BT.cpu() != 0
    log_rho_BT = inputs.detached().log_rho().cpu().double()
    lag_BT = torch.where(mask_BT, lag_BT.cpu(), 0)
    low_BT, high_BT = term.clipped_low_BT.cpu(), term.clipped_high_BT.cpu()
    dropped_BT = correction.dropped_BT.cpu()
    reasons = {reason: flags_BT.cpu() for reason, flags_BT in correction.dropped.items()}
    product_B = bounded(log_rho_BT.sum(dim=-1)).exp()
    lag_B = lag_BT.amax(dim=-1) if lag_BT.shape[1] else lag_BT.new_zeros(lag_BT.shape[0])

    def of(tokens_BT: torch.Tensor, rows_B: torch.Tensor) -> OffPolicySums:
        product = product_B[rows_B]
        whole = {
            reason: int((rows_B & ~(mask_BT & ~flags_BT).any(dim=-1)).sum())
            for reason, flags_BT in reasons.items()
        }
        return OffPolicySums(
            ratios=_ratio_sums(log_rho_BT[tokens_BT], low_BT[tokens_BT], high_BT[tokens_BT]),
            sequences=SequenceSums(
                int(rows_B.sum()), float(product.sum()), float(product.square().sum())
            ),
            drops=DropCounts(
                int(dropped_BT[tokens_BT].sum()),
                {reason: int(flags_BT[tokens_BT].sum()) for reason, flags_BT in reasons.items()},
                whole,
            ),
            log_ratio_counts=count_log_ratios(log_rho_BT[tokens_BT]),
        )

    trained_B = mask_BT.any(dim=-1)
    token_bucket_BT, row_bucket_B = _bucket_index(lag_BT), _bucket_index(lag_B)
    table = {}
    for index, name in enumerate(LAG_BUCKETS):
        tokens_BT = mask_BT & (token_bucket_BT == index)
        if bool(tokens_BT.any()):
            table[name] = of(tokens_BT, trained_B & (row_bucket_B == index))
    return LagTable(table)


def ratio_sums(
    behaviour_log_ratio_BT: torch.Tensor, clipped_BT: torch.Tensor, mask_BT: torch.Tensor
) -> RatioSums:
    """The ratios alone of one micro-batch, for a loop without lags and corrections.

    behaviour_log_ratio_BT: log pi_theta - log pi_mu, whatever the anchor of the loss is.
    clipped_BT: True where the policy loss cuts the gradient (`clip_is_active`); counted as low
    where rho < 1 and as high elsewhere.
    A log-ratio of NaN at a trained position makes the sums NaN.
    """
    mask = mask_BT.cpu() != 0
    log_rho_N = bounded(behaviour_log_ratio_BT.detach().cpu().double()[mask])
    clipped_N = clipped_BT.cpu()[mask]
    return _ratio_sums(log_rho_N, clipped_N & (log_rho_N < 0), clipped_N & ~(log_rho_N < 0))


def ess_learning_rate_factor(ess: float | None, base_ess: float = 1.0) -> float:
    """VCPO: sqrt(ess / base_ess), at most 1: what to multiply the learning rate with.

    ess: effective sample size as a share of the sequences (`SequenceSums.ess`); None gives 1.
    base_ess: the share at which the learning rate was tuned; 1 is on policy.
    Raises ValueError unless 0 < base_ess <= 1.
    Source: arXiv 2602.17616; the bound of 1 is ours.
    """
    if not 0.0 < base_ess <= 1.0:
        raise ValueError(f"base_ess is {base_ess!r}: it is a share of the sequences, in (0, 1]")
    return 1.0 if ess is None else min(1.0, math.sqrt(ess / base_ess))


def _ratio_sums(log_rho_N: torch.Tensor, low_N: torch.Tensor, high_N: torch.Tensor) -> RatioSums:
    rho_N = log_rho_N.exp()
    drift_N = torch.expm1(log_rho_N)
    return RatioSums(
        num_tokens=log_rho_N.numel(),
        num_clipped=int((low_N | high_N).sum()),
        sum_rho=float(rho_N.sum()),
        sum_rho_squared=float(rho_N.square().sum()),
        sum_drift=float(drift_N.abs().sum()),
        sum_kl=float(k3(-log_rho_N).sum()),
        num_clipped_low=int(low_N.sum()),
        num_clipped_high=int(high_N.sum()),
        sum_k1=float(k1(-log_rho_N).sum()),
        sum_drift_squared=float(drift_N.square().sum()),
    )


def _bucket_index(lag: torch.Tensor) -> torch.Tensor:
    if lag.numel() and int(lag.min()) < 0:
        raise ValueError(f"lag_BT has {int(lag.min())}: a token cannot be newer than the trainer")
    return torch.bucketize(lag, torch.tensor(_BUCKET_ENDS))


def _plus(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {**a, **b, **{key: a[key] + b[key] for key in a.keys() & b.keys()}}
    return a + b
