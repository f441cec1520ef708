"""One running `optimizer.step()`: which calls of hooks belong to it, what is put back after it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sidestep.control.update_space import Copies, Updates


@dataclass(slots=True)
class RunningStep:
    """One step, from its first hook to its last.

    frames: the calls of torch's hooked `step` that it is made of, outermost first. More than one
        where a subclass's step() calls super().step(): torch hooks both once the parent has been
        instantiated anywhere, and the inner call is no step of its own.
    """

    frames: list[FrameType]
    acted: bool = False
    in_closure: bool = False
    grads: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    rates: list[tuple[dict[str, Any], Any, Any]] = field(default_factory=list)
    updates: Updates | None = None
    damped: tuple[Copies, dict[str, float]] | None = None
    grad_scale: Tensor | None = None

    def takes_in(self, frame: FrameType) -> bool:
        """Whether the step still runs and the call is a part of it, to be counted from now on."""
        self._forget_calls_that_raised(frame)
        if not self.frames:
            return False
        self.frames.append(frame)
        return True

    def ends_with(self, frame: FrameType) -> bool:
        """Whether the innermost call, which ends now, is the step itself."""
        self._forget_calls_that_raised(frame)
        if not self.frames:
            return False
        self.frames.pop()
        return not self.frames

    def _forget_calls_that_raised(self, current: FrameType) -> None:
        """They never came to their post-hook, and are among the callers of nothing."""
        while self.frames and not _is_running(self.frames[-1], current):
            self.frames.pop()

    def hide_gradient(self, parameter: Tensor) -> None:
        self.grads.append((parameter, parameter.grad))
        parameter.grad = None

    def scale_rate(self, group: dict[str, Any], scale: float) -> None:
        given = group["lr"]
        group["lr"] = given * scale
        self.rates.append((group, given, group["lr"]))

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide out the scale that GradScaler leaves to fused optimizers, and say it is gone.

        The fused kernels do the same division, so the step is bitwise the same.
        """
        scale = getattr(optimizer, "grad_scale", None)
        if not isinstance(scale, Tensor):
            return
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale.to(parameter.grad.device))
        self.grad_scale = scale
        vars(optimizer)["grad_scale"] = None

    def put_back(self, optimizer: Optimizer) -> None:
        """Gradients, learning rates, scale: but where someone has put something else since."""
        for parameter, grad in self.grads:
            if parameter.grad is None:
                parameter.grad = grad
        for group, given, scaled in self.rates:
            if group["lr"] is scaled:
                group["lr"] = given
        if self.grad_scale is not None and vars(optimizer).get("grad_scale") is None:
            vars(optimizer)["grad_scale"] = self.grad_scale


def calling_frame() -> FrameType:
    """The call of torch's `step` whose hook asks. Between them is torch.compile's wrapper."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("torch._dynamo"):
        frame = frame.f_back
    return frame


def is_in_backward() -> bool:
    """Whether a backward pass is under way on this thread. As FSDP2 asks it."""
    return torch._C._current_graph_task_id() != -1


def _is_running(frame: FrameType, current: FrameType | None) -> bool:
    """Whether `frame` is `current` or among its callers."""
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False
