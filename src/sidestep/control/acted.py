"""The vector that a control acts on: the gradient, or the update that the optimizer made."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Acted(Protocol):
    """The vector that is controlled, one parameter at a time. Tensors are local shares.

    noun: what it is called in reasons.
    absent: what to say if no rank has any part of it.
    takes_scale: whether "damp" scales this vector itself.
    rounding: relative rounding unit of its coarsest dtype.
    """

    noun: str
    absent: str
    takes_scale: bool
    rounding: float

    def vector(self, name: str) -> Tensor | None:
        """A parameter's part of the vector; None for zeros."""
        ...

    def weights(self, name: str) -> Tensor:
        """The parameter before the step."""
        ...
