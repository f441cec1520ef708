"""The kernels compiled by torch's Inductor, for tensors on a CPU. Opt-in.

Each is one loop over memory where the eager ones take three or four over a block in cache. Compiled
once per process and pair of dtypes, for any size: about ten seconds each.

Ahead of time (torch.export), because what torch.compile does before each call, to see whether its
code still fits, takes 0.2 ms once a step has emptied the caches: as long as the work on 300,000
parameters. Calling a library that fits by construction takes a tenth of that.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from sidestep.control import kernels_cpu
from sidestep.control.kernels_exact import LARGEST_FLOAT16, fits_float32

# Takes tensors of one dimension and any equal size, then scalars as tensors.
Kernel = Callable[..., tuple[Tensor, ...]]

# Summed in float32 in 8 accumulators: as accurate as the rows of 512 that BLAS sums in 32.
ROW = 256
UNIT = 2 * ROW
# Smaller tensors are as fast eager.
SMALLEST = 2**13
_EXAMPLE = 2**20
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_log = logging.getLogger(__name__)
_is_broken = False


def sums_of_products(g: Tensor, p: Tensor | None) -> tuple[float, float, float] | None:
    """(sum g g, sum p p, sum g p) of the first elements, as many as are multiples of UNIT.

    None where compiled kernels cannot: other tensors, no compiler, a g whose squares leave float32.
    The first sum has the same bits for any float32 p and none.
    """
    if not _suits(g):
        return None
    given = [t.detach().reshape(-1)[: g.numel() // UNIT * UNIT] for t in (g, p) if t is not None]
    size = given[0].numel()
    together = p is not None and _suits(p)
    used = given if together else given[:1]
    parts = [part for t in used for part in t.view(_num_streams(used), -1).unbind()]
    kernel = _compiled(_products if together else _squares, tuple(t.dtype for t in parts), 0)
    if kernel is None:
        return None
    gg, pp, gp = [*kernel(*parts)[0].tolist(), 0.0, 0.0][:3]
    if not kernels_cpu.is_safe(gg, size):
        return None
    if p is not None and not (together and kernels_cpu.is_safe(pp, size)):
        _, pp, gp = kernels_cpu.sums_of_products(given[:1], given[1:])
    return gg, pp, gp


def project_(
    grad: Tensor, reference: Tensor, coefficient: float, factor: float, store_raw: bool
) -> bool:
    """See `kernels.project_`. Whether it was done."""
    written = _project_and_store_raw_ if store_raw else _project_and_store_applied_
    return _write(written, grad, reference, 1.0, factor, coefficient)


def store_(reference: Tensor, grad: Tensor, factor: float) -> bool:
    """See `kernels.store_`. Whether it was done."""
    return factor != 1.0 and _write(_store_, grad, reference, 1.0, factor)


def _write(function: Kernel, grad: Tensor, reference: Tensor, *scalars: float) -> bool:
    if not _suits(grad, reference) or not all(fits_float32(scalar) for scalar in scalars):
        return False
    kernel = _compiled(function, (grad.dtype, reference.dtype), len(scalars))
    if kernel is None:
        return False
    kernel(grad.view(-1), reference.view(-1), *(torch.tensor(scalar) for scalar in scalars))
    return True


def _suits(*tensors: Tensor) -> bool:
    return tensors[0].numel() >= SMALLEST and all(
        t.device.type == "cpu" and t.dtype in _DTYPES and t.is_contiguous() for t in tensors
    )


@cache
def _compiled(function: Kernel, dtypes: tuple[torch.dtype, ...], num_scalars: int) -> Kernel | None:
    """The function compiled for these dtypes, and tried; None if it cannot be."""
    global _is_broken
    if _is_broken:
        return None
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    examples = [torch.randn(_EXAMPLE, generator=generator).to(dtype) for dtype in dtypes]
    examples += [torch.tensor(1.0), torch.tensor(0.7), torch.tensor(0.3)][:num_scalars]
    try:
        kernel = _compile(function, examples, num_scalars)
        problem = None if _agree(kernel, function, examples) else "wrong results"
    except (RuntimeError, AttributeError) as error:  # no compiler; a torch without this interface
        problem = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if problem is not None:
        _is_broken = True
        _log.warning("kernels cannot be compiled (%s): eager ones from now on", problem)
        return None
    _log.info("compiled %s in %.1f s", function.__name__, time.perf_counter() - start)
    return kernel


def _compile(function: Kernel, examples: Sequence[Tensor], num_scalars: int) -> Kernel:
    length = Dim("length", min=2)
    size = {0: length if num_scalars else ROW * length}
    shapes = (size,) * (len(examples) - num_scalars) + (None,) * num_scalars
    inductor: Any = torch._inductor
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about torch's own use of its own functions
        program = torch.export.export(
            _Program(function), tuple(examples), dynamic_shapes={"tensors": shapes}
        )
        library = inductor.aoti_load_package(inductor.aoti_compile_and_package(program))

    def kernel(*tensors: Tensor) -> tuple[Tensor, ...]:
        # not library(...), which takes five times as long to find out what it was given
        return tuple(library.loader.run(list(tensors)))

    return kernel


class _Program(torch.nn.Module):
    """A function as torch.export takes it."""

    def __init__(self, function: Kernel) -> None:
        super().__init__()
        self._function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._function(*tensors)


def _agree(kernel: Kernel, function: Kernel, examples: Sequence[Tensor]) -> bool:
    """Whether compiled and plain function do the same to some numbers. Not a formality: `_store_`
    tells of a compiler's error.
    """
    mine, plain = [t.clone() for t in examples], [t.clone() for t in examples]
    pairs = zip((*kernel(*mine), *mine), (*function(*plain), *plain), strict=True)
    return all(torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-2) for a, b in pairs)


def _num_streams(tensors: Sequence[Tensor]) -> int:
    """Two halves read side by side keep the memory busier: two thirds of the time.

    Not with 16-bit numbers: the loop over four arrays of these takes twice the time.
    """
    return 2 if all(t.dtype == torch.float32 for t in tensors) else 1


def _squares(*parts: Tensor) -> tuple[Tensor, ...]:
    return (_sum(parts, parts).view(1),)


def _products(*parts: Tensor) -> tuple[Tensor, ...]:
    middle = len(parts) // 2
    gs, ps = parts[:middle], parts[middle:]
    return (torch.stack([_sum(gs, gs), _sum(ps, ps), _sum(gs, ps)]),)


def _sum(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    products = [_wide(a) * _wide(b) for a, b in zip(first, second, strict=True)]
    elements = products[0] if len(products) == 1 else products[0] + products[1]
    return elements.view(-1, ROW).sum(1).double().sum()


def _store_(g: Tensor, p: Tensor, one: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    # Without the factor of 1 torch 2.13 takes the copy for another name of g, and gives p what is
    # written to g later.
    stored, scaled = _wide(g) * one, _wide(g) * factor
    p.copy_(stored)
    g.copy_(scaled)
    return ()


def _project_and_store_raw_(
    g: Tensor, p: Tensor, one: Tensor, factor: Tensor, coefficient: Tensor
) -> tuple[Tensor, ...]:
    stored, projected = _wide(g) * one, _wide(g) - coefficient * _wide(p)
    p.copy_(stored)
    g.copy_(_within_range(projected * factor, g.dtype))
    return ()


def _project_and_store_applied_(
    g: Tensor, p: Tensor, one: Tensor, factor: Tensor, coefficient: Tensor
) -> tuple[Tensor, ...]:
    projected = (_wide(g) - coefficient * _wide(p)) * one
    p.copy_(projected)
    g.copy_(_within_range(projected * factor, g.dtype))
    return ()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _within_range(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """An element may grow past what float16 holds, and would become inf."""
    if dtype != torch.float16:
        return wide
    return wide.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16)
