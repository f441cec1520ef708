"""Waits that end: by a deadline that says who waited for whom, or with the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sidestep.errors import StalledError

T = TypeVar("T")


class Waits:
    """The waits of a run that are under way, each at most `limit_s` seconds long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._describe: dict[int, Callable[[], str]] = {}  # the oldest first

    async def within(self, awaitable: Awaitable[T], describe: Callable[[], str]) -> T:
        """Await; after the limit raise StalledError with what `describe` says of it."""
        self._describe[id(awaitable)] = describe
        try:
            async with asyncio.timeout(self._limit_s) as timeout:
                return await awaitable
        except TimeoutError:
            if not timeout.expired():
                raise
            raise StalledError(
                f"{describe()}; no answer in rollout.timeout_s = {self._limit_s:g} s"
            ) from None
        finally:
            self._describe.pop(id(awaitable))

    def under_way(self) -> str:
        """All waits, for the message of another: "; rollout waited for the engine ..."."""
        return "".join(f"; {describe()}" for describe in self._describe.values())


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Await `function(*arguments)` in a daemon thread.

    For code of the user, which may hang: `asyncio.to_thread` would make the end of the run, and a
    second Ctrl-C, wait for it. A call whose caller has gone away runs on and is forgotten.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def call() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:  # the caller's to raise, whatever it is
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=call, daemon=True).start()
    return await future


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a task group: the one raised first, however deep it is nested."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
