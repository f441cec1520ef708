"""A process that runs cells, one after the other: `python -m sidestep.study.worker`.

    parent -> worker   one JSON line a cell: {"folder": ..., "config": {...}}
    worker -> parent   one JSON line when it is over: {} or {"usage_error": "..."}

Loading torch takes several seconds, a cell some twenty: so a process runs many. Sampling and
training share it; in exact mode nothing is won by overlap, and two workers fill two cores.
"""

from __future__ import annotations

import io
import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sidestep.threads import set_thread_environment


def run_cell(values: dict[str, Any], folder: Path) -> None:
    """Run the config `values` in `folder`, whatever a run that was cut short left there.

    A run that fails is recorded as failed. Raises UsageError for a config that cannot run.
    """
    import torch
    from rich.console import Console

    from sidestep.build import Place, train
    from sidestep.config import RunConfig
    from sidestep.engines.channel import WeightChannel
    from sidestep.engines.in_process import InProcessEngine
    from sidestep.errors import Interrupted, SidestepError, UsageError
    from sidestep.study.outcome import Outcome, write_outcome

    class MeasuredChannel(WeightChannel):
        """A weight channel that sums up how far the weights move from version to version."""

        def __init__(self, channel_folder: Path | str) -> None:
            super().__init__(channel_folder)
            self.length = 0.0
            self._before: dict[str, torch.Tensor] | None = None

        def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            now = {name: tensor.detach().cpu().clone() for name, tensor in named_tensors}
            if self._before is not None:
                before = self._before
                squares = (
                    float((now[n].double() - before[n].double()).square().sum()) for n in now
                )
                self.length += sum(squares) ** 0.5
            self._before = now
            super().publish(version, now.items())

    channels: list[MeasuredChannel] = []

    def make_channel(channel_folder: Path) -> WeightChannel:
        channels.append(MeasuredChannel(channel_folder))
        return channels[-1]

    if folder.exists():
        shutil.rmtree(folder)
    place = Place(InProcessEngine, make_channel, Console(file=io.StringIO()), report=False)
    error = None
    try:
        train(RunConfig.model_validate(values), folder, place=place)
    except (UsageError, Interrupted):
        raise
    except SidestepError as failure:
        error = " ".join(str(failure).split())
    # The curves are in metrics.jsonl. The rest of a large grid would fill a disk.
    for name in ("checkpoints", "final"):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "groups.jsonl").write_text("", encoding="utf-8")
    write_outcome(folder, Outcome(error, channels[0].length))


def main() -> None:
    """Serve the parent until it closes our stdin; if it is gone in the middle of a cell, end."""
    set_thread_environment()
    calls: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            calls.put(line)
        os._exit(0)  # the parent is gone: an unfinished cell is run again next time

    threading.Thread(target=listen, daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of others are no answers
    from sidestep.errors import UsageError

    while True:
        call = json.loads(calls.get())
        answer = {}
        try:
            run_cell(call["config"], Path(call["folder"]))
        except UsageError as error:
            answer["usage_error"] = str(error)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
