"""Gradient descent with stale gradients on a noisy quadratic: the method without a model.

    theta_{t+1} = theta_t - lr * optimizer(control(H theta_{t-s} + noise))

numpy only; nothing here imports torch. What it shows and what it cannot: docs/simulate.md.

stability.py   simulate and stability_map: the entry points
setting.py     what is simulated, checked; what comes out
summary.py     cells over their seeds
theory.py      the learning rate at which descent without control turns unstable
lags.py        fixed and random lags
controls.py    what may be taken out of a gradient: one class each
optimizers.py  from a gradient to a direction: one class each
descent.py     the steps, for many cells at once
arrays.py      what these share: products row by row, records that shrink
"""

from sidestep.control.simulate.setting import (
    ALL_CONTROLS,
    CONTROLS,
    LAG_KINDS,
    OPTIMIZERS,
    Setting,
    SimulationResult,
)
from sidestep.control.simulate.stability import LAGS, LEARNING_RATES, simulate, stability_map
from sidestep.control.simulate.summary import CellSummary, summarise
from sidestep.control.simulate.theory import stability_edge

__all__ = [
    "ALL_CONTROLS",
    "CONTROLS",
    "LAGS",
    "LAG_KINDS",
    "LEARNING_RATES",
    "OPTIMIZERS",
    "CellSummary",
    "Setting",
    "SimulationResult",
    "simulate",
    "stability_edge",
    "stability_map",
    "summarise",
]
