"""`ControlHandle`: a control at work in an optimizer.

    before the optimizer's own step:
        unscale (GradScaler with a fused optimizer), then control of the gradient;
        on skip hide the gradients, on damp scale the learning rates
    after it:
        control of the update (space="update"); put gradients and learning rates back

With a closure "before" means between the closure and the update: only then there are gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sidestep.control.controller import GradientControl
from sidestep.control.decay import kept_share
from sidestep.control.gradient_space import Asked, Outcome, act
from sidestep.control.notes import Notes
from sidestep.control.optimizer_names import OptimizerNames
from sidestep.control.record import ControlRecord
from sidestep.control.running_step import RunningStep, calling_frame, is_in_backward
from sidestep.control.update_space import Copies, Updates, begin, finish

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_controls_in_use: weakref.WeakSet[GradientControl] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Where:
    """How parameters lie over ranks, beside what they say themselves."""

    local_parameters: Iterable[str]
    process_group: ProcessGroup | None


class ControlHandle(Notes):
    """A control at work in an optimizer; made by `attach`.

    optimizer: the torch optimizer it is in.
    last: the record of the last step() in which the control acted; None before the first.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        control: GradientControl,
        max_norm: float | None,
        names: OptimizerNames,
        where: Where,
    ) -> None:
        super().__init__(control)
        self.last: ControlRecord | None = None
        self.optimizer = optimizer
        self._max_norm = max_norm
        self._names = names
        self._where = where
        self._passes_over = False
        self._step: RunningStep | None = None
        # Not traced by torch.compile: it would compile the control and break it into pieces.
        uncompiled: Callable[[Any], Any] = torch.compiler.disable
        self._hooks = (
            optimizer.register_step_pre_hook(uncompiled(self._before_step)),
            optimizer.register_step_post_hook(uncompiled(self._after_step)),
        )
        # First of all, so that a scheduler in another hook sees the learning rate it set, not a
        # damped one, and others the weights that stay.
        post_hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        post_hooks.move_to_end(self._hooks[1].id, last=False)
        self._act_uncompiled: Callable[[RunningStep], None] = uncompiled(self._act)
        # deepcopy drops hooks without a word; an attribute of the instance is what copy.deepcopy
        # asks first.
        vars(optimizer)["__deepcopy__"] = self._copy_optimizer
        _controls_in_use.add(control)

    def pass_over(self, passes: bool = True) -> None:
        """Say that the coming `step()` has no gradients on purpose (a batch without a signal).

        Nothing is measured, recorded or refused in it. On several ranks: on all of them. False
        takes it back.
        """
        self._passes_over = passes

    def detach(self) -> None:
        """Take the control out: the optimizer is as if it had never been attached.

        A second time it does nothing, so a handle that is still around disturbs no newer one.
        """
        if handle_of(self.optimizer) is not self:
            return
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        del vars(self.optimizer)["__deepcopy__"]
        _controls_in_use.discard(self.control)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        frame = calling_frame()
        if self._step is not None and self._step.takes_in(frame):
            if self._step.in_closure:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: its closure calls step() of the same optimizer; "
                    "control decides on whole steps: let the closure only compute gradients"
                )
            return None  # step() of a subclass called super().step(): the same step
        self._put_back()  # a step that raised never came to its post-hook
        if is_in_backward():
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() inside the backward pass: an optimizer per "
                "layer has no gradient of the whole step, which the control decides on. Call "
                "step() after backward(), on one optimizer of all parameters"
            )
        step = self._step = RunningStep([frame])
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._act(step)
            return None
        acting = self._acting(closure, step)
        if len(args) > 1:
            return (args[0], acting, *args[2:]), kwargs
        return args, {**kwargs, "closure": acting}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step = self._step
        if step is None or not step.ends_with(calling_frame()):
            return
        acted = step.acted
        try:
            self._act_after(step)
        finally:
            self._put_back()
        if not acted:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() did not call its closure, so the control could "
                "not act: call backward() yourself and step() without a closure"
            )

    def _acting(self, closure: Callable[[], Any], step: RunningStep) -> Callable[[], Any]:
        """The closure, followed by the control."""

        def closure_then_control() -> Any:
            if step.acted:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} calls its closure more than once in a step: "
                    "control needs one gradient per step and cannot be attached to it"
                )
            step.in_closure = True
            try:
                loss = closure()
            finally:
                step.in_closure = False
            self._act_uncompiled(step)
            return loss

        return closure_then_control

    @torch.no_grad()
    def _act(self, step: RunningStep) -> None:
        step.acted = True
        if self._passes_over:
            self._passes_over = False
            return
        step.unscale(self.optimizer)
        notes = self.take_notes()
        control = self.control
        control.ranks = ranks = control.ranks.on(self._where.process_group)
        named, where = [*self._names], self._where
        asked = Asked(named, self._max_norm, notes, self._groups(), where.local_parameters)
        if control.settings.space == "update":
            found = begin(control.core, ranks, asked, self._kept_shares())
        else:
            found = act(control.core, ranks, asked)
        if isinstance(found, Updates):
            step.updates = found
            return
        self.last = found.record
        self._hide(step, found)
        self._damp(step, found, dict(named))

    @torch.no_grad()
    def _act_after(self, step: RunningStep) -> None:
        if step.updates is not None:
            self.last = finish(self.control.core, self.control.ranks, step.updates)
        if step.damped is not None:
            copies, scales = step.damped
            for name, scale in scales.items():
                copies.shorten(name, scale)

    def _hide(self, step: RunningStep, outcome: Outcome) -> None:
        """Keep the optimizer from moving what is skipped.

        A hook cannot veto the step. Without gradients torch's optimizers touch nothing; zero
        gradients would still move weights by momentum and decay. On a whole skip that is everything
        in the optimizer, frozen parameters with a left-over gradient too.
        """
        skipped: Iterable[Tensor] = outcome.skipped.values()
        if outcome.record.regime == "skip":
            skipped = [parameter for _, parameter in self._names]
        for parameter in skipped:
            step.hide_gradient(parameter)

    def _damp(self, step: RunningStep, outcome: Outcome, parameters: Mapping[str, Tensor]) -> None:
        """Scale learning rates; where the parameters of a group are damped differently (blocks),
        copy those instead and shorten their step afterwards.
        """
        if not outcome.scales:
            return
        names = {id(parameter): name for name, parameter in parameters.items()}
        apart: dict[str, float] = {}
        for group in self.optimizer.param_groups:
            members = [names[id(p)] for p in group["params"] if p.requires_grad]
            scales = {name: outcome.scales.get(name, 1.0) for name in members}
            shared = set(scales.values())
            if shared == {1.0}:
                continue
            if len(shared) == 1:
                step.scale_rate(group, shared.pop())
            else:
                apart |= {name: scale for name, scale in scales.items() if scale != 1.0}
        if apart:
            step.damped = Copies({name: parameters[name] for name in apart}), apart

    def _put_back(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.put_back(self.optimizer)

    def _groups(self) -> dict[str, str]:
        """Label of each parameter's group, by name, where that is what decides."""
        if self.control.settings.scope != "group":
            return {}
        groups = enumerate(self.optimizer.param_groups)
        labels = {id(p): f"group {i}" for i, group in groups for p in group["params"]}
        return {name: labels[id(parameter)] for name, parameter in self._names}

    def _kept_shares(self) -> dict[str, float]:
        """What decoupled weight decay leaves of each parameter in this step, by name."""
        shares: dict[int, float] = {}
        for group in self.optimizer.param_groups:
            share = kept_share(self.optimizer, group)
            shares |= {id(parameter): share for parameter in group["params"]}
        return {name: shares[id(parameter)] for name, parameter in self._names}

    def _copy_optimizer(self, memo: dict[int, Any]) -> Optimizer:
        warnings.warn(
            "deepcopy(optimizer) does not copy step hooks: the copy runs without Sidestep's "
            "control until you attach one to it",
            stacklevel=3,
        )
        attributes = vars(self.optimizer)
        this = attributes.pop("__deepcopy__")
        try:
            return deepcopy(self.optimizer, memo)
        finally:
            attributes["__deepcopy__"] = this


def handle_of(optimizer: Optimizer) -> ControlHandle | None:
    """The handle of the control in an optimizer."""
    found = getattr(vars(optimizer).get("__deepcopy__"), "__self__", None)
    return found if isinstance(found, ControlHandle) else None


def is_in_use(control: GradientControl) -> bool:
    return control in _controls_in_use
