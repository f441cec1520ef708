"""Calls in a thread of their own that never keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


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
