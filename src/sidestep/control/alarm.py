"""A rule that says when a run is likely to collapse. Pure Python: it also reads past runs.

Three signs, each over the last `window` measured steps:

- **alignment**: the mean excess alignment is above `excess_limit`; where there is none, the mean
  cosine is above `cosine_limit`, or by `cosine_rise` above that of the run's first window.
- **weights**: the mean effective sample size is below `ess_limit`: few tokens carry the update.
- **norm**: the median gradient norm is `norm_factor` times that of the run's first window.

"watch" is any sign. "alarm" is alignment together with another sign, or alone for `patience` steps:
the cosine rises before the reward falls, and mostly before the others. The numbers are ours and
plain guesses from small models; how often the rule is wrong, and how early it is, is for the study.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sidestep.control.checks import require_cosine, require_count, require_number

Level = Literal["ok", "watch", "alarm"]


@dataclass(frozen=True, slots=True)
class AlarmState:
    """level, and why: "" for "ok", else the signs with their numbers."""

    level: Level
    reason: str


class Alarm:
    """Told each step's numbers in turn, it says how the run looks. See the module for the rule.

    Raises ValueError naming the argument and its value.
    """

    def __init__(
        self,
        *,
        window: int = 20,
        cosine_limit: float = 0.6,
        cosine_rise: float = 0.2,
        excess_limit: float = 0.2,
        ess_limit: float = 0.3,
        norm_factor: float = 3.0,
        patience: int = 40,
    ) -> None:
        require_count("window", window, at_least=1)
        require_cosine("cosine_limit", cosine_limit)
        require_number("cosine_rise", cosine_rise, above=0.0)
        require_number("excess_limit", excess_limit, above=0.0)
        require_number("ess_limit", ess_limit, at_least=0.0)
        require_number("norm_factor", norm_factor, above=1.0)
        require_count("patience", patience, at_least=1)
        self._cosine_limit, self._cosine_rise = cosine_limit, cosine_rise
        self._excess_limit, self._ess_limit = excess_limit, ess_limit
        self._norm_factor, self._patience = norm_factor, patience
        self._cosine = _Recent(window)
        self._excess = _Recent(window)
        self._ess = _Recent(window)
        self._norm = _Recent(window)
        self._aligned_steps = 0

    def update(
        self,
        *,
        cosine: float | None = None,
        norm: float | None = None,
        ess: float | None = None,
        excess: float | None = None,
    ) -> AlarmState:
        """Take in one step; None is a number that the step does not have.

        cosine, excess, norm: of its `ControlRecord` (`norm_gradient`). ess: effective sample size
        of its importance weights as a fraction of its tokens.
        """
        told = (
            (self._cosine, cosine),
            (self._norm, norm),
            (self._ess, ess),
            (self._excess, excess),
        )
        for recent, value in told:
            if value is not None:
                recent.add(value)
        alignment = self._alignment()
        self._aligned_steps = self._aligned_steps + 1 if alignment else 0
        others = [sign for sign in (self._weights(), self._long()) if sign]
        signs = ", ".join([alignment, *others] if alignment else others)
        if alignment and others:
            return AlarmState("alarm", f"likely to collapse: {signs}")
        if self._aligned_steps >= self._patience:
            since = f"for {self._aligned_steps} steps"
            return AlarmState("alarm", f"likely to collapse: {signs} {since}")
        return AlarmState("watch" if signs else "ok", signs)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "cosine": self._cosine.state(),
            "excess": self._excess.state(),
            "ess": self._ess.state(),
            "norm": self._norm.state(),
            "aligned_steps": self._aligned_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as if unbroken, with the same arguments."""
        self._cosine.load(state["cosine"])
        self._excess.load(state["excess"])
        self._ess.load(state["ess"])
        self._norm.load(state["norm"])
        self._aligned_steps = int(state["aligned_steps"])

    def _alignment(self) -> str:
        excess, cosine, first = self._excess.mean, self._cosine.mean, self._cosine.first_mean
        if excess is not None:
            over = excess > self._excess_limit
            return f"excess alignment {excess:.2f} (limit {self._excess_limit:g})" if over else ""
        if cosine is None or first is None:
            return ""
        if cosine > self._cosine_limit:
            return f"cosine {cosine:.2f} (limit {self._cosine_limit:g})"
        if cosine > first + self._cosine_rise:
            return f"cosine {cosine:.2f} ({first:.2f} at the start)"
        return ""

    def _weights(self) -> str:
        ess = self._ess.mean
        over = ess is not None and ess < self._ess_limit
        return f"effective sample size {ess:.2f} (limit {self._ess_limit:g})" if over else ""

    def _long(self) -> str:
        norm, first = self._norm.median, self._norm.first_median
        if norm is None or not first or norm < self._norm_factor * first:
            return ""
        return f"gradient norm {norm / first:.1f} times that of the start"


class _Recent:
    """The first and the last `window` values; no statistics before there are that many."""

    def __init__(self, window: int) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=window)
        self._window = window

    def add(self, value: float) -> None:
        if len(self._first) < self._window:
            self._first.append(value)
        self._last.append(value)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self._last) if self._is_full else None

    @property
    def median(self) -> float | None:
        return statistics.median(self._last) if self._is_full else None

    @property
    def first_mean(self) -> float | None:
        return statistics.fmean(self._first) if self._is_full else None

    @property
    def first_median(self) -> float | None:
        return statistics.median(self._first) if self._is_full else None

    @property
    def _is_full(self) -> bool:
        return len(self._last) == self._window

    def state(self) -> dict[str, list[float]]:
        return {"first": list(self._first), "last": list(self._last)}

    def load(self, state: Mapping[str, list[float]]) -> None:
        self._first = [float(value) for value in state["first"]]
        self._last = deque((float(value) for value in state["last"]), maxlen=self._window)
