"""Runs the cells of a study in worker processes: as many at a time as there are workers.

A cell is handed out when those it needs are finished. What is finished on disk is not run again; a
cell that was cut short starts from its beginning. Ctrl-C ends the workers and leaves all that is
finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sidestep.config import RunConfig
from sidestep.errors import SidestepError, UsageError
from sidestep.study.declaration import Study
from sidestep.study.grid import Cell, configure, needs
from sidestep.study.outcome import check_same, is_finished, read_result

WORKER_COMMAND = (sys.executable, "-P", "-m", "sidestep.study.worker")
CLOSE_S = 5.0


class Show(Protocol):
    """Told how far a study is."""

    def __call__(self, finished: int, total: int, seconds_left: float | None, last: str) -> None:
        """finished, total: cells. last: what was finished last."""


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    cell: Cell | None = None
    started: float = field(default=0.0)


def cell_folder(out: Path, cell: Cell) -> Path:
    return out / "cells" / cell.id


def run_cells(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    *,
    num_workers: int,
    show: Show,
    command: Sequence[str] = WORKER_COMMAND,
) -> None:
    """Run what is not finished yet.

    Raises UsageError for a finished cell whose config has changed since, and for one that cannot
    run; SidestepError if a worker dies.
    """
    rows: dict[Cell, Mapping[str, Any]] = {}
    for cell in cells:
        if is_finished(cell_folder(out, cell)):
            rows[cell] = read_result(cell, cell_folder(out, cell)).row
    for cell in rows:
        if all(needed in rows for needed in needs(cell, study)):
            check_same(cell_folder(out, cell), configure(cell, study, rows))
    waiting = [cell for cell in cells if cell not in rows]
    show(len(rows), len(cells), None, "")
    if waiting:
        _Pool(study, out, rows, waiting, show, command).run(min(num_workers, len(waiting)))


class _Pool:
    """The workers and what waits. Answers come through one queue, read in one thread a worker."""

    def __init__(
        self,
        study: Study,
        out: Path,
        rows: dict[Cell, Mapping[str, Any]],
        waiting: list[Cell],
        show: Show,
        command: Sequence[str],
    ) -> None:
        self._study, self._out, self._rows, self._waiting = study, out, rows, waiting
        self._show, self._command = show, command
        self._total = len(rows) + len(waiting)
        self._answers: queue.Queue[tuple[_Worker, str]] = queue.Queue()
        self._workers: list[_Worker] = []
        self._seconds: list[float] = []

    def run(self, num_workers: int) -> None:
        try:
            for _ in range(num_workers):
                self._workers.append(self._start())
            for worker in self._workers:
                self._hand_out(worker)
            while any(worker.cell for worker in self._workers):
                worker, line = self._answers.get()
                self._take_in(worker, line)
                for idle in (one for one in self._workers if one.cell is None):
                    self._hand_out(idle)
        finally:
            self._end()

    def _start(self) -> _Worker:
        # A session of their own: Ctrl-C is for us, who end them.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )
        worker = _Worker(process)
        threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        return worker

    def _listen(self, worker: _Worker) -> None:
        """In a thread: pass answers on, and at the end what the process had to say."""
        process = worker.process
        words: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        errors = threading.Thread(target=_collect, args=(process.stderr, words), daemon=True)
        errors.start()
        for line in process.stdout:
            self._answers.put((worker, line))
        errors.join()
        said = "".join(words[-20:])
        death = json.dumps({"died": f"exit code {process.wait()}: {said}"})
        self._answers.put((worker, death))

    def _hand_out(self, worker: _Worker) -> None:
        for cell in self._waiting:
            if all(needed in self._rows for needed in needs(cell, self._study)):
                break
        else:
            return  # those it needs are under way
        self._waiting.remove(cell)
        config = configure(cell, self._study, self._rows)
        call = {"folder": str(cell_folder(self._out, cell)), "config": _plain(config)}
        worker.cell, worker.started = cell, time.monotonic()
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: its listener says why
            worker.process.stdin.write(json.dumps(call) + "\n")
            worker.process.stdin.flush()

    def _take_in(self, worker: _Worker, line: str) -> None:
        answer, cell = json.loads(line), worker.cell
        if cell is None:
            raise SidestepError(f"an idle worker ended: {answer.get('died', line)}")
        if "died" in answer:
            raise SidestepError(f"the worker of cell {cell.id} ended: {answer['died'].strip()}")
        if "usage_error" in answer:
            raise UsageError(f"cell {cell.id}: {answer['usage_error']}")
        result = read_result(cell, cell_folder(self._out, cell))
        self._rows[cell] = result.row
        self._seconds.append(time.monotonic() - worker.started)
        worker.cell = None
        left = self._total - len(self._rows)
        mean_s = sum(self._seconds) / len(self._seconds)
        told = f"{cell.id}: reward {result.row['reward_last'] or 0.0:.2f}"
        if result.row["error"]:
            told = f"{cell.id}: failed: {result.row['error']}"
        self._show(len(self._rows), self._total, mean_s * left / len(self._workers), told)

    def _end(self) -> None:
        """Workers end when their stdin closes, in the middle of a cell, too."""
        for worker in self._workers:
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self._workers:
            try:
                worker.process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()


def _collect(lines: Any, words: list[str]) -> None:
    words.extend(lines)


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")
