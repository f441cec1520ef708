"""`GradientControl`: measure how a gradient aligns with the previous one, decide, write, clip."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from sidestep.control.checks import (
    plain_number,
    require_available,
    require_choice,
    require_count,
    require_number,
    require_step_facts,
)
from sidestep.control.geometry import UNMEASURED, Pair, Products, products, unmeasurable
from sidestep.control.kernels import project_, scale_
from sidestep.control.parameters import (
    gradients,
    require_measurable,
    rounding_unit,
    trained_parameters,
    writable_gradient,
)
from sidestep.control.plan import Plan, make_plan
from sidestep.control.record import ControlRecord
from sidestep.control.reference import SNAPSHOT_DTYPES, PreviousGradient
from sidestep.control.regimes import Above, Decision, Rules

__all__ = ["ControlRecord", "GradientControl"]

Mode = Literal["control", "observe", "off"]
MODE_VARIABLE = "SIDESTEP_MODE"
STATE_FORMAT = 1

_log = logging.getLogger(__name__)


class GradientControl:
    """Gradient alignment control for one set of parameters. Equations and sources: docs/method.md.

    reference: what a gradient is compared with: "previous", the one of the step before.
    space: where the control acts: "gradient", before clipping and the optimizer.
    low, high, strength, residual, above, damp_power, max_skips: see `regimes.Rules`.
    mode: "control" acts; "observe" measures and decides but changes nothing; "off" measures the
        norm alone. The environment variable SIDESTEP_MODE overrides it.
    snapshot: what is kept for the next step: the "raw" gradient, so that the cosine means the same
        with control on and off, or the "applied" one, before clipping.
    snapshot_dtype, snapshot_device: "float32" or "bfloat16", on the gradient's device ("same") or
        on the "cpu".
    drift_scale, calibrate_steps: for strength="drift" and thresholds "calibrate", which are not
        available yet.

    Raises ValueError naming the argument and its value.
    """

    def __init__(
        self,
        *,
        reference: str = "previous",
        space: str = "gradient",
        low: float | str = 0.1,
        high: float | str = 0.6,
        strength: float | str = 1.0,
        residual: float | None = None,
        above: Above = "skip",
        damp_power: float = 2.0,
        drift_scale: float = 0.1,
        max_skips: int = 4,
        calibrate_steps: int = 50,
        mode: Mode = "control",
        snapshot: Literal["raw", "applied"] = "raw",
        snapshot_dtype: Literal["float32", "bfloat16"] = "float32",
        snapshot_device: Literal["same", "cpu"] = "same",
    ) -> None:
        require_available("reference", reference, "previous", ("ema", "displacement"))
        require_available("space", space, "gradient", ("update",))
        require_number("drift_scale", drift_scale, above=0.0)
        require_count("calibrate_steps", calibrate_steps, at_least=1)
        require_choice("snapshot", snapshot, ("raw", "applied"))
        require_choice("snapshot_dtype", snapshot_dtype, tuple(SNAPSHOT_DTYPES))
        require_choice("snapshot_device", snapshot_device, ("same", "cpu"))
        self.rules = Rules(
            low=plain_number("low", low, ("calibrate",)),
            high=plain_number("high", high, ("calibrate",)),
            strength=plain_number("strength", strength, ("secant", "drift")),
            residual=residual,
            above=above,
            damp_power=damp_power,
            max_skips=max_skips,
        )
        self.mode: Mode = _effective_mode(mode)
        self._keeps_raw = snapshot == "raw"
        if not self._keeps_raw:
            _log.warning("snapshot='applied': cosines with applied gradients tend to oscillate")
        self._reference = PreviousGradient(SNAPSHOT_DTYPES[snapshot_dtype], snapshot_device)
        self._step = 0
        self._skips_in_a_row = 0
        self._noticed_change: tuple[set[str], set[str]] = set(), set()

    @torch.no_grad()
    def apply(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        max_norm: float | None = None,
        batch: int | str | None = None,
        lag: float | None = None,
        drift: float | None = None,
        behaviour: Mapping[str, Tensor] | None = None,
    ) -> ControlRecord:
        """Measure, decide, change `.grad` in place, clip: once per optimizer step.

        The gradients must be final: accumulated, reduced over ranks, unscaled, not clipped.
        Parameters that do not require a gradient do not count. A gradient of None counts as zero
        and stays None. A parameter with two names counts once.

        On `regime == "skip"` the gradients are left alone and the caller must not step. On "damp"
        the caller must scale the learning rate of this step by `step_scale`. `attach` does both.

        max_norm: clip the norm over all parameters to this, as torch.nn.utils.clip_grad_norm_
            does, in every mode.
        batch: which rollout batch the gradient is from. Two steps on one batch align for an
            innocent reason: their cosine goes to `cosine_within_batch` and is not acted on.
        lag, drift, behaviour: mean lag of the batch, mean |ratio - 1| of its tokens, behaviour
            weights by name. The reference "previous" has no use for them.

        A gradient that is not finite is left alone and not clipped; "control" says "skip".

        Raises ValueError: no parameter; every gradient None (but in mode "off"); a sparse, sharded,
        complex or integer gradient (but in mode "off" without max_norm); a name used twice; a
        wrong max_norm, batch, lag or drift.
        """
        require_step_facts(max_norm, batch, lag, drift)
        parameters = trained_parameters(named_parameters)
        grads = gradients(parameters)
        measured = self._measure(parameters, grads, max_norm)
        within_batch = batch is not None and batch == self._reference.batch
        wanted = self._decide(parameters, measured, within_batch)
        plan = make_plan(measured, self._allowed(wanted), max_norm, rounding_unit(grads))
        if measured.finite:
            self._skips_in_a_row = self._skips_in_a_row + 1 if wanted.regime == "skip" else 0
        self._write(parameters, grads, measured, plan, batch)
        record = ControlRecord(
            step=self._step,
            regime=plan.decision.regime,
            decision=wanted.regime,
            reason=plan.decision.reason,
            cosine=None if within_batch else measured.cosine,
            cosine_applied=None if within_batch else plan.cosine_applied,
            cosine_within_batch=measured.cosine if within_batch else None,
            norm_raw=measured.norm if measured.finite else None,
            norm_applied=plan.norm_applied,
            clip_factor=plan.clip_factor,
            step_scale=plan.decision.step_scale,
            skips_in_a_row=self._skips_in_a_row,
        )
        self._step += 1
        return record

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: `snapshot`, tensors by name, and plain JSON values.

        The tensors are copies, so a state does not change with later steps.
        """
        return {
            "format": STATE_FORMAT,
            "step": self._step,
            "skips_in_a_row": self._skips_in_a_row,
            **self._reference.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, bitwise as the unbroken run with the same settings.

        A state without a snapshot is taken, with a notice in the log; the next step's reason is
        then "no reference". Raises ValueError for another format or a missing counter.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"control state: format={state.get('format')!r}, not {STATE_FORMAT}")
        for key in ("step", "skips_in_a_row"):
            require_count(f"control state: {key}", state.get(key, None), at_least=0)
        self._step = state["step"]
        self._skips_in_a_row = state["skips_in_a_row"]
        self._reference.load_state_dict(state)
        if self._reference.is_empty and self._step > 0 and self.mode != "off":
            _log.warning(
                "the control state of step %d holds no snapshot: no reference for the next step",
                self._step,
            )

    def _measure(
        self, parameters: Mapping[str, Tensor], grads: Mapping[str, Tensor], max_norm: float | None
    ) -> Products:
        """Inner products of the gradients and the reference; "off": of the gradients alone."""
        if self.mode == "off":
            if max_norm is None and any(unmeasurable(grad) for grad in grads.values()):
                return UNMEASURED  # "off" never stops an optimizer that takes such gradients
            require_measurable(grads)
            return products([Pair(grad, None) for grad in grads.values()])
        if not grads:
            raise ValueError(
                f"every gradient is None ({len(parameters)} parameters): nothing to measure. Call "
                "this after backward() and before gradients are freed; DeepSpeed ZeRO keeps them "
                "to itself: use its own access (deepspeed.utils.safe_get_full_grad)"
            )
        require_measurable(grads)
        known = set(self._reference.known)
        self._tell_of_change(parameters.keys(), known)
        pairs = []
        for name, parameter in parameters.items():
            if name in known:
                pairs.append(Pair(grads.get(name), self._reference.get(name, parameter)))
            else:
                pairs.append(Pair(grads.get(name), None, compared=False))
        return products(pairs)

    def _tell_of_change(self, names: Set[str], known: Set[str]) -> None:
        change = set(names - known), set(known - names)
        if self._reference.is_empty or not any(change) or change == self._noticed_change:
            return
        self._noticed_change = change
        new, gone = change
        _log.warning(
            "the set of trained parameters changed, %d are new (%s) and %d gone (%s): "
            "only the shared part is compared",
            *(len(new), _some(new), len(gone), _some(gone)),
        )

    def _decide(
        self, parameters: Mapping[str, Tensor], measured: Products, within_batch: bool
    ) -> Decision:
        """What the measurement calls for."""
        if self.mode == "off":
            return Decision("pass", "off")
        if not measured.finite:
            return Decision("skip", "non-finite")
        cosine = measured.cosine
        if cosine is None:
            return Decision("undefined", self._why_undefined(parameters.keys(), measured))
        if within_batch:
            return Decision("pass", "same batch")
        decision = self.rules.decide(cosine, self._skips_in_a_row, measured.reach)
        if parameters.keys() != set(self._reference.known):
            return replace(decision, reason=f"{decision.reason} (parameter set changed)")
        return decision

    def _why_undefined(self, names: Set[str], measured: Products) -> str:
        if measured.gg == 0.0:
            return "zero gradient"
        if self._reference.is_empty:
            return "first step" if self._step == 0 else "no reference"
        if names.isdisjoint(self._reference.known):
            return "no shared parameter"
        if measured.gg_compared == 0.0:
            return "zero gradient on the shared parameters"
        return "zero reference" if measured.pp == 0.0 else "reference not finite"

    def _allowed(self, wanted: Decision) -> Decision:
        """What the mode lets happen: a record of "observe" never tells its host to act."""
        if self.mode != "observe" or wanted.regime in ("pass", "undefined"):
            return wanted
        if wanted.reason == "non-finite":
            return Decision("undefined", wanted.reason)
        return Decision("pass", f"observe: would {wanted.regime}, {wanted.reason}")

    def _write(
        self,
        parameters: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        measured: Products,
        plan: Plan,
        batch: int | str | None,
    ) -> None:
        """Write what the optimizer gets, and keep the gradient for the next step.

        A gradient that is zero or not finite is not kept: the reference stays what it was.
        """
        keep = self.mode != "off" and measured.finite and measured.gg > 0.0
        store_raw = self._keeps_raw or plan.leaves_rounding
        for name, grad in grads.items():
            parameter = parameters[name]
            reference = self._reference.get(name, parameter) if plan.coefficient else None
            if reference is not None:
                target = writable_gradient(parameter, grad)
                project_(target, reference, plan.coefficient, plan.clip_factor, store_raw)
                continue
            if keep:
                self._reference.store(name, grad)
            if plan.clip_factor != 1.0:
                scale_(writable_gradient(parameter, grad), plan.clip_factor)
        if keep:
            self._reference.keep_only(tuple(parameters), grads.keys())
            self._reference.batch = batch


def _effective_mode(mode: Mode) -> Mode:
    """The constructor's mode, or that of the environment variable where it is set."""
    require_choice("mode", mode, get_args(Mode))
    override = os.environ.get(MODE_VARIABLE)
    if not override:
        return mode
    require_choice(MODE_VARIABLE, override, get_args(Mode))
    if override != mode:
        _log.warning("mode=%r from the environment variable %s", override, MODE_VARIABLE)
    return cast(Mode, override)


def _some(names: Set[str]) -> str:
    """The first few names, for a message."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
