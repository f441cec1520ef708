"""Where a run is written: its default name, and whether a folder holds a run already."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from sidestep.errors import UsageError

CONFIG_FILE = "config.toml"
METRICS_FILE = "metrics.jsonl"


def default_run_dir(recipe: str, now: datetime) -> Path:
    """`runs/<recipe>-<YYYYmmdd-HHMMSS>`, relative to the current folder."""
    return Path("runs") / f"{recipe}-{now:%Y%m%d-%H%M%S}"


def holds_run(run_dir: Path) -> bool:
    """Whether a run was started in `run_dir`."""
    return any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE, "checkpoints"))


def check_new(run_dir: Path) -> None:
    """Raises UsageError unless a new run may be written to `run_dir`."""
    if holds_run(run_dir):
        raise UsageError(
            f"{run_dir}: holds a run already: go on with it by --resume, "
            f"or give another folder as --run-dir"
        )
    for path in (run_dir, *run_dir.parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"{run_dir}: {path} is a file: give another folder as --run-dir")
            return


def check_resumable(run_dir: Path) -> None:
    """Raises UsageError unless `run_dir` holds the config of a run to go on with."""
    if not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{run_dir}: holds no run to resume (no {CONFIG_FILE}): "
            f"check --run-dir, or leave out --resume to start a run there"
        )
