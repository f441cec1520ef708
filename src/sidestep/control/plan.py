"""From a decision to numbers: what is subtracted and multiplied, and what comes out of it.

Pure arithmetic on the measured products: no second look at the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidestep.control.geometry import Products
from sidestep.control.regimes import Decision


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: g' = g - coefficient p, and the optimizer gets clip_factor g'.

    coefficient: a c |g| / |p| with the removed share a; 0 if nothing is removed.
    norm_applied: |g'| over all parameters, before clipping. None if |g| is not finite, 0 on skip.
    cosine_applied: cosine of g' and p. None on skip, without a cosine, and where g' is too short to
        have a direction.
    leaves_rounding: g' is no longer than what rounding leaves of g.
    """

    decision: Decision
    coefficient: float
    clip_factor: float
    norm_applied: float | None
    cosine_applied: float | None
    leaves_rounding: bool = False


def make_plan(
    measured: Products, decision: Decision, max_norm: float | None, rounding: float
) -> Plan:
    """Plan a step.

    rounding: relative rounding unit of the coarsest gradient dtype (float32: 1.2e-7).
    """
    if decision.regime == "skip":
        return Plan(decision, 0.0, 1.0, 0.0, None)
    if not measured.finite:
        return Plan(decision, 0.0, 1.0, None, None)
    if decision.removed == 0.0:
        clip_factor = _clip_factor(measured.norm, max_norm)
        return Plan(decision, 0.0, clip_factor, measured.norm, measured.cosine)
    return _projected(measured, decision, max_norm, rounding)


def _projected(
    measured: Products, decision: Decision, max_norm: float | None, rounding: float
) -> Plan:
    along = measured.gp / math.sqrt(measured.pp_reachable)  # length of g in the direction of p
    across = math.sqrt(max(0.0, measured.gg_compared - along * along))
    kept = (1.0 - decision.removed) * along
    compared = math.hypot(across, kept)
    norm = math.hypot(compared, math.sqrt(max(0.0, measured.gg - measured.gg_compared)))
    leaves_rounding = compared <= 4.0 * rounding * math.sqrt(measured.gg_compared)
    cosine = None if leaves_rounding else max(-1.0, min(1.0, kept * measured.reach / compared))
    return Plan(
        decision,
        coefficient=decision.removed * measured.gp / measured.pp_reachable,
        # What rounding leaves of a huge gradient can exceed max_norm where the formula says 0.
        clip_factor=_clip_factor(max(norm, rounding * measured.norm), max_norm),
        norm_applied=norm,
        cosine_applied=cosine,
        leaves_rounding=leaves_rounding,
    )


def _clip_factor(norm: float, max_norm: float | None) -> float:
    """As torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
