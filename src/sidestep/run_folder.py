"""Where a run is written: its default name, and whether a folder holds a run already."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from safetensors import SafetensorError

from sidestep.errors import SidestepError, UsageError

CONFIG_FILE = "config.toml"
ENVIRONMENT_FILE = "env.json"
METRICS_FILE = "metrics.jsonl"
GROUPS_FILE = "groups.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
CHECKPOINTS_FOLDER = "checkpoints"
FINAL_FOLDER = "final"
REPORT_FILE = "report.html"
LOCK_FILE = ".lock"

# A disk that takes no more: full, over quota, a limit on the size of files, read-only, broken.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def default_run_dir(recipe: str, now: datetime) -> Path:
    """`runs/<recipe>-<YYYYmmdd-HHMMSS>`, relative to the current folder."""
    return Path("runs") / f"{recipe}-{now:%Y%m%d-%H%M%S}"


def holds_run(run_dir: Path) -> bool:
    """Whether a run was started in `run_dir`."""
    traces = CONFIG_FILE, METRICS_FILE, CHECKPOINTS_FOLDER
    return any((run_dir / name).exists() for name in traces)


def has_steps(run_dir: Path) -> bool:
    """Whether a step of a run in `run_dir` is over."""
    metrics = run_dir / METRICS_FILE
    return metrics.is_file() and metrics.stat().st_size > 0


@contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Make the folder and hold it: two runs in one folder would destroy each other's files.

    Raises UsageError while another process holds it, or if nothing can be written there. The lock
    ends with the process, however that ends.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / LOCK_FILE).touch()
    except OSError as error:
        raise UsageError(
            f"--run-dir {run_dir}: cannot be written ({error.strerror}); give another folder"
        ) from error
    with open(run_dir / LOCK_FILE, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--run-dir {run_dir}: another process is writing this run; wait for it, or give "
                f"another folder"
            ) from None
        yield


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


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Turn the errors of a disk that takes no more into a SidestepError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise _disk_error(run_dir, str(error)) from error
    except SafetensorError as error:  # knows the number only in words
        if not any(f"(os error {number})" in str(error) for number in DISK_ERRORS):
            raise
        raise _disk_error(run_dir, str(error)) from error


def _disk_error(run_dir: Path, problem: str) -> SidestepError:
    return SidestepError(
        f"--run-dir {run_dir}: could not be written to the end ({problem}): make room, then go on "
        f"from the newest checkpoint with --resume"
    )
