"""Policy losses that keep a gradient on every token, or drop tokens by a rule that is not PPO's.

_B sequences, _T tokens. r = pi_theta / pi_p, rho = pi_theta / pi_mu, sg = stop-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sidestep.losses.inputs import PolicyInputs, PolicyTerm, row_sum
from sidestep.losses.options import NoOptions, option, require_above
from sidestep.losses.policy import check_clip
from sidestep.losses.ratios import importance_ratio


@dataclass(frozen=True, slots=True)
class SAPOOptions:
    tau_positive: float = option(1.0, "sharpness of the gate where A > 0", "arXiv 2511.20347")
    tau_negative: float = option(1.05, "the same where A <= 0", "arXiv 2511.20347")

    def __post_init__(self) -> None:
        require_above("tau_positive", self.tau_positive)
        require_above("tau_negative", self.tau_negative)


@dataclass(frozen=True, slots=True)
class CISPOOptions:
    cap: float = option(5.0, "the weight is min(r, cap)", "ours; 2506.13585 tunes it")

    def __post_init__(self) -> None:
        require_above("cap", self.cap)


@dataclass(frozen=True, slots=True)
class DISOptions:
    clip_low: float = option(0.3, "dropped from rho <= 1 - clip_low", "arXiv 2607.07508")
    clip_high: float = option(5.0, "dropped from rho >= 1 + clip_high", "arXiv 2607.07508")

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True)
class DPPOOptions:
    delta: float = option(0.2, "most that the token's probability may move", "arXiv 2602.04879")

    def __post_init__(self) -> None:
        require_above("delta", self.delta)


def sapo(inputs: PolicyInputs, options: SAPOOptions) -> PolicyTerm:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A. Nothing is cut, all fades smoothly.

    At r = 1 the gradient is that of -r A. Source: arXiv 2511.20347.
    """
    ratio_BT, advantages_BT = importance_ratio(inputs.log_ratio()), inputs.advantages()
    tau_BT = torch.full_like(advantages_BT, options.tau_negative)
    tau_BT[advantages_BT > 0] = options.tau_positive
    gate_BT = 4.0 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1.0))
    nowhere_BT = torch.zeros_like(inputs.mask_BT, dtype=torch.bool)
    return PolicyTerm(-gate_BT * advantages_BT, nowhere_BT, nowhere_BT)


def cispo(inputs: PolicyInputs, options: CISPOOptions) -> PolicyTerm:
    """-sg(min(r, cap)) A log pi_theta: the weight is capped, the gradient never cut.

    Counted as clipped (high) where the cap acts. Source: arXiv 2506.13585.
    """
    ratio_BT, advantages_BT = importance_ratio(inputs.log_ratio()).detach(), inputs.advantages()
    loss_BT = -ratio_BT.clamp(max=options.cap) * advantages_BT * inputs.logprobs()
    high_BT = (advantages_BT != 0) & (ratio_BT > options.cap)
    return PolicyTerm(loss_BT, torch.zeros_like(high_BT), high_BT)


def dis(inputs: PolicyInputs, options: DISOptions) -> PolicyTerm:
    """-sg(rho 1[1 - clip_low < rho < 1 + clip_high]) A log pi_theta, whatever the sign of A.

    Double-sided importance sampling: the ratio is to the behaviour policy, and a token outside the
    band gives no gradient. Source: SAO, arXiv 2607.07508.
    """
    rho_BT, advantages_BT = importance_ratio(inputs.log_rho()).detach(), inputs.advantages()
    # Written as what is dropped, so that a NaN (neither side) is kept and cannot pass unseen.
    below_BT, above_BT = rho_BT <= 1.0 - options.clip_low, rho_BT >= 1.0 + options.clip_high
    loss_BT = torch.where(below_BT | above_BT, 0.0, -rho_BT * advantages_BT * inputs.logprobs())
    matters_BT = advantages_BT != 0
    return PolicyTerm(loss_BT, below_BT & matters_BT, above_BT & matters_BT)


def dppo_tv(inputs: PolicyInputs, options: DPPOOptions) -> PolicyTerm:
    """-rho A, and 0 where A > 0 and pi_theta - pi_mu > delta, or A < 0 and it is < -delta.

    The trust region is the probability that moved (binary total variation), not the ratio: a rare
    token may double, a likely one may not lose much. Source: arXiv 2602.04879.
    """
    rho_BT, advantages_BT = importance_ratio(inputs.log_rho()), inputs.advantages()
    moved_BT = _probability(inputs.logprobs_BT) - _probability(inputs.behaviour_logprobs_BT)
    low_BT = (advantages_BT < 0) & (moved_BT < -options.delta)
    high_BT = (advantages_BT > 0) & (moved_BT > options.delta)
    return PolicyTerm(torch.where(low_BT | high_BT, 0.0, -rho_BT * advantages_BT), low_BT, high_BT)


def topr(inputs: PolicyInputs, options: NoOptions) -> PolicyTerm:
    """-A log pi_theta where A > 0; -sg(min(prod over the row of rho, 1)) A log pi_theta elsewhere.

    The weight is that of the whole trajectory: a product, which shrinks with the length even
    without any staleness. Counted as clipped (high) where the taper acts.
    Source: arXiv 2503.14286; there R is a reward of either sign, here the advantage.
    """
    advantages_BT = inputs.advantages()
    product_B1 = importance_ratio(row_sum(inputs.log_rho())).detach()
    tapered_BT = product_B1.clamp(max=1.0).expand_as(advantages_BT)
    # 1 where A > 0, but NaN where the ratio is: a broken log-probability must not pass unseen.
    weight_BT = torch.where(advantages_BT > 0, 1.0 + 0.0 * tapered_BT, tapered_BT)
    high_BT = (advantages_BT < 0) & (product_B1 > 1.0)
    loss_BT = -weight_BT * advantages_BT * inputs.logprobs()
    return PolicyTerm(loss_BT, torch.zeros_like(high_BT), high_BT)


def _probability(logprobs_BT: torch.Tensor) -> torch.Tensor:
    return logprobs_BT.detach().clamp(max=0.0).exp()
