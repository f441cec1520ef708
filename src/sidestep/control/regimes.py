"""From a cosine to what happens to the step: pass, project, damp or skip."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sidestep.control.checks import require_choice, require_count, require_number
from sidestep.control.record import Regime

Above = Literal["skip", "damp", "project"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a step.

    removed: the share a of g's part along p that is taken out: g' = g - a c |g| p/|p|.
    step_scale: factor on the learning rate of this step.
    """

    regime: Regime
    reason: str
    removed: float = 0.0
    step_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """When a cosine c is acted on, and how hard.

    Pass while c <= low, project while low < c <= high, over high do what `above` says. Only c > 0
    is ever acted on: opposed gradients are the healthy sign of a step that was long enough.

    strength: share of the parallel part that a projection removes, in (0, 1].
    residual: instead of strength, the cosine that a projection leaves behind, in [0, low].
    damp_power: in regime "damp" the step is multiplied by (1 - c) ** damp_power.
    max_skips: skips in a row after which the step is projected instead.

    Raises ValueError naming the argument and its value.
    """

    low: float
    high: float
    strength: float
    residual: float | None
    above: Above
    damp_power: float
    max_skips: int

    def __post_init__(self) -> None:
        for name, cosine in (("low", self.low), ("high", self.high)):
            require_number(name, cosine)
            if not -1.0 <= cosine <= 1.0:
                raise ValueError(f"{name}={cosine} is not a cosine: it must be in [-1, 1]")
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: it must be at most high")
        require_number("strength", self.strength)
        if not 0.0 < self.strength <= 1.0:
            raise ValueError(f"strength={self.strength} must be in (0, 1]")
        self._check_residual()
        require_choice("above", self.above, get_args(Above))
        require_number("damp_power", self.damp_power, above=0.0)
        require_count("max_skips", self.max_skips, at_least=0)

    def _check_residual(self) -> None:
        if self.residual is None:
            return
        require_number("residual", self.residual)
        if not 0.0 <= self.residual <= self.low or self.residual == 1.0:
            raise ValueError(
                f"residual={self.residual} is the cosine left behind: it must be in [0, low] "
                f"and below 1 (low={self.low})"
            )
        if self.strength != 1.0:
            raise ValueError(
                f"residual={self.residual} replaces strength={self.strength}: give one of them"
            )

    def decide(self, cosine: float, skips_in_a_row: int, reach: float = 1.0) -> Decision:
        """What a step with this cosine gets.

        skips_in_a_row: skips directly before it.
        reach: share of |p| on parameters that have a gradient now (`Products.reach`).
        """
        if cosine <= max(self.low, 0.0):
            return Decision("pass", "at most low" if cosine <= self.low else "not positive")
        if cosine <= self.high:
            return Decision("project", "above low", removed=self.removed_share(cosine, reach))
        if self.above == "damp":
            return Decision("damp", "above high", step_scale=(1.0 - cosine) ** self.damp_power)
        if self.above == "skip" and skips_in_a_row < self.max_skips:
            return Decision("skip", "above high")
        reason = "max_skips reached" if self.above == "skip" else "above high"
        return Decision("project", reason, removed=self.removed_share(cosine, reach))

    def removed_share(self, cosine: float, reach: float = 1.0) -> float:
        """The share a that a projection removes: `strength`, or what leaves cosine `residual`.

        a = 1 - r sqrt(1 - c^2) / (c sqrt(1 - r^2)) for residual r, from <g',p> = (1 - a) <g,p> and
        |g'|^2 = |g|^2 (1 - (2a - a^2) c^2). Where only a part of p can be reached, c and r are the
        cosines with that part.
        """
        if self.residual is None:
            return self.strength
        c, r = min(1.0, cosine / reach), self.residual / reach
        return 1.0 - r * _sine(c) / (c * _sine(r)) if r < c else 0.0


def _sine(cosine: float) -> float:
    return math.sqrt((1.0 - cosine) * (1.0 + cosine))
