"""Run a `GradientControl` inside any torch optimizer's `step()`: one line in a loop of your own.

    before the optimizer's own step:
        unscale (GradScaler with a fused optimizer), then control of the gradient;
        on skip hide the gradients, on damp scale the learning rates
    after it:
        control of the update (space="update"); put gradients and learning rates back

With a closure "before" means between the closure and the update: only then there are gradients.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from sidestep.control.controller import GradientControl
from sidestep.control.decay import kept_share, tell_of_unknown_decay
from sidestep.control.facts import Behaviour, StepFacts, require_max_norm
from sidestep.control.gradient_space import Asked, Outcome, act
from sidestep.control.record import ControlRecord
from sidestep.control.update_space import Copies, Updates, begin, finish

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_controls_in_use: weakref.WeakSet[GradientControl] = weakref.WeakSet()


def attach(
    optimizer: Optimizer,
    control: GradientControl,
    max_norm: float | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    local_parameters: Iterable[str] = (),
    process_group: ProcessGroup | None = None,
) -> ControlHandle:
    """Let `control` act once in every `optimizer.step()` from now on; the handle detaches it.

    max_norm: clip here, in every mode. Do not clip in the loop as well then.
    named_parameters: names for the snapshot (`model.named_parameters()`). Without them the
        optimizer's own names are used if it was built with named parameters, else group and
        position ("0.3"), which change when parameters move between groups.
    local_parameters, process_group: see `GradientControl.apply`.

    Final gradients must be there when `step()` is called. Optimizers that step layer by layer or in
    chunks are not supported: each of their steps would be taken for a whole one. Hooks are not part
    of pickled or deep-copied optimizers: a deep copy warns, and wants a control of its own.

    Raises ValueError: not a torch optimizer (or a wrapper without step hooks); LBFGS; an optimizer
    or a control that is attached already; a parameter missing in `named_parameters`; a wrong
    max_norm; "damp" without a learning rate.
    """
    require_max_norm(max_norm)
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise ValueError(
            f"optimizer: {kind} has no step hooks of torch.optim.Optimizer; if it wraps an "
            "optimizer, attach to that one (often `.optimizer`)"
        )
    if isinstance(optimizer, LBFGS):
        raise ValueError(f"optimizer: {kind} takes many gradients in one step, control needs one")
    hooks = optimizer._optimizer_step_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), ControlHandle) for hook in hooks):
        raise ValueError(f"optimizer: this {kind} has a control; detach() its handle first")
    if control in _controls_in_use:
        raise ValueError("control: it is attached to an optimizer; use one control for each")
    has_rates = all(group.get("lr") is not None for group in optimizer.param_groups)
    damps_rates = (control.settings.above, control.settings.space) == ("damp", "gradient")
    if damps_rates and not has_rates:
        raise ValueError(f"above='damp' scales the learning rate, and a group of {kind} has no lr")
    if control.settings.space == "update":
        tell_of_unknown_decay(optimizer)
    names = _names(optimizer, named_parameters)
    where = _Where(_kept(local_parameters), process_group)
    return ControlHandle(optimizer, control, max_norm, names, where)


@dataclass(frozen=True, slots=True)
class _Where:
    """How parameters lie over ranks, beside what they say themselves."""

    local_parameters: Iterable[str]
    process_group: ProcessGroup | None


@dataclass(slots=True)
class _Step:
    """One running `step()`, and what has to be put back after it."""

    frame: FrameType
    acted: bool = False
    grads: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    rates: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    updates: Updates | None = None
    damped: tuple[Copies, dict[str, float]] | None = None
    grad_scale: Tensor | None = None


class ControlHandle:
    """A control at work in an optimizer; made by `attach`."""

    def __init__(
        self,
        optimizer: Optimizer,
        control: GradientControl,
        max_norm: float | None,
        names: Mapping[int, str],
        where: _Where,
    ) -> None:
        self.control = control
        self.last: ControlRecord | None = None
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._names = names
        self._where = where
        self._notes: dict[str, Any] = {}
        self._step: _Step | None = None
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        # deepcopy drops hooks without a word; an attribute of the instance is what copy.deepcopy
        # asks first.
        vars(optimizer)["__deepcopy__"] = self._copy_optimizer
        _controls_in_use.add(control)

    def note(
        self,
        *,
        batch: int | str | None = None,
        lag: float | None = None,
        drift: float | None = None,
        behaviour: Behaviour | None = None,
        expected: float | None = None,
    ) -> None:
        """Say what the coming `step()` is made of, and only that one; see `GradientControl.apply`.

        Behaviour weights are held until that step.
        """
        StepFacts(batch, lag, drift, behaviour, expected)  # a wrong one is refused here
        said = {
            "batch": batch,
            "lag": lag,
            "drift": drift,
            "behaviour": behaviour,
            "expected": expected,
        }
        self._notes.update({key: value for key, value in said.items() if value is not None})

    def state_dict(self) -> dict[str, Any]:
        """The control's state (the optimizer's own state_dict does not hold it)."""
        return self.control.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the control's state; see `GradientControl.load_state_dict`."""
        self.control.load_state_dict(state)

    def detach(self) -> None:
        """Take the control out: the optimizer is as if it had never been attached."""
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        vars(self._optimizer).pop("__deepcopy__", None)
        _controls_in_use.discard(self.control)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        caller = sys._getframe(1)
        if self._step is not None and _is_running(self._step.frame, caller):
            return None  # step() of a subclass called super().step(): the same step
        self._put_back()  # a step that raised never came to its post-hook
        step = self._step = _Step(caller)
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
        if step is None or step.frame is not sys._getframe(1):
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

    def _acting(self, closure: Callable[[], Any], step: _Step) -> Callable[[], Any]:
        """The closure, followed by the control."""

        def closure_then_control() -> Any:
            if step.acted:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} calls its closure more than once in a step: "
                    "control needs one gradient per step and cannot be attached to it"
                )
            loss = closure()
            self._act(step)
            return loss

        return closure_then_control

    @torch.no_grad()
    def _act(self, step: _Step) -> None:
        step.acted = True
        self._unscale(step)
        notes, self._notes = self._notes, {}
        control = self.control
        control.ranks = ranks = control.ranks.on(self._where.process_group)
        named, where = [*self._named_parameters()], self._where
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
    def _act_after(self, step: _Step) -> None:
        if step.updates is not None:
            self.last = finish(self.control.core, self.control.ranks, step.updates)
        if step.damped is not None:
            copies, scales = step.damped
            for name, scale in scales.items():
                copies.shorten(name, scale)

    def _hide(self, step: _Step, outcome: Outcome) -> None:
        """Keep the optimizer from moving what is skipped.

        A hook cannot veto the step. Without gradients torch's optimizers touch nothing; zero
        gradients would still move weights by momentum and decay. On a whole skip that is everything
        in the optimizer, frozen parameters with a left-over gradient too.
        """
        skipped: Iterable[Tensor] = outcome.skipped.values()
        if outcome.record.regime == "skip":
            skipped = [parameter for _, parameter in self._named_parameters()]
        for parameter in skipped:
            step.grads.append((parameter, parameter.grad))
            parameter.grad = None

    def _damp(self, step: _Step, outcome: Outcome, parameters: Mapping[str, Tensor]) -> None:
        """Scale learning rates; where the parameters of a group are damped differently (blocks),
        copy those instead and shorten their step afterwards.
        """
        if not outcome.scales:
            return
        names = {id(parameter): name for name, parameter in parameters.items()}
        apart: dict[str, float] = {}
        for group in self._optimizer.param_groups:
            members = [names[id(p)] for p in group["params"] if p.requires_grad]
            scales = {name: outcome.scales.get(name, 1.0) for name in members}
            shared = set(scales.values())
            if shared == {1.0}:
                continue
            if len(shared) == 1:
                step.rates.append((group, group["lr"]))
                group["lr"] = group["lr"] * shared.pop()
            else:
                apart |= {name: scale for name, scale in scales.items() if scale != 1.0}
        if apart:
            step.damped = Copies({name: parameters[name] for name in apart}), apart

    def _unscale(self, step: _Step) -> None:
        """Divide out the scale that GradScaler leaves to fused optimizers, and say it is gone.

        The fused kernels do the same division, so the step is bitwise the same.
        """
        scale = getattr(self._optimizer, "grad_scale", None)
        if not isinstance(scale, Tensor):
            return
        with torch.no_grad():
            for _, parameter in self._named_parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        step.grad_scale = scale
        vars(self._optimizer)["grad_scale"] = None

    def _put_back(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        for parameter, grad in step.grads:
            if parameter.grad is None:
                parameter.grad = grad
        for group, rate in step.rates:
            group["lr"] = rate
        if step.grad_scale is not None:
            vars(self._optimizer)["grad_scale"] = step.grad_scale

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for i, group in enumerate(self._optimizer.param_groups):
            own_names = group.get("param_names")
            for j, parameter in enumerate(group["params"]):
                own_name = own_names[j] if own_names else f"{i}.{j}"
                yield self._names.get(id(parameter), own_name), parameter

    def _groups(self) -> dict[str, str]:
        """Label of each parameter's group, by name, where that is what decides."""
        if self.control.settings.scope != "group":
            return {}
        groups = enumerate(self._optimizer.param_groups)
        labels = {id(p): f"group {i}" for i, group in groups for p in group["params"]}
        return {name: labels[id(parameter)] for name, parameter in self._named_parameters()}

    def _kept_shares(self) -> dict[str, float]:
        """What decoupled weight decay leaves of each parameter in this step, by name."""
        shares: dict[int, float] = {}
        for group in self._optimizer.param_groups:
            share = kept_share(self._optimizer, group)
            shares |= {id(parameter): share for parameter in group["params"]}
        return {name: shares[id(parameter)] for name, parameter in self._named_parameters()}

    def _copy_optimizer(self, memo: dict[int, Any]) -> Optimizer:
        warnings.warn(
            "deepcopy(optimizer) does not copy step hooks: the copy runs without Sidestep's "
            "control until you attach one to it",
            stacklevel=3,
        )
        attributes = vars(self._optimizer)
        this = attributes.pop("__deepcopy__")
        try:
            return deepcopy(self._optimizer, memo)
        finally:
            attributes["__deepcopy__"] = this


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[int, str]:
    """Name by id of every parameter of the optimizer; empty without names."""
    if named_parameters is None:
        return {}
    names: dict[int, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), name)
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"named_parameters: parameter {j} of the optimizer's group {i} is missing"
                )
    return names


def _kept(names: Iterable[str]) -> Iterable[str]:
    """Names for more than one use. A str by mistake stays whole: it is refused where it is used."""
    return names if isinstance(names, str) else tuple(names)


def _is_running(frame: FrameType, current: FrameType | None) -> bool:
    """Whether `frame` is among the callers of `current`."""
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False
