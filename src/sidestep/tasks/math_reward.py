"""Answers compared by math-verify, in a process that is ended when it takes too long."""

from __future__ import annotations

import importlib.util
import json
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO

from sidestep.errors import RewardError, UsageError
from sidestep.tasks.math_worker import NO_ANSWER, NO_GOLD, RIGHT, WRONG
from sidestep.tasks.rewards import Scores
from sidestep.types import Example

START_S = 120.0  # SymPy takes a second or two to import, on a busy machine many
GRACE_S = 5.0  # how much longer than its own alarm a silent worker is waited for

TIMED_OUT = "timed out"
DIED = "the comparison died"

# Numbers every version of math-verify reads: not worth asking, data sets are full of them.
PLAIN_NUMBER = re.compile(r"-?\d{1,3}(,?\d{3})*(\.\d+)?")


class MathWorker:
    """One process of `math_worker`, started when first asked, anew after it died.

    Safe to use from several threads: one question at a time. Raises UsageError at once if
    math-verify is not installed.
    """

    def __init__(self, limit_s: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError("math-verify is needed here: pip install 'sidestep[math]'")
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._rest = b""
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, None where there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, gold: str, completion: str | None) -> str:
        """A verdict of `math_worker`, TIMED_OUT or DIED. Raises RewardError if none can start."""
        question = json.dumps({"gold": gold, "completion": completion}) + "\n"
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            try:
                process.stdin.write(question.encode())
                verdict = self._line(process, self._limit_s + GRACE_S)
            except BrokenPipeError:
                verdict = None
            if verdict is not None:
                return verdict
            alarmed = self._stop() in (-14, None)  # SIGALRM, its own; None: ours
            return TIMED_OUT if alarmed else DIED

    def close(self) -> None:
        """End the process. Safe to call twice; what is asked later raises RewardError."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # first: a call that waits for it, in whatever thread, holds the lock
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise RewardError("math-verify was asked after the run had ended")
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sidestep.tasks.math_worker", str(self._limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C is the run's, which ends this in time
        )
        self._rest = b""
        if self._line(process, START_S) != "ready":
            self._stop()
            raise RewardError(f"math-verify did not start: {self._last_words()}")
        return process

    def _line(self, process: subprocess.Popen[bytes], limit_s: float) -> str | None:
        """The next line of stdout; None if it ended or said nothing for so long."""
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                read = process.stdout.read(65_536)
                if not read:
                    return None
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _stop(self) -> int | None:
        """End the process; the exit code of one that had ended by itself, None if we ended it."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None

    def _last_words(self) -> str:
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class MathReward:
    """1.0 if math-verify finds the completion's answer equal to the row's `answer`, else 0.0.

    A completion in which it finds no answer, or that takes longer than the limit to compare,
    scores 0.0 and has a problem: "math: no answer found", "math: timed out".
    """

    name = "math"

    def __init__(self, limit_s: float) -> None:
        self._worker = MathWorker(limit_s)

    def understands(self, answer: str) -> bool:
        """Whether math-verify can read a row's answer: no completion could be right otherwise."""
        return bool(PLAIN_NUMBER.fullmatch(answer)) or self._worker.ask(answer, None) == RIGHT

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        verdicts = [
            self._worker.ask(example.columns["answer"], completion)
            if completion.strip()
            else NO_ANSWER
            for example, completion in zip(examples, completions, strict=True)
        ]
        return Scores(
            tuple(float(verdict == RIGHT) for verdict in verdicts),
            tuple("" if v in (RIGHT, WRONG) else f"{self.name}: {v}" for v in verdicts),
        )

    def close(self) -> None:
        self._worker.close()


__all__ = ["DIED", "NO_ANSWER", "NO_GOLD", "TIMED_OUT", "MathReward", "MathWorker"]
