"""What a run writes down while it goes: metrics.jsonl, groups.jsonl and TensorBoard event files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

from sidestep.diagnostics.events import EventFile
from sidestep.diagnostics.jsonl import read_rows, replace_rows, to_line
from sidestep.diagnostics.metrics import GROUP_KEYS, KIND_IN_WORDS, Kind, find_metric
from sidestep.errors import UsageError
from sidestep.run_folder import GROUPS_FILE, METRICS_FILE, TENSORBOARD_FOLDER


class Recorder:
    """Appends to the files of one run folder. Every call ends with a flush: a kill loses at most
    the line being written.

    A fresh run starts new files and raises UsageError where metrics.jsonl already has rows. With
    `resume_step`, the number of steps that are finished and will not be redone, rows of that step
    and later ones are removed first, from groups.jsonl also the dropped groups admitted after the
    last one that is kept: all these will be written again.
    """

    def __init__(self, run_dir: Path | str, resume_step: int | None = None) -> None:
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        metrics_path, groups_path = run_dir / METRICS_FILE, run_dir / GROUPS_FILE
        if resume_step is not None:
            _cut_metrics(metrics_path, resume_step)
            _cut_groups(groups_path, resume_step)
        elif metrics_path.exists() and metrics_path.stat().st_size:
            raise UsageError(
                f"{metrics_path} holds a run already: use --resume, or another --run-dir"
            )
        self._next_step = resume_step or 0
        self._metrics = metrics_path.open("a", encoding="utf-8", newline="\n")
        self._groups = groups_path.open("a", encoding="utf-8", newline="\n")
        self._events = EventFile(run_dir / TENSORBOARD_FOLDER, purge_step=resume_step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append the row of one finished step; `metrics["step"]` counts from 0 without gaps.

        Names must be in the metrics table. A value is of the kind the table says, or None. NaN and
        infinity do not exist in JSON: they are written as null and their names are listed under
        "not_finite"; TensorBoard gets them as they are. Raises ValueError, before anything is
        written, naming the metric and the value.
        """
        row = {name: _checked(name, value) for name, value in metrics.items()}
        if row.get("step") != self._next_step:
            raise ValueError(
                f"metric 'step' is {row.get('step')!r}, expected {self._next_step}: "
                "one row a step, counted from 0"
            )
        scalars = {name: value for name, value in row.items() if _is_scalar(name, value)}
        not_finite = [name for name, value in scalars.items() if not math.isfinite(value)]
        written = row | dict.fromkeys(not_finite)
        if not_finite:
            written["not_finite"] = not_finite
        self._metrics.write(to_line(written))
        self._metrics.flush()
        self._events.scalars(self._next_step, scalars)
        self._next_step += 1

    def groups(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append one line per group, each with exactly the keys GROUP_KEYS. Raises ValueError
        naming a wrong key.
        """
        lines = []
        for row in rows:
            for key in sorted(set(row) ^ set(GROUP_KEYS)):
                state = "missing in" if key in GROUP_KEYS else "unknown in"
                raise ValueError(f"key {key!r} is {state} the row of group {row.get('index')!r}")
            lines.append(to_line(row))
        self._groups.writelines(lines)
        self._groups.flush()

    def close(self) -> None:
        """Close the files. Safe to call twice."""
        self._metrics.close()
        self._groups.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _cut_metrics(path: Path, resume_step: int) -> None:
    if path.exists():
        replace_rows(path, (row for row in read_rows(path) if row["step"] < resume_step))


def _cut_groups(path: Path, resume_step: int) -> None:
    if not path.exists():
        return
    rows = read_rows(path)
    # Rows are written step by step, those of dropped groups (which have no step) before the ones
    # that were trained on in their step.
    trained = (i for i, row in enumerate(rows) if row["step"] in range(resume_step))
    replace_rows(path, rows[: max(trained, default=-1) + 1])


def _is_scalar(name: str, value: Any) -> bool:
    metric = find_metric(name)
    return name != "step" and value is not None and metric is not None and metric.kind == "number"


def _checked(name: str, value: Any) -> Any:
    """The value as plain Python, or ValueError."""
    metric = find_metric(name)
    if metric is None or metric.kind == "names":
        raise ValueError(
            f"metric {name!r} is not one a run may record: add it to sidestep.diagnostics.metrics"
        )
    if value is None:
        return None
    if not _is_kind(value, metric.kind):
        raise ValueError(
            f"metric {name!r} is {value!r}: expected {KIND_IN_WORDS[metric.kind]} or None"
        )
    if metric.kind == "mapping":
        return {str(key): _plain(number) for key, number in value.items()}
    return value if metric.kind == "text" else _plain(value)


def _is_kind(value: Any, kind: Kind) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "mapping":
        return isinstance(value, Mapping) and all(
            _is_number(number) and math.isfinite(number) for number in value.values()
        )
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(number: Real) -> int | float:
    return int(number) if isinstance(number, Integral) else float(number)
