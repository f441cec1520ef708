"""Lags: how many steps before its use each gradient's weights were current.

A random lag is drawn for every step anew. P(lag >= k) = tail(k / scale) for k up to CAP times the
mean, and 0 above it: "geometric" has tail(x) = exp(-x), the memoryless one; "heavy" has
tail(x) = (1 + x)^-1.5 (Lomax, a shifted Pareto), whose variance would be infinite without the cap.
The scale is such that the mean, cap included, is the lag asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sidestep.control.simulate.arrays import FloatArray, IntArray

CAP = 16
HEAVY_EXPONENT = 1.5
# Beside the seed: a stream of its own, so that the noise is the same for every kind of lag.
_STREAM = 0x1A6


def draw_lags(kind: str, mean: int, steps: int, seed: int) -> IntArray:
    """The lag of every step, shape T. The same seed draws the same uniform numbers for any mean and
    kind, so that two maps differ by the lags' law and not by luck.

    kind: "fixed", "geometric" or "heavy".
    """
    if kind == "fixed" or mean == 0:
        return np.full(steps, mean, dtype=np.int64)
    survival = survivals(kind, mean)
    uniform_T = np.random.default_rng((seed, _STREAM)).random(steps)
    # The number of k with P(lag >= k) > u; searchsorted wants them rising.
    return np.searchsorted(-survival, -uniform_T, side="left").astype(np.int64)


def survivals(kind: str, mean: int) -> FloatArray:
    """P(lag >= k) for k = 1 .. CAP * mean; they sum to the mean."""
    tail = _TAILS[kind]
    k = np.arange(1, CAP * mean + 1, dtype=np.float64)
    low, high = 0.0, float(CAP * mean)
    while float(tail(k / high).sum()) < mean:
        high *= 2
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if float(tail(k / scale).sum()) < mean else (low, scale)
    return tail(k / high)


def _exponential(x: FloatArray) -> FloatArray:
    return np.exp(-x)


def _lomax(x: FloatArray) -> FloatArray:
    return np.power(1.0 + x, -HEAVY_EXPONENT)


_TAILS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "geometric": _exponential,
    "heavy": _lomax,
}
