"""verl (FSDP engine): the control in the step of the actor's optimizer, without a fork.

In a module that verl imports in every worker (`VERL_USE_EXTERNAL_MODULES=my_control`):

    import sidestep
    from sidestep.integrations import verl

    verl.install(sidestep.GradientControl(), log="sidestep.jsonl")

The place is `FSDPEngine.optimizer_step`, which clips, steps unless the norm is not finite, and is
called once per optimizer step. verl clips first; see `install`. Megatron engines:
sidestep.integrations.megatron.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterable
from typing import Any

import torch

from sidestep.control.attach import ControlHandle, attach
from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.integrations.hosts import Host, Patches
from sidestep.integrations.records import RecordLog

HOST = Host("verl", oldest="0.9.1", tested="0.9.1")

_MODULE = "verl.workers.engine.fsdp.transformer_impl"
_MARK = "_sidestep_installed"
_log = logging.getLogger(__name__)


class Installed:
    """A control in verl's FSDP engine; made by `install`.

    handle: what `sidestep.attach` returned; None before the actor's first step.
    """

    def __init__(self, control: GradientControl, max_norm: float | None, log: RecordLog) -> None:
        self.handle: ControlHandle | None = None
        self._control, self._max_norm, self._log = control, max_norm, log
        self._engine: Any = None
        self._left_alone: set[str] = set()
        self._patches = Patches()

    def uninstall(self) -> None:
        """Take the control out of the engine, and the engine's function back to what it was."""
        if self.handle is not None:
            self.handle.detach()
        self.handle = self._engine = None
        self._patches.undo()

    def _patch(self, engine_class: type, is_critic: type) -> None:
        step = HOST.place(
            engine_class,
            "optimizer_step",
            takes=["self"],
            uses=["optimizer", "step", "optimizer_config", "clip_grad", "module"],
        )

        @functools.wraps(step)
        def optimizer_step(engine: Any) -> Any:
            if not self._takes(engine, is_critic):
                return step(engine)
            assert self.handle is not None
            before = self.handle.last
            result = step(engine)
            record = self.handle.last
            if record is not None and record is not before:
                self._log.add(record)
            return result

        setattr(optimizer_step, _MARK, True)
        self._patches.replace(engine_class, "optimizer_step", optimizer_step)

    def _takes(self, engine: Any, is_critic: type) -> bool:
        """Whether the engine trains the policy; the first one is attached to."""
        if engine is self._engine:
            return True
        kind = type(engine).__name__
        if isinstance(engine, is_critic):
            if kind not in self._left_alone:
                self._left_alone.add(kind)
                _log.info("sidestep: %s trains a value model and is left alone", kind)
            return False
        if self._engine is not None:
            raise ValueError(
                f"a second policy engine ({kind}) steps in this process, and a control is for one: "
                "uninstall() this one and use sidestep.attach for each"
            )
        clip_grad = engine.optimizer_config.clip_grad
        if self._max_norm is not None and clip_grad is not None and math.isfinite(clip_grad):
            raise ValueError(
                f"max_norm={self._max_norm} here and optim.clip_grad={clip_grad} in verl: both "
                "would clip. Set actor_rollout_ref.actor.optim.clip_grad=.inf, or max_norm=None"
            )
        local, group = _layout(engine)
        self.handle = attach(
            engine.optimizer,
            self._control,
            self._max_norm,
            engine.module.named_parameters(),
            local_parameters=local,
            process_group=group,
        )
        self._engine = engine
        _log.info("sidestep: attached to the optimizer of %s", kind)
        return True


def install(
    control: GradientControl,
    max_norm: float | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
) -> Installed:
    """Let `control` act in every optimizer step of the policy's FSDP engine in this process.

    Call it in every worker process, before the first step. Engines with a value head (critics) are
    left alone.

    max_norm: None leaves clipping to verl, which clips before control: cosines are the same, the
        lengths that are measured are clipped ones. A number clips here, after control; then set
        `optim.clip_grad` to .inf there.
    log: a file to which rank 0 appends one JSON object per step.

    Where the norm is not finite verl does not step, and there is no record. verl's checkpoints do
    not hold the control's state: `handle.state_dict()`.

    Raises ImportError without verl; ValueError for a version or a place that has changed, and at
    the first step for two clippings.
    """
    require_control(control)
    require_max_norm(max_norm)
    module = HOST.require(_MODULE)
    engine_class = getattr(module, "FSDPEngine", None)
    critic_class = getattr(module, "FSDPEngineWithValueHead", None)
    for name, found in (("FSDPEngine", engine_class), ("FSDPEngineWithValueHead", critic_class)):
        if not isinstance(found, type):
            raise ValueError(
                f"verl: the place to attach to has moved: {_MODULE} has no class {name}"
            )
    assert engine_class is not None
    assert critic_class is not None
    if _MARK in vars(vars(engine_class).get("optimizer_step", object)):
        raise ValueError("a control is installed in verl's FSDPEngine: uninstall() that one first")
    installed = Installed(control, max_norm, RecordLog(log))
    installed._patch(engine_class, critic_class)
    return installed


def _layout(engine: Any) -> tuple[Iterable[str], Any]:
    """How an engine's parameters lie over ranks: names of which each rank has its own, and the
    ranks to measure with.

    FSDP2's DTensors say it themselves. Flat shards of FSDP1 (verl's strategy "fsdp") do not: each
    rank of the sharding dimension has its own, and the replicas of a two-dimensional mesh decide
    alike on equal sums.
    """
    named = [*engine.module.named_parameters()]
    if not any(getattr(parameter, "_fsdp_flattened", False) for _, parameter in named):
        return (), None
    mesh = engine.device_mesh
    group = None
    if mesh.ndim == 2:
        group = mesh["fsdp"].get_group()
    elif mesh.ndim != 1:
        raise ValueError(f"verl: a device mesh of {mesh.ndim} dimensions with FSDP1: use fsdp2")
    if torch.distributed.get_world_size(group) == 1:
        return (), group
    return [name for name, _ in named], group
