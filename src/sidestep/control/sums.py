"""Sums of products of what lies on this rank, and the inner products they add up to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.control.kernels import sums_of_products
from sidestep.control.sharding import Held

# So many elements of small tensors are summed in one call, which costs about 1 ms on a CPU, and
# held on to until then: references that are made for the measurement are temporaries of this size.
CPU_PACK = 2**22
DEVICE_PACK = 2**26


@dataclass(frozen=True, slots=True)
class Pair:
    """What this rank has of one parameter's part of g and of p. None stands for zeros.

    g: a plain tensor, or a coalesced sparse one: then p is reachable where g has elements.
    p: a plain tensor of g's shape.
    compared: whether the reference speaks about this parameter. If not, g counts for the norm
        alone and p is None.
    held: how the parameter lies over the ranks; None: it is this rank's own.
    """

    g: Tensor | None
    p: Tensor | None
    compared: bool = True
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class Products:
    """Inner products, accurate to 1e-6 |g||p|; see `kernels.sums_of_products`.

    gg: <g,g> over all parameters.
    gg_compared, pp, gp: over the parameters the reference speaks about.
    pp_reachable: <p,p> where there is a gradient. Elsewhere nothing can be projected.
    finite: every element of g is a finite number, copies that do not count included.
    has_gradient, has_reference: there is any g, any p.
    """

    gg: float
    gg_compared: float
    pp: float
    pp_reachable: float
    gp: float
    finite: bool
    has_gradient: bool = True
    has_reference: bool = True

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


def total(parts: Sequence[Products]) -> Products:
    """The products over several scopes that share no parameter."""
    return Products(
        gg=math.fsum(part.gg for part in parts),
        gg_compared=math.fsum(part.gg_compared for part in parts),
        pp=math.fsum(part.pp for part in parts),
        pp_reachable=math.fsum(part.pp_reachable for part in parts),
        gp=math.fsum(part.gp for part in parts),
        finite=all(part.finite for part in parts),
        has_gradient=any(part.has_gradient for part in parts),
        has_reference=any(part.has_reference for part in parts),
    )


# Of one row, in this order: gg, pp and gp where there is a gradient; pp elsewhere; gg of what is
# compared; then how many times: g not compared, g not finite, a gradient, a reference.
COLUMNS = 9


def row_of_sums(pairs: Iterable[Pair], counts: Callable[[Held], bool]) -> Tensor:
    """The COLUMNS sums of this rank, float64. Rows of several ranks add up.

    counts: whether this rank counts its elements of a parameter. Those it does not count are
        looked at all the same: a copy that is not finite must stop the step.

    The bits of gg depend on the gs alone, so the norm is the same with and without a reference.
    """
    with_g, p_alone, elsewhere = _Pack(), _Pack(), _Pack()
    unreached = torch.zeros(1, dtype=torch.float64)
    num_compared = num_uncompared = num_references = 0
    for pair in pairs:
        here = pair.held is None or counts(pair.held)
        num_references += pair.p is not None
        if pair.g is None:
            if here and pair.p is not None:
                p_alone.add(pair.p)
            continue
        num_compared += pair.compared
        num_uncompared += not pair.compared
        g, p = pair.g, pair.p
        if g.layout == torch.sparse_coo:
            g, p, beside = _sparse(g, p)
            if here:
                unreached += beside
        if here:
            with_g.add(g, p)
        else:
            elsewhere.add(g)
    gg, pp, gp = with_g.result()
    if num_uncompared == 0:
        gg_compared = gg
    else:
        gg_compared = _squares_of_compared(pairs if num_compared else (), counts)
    broken = ~torch.isfinite(torch.stack([gg, elsewhere.result()[0].to(gg.device)])).all()
    counted = [num_uncompared, broken, num_compared + num_uncompared, num_references]
    pp_elsewhere = p_alone.result()[0] + unreached[0]
    sums = [gg, pp, gp, pp_elsewhere, gg_compared, *counted]
    return torch.stack([torch.as_tensor(x, dtype=torch.float64, device=gg.device) for x in sums])


def products_from(row: Sequence[float]) -> Products:
    """The inner products, from a row or from the sum of the rows of all ranks."""
    gg, pp, gp, pp_elsewhere, gg_compared, uncompared, broken, gradients, references = row
    return Products(
        gg=gg,
        gg_compared=gg_compared if uncompared else gg,
        pp=pp + pp_elsewhere,
        pp_reachable=pp,
        gp=gp,
        finite=broken == 0 and math.isfinite(gg),
        has_gradient=gradients > 0,
        has_reference=references > 0,
    )


class _Pack:
    """Sums of products of a stream of tensors, holding on to few of them at a time."""

    def __init__(self) -> None:
        self._gs: list[Tensor] = []
        self._ps: list[Tensor | None] = []
        self._num_elements = 0
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, g: Tensor, p: Tensor | None = None) -> None:
        self._gs.append(g)
        self._ps.append(p)
        self._num_elements += g.numel()
        if self._num_elements >= (CPU_PACK if g.device.type == "cpu" else DEVICE_PACK):
            self._flush()

    def result(self) -> Tensor:
        """(<g,g>, <p,p>, <g,p>)."""
        self._flush()
        return self._sums

    def _flush(self) -> None:
        if self._gs:
            sums = sums_of_products(self._gs, self._ps)
            self._sums = self._sums.to(sums.device) + sums
        self._gs, self._ps, self._num_elements = [], [], 0


def _sparse(g: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The elements of a sparse g, p at the same places, and <p,p> over all other places."""
    nothing = torch.zeros(1, dtype=torch.float64)
    if p is None:
        return g.values(), None, nothing
    there = p[tuple(g.indices())]
    beside = sums_of_products([p], [None])[0] - sums_of_products([there], [None])[0]
    return g.values(), there, beside.clamp(min=0.0).cpu()


def _squares_of_compared(pairs: Iterable[Pair], counts: Callable[[Held], bool]) -> Tensor:
    compared = _Pack()
    for pair in pairs:
        if pair.g is not None and pair.compared and (pair.held is None or counts(pair.held)):
            compared.add(pair.g.values() if pair.g.layout == torch.sparse_coo else pair.g)
    return compared.result()[0]
