"""Gradient alignment control as a library: tensors in, tensors out. No config, no asyncio, no HTTP.

- controller.py  GradientControl: measure, decide, plan, write; its state
- parameters.py  which parameters and gradients count
- geometry.py    inner products over all parameters: the only place where ranks would talk
- regimes.py     what a cosine calls for
- plan.py        what is subtracted and multiplied, and what comes out of it
- kernels.py     the passes over memory
- reference.py   the stored previous gradient
- record.py      what one step measured and did
- checks.py      checks of plain arguments
- attach.py      all of it inside any torch optimizer's step()
- simulate/      stale gradient descent on a quadratic: the method without a model or torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.control.attach import ControlHandle
    from sidestep.control.controller import GradientControl
    from sidestep.control.record import ControlRecord

# `attach` is not among them: here that name is the module. The function is `sidestep.attach`.
__all__ = ["ControlHandle", "ControlRecord", "GradientControl"]

# Loaded on first use: they import torch, and the simulation does without.
_HOME = {
    "ControlHandle": "sidestep.control.attach",
    "ControlRecord": "sidestep.control.record",
    "GradientControl": "sidestep.control.controller",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sidestep.control' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
