"""The kernels in Triton, for CUDA devices: each reads and writes memory once. Opt-in.

Everything is computed in float64, so that no finite value is too large or too small. Tested with
Triton's interpreter; no test has run them on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sidestep.control.kernels_exact import LARGEST_FLOAT16

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ValueError(
        "SIDESTEP_KERNELS=triton needs the package triton: pip install 'sidestep[triton]'"
    ) from error

# Elements that one program takes, and that it takes at once.
PER_PROGRAM = 2**14
BLOCK = 2**11


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """(sum g g, sum p p, sum g p): float64, on the device of the gs, without waiting for it.

    Every program leaves sums of its own: the order of adding, and so the bits, do not change from
    call to call, and the first sum is the same for any ps.
    """
    num_programs = [_num_programs(g) for g in gs]
    parts = torch.zeros(3, sum(num_programs), dtype=torch.float64, device=gs[0].device)
    start = 0
    for g, p, programs in zip(gs, ps, num_programs, strict=True):
        if not programs:
            continue
        flat_g = g.reshape(-1)
        flat_p = flat_g if p is None else p.to(g.device).reshape(-1)
        with _on(g.device):
            _sum[(programs,)](
                *(flat_g, flat_p, parts[:, start:], parts.stride(0), g.numel()),
                HAS_P=p is not None,
                PER_PROGRAM=PER_PROGRAM,
                BLOCK=BLOCK,
            )
        start += programs
    return parts.sum(1)


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> bool:
    """See `kernels.project_`. Whether it was done."""
    given = (grad, reference)
    if reference.device != grad.device or not all(t.is_contiguous() for t in given):
        return False
    if any(t.dtype == torch.float64 for t in given):
        return False
    if grad.numel():
        with _on(grad.device):
            _write[(_num_programs(grad),)](
                *(grad, reference, _scalars(coefficient, factor, grad.device), grad.numel()),
                STORE_RAW=store_raw,
                LARGEST=LARGEST_FLOAT16 if grad.dtype == torch.float16 else 0.0,
                PER_PROGRAM=PER_PROGRAM,
                BLOCK=BLOCK,
            )
    return True


def store_(reference: Tensor, grad: Tensor, factor: float) -> bool:
    """See `kernels.store_`. Whether it was done."""
    return project_(grad, reference, 0.0, factor, True)


def _num_programs(tensor: Tensor) -> int:
    return -(-tensor.numel() // PER_PROGRAM)


@lru_cache(maxsize=4)
def _scalars(coefficient: float, factor: float, device: torch.device) -> Tensor:
    """On the device in float64, which a kernel's plain arguments are not. One copy a step."""
    return torch.tensor([coefficient, factor], dtype=torch.float64, device=device)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _sum_program(
    g_pointer: Any,
    p_pointer: Any,
    sums_pointer: Any,
    sums_stride: Any,
    num_elements: Any,
    HAS_P: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    gg = tl.zeros((BLOCK,), dtype=tl.float64)
    pp = tl.zeros((BLOCK,), dtype=tl.float64)
    gp = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, PER_PROGRAM, BLOCK):
        at = program * PER_PROGRAM + start + tl.arange(0, BLOCK)
        inside = at < num_elements
        g = tl.load(g_pointer + at, mask=inside, other=0.0).to(tl.float64)
        gg += g * g
        if HAS_P:
            p = tl.load(p_pointer + at, mask=inside, other=0.0).to(tl.float64)
            pp += p * p
            gp += g * p
    tl.store(sums_pointer + program, tl.sum(gg, axis=0))
    if HAS_P:
        tl.store(sums_pointer + sums_stride + program, tl.sum(pp, axis=0))
        tl.store(sums_pointer + 2 * sums_stride + program, tl.sum(gp, axis=0))


def _write_program(
    g_pointer: Any,
    p_pointer: Any,
    scalars_pointer: Any,
    num_elements: Any,
    STORE_RAW: tl.constexpr,
    LARGEST: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    coefficient = tl.load(scalars_pointer)
    factor = tl.load(scalars_pointer + 1)
    for start in range(0, PER_PROGRAM, BLOCK):
        at = program * PER_PROGRAM + start + tl.arange(0, BLOCK)
        inside = at < num_elements
        g = tl.load(g_pointer + at, mask=inside, other=0.0).to(tl.float64)
        p = tl.load(p_pointer + at, mask=inside, other=0.0).to(tl.float64)
        projected = g - coefficient * p
        kept = g if STORE_RAW else projected
        scaled = projected * factor
        if LARGEST > 0:
            scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        # by way of float32: not every target has a conversion from float64 to 16 bits
        tl.store(p_pointer + at, kept.to(tl.float32).to(p_pointer.dtype.element_ty), mask=inside)
        tl.store(g_pointer + at, scaled.to(tl.float32).to(g_pointer.dtype.element_ty), mask=inside)


_sum = triton.jit(_sum_program)
_write = triton.jit(_write_program)
