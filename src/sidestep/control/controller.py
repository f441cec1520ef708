"""`GradientControl`: the constructor's arguments, `apply`, and the state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sidestep.control.checks import plain_number
from sidestep.control.core import Core
from sidestep.control.facts import Behaviour
from sidestep.control.geometry import Ranks
from sidestep.control.gradient_space import Asked, act
from sidestep.control.record import ControlRecord
from sidestep.control.settings import (
    Above,
    Mode,
    Reference,
    Scope,
    Settings,
    Snapshot,
    SnapshotDevice,
    SnapshotDtype,
    Space,
    effective_mode,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ControlRecord", "GradientControl"]

_log = logging.getLogger(__name__)


class GradientControl:
    """Gradient alignment control for one set of parameters. Equations and sources: docs/method.md.

    reference: what a step's vector is compared with. "previous": that of the step before. "ema":
        the exponential mean of past ones, its horizon the lag that the host notes (8 without).
        "displacement": how far the policy moved since the data was sampled, from the behaviour
        weights that the host notes, else estimated with the noted lag (8 without).
    space: which vector. "gradient": the gradient, before clipping and the optimizer. "update": the
        step that the optimizer has made of it; needs `attach`.
    scope: what is decided on together: the "model", each parameter "group" of the optimizer, or
        each "block" (transformer layer, by names such as layers.3 or h.3; all else is one scope).
    low, high: on the cosine. Pass up to low, project up to high. "calibrate": the quantiles 0.9 and
        0.99 of the cosines of the first `calibrate_steps` steps, in which nothing is done: let
        those be at lag 0.
    strength: share of the parallel part that a projection removes, in (0, 1]. With
        reference="displacement" also "drift", min(1, drift / drift_scale) with the noted drift, or
        "secant" (space="gradient"): what the curvature says is spent, at any cosine: low, high,
        above and max_skips have no use then. secant_memory: share of its means that a step keeps.
        Or "spring" (space="update"): every step is pulled back by a share of the displacement,
        `spring`, at any cosine; low, high, above and max_skips have no use either.
    spring: that share, in (0, 1]. None: min(1, drift / drift_scale) with the noted drift.
    residual: instead of strength, the cosine that a projection leaves behind, in [0, low].
    above: over high "skip" (no step at all), "damp" (the step times (1 - cosine) ** damp_power) or
        "project". None: "skip" in space="gradient" and "project" in space="update", where it is too
        late to skip.
    max_skips: skips in a row after which the step is projected instead.
    mode: "control" acts; "observe" measures and decides but changes nothing; "off" measures the
        gradient's norm alone. The environment variable SIDESTEP_MODE overrides it.
    snapshot: which vector is kept for the next step, that before ("raw") or after control
        ("applied"). None: "raw" in space="gradient", so that the cosine means the same with control
        on and off, and "applied" in space="update".
    snapshot_dtype, snapshot_device: "float32" or "bfloat16", on the parameter's device ("same") or
        on the "cpu".

    Raises ValueError naming the argument and its value.
    """

    def __init__(
        self,
        *,
        reference: Reference = "previous",
        space: Space = "gradient",
        low: float | str = 0.1,
        high: float | str = 0.6,
        strength: float | str = 1.0,
        residual: float | None = None,
        above: Above | None = None,
        damp_power: float = 2.0,
        drift_scale: float = 0.1,
        secant_memory: float = 0.98,
        spring: float | None = None,
        max_skips: int = 4,
        calibrate_steps: int = 50,
        scope: Scope = "model",
        mode: Mode = "control",
        snapshot: Snapshot | None = None,
        snapshot_dtype: SnapshotDtype = "float32",
        snapshot_device: SnapshotDevice = "same",
    ) -> None:
        late = space == "update"
        if above is None:
            above = "project" if late else "skip"
        if snapshot is None:
            snapshot = "applied" if late else "raw"
        self.settings = Settings(
            reference=reference,
            space=space,
            scope=scope,
            low=low,
            high=high,
            strength=strength,
            residual=residual,
            above=above,
            damp_power=damp_power,
            drift_scale=drift_scale,
            secant_memory=secant_memory,
            spring=spring,
            max_skips=max_skips,
            calibrate_steps=calibrate_steps,
            mode=effective_mode(mode),
            snapshot=snapshot,
            snapshot_dtype=snapshot_dtype,
            snapshot_device=snapshot_device,
        )
        if snapshot == "applied" and not late:
            _log.warning("snapshot='applied': cosines with applied gradients tend to oscillate")
        # For `attach`, which runs the same core inside an optimizer's step.
        self.core = Core(self.settings)
        self.ranks = Ranks()

    @property
    def mode(self) -> Mode:
        return self.settings.mode

    @property
    def thresholds(self) -> dict[str, tuple[float, float]]:
        """low and high by scope ("model" with scope="model"), of those whose are known."""
        known = {label: state.calibration.thresholds for label, state in self.core.scopes.items()}
        return {label: found for label, found in known.items() if found is not None}

    @torch.no_grad()
    def apply(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        max_norm: float | None = None,
        batch: int | str | None = None,
        lag: float | None = None,
        drift: float | None = None,
        behaviour: Behaviour | None = None,
        expected: float | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        local_parameters: Iterable[str] = (),
        copies: Iterable[str] = (),
        process_group: ProcessGroup | None = None,
    ) -> ControlRecord:
        """Measure, decide, change `.grad` in place, clip: once per optimizer step.

        The gradients must be final: accumulated, reduced over ranks, unscaled, not clipped.
        Parameters that do not require a gradient do not count. A gradient of None counts as zero
        and stays None. A parameter with two names counts once.

        On `regime == "skip"` the gradients are left alone and the caller must not step. On "damp"
        the caller must scale the learning rate of this step by `step_scale`. With several scopes
        this is said by scope, in `scopes`; where some are skipped and others are not, the gradients
        of those become None, so that torch's optimizers leave their parameters alone. `attach` does
        all of it.

        max_norm: clip the norm over all parameters to this, as torch.nn.utils.clip_grad_norm_
            does, in every mode.
        batch: which rollout batch the gradient is from. Two steps on one batch align for an
            innocent reason: their cosine goes to `cosine_within_batch` and is not acted on.
        lag, drift, behaviour: mean lag of the batch, mean |ratio - 1| of its tokens, and weights of
            the policy that sampled it: a mapping from name to tensor, or a function of the name
            that is called up to three times for each parameter. See `facts.StepFacts`.
        expected: the cosine that fresh data would show, for the record's `excess`; see expected.py.
        groups: label of each parameter's group by name, for scope="group".
        local_parameters: names of plain parameters of which each rank has its own (experts), not a
            copy.
        copies: names among `local_parameters` of what another rank has and counts, under whatever
            name (Megatron's tensor-parallel duplicates): changed like the rest, not counted here.
        process_group: the ranks that measure and decide together; None: all of them.

        A gradient that is not finite is left alone and not clipped; "control" says "skip".

        Raises ValueError, on all ranks alike: space="update"; no parameter; every gradient None
        (but in mode "off"); a complex or integer gradient (but in mode "off" without max_norm); a
        name used twice; a wrong max_norm, batch, lag, drift, behaviour or expected, or one that the
        strength needs and that is missing; an unknown group or block.
        """
        if self.settings.space == "update":
            raise ValueError(
                "space='update' needs the step that the optimizer makes, which apply() does not "
                "see: use attach(optimizer, control)"
            )
        self.ranks = self.ranks.on(process_group)
        facts = {
            "batch": batch,
            "lag": lag,
            "drift": drift,
            "behaviour": behaviour,
            "expected": expected,
        }
        norm = plain_number(max_norm)
        asked = Asked(named_parameters, norm, facts, groups, local_parameters, copies)
        outcome = act(self.core, self.ranks, asked)
        if outcome.record.regime != "skip":
            for parameter in outcome.skipped.values():
                parameter.grad = None
        return outcome.record

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: `snapshot`, tensors by name, and plain JSON values.

        The tensors are copies, so a state does not change with later steps.
        """
        return self.core.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, bitwise as the unbroken run with the same settings.

        A state without the snapshot that it needs, or of another reference or space, is taken, with
        a notice in the log; the next step's reason is then "no reference". Raises ValueError for
        another format or a missing counter.
        """
        self.core.load_state_dict(state)


def require_control(control: Any) -> GradientControl:
    """Raises ValueError for anything but a GradientControl."""
    if not isinstance(control, GradientControl):
        raise ValueError(f"control={control!r}: give a sidestep.GradientControl(...)")
    return control
