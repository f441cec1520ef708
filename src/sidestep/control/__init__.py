"""Gradient alignment control as a library: tensors in, tensors out. No config, no asyncio, no HTTP.

- controller.py      GradientControl: its arguments, apply, its state
- attach.py          all of it inside any torch optimizer's step(): what is refused; handle.py: what
                     it does there; running_step.py, optimizer_names.py
- gradient_space.py  control of the gradient; its norm and clipping
- update_space.py    control of the step that the optimizer made; decay.py: without weight decay
- core.py            what both share: measure, decide, remember
- reference.py       what is compared with: previous, ema; displacement.py, storage.py
- secant.py          strength="secant": the curvature along the way
- settings.py        the arguments, checked; facts.py: what a host says about a step
- scopes.py          what is decided on together; calibration.py: thresholds from the run itself
- regimes.py         what a cosine calls for
- plan.py            what is subtracted and multiplied, and what comes out of it
- record.py          what one step measured and did; recording.py makes it
- expected.py        the cosine of fresh data; alarm.py: "likely to collapse"
- geometry.py        inner products over all parameters and ranks: the only place where ranks talk
                     (sharding.py, agreement.py, sums.py)
- parameters.py      which parameters and gradients count, and how they are written
- kernels.py         the passes over memory
- checks.py          checks of plain arguments
- simulate/      stale gradient descent on a quadratic: the method without a model or torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.control.alarm import Alarm, AlarmState
    from sidestep.control.controller import GradientControl
    from sidestep.control.expected import ExpectedCosine, Halves, excess, expected_cosine
    from sidestep.control.handle import ControlHandle
    from sidestep.control.record import ControlRecord, ScopeRecord

# `attach` is not among them: here that name is the module. The function is `sidestep.attach`.
__all__ = [
    "Alarm",
    "AlarmState",
    "ControlHandle",
    "ControlRecord",
    "ExpectedCosine",
    "GradientControl",
    "Halves",
    "ScopeRecord",
    "excess",
    "expected_cosine",
]

# Loaded on first use: they import torch, and the simulation does without.
_HOME = {
    "Alarm": "sidestep.control.alarm",
    "AlarmState": "sidestep.control.alarm",
    "ControlHandle": "sidestep.control.handle",
    "ControlRecord": "sidestep.control.record",
    "ExpectedCosine": "sidestep.control.expected",
    "GradientControl": "sidestep.control.controller",
    "Halves": "sidestep.control.expected",
    "ScopeRecord": "sidestep.control.record",
    "excess": "sidestep.control.expected",
    "expected_cosine": "sidestep.control.expected",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sidestep.control' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
