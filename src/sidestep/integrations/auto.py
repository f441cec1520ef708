"""One way into trainers that have no place for a control: the first policy optimizer that steps.

Three ways to switch it on, none of which changes the trainer:

    from sidestep.integrations import auto         # a line in a file that the trainer imports
    auto.enable(sidestep.GradientControl(), max_norm=None, log="sidestep.jsonl")

    import sidestep.integrations.auto              # the same, told by the environment:
                                                   # SIDESTEP_AUTO="low=0.1; high=0.6"

    SIDESTEP_AUTO=on python -m sidestep.integrations.auto train.py --its --arguments
    SIDESTEP_AUTO=on torchrun --nproc-per-node 8 -m sidestep.integrations.auto train.py ...

SIDESTEP_AUTO is inherited by child processes, but each needs the import or the launcher; Ray:
`runtime_env={"worker_process_setup_hook": "sidestep.integrations.auto.enable_from_environment"}`.
SIDESTEP_LOG names the file of records. Keys of SIDESTEP_AUTO: auto_settings.py.

**Which optimizer**: torch's global step hooks see every torch.optim.Optimizer of the process at its
first step. It is left alone, and a line on stderr says why, if it

- takes many gradients a step (LBFGS), or steps inside backward (per-layer optimizers);
- steps inside DeepSpeed or Megatron, which keep gradients elsewhere (they have adapters here);
- has a control already (another adapter, or a line of your own);
- trains a value model: exactly one matrix with a single row, the head of critics and reward models
  (LoRA of rank 1 has more), or a name with value_head, v_head, critic, reward or score in it;
- is refused by `select`;
- comes before the `nth` that is left, or after it.

So in a process that trains one policy nothing has to be said; where there are several, `nth` or
`select` say which.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from sidestep.control.attach import ControlHandle, attach
from sidestep.control.checks import require_count
from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.control.handle import handle_of
from sidestep.control.record import ControlRecord
from sidestep.integrations.auto_settings import parse
from sidestep.integrations.records import RecordLog, rank

Select = Callable[[Optimizer], bool]

_ELSEWHERE = ("deepspeed", "megatron")
_VALUE_NAMES = ("value_head", "v_head", "critic", "reward", "score")
_enabled: Auto | None = None


class Auto:
    """A control that waits for the policy's optimizer; made by `enable`.

    handle: what `sidestep.attach` returned; None before that optimizer's first step.
    """

    def __init__(
        self,
        control: GradientControl,
        max_norm: float | None,
        log: RecordLog,
        choice: _Choice,
        local_parameters: Iterable[str] | str,
    ) -> None:
        self.handle: ControlHandle | None = None
        self._control, self._max_norm, self._log = control, max_norm, log
        self._choice, self._local = choice, local_parameters
        self._last: ControlRecord | None = None
        self._hooks = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        atexit.register(self._tell_if_idle)

    def disable(self) -> None:
        """Take the control and the global hooks out."""
        global _enabled
        for hook in self._hooks:
            hook.remove()
        if self.handle is not None:
            self.handle.detach()
        self.handle = None
        if _enabled is self:
            _enabled = None

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Attach, if this is the one. Global hooks run before an optimizer's own, so the control
        that is attached here acts in this very step.
        """
        if not self._choice.takes(optimizer, attached=self.handle is not None):
            return
        local = _names(optimizer) if self._local == "all" else self._local
        self.handle = attach(optimizer, self._control, self._max_norm, local_parameters=local)
        num = sum(p.numel() for p in _parameters(optimizer))
        _tell(f"control attached to {_kind(optimizer)}, {num:,} parameters")

    def _tell_if_idle(self) -> None:
        """Nobody should take a run for a controlled one that was not."""
        if self._last is None and self._choice.has_seen and _enabled is self:
            _tell("no step was controlled: no optimizer of this process was taken for a policy's")

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Global hooks run after an optimizer's own: the record is there."""
        handle = self.handle
        if handle is not None and handle.last is not None and handle.last is not self._last:
            self._last = handle.last
            self._log.add(handle.last)


class _Choice:
    """Says once of every optimizer whether it is the policy's, by the rule of the module."""

    def __init__(self, select: Select | None, nth: int) -> None:
        self._select, self._to_pass = select, nth - 1
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.has_seen = False  # any optimizer

    def takes(self, optimizer: Optimizer, attached: bool) -> bool:
        if optimizer in self._seen:
            return False
        self.has_seen = True
        reason = _why_not(optimizer)
        if reason is None and self._select is not None and not self._select(optimizer):
            reason = "select() refuses it"
        self._seen.add(optimizer)  # not before: a select() that raises is asked again
        if reason is None and attached:
            reason = "the control is attached to another one; nth= or select= choose"
        if reason is None and self._to_pass > 0:
            self._to_pass -= 1
            reason = "it comes before the nth"
        if reason is not None:
            _tell(f"{_kind(optimizer)} is left alone: {reason}")
        return reason is None


