"""A finished cell on disk, and its row: everything that a run comes down to, but nothing that
depends on other runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestep.config import RunConfig
from sidestep.config.loading import load_config
from sidestep.diagnostics.compare import accuracy_last, mean_of, samples_per_step
from sidestep.diagnostics.runs import RunData, read_run
from sidestep.diagnostics.statistics import collapse_step, last_tenth, smoothing_window
from sidestep.diagnostics.summary import mean, moving_mean
from sidestep.errors import UsageError
from sidestep.study.grid import Cell

OUTCOME_FILE = "cell.json"
# Of a row, these depend on the machine and the moment; the rest is bitwise reproducible.
TIMED = ("cpu_s", "train_cpu_s", "seconds", "train_s", "generate_s", "commit")
SIGNALS = ("align/cosine", "align/excess", "ratio/ess", "ratio/kl_behaviour", "grad/norm_raw")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. error: why it failed, if it did; a failed run is a result, too.

    update_length: sum over the steps of the L2 norm of the change of all weights.
    """

    error: str | None
    update_length: float


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Mark the cell as finished; whole or not at all."""
    beside = folder / f"{OUTCOME_FILE}.new"
    content = {"error": outcome.error, "update_length": outcome.update_length}
    beside.write_text(json.dumps(content), encoding="utf-8")
    os.replace(beside, folder / OUTCOME_FILE)


def is_finished(folder: Path) -> bool:
    return (folder / OUTCOME_FILE).is_file()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished cell: its row, and its run for the curves."""

    cell: Cell
    row: Mapping[str, Any]
    run: RunData

    @property
    def rewards(self) -> list[float | None]:
        return self.run.column("reward/mean")


def read_result(cell: Cell, folder: Path) -> Result:
    """Read a finished cell. Raises UsageError for a folder that is none."""
    run = read_run(folder)
    again = "delete that folder to run the cell again"
    try:
        content = json.loads((folder / OUTCOME_FILE).read_text(encoding="utf-8"))
        outcome = Outcome(content["error"], float(content["update_length"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / OUTCOME_FILE} cannot be read ({error!r}): {again}") from error
    num_steps = run.setting("train.steps")
    if outcome.error is None and len(run.rows) != num_steps:
        raise UsageError(
            f"{folder}: metrics.jsonl has {len(run.rows)} of {num_steps} steps, though the cell "
            f"was finished: {again}"
        )
    return Result(cell, make_row(cell, run, outcome), run)


def check_same(folder: Path, config: RunConfig) -> None:
    """Raises UsageError if a finished cell was run with another config than it has now."""
    stored = load_config(folder / "config.toml").model_dump()
    wanted = config.model_dump()
    for section, value in wanted.items():
        keys = value if isinstance(value, dict) else {"": value}
        before = stored[section] if isinstance(value, dict) else {"": stored[section]}
        for key, now in keys.items():
            if before[key] != now:
                name = f"{section}.{key}" if key else section
                raise UsageError(
                    f"{folder} was run with {name} = {before[key]!r}, the study now says {now!r}: "
                    f"give another --out, or delete that folder to run the cell again"
                )


def make_row(cell: Cell, run: RunData, outcome: Outcome) -> dict[str, Any]:
    """One line of the table. What each column means: docs/study.md."""
    rewards = run.column("reward/mean")
    window = smoothing_window(len(rewards))
    smooth = [value for value in moving_mean(rewards, window)[window - 1 :] if value is not None]
    num_samples = len(rewards) * samples_per_step(run)
    regimes = run.column("align/regime")
    late = rewards[len(rewards) // 2 :]
    cosines = run.column("align/cosine")[len(rewards) // 2 :]
    return {
        "task": cell.task,
        "method": cell.method,
        "lag": cell.lag,
        "learning_rate": cell.learning_rate,
        "seed": cell.seed,
        "error": outcome.error,
        "learning_rate_used": run.setting("train.learning_rate"),
        "lag_used": run.setting("rollout.max_lag"),
        "skip_share_used": run.setting("train.skip_share"),
        "steps": len(rewards),
        "steps_planned": run.setting("train.steps"),
        "samples": num_samples,
        # Of a run that ended early nothing is left at its end.
        "reward_last": 0.0 if outcome.error else last_tenth(rewards),
        "reward_peak": max(smooth, default=None),
        "reward_late_lowest": min((value for value in late if value is not None), default=None),
        "accuracy_last": accuracy_last(run),
        "collapse_step": len(rewards) if outcome.error else collapse_step(rewards),
        "skip_share": regimes.count("skip") / len(regimes) if regimes else 0.0,
        "lag_mean": mean_of("lag/mean")(run),
        "update_length": outcome.update_length / num_samples if num_samples else 0.0,
        "cosine_mean": mean_of("align/cosine")(run),
        "cosine_late": mean([value for value in cosines if value is not None]),
        "ess_lowest": min(run.values("ratio/ess"), default=None),
        "kl_highest": max(run.values("ratio/kl_behaviour"), default=None),
        "norm_highest": max(run.values("grad/norm_raw"), default=None),
        # CPU time hardly depends on what else the machine does; wall-clock time measures that.
        "cpu_s": math.fsum(cpu_s) if (cpu_s := run.values("time/cpu_s")) else None,
        "train_cpu_s": mean_of("time/train_cpu_s")(run),
        "train_s": mean_of("time/train_s")(run),
        "generate_s": mean_of("time/generate_s")(run),
        "seconds": next(reversed(run.values("time/elapsed_s")), None),
        "commit": run.environment.get("git_commit"),
    }


def reproducible(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that a second run of the cell has to give bit by bit."""
    return {name: value for name, value in row.items() if name not in TIMED}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
