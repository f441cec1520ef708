"""A study as it is written down: a TOML file with axes, tasks and methods (docs/study.md)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from sidestep.config.section import Section
from sidestep.errors import UsageError

Match = Literal["update_length", "skip_share", "lag"]
# Sections of a run's config: {"control": {"mode": "off"}}.
Sections = dict[str, dict[str, Any]]
# Set by the study itself: axes, and what all its runs have in common.
SET_BY_STUDY = (
    "rollout.max_lag",
    "train.learning_rate",
    "train.checkpoint_every",
    "log.sinks",
)


class Method(Section):
    """A named set of config keys, and where of the grid it is run.

    match, of: a rival that takes from the cell of method `of` at the same place how far it moved
    (`update_length`: the learning rate is cut to it), the share of steps that it skipped
    (`skip_share`: as many are skipped at random) or its realised lag (`lag`).
    """

    config: Sections = Field(default_factory=dict)
    divide_by_lag: bool = Field(False, description="use learning_rate / (1 + lag)")
    match: Match | None = None
    of: str | None = None
    lags: list[int] | None = None
    learning_rates: list[float] | None = None
    tasks: list[str] | None = None
    seeds: list[int] | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> Self:
        if (self.match is None) != (self.of is None):
            raise ValueError("match and of belong together: what to match, and of which method")
        return self


class TaskCells(Section):
    """A task, its model and what else goes with it."""

    config: Sections = Field(default_factory=dict)


class Study(Section):
    """A grid of cells.

    baseline: the method that at lag 0 is the synchronous run. pilot_seeds: are run like the others,
    choose learning rates and alarm limits, and are not reported. target: share of the synchronous
    best that a run has to reach.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$")
    seeds: list[int] = Field(min_length=1)
    pilot_seeds: list[int] = Field(default_factory=list)
    lags: list[int] = Field(min_length=1)
    learning_rates: list[float] = Field(min_length=1)
    baseline: str = "none"
    target: float = Field(0.95, gt=0.0, le=1.0)
    config: Sections = Field(default_factory=dict)
    tasks: dict[str, TaskCells] = Field(default_factory=lambda: {"arithmetic": TaskCells()})
    methods: dict[str, Method]

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _distinct("seeds and pilot_seeds", [*self.seeds, *self.pilot_seeds])
        _distinct("lags", self.lags)
        _distinct("learning_rates", self.learning_rates)
        if self.baseline not in self.methods:
            raise ValueError(f"baseline = {self.baseline!r} is none of the methods")
        if self.methods[self.baseline].match:
            raise ValueError(f"baseline {self.baseline!r} cannot match another method")
        if 0 not in (self.methods[self.baseline].lags or self.lags):
            raise ValueError(f"lags of baseline {self.baseline!r} lack 0, the synchronous run")
        for name, method in self.methods.items():
            _check_method(name, method, self)
        layers = {"config": self.config}
        layers |= {f"tasks.{name}.config": task.config for name, task in self.tasks.items()}
        layers |= {f"methods.{name}.config": method.config for name, method in self.methods.items()}
        for where, config in layers.items():
            for section, values in config.items():
                for key in values:
                    if f"{section}.{key}" in SET_BY_STUDY:
                        raise ValueError(
                            f"{where}.{section}.{key} is set by the study: leave it out"
                        )
        _check_names((*self.methods, *self.tasks))
        return self


def _check_method(name: str, method: Method, study: Study) -> None:
    if method.of is not None:
        other = study.methods.get(method.of)
        if other is None:
            raise ValueError(f"methods.{name}.of = {method.of!r} is none of the methods")
        if other.match:
            raise ValueError(
                f"methods.{name}.of = {method.of!r} matches another method itself: "
                f"match {other.of!r}"
            )
    for axis in ("lags", "learning_rates", "tasks", "seeds"):
        whole = [*study.seeds, *study.pilot_seeds] if axis == "seeds" else getattr(study, axis)
        unknown = [value for value in getattr(method, axis) or () if value not in whole]
        if unknown:
            raise ValueError(f"methods.{name}.{axis}: {unknown[0]!r} is not in the study's {axis}")


def _check_names(names: Sequence[str]) -> None:
    """Names are folders as well."""
    slugs = [slug(name) for name in names]
    for name, folder in zip(names, slugs, strict=True):
        if not folder.strip("."):
            raise ValueError(f"{name!r} is no name for a method or task: it is a folder, too")
    _distinct("names of methods and tasks (as folders)", slugs)


def _distinct(what: str, values: list[Any]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{what} have a value twice: {values}")


def slug(name: str) -> str:
    """A name as a folder."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-")


def load_study(file: Path) -> Study:
    """Read the declaration. Raises UsageError in one line with file, key and what is wrong."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not valid TOML: {error}") from error
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            what = f"unknown key (docs/study.md has those there are): {place}"
            place = ""
        raise UsageError(f"{file}: {place + ': ' if place else ''}{what}") from error
