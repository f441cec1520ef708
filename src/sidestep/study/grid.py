"""From a declaration to cells: where each is, what it needs first, and the config of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sidestep.config import RunConfig
from sidestep.config.keys import KEYS, allowed_values, unknown_key
from sidestep.errors import UsageError
from sidestep.study.declaration import Study, slug


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run of the grid. `learning_rate` is the nominal one, of the axis."""

    task: str
    method: str
    lag: int
    learning_rate: float
    seed: int

    @property
    def id(self) -> str:
        """Its folder under `cells/`."""
        place = f"lag{self.lag}-lr{self.learning_rate}-seed{self.seed}"
        return f"{slug(self.task)}/{slug(self.method)}/{place}"

    def at(self, method: str) -> Cell:
        """The cell of another method at the same place."""
        return Cell(self.task, method, self.lag, self.learning_rate, self.seed)


def make_cells(study: Study) -> list[Cell]:
    """All cells: seed by seed, so that a study cut short has whole grids of the first seeds.

    A seed begins with the synchronous runs, which everything is compared with.
    """
    cells = [
        Cell(task, name, lag, rate, seed)
        for name, method in study.methods.items()
        for task in method.tasks or study.tasks
        for lag in method.lags or study.lags
        for rate in method.learning_rates or study.learning_rates
        for seed in method.seeds or [*study.pilot_seeds, *study.seeds]
    ]
    seeds = {seed: i for i, seed in enumerate([*study.pilot_seeds, *study.seeds])}
    methods = list(study.methods)
    order = {name: i for i, name in enumerate(methods)} | {study.baseline: -1}
    cells.sort(key=lambda c: (seeds[c.seed], c.lag, order[c.method], c.task, c.learning_rate))
    present = set(cells)
    for cell in cells:
        for needed in needs(cell, study):
            if needed not in present:
                raise UsageError(
                    f"method {cell.method!r} needs cell {needed.id}, which is not in the grid: "
                    f"give both the same lags, learning_rates, tasks and seeds"
                )
    return cells


def needs(cell: Cell, study: Study) -> tuple[Cell, ...]:
    """Cells that must be finished before this one can be configured."""
    method = study.methods[cell.method]
    if method.of is None:
        return ()
    other = cell.at(method.of)
    return (other, cell.at(study.baseline)) if method.match == "update_length" else (other,)


def configure(cell: Cell, study: Study, rows: Mapping[Cell, Mapping[str, Any]]) -> RunConfig:
    """The config of a cell's run. `rows`: of the cells that it needs.

    Raises UsageError naming the cell and the key.
    """
    method = study.methods[cell.method]
    rate = cell.learning_rate / (1 + cell.lag) if method.divide_by_lag else cell.learning_rate
    values = merged(
        {"model": {"device": "cpu"}, "rollout": {"lag_mode": "exact"}},
        study.config,
        study.tasks[cell.task].config,
        method.config,
        {
            "seed": cell.seed,
            "rollout": {"max_lag": cell.lag},
            "train": {"learning_rate": rate, "checkpoint_every": 0},
            "log": {"sinks": []},
        },
        _matched(cell, study, rows),
    )
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"cell {cell.id}: {_explain(error)}") from error


def check_configs(cells: Sequence[Cell], study: Study) -> None:
    """Build every config once, with stand-ins for what cells need of each other.

    Raises UsageError before anything runs.
    """
    stand_in = {"update_length": 1.0, "skip_share": 0.0}
    for cell in cells:
        rows = {needed: stand_in | {"lag_mean": cell.lag} for needed in needs(cell, study)}
        configure(cell, study, rows)


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Config sections laid over each other, later ones on top, key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, Mapping) and isinstance(result.get(name), dict):
                result[name] = {**result[name], **value}
            else:
                result[name] = dict(value) if isinstance(value, Mapping) else value
    return result


def _matched(
    cell: Cell, study: Study, rows: Mapping[Cell, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What a rival takes over from the method that it matches."""
    method = study.methods[cell.method]
    if method.of is None:
        return {}
    other = rows[cell.at(method.of)]
    if method.match == "skip_share":
        return {"train": {"skip_share": other["skip_share"]}}
    if method.match == "lag":
        lag = cell.lag if other["lag_mean"] is None else round(other["lag_mean"])
        return {"rollout": {"max_lag": lag}}
    base = rows[cell.at(study.baseline)]
    if not other["update_length"] or not base["update_length"]:
        raise UsageError(
            f"cell {cell.id}: {method.of!r} or {study.baseline!r} made no step at this place, so "
            f"there is no update length to match: leave the place out of methods.{cell.method}"
        )
    # Adam's step is as long as its learning rate: to first order this gives equal lengths.
    share = other["update_length"] / base["update_length"]
    return {"train": {"learning_rate": cell.learning_rate * share}}


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong with a config, in one line."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "rule":
        return first["msg"]
    if key not in KEYS:
        return unknown_key(key)
    return f"{key} = {first['input']!r}: must be {allowed_values(key)}"
