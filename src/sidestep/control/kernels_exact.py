"""The plain kernels: float64 sums, tensor operations in chunks, on any device.

What the fast kernels are tested against, and what runs where there is no fast one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements summed at once. On a CPU two float64 buffers of this size (1 MiB) stay near the core and
# are small enough for the allocator to reuse: twice the size took three times as long at 1e6
# parameters, in page faults. Elsewhere kernel launches cost more than cache misses.
CPU_CHUNK = 2**16
DEVICE_CHUNK = 2**24
# Elements written at once by each thread: the chunk is still in cache when the next operation
# takes it (3 MiB in float32), and operations are few enough for Python.
_CPU_BLOCK = 2**18
# Scalars reach float32 kernels as float32. A factor outside 2^-100 .. 2^100 is applied in several
# exact powers of two.
_EXPONENT_STEP = 100
LARGEST_FLOAT16 = 65504.0


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """(sum g g, sum p p, sum g p): float64, on the device of the gs, which is one and the same.

    Products of float32 numbers are exact in float64 and cannot leave its range: tiny and huge
    values need no scaling.
    """
    device = _float64_device(gs[0].device)
    size = min(_chunk_size(device), sum(g.numel() for g in gs))
    accumulator = _Accumulator(device, size, any(p is not None for p in ps))
    for g, p in zip(gs, ps, strict=True):
        accumulator.add(g, p)
    return accumulator.result()


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> None:
    """See `kernels.project_`."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    rooms = _Rooms(wide)
    for g, p in _backwards(grad, reference):
        room = rooms.like("g", g)
        source = g if g.dtype == wide else room.copy_(g)
        if not fits_float32(coefficient):
            stale = scale_(rooms.like("p", g).copy_(p), coefficient)
            work = torch.sub(source, stale, out=room)
        else:
            plain = p.dtype == wide and p.device == g.device
            stale = p if plain else rooms.like("p", g).copy_(p)
            work = torch.sub(source, stale, alpha=coefficient, out=room)
        p.copy_(g if store_raw else work)
        if g.dtype == torch.float16:
            # |g'| <= |g|, but a single element may grow past 65504 and would become inf.
            scale_(work, factor).clamp_(-LARGEST_FLOAT16, LARGEST_FLOAT16)
            g.copy_(work)
        elif fits_float32(factor):
            torch.mul(work, factor, out=g)
        else:
            g.copy_(scale_(work, factor))


def store_(reference: Tensor, grad: Tensor, factor: float) -> None:
    """See `kernels.store_`."""
    if factor == 1.0:
        reference.copy_(grad)
        return
    for g, p in _backwards(grad, reference):
        p.copy_(g)
        scale_(g, factor)


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """See `kernels.scale_`."""
    if factor == 1.0:
        return tensor
    if fits_float32(factor):
        return tensor.mul_(factor)
    mantissa, exponent = math.frexp(factor)
    tensor.mul_(mantissa)
    while exponent:
        step = max(-_EXPONENT_STEP, min(_EXPONENT_STEP, exponent))
        tensor.mul_(2.0**step)
        exponent -= step
    return tensor


class _Rooms:
    """Places to compute in, one of a kind, for chunk after chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rooms: dict[str, Tensor] = {}

    def like(self, which: str, chunk: Tensor) -> Tensor:
        room = self._rooms.get(which)
        if room is None or room.shape != chunk.shape:
            room = self._rooms[which] = torch.empty_like(chunk, dtype=self._dtype)
        return room


class _Accumulator:
    """Packs tensors into one float64 buffer and takes the products whenever it is full.

    Packing costs one copy a tensor, which the conversion to float64 needs anyway, and makes a model
    of hundreds of small tensors as cheap as one large tensor. Neighbours that fit in together are
    packed by one call: calls are what a thousand tiny tensors cost.
    """

    def __init__(self, device: torch.device, size: int, with_p: bool) -> None:
        self.g = torch.empty(size, dtype=torch.float64, device=device)
        self.p = torch.empty(size, dtype=torch.float64, device=device) if with_p else None
        self.filled = 0
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self._waiting: list[tuple[Tensor, Tensor | None]] = []
        self._num_waiting = 0

    def add(self, g: Tensor, p: Tensor | None) -> None:
        flat_g = g.reshape(-1)
        flat_p = None if p is None else p.reshape(-1)
        if self.filled + self._num_waiting + flat_g.numel() > self.g.numel():
            self._pack()
            self._split(flat_g, flat_p)
        elif flat_g.numel():
            self._waiting.append((flat_g, flat_p))
            self._num_waiting += flat_g.numel()

    def result(self) -> Tensor:
        self._pack()
        if self.filled > 0:
            self._flush()
        return self.sums

    def _pack(self) -> None:
        """Put what waits into the buffer, where there is room for it."""
        if not self._waiting:
            return
        place = slice(self.filled, self.filled + self._num_waiting)
        _fill_from(self.g[place], [g for g, _ in self._waiting])
        if self.p is not None:
            _fill_from(
                self.p[place],
                [g.new_zeros(g.shape) if p is None else p for g, p in self._waiting],
            )
        self.filled += self._num_waiting
        self._waiting, self._num_waiting = [], 0

    def _split(self, flat_g: Tensor, flat_p: Tensor | None) -> None:
        """Put in what is left of the room, then more after each flush."""
        start, num_elements = 0, flat_g.numel()
        while start < num_elements:
            if self.filled == self.g.numel():
                self._flush()
            take = min(num_elements - start, self.g.numel() - self.filled)
            place = slice(self.filled, self.filled + take)
            source = slice(start, start + take)
            _fill(self.g[place], flat_g[source])
            if self.p is not None:
                _fill(self.p[place], None if flat_p is None else flat_p[source])
            self.filled += take
            start += take

    def _flush(self) -> None:
        g = self.g[: self.filled]
        self.sums[0] += torch.dot(g, g)
        if self.p is not None:
            p = self.p[: self.filled]
            self.sums[1] += torch.dot(p, p)
            self.sums[2] += torch.dot(g, p)
        self.filled = 0


def _fill_from(place: Tensor, sources: Sequence[Tensor]) -> None:
    if len(sources) == 1:
        _fill(place, sources[0])
    elif len({(source.dtype, source.device) for source in sources}) == 1:
        place.copy_(torch.cat(list(sources)))  # far quicker than converting each
    else:
        torch.cat([source.to(place.device) for source in sources], out=place)


def _fill(place: Tensor, source: Tensor | None) -> None:
    if source is None:
        place.zero_()
    else:
        place.copy_(source.to(place.device))


def fits_float32(factor: float) -> bool:
    return abs(math.frexp(factor)[1]) <= _EXPONENT_STEP


def _backwards(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of two tensors of one shape, chunk by chunk; whole if small or laid out otherwise.

    From the end, which was read last and may still be in cache.
    """
    size = DEVICE_CHUNK
    if first.device.type == "cpu":
        size = _CPU_BLOCK * torch.get_num_threads()
    if first.numel() > size and first.is_contiguous() and second.is_contiguous():
        parts = torch.split(first.view(-1), size), torch.split(second.view(-1), size)
        yield from reversed(list(zip(*parts, strict=True)))
    else:
        yield first, second


def _chunk_size(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def _float64_device(device: torch.device) -> torch.device:
    """Where to accumulate what lives on `device`: MPS has no float64."""
    return torch.device("cpu") if device.type == "mps" else device
