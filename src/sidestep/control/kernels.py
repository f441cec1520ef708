"""The passes over memory: sums of products, projection, scaling.

Plain torch, in chunks that stay in cache. Every function takes dense strided tensors of any
floating dtype on any device, and works under `torch.no_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements handled at once. On a CPU two float64 buffers of this size (1 MiB) stay near the core and
# are small enough for the allocator to reuse: twice the size took three times as long at 1e6
# parameters, in page faults. Elsewhere kernel launches cost more than cache misses.
CPU_CHUNK = 2**16
DEVICE_CHUNK = 2**24
# Scalars reach float32 kernels as float32. A factor outside 2^-100 .. 2^100 is applied in several
# exact powers of two.
_EXPONENT_STEP = 100


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """(sum g g, sum p p, sum g p) over all elements of the pairs: float64, on the CPU.

    A p of None stands for zeros. Products of float32 numbers are exact in float64 and cannot leave
    its range: tiny and huge values need no scaling, and the first sum is finite exactly if every
    element of gs is. Its bits depend on gs alone, so a clip factor is the same with and without a
    reference.
    """
    with_p = any(p is not None for p in ps)
    accumulators: dict[torch.device, _Accumulator] = {}
    for g, p in zip(gs, ps, strict=True):
        if g.device not in accumulators:
            total = sum(t.numel() for t in gs if t.device == g.device)
            size = min(_chunk_size(g.device), total)
            accumulators[g.device] = _Accumulator(_float64_device(g.device), size, with_p)
        accumulators[g.device].add(g, p)
    sums = torch.zeros(3, dtype=torch.float64)
    for accumulator in accumulators.values():
        sums += accumulator.result().cpu()
    return sums


class _Accumulator:
    """Packs tensors into one float64 buffer and takes the products whenever it is full.

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
            _fill(self.g[place], flat_g[source])
            if self.p is not None:
                _fill(self.p[place], None if flat_p is None else flat_p[source])
            self.filled += take
            start += take
            if self.filled == self.g.numel():
                self._flush()

    def result(self) -> Tensor:
        if self.filled > 0:
            self._flush()
        return self.sums

    def _flush(self) -> None:
        g = self.g[: self.filled]
        self.sums[0] += torch.dot(g, g)
        if self.p is not None:
            p = self.p[: self.filled]
            self.sums[1] += torch.dot(p, p)
            self.sums[2] += torch.dot(g, p)
        self.filled = 0


def _fill(place: Tensor, source: Tensor | None) -> None:
    if source is None:
        place.zero_()
    else:
        place.copy_(source.to(place.device))


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> None:
    """g' = grad - coefficient * reference; reference = grad or g'; grad = factor * g'.

    The reference takes grad if `store_raw`, else g'. In place and in one pass, computed in float32
    or better and rounded once to each tensor's dtype. `coefficient` may lie outside float32's range
    (|g| = 1e20 and |p| = 1e-25 need 1e45).
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
            # |g'| <= |g|, but a single element may grow past 65504 and would become inf.
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
    return abs(math.frexp(factor)[1]) <= _EXPONENT_STEP


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of two tensors of one shape, chunk by chunk; whole if small or laid out otherwise."""
    size = _chunk_size(first.device)
    if first.numel() > size and first.is_contiguous() and second.is_contiguous():
        parts = torch.split(first.view(-1), size), torch.split(second.view(-1), size)
        yield from zip(*parts, strict=True)
    else:
        yield first, second


def _chunk_size(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def _float64_device(device: torch.device) -> torch.device:
    """Where to accumulate what lives on `device`: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device
