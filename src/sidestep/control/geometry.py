"""Inner products of this step's gradient and the reference, each over all parameters as one vector.

The only place where ranks would talk: a product over all ranks is the sum of the ranks' products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.control.kernels import sums_of_products

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Pair:
    """One parameter's part of the gradient g and of the reference p. None stands for zeros.

    compared: whether the reference speaks about this parameter; g counts only for the norm if not
        (p is None then).
    """

    g: Tensor | None
    p: Tensor | None
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Products:
    """Inner products in float64, errors below 1e-9 |g||p| for float16, bfloat16 and float32 tensors.

    gg: <g,g> over all parameters. gg_compared: over those the reference speaks about, as are pp and
        gp.
    pp_reachable: <p,p> over the parameters that have a gradient: what is None now cannot be
        projected.
    finite: every element of g is a finite number.
    """

    gg: float
    pp: float
    gp: float
    gg_compared: float
    pp_reachable: float
    finite: bool

    @property
    def norm(self) -> float:
        """|g| over all parameters."""
        return math.sqrt(self.gg)

    @property
    def norm_compared(self) -> float:
        """|g| over the parameters the reference speaks about."""
        return math.sqrt(self.gg_compared)

    @property
    def reference_norm(self) -> float:
        """|p|."""
        return math.sqrt(self.pp)

    @property
    def reach(self) -> float:
        """|p over the parameters that have a gradient| / |p|, in [0, 1]; 1 for p = 0."""
        return math.sqrt(self.pp_reachable / self.pp) if self.pp > 0.0 else 1.0

    @property
    def cosine(self) -> float | None:
        """<g,p> / (|g||p|), in [-1, 1]; None where one of them is zero or not finite."""
        lengths = self.norm_compared * self.reference_norm
        if not 0.0 < lengths < math.inf:
            return None
        return max(-1.0, min(1.0, self.gp / lengths))


# Of gradients that nobody looked at.
UNMEASURED = Products(math.nan, math.nan, math.nan, math.nan, math.nan, finite=False)


def products(pairs: Sequence[Pair]) -> Products:
    """The inner products of two vectors given parameter by parameter, in any split and order.

    Accurate for any number of elements, values from 1e-25 to 1e20 and far beyond, and float16 sums
    past 65504.
    """
    with_g = [pair for pair in pairs if pair.g is not None]
    all_compared = all(pair.compared for pair in with_g)
    gs_compared = [] if all_compared else [pair.g for pair in with_g if pair.compared]
    # Reference parts whose gradient is None still count for |p|. They are summed apart so that the
    # bits of <g,g> do not depend on whether there is a reference.
    ps_alone = [pair.p for pair in pairs if pair.g is None]
    sums = torch.cat([_sums(with_g), _squares(ps_alone), _squares(gs_compared)])
    # Across ranks: one all-reduce (sum) of `sums` belongs here, and nothing else in this package.
    gg, pp, gp, pp_alone, gg_compared = sums.tolist()
    return Products(
        gg=gg,
        pp=pp + pp_alone,
        gp=gp,
        gg_compared=gg if all_compared else gg_compared,
        pp_reachable=pp,
        finite=math.isfinite(gg),
    )


def _sums(pairs: Sequence[Pair]) -> Tensor:
    """(<g,g>, <p,p>, <g,p>) of the pairs that have a g."""
    present = [(pair.g, pair.p) for pair in pairs if pair.g is not None]
    return sums_of_products([g for g, _ in present], [p for _, p in present])


def _squares(tensors: Sequence[Tensor | None]) -> Tensor:
    """(sum of squares,) of the tensors that are there."""
    present = [tensor for tensor in tensors if tensor is not None]
    return sums_of_products(present, [None] * len(present))[:1]


def unmeasurable(grad: Tensor) -> str | None:
    """What is wrong with a gradient that `products` cannot take, with the fix; None if it can."""
    if grad.layout != torch.strided:
        return f"is sparse ({grad.layout}): use dense gradients (Embedding(sparse=False))"
    if hasattr(grad, "placements"):
        return "is a DTensor: sharded gradients are not available yet"
    if grad.dtype not in _DTYPES:
        return f"has dtype {grad.dtype}: it must be float16, bfloat16, float32 or float64"
    return None
