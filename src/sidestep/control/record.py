"""What one optimizer step measured and did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Regime = Literal["pass", "project", "damp", "skip", "undefined"]


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """What was measured and done in one scope, for its vector v and reference p.

    In space="gradient" v is the gradient, in space="update" the update that the optimizer made,
    without decoupled weight decay. All numbers are finite; what does not exist is None.

    regime: what happened. "skip": there must be no optimizer step. "undefined": there is no cosine
        and the optimizer's step stays.
    decision: what the measurement calls for. It equals `regime` but in mode "observe", which
        decides and changes nothing.
    reason: why, in a few fixed words ("above high", "first step", "non-finite", ...).
    cosine: <v,p> / (|v||p|), in [-1, 1], over the parameters both have.
    cosine_applied: the same after control. None on skip and where nothing is left.
    cosine_within_batch: the cosine where v and p are from one rollout batch; `cosine` is None then.
    norm_raw: |v| before control. None if it is not a finite number.
    norm_applied: |v| after control, from the measured products; of a gradient before clipping. 0 on
        skip.
    removed: share of <v,p> that was taken out; below 0 where the secant put something in. None
        without a cosine.
    curvature: h, with strength="secant".
    step_scale: factor on this step; 1 but in regime "damp".
    skips_in_a_row: decisions to skip up to and with this one; non-finite steps do not count.
    """

    regime: Regime
    decision: Regime
    reason: str
    cosine: float | None
    cosine_applied: float | None
    cosine_within_batch: float | None
    norm_raw: float | None
    norm_applied: float | None
    removed: float | None
    curvature: float | None
    step_scale: float
    skips_in_a_row: int


@dataclass(frozen=True, slots=True)
class ControlRecord(ScopeRecord):
    """One step of a `GradientControl`, over all parameters.

    With scope="model" the fields of `ScopeRecord` are those of the one decision. With several
    scopes the norms and cosines are over all of them, skipped scopes counting 0 in what is applied;
    `regime` is "skip" only if every scope was skipped, else the strongest one of the others (damp,
    project, pass, undefined); `reason` counts them; `step_scale` is 1 unless they share one;
    `removed` and `curvature` are None; `skips_in_a_row` is the largest.

    step: number of the step, from 0, skipped ones included.
    norm_gradient: |g| of the gradient before control and clipping, in either space.
    clip_factor: what the gradient was multiplied with to respect `max_norm`; 1 without clipping.
    expected: the cosine that fresh data would show, if the host noted one.
    excess: cosine - expected; None where one of them is, and but for consecutive gradients
        (reference="previous", space="gradient"), which `expected` is about.
    scopes: the scopes by name; empty with scope="model".
    """

    step: int
    norm_gradient: float | None
    clip_factor: float
    expected: float | None
    excess: float | None
    scopes: Mapping[str, ScopeRecord] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)
