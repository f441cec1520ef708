"""TensorBoard event files, written with tensorboard's own records and without torch or TensorFlow.

tensorboard's EventFileWriter is not used: where TensorFlow is installed it imports it (seconds, and
its own log lines), and it writes from a thread, so that an error of the disk shows up later than
the line that met it.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """One event file. TensorBoard reads all files of a folder in the order of their names, which
    starts with the time.

    purge_step: TensorBoard forgets what earlier files of the folder say about this step and later
    ones.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=restart))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write and flush one event with all values (float32; NaN and infinity are allowed)."""
        summary = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=summary)))

    def close(self, failed: bool = False) -> None:
        """`failed` is for sinks that show it; an event file has no place for it."""
        self._records.close()

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()
