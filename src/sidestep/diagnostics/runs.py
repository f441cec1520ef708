"""Reading a run folder back: of a run that is over, that was killed, or that is still going."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.diagnostics.jsonl import read_rows
from sidestep.diagnostics.metrics import find_metric
from sidestep.errors import UsageError
from sidestep.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, GROUPS_FILE, METRICS_FILE


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run folder says. rows: the objects of metrics.jsonl in step order; groups: those of
    groups.jsonl.
    """

    path: Path
    rows: tuple[dict[str, Any], ...]
    groups: tuple[dict[str, Any], ...]
    config_text: str
    config: dict[str, Any]
    environment: dict[str, Any]

    def column(self, name: str) -> list[Any]:
        """The values of one metric, one per row; None where a row has none."""
        return [row.get(name) for row in self.rows]

    def values(self, name: str) -> list[Any]:
        """The values of one metric without the missing ones."""
        return [value for value in self.column(name) if value is not None]

    def setting(self, dotted: str) -> Any:
        """A value of the resolved config by its dotted name; None if the config lacks it."""
        value: Any = self.config
        for key in dotted.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value


def is_observed(run: RunData) -> bool:
    """Whether the control only watched."""
    return bool(run.setting("control.mode") == "observe")


def read_run(run_dir: Path | str) -> RunData:
    """Read a run folder. The last line of a .jsonl file may be half written.

    Raises UsageError for a folder that is not a run, naming what is missing, and for a file that
    cannot be read, naming it.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise UsageError(
            f"no run folder at {path}: give the folder that `sidestep train --run-dir` wrote"
        )
    needed = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS_FILE, GROUPS_FILE)
    missing = [name for name in needed if not (path / name).is_file()]
    if missing:
        raise UsageError(f"{path} is not a run folder: it has no {', no '.join(missing)}")
    config_text = (path / CONFIG_FILE).read_text(encoding="utf-8")
    try:
        config = tomllib.loads(config_text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path / CONFIG_FILE} is not TOML: {error}") from error
    try:
        environment = json.loads((path / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path / ENVIRONMENT_FILE} is not JSON: {error}") from error
    return RunData(
        path=path,
        rows=tuple(_checked(row, path / METRICS_FILE) for row in read_rows(path / METRICS_FILE)),
        groups=tuple(read_rows(path / GROUPS_FILE)),
        config_text=config_text,
        config=config,
        environment=environment,
    )


def _checked(row: dict[str, Any], path: Path) -> dict[str, Any]:
    """A row whose numbers are finite or None. Raises UsageError for one that holds something else
    than a number where the table has one.
    """
    for name, value in row.items():
        metric = find_metric(name)
        if value is None or metric is None or metric.kind != "number":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(
                f"{path}: {name} = {value!r} in step {row.get('step')} is no number: mend or "
                f"delete that line"
            )
        if not math.isfinite(value):
            row = {**row, name: None}
    return row
