"""The ledger with waiting: rollouts wait here for places, the trainer for groups. One event loop,
no threads.

    rollout --admit--> [places] --put / drop--> [groups, in admission order] --take--> train
       ^                                                                                |
       +------------------ places freed by drop and step_over --------------------------+
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sidestep.buffer.ledger import Ledger
from sidestep.errors import LagError, StalledError
from sidestep.types import Group


class GroupBuffer:
    """`admit` is woken by `drop` and `step_over`, `take` by `put` and `close`."""

    def __init__(self, ledger: Ledger, *, timeout_s: float, versions_per_step: int = 1) -> None:
        """versions_per_step: optimizer steps on one rollout batch; each may add a version."""
        self.ledger = ledger
        self.max_lag_versions = ledger.max_lag * versions_per_step
        self.timeout_s = timeout_s
        self.closed = False
        self.num_dropped = 0
        self.blocker: Callable[[], str] = lambda: ""  # what rollouts wait for, for messages
        self._changed = asyncio.Event()

    async def admit(self, most: int) -> tuple[int, ...]:
        """Admission indices of up to `most` groups that may start now; waits until there is at
        least one.
        """
        # No deadline: places are held by groups in flight, whose requests have one, by groups that
        # wait, for which `take` has one, or by a step under way, which may be long.
        while self.ledger.num_admissible == 0:
            self._changed.clear()
            await self._changed.wait()
        return self.ledger.admit(most)

    def put(self, group: Group) -> None:
        self.ledger.arrive(group)
        self._changed.set()

    def drop(self, index: int) -> None:
        self.ledger.drop(index)
        self.num_dropped += 1
        self._changed.set()

    async def take(self, version: int) -> tuple[Group, ...] | None:
        """The next step's groups in admission order, for a trainer at `version`; None once the
        buffer is closed.

        Raises LagError if a token is older than the bound allows (a bug: the bound holds by
        construction).
        """
        await self._until_ready()
        if self.closed:
            return None
        groups = self.ledger.take()
        for group in groups:
            lag = version - group.oldest_version
            if not 0 <= lag <= self.max_lag_versions:
                raise LagError(
                    f"group {group.index} has lag {lag} (version {version}, sampled by "
                    f"{group.oldest_version}), and at most {self.max_lag_versions} is allowed "
                    f"(rollout.max_lag = {self.ledger.max_lag} steps)"
                )
        return groups

    def step_over(self) -> None:
        self.ledger.step_over()
        self._changed.set()

    def close(self) -> None:
        """Stop handing out groups: `take` returns None from now on."""
        self.closed = True
        self._changed.set()

    def _missing(self) -> str:
        missing = self.ledger.missing
        first = f", first {missing[0]}" if missing else ""
        return (
            f"train waited for groups: {len(missing)} in flight have not arrived{first}; "
            f"{self.num_dropped} were dropped so far{self.blocker()}"
        )

    async def _until_ready(self) -> None:
        """The deadline is of the whole wait: groups that come and are dropped are no progress."""
        try:
            async with asyncio.timeout(self.timeout_s):
                while not (self.closed or self.ledger.ready):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise StalledError(
                f"{self._missing()}; waited for rollout.timeout_s = {self.timeout_s:g} s"
            ) from None