def enable(
    control: GradientControl | None = None,
    max_norm: float | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
    select: Select | str | None = None,
    nth: int = 1,
    local_parameters: Iterable[str] | str = (),
) -> Auto:
    """Attach `control` to the policy's optimizer of this process at its first step.

    control: None: `GradientControl()`.
    max_norm: clip here; then the trainer must not. None: the trainer clips, mostly before its step,
        so that the lengths that are measured are clipped ones (cosines are the same).
    log: a file to which rank 0 appends one JSON object per step; None: SIDESTEP_LOG, if set.
    select: asked of an optimizer that passes the other rules; or its place as "module:function".
    nth: which one to take of those that are left, in the order of their first steps, from 1.
    local_parameters: see `sidestep.attach`; "all" where every rank has its own part of every
        parameter and these are no DTensors (FSDP1 with FULL_SHARD).

    All ranks of torch.distributed must step that optimizer together.

    Raises ValueError naming the argument; where it is enabled already.
    """
    global _enabled
    require_max_norm(max_norm)
    require_count("nth", nth, at_least=1)
    if isinstance(local_parameters, str) and local_parameters != "all":
        raise ValueError(f"local_parameters={local_parameters!r} must be names, or 'all'")
    if _enabled is not None:
        raise ValueError("sidestep.integrations.auto is enabled already: disable() it first")
    if isinstance(select, str):
        select = _imported(select)
    records = RecordLog(log if log is not None else os.environ.get("SIDESTEP_LOG") or None)
    choice = _Choice(select, nth)
    control = GradientControl() if control is None else require_control(control)
    _enabled = Auto(control, max_norm, records, choice, local_parameters)
    return _enabled


def enable_from_environment() -> Auto | None:
    """`enable` as SIDESTEP_AUTO says; None where it is not set or "off", or was enabled before.

    Raises ValueError for a value that is not understood.
    """
    settings = parse(os.environ.get("SIDESTEP_AUTO", ""))
    if settings is None or _enabled is not None:
        return _enabled
    return enable(GradientControl(**settings.control), **settings.own)


def enabled() -> Auto | None:
    """What is enabled in this process, for its handle."""
    return _enabled


def _why_not(optimizer: Optimizer) -> str | None:
    """Why an optimizer is not one of a policy; None if it may be."""
    if isinstance(optimizer, LBFGS):
        return "it takes many gradients a step"
    if torch._C._current_graph_task_id() != -1:
        return "it steps inside backward (one of many per-layer optimizers)"
    host = _inside()
    if host is not None:
        return f"it steps inside {host}: use sidestep.integrations.{host}"
    if handle_of(optimizer) is not None:
        return "it has a control"
    for name in _names(optimizer):
        if any(word in name.lower() for word in _VALUE_NAMES):
            return f"it trains a value or reward model ({name})"
    if sum(p.ndim == 2 and p.shape[0] == 1 < p.shape[1] for p in _parameters(optimizer)) == 1:
        return "it trains a value or reward model (a head with one row)"
    return None


def _inside() -> str | None:
    """The host that calls the step and keeps gradients elsewhere."""
    caller: Any = sys._getframe(1)
    while caller is not None:
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if package in _ELSEWHERE:
            return package
        caller = caller.f_back
    return None


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(optimizer: Optimizer) -> list[str]:
    """Names as `sidestep.attach` has them: the optimizer's own, or group and position."""
    names: list[str] = []
    for i, group in enumerate(optimizer.param_groups):
        own = group.get("param_names")
        names += own if own else [f"{i}.{j}" for j in range(len(group["params"]))]
    return names


def _tell(text: str) -> None:
    """One line on stderr of the first rank: where nothing else shows it, whether the control acts
    must not depend on how the host set up its log.
    """
    if rank() == 0:
        print(f"sidestep: {text}", file=sys.stderr, flush=True)


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}"


def _imported(place: str) -> Select:
    module, colon, name = place.partition(":")
    if not colon:
        raise ValueError(f"select={place!r} must be 'module:function'")
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"select={place!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"select={place!r}: {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """Run a script or, with -m, a module with the control on; `sys.argv` is as without it.

    Raises SystemExit for wrong use.
    """
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0] in ("-h", "--help"):
        raise SystemExit(
            "usage: SIDESTEP_AUTO=on python -m sidestep.integrations.auto "
            "(SCRIPT | -m MODULE) [ARGUMENTS]"
        )
    os.environ.setdefault("SIDESTEP_AUTO", "on")
    # Under the name by which others import it, not as __main__: one state in the process.
    try:
        import_module("sidestep.integrations.auto")
    except ValueError as error:  # of SIDESTEP_AUTO
        raise SystemExit(str(error)) from None
    if not is_module and not os.path.isfile(rest[0]):
        raise SystemExit(f"{rest[0]}: no such script")
    sys.argv = rest
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    enable_from_environment()
