"""Policy losses with a rule about the whole optimizer batch: M2PO and BAPO.

Each comes in two halves. The first reads every micro-batch of the step without gradient and gives a
small record; the second applies that record to one micro-batch. So the split does not matter. On
several ranks the first half needs all ranks' tensors.
_B sequences, _T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from sidestep.losses.inputs import PolicyInputs, PolicyTerm
from sidestep.losses.options import option, require_above, require_between
from sidestep.losses.policy import clip_sides
from sidestep.losses.ratios import importance_ratio

BAPO_REPOSITORY = "github.com/WooooDyy/BAPO"


@dataclass(frozen=True, slots=True)
class M2POOptions:
    tau: float = option(0.04, "largest mean of (log rho)^2 over the candidates", "arXiv 2510.01161")

    def __post_init__(self) -> None:
        require_above("tau", self.tau)


@dataclass(frozen=True, slots=True)
class M2POCut:
    """Candidates with (log rho)^2 >= cut are masked; infinity masks none."""

    cut: float
    num_candidates: int
    num_masked: int


@dataclass(frozen=True, slots=True)
class BAPOOptions:
    positive_share: float = option(
        0.5, "wanted share of positive tokens in the loss", f"{BAPO_REPOSITORY}; the text says 0.4"
    )
    low_start: float = option(0.6, "lower bound to start from", "arXiv 2510.18927")
    low_stop: float = option(0.9, "highest lower bound", "arXiv 2510.18927")
    low_step: float = option(0.02, "step of the lower bound", "arXiv 2510.18927")
    high_start: float = option(1.2, "upper bound to start from", "arXiv 2510.18927")
    high_stop: float = option(3.0, "highest upper bound", "arXiv 2510.18927")
    high_step: float = option(0.05, "step of the upper bound", "arXiv 2510.18927")

    def __post_init__(self) -> None:
        require_between("positive_share", self.positive_share, 0.0, 1.0)
        bounds = self.low_start, self.low_stop, self.high_start, self.high_stop
        if not (0.0 < bounds[0] <= bounds[1] <= 1.0 <= bounds[2] <= bounds[3] < math.inf):
            raise ValueError(
                f"low_start, low_stop, high_start, high_stop are {bounds}: they must rise in this "
                f"order, the first two in (0, 1], the last two at least 1"
            )
        require_above("low_step", self.low_step)
        require_above("high_step", self.high_step)


@dataclass(frozen=True, slots=True)
class BAPOClip:
    """The bounds on the ratio for this step, and the positive share of the loss they give.

    positive_share: None if no token has a gradient.
    """

    low: float
    high: float
    positive_share: float | None


def m2po_cut(batch: Iterable[PolicyInputs], options: M2POOptions) -> M2POCut:
    """The cut for a whole optimizer batch, from all its micro-batches.

    Candidates: A > 0 and rho > 1, or A < 0 and rho < 1. The largest (log rho)^2 are masked until
    the mean over the candidates that are left is at most tau. Equal values go together (the paper
    breaks ties at random), so that the answer does not depend on any order.
    Source: arXiv 2510.01161, algorithm 1.
    """
    parts = [_candidates(inputs.detached()) for inputs in batch]
    values = torch.cat([squares_BT[candidate_BT].cpu() for squares_BT, candidate_BT in parts])
    values = values.double().sort().values
    means = values.cumsum(0) / torch.arange(1, len(values) + 1)
    too_large = (means > options.tau).nonzero()
    cut = float(values[too_large[0]]) if len(too_large) else math.inf
    return M2POCut(cut, len(values), int((values >= cut).sum()))


def m2po(inputs: PolicyInputs, options: M2POOptions, statistics: M2POCut) -> PolicyTerm:
    """-rho A, and 0 at the candidates that `m2po_cut` masks.

    With tau infinite it is -rho A everywhere. Source: arXiv 2510.01161, equation 5.
    """
    rho_BT, advantages_BT = importance_ratio(inputs.log_rho()), inputs.advantages()
    squares_BT, candidate_BT = _candidates(inputs.detached())
    cut_BT = candidate_BT & (squares_BT >= statistics.cut)
    loss_BT = torch.where(cut_BT, 0.0, -rho_BT * advantages_BT)
    return PolicyTerm(loss_BT, cut_BT & (advantages_BT < 0), cut_BT & (advantages_BT > 0))


def bapo_clip(batch: Iterable[PolicyInputs], options: BAPOOptions) -> BAPOClip:
    """The clip bounds for a whole optimizer batch, from all its micro-batches.

    The lower bound rises step by step, then the upper, until the positive tokens' share of the loss
    is at least positive_share or both bounds are at their stop. Share: sum of r A over A > 0 and
    r <= high, over that plus the sum of r |A| over A < 0 and r >= low: the part of the loss that
    has a gradient. So either move can only raise it. (As printed, equation 8 also counts what the
    clip holds constant; then a higher lower bound would lower the share.)
    Source: arXiv 2510.18927; order of the two bounds as in the authors' repository.
    """
    pairs = [(i.log_ratio(), i.advantages()) for i in (part.detached() for part in batch)]
    ratio = torch.cat([importance_ratio(d).flatten().cpu() for d, _ in pairs])
    advantages = torch.cat([a.flatten().cpu() for _, a in pairs]).double()
    size = ratio.double() * advantages.abs()

    def share(low: float, high: float) -> float | None:
        positive = float(size[(advantages > 0) & (ratio <= high)].sum())
        negative = float(size[(advantages < 0) & (ratio >= low)].sum())
        return positive / (positive + negative) if positive + negative else None

    for low, high in _bounds(options):
        found = share(low, high)
        if found is None or found >= options.positive_share:
            break
    return BAPOClip(low, high, found)


def bapo(inputs: PolicyInputs, options: BAPOOptions, statistics: BAPOClip) -> PolicyTerm:
    """-min(r A, clip(r, low, high) A) with the bounds of `bapo_clip`. Source: arXiv 2510.18927."""
    ratio_BT, advantages_BT = importance_ratio(inputs.log_ratio()), inputs.advantages()
    clipped_BT = ratio_BT.clamp(statistics.low, statistics.high)
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    sides = clip_sides(ratio_BT.detach(), advantages_BT, statistics.low, statistics.high)
    return PolicyTerm(loss_BT, *sides)


def _candidates(inputs: PolicyInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(log rho)^2 and whether the token moved the way its advantage asks for."""
    log_rho_BT = inputs.log_rho()
    return log_rho_BT.square(), inputs.advantages().sign() * log_rho_BT > 0


def _bounds(options: BAPOOptions) -> list[tuple[float, float]]:
    """The pairs (low, high) that the search goes through, in order."""
    lows = _steps(options.low_start, options.low_stop, options.low_step)
    highs = _steps(options.high_start, options.high_stop, options.high_step)
    return [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]


def _steps(start: float, stop: float, step: float) -> list[float]:
    """start, start + step, ... and stop. Multiples, not a running sum: no rounding piles up."""
    count = math.ceil((stop - start) / step - 1e-9)
    return [start + index * step for index in range(count)] + [stop]
