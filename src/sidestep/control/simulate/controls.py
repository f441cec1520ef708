"""What each control takes out of a gradient. One class each, for the rows of its cells.

All but the spring work on the gradient, before the optimizer. g is this step's gradient, p the one
before, both raw; b the behaviour point whose gradient g is (with random lags: of this step's own
lag); d = theta - b what the policy already moved since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sidestep.control.simulate.arrays import BoolArray, FloatArray, Shrinking, dots
from sidestep.control.simulate.setting import Setting

# Below this the behaviour points have hardly moved: no secant.
_LEAST_SQUARE = 1e-18


@dataclass(frozen=True, slots=True)
class Seen:
    """What a control may look at: one row for each of its cells, from the second step on."""

    theta_ND: FloatArray
    gradient_ND: FloatArray
    previous_ND: FloatArray  # the gradient of the step before
    behaviour_ND: FloatArray
    behaviour_before_ND: FloatArray  # the behaviour point of the step before
    dot_N: FloatArray  # <g, p>
    previous_square_N: FloatArray  # <p, p>
    cosine_N: FloatArray

    def rows(self, which: slice) -> Seen:
        return Seen(
            self.theta_ND[which],
            self.gradient_ND[which],
            self.previous_ND[which],
            self.behaviour_ND[which],
            self.behaviour_before_ND[which],
            self.dot_N[which],
            self.previous_square_N[which],
            self.cosine_N[which],
        )


class Control(Protocol):
    """One control with the memory of its cells."""

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        """The gradient to step with, and which cells make no step (None: all step)."""
        ...

    def pulled(self, seen: Seen) -> FloatArray | None:
        """What the step that the optimizer makes is pulled back by; None: not at all."""
        ...

    def keep(self, kept_N: BoolArray) -> None:
        """Forget cells that have diverged."""
        ...


class _OnGradients(Shrinking):
    def pulled(self, seen: Seen) -> FloatArray | None:
        return None


@dataclass
class Untouched(_OnGradients):
    """none: g."""

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        return seen.gradient_ND, None


@dataclass
class Previous(_OnGradients):
    """previous: g - (<g,p>/<p,p>) p where <g,p> > 0: the whole of what continues the same way."""

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        share_N = np.zeros_like(seen.dot_N)
        np.divide(seen.dot_N, seen.previous_square_N, out=share_N, where=seen.cosine_N > 0)
        return seen.gradient_ND - share_N[:, None] * seen.previous_ND, None


@dataclass
class Skip(Previous):
    """skip: no step where the cosine is above `high`, at most `max_skips` in a row; otherwise as
    `previous`.
    """

    high: float
    max_skips: int
    skips_in_a_row_N: FloatArray

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        projected_ND, _ = Previous.applied(self, seen)
        wanted_N = (seen.cosine_N > 0) & (seen.cosine_N > self.high)
        skip_N = wanted_N & (self.skips_in_a_row_N < self.max_skips)
        self.skips_in_a_row_N = np.where(skip_N, self.skips_in_a_row_N + 1, 0.0)
        return projected_ND, skip_N


@dataclass
class Displacement(_OnGradients):
    """displacement (strength 1) and half (0.5): g - strength * share * d where the share
    <g,d>/<d,d> is negative, that is where g still pushes the way the policy has gone since.
    """

    strength: float

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        moved_ND = seen.theta_ND - seen.behaviour_ND
        share_N, _ = _shares(seen.gradient_ND, moved_ND)
        removed_N = np.where(share_N < 0, self.strength * share_N, 0.0)
        return seen.gradient_ND - removed_N[:, None] * moved_ND, None


@dataclass
class Secant(_OnGradients):
    """secant: g + min(h, -share) d while the share is negative, else g + h d: the gradient at theta
    to first order, but never past zero along d. h is the curvature seen along the way the behaviour
    points moved: EMA<g - p, b - b_before> / EMA|b - b_before|^2, at least 0.
    """

    memory: float
    along_N: FloatArray
    square_N: FloatArray

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        went_ND = seen.behaviour_ND - seen.behaviour_before_ND
        change_N = dots(seen.gradient_ND - seen.previous_ND, went_ND)
        self.along_N = self.memory * self.along_N + (1 - self.memory) * change_N
        self.square_N = self.memory * self.square_N + (1 - self.memory) * dots(went_ND, went_ND)

        moved_ND = seen.theta_ND - seen.behaviour_ND
        share_N, has_moved_N = _shares(seen.gradient_ND, moved_ND)
        is_known_N = has_moved_N & (self.square_N > _LEAST_SQUARE)
        curvature_N = np.zeros_like(share_N)
        np.divide(self.along_N, self.square_N, out=curvature_N, where=is_known_N)
        curvature_N = np.maximum(curvature_N, 0.0)
        spent_N = np.where(share_N < 0, np.minimum(curvature_N, -share_N), curvature_N)
        return seen.gradient_ND + spent_N[:, None] * moved_ND, None


@dataclass
class Spring(Shrinking):
    """spring: g, and the step is then pulled back by spring * d."""

    spring: float

    def applied(self, seen: Seen) -> tuple[FloatArray, BoolArray | None]:
        return seen.gradient_ND, None

    def pulled(self, seen: Seen) -> FloatArray | None:
        return self.spring * (seen.theta_ND - seen.behaviour_ND)


def _shares(gradient_ND: FloatArray, moved_ND: FloatArray) -> tuple[FloatArray, BoolArray]:
    """<g,d>/<d,d>, 0 where d is zero; and where it is not."""
    square_N = dots(moved_ND, moved_ND)
    has_moved_N = square_N > 0
    share_N = np.zeros_like(square_N)
    np.divide(dots(gradient_ND, moved_ND), square_N, out=share_N, where=has_moved_N)
    return share_N, has_moved_N


# By name, in the order of setting.ALL_CONTROLS: makes the control for a number of cells.
MAKERS: dict[str, Callable[[Setting, int], Control]] = {
    "none": lambda setting, n: Untouched(),
    "previous": lambda setting, n: Previous(),
    "skip": lambda setting, n: Skip(setting.high, setting.max_skips, np.zeros(n)),
    "displacement": lambda setting, n: Displacement(1.0),
    "half": lambda setting, n: Displacement(0.5),
    "secant": lambda setting, n: Secant(setting.memory, np.zeros(n), np.zeros(n)),
    "spring": lambda setting, n: Spring(setting.spring),
}
