"""Inner products of this step's gradient g and the reference p, each over all parameters.

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
    """One parameter's part of g and of p. None stands for zeros.

    compared: whether the reference speaks about this parameter. If not, g counts for the norm
        alone and p is None.
    """

    g: Tensor | None
    p: Tensor | None
    compared: bool = True


@dataclass(frozen=True, slots=True)
class Products:
    """Inner products, computed in float64: their error is below 1e-9 |g||p|.

    gg: <g,g> over all parameters.
    gg_compared, pp, gp: over the parameters the reference speaks about.
    pp_reachable: <p,p> over those of them that have a gradient. Where it is None nothing can be
        projected.
    finite: every element of g is a finite number.
    """

    gg: float
    gg_compared: float
    pp: float
    pp_reachable: float
    gp: float
    finite: bool

    @property
    def norm(self) -> float:
        """|g| over all parameters."""
        return math.sqrt(self.gg)

    @property
    def cosine(self) -> float | None:
        """<g,p> / (|g||p|), in [-1, 1]; None where one of them is zero or not finite."""
        lengths = math.sqrt(self.gg_compared) * math.sqrt(self.pp)
        if not 0.0 < lengths < math.inf:
            return None
        return max(-1.0, min(1.0, self.gp / lengths))

    @property
    def reach(self) -> float:
        """|p where there is a gradient| / |p|, in [0, 1]; 1 for p = 0."""
        return math.sqrt(self.pp_reachable / self.pp) if self.pp > 0.0 else 1.0


# Of gradients that nobody looked at.
UNMEASURED = Products(math.nan, math.nan, math.nan, math.nan, math.nan, finite=False)


def products(pairs: Sequence[Pair]) -> Products:
    """The inner products of two vectors that are given parameter by parameter.

    Any number of elements, any split, values from 1e-25 to 1e20 and far beyond, float16 sums past
    65504. Reads every tensor once.
    """
    with_g = [pair for pair in pairs if pair.g is not None]
    all_compared = all(pair.compared for pair in with_g)
    gs_compared = [] if all_compared else [pair.g for pair in with_g if pair.compared]
    # Reference parts without a gradient are summed apart: the bits of <g,g> must not depend on
    # whether there is a reference.
    ps_alone = [pair.p for pair in pairs if pair.g is None]
    sums = torch.cat([_sums(with_g), _squares(ps_alone), _squares(gs_compared)])
    # Across ranks: one all-reduce (sum) of `sums` belongs here, and nothing else in this package.
    gg, pp, gp, pp_alone, gg_compared = sums.tolist()
    return Products(
        gg=gg,
        gg_compared=gg if all_compared else gg_compared,
        pp=pp + pp_alone,
        pp_reachable=pp,
        gp=gp,
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
    """Why `products` cannot take a gradient, with the fix; None if it can."""
    if grad.layout != torch.strided:
        return f"is sparse ({grad.layout}): use dense gradients (Embedding(sparse=False))"
    if hasattr(grad, "placements"):
        return "is a DTensor: sharded gradients are not available yet"
    if grad.dtype not in _DTYPES:
        return f"has dtype {grad.dtype}: it must be float16, bfloat16, float32 or float64"
    return None
