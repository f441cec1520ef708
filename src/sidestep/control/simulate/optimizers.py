"""From the applied gradient to the direction of the step: theta <- theta - lr * direction.

A skipped step leaves an optimizer's memory as it was, and Adam's count too: skip means skip.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sidestep.control.simulate.arrays import BoolArray, FloatArray, Shrinking
from sidestep.control.simulate.setting import Setting

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults


class Optimizer(Protocol):
    """One optimizer with the memory of all cells."""

    def direction(self, gradient_ND: FloatArray, skip_N: BoolArray | None) -> FloatArray:
        """What lr multiplies. The rows of skipped cells mean nothing. skip_N None: none skips."""
        ...

    def keep(self, kept_N: BoolArray) -> None:
        """Forget cells that have diverged."""
        ...


@dataclass
class Sgd(Shrinking):
    """The gradient itself."""

    def direction(self, gradient_ND: FloatArray, skip_N: BoolArray | None) -> FloatArray:
        return gradient_ND


@dataclass
class Momentum(Shrinking):
    """torch's SGD(momentum=...): v <- momentum v + g, no dampening."""

    momentum: float
    velocity_ND: FloatArray

    def direction(self, gradient_ND: FloatArray, skip_N: BoolArray | None) -> FloatArray:
        new_ND = self.momentum * self.velocity_ND + gradient_ND
        self.velocity_ND = unless_skipped(new_ND, self.velocity_ND, skip_N)
        return new_ND


@dataclass
class Adam(Shrinking):
    """torch's Adam with its default betas and epsilon."""

    first_ND: FloatArray
    second_ND: FloatArray
    count_N: FloatArray

    def direction(self, gradient_ND: FloatArray, skip_N: BoolArray | None) -> FloatArray:
        first_ND = BETA1 * self.first_ND + (1 - BETA1) * gradient_ND
        second_ND = BETA2 * self.second_ND + (1 - BETA2) * gradient_ND * gradient_ND
        count_N1 = self.count_N[:, None] + 1
        mean_ND = first_ND / (1 - BETA1**count_N1)
        size_ND = np.sqrt(second_ND / (1 - BETA2**count_N1)) + EPSILON
        self.first_ND = unless_skipped(first_ND, self.first_ND, skip_N)
        self.second_ND = unless_skipped(second_ND, self.second_ND, skip_N)
        self.count_N = self.count_N + (1.0 if skip_N is None else ~skip_N)
        return mean_ND / size_ND


def unless_skipped(new_ND: FloatArray, old_ND: FloatArray, skip_N: BoolArray | None) -> FloatArray:
    """The new rows, but the old ones of cells that skip."""
    return new_ND if skip_N is None else np.where(skip_N[:, None], old_ND, new_ND)


# By name: makes the optimizer for a shape (cells, dimensions).
MAKERS: dict[str, Callable[[Setting, tuple[int, int]], Optimizer]] = {
    "sgd": lambda setting, shape: Sgd(),
    "momentum": lambda setting, shape: Momentum(setting.momentum, np.zeros(shape)),
    "adam": lambda setting, shape: Adam(np.zeros(shape), np.zeros(shape), np.zeros(shape[0])),
}
