"""From a judged step to its `ControlRecord`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sidestep.control.core import Core, Judged
from sidestep.control.expected import excess
from sidestep.control.geometry import Products
from sidestep.control.plan import Plan, whole_cosine, whole_norm
from sidestep.control.record import ControlRecord, Regime, ScopeRecord
from sidestep.control.regimes import Decision
from sidestep.control.scopes import ScopeState

# What a step of several scopes is called: the first of these that any scope had. A skip of all
# comes before them.
_STRENGTH: tuple[Regime, ...] = ("damp", "project", "pass", "undefined")


def make_record(
    core: Core, judged: Judged, norm_gradient: float | None, clip_factor: float
) -> ControlRecord:
    """The record of a step that was measured against the reference."""
    parts = [
        _scope_record(judged, products, wanted, plan, state)
        for products, wanted, plan, state in zip(
            judged.measured, judged.wanted, judged.plans, judged.states, strict=True
        )
    ]
    cosine = judged.whole.cosine
    applied = whole_cosine(judged.whole, judged.plans)
    within, facts = judged.within_batch, judged.facts
    settings = core.settings
    comparable = (settings.reference, settings.space) == ("previous", "gradient")
    one = parts[0] if len(parts) == 1 and settings.scope == "model" else None
    scales = {part.step_scale for part in parts}
    return ControlRecord(
        step=core.step,
        regime=one.regime if one else _strongest([part.regime for part in parts]),
        decision=one.decision if one else _strongest([part.decision for part in parts]),
        reason=one.reason if one else _count([part.regime for part in parts]),
        cosine=None if within else cosine,
        cosine_applied=None if within else applied,
        cosine_within_batch=cosine if within else None,
        norm_raw=judged.whole.norm if judged.whole.finite else None,
        norm_applied=whole_norm(judged.plans),
        removed=one.removed if one else None,
        curvature=one.curvature if one else None,
        step_scale=parts[0].step_scale if len(scales) == 1 else 1.0,
        skips_in_a_row=max(part.skips_in_a_row for part in parts),
        norm_gradient=norm_gradient,
        clip_factor=clip_factor,
        expected=facts.expected,
        excess=excess(cosine, facts.expected) if comparable and not within else None,
        scopes={} if one else dict(zip(judged.names, parts, strict=True)),
    )


def unjudged_record(
    core: Core, decision: Decision, wanted: Regime, norm: float | None, clip_factor: float
) -> ControlRecord:
    """The record of a step without a reference: mode "off", or a gradient that is not finite.

    norm: of the gradient.
    """
    return ControlRecord(
        step=core.step,
        regime=decision.regime,
        decision=wanted,
        reason=decision.reason,
        cosine=None,
        cosine_applied=None,
        cosine_within_batch=None,
        norm_raw=norm,
        norm_applied=0.0 if decision.regime == "skip" else norm,
        removed=None,
        curvature=None,
        step_scale=1.0,
        skips_in_a_row=max((s.skips_in_a_row for s in core.scopes.values()), default=0),
        norm_gradient=norm,
        clip_factor=clip_factor,
        expected=None,
        excess=None,
    )


def _scope_record(
    judged: Judged, measured: Products, wanted: Decision, plan: Plan, state: ScopeState
) -> ScopeRecord:
    within = judged.within_batch
    return ScopeRecord(
        regime=plan.decision.regime,
        decision=wanted.regime,
        reason=plan.decision.reason,
        cosine=None if within else measured.cosine,
        cosine_applied=None if within else plan.cosine,
        cosine_within_batch=measured.cosine if within else None,
        norm_raw=measured.norm if measured.finite else None,
        norm_applied=plan.norm,
        removed=_removed(measured, plan),
        curvature=state.curvature.value if judged.has_curvature else None,
        step_scale=plan.decision.step_scale,
        skips_in_a_row=state.skips_in_a_row,
    )


def _removed(measured: Products, plan: Plan) -> float | None:
    if measured.cosine is None or measured.gp == 0.0:
        return None
    return plan.coefficient * (measured.pp_reachable / measured.gp)


def _strongest(regimes: Sequence[Regime]) -> Regime:
    if all(regime == "skip" for regime in regimes):
        return "skip"
    return next(regime for regime in _STRENGTH if regime in regimes)


def _count(regimes: Sequence[Regime]) -> str:
    counts = Counter(regimes)
    return "scopes: " + ", ".join(f"{counts[regime]} {regime}" for regime in sorted(counts))
