"""Megatron-Core: the control between `prepare_grads` and the inner step of a `MegatronOptimizer`.

    import sidestep
    from sidestep.integrations import megatron

    handle = megatron.attach(optimizer, sidestep.GradientControl())   # once, after it was built

`prepare_grads` leaves reduced, unscaled float32 main gradients. `step()` then clips (in
`clip_grad_norm`, or, if it is a `ChainedOptimizer`, which recent versions always build, without
calling that) and calls `step_with_ready_grads`. So control acts right behind `prepare_grads`, which
all of them call, before any clipping.

Each rank has its own slices of the main gradients. What Megatron counts for its norm (not the
tensor-parallel duplicates, not the second copy of shared embeddings) is counted, over the ranks it
sums that norm over; all of them are changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.control.notes import Notes
from sidestep.control.record import ControlRecord
from sidestep.integrations.records import RecordLog

# What is used of it: megatron-core 0.16.1, megatron/core/optimizer/optimizer.py.
_PLACE = (
    "prepare_grads",
    "step_with_ready_grads",
    "get_parameters",
    "get_grad_stats_parallel_group",
)
_COUNTED = "get_main_grads_for_grad_norm"


def attach(
    optimizer: Any,
    control: GradientControl,
    max_norm: float | None = None,
    *,
    log: str | os.PathLike[str] | None = None,
) -> MegatronHandle:
    """Let `control` act in every `optimizer.step()`: a MegatronOptimizer, chained or not.

    Call it on every rank.

    max_norm: None leaves clipping to Megatron, which clips what control made of the gradient. A
        number clips here; then set `clip_grad` to 0 there.
    log: a file to which rank 0 appends one JSON object per step.

    On a skip the inner optimizer does not step and `step()` says that it succeeded (callers take
    anything else for an overflow, and some stop); the schedule goes on. Steps that Megatron skips
    itself (found_inf) have no record.

    Raises ValueError: no such optimizer; one that has a control; two clippings; space="update"; a
    precision-aware optimizer or Megatron-FSDP (gradients are elsewhere); chained optimizers whose
    norms are summed over different ranks (use the distributed optimizer).
    """
    require_control(control)
    require_max_norm(max_norm)
    kind = type(optimizer).__name__
    parts = _parts(optimizer)
    for part in (optimizer, *parts):
        needed = _PLACE[:2] if part is optimizer else (*_PLACE, _COUNTED)
        for name in needed:
            if not callable(getattr(part, name, None)):
                raise ValueError(
                    f"megatron: the place to attach to has moved: {type(part).__name__} has no "
                    f"{name}() (looked at in megatron-core 0.16.1)"
                )
    if "prepare_grads" in vars(optimizer):
        raise ValueError(f"this {kind} has a control; detach() its handle first")
    if control.settings.space == "update":
        raise ValueError(
            "space='update': Megatron's inner optimizer moves main parameters that are copied to "
            "the model later; use space='gradient'"
        )
    for part in parts:
        _require_plain(part, max_norm)
    return MegatronHandle(optimizer, parts, control, max_norm, RecordLog(log))


class MegatronHandle(Notes):
    """A control at work in a Megatron optimizer; made by `attach`.

    last: the record of the last step.
    """

    def __init__(
        self,
        optimizer: Any,
        parts: list[Any],
        control: GradientControl,
        max_norm: float | None,
        log: RecordLog,
    ) -> None:
        super().__init__(control)
        self.last: ControlRecord | None = None
        self._optimizer, self._parts = optimizer, parts
        self._max_norm, self._log = max_norm, log
        self._prepare, self._step = optimizer.prepare_grads, optimizer.step_with_ready_grads
        self._record: ControlRecord | None = None  # of the step that is running
        # On the instance: other optimizers of the process (a critic's) stay as they are.
        optimizer.prepare_grads = self._prepare_and_act
        optimizer.step_with_ready_grads = self._step_unless_skipped

    def detach(self) -> None:
        """Take the control out: the optimizer is as if it had never been attached."""
        del self._optimizer.prepare_grads
        del self._optimizer.step_with_ready_grads

    def _prepare_and_act(self, *args: Any, **kwargs: Any) -> bool:
        found_inf = bool(self._prepare(*args, **kwargs))
        self._record = None
        if not found_inf:
            self._record = self.last = self._act()
            self._log.add(self.last)
        return found_inf

    def _act(self) -> ControlRecord:
        named = [*_main_parameters(self._parts)]
        # Kept alive while their ids are compared.
        counted = [g for part in self._parts for g in part.get_main_grads_for_grad_norm()]
        ids = {id(grad) for grad in counted}
        copies = [name for name, p in named if p.grad is not None and id(p.grad) not in ids]
        return self.control.apply(
            named,
            max_norm=self._max_norm,
            **self.take_notes(),
            local_parameters=[name for name, _ in named],
            copies=copies,
            process_group=_group(self._parts),
        )

    def _step_unless_skipped(self, *args: Any, **kwargs: Any) -> Any:
        record, self._record = self._record, None
        if record is None:
            return self._step(*args, **kwargs)
        if record.regime == "skip":
            return True
        if record.step_scale == 1.0:
            return self._step(*args, **kwargs)
        groups = [group for part in self._parts for group in part.param_groups]
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] = group["lr"] * record.step_scale
            return self._step(*args, **kwargs)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, or the one; those without parameters on this rank too."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [*chained]


def _require_plain(part: Any, max_norm: float | None) -> None:
    config = part.config
    if getattr(config, "use_precision_aware_optimizer", False):
        raise ValueError(
            "use_precision_aware_optimizer keeps gradients in decoupled_grad, which is not "
            "supported: switch it off"
        )
    clip_grad = getattr(config, "clip_grad", 0.0)
    if max_norm is not None and clip_grad > 0.0:
        raise ValueError(
            f"max_norm={max_norm} here and clip_grad={clip_grad} in Megatron: both would clip. Set "
            "--clip-grad 0 there, or max_norm=None here"
        )
    for parameter in part.get_parameters():
        if getattr(parameter, "__fsdp_param__", False):
            raise ValueError("Megatron-FSDP keeps its own gradients, which is not supported")


def _main_parameters(parts: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that the inner optimizers step, by position: main ones have no names."""
    for i, part in enumerate(parts):
        for j, parameter in enumerate(part.get_parameters()):
            yield f"{i}.{j}", parameter


def _group(parts: list[Any]) -> Any:
    groups = [part.get_grad_stats_parallel_group() for part in parts]
    for group in groups[1:]:
        if group is not groups[0]:
            raise ValueError(
                "the chained optimizers sum their norms over different ranks: use Megatron's "
                "distributed optimizer, which sums over all of them"
            )
    return groups[0] if groups else None
