"""Run a `GradientControl` inside any torch optimizer's `step()`: one line in a loop of your own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from sidestep.control.controller import GradientControl, require_control
from sidestep.control.decay import tell_of_unknown_decay
from sidestep.control.facts import require_max_norm
from sidestep.control.handle import ControlHandle, Where, handle_of, is_in_use
from sidestep.control.optimizer_names import OptimizerNames

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ControlHandle", "attach"]

# Packages whose wrapper's step() is one step() of its `.optimizer`.
_WRAPPERS = ("accelerate", "lightning", "pytorch_lightning")


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

    optimizer: the wrappers of Accelerate and Lightning stand for the optimizer in them.
    max_norm: clip here, in every mode. Do not clip in the loop as well then.
    named_parameters: names for the snapshot (`model.named_parameters()`). Without them the
        optimizer's own names are used if it was built with named parameters, else group and
        position ("0.3"), which change when parameters move between groups.
    local_parameters, process_group: see `GradientControl.apply`.

    Final gradients must be there when `step()` is called: a step() inside the backward pass is
    refused when it comes. Optimizers that step layer by layer or in chunks afterwards are not
    supported: each of their steps would be taken for a whole one. Hooks are no part of copies: a
    deep copy warns; copy.copy and pickle (torch makes both without hooks) do not.

    Under torch.compile the control runs uncompiled beside the compiled update; with fullgraph=True
    torch refuses that before anything is changed.

    Raises ValueError: no GradientControl; not a torch optimizer (or a wrapper without step hooks);
    LBFGS; an optimizer or a control that is attached already; a parameter missing in
    `named_parameters`; a wrong max_norm; "damp" without a learning rate.
    """
    require_control(control)
    max_norm = require_max_norm(max_norm)
    optimizer = _unwrapped(optimizer)
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(f"optimizer: {kind} takes many gradients in one step, control needs one")
    if handle_of(optimizer) is not None:
        raise ValueError(f"optimizer: this {kind} has a control; detach() its handle first")
    if is_in_use(control):
        raise ValueError("control: it is attached to an optimizer; use one control for each")
    has_rates = all(group.get("lr") is not None for group in optimizer.param_groups)
    damps_rates = (control.settings.above, control.settings.space) == ("damp", "gradient")
    if damps_rates and not has_rates:
        raise ValueError(f"above='damp' scales the learning rate, and a group of {kind} has no lr")
    if control.settings.space == "update":
        tell_of_unknown_decay(optimizer)
    names = OptimizerNames(optimizer, named_parameters)
    where = Where(_kept(local_parameters), process_group)
    return ControlHandle(optimizer, control, max_norm, names, where)


def _unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer whose step hooks run once a step. Raises ValueError where there is none."""
    while type(optimizer).__module__.partition(".")[0] in _WRAPPERS:
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    if isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        return optimizer
    kind = type(optimizer).__name__
    if isinstance(optimizer, list | tuple | dict):
        raise ValueError(
            f"optimizer: a {kind} of optimizers. The control decides on whole steps: give all "
            "parameters of the policy to one optimizer (with parameter groups, if they differ)"
        )
    if type(optimizer).__module__.partition(".")[0] == "deepspeed":
        raise ValueError(
            f"optimizer: {kind} of DeepSpeed steps inside its engine and keeps the gradients to "
            "itself: use the adapter for DeepSpeed (docs/integrations.md)"
        )
    raise ValueError(
        f"optimizer: {kind} has no step hooks of torch.optim.Optimizer; if it wraps an "
        "optimizer, attach to that one (often `.optimizer`)"
    )


def _kept(names: Iterable[str]) -> Iterable[str]:
    """Names for more than one use. A str by mistake stays whole: it is refused where it is used."""
    return names if isinstance(names, str) else tuple(names)
