"""What is simulated and what comes out of it: frozen records, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sidestep.control.checks import require_choice, require_count, require_number
from sidestep.control.simulate.arrays import FloatArray

CONTROLS = ("none", "previous", "skip", "displacement", "half", "secant")  # of the default map
ALL_CONTROLS = (*CONTROLS, "spring")
OPTIMIZERS = ("sgd", "momentum", "adam")
LAG_KINDS = ("fixed", "geometric", "heavy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all cells of a map have in common. The only home of these defaults.

    steps: optimizer steps, skipped ones included.
    dim: parameters; their curvatures fall geometrically from 1 to 0.01.
    noise: root mean square length of the noise vector in every gradient.
    optimizer: "sgd", "momentum" (velocity = momentum * velocity + g) or "adam" (0.9, 0.999, 1e-8,
        bias corrected).
    momentum: of "momentum" alone, in [0, 1).
    lag_kind: "fixed", or random with the cell's lag as mean: "geometric" or "heavy" (lags.py).
    high, max_skips: of "skip": the cosine above which a step is skipped, and how many in a row.
    memory: of "secant": how much of the estimate a step keeps, in [0, 1).
    spring: of "spring": the share of the displacement that a step takes back, in (0, 1].

    Raises ValueError with a text that starts with "NAME=VALUE".
    """

    steps: int = 2000
    dim: int = 50
    noise: float = 0.1
    optimizer: str = "sgd"
    momentum: float = 0.9
    lag_kind: str = "fixed"
    high: float = 0.3
    max_skips: int = 8
    memory: float = 0.98
    spring: float = 0.2

    def __post_init__(self) -> None:
        require_count("steps", self.steps, at_least=1)
        require_count("dim", self.dim, at_least=1)
        require_number("noise", self.noise)
        if self.noise < 0.0:
            raise ValueError(f"noise={self.noise!r} must be at least 0")
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        _require_fraction("momentum", self.momentum)
        require_choice("lag_kind", self.lag_kind, LAG_KINDS)
        _require_fraction("high", self.high)
        require_count("max_skips", self.max_skips, at_least=0)
        _require_fraction("memory", self.memory)
        require_number("spring", self.spring, above=0.0)
        if self.spring > 1.0:
            raise ValueError(f"spring={self.spring!r} must be at most 1")

    @property
    def curvature_D(self) -> FloatArray:
        """The diagonal of H."""
        return np.geomspace(1, 0.01, self.dim)

    @property
    def start_loss(self) -> float:
        """The loss at theta = 1, where every run starts."""
        return float(0.5 * self.curvature_D.sum())


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the map. Raises ValueError with a text that starts with "NAME=VALUE"."""

    lag: int
    lr: float
    control: str
    seed: int

    def __post_init__(self) -> None:
        require_count("lag", self.lag, at_least=0)
        require_number("lr", self.lr, above=0.0)
        require_choice("control", self.control, ALL_CONTROLS)
        require_count("seed", self.seed, at_least=0)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What one cell did.

    loss: mean of 0.5 theta' H theta over the last 200 steps; None if it diverged (passed 1e8 or was
        not finite).
    cosine: mean cosine of consecutive raw gradients; of the last 50 before the end if it diverged;
        None if there never were two gradients.
    skipped: steps that were skipped.
    losses, cosines: one for each step made (cosines from the second on) where a trajectory was
        asked for, else None.
    """

    lag: int
    lr: float
    control: str
    seed: int
    loss: float | None
    cosine: float | None
    skipped: int
    losses: tuple[float, ...] | None = None
    cosines: tuple[float, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The cell as `sidestep simulate --json` prints it."""
        names = ("lag", "lr", "control", "loss", "cosine", "skipped")
        return {name: getattr(self, name) for name in names}


def _require_fraction(name: str, value: float) -> None:
    require_number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value!r} must be at least 0 and below 1")
