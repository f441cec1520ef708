"""What one optimizer step measured and did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Regime = Literal["pass", "project", "damp", "skip", "undefined"]


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """One step of a `GradientControl`. All numbers are finite; what does not exist is None.

    step: number of the step, from 0, skipped ones included.
    regime: what happened. "skip": there must be no optimizer step. "undefined": there is no cosine
        and the optimizer runs.
    decision: what the measurement calls for. It equals `regime` but in mode "observe", which
        decides and changes nothing.
    reason: why, in a few fixed words ("above high", "first step", "non-finite", ...).
    cosine: <g,p> / (|g||p|) with the reference p, in [-1, 1], over the parameters both have.
    cosine_applied: the same for what the optimizer gets. None on skip and where nothing is left.
    cosine_within_batch: the cosine where g and p are from one rollout batch; `cosine` is None then.
    norm_raw: |g| over all parameters before control. None if it is not a finite number.
    norm_applied: after control and before clipping, from the measured products. 0 on skip.
    clip_factor: what the gradient was multiplied with to respect `max_norm`; 1 without clipping.
    step_scale: factor on the learning rate of this step; 1 but in regime "damp".
    skips_in_a_row: decisions to skip up to and with this one; non-finite steps do not count.
    """

    step: int
    regime: Regime
    decision: Regime
    reason: str
    cosine: float | None
    cosine_applied: float | None
    cosine_within_batch: float | None
    norm_raw: float | None
    norm_applied: float | None
    clip_factor: float
    step_scale: float
    skips_in_a_row: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, ready for JSON."""
        return asdict(self)
