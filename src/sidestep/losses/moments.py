"""Mean and standard deviation over a whole optimizer batch, from parts that add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moments:
    """Weighted mean and variance of some values; `a + b` is that of both parts together.

    weight: sum of the weights (tokens, say). sum_squares: weighted sum of squared distances to the
    mean, so that no digits are lost to a large mean. lowest, highest: of the values that weigh.
    """

    weight: float = 0.0
    mean: float = 0.0
    sum_squares: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    def __add__(self, other: Moments) -> Moments:
        weight = self.weight + other.weight
        if not weight:
            return self
        shift = other.mean - self.mean
        share = other.weight / weight
        between = shift**2 * self.weight * share
        return Moments(
            weight,
            self.mean + shift * share,
            self.sum_squares + other.sum_squares + between,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
        )

    @property
    def std(self) -> float:
        """Standard deviation of the batch itself (divided by the weight, not by weight - 1)."""
        return math.sqrt(self.sum_squares / self.weight) if self.weight else 0.0


def moments(values: torch.Tensor, weights: torch.Tensor) -> Moments:
    """The record of one part. Values of weight 0 are not read. In float64 on the CPU.

    Raises ValueError if shapes differ.
    """
    if values.shape != weights.shape:
        raise ValueError(
            f"values has shape {tuple(values.shape)}, weights {tuple(weights.shape)}: they must be "
            f"equal"
        )
    weighs = weights.cpu() != 0
    if not bool(weighs.any()):
        return Moments()
    chosen, weight = values.detach().cpu().double()[weighs], weights.cpu().double()[weighs]
    total = float(weight.sum())
    mean = float((chosen * weight).sum()) / total
    squares = float(((chosen - mean).square() * weight).sum())
    return Moments(total, mean, squares, float(chosen.min()), float(chosen.max()))


def normalise(
    values: torch.Tensor, weights: torch.Tensor, batch: Moments, eps: float
) -> torch.Tensor:
    """(values - mean) / (std + eps) with the moments of the whole batch; 0 where the weight is 0.

    Exactly 0 everywhere if all values of the batch are equal: no signal, and not the rounding of
    the mean over eps. float32, without gradient. Raises ValueError unless eps > 0.
    """
    if not eps > 0:
        raise ValueError(f"eps is {eps!r}: it must be above 0")
    if batch.lowest >= batch.highest:
        return torch.zeros_like(values, dtype=torch.float32)
    scaled = (values.detach().double() - batch.mean) / (batch.std + eps)
    return torch.where(weights != 0, scaled, 0.0).float()
