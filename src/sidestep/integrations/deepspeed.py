"""DeepSpeed ZeRO-1, 2 and 3: the control in the step of the engine's ZeRO optimizer.

    import sidestep
    from sidestep.integrations import deepspeed

    handle = deepspeed.attach(engine, sidestep.GradientControl())   # on every rank

Under ZeRO `p.grad` is None when the step comes: gradients lie in the engine, each rank with its own
slice. The ZeRO optimizer's `step()` is called once at the boundary of accumulation, when they are
reduced; there every rank takes its slices (ZeRO-3: `safe_get_local_grad`; ZeRO-1 and 2: the
fragment that `safe_get_full_grad` is made of), and the products are summed over ranks as always. So
no gradient is gathered: memory is that of the snapshot, one float32 slice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.control.notes import Notes
from sidestep.control.record import ControlRecord
from sidestep.integrations.hosts import Host
from sidestep.integrations.records import RecordLog

HOST = Host("deepspeed", oldest="0.19.8", tested="0.19.8")

_ZERO_1_2, _ZERO_3 = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
# What is used of them, beside the functions of deepspeed.utils.
_PLACE = {
    _ZERO_1_2: ("step", "check_overflow", "_update_scale", "param_groups", "dp_process_group"),
    _ZERO_3: (
        "step",
        "_overflow_check_and_loss_scale_update",
        "_update_scale",
        "param_groups",
        "dp_process_group",
    ),
}


def attach(
    engine: Any,
    control: GradientControl,
    max_norm: float | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
) -> DeepSpeedHandle:
    """Let `control` act in every optimizer step of a DeepSpeedEngine with ZeRO-1, 2 or 3.

    Call it on every rank.

    max_norm: None leaves clipping to DeepSpeed (`gradient_clipping`), which clips what control made
        of the gradient. A number clips here; then set `gradient_clipping` to 0 there.
    log: a file to which rank 0 appends one JSON object per step.

    A skip is DeepSpeed's own: the engine counts it in `skipped_steps` and leaves its scheduler.

    Raises ImportError without DeepSpeed; ValueError: a version or a place that has changed; no
    ZeRO; fp16 (gradients are scaled), tensor parallelism, CPU offload under ZeRO-1 and 2 (its norm
    is taken during backward); two clippings; space="update"; an engine that has a control.
    """
    require_control(control)
    require_max_norm(max_norm)
    HOST.require("deepspeed")
    optimizer = getattr(engine, "optimizer", None)
    kind = type(optimizer).__name__
    if kind not in _PLACE:
        raise ValueError(
            f"deepspeed: the engine's optimizer is a {kind}, not one of ZeRO-1, 2 or 3. Without "
            "ZeRO use sidestep.attach(engine.optimizer, control)"
        )
    for name in _PLACE[kind]:
        if not hasattr(optimizer, name):
            raise ValueError(f"deepspeed: the place to attach to has moved: {kind} has no {name}")
    _require_plain(engine, optimizer, max_norm)
    if control.settings.space == "update":
        raise ValueError(
            "space='update': ZeRO's inner optimizer moves slices, which this adapter does not see; "
            "use space='gradient'"
        )
    if "step" in vars(optimizer):
        raise ValueError("this engine has a control; detach() its handle first")
    return DeepSpeedHandle(engine, control, max_norm, RecordLog(log))


class DeepSpeedHandle(Notes):
    """A control at work in a DeepSpeed engine; made by `attach`.

    last: the record of the last step.
    """

    def __init__(
        self, engine: Any, control: GradientControl, max_norm: float | None, log: RecordLog
    ) -> None:
        super().__init__(control)
        self.last: ControlRecord | None = None
        self._engine, self._optimizer = engine, engine.optimizer
        self._max_norm, self._log = max_norm, log
        self._step = self._optimizer.step
        self._optimizer.step = self._act_and_step

    def detach(self) -> None:
        """Take the control out: the engine is as if it had never been attached."""
        del self._optimizer.step

    def _act_and_step(self, *args: Any, **kwargs: Any) -> Any:
        record = self.last = self._act()
        self._log.add(record)
        if record.regime == "skip":
            with _as_overflow(self._optimizer):
                result = self._step(*args, **kwargs)
            # Its own skip is for norms that are not finite.
            self._optimizer._global_grad_norm = record.norm_raw
            return result
        with _scaled_rates(self._optimizer, record.step_scale):
            return self._step(*args, **kwargs)

    @torch.no_grad()
    def _act(self) -> ControlRecord:
        slices = [*_slices(self._engine)]
        named = [(one.name, one.stand_in) for one in slices]
        record = self.control.apply(
            named,
            max_norm=self._max_norm,
            **self.take_notes(),
            local_parameters=[name for name, _ in named],
            process_group=self._optimizer.dp_process_group,
        )
        if record.regime != "skip" and (record.regime != "pass" or record.clip_factor != 1.0):
            for one in slices:
                one.write()
        return record


@dataclass(slots=True)
class _Slice:
    """This rank's part of one parameter.

    stand_in: its float32 main weights, with the gradient as `.grad`, both flat.
    """

    name: str
    parameter: Tensor
    stand_in: Parameter
    own: Tensor | None  # the engine's tensor; None: ask it to store the new values

    def write(self) -> None:
        """Give the engine the new gradient, in its own dtype."""
        grad = self.stand_in.grad
        assert grad is not None
        if self.own is None:
            from deepspeed.utils import safe_set_local_grad

            safe_set_local_grad(self.parameter, grad)
        elif self.own.data_ptr() != grad.data_ptr():
            self.own.copy_(grad.view_as(self.own))


def _slices(engine: Any) -> Iterator[_Slice]:
    is_stage_3 = type(engine.optimizer).__name__ == _ZERO_3
    read = _slice_3 if is_stage_3 else _slice_1_2
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found = read(name, parameter)
            if found is not None:
                yield found


def _slice_3(name: str, parameter: Tensor) -> _Slice | None:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad

    weights, grad = safe_get_local_fp32_param(parameter), safe_get_local_grad(parameter)
    if weights is None or grad is None:
        raise ValueError(_no_gradient(name))
    return _Slice(name, parameter, _stand_in(weights, grad), None)


def _slice_1_2(name: str, parameter: Any) -> _Slice | None:
    if not hasattr(parameter, "_hp_mapping"):
        raise ValueError(_no_gradient(name))
    mapping = parameter._hp_mapping
    if mapping is None:  # it lies in other ranks' slices
        return None
    try:
        grad = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    except ValueError as error:
        raise ValueError(_no_gradient(name)) from error
    return _Slice(name, parameter, _stand_in(mapping.get_hp_fragment(), grad), grad)


def _no_gradient(name: str) -> str:
    return (
        f"deepspeed: there is no gradient of {name!r} to be had: it is there between "
        "engine.backward() at the boundary of accumulation and engine.step()"
    )


def _stand_in(weights: Tensor, grad: Tensor) -> Parameter:
    """A parameter that shares memory with both where they are float32."""
    stand_in = Parameter(weights.detach().float().flatten())
    stand_in.grad = grad.detach().float().flatten()
    return stand_in


def _require_plain(engine: Any, optimizer: Any, max_norm: float | None) -> None:
    if engine.fp16_enabled():
        raise ValueError(
            "fp16: DeepSpeed unscales gradients inside its step, so they cannot be measured "
            "before: use bf16"
        )
    if engine.mp_world_size > 1:
        raise ValueError(f"tensor parallelism ({engine.mp_world_size} ranks) is not supported here")
    if type(optimizer).__name__ == _ZERO_1_2 and optimizer.cpu_offload:
        raise ValueError(
            "offload_optimizer under ZeRO-1 and 2 takes its norm during backward, before control: "
            "use ZeRO-3, or no offload"
        )
    clipping = engine.gradient_clipping()
    if max_norm is not None and clipping > 0.0:
        raise ValueError(
            f"max_norm={max_norm} here and gradient_clipping={clipping} in DeepSpeed: both would "
            "clip. Set gradient_clipping to 0 there, or max_norm=None here"
        )


@contextmanager
def _as_overflow(optimizer: Any) -> Iterator[None]:
    """The optimizer's step takes the way of a gradient that overflows, without touching its scale:
    gradients are dropped, weights and moments stay.
    """

    def overflow(*args: Any, **kwargs: Any) -> bool:
        optimizer.overflow = True
        return True

    new: dict[str, Any] = {"_update_scale": lambda *args, **kwargs: None}
    if type(optimizer).__name__ == _ZERO_3:
        new["_overflow_check_and_loss_scale_update"] = overflow
    else:
        new |= {"check_overflow": overflow, "check_grad_overflow": True}
    before = {name: vars(optimizer)[name] for name in new if name in vars(optimizer)}
    vars(optimizer).update(new)
    try:
        yield
    finally:
        for name in new:
            del vars(optimizer)[name]
        vars(optimizer).update(before)


@contextmanager
def _scaled_rates(optimizer: Any, scale: float) -> Iterator[None]:
    """Learning rates times `scale` for one step."""
    rates = [group["lr"] for group in optimizer.param_groups] if scale != 1.0 else []
    for group in optimizer.param_groups if rates else ():
        group["lr"] = group["lr"] * scale
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
