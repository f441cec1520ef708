"""Sums of products at the speed of memory, on a CPU.

    sum g p = sum over rows of 512 elements of (their product, by BLAS, in float32), in float64

A row is short enough for float32: relative errors of a whole sum stay below 2e-7 where rounding
always falls to one side (constant vectors), and are near 1e-9 on random ones. Blocks of rows stay
in cache for all three products, so that memory is read once. NumPy does the rows because torch has
no fast product of many short rows: its own take three times as long.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float32]
Sums = tuple[float, float, float]
# Number of the pair, first and last + 1 of its elements, first and last + 1 of the row sums.
Block = tuple[int, int, int, int, int]

ROW = 512
# Elements at a time: g, p and a copy are 3 MiB, and Python's share of the time is small.
BLOCK = 2**18
# Elements copied at a time where threads of ours run: torch starts no threads of its own for these.
_QUIET = 2**15
# A mean square below the floor may have lost digits to underflow (to be seen against 2^-149), and
# one of inf has overflowed: then the block is scaled by exact powers of two that suit any such one.
_FLOOR = 1e-30
_UP, _DOWN = 100, -80


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Sums:
    """(sum g g, sum p p, sum g p) of float16, bfloat16 and float32 tensors, any finite values.

    The result has the same bits for any number of threads, and the first sum for any ps.
    """
    blocks = _split(gs)
    if not blocks:
        return 0.0, 0.0, 0.0
    num_threads = _num_threads(sum(g.numel() for g in gs))
    room = _Room(gs, ps, _QUIET if num_threads > 1 else BLOCK)
    row_sums = np.zeros((3, blocks[-1][-1]), dtype=np.float32)
    left, lock = iter(blocks), threading.Lock()

    def work(room: _Room) -> None:
        with torch.no_grad(), np.errstate(all="ignore"):
            while True:
                with lock:
                    block = next(left, None)
                if block is None:
                    return
                room.sum_rows(block, row_sums)

    helpers = [_pool().submit(work, room.another()) for _ in range(num_threads - 1)]
    work(room)
    for helper in helpers:
        helper.result()
    return _total(room, blocks, row_sums)


def is_safe(squares: float, num_elements: int) -> bool:
    """Whether a sum of squares, taken in float32, has lost nothing to underflow or overflow."""
    return _FLOOR * num_elements <= squares < math.inf


def _split(gs: Sequence[Tensor]) -> list[Block]:
    """The elements of the gs, up to BLOCK at a time."""
    blocks, row = [], 0
    for pair, g in enumerate(gs):
        num_elements = g.numel()
        for start in range(0, num_elements, BLOCK):
            stop = min(start + BLOCK, num_elements)
            rows = -(-(stop - start) // ROW)
            blocks.append((pair, start, stop, row, row + rows))
            row += rows
    return blocks


def _total(room: _Room, blocks: Sequence[Block], row_sums: Array) -> Sums:
    """The sums of all rows, with care for blocks that need it."""
    starts = [block[3] for block in blocks]
    sizes = np.array([stop - start for _, start, stop, _, _ in blocks])
    with_p = np.array([room.ps[block[0]] is not None for block in blocks])
    with np.errstate(all="ignore"):
        sums = [np.add.reduceat(one, starts, dtype=np.float64) for one in row_sums]
        safe_g, safe_p = ((_FLOOR * sizes <= squares) & (squares < np.inf) for squares in sums[:2])
        for index in np.flatnonzero(~(safe_g & (safe_p | ~with_p))):
            pair, start, stop, _, _ = blocks[int(index)]
            gg, pp, gp = (float(one[index]) for one in sums)
            careful = room.careful_sums(*room.elements(pair, start, stop), (gg, pp, gp))
            for one, found in zip(sums, careful, strict=True):
                one[index] = found
        gg, pp, gp = (float(one.sum()) for one in sums)
    return gg, pp, gp


class _Room:
    """What one thread works in: places for what has to be copied or scaled."""

    def __init__(
        self, gs: Sequence[Tensor], ps: Sequence[Tensor | None], copied_at_once: int
    ) -> None:
        self.gs, self.ps = gs, ps
        self._copied_at_once = copied_at_once
        self._places: dict[str, Tensor] = {}
        self._flat: dict[str, tuple[Tensor, Tensor]] = {}

    def another(self) -> _Room:
        return _Room(self.gs, self.ps, self._copied_at_once)

    def sum_rows(self, block: Block, row_sums: Array) -> None:
        pair, start, stop, first, last = block
        g, p = self.elements(pair, start, stop)
        g_rows, g_rest = _rows(g)
        if p is not None:
            p_rows, p_rest = _rows(p)
            _sum_rows(g_rows, p_rows, g_rest, p_rest, row_sums[2, first:last])  # fills the cache
            _sum_rows(p_rows, p_rows, p_rest, p_rest, row_sums[1, first:last])
        _sum_rows(g_rows, g_rows, g_rest, g_rest, row_sums[0, first:last])

    def elements(self, pair: int, start: int, stop: int) -> tuple[Array, Array | None]:
        """Some of g and p in float32."""
        p = self.ps[pair]
        g = self._elements("g", self.gs[pair], start, stop)
        return g, None if p is None else self._elements("p", p, start, stop)

    def careful_sums(self, g: Array, p: Array | None, sums: Sums) -> Sums:
        """The sums of elements whose squares may leave float32.

        sums: those in float32.
        """
        g, gg, exponent_g = self._scaled("g", g, sums[0])
        if p is None:
            return gg, 0.0, 0.0
        p, pp, exponent_p = self._scaled("p", p, sums[1])
        if gg == 0.0 or pp == 0.0:  # blocks of zeros are common: embeddings
            return gg, pp, 0.0
        return gg, pp, _dot(g, p) * 2.0 ** -(exponent_g + exponent_p)

    def _scaled(self, which: str, a: Array, squares: float) -> tuple[Array, float, int]:
        """(2^exponent a, sum a a, exponent), the first safe to multiply."""
        if is_safe(squares, a.size):
            return a, squares, 0
        exponent = _UP if squares < 1.0 else _DOWN
        place: Array = self._place(f"scaled {which}", a.size).numpy()
        scaled = np.multiply(a, np.float32(2.0**exponent), out=place)
        return scaled, _dot(scaled, scaled) * 4.0**-exponent, exponent

    def _elements(self, which: str, tensor: Tensor, start: int, stop: int) -> Array:
        """Where they lie, if that is possible, else copied."""
        elements: Array
        plain = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
        if plain and tensor.is_contiguous():
            elements = tensor.detach().numpy().reshape(-1)[start:stop]
            return elements
        source = self._flattened(which, tensor)[start:stop]
        place, size = self._place(which, stop - start), self._copied_at_once
        if source.numel() <= size:
            place.copy_(source)
        else:
            pieces = torch.split(place, size), torch.split(source, size)
            for there, here in zip(*pieces, strict=True):
                there.copy_(here)
        elements = place.numpy()
        return elements

    def _flattened(self, which: str, tensor: Tensor) -> Tensor:
        """Flattening copies a tensor that is not contiguous: once, not for each of its blocks."""
        if tensor.is_contiguous():
            return tensor.detach().view(-1)
        if which not in self._flat or self._flat[which][0] is not tensor:
            self._flat[which] = tensor, tensor.detach().reshape(-1)
        return self._flat[which][1]

    def _place(self, which: str, num_elements: int) -> Tensor:
        if which not in self._places:
            self._places[which] = torch.empty(BLOCK, dtype=torch.float32)
        return self._places[which][:num_elements]


def _rows(a: Array) -> tuple[Array, Array]:
    """Whole rows, and what is left."""
    whole = a.size // ROW * ROW
    return a[:whole].reshape(-1, ROW), a[whole:]


def _sum_rows(a: Array, b: Array, a_rest: Array, b_rest: Array, into: Array) -> None:
    rows = len(a)
    if rows:
        _row_dots(a, b, out=into[:rows])
    if a_rest.size:
        into[rows] = np.dot(a_rest, b_rest)


def _dot(a: Array, b: Array) -> float:
    (a_rows, a_rest), (b_rows, b_rest) = _rows(a), _rows(b)
    sums = np.zeros(len(a_rows) + 1, dtype=np.float32)
    _sum_rows(a_rows, b_rows, a_rest, b_rest, sums)
    return float(np.add.reduce(sums, dtype=np.float64))


def _row_dots_by_matmul(a: Array, b: Array, out: Array) -> None:
    """What np.vecdot does, for NumPy 1."""
    np.matmul(a[:, None, :], b[:, :, None], out=out[:, None, None])


_row_dots: Callable[..., object] = getattr(np, "vecdot", _row_dots_by_matmul)


def _num_threads(num_elements: int) -> int:
    """As many as torch uses, if there is work for them."""
    return max(1, min(torch.get_num_threads(), num_elements // (2 * BLOCK)))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="sidestep-sums")


if hasattr(os, "register_at_fork"):  # a forked process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
