"""Which parameters count, and how their gradients are read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sidestep.control.geometry import unmeasurable
from sidestep.control.kernels import project_, scale_
from sidestep.control.sharding import layout_of, local


def trained_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], allow_none: bool = False
) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name and in order; a tied one once.

    allow_none: there need not be one (on one rank of many).

    Raises ValueError if there is none or if two different ones share a name.
    """
    trained: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if not parameter.requires_grad or id(parameter) in seen:
            continue
        if name in trained:
            raise ValueError(f"named_parameters: two different parameters are named {name!r}")
        trained[name] = parameter
        seen.add(id(parameter))
    if not trained and not allow_none:
        raise ValueError("named_parameters: no parameter that requires a gradient")
    return trained


def gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of the gradients that are not None, without history, by name.

    They share memory with `p.grad`. A sparse gradient comes coalesced: repeated places are added
    up, and memory is shared only if it was coalesced before.
    """
    grads = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grads[name] = grad.coalesce() if grad.layout == torch.sparse_coo else grad
    return grads


def require_measurable(grads: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming the first parameter whose gradient cannot be taken, and the fix."""
    for name, grad in grads.items():
        problem = unmeasurable(grad)
        if problem is not None:
            raise ValueError(f"the gradient of parameter {name!r} {problem}")


def dense(grad: Tensor) -> Tensor:
    """A gradient with all its zeros: itself, or a copy if it is sparse."""
    return grad.to_dense() if grad.layout == torch.sparse_coo else grad


def project_gradient(
    parameter: Tensor,
    grad: Tensor,
    reference: Tensor,
    coefficient: float,
    factor: float,
    store_raw: bool,
) -> None:
    """Write factor * (grad - coefficient * reference) to `parameter.grad`; see `kernels.project_`.

    grad, reference: what this rank has, as `gradients` gives it, and as a plain dense tensor.

    A sparse gradient stays sparse: only the places it has are projected, which is what
    `Products.pp_reachable` is for. The reference becomes dense zeros elsewhere.
    """
    if grad.layout != torch.sparse_coo:
        target = writable_gradient(parameter, grad)
        project_(target, reference, coefficient, factor, store_raw)
        return
    places = tuple(grad.indices())
    there = reference[places]
    project_(grad.values(), there, coefficient, factor, store_raw)
    reference.zero_()
    reference[places] = there
    parameter.grad = grad


def scale_gradient(parameter: Tensor, grad: Tensor, factor: float) -> None:
    """parameter.grad *= factor, with `grad` as `gradients` gives it."""
    if grad.layout == torch.sparse_coo:
        scale_(grad.values(), factor)
        parameter.grad = grad
    else:
        scale_(writable_gradient(parameter, grad), factor)


def writable_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """`grad`, what this rank has of the parameter's dense gradient, for writing in place.

    A broadcast view (stride 0) cannot be written element by element: the parameter gets a full copy
    in its place.
    """
    if any(n > 1 and stride == 0 for n, stride in zip(grad.shape, grad.stride(), strict=True)):
        grad = grad.clone(memory_format=torch.contiguous_format)
        layout = None if parameter.grad is None else layout_of(parameter.grad)
        parameter.grad = grad if layout is None else layout.wrap(grad)
    return grad


def rounding_unit(grads: Mapping[str, Tensor]) -> float:
    """Relative rounding unit of the coarsest of the gradients' dtypes."""
    return max((torch.finfo(grad.dtype).eps for grad in grads.values()), default=0.0)
