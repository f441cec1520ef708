"""Calls of code that is not ours: in a thread of their own, with a time limit, whatever it raises.

A call gets its own thread, so that one that hangs holds nothing but itself, and so that what it
raises cannot be taken for a Ctrl-C or a cancelled loop: those happen in other threads.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any


class TimedOut(Exception):
    """The call was not over in time. It may still run; nobody waits for it."""


class Raised(Exception):
    """The call raised `cause`, which may be any BaseException."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(told(cause))
        self.cause = cause


def call(
    function: Callable[..., Any], arguments: Mapping[str, Any], limit_s: float | None = None
) -> Any:
    """`function(**arguments)`, awaited if it is async, in a daemon thread.

    limit_s: seconds, None for no limit. An async function that is over the limit is cancelled. A
    plain one cannot be stopped: it runs on and is forgotten. Raises TimedOut, or Raised.
    """
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            returned = function(**arguments)
            if inspect.isawaitable(returned):
                returned = asyncio.run(_awaited(returned, limit_s))
            outcome.append((returned, None))
        except BaseException as error:  # sys.exit, CancelledError, KeyboardInterrupt: all theirs
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TimedOut
    returned, error = outcome[0]
    if isinstance(error, TimedOut):
        raise error
    if error is not None:
        raise Raised(error) from error
    return returned


def told(error: BaseException) -> str:
    """An error in one line: its type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


async def _awaited(awaitable: Any, limit_s: float | None) -> Any:
    try:
        async with asyncio.timeout(limit_s) as timeout:
            return await awaitable
    except TimeoutError as error:
        if timeout.expired():
            raise TimedOut from error
        raise  # the function's own
