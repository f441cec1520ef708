"""Several engines behind one: requests go to whichever has the fewest waiting.

What a group samples does not depend on which of them serves it: its random numbers are keyed by the
group, and its weights are named by version or are the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sidestep.engines.protocol import Engine, Generation, GenerationRequest, Sampling


class EnginePool:
    """An `Engine` made of others, all of which follow one weight channel.

    Calls to one of them are answered in order; two calls that go to different ones may overtake
    each other. A failure of one is raised in its own calls, and ends a run like any other.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        """ValueError for none."""
        if not engines:
            raise ValueError("engines is empty: a pool needs at least one")
        self._engines = tuple(engines)
        self._waiting = [0] * len(engines)

    @property
    def version(self) -> int:
        """The newest version that was live in one of them when it last answered."""
        return max(engine.version for engine in self._engines)

    async def start(self) -> None:
        """Start all of them at once; if one fails, the others are ended and its error is raised."""
        try:
            async with asyncio.TaskGroup() as starting:
                for engine in self._engines:
                    starting.create_task(engine.start())
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from errors

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        """Sample in one of them; see `Engine`."""
        chosen = min(range(len(self._engines)), key=lambda i: self._waiting[i])
        self._waiting[chosen] += 1
        try:
            return await self._engines[chosen].generate(requests, sampling, version=version)
        finally:
            self._waiting[chosen] -= 1

    async def load_weights(self, version: int) -> None:
        """Make `version` live in all of them."""
        async with asyncio.TaskGroup() as loading:
            for engine in self._engines:
                loading.create_task(engine.load_weights(version))

    async def close(self) -> None:
        """End all of them. Safe to call twice."""
        await asyncio.gather(*(engine.close() for engine in self._engines))
