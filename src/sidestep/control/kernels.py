"""The passes over memory: sums of products, projection, scaling. Plain torch, in chunks that stay in cache.

Every function takes dense strided tensors of any floating dtype on any device and works under
`torch.no_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements handled at once: large enough that the cost of a torch call vanishes, small enough to
# stay in cache and to bound temporaries (16 MiB of float64) whatever the size of the model.
CHUNK = 2**20
# Scalars reach float32 kernels as float32. Outside this range a factor is applied in several exact
# powers of two.
_EXPONENT_STEP = 100


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """(sum g g, sum p p, sum g p) over all elements of the pairs, float64, on the CPU.

    A p of None stands for zeros. Products of float32 numbers are exact in float64 and cannot leave
    its range, so tiny and huge values need no scaling, and a sum is finite exactly if every element
    is. The bits of the first sum depend on gs alone, which makes a clip factor the same with and
    without a reference.
    """
    accumulators: dict[torch.device, _Accumulator] = {}
    with_p = any(p is not None for p in ps)
    for g, p in zip(gs, ps, strict=True):
        if g.device not in accumulators:
            size = min(CHUNK, sum(t.numel() for t in gs if t.device == g.device))
            accumulators[g.device] = _Accumulator(_float64_device(g.device), size, with_p)
        accumulators[g.device].add(g, p)
    total = torch.zeros(3, dtype=torch.float64)
    for accumulator in accumulators.values():
        total += accumulator.result().cpu()
    return total


class _Accumulator:
    """Packs tensors of any size into one float64 buffer and takes the products whenever it is full.

    Packing costs one copy a tensor, which the conversion to float64 needs anyway, and makes a model
    of hundreds of small tensors as cheap as one large tensor.
    """

    def __init__(self, device: torch.device, size: int, with_p: bool) -> None:
        self.g = torch.empty(size, dtype=torch.float64, device=device)
        self.p = torch.empty(size, dtype=torch.float64, device=device) if with_p else None
        self.filled = 0
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, g: Tensor, p: Tensor | None) -> None:
        flat_g = g.reshape(-1)
        flat_p = None if p is None else p.reshape(-1)
        start, num_elements = 0, flat_g.numel()
        while start < num_elements:
            take = min(num_elements - start, self.g.numel() - self.filled)
            place = slice(self.filled, self.filled + take)
            source = slice(start, start + take)
            self.g[place].copy_(flat_g[source].to(self.g.device))
            if self.p is not None:
                if flat_p is None:
                    self.p[place].zero_()
                else:
                    self.p[place].copy_(flat_p[source].to(self.p.device))
            self.filled += take
            start += take
            if self.filled == self.g.numel():
                self._flush()

    def result(self) -> Tensor:
        self._flush()
        return self.sums

    def _flush(self) -> None:
        if self.filled == 0:
            return
        g = self.g[: self.filled]
        self.sums[0] += torch.dot(g, g)
        if self.p is not None:
            p = self.p[: self.filled]
            self.sums[1] += torch.dot(p, p)
            self.sums[2] += torch.dot(g, p)
        self.filled = 0


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> None:
    """g' = grad - coefficient * reference; then reference = grad (`store_raw`) or g', and grad = factor * g'.

    In place, in one pass, computed in float32 or better and rounded once to each tensor's dtype.
    `coefficient` may lie outside float32's range (|g| = 1e20 and |p| = 1e-25 need 1e45).
    """
    for g, p in _chunks(grad, reference):
        work = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
        if _fits_float32(coefficient):
            work.sub_(p.to(g.device), alpha=coefficient)
        else:
            work.sub_(scale_(p.to(g.device, work.dtype, copy=True), coefficient))
        p.copy_(g if store_raw else work)
        scale_(work, factor)
        if g.dtype == torch.float16:
            # |g'| <= |g|, but one element may grow past 65504 and would become inf.
            work.clamp_(-65504.0, 65504.0)
        g.copy_(work)


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """tensor *= factor in place, also for a factor outside float32's range; returns the tensor."""
    if factor == 1.0:
        return tensor
    if _fits_float32(factor):
        return tensor.mul_(factor)
    mantissa, exponent = math.frexp(factor)
    tensor.mul_(mantissa)
    while exponent:
        step = max(-_EXPONENT_STEP, min(_EXPONENT_STEP, exponent))
        tensor.mul_(2.0**step)
        exponent -= step
    return tensor


def _fits_float32(factor: float) -> bool:
    return factor == 0.0 or abs(math.frexp(factor)[1]) <= _EXPONENT_STEP


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of two tensors of one shape, chunk by chunk; whole where the memory layout does not allow it."""
    if first.is_contiguous() and second.is_contiguous():
        yield from zip(
            torch.split(first.view(-1), CHUNK), torch.split(second.view(-1), CHUNK), strict=True
        )
    else:
        yield first, second


def _float64_device(device: torch.device) -> torch.device:
    """Where to accumulate what lives on `device`: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device
