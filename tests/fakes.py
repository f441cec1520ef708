"""Stand-ins that behave like the real thing, for tests of what is built on top."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sidestep.engines.protocol import Generation, GenerationRequest, Sampling
from sidestep.errors import EngineError
from sidestep.types import Completion

Script = Callable[[GenerationRequest, int, int], str]


def echo_script(request: GenerationRequest, member: int, version: int) -> str:
    """What members say unless told otherwise: a function of index, member and version."""
    return f"{request.index}.{member}@{version}"


@dataclass
class FakeEngine:
    """An `Engine` without a model or a process. One token (its code point) per character it says.

    newest: the newest published version, e.g. `channel.newest`. versions: those published; None
    takes every version as published. script: what a member says at a version. delay_s: seconds call
    n takes (0 still gives way to other tasks). failures: call number, from 1, to what it raises.
    A failure ends every waiting call, as the protocol says. calls: what was asked, in order.
    """

    newest: Callable[[], int | None]
    versions: Callable[[], Sequence[int]] | None = None
    script: Script = echo_script
    delay_s: Callable[[int], float] = lambda call: 0.0
    failures: Mapping[int, str] = field(default_factory=dict)
    logprob: float = -1.0
    version: int = -1
    closed: bool = False
    calls: list[tuple[tuple[GenerationRequest, ...], Sampling, int | None]] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self._waiting: set[asyncio.Future[Generation | None]] = set()

    async def start(self) -> None:
        newest = self.newest()
        if newest is not None:
            self.version = newest

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        self.calls.append((tuple(requests), sampling, version))
        return await self._wait(self._generate(len(self.calls), requests, sampling, version))

    async def load_weights(self, version: int) -> None:
        await self._wait(self._load(version))

    async def close(self) -> None:
        self.closed = True
        self._fail("the engine was closed")

    async def _wait(self, work):
        if self.closed:
            work.close()
            raise EngineError("the engine was closed")
        task = asyncio.ensure_future(work)
        answer = asyncio.get_running_loop().create_future()
        self._waiting.add(answer)
        task.add_done_callback(lambda task: self._deliver(task, answer))
        try:
            return await answer
        finally:
            self._waiting.discard(answer)

    def _deliver(self, task: asyncio.Task, answer: asyncio.Future) -> None:
        error = task.exception()
        if answer.done():  # the caller was cancelled or has heard of an earlier error
            return
        if error:
            self._fail(str(error))
        else:
            answer.set_result(task.result())

    def _fail(self, message: str) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(EngineError(message))

    async def _load(self, version: int | None) -> None:
        async with self._turn:
            self._make_live(version)

    def _make_live(self, version: int | None) -> None:
        wanted = self.newest() if version is None else version
        if wanted is None:
            raise EngineError("no weights have been published")
        if self.versions is not None and wanted not in self.versions():
            raise EngineError(f"version {wanted} is not published (there: {self.versions()})")
        self.version = wanted

    async def _generate(
        self,
        call: int,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        version: int | None,
    ) -> Generation:
        async with self._turn:
            self._make_live(version)
            live, delay_s = self.version, self.delay_s(call)
            await asyncio.sleep(delay_s)
            if call in self.failures:
                raise EngineError(self.failures[call])
            completions = tuple(
                tuple(
                    self._say(self.script(request, member, live), live, sampling)
                    for member in range(request.num_completions)
                )
                for request in requests
            )
            return Generation(completions, generate_s=delay_s, load_s=0.0)

    def _say(self, text: str, version: int, sampling: Sampling) -> Completion:
        ids = tuple(map(ord, text))
        cut = ids[: sampling.max_new_tokens]
        return Completion(
            token_ids=cut,
            logprobs=(self.logprob,) * len(cut),
            versions=(version,) * len(cut),
            finish_reason="stop" if cut == ids else "length",
            text=text[: len(cut)],
        )
