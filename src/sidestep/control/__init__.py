"""Gradient alignment control as a library: tensors in, tensors out. No config, no asyncio, no HTTP.

controller.py  GradientControl: measure, decide, write; its state
regimes.py     what a cosine calls for
reference.py   the stored previous gradient
geometry.py    inner products over all parameters: the only place where ranks would talk
kernels.py     the passes over memory
record.py      what one step measured and did
attach.py      the same inside any torch optimizer's step()
"""

from sidestep.control.attach import ControlHandle, attach
from sidestep.control.controller import GradientControl
from sidestep.control.record import ControlRecord

__all__ = ["ControlHandle", "ControlRecord", "GradientControl", "attach"]
