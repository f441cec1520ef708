"""The passes over memory: sums of products, projection, storing, scaling.

Every function takes dense strided tensors of any floating dtype on any device, and works under
`torch.no_grad`. Which code runs, SIDESTEP_KERNELS says:

- eager      the default. Sums of large tensors on a CPU: kernels_cpu.py. All else: kernels_exact.py
- compiled   large tensors on a CPU: kernels_compiled.py, by torch.compile; eager where that fails
- triton     tensors on a CUDA device: kernels_triton.py; all else eager

Where the bytes and the time go: docs/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from sidestep.control import kernels_cpu, kernels_exact
from sidestep.control.kernels_exact import CPU_CHUNK, DEVICE_CHUNK

__all__ = [
    "CPU_CHUNK",
    "DEVICE_CHUNK",
    "KERNELS_VARIABLE",
    "project_",
    "scale_",
    "store_",
    "sums_of_products",
]

KERNELS_VARIABLE = "SIDESTEP_KERNELS"
_CHOICES = ("eager", "compiled", "triton")
# Fewer elements are summed in float64: exact, and a fraction of a millisecond.
_EXACT_BELOW = 2**18


def sums_of_products(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """(sum g g, sum p p, sum g p) over all elements of the pairs: float64.

    On the device of the gs if that is one and it has float64, else on the CPU: nothing waits for a
    device before the sums are read. A p of None stands for zeros.

    Exact to rounding in float64, but for large tensors of up to 32 bits on a CPU: there relative
    errors of the squares are below 1e-6 and those of gp below 1e-6 |g||p|, typically 1e-9. Tiny and
    huge values need no scaling, and the first sum is finite exactly if every element of gs is (but
    for float64 gradients beyond 1e150 or so, whose squares leave float64: these count as not
    finite). Its bits depend on gs alone, so a clip factor is the same with and without a reference.
    """
    parts = [_sums_on(device, gs, ps) for device in dict.fromkeys(g.device for g in gs)]
    if len(parts) == 1:
        return parts[0]
    return sum((part.cpu() for part in parts), torch.zeros(3, dtype=torch.float64))


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> None:
    """g' = grad - coefficient * reference; reference = grad or g'; grad = factor * g'.

    The reference takes grad if `store_raw`, else g'. In place and in one pass, computed in float32
    or better and rounded once to each tensor's dtype. `coefficient` may lie outside float32's range
    (|g| = 1e20 and |p| = 1e-25 need 1e45).
    """
    fast = _fast(grad.device)
    if fast is None or not fast.project_(grad, reference, coefficient, factor, store_raw):
        kernels_exact.project_(grad, reference, coefficient, factor, store_raw)


def store_(reference: Tensor, grad: Tensor, factor: float) -> None:
    """reference = grad; grad = factor * grad. In place and in one pass."""
    fast = _fast(grad.device)
    if fast is None or not fast.store_(reference, grad, factor):
        kernels_exact.store_(reference, grad, factor)


def scale_(tensor: Tensor, factor: float) -> Tensor:
    """tensor *= factor in place, also for a factor outside float32's range; returns the tensor."""
    return kernels_exact.scale_(tensor, factor)


def _sums_on(device: torch.device, gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    pairs = [(g, p) for g, p in zip(gs, ps, strict=True) if g.device == device]
    gs, ps = [g for g, _ in pairs], [p for _, p in pairs]
    if device.type == "cuda" and _choice() == "triton":
        from sidestep.control import kernels_triton

        return kernels_triton.sums_of_products(gs, ps)
    is_large = sum(g.numel() for g in gs) >= _EXACT_BELOW
    if device.type != "cpu" or not is_large or any(g.dtype == torch.float64 for g in gs):
        return kernels_exact.sums_of_products(gs, ps)
    if _choice() == "compiled":
        return _compiled_sums(gs, ps)
    return torch.tensor(kernels_cpu.sums_of_products(gs, ps), dtype=torch.float64)


def _compiled_sums(gs: Sequence[Tensor], ps: Sequence[Tensor | None]) -> Tensor:
    """By compiled kernels where they can, the others and what is left of rows eagerly."""
    from sidestep.control import kernels_compiled

    parts: list[tuple[float, ...]] = []
    left: list[tuple[Tensor, Tensor | None]] = []
    for g, p in zip(gs, ps, strict=True):
        found = kernels_compiled.sums_of_products(g, p)
        if found is None:
            left.append((g, p))
            continue
        parts.append(found)
        start = g.numel() // kernels_compiled.UNIT * kernels_compiled.UNIT
        if start < g.numel():
            left.append((g.reshape(-1)[start:], None if p is None else p.reshape(-1)[start:]))
    parts.append(kernels_cpu.sums_of_products([g for g, _ in left], [p for _, p in left]))
    return torch.tensor([sum(column) for column in zip(*parts, strict=True)], dtype=torch.float64)


def _fast(device: torch.device) -> ModuleType | None:
    """The kernels of choice for a device, each with `project_` and `store_`: whether it did it."""
    choice = _choice()
    if choice == "compiled" and device.type == "cpu":
        from sidestep.control import kernels_compiled

        return kernels_compiled
    if choice == "triton" and device.type == "cuda":
        from sidestep.control import kernels_triton

        return kernels_triton
    return None


def _choice() -> str:
    choice = os.environ.get(KERNELS_VARIABLE) or "eager"
    if choice not in _CHOICES:
        raise ValueError(f"{KERNELS_VARIABLE}={choice!r} must be one of {', '.join(_CHOICES)}")
    return choice
