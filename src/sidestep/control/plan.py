"""From a decision to numbers: what is subtracted and multiplied, and what comes out of it.

Pure arithmetic on the measured products: no second look at the vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sidestep.control.geometry import Products
from sidestep.control.regimes import Decision


@dataclass(frozen=True, slots=True)
class Plan:
    """One scope's step: v' = v - coefficient p, for its vector v (gradient or update).

    coefficient: a c |v| / |p| with the removed share a; 0 if nothing is removed.
    norm: |v'|; 0 on skip. None if |v| is not finite.
    norm_compared: |v'| over the parameters the reference speaks about.
    product: <v',p>; 0 without a reference.
    cosine: of v' and p. None on skip, without a reference, and where v' has no direction.
    leaves_rounding: something was removed, and v' is no longer than what rounding leaves of v: it
        has no direction.
    """

    decision: Decision
    coefficient: float
    norm: float | None
    norm_compared: float
    product: float
    cosine: float | None
    leaves_rounding: bool = False

    @property
    def skips(self) -> bool:
        return self.decision.regime == "skip"

    @property
    def scales(self) -> bool:
        return self.decision.step_scale != 1.0


def make_plan(
    measured: Products, decision: Decision, rounding: float, takes_scale: bool = False
) -> Plan:
    """Plan the step of one scope.

    rounding: relative rounding unit of the coarsest dtype of v (float32: 1.2e-7).
    takes_scale: whether "damp" scales v itself: the step else, which is not v.
    """
    if decision.regime == "skip":
        return Plan(decision, 0.0, 0.0, 0.0, 0.0, None)
    if not measured.finite:
        return Plan(decision, 0.0, None, 0.0, 0.0, None)
    if decision.removed == 0.0 and decision.coefficient is None:
        scale = decision.step_scale if takes_scale else 1.0
        product = 0.0 if measured.cosine is None else scale * measured.gp
        compared = scale * math.sqrt(measured.gg_compared)
        return Plan(decision, 0.0, scale * measured.norm, compared, product, measured.cosine)
    return _projected(measured, decision, rounding)


def _projected(measured: Products, decision: Decision, rounding: float) -> Plan:
    reachable = math.sqrt(measured.pp_reachable)
    along = measured.gp / reachable  # length of v in the direction of p
    across = math.sqrt(max(0.0, measured.gg_compared - along * along))
    if decision.coefficient is None:
        coefficient = decision.removed * measured.gp / measured.pp_reachable
        kept = (1.0 - decision.removed) * along
    else:
        coefficient = decision.coefficient
        kept = along - coefficient * reachable
    compared = math.hypot(across, kept)
    leaves_rounding = compared <= 4.0 * rounding * math.sqrt(measured.gg_compared)
    cosine = None if leaves_rounding else max(-1.0, min(1.0, kept * measured.reach / compared))
    return Plan(
        decision,
        coefficient,
        norm=math.hypot(compared, math.sqrt(max(0.0, measured.gg - measured.gg_compared))),
        norm_compared=compared,
        product=kept * reachable,
        cosine=cosine,
        leaves_rounding=leaves_rounding,
    )


def whole_norm(plans: Sequence[Plan]) -> float | None:
    """|v'| over all scopes; None if it is not finite."""
    if len(plans) == 1:
        return plans[0].norm
    norms = [plan.norm for plan in plans if plan.norm is not None]
    return math.hypot(*norms) if len(norms) == len(plans) else None


def whole_cosine(measured: Products, plans: Sequence[Plan]) -> float | None:
    """Cosine of v' and p over all scopes; `measured` are their products together."""
    if len(plans) == 1:
        return plans[0].cosine
    compared = math.hypot(*(plan.norm_compared for plan in plans))
    if measured.cosine is None or all(plan.cosine is None for plan in plans):
        return None
    product = math.fsum(plan.product for plan in plans)
    return max(-1.0, min(1.0, product / (compared * math.sqrt(measured.pp))))


def clip_factor(
    norm: float | None, norm_raw: float, max_norm: float | None, rounding: float
) -> float:
    """As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.

    norm: of the gradient after control; None: it is not finite, and not clipped. What rounding
    leaves of a huge gradient can exceed max_norm where the formula for `norm` says 0.
    """
    if max_norm is None or norm is None:
        return 1.0
    return min(1.0, max_norm / (max(norm, rounding * norm_raw) + 1e-6))
