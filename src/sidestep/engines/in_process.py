"""An engine without a process: sampling takes turns with training in the process of the run.

For studies in exact mode, where nothing is won by overlap: many runs side by side use the cores
better than two processes a run, and start without loading torch again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sidestep.engines.messages import EngineSettings, pack_call, unpack_answer
from sidestep.engines.protocol import Generation, GenerationRequest, Sampling
from sidestep.engines.server import EngineServer
from sidestep.errors import EngineError


class InProcessEngine:
    """An `Engine` that calls the worker's own server in a thread. Calls take turns, in order.

    Its weights come through the folder of a weight channel, as with any engine.
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
    ) -> None:
        self._settings = EngineSettings(
            str(model_path), str(channel), seed, device, dtype, attention
        )
        self._server: EngineServer | None = None
        self._turn = asyncio.Lock()
        self._is_closed = False

    @property
    def version(self) -> int:
        return self._server.version if self._server else -1

    async def start(self) -> None:
        """Nothing: the trainer loads its model now, and transformers cannot load two at once in two
        threads (of tied weights one is then missing). The first call loads ours.
        """

    async def load_weights(self, version: int) -> None:
        async with self._turn:
            await asyncio.to_thread(lambda: self._ready().load(version))

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        call = pack_call(requests, sampling, version)
        async with self._turn:
            answer = await asyncio.to_thread(lambda: self._ready().handle(call))
        return unpack_answer(answer, requests)

    async def close(self) -> None:
        self._is_closed = True
        self._server = None

    def _ready(self) -> EngineServer:
        if self._is_closed:
            raise EngineError("the engine was closed")
        if self._server is None:
            self._server = EngineServer(self._settings)
        return self._server
