"""space="gradient": control of the gradient, before clipping and the optimizer. And what both
spaces need of it: its norm, and clipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sidestep.control.core import Core, Judged
from sidestep.control.facts import StepFacts, require_max_norm
from sidestep.control.geometry import UNMEASURED, Pair, Products, Ranks
from sidestep.control.parameters import (
    dense,
    gradients,
    project_gradient,
    require_measurable,
    rounding_unit,
    scale_gradient,
    trained_parameters,
    writable_gradient,
)
from sidestep.control.plan import clip_factor, whole_norm
from sidestep.control.record import ControlRecord
from sidestep.control.recording import make_record, unjudged_record
from sidestep.control.regimes import Decision
from sidestep.control.scopes import split
from sidestep.control.sharding import Holdings, holdings, layouts, local

_NOTHING = Holdings({}, ())


@dataclass(frozen=True, slots=True)
class Asked:
    """One step as a host asks for it.

    facts: the fields of `StepFacts`.
    groups: label by name, for scope="group".
    local_parameters, copies: see `GradientControl.apply`.
    """

    named_parameters: Iterable[tuple[str, Tensor]]
    max_norm: float | None
    facts: Mapping[str, Any]
    groups: Mapping[str, str] | None
    local_parameters: Iterable[str]
    copies: Iterable[str] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `act` did, and what is left for the host.

    skipped: parameters that must not move, by name: all on regime "skip", those of the skipped
        scopes else.
    scales: factor on the step of each parameter, by name, where it is not 1.
    """

    record: ControlRecord
    skipped: Mapping[str, Tensor]
    scales: Mapping[str, float]


class Gradients:
    """The gradients of one step, as this rank has them, checked."""

    noun = "gradient"
    takes_scale = False  # "damp" scales the optimizer's step, which is the host's

    def __init__(self, core: Core, ranks: Ranks, asked: Asked) -> None:
        settings = core.settings
        require_max_norm(asked.max_norm)
        self.facts = StepFacts(**asked.facts)
        self.max_norm = asked.max_norm
        self.parameters = trained_parameters(asked.named_parameters, allow_none=not ranks.alone)
        self.grads = gradients(self.parameters)
        self.holdings, self.is_measurable = _NOTHING, True
        try:
            require_measurable(self.grads)
            self.holdings = holdings(self.parameters, asked.local_parameters, asked.copies)
        except ValueError:
            # "off" without clipping does not stop an optimizer that takes such gradients
            self.is_measurable = False
            if settings.mode != "off" or asked.max_norm is not None:
                raise
        self.rounding = rounding_unit(self.grads) if self.is_measurable else 0.0
        self.absent = (
            f"every gradient is None ({len(self.parameters)} parameters): nothing to measure. Call "
            "this after backward() and before gradients are freed; DeepSpeed ZeRO keeps them to "
            "itself: use its own access (deepspeed.utils.safe_get_full_grad)"
        )
        self.names: Mapping[str, Sequence[str]] = {}
        if settings.mode != "off":
            self.names = split(settings, self.parameters, asked.groups)
            _require_notes(core, self.facts)

    def vector(self, name: str) -> Tensor | None:
        return self.grads.get(name)

    def weights(self, name: str) -> Tensor:
        return local(self.parameters[name])

    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for name, grad in self.grads.items():
                scale_gradient(self.parameters[name], grad, factor)


def act(core: Core, ranks: Ranks, asked: Asked) -> Outcome:
    """Measure, decide, write, clip. Raises ValueError on all ranks alike."""
    if core.settings.mode == "off":
        return Outcome(clip_only(core, ranks, asked), {}, {})
    gradients = prepare(core, ranks, asked)
    names, facts, held = gradients.names, gradients.facts, gradients.holdings
    judged = core.judge(gradients, names, facts, ranks, held, asked.max_norm)
    raw = judged.whole.norm
    factor = clip_factor(whole_norm(judged.plans), raw, asked.max_norm, judged.rounding)
    if judged.all_skip:
        factor = 1.0
    kept = _write(core, gradients, judged, factor)
    core.close(gradients, judged, kept)
    record = make_record(core, judged, raw if judged.whole.finite else None, factor)
    core.step += 1
    plans = judged.plan_by_name()
    return Outcome(
        record,
        {name: p for name, p in gradients.parameters.items() if plans[name].skips},
        {name: plan.decision.step_scale for name, plan in plans.items() if plan.scales},
    )


