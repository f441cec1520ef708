"""Sidestep: asynchronous RL for language models that stays stable.

Names load on first use, so that `sidestep --help` and reports need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sidestep.threads import set_thread_environment

if TYPE_CHECKING:
    from sidestep import losses
    from sidestep.build import train
    from sidestep.config import RunConfig
    from sidestep.config.loading import load_config
    from sidestep.control.attach import ControlHandle, attach
    from sidestep.control.controller import ControlRecord, GradientControl
    from sidestep.control.simulate import (
        SimulationResult,
        simulate,
        stability_edge,
        stability_map,
    )

__version__ = "0.1.0"

__all__ = [
    "ControlHandle",
    "ControlRecord",
    "GradientControl",
    "RunConfig",
    "SimulationResult",
    "__version__",
    "attach",
    "load_config",
    "losses",
    "simulate",
    "stability_edge",
    "stability_map",
    "train",
]

_HOME = {
    "ControlHandle": "sidestep.control.attach",
    "attach": "sidestep.control.attach",
    "ControlRecord": "sidestep.control.controller",
    "GradientControl": "sidestep.control.controller",
    "RunConfig": "sidestep.config",
    "SimulationResult": "sidestep.control.simulate",
    "load_config": "sidestep.config.loading",
    "simulate": "sidestep.control.simulate",
    "stability_edge": "sidestep.control.simulate",
    "stability_map": "sidestep.control.simulate",
    "train": "sidestep.build",
}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("sidestep.losses")
    if name not in _HOME:
        raise AttributeError(f"module 'sidestep' has no attribute {name!r}")
    if name == "train":
        # A run has two processes; torch reads the variables once, when it is imported.
        set_thread_environment()
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
