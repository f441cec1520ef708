"""What becomes of the records of a control: numbers for a host's log, or a file of their own."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch.distributed as dist

from sidestep.control.alarm import Alarm, AlarmState
from sidestep.control.record import ControlRecord

_log = logging.getLogger(__name__)


class RecordLog:
    """One JSON object per optimizer step, on rank 0, and a warning when the alarm goes off.

    path: lines are appended to this file (folders are made); None: only the log and the alarm. A
        line has the fields of `ControlRecord`, and `alarm` ("ok" | "watch" | "alarm") with
        `alarm_reason`.

    Raises ValueError if the file cannot be written: now, not in the first step.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and rank() == 0:
            _require_writable(self._path)
        self._alarm = Alarm()
        self._level = "ok"

    def add(self, record: ControlRecord) -> None:
        if rank() != 0:
            return
        state = self._alarm.update(
            cosine=record.cosine, norm=record.norm_gradient, excess=record.excess
        )
        if state.level == "alarm" and self._level != "alarm":
            _log.warning("sidestep, step %d: %s", record.step, state.reason)
        self._level = state.level
        _log.debug("sidestep, step %d: %s (%s)", record.step, record.regime, record.reason)
        if self._path is None:
            return
        row = {**record.as_dict(), "alarm": state.level, "alarm_reason": state.reason}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:  # a full disk is no reason to end somebody's training
            _log.warning("sidestep: no more records, %s: %s", self._path, error.strerror)
            self._path = None


def _require_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ValueError(
            f"log={str(path)!r}: cannot be written ({error.strerror}): give another file (for "
            "sidestep.integrations.auto also SIDESTEP_LOG)"
        ) from error


def log_numbers(record: ControlRecord, alarm: AlarmState) -> dict[str, float]:
    """The numbers of a step for a host's own log, by the names of metrics.jsonl where it has them;
    those that do not exist are left out.
    """
    known = {
        "align/cosine": record.cosine,
        "align/cosine_applied": record.cosine_applied,
        "align/cosine_within_batch": record.cosine_within_batch,
        "align/excess": record.excess,
        "align/projected": record.regime == "project",
        "align/damped": record.regime == "damp",
        "align/skipped": record.regime == "skip",
        "align/skips_in_a_row": record.skips_in_a_row,
        "grad/norm_raw": record.norm_gradient,
        "grad/norm_applied": record.norm_applied,
        "grad/clip_factor": record.clip_factor,
        "alarm/raised": alarm.level == "alarm",
    }
    return {name: float(number) for name, number in known.items() if number is not None}


def rank() -> int:
    """This process's rank; what the launcher says before torch.distributed is up."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
