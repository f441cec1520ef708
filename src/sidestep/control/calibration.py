"""Thresholds "calibrate": read from the cosines of the run's own first steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sidestep.control.settings import Settings

LOW_QUANTILE = 0.9
HIGH_QUANTILE = 0.99

_log = logging.getLogger(__name__)


class Calibration:
    """The thresholds of one scope: quantiles of the first `calibrate_steps` cosines.

    A threshold that is given as a number stays; the other one is fitted so that low <= high.
    """

    def __init__(self, settings: Settings, scope: str) -> None:
        self._settings = settings
        self._scope = scope
        self._cosines: list[float] = []
        self._thresholds = None if settings.calibrates else _numbers(settings)
        self._told_of_lag = False

    @property
    def thresholds(self) -> tuple[float, float] | None:
        """low and high; None while they are being measured."""
        return self._thresholds

    def observe(self, cosine: float, lag: float | None) -> None:
        """Take in the cosine of a step, while `thresholds` is None."""
        if lag and not self._told_of_lag:
            self._told_of_lag = True
            _log.warning(
                "calibrating on stale data (lag %g): the thresholds will take that staleness for "
                "normal. Calibrate at lag 0, in the run's first %d steps, or give low and high "
                "numbers",
                *(lag, self._settings.calibrate_steps),
            )
        self._cosines.append(cosine)
        if len(self._cosines) < self._settings.calibrate_steps:
            return
        self._thresholds = low, high = _from_quantiles(self._settings, self._cosines)
        # Said as a warning: it decides what the control does from now on, and is seen by default.
        _log.warning(
            "calibrated on %d steps (%s): low=%.4f, high=%.4f",
            *(len(self._cosines), self._scope, low, high),
        )

    def state_dict(self) -> dict[str, Any]:
        thresholds = None if self._thresholds is None else list(self._thresholds)
        return {"cosines": list(self._cosines), "thresholds": thresholds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Thresholds given as numbers win over those of the state."""
        if not self._settings.calibrates:
            return
        self._cosines = [float(cosine) for cosine in state["cosines"]]
        found = state["thresholds"]
        self._thresholds = None if found is None else (float(found[0]), float(found[1]))


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile by linear interpolation between order statistics, as numpy.quantile."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def _numbers(settings: Settings) -> tuple[float, float]:
    return float(settings.low), float(settings.high)


def _from_quantiles(settings: Settings, cosines: Sequence[float]) -> tuple[float, float]:
    low = quantile(cosines, LOW_QUANTILE) if settings.low == "calibrate" else float(settings.low)
    high = quantile(cosines, HIGH_QUANTILE) if settings.high == "calibrate" else None
    if high is None:
        high = float(settings.high)
        return min(low, high), high
    return low, max(low, high)
