"""Where stale gradient descent without control turns unstable, on curvature 1 and without noise."""

from __future__ import annotations

import math

from sidestep.control.checks import require_choice, require_count, require_number
from sidestep.control.simulate.setting import LAG_KINDS, OPTIMIZERS


def stability_edge(
    lag: int, *, optimizer: str = "sgd", momentum: float = 0.9, lag_kind: str = "fixed"
) -> float | None:
    """The largest learning rate (times curvature) below which descent converges.

    "sgd" at a fixed lag s: 2 sin(pi / (2 (2 s + 1))). "momentum" b: the characteristic equation
    z^(s-1) (z - 1) (z - b) = -lr meets the unit circle at z = e^(iw) first where
    (s - 1/2) w + arg(z - b) = pi / 2, so the edge is |z - 1| |z - b| there: 2 (1 + b) at lag 0, and
    for lag >= 1 the one root in (0, pi), which has no closed form and is found by bisection.

    None where we know no edge: Adam (its step does not scale with the gradient) and random lags
    (no single polynomial). Raises ValueError naming the argument.
    """
    require_count("lag", lag, at_least=0)
    require_choice("optimizer", optimizer, OPTIMIZERS)
    require_choice("lag_kind", lag_kind, LAG_KINDS)
    require_number("momentum", momentum)
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum!r} must be at least 0 and below 1")
    if optimizer == "adam" or (lag_kind != "fixed" and lag > 0):
        return None
    if optimizer == "sgd":
        return 2.0 * math.sin(math.pi / (2 * (2 * lag + 1)))
    if lag == 0:
        return 2.0 * (1.0 + momentum)
    angle = _crossing(lag, momentum)
    return _distance(angle, 1.0) * _distance(angle, momentum)


def _crossing(lag: int, momentum: float) -> float:
    """The angle of the first root on the unit circle: the phase grows with it, so bisection."""
    low, high = 0.0, math.pi
    for _ in range(80):  # far below the last bit of pi
        middle = (low + high) / 2
        phase = (lag - 0.5) * middle + math.atan2(math.sin(middle), math.cos(middle) - momentum)
        low, high = (middle, high) if phase < math.pi / 2 else (low, middle)
    return low


def _distance(angle: float, point: float) -> float:
    """|e^(i angle) - point|"""
    return math.hypot(math.cos(angle) - point, math.sin(angle))
