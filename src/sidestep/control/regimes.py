"""From a cosine to what happens to the step: pass, project, damp or skip."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidestep.control.geometry import Products
from sidestep.control.record import Regime
from sidestep.control.settings import Settings


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with the vector v of a step (gradient or update) and its reference p.

    removed: the share a of v's part along p that is taken out: v' = v - a c |v| p/|p|.
    coefficient: instead of a share, v' = v - coefficient p.
    step_scale: factor on this step.
    """

    regime: Regime
    reason: str
    removed: float = 0.0
    coefficient: float | None = None
    step_scale: float = 1.0


def decide(
    settings: Settings,
    thresholds: tuple[float, float],
    cosine: float,
    skips_in_a_row: int,
    reach: float = 1.0,
    drift: float = 0.0,
) -> Decision:
    """What a step with this cosine c gets.

    Pass while c <= low, project while low < c <= high, over high what `above` says. Only c > 0 is
    ever acted on: opposed vectors are the healthy sign of a step that was long enough.

    thresholds: low and high.
    skips_in_a_row: skips directly before it.
    reach: share of |p| on parameters that have a part in v (`Products.reach`).
    drift: mean |ratio - 1|; strength="drift" needs it.
    """
    low, high = thresholds
    if cosine <= max(low, 0.0):
        return Decision("pass", "at most low" if cosine <= low else "not positive")
    if cosine <= high:
        return _project(settings, "above low", cosine, reach, drift)
    if settings.above == "damp":
        scale = (1.0 - cosine) ** settings.damp_power
        return Decision("damp", "above high", step_scale=scale)
    if settings.above == "skip" and skips_in_a_row < settings.max_skips:
        return Decision("skip", "above high")
    reason = "max_skips reached" if settings.above == "skip" else "above high"
    return _project(settings, reason, cosine, reach, drift)


def decide_by_secant(measured: Products, curvature: float) -> Decision:
    """Take out what is spent: g' = g + min(h, -share) d while share = <g,d>/|d|^2 < 0, else
    g' = g + h d, with d how far the policy moved and h the curvature along it.

    The reference is p = -d. Only what has a gradient can be changed: |d| is taken there.
    """
    if curvature == 0.0:
        return Decision("pass", "no curvature")
    if measured.pp_reachable == 0.0:
        return Decision("pass", "nothing to take it from")
    spent = measured.gp / measured.pp_reachable
    return Decision(
        "project", "secant", coefficient=min(curvature, spent) if spent > 0 else curvature
    )


def decide_by_spring(settings: Settings, drift: float) -> Decision:
    """Pull back by a share k of how far the policy moved, at any cosine: u' = u - k d.

    k is `spring`, or min(1, drift / drift_scale) where that is None.
    """
    pull = settings.spring
    if pull is None:
        pull = min(1.0, drift / settings.drift_scale)
    if pull == 0.0:
        return Decision("pass", "no drift")
    return Decision("project", "spring", coefficient=pull)


def removed_share(settings: Settings, cosine: float, reach: float, drift: float) -> float:
    """The share a that a projection removes: `strength`, min(1, drift / drift_scale), or what
    leaves cosine `residual`.

    a = 1 - r sqrt(1 - c^2) / (c sqrt(1 - r^2)) for residual r, from <v',p> = (1 - a) <v,p> and
    |v'|^2 = |v|^2 (1 - (2a - a^2) c^2). Where only a part of p can be reached, c and r are the
    cosines with that part.
    """
    if settings.strength == "drift":
        return min(1.0, drift / settings.drift_scale)
    if settings.residual is None:
        return float(settings.strength)
    c, r = min(1.0, cosine / reach), settings.residual / reach
    return 1.0 - r * _sine(c) / (c * _sine(r)) if r < c else 0.0


def _project(
    settings: Settings, reason: str, cosine: float, reach: float, drift: float
) -> Decision:
    removed = removed_share(settings, cosine, reach, drift)
    if removed == 0.0:
        return Decision("pass", "no drift" if settings.strength == "drift" else reason)
    return Decision("project", reason, removed=removed)


def _sine(cosine: float) -> float:
    return math.sqrt((1.0 - cosine) * (1.0 + cosine))