def clip_only(core: Core, ranks: Ranks, asked: Asked) -> ControlRecord:
    """Mode "off": the norm, and clipping."""
    gradients = prepare(core, ranks, asked)
    measured = measure_norm(core, ranks, gradients)
    norm = measured.norm if measured.finite else None
    factor = clip_factor(norm, measured.norm, asked.max_norm, 0.0)
    gradients.scale(factor)
    record = unjudged_record(core, Decision("pass", "off"), "pass", norm, factor)
    core.step += 1
    return record


def prepare(core: Core, ranks: Ranks, asked: Asked) -> Gradients:
    try:
        gradients = Gradients(core, ranks, asked)
        core.layouts = layouts(gradients.parameters)
        return gradients
    except ValueError as error:
        ranks.fail(error)


def measure_norm(core: Core, ranks: Ranks, gradients: Gradients) -> Products:
    """<g,g> over all ranks; `UNMEASURED` if any rank has gradients that cannot be measured."""
    held, grads = gradients.holdings, gradients.grads
    if not gradients.is_measurable:
        grads = {}
    pairs = [Pair(grad, None, False, held[name]) for name, grad in grads.items()]
    unseen = not gradients.is_measurable
    same = core.sameness("norm", gradients.max_norm)
    found = ranks.measure([pairs], held, same=same, sums=[unseen])
    return UNMEASURED if found.sums[0] else found.products[0]


def _write(core: Core, gradients: Gradients, judged: Judged, factor: float) -> set[str] | None:
    """Write what the optimizer gets, and give the gradients to the reference.

    A gradient that is zero or not finite is not kept: the reference stays what it was. Returns the
    names that were kept.
    """
    keep = judged.whole.finite and judged.whole.gg > 0.0
    if keep and core.secant is not None:
        core.secant.keep(gradients.parameters, gradients, judged.facts)
    plans = judged.plan_by_name()
    keeps_raw = core.settings.snapshot == "raw"
    for name, grad in gradients.grads.items():
        parameter, plan = gradients.parameters[name], plans[name]
        reference = None
        if plan.coefficient:
            reference = core.reference.lend(name, gradients.weights(name))
        if reference is not None:
            store_raw = keeps_raw or plan.leaves_rounding
            project_gradient(parameter, grad, reference, plan.coefficient, factor, store_raw)
            core.reference.keep(name, reference)
            continue
        clip = 1.0 if plan.skips else factor
        if keep:
            _keep_and_clip(core, name, parameter, grad, clip)
        elif clip != 1.0:
            scale_gradient(parameter, grad, clip)
    return set(gradients.grads) if keep else None


def _keep_and_clip(core: Core, name: str, parameter: Tensor, grad: Tensor, clip: float) -> None:
    """In one pass where the gradient is dense."""
    if grad.layout == torch.strided:
        target = grad if clip == 1.0 else writable_gradient(parameter, grad)
        core.reference.keep(name, target, clip)
        return
    core.reference.keep(name, dense(grad))
    if clip != 1.0:
        scale_gradient(parameter, grad, clip)


def _require_notes(core: Core, facts: StepFacts) -> None:
    """Raise ValueError for what the strength needs and the host did not say."""
    settings = core.settings
    if settings.needs_drift and facts.drift is None:
        other = ", or give spring a number" if settings.uses_spring else ""
        raise ValueError(
            f"strength={settings.strength!r} needs the drift of every step: note(drift=...), mean "
            f"|ratio - 1| of its tokens{other}"
        )
    if settings.uses_secant and facts.behaviour is None:
        raise ValueError(
            "strength='secant' needs the behaviour weights of every step: note(behaviour=...)"
        )
