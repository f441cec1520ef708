"""TorchTitan: the control in the step of its `OptimizersContainer`, without a fork.

Before the trainer is built, in every process:

    import sidestep
    from sidestep.integrations import torchtitan

    torchtitan.install(sidestep.GradientControl(), log="sidestep.jsonl")

Every TorchTitan trainer (pre-training, and the policy of `experiments.rl`) keeps its optimizers in
one container and calls its `step()` once per optimizer step, after clipping. The container may hold
several optimizers (Muon for matrices and AdamW for the rest, or one for each pipeline stage); one
decision is made over all of them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sidestep.control.attach import ControlHandle, attach
from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.integrations.hosts import Host, Patches
from sidestep.integrations.records import RecordLog

HOST = Host("torchtitan", oldest="0.3.0", tested="0.3.0")

_MODULE = "torchtitan.components.optimizer"
_MARK = "_sidestep_installed"
_log = logging.getLogger(__name__)


class Installed:
    """A control in TorchTitan's container of optimizers; made by `install`.

    handle: what `sidestep.attach` returned; None before the container is built.
    """

    def __init__(self, control: GradientControl, max_norm: float | None, log: RecordLog) -> None:
        self.handle: ControlHandle | None = None
        self._control, self._max_norm, self._log = control, max_norm, log
        self._patches = Patches()
        self._hook: Any = None

    def uninstall(self) -> None:
        """Take the control out of the container, and the class back to what it was."""
        if self.handle is not None:
            self.handle.detach()
            self._hook.remove()
        self.handle = None
        self._patches.undo()

    def _patch(self, container_class: type) -> None:
        HOST.place(container_class, "step", takes=["self", "closure"], uses=["optimizers", "step"])
        build = HOST.place(container_class, "__init__", takes=["self"], uses=["optimizers"])

        @functools.wraps(build)
        def __init__(container: Any, *args: Any, **kwargs: Any) -> None:
            build(container, *args, **kwargs)
            self._attach(container)

        setattr(__init__, _MARK, True)
        self._patches.replace(container_class, "__init__", __init__)

    def _attach(self, container: Any) -> None:
        if self.handle is not None:
            raise ValueError(
                "a second OptimizersContainer is built in this process, and a control is for one: "
                "uninstall() after the policy's, or use sidestep.attach for each"
            )
        _require_container(container)
        self.handle = attach(container, self._control, self._max_norm, _named_parameters(container))
        self._hook = container.register_step_post_hook(self._after_step)
        names = ", ".join(type(one).__name__ for one in container.optimizers)
        _log.info("sidestep: attached to TorchTitan's container of %s", names)

    def _after_step(self, container: Optimizer, args: Any, kwargs: Any) -> None:
        if self.handle is not None and self.handle.last is not None:
            self._log.add(self.handle.last)


def install(
    control: GradientControl,
    max_norm: float | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
) -> Installed:
    """Let `control` act in every step of the `OptimizersContainer` that is built next.

    max_norm: None leaves clipping to TorchTitan, which clips before control: cosines are the same,
        the lengths that are measured are clipped ones. A number clips here, after control; then
        set `training.max_norm` to inf there, or the smaller one of both counts.
    log: a file to which rank 0 appends one JSON object per step.

    A skipped step leaves weights and moments alone; TorchTitan's learning rate schedule goes on.
    TorchTitan's checkpoints do not hold the control's state: `handle.state_dict()`.

    Raises ImportError without TorchTitan; ValueError for a version or a place that has changed;
    for space="update" and above="damp" (the container has no learning rate of its own: attach to
    the one optimizer inside it); and, when a container is built, for one that steps inside
    backward.
    """
    require_control(control)
    require_max_norm(max_norm)
    settings = control.settings
    if settings.space == "update" or settings.above == "damp":
        raise ValueError(
            f"space={settings.space!r}, above={settings.above!r}: TorchTitan's container has no "
            "learning rate or decay of its own; use space='gradient' with above='skip' or "
            "'project', or sidestep.attach on the optimizer inside it"
        )
    container_class = getattr(HOST.require(_MODULE), "OptimizersContainer", None)
    if not isinstance(container_class, type) or not issubclass(container_class, Optimizer):
        raise ValueError(
            f"torchtitan: the place to attach to has moved: {_MODULE} has no OptimizersContainer "
            "that is a torch optimizer"
        )
    if _MARK in vars(vars(container_class).get("__init__", object)):
        raise ValueError("a control is installed in TorchTitan: uninstall() that one first")
    installed = Installed(control, max_norm, RecordLog(log))
    installed._patch(container_class)
    return installed


def _require_container(container: Any) -> None:
    """A container whose `step()` is the whole step."""
    kind = type(container).__name__
    if "backward" in kind.lower():
        raise ValueError(
            f"{kind} steps its optimizers inside backward, one parameter at a time: there is no "
            "whole gradient to control. Use the OptimizersContainer"
        )
    for name in ("optimizers", "model_parts"):
        if not hasattr(container, name):
            raise ValueError(f"torchtitan: the place to attach to has moved: {kind} has no {name}")


def _named_parameters(container: Any) -> Iterator[tuple[str, Tensor]]:
    """Names over all model parts; those of pipeline stages are whole names and differ."""
    for part in container.model_parts:
        yield from part.named_parameters()
