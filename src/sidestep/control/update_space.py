"""space="update": control of the step that the optimizer has just made.

    before the step: gradient norm, clipping, copies of the weights      begin
    the optimizer steps, whatever it is; its moments stay as it made them
    after it: update = weights - copies, decide, correct the weights     finish

The update is taken without decoupled weight decay: that is not what the batch asks for, and its
pull to zero would look like a direction that persists.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sidestep.control.core import Core, Judged
from sidestep.control.geometry import Ranks
from sidestep.control.gradient_space import (
    Asked,
    Gradients,
    Outcome,
    clip_only,
    measure_norm,
    prepare,
)
from sidestep.control.kernels import project_
from sidestep.control.parameters import rounding_unit
from sidestep.control.plan import clip_factor, whole_norm
from sidestep.control.record import ControlRecord
from sidestep.control.recording import make_record, unjudged_record
from sidestep.control.regimes import Decision
from sidestep.control.sharding import local


class Copies:
    """Weights as they were before a step, by name: this rank's share of them."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self._before = {name: local(p).clone() for name, p in parameters.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._before

    def __getitem__(self, name: str) -> Tensor:
        return self._before[name]

    def moved(self, name: str, kept_share: float = 1.0) -> Tensor:
        """weights now - kept_share * weights before, float32 or better.

        Rounded as the optimizer rounds: first the product, in the weights' own dtype.
        """
        before, now = self._before[name], local(self.parameters[name])
        if kept_share != 1.0:
            before = before * kept_share
        wide = torch.promote_types(now.dtype, torch.float32)
        return now.to(wide) - before.to(wide)

    def put_back(self, name: str) -> None:
        local(self.parameters[name]).copy_(self._before[name])

    def shorten(self, name: str, scale: float, kept_share: float = 1.0) -> None:
        """Keep only `scale` of what `moved` says."""
        project_(local(self.parameters[name]), self.moved(name, kept_share), 1.0 - scale, 1.0, True)


class Updates:
    """The update of one step, between `begin` and `finish`. A parameter without gradient has none.

    kept_shares: what decoupled weight decay leaves of each parameter in this step, by name.
    """

    noun = "update"
    absent = "no parameter has an update"
    takes_scale = True

    def __init__(
        self,
        gradients: Gradients,
        kept_shares: Mapping[str, float],
        norm_gradient: float,
        factor: float,
    ) -> None:
        moving = {n: p for n, p in gradients.parameters.items() if n in gradients.grads}
        self.gradients = gradients
        self.norm_gradient = norm_gradient
        self.clip_factor = factor
        self.rounding = rounding_unit(moving)
        self.copies = Copies(moving)
        self._kept_shares = kept_shares

    def vector(self, name: str) -> Tensor | None:
        if name not in self.copies:
            return None
        return self.copies.moved(name, self._kept_shares.get(name, 1.0))

    def weights(self, name: str) -> Tensor:
        if name in self.copies:
            return self.copies[name]
        return local(self.gradients.parameters[name])  # it has not moved

    def shorten(self, name: str, scale: float) -> None:
        self.copies.shorten(name, scale, self._kept_shares.get(name, 1.0))


def begin(
    core: Core, ranks: Ranks, asked: Asked, kept_shares: Mapping[str, float]
) -> Outcome | Updates:
    """Before the optimizer's step. An `Outcome` if there is nothing to control after it: mode
    "off", or a gradient that is not finite. Raises ValueError on all ranks alike.
    """
    if core.settings.mode == "off":
        return Outcome(clip_only(core, ranks, asked), {}, {})
    gradients = prepare(core, ranks, asked)
    measured = measure_norm(core, ranks, gradients)
    if not measured.has_gradient:
        raise ValueError(gradients.absent)
    if not measured.finite:
        acts = core.settings.mode == "control"
        decision = Decision("skip" if acts else "undefined", "non-finite")
        record = unjudged_record(core, decision, "skip", None, 1.0)
        core.step += 1
        return Outcome(record, gradients.parameters if acts else {}, {})
    factor = clip_factor(measured.norm, measured.norm, asked.max_norm, 0.0)
    gradients.scale(factor)
    return Updates(gradients, kept_shares, measured.norm, factor)


def finish(core: Core, ranks: Ranks, updates: Updates) -> ControlRecord:
    """After the optimizer's step. Raises ValueError on all ranks alike."""
    gradients = updates.gradients
    judged = core.judge(updates, gradients.names, gradients.facts, ranks, gradients.holdings)
    kept = _write(core, updates, judged)
    core.close(updates, judged, kept)
    record = make_record(core, judged, updates.norm_gradient, updates.clip_factor)
    core.step += 1
    return record


def _write(core: Core, updates: Updates, judged: Judged) -> set[str] | None:
    """Correct the weights, and give the updates to the reference. Returns the names kept.

    An update that is not finite is undone where the control may act: the copies are at hand.
    """
    keeps_raw = core.settings.snapshot == "raw"
    moves = keeps_raw or whole_norm(judged.plans) != 0.0  # 0: damped away, and says nothing
    keep = judged.whole.finite and judged.whole.gg > 0.0 and moves
    for name, plan in judged.plan_by_name().items():
        if name not in updates.copies:
            continue
        if plan.skips:
            updates.copies.put_back(name)
            continue
        raw = updates.vector(name) if keep and (keeps_raw or plan.leaves_rounding) else None
        if plan.coefficient:
            reference = core.reference.lend(name, updates.weights(name))
            if reference is not None:
                weights = local(updates.gradients.parameters[name])
                project_(weights, reference, plan.coefficient, 1.0, True)
        elif plan.scales:
            updates.shorten(name, plan.decision.step_scale)
        applied = updates.vector(name) if keep and raw is None else raw
        if applied is not None:
            core.reference.keep(name, applied)
    return set(updates.gradients.grads) if keep else None
