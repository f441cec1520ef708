"""Skipping optimizer steps at random: the rival that a control which skips has to beat."""

from __future__ import annotations

import random

from sidestep.control.controller import ControlRecord

REASON = "random (train.skip_share)"


def is_skipped(share: float, seed: int, step: int) -> bool:
    """Whether step `step` of a run is one of the share that is skipped. Depends on nothing else."""
    return random.Random(f"skip {seed} {step}").random() < share


def skip_record(step: int) -> ControlRecord:
    """What a step that was skipped before anything was measured leaves behind."""
    return ControlRecord(
        regime="skip",
        decision="skip",
        reason=REASON,
        cosine=None,
        cosine_applied=None,
        cosine_within_batch=None,
        norm_raw=None,
        norm_applied=0.0,
        removed=None,
        curvature=None,
        step_scale=1.0,
        skips_in_a_row=1,
        step=step,
        norm_gradient=None,
        clip_factor=1.0,
        expected=None,
        excess=None,
    )
