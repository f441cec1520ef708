"""Off-policy corrections: a weight per token from w = pi_p / pi_mu, and what is dropped and why.

Every correction is a function (inputs, options) -> Correction; `registry.CORRECTIONS` has them by
name. Bounds are on w, not on 1 / w. Dropped tokens get weight 0 and stay in every denominator
(`reduce`), so that rejecting does not inflate what is left. Products over a sequence shrink with
its length even without any mismatch: filter on the geometric mean, weigh per token.
_B sequences, _T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sidestep.losses.inputs import PolicyInputs, row_mean, row_sum
from sidestep.losses.options import (
    NoOptions,
    option,
    require_above,
    require_band,
    require_finite,
)
from sidestep.losses.ratios import importance_ratio

VERL_SOURCE = "verl, rollout correction"


@dataclass(frozen=True, slots=True)
class Correction:
    """What a correction does to a micro-batch. Nothing here has a gradient.

    weight_BT: multiplies the loss per token; 0 at dropped and masked tokens.
    dropped: reason -> bool_BT, trained tokens only. A token can have several reasons.
    """

    weight_BT: torch.Tensor
    dropped: Mapping[str, torch.Tensor]

    @property
    def dropped_BT(self) -> torch.Tensor:
        """True where a token is dropped for any reason."""
        nowhere_BT = torch.zeros_like(self.weight_BT, dtype=torch.bool)
        for dropped_BT in self.dropped.values():
            nowhere_BT = nowhere_BT | dropped_BT
        return nowhere_BT


@dataclass(frozen=True, slots=True)
class ImportanceOptions:
    cap: float | None = option(5.0, "tokens with w above it are dropped", "arXiv 2505.24298")

    def __post_init__(self) -> None:
        if self.cap is not None:
            require_above("cap", self.cap)


@dataclass(frozen=True, slots=True)
class TISOptions:
    cap: float = option(2.0, "the weight is min(w, cap)", "Yao et al. 2025, TIS")

    def __post_init__(self) -> None:
        require_above("cap", self.cap)


@dataclass(frozen=True, slots=True)
class IcePopOptions:
    low: float = option(0.5, "dropped below this w", "arXiv 2510.18855, IcePop")
    high: float = option(5.0, "dropped above this w", "arXiv 2510.18855, IcePop")

    def __post_init__(self) -> None:
        require_band(self.low, self.high)


@dataclass(frozen=True, slots=True)
class SequenceMISOptions:
    low: float = option(0.5, "dropped below this product of w", VERL_SOURCE)
    high: float = option(2.0, "dropped above this product of w", VERL_SOURCE)

    def __post_init__(self) -> None:
        require_band(self.low, self.high)


@dataclass(frozen=True, slots=True)
class GeometricOptions:
    low: float = option(0.999, "dropped below this geometric mean of w", VERL_SOURCE)
    high: float = option(1.001, "dropped above this geometric mean of w", VERL_SOURCE)

    def __post_init__(self) -> None:
        require_band(self.low, self.high)


@dataclass(frozen=True, slots=True)
class OPSMOptions:
    delta: float = option(
        0.5, "dropped above this mean of log mu - log theta, nats", "TRL; 1e-4 to 0.5 are in use"
    )

    def __post_init__(self) -> None:
        require_finite("delta", self.delta)


def no_correction(inputs: PolicyInputs, options: NoOptions) -> Correction:
    """Weight 1 at every trained token."""
    return _correction(inputs, torch.ones_like(inputs.log_weight()), {})


def importance(inputs: PolicyInputs, options: ImportanceOptions) -> Correction:
    """w 1[w <= cap]. Without a cap it is still w: switching off the rejection keeps the weight.

    With anchor "proximal" and the PPO loss this is decoupled PPO. Source: arXiv 2505.24298.
    """
    weight_BT = importance_ratio(inputs.log_weight())
    cap = options.cap
    return _correction(inputs, weight_BT, {} if cap is None else {"above_cap": weight_BT > cap})


def tis(inputs: PolicyInputs, options: TISOptions) -> Correction:
    """min(w, cap): truncated importance sampling. With an infinite cap it is w.

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
    2025.
    """
    weight_BT = importance_ratio(inputs.log_weight()).clamp(max=options.cap)
    return _correction(inputs, weight_BT, {})


def icepop(inputs: PolicyInputs, options: IcePopOptions) -> Correction:
    """w 1[low <= w <= high], token by token (token MIS). Source: IcePop, arXiv 2510.18855."""
    weight_BT = importance_ratio(inputs.log_weight())
    return _correction(inputs, weight_BT, _outside(weight_BT, options.low, options.high, "token"))


def sequence_mis(inputs: PolicyInputs, options: SequenceMISOptions) -> Correction:
    """W 1[low <= W <= high], W the product of w over the row: one weight for all its tokens.

    W falls with the length of the row (0.06 at 8,000 tokens was seen with token means of 1.0): for
    long completions use `geometric` with a weight per token. Source: masked sequence-level
    importance sampling, verl.
    """
    log_weight_BT = inputs.log_weight()
    weight_BT = importance_ratio(row_sum(log_weight_BT)).expand_as(log_weight_BT)
    dropped = _outside(weight_BT, options.low, options.high, "sequence")
    return _correction(inputs, weight_BT, dropped)


def geometric(inputs: PolicyInputs, options: GeometricOptions) -> Correction:
    """1[low <= exp(mean over the row of log w) <= high]: a filter on rows, no weight.

    Does not depend on the length. Combine it with a weight per token (`combine`). Source: verl.
    """
    log_weight_BT = inputs.log_weight()
    mean_BT = importance_ratio(row_mean(log_weight_BT, inputs.mask_BT)).expand_as(log_weight_BT)
    dropped = _outside(mean_BT, options.low, options.high, "geometric")
    return _correction(inputs, _one_or_nan(mean_BT), dropped)


def opsm(inputs: PolicyInputs, options: OPSMOptions) -> Correction:
    """Drop a row if its advantage is negative and mean(log pi_mu - log pi_theta) > delta.

    A filter on rows, no weight; it reads the behaviour policy whatever the anchor is, so it works
    where r is always 1. The advantage of a row is the mean over its trained tokens, one decision
    for all of them. Source: off-policy sequence masking, DeepSeek-V3.2, arXiv 2512.02556.
    """
    fall_B1 = -row_mean(inputs.log_rho().detach(), inputs.mask_BT)
    advantage_B1 = row_mean(inputs.advantages(), inputs.mask_BT)
    drop_B1 = (advantage_B1 < 0) & (fall_B1 > options.delta)
    weight_BT = _one_or_nan(fall_B1).expand(inputs.mask_BT.shape)
    return _correction(inputs, weight_BT, {"off_policy": drop_B1.expand(inputs.mask_BT.shape)})


def combine(corrections: Sequence[Correction]) -> Correction:
    """All of them: weights multiply, and what one drops is dropped.

    At most one should weigh, or w counts twice: `check_combination` says so. Raises ValueError if
    there is none, or if two drop for the same reason.
    """
    if not corrections:
        raise ValueError("corrections is empty: hand over at least one (`no_correction` is one)")
    weight_BT = torch.stack([correction.weight_BT for correction in corrections]).prod(dim=0)
    dropped: dict[str, torch.Tensor] = {}
    for correction in corrections:
        for reason, dropped_BT in correction.dropped.items():
            if reason in dropped:
                raise ValueError(f"two corrections drop for the reason {reason!r}: use one of them")
            dropped[reason] = dropped_BT
    return Correction(weight_BT, dropped)


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Sum and number of the weights that are not dropped; `a + b` is that of both parts."""

    num_tokens: int = 0
    sum_weight: float = 0.0

    def __add__(self, other: WeightSums) -> WeightSums:
        return WeightSums(self.num_tokens + other.num_tokens, self.sum_weight + other.sum_weight)


