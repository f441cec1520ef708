"""The embedded engine: transformers in a process of its own, so that sampling overlaps training."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidestep.engines.frames import encode_frame, receive_frame
from sidestep.engines.messages import EngineSettings, pack_call, unpack_answer
from sidestep.engines.protocol import Generation, GenerationRequest, Sampling
from sidestep.errors import EngineError

WORKER_COMMAND = (sys.executable, "-P", "-m", "sidestep.engines.worker")
STDERR_BYTES = 16_384
STDERR_LINES = 50


class EmbeddedEngine:
    """An `Engine` in a child process. Belongs to the event loop it was started in.

    Calls may be made while others run: they wait in the process and are answered in order, so it
    need not idle. A call that raises in the process fails with its error, and so does every call
    that is waiting; the process goes on. If the process dies, these calls fail at once and all
    later ones too, with its exit code and last words.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        channel: str | Path,
        seed: int,
        device: str = "cpu",
        dtype: str = "float32",
        attention: str = "sdpa",
        num_threads: int | None = None,
        start_timeout_s: float = 300.0,
        close_timeout_s: float = 5.0,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """Nothing starts yet.

        model_path: `model.path`, the architecture and the tokenizer; the weights come through the
        folder `channel`. num_threads: OMP threads of the process; None leaves what the environment
        says, else one. command: a process that speaks the frames of `sidestep.engines.worker`.
        """
        self._settings = EngineSettings(
            str(model_path), str(channel), seed, device, dtype, attention
        )
        self._num_threads = num_threads
        self._start_timeout_s = start_timeout_s
        self._close_timeout_s = close_timeout_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._stderr = b""
        self._failure: str | None = None
        self._version = -1

    @property
    def version(self) -> int:
        """Version that was live when the engine last answered; -1 before the first was loaded."""
        return self._version

    @property
    def pid(self) -> int | None:
        """Process id, None before `start`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and return once its model is loaded.

        EngineError if that fails or takes longer than start_timeout_s.
        """
        if self._process is not None:
            raise EngineError("the engine was started already")
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(os.environ, self._num_threads),
        )
        self._tasks = (
            asyncio.create_task(self._read_stderr(self._process), name="engine stderr"),
            asyncio.create_task(self._read_answers(self._process), name="engine answers"),
        )
        call = {"kind": "start", "settings": dataclasses.asdict(self._settings)}
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._call(call)
        except TimeoutError as error:
            await self.close()
            raise EngineError(
                f"engine process {self.pid} was not ready after {self._start_timeout_s:g} s"
                f"{self._last_words()}"
            ) from error
        except BaseException:  # cancelled too: no process is left behind
            await self.close()
            raise

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        """Sample with exactly the weights of `version`; None: the newest when sampling starts."""
        answer = await self._call(pack_call(requests, sampling, version))
        try:
            return unpack_answer(answer, requests)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"engine process {self.pid} gave a wrong answer: {error!r}"
            ) from error

    async def load_weights(self, version: int) -> None:
        """Make `version` live, which must have been published in the weight channel."""
        await self._call({"kind": "load", "version": version})

    async def close(self) -> None:
        """End the process: close its stdin, then SIGTERM, then SIGKILL. Safe twice, and when dead.

        Every call that waits raises EngineError, and so does every later one.
        """
        self._fail("the engine was closed")
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        for end in (process.terminate, process.kill):
            try:
                async with asyncio.timeout(self._close_timeout_s):
                    await process.wait()
                break
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    end()
        await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a call and wait for its answer."""
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._process is None or self._process.stdin is None:
            raise EngineError("the engine was not started: await engine.start() first")
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._process.stdin.write(encode_frame({"id": number, **message}))
            with contextlib.suppress(ConnectionError):  # a dead process: the reader says why
                await self._process.stdin.drain()
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def _read_answers(self, process: asyncio.subprocess.Process) -> None:
        """Deliver answers until the process ends, then fail whoever waits."""
        assert process.stdout is not None
        try:
            while (answer := await receive_frame(process.stdout)) is not None:
                self._deliver(answer)
            self._fail(await self._cause_of_death(process))
        except (EngineError, KeyError, TypeError) as error:
            if not process.stdout.at_eof():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            cause = await self._cause_of_death(process)
            self._fail(f"{cause}\nits last frame was broken: {error!r}")
        finally:
            self._fail(f"answers of engine process {process.pid} are no longer read")

    def _deliver(self, answer: dict[str, Any]) -> None:
        # Nobody waits any more if the caller was cancelled or has heard of an earlier error.
        future = self._waiting.get(answer["id"])
        if "error" not in answer:
            self._version = answer["version"]
            if future is not None and not future.done():
                future.set_result(answer)
        elif future is not None:
            error = answer["error"]
            self._fail_waiting(
                f"engine process {self.pid} raised {error['type']}: {error['message']}\n"
                f"{error['traceback']}"
            )

    def _fail(self, message: str) -> None:
        """Fail every waiting call and all later ones, with the first cause."""
        self._failure = self._failure or message
        self._fail_waiting(self._failure)

    def _fail_waiting(self, message: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineError(message))
        self._waiting.clear()

    async def _cause_of_death(self, process: asyncio.subprocess.Process) -> str:
        """Wait for the process (stdout has ended) and say how it ended, with its last words."""
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await process.wait()
                await asyncio.wait(self._tasks[:1])
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        code = process.returncode
        assert code is not None
        names = {number.value: number.name for number in signal.Signals}
        killer = names.get(-code, f"signal {-code}")
        how = f"was killed by {killer}" if code < 0 else f"exited with code {code}"
        return f"engine process {process.pid} {how}{self._last_words()}"

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Keep the end of what the process writes: for error messages, not for the terminal."""
        assert process.stderr is not None
        while chunk := await process.stderr.read(STDERR_BYTES):
            self._stderr = (self._stderr + chunk)[-STDERR_BYTES:]

    def _last_words(self) -> str:
        lines = self._stderr.decode(errors="replace").splitlines()[-STDERR_LINES:]
        return "; last lines of its stderr:\n" + "\n".join(lines) if lines else ""


def child_environment(environment: Mapping[str, str], num_threads: int | None) -> dict[str, str]:
    """Environment of the engine process.

    Idle OpenMP threads that spin starve the trainer, hence the passive policy.
    """
    child = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **environment}
    child |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if num_threads is not None:
        child["OMP_NUM_THREADS"] = str(num_threads)
    return child
