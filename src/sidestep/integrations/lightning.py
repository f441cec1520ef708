"""Lightning: one callback.

    from sidestep.integrations.lightning import SidestepCallback

    trainer = Trainer(..., callbacks=[SidestepCallback(GradientControl())])

The control acts in the step hook of the module's own optimizer: after accumulation, the reduction
over ranks, unscaling and Lightning's clipping, and before the update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.optim import Optimizer

from sidestep.control.alarm import Alarm, AlarmState
from sidestep.control.attach import ControlHandle, attach
from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.control.record import ControlRecord
from sidestep.integrations.records import log_numbers

__all__ = ["SidestepCallback"]

_log = logging.getLogger(__name__)

# Ranks have whole copies of weights and gradients, and rank 0 may save for all.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")
_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed keeps the gradients to itself and steps inside its engine: "
    "use the adapter for DeepSpeed (docs/integrations.md)",
    "FSDPStrategy": "FullyShardedDataParallel (FSDP1) does not say how it lays out gradients: use "
    "fully_shard (FSDP2) in a loop of your own (examples/fsdp2.py)",
    "ModelParallelStrategy": "its checkpoints keep callbacks of rank 0 alone, and each rank has "
    "a part of the control's state: use fully_shard in a loop of your own (examples/fsdp2.py)",
}


def _callback_base() -> Any:
    """Lightning's Callback, from whichever of its two packages there is."""
    for package, module in (
        ("lightning", "lightning.pytorch"),
        ("pytorch_lightning", "pytorch_lightning"),
    ):
        if find_spec(package) is not None:
            return import_module(module).Callback
    raise ImportError("Lightning is needed here: pip install 'sidestep[lightning]'")


_Callback: Any = _callback_base()


class SidestepCallback(_Callback):  # type: ignore[misc]  # Any: Lightning need not be installed
    """Gradient alignment control in a Lightning `Trainer`.

    control: what is measured and done; None: `GradientControl()`.
    max_norm: clip here, after control; wants no `gradient_clip_val` in the trainer. None: the
        trainer clips as it did, before control.
    optimizer: position of the policy's optimizer among those that `configure_optimizers` returns;
        needed where there are several (manual optimization).
    alarm: when to say "likely to collapse"; None: `Alarm()`.
    on_record: called with the record of every optimizer step, on every rank.

    handle: the attached control; None outside of `fit()`.
    last: record of the last optimizer step; None before the first.

    Numbers go into the module's own log (align/*, grad/*, alarm/raised) at the end of a batch, and
    from there to loggers every `log_every_n_steps`. The control's state is in the trainer's
    checkpoints; loading one goes on bitwise. A skipped step counts in `global_step`, and schedulers
    move on. A batch for which `training_step` returns None is not measured.

    When fit begins, ValueError for several optimizers and no `optimizer`, two clippings, strategies
    other than one device and DDP, and what `attach` refuses.
    """

    def __init__(
        self,
        control: GradientControl | None = None,
        max_norm: float | None = None,
        *,
        optimizer: int | None = None,
        alarm: Alarm | None = None,
        on_record: Callable[[ControlRecord], None] | None = None,
    ) -> None:
        self.control = GradientControl() if control is None else require_control(control)
        self.handle: ControlHandle | None = None
        self.last: ControlRecord | None = None
        self._max_norm = require_max_norm(max_norm)
        self._index = optimizer
        self._alarm = Alarm() if alarm is None else alarm
        self._alarm_state = AlarmState("ok", "")
        self._on_record = on_record
        self._post_hook: Any = None
        self._is_first_rank = True
        self._logged: ControlRecord | None = None

    def note(self, **facts: Any) -> None:
        """Say what the coming optimizer step is made of, for example in `training_step`:
        `ControlHandle.note`.
        """
        if self.handle is None:
            raise ValueError("note: the callback is attached while fit() runs, and only then")
        self.handle.note(**facts)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _require_supported(trainer, self._max_norm)
        found = _policy_optimizer(trainer.optimizers, self._index)
        self.handle = attach(found, self.control, self._max_norm, pl_module.named_parameters())
        self._is_first_rank = trainer.is_global_zero
        # After the control's own, so that the record is there.
        self._post_hook = self.handle.optimizer.register_step_post_hook(self._after_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.handle is None or optimizer is not self.handle.optimizer:
            return
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        is_empty = all(parameter.grad is None for parameter in parameters)
        # In manual optimization it is a mistake, which the control refuses by name.
        self.handle.pass_over(is_empty and pl_module.automatic_optimization)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.last is None or self.last is self._logged:
            return  # gradients were accumulated, or GradScaler found infinities
        self._logged = self.last
        pl_module.log_dict(log_numbers(self.last, self._alarm_state), on_step=True, on_epoch=False)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """For the trainer's checkpoints: tensors and plain values."""
        return {"control": self.control.state_dict(), "alarm": self._alarm.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.control.load_state_dict(state_dict["control"])
        self._alarm.load_state_dict(state_dict["alarm"])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        record = None if self.handle is None else self.handle.last
        if record is None or record is self.last:
            return  # nothing was measured; or super().step() of a subclass, which is no step
        self.last = record
        before = self._alarm_state
        self._alarm_state = self._alarm.update(
            cosine=record.cosine, norm=record.norm_gradient, excess=record.excess
        )
        if self._alarm_state.level == "alarm" != before.level and self._is_first_rank:
            _log.warning("step %d: %s", record.step, self._alarm_state.reason)
        if self._on_record is not None:
            self._on_record(record)

    def _detach(self) -> None:
        if self.handle is not None:
            self._post_hook.remove()
            self.handle.detach()
        self.handle = None


def _policy_optimizer(optimizers: list[Any], index: int | None) -> Any:
    kinds = [type(one).__name__ for one in optimizers]
    if index is None and len(kinds) != 1:
        raise ValueError(
            f"SidestepCallback: the module has {len(kinds)} optimizers ({', '.join(kinds)}): say "
            "which one trains the policy, optimizer=0 for the first"
        )
    if index is not None and not 0 <= index < len(kinds):
        raise ValueError(
            f"SidestepCallback(optimizer={index}): the module has {len(kinds)} optimizers "
            f"({', '.join(kinds)})"
        )
    return optimizers[index or 0]


def _require_supported(trainer: Any, max_norm: float | None) -> None:
    names = [kind.__name__ for kind in type(trainer.strategy).__mro__]
    why = [_REFUSED[name] for name in names if name in _REFUSED]  # DeepSpeed's is a DDPStrategy too
    if why or not any(name in _STRATEGIES for name in names):
        known = "known are one device and DDP; or use sidestep.attach in a loop of your own"
        raise ValueError(f"SidestepCallback with {names[0]}: {why[0] if why else known}")
    if max_norm is not None and trainer.gradient_clip_val:
        raise ValueError(
            f"SidestepCallback(max_norm={max_norm}) with gradient_clip_val="
            f"{trainer.gradient_clip_val} in the trainer would clip twice: leave one of them out"
        )