def weight_sums(correction: Correction, mask_BT: torch.Tensor) -> WeightSums:
    """The record of one micro-batch; add them up over the whole optimizer batch."""
    kept_BT = (mask_BT != 0) & ~correction.dropped_BT
    return WeightSums(int(kept_BT.sum()), float(correction.weight_BT[kept_BT].double().sum()))


def normalise_weights(correction: Correction, sums: WeightSums) -> Correction:
    """The correction with weights of mean 1 over the kept tokens of the whole optimizer batch.

    Over the kept ones, so that rejecting does not inflate what is left. Unchanged if all is
    dropped.
    """
    if not sums.sum_weight:
        return correction
    mean = sums.sum_weight / sums.num_tokens
    return replace(correction, weight_BT=correction.weight_BT / mean)


def _correction(
    inputs: PolicyInputs, weight_BT: torch.Tensor, dropped: Mapping[str, torch.Tensor]
) -> Correction:
    """Weight 0 where masked or dropped; reasons on trained tokens only."""
    trained_BT = inputs.mask_BT != 0
    reasons = {reason: dropped_BT & trained_BT for reason, dropped_BT in dropped.items()}
    everything = Correction(torch.where(trained_BT, weight_BT, 0.0), reasons)
    return replace(
        everything, weight_BT=everything.weight_BT.masked_fill(everything.dropped_BT, 0.0)
    )


def _outside(value_BT: torch.Tensor, low: float, high: float, unit: str) -> dict[str, torch.Tensor]:
    return {f"{unit}_below": value_BT < low, f"{unit}_above": value_BT > high}


def _one_or_nan(value: torch.Tensor) -> torch.Tensor:
    """1, but NaN where the value is: a broken log-probability must not pass a filter unseen."""
    return 1.0 + 0.0 * value
