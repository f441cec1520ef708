"""Which parameters count, and how their gradients are read and written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sidestep.control.geometry import unmeasurable


def trained_parameters(named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters that require a gradient, by name and in order; a tied one once.

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
    if not trained:
        raise ValueError("named_parameters: no parameter that requires a gradient")
    return trained


def gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that are not None, without history, by name."""
    return {
        name: parameter.grad.detach()
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }


def require_measurable(grads: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming the first parameter whose gradient cannot be taken, and the fix."""
    for name, grad in grads.items():
        problem = unmeasurable(grad)
        if problem is not None:
            raise ValueError(f"the gradient of parameter {name!r} {problem}")


def writable_gradient(parameter: Tensor, grad: Tensor) -> Tensor:
    """`grad`, the parameter's gradient, for writing in place.

    A broadcast view (stride 0) cannot be written element by element: the parameter gets a full copy
    in its place.
    """
    if any(n > 1 and stride == 0 for n, stride in zip(grad.shape, grad.stride(), strict=True)):
        grad = grad.clone(memory_format=torch.contiguous_format)
        parameter.grad = grad
    return grad


def rounding_unit(grads: Mapping[str, Tensor]) -> float:
    """Relative rounding unit of the coarsest of the gradients' dtypes."""
    return max((torch.finfo(grad.dtype).eps for grad in grads.values()), default=0.0)
