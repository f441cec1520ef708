"""Quantiles of log-ratios that add up over micro-batches: counts in fixed bins.

A bin is 2 % wide in |log ratio| from 1e-4 on; all below is one bin at 0. So a quantile is right to
1 %, in at most 1,235 counts, whatever the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

_FLOOR = 1e-4
_STEP = math.log(1.02)


def count_log_ratios(log_ratio_N: torch.Tensor) -> dict[int, int]:
    """bin -> number of log-ratios. Sums of two such tables (bin by bin) are that of both parts.

    Values that are not finite are left out.
    """
    values = log_ratio_N.detach().double()
    values = values[values.isfinite()]
    steps = (values.abs() / _FLOOR).clamp(min=1.0).log() / _STEP
    bins = torch.where(values.abs() < _FLOOR, 0.0, values.sign() * (steps.floor() + 1.0))
    found, counts = torch.unique(bins.long(), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The log-ratio below or at which `share` of all lie (nearest rank); None if there are none.

    Raises ValueError unless 0 <= share <= 1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share is {share!r}: it must be between 0 and 1")
    rank = max(1, math.ceil(share * sum(counts.values())))
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if seen >= rank:
            return _middle(index)
    return None


def _middle(index: int) -> float:
    if index == 0:
        return 0.0
    return math.copysign(_FLOOR * math.exp((abs(index) - 0.5) * _STEP), index)
