"""The arguments of a `GradientControl`, checked alone and against each other."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Literal, cast, get_args

from sidestep.control.checks import (
    number_or_word,
    plain_number,
    require_choice,
    require_cosine,
    require_count,
    require_number,
)

Reference = Literal["previous", "ema", "displacement"]
Space = Literal["gradient", "update"]
Scope = Literal["model", "group", "block"]
Above = Literal["skip", "damp", "project"]
Mode = Literal["control", "observe", "off"]
Snapshot = Literal["raw", "applied"]
SnapshotDtype = Literal["float32", "bfloat16"]
SnapshotDevice = Literal["same", "cpu"]

MODE_VARIABLE = "SIDESTEP_MODE"
_NUMBERS = (
    "low",
    "high",
    "strength",
    "residual",
    "damp_power",
    "drift_scale",
    "secant_memory",
    "spring",
    "max_skips",
    "calibrate_steps",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `GradientControl` was told; what each argument means is said there.

    Raises ValueError naming the argument and its value.
    """

    reference: Reference
    space: Space
    scope: Scope
    low: float | str
    high: float | str
    strength: float | str
    residual: float | None
    above: Above
    damp_power: float
    drift_scale: float
    secant_memory: float
    spring: float | None
    max_skips: int
    calibrate_steps: int
    mode: Mode
    snapshot: Snapshot
    snapshot_dtype: SnapshotDtype
    snapshot_device: SnapshotDevice

    def __post_init__(self) -> None:
        for number in _NUMBERS:
            object.__setattr__(self, number, plain_number(getattr(self, number)))
        require_choice("reference", self.reference, get_args(Reference))
        require_choice("space", self.space, get_args(Space))
        require_choice("scope", self.scope, get_args(Scope))
        require_choice("above", self.above, get_args(Above))
        require_choice("mode", self.mode, get_args(Mode))
        require_choice("snapshot", self.snapshot, get_args(Snapshot))
        require_choice("snapshot_dtype", self.snapshot_dtype, get_args(SnapshotDtype))
        require_choice("snapshot_device", self.snapshot_device, get_args(SnapshotDevice))
        require_number("damp_power", self.damp_power, above=0.0)
        require_number("drift_scale", self.drift_scale, above=0.0)
        require_number("secant_memory", self.secant_memory, at_least=0.0)
        if self.secant_memory >= 1.0:
            raise ValueError(f"secant_memory={self.secant_memory} must be below 1")
        require_count("max_skips", self.max_skips, at_least=0)
        require_count("calibrate_steps", self.calibrate_steps, at_least=1)
        self._check_thresholds()
        self._check_strength()
        self._check_spring()
        self._check_residual()
        if self.space == "update" and self.above == "skip":
            raise ValueError(
                "above='skip' with space='update': the optimizer has made its step and moved its "
                "moments by then: use above='project' or 'damp'"
            )

    @property
    def calibrates(self) -> bool:
        """Whether a threshold is measured in the first steps."""
        return "calibrate" in (self.low, self.high)

    @property
    def uses_secant(self) -> bool:
        return self.strength == "secant"

    @property
    def uses_spring(self) -> bool:
        return self.strength == "spring"

    @property
    def needs_drift(self) -> bool:
        return self.strength == "drift" or (self.uses_spring and self.spring is None)

    def _check_thresholds(self) -> None:
        for name, cosine in (("low", self.low), ("high", self.high)):
            number_or_word(name, cosine, ("calibrate",))
            if not isinstance(cosine, str):
                require_cosine(name, cosine)
            elif self.reference == "displacement":
                raise ValueError(
                    f"{name}='calibrate' with reference='displacement': fresh data has no "
                    f"displacement, so there is no fresh phase to calibrate in: give {name} a "
                    "number"
                )
        if not self.calibrates and float(self.low) > float(self.high):
            raise ValueError(f"low={self.low} is above high={self.high}: it must be at most high")

    def _check_strength(self) -> None:
        strength = self.strength
        number_or_word("strength", strength, ("secant", "drift", "spring"))
        if not isinstance(strength, str):
            require_number("strength", strength)
            if not 0.0 < strength <= 1.0:
                raise ValueError(f"strength={strength} must be in (0, 1]")
        elif self.reference != "displacement":
            raise ValueError(
                f"strength={strength!r} with reference={self.reference!r}: it is about how far the "
                "policy moved: use reference='displacement'"
            )
        elif strength == "secant" and self.space == "update":
            raise ValueError(
                "strength='secant' with space='update': it is a curvature of gradients: use "
                "space='gradient'"
            )

    def _check_spring(self) -> None:
        if self.uses_spring and self.space == "gradient":
            raise ValueError(
                "strength='spring' with space='gradient': it is a share of how far the policy "
                "moved, which is no gradient: use space='update'"
            )
        if self.spring is None:
            return
        require_number("spring", self.spring)
        if not 0.0 < self.spring <= 1.0:
            raise ValueError(f"spring={self.spring} must be in (0, 1]")
        if not self.uses_spring:
            raise ValueError(
                f"spring={self.spring} with strength={self.strength!r}: it has a meaning for "
                "strength='spring' alone"
            )

    def _check_residual(self) -> None:
        if self.residual is None:
            return
        require_number("residual", self.residual)
        if isinstance(self.low, str):
            raise ValueError(
                f"residual={self.residual} must be at most low, and low='calibrate' is not known "
                "yet: give low a number"
            )
        if not 0.0 <= self.residual <= self.low or self.residual == 1.0:
            raise ValueError(
                f"residual={self.residual} is the cosine left behind: it must be in [0, low] "
                f"and below 1 (low={self.low})"
            )
        if self.strength != 1.0:
            raise ValueError(
                f"residual={self.residual} replaces strength={self.strength}: give one of them"
            )


def effective_mode(mode: Mode) -> Mode:
    """The constructor's mode, or that of the environment variable where it is set."""
    require_choice("mode", mode, get_args(Mode))
    override = os.environ.get(MODE_VARIABLE)
    if not override:
        return mode
    require_choice(MODE_VARIABLE, override, get_args(Mode))
    if override != mode:
        _log.warning("mode=%r from the environment variable %s", override, MODE_VARIABLE)
    return cast(Mode, override)
