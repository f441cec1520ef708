"""The engine process: `python -m sidestep.engines.worker`, started by `EmbeddedEngine`.

    stdin  -> frames of calls -> a thread that only reads -> queue -> EngineServer, one at a time
    stdout <- frames of answers <-----------------------------------------'

The first call starts the model. The reading thread also notices the end of stdin, which means that
the parent closed the engine or died: the process then ends at once, whatever it is computing. A
child of the parent (a reward function forks) can hold the other end of stdin open for longer than
the parent lives, so another thread looks whether the parent still is the parent.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, BinaryIO

from sidestep.engines.frames import encode_frame, read_frame
from sidestep.engines.messages import EngineSettings
from sidestep.errors import EngineError

if TYPE_CHECKING:
    from sidestep.engines.server import EngineServer

TRACEBACK_LINES = 20
PARENT_CHECK_S = 1.0


def main() -> None:
    # Ctrl-C in a terminal, and a scheduler's SIGTERM, reach every process of the group; the parent
    # decides what follows, and the end of stdin ends this process at once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    calls_in, answers_out = _take_standard_streams()
    calls: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    Thread(target=_listen, args=(calls_in, calls), daemon=True).start()
    server: EngineServer | None = None
    while True:
        call = calls.get()
        try:
            if server is None:
                server = _start(call)
                answer: dict[str, Any] = {"version": server.version}
            else:
                answer = server.handle(call)
            frame = encode_frame({"id": call["id"], **answer})
        except Exception as error:
            # The boundary of the process: every failure is the parent's to raise.
            frame = encode_frame({"id": call["id"], "error": _describe(error)})
        answers_out.write(frame)
        answers_out.flush()


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout, so that no library's print or read touches a frame."""
    calls_in = os.fdopen(os.dup(0), "rb")
    answers_out = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return calls_in, answers_out


def _listen(stream: BinaryIO, calls: SimpleQueue[dict[str, Any]]) -> None:
    code = 1
    try:
        while (call := read_frame(stream)) is not None:
            calls.put(call)
        code = 0
    except EngineError:
        traceback.print_exc()
    finally:
        # Not sys.exit: the main thread may be deep in a computation, and nothing needs cleaning up.
        os._exit(code)


def _watch_parent(parent: int) -> None:
    # No system tells a process of its parent's death in a portable way; it only gets a new parent.
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _start(call: dict[str, Any]) -> EngineServer:
    # Imported here: torch and transformers take seconds, in which the end of stdin must be heard.
    from sidestep.engines.server import EngineServer

    return EngineServer(EngineSettings(**call["settings"]))


def _describe(error: Exception) -> dict[str, str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "\n".join(lines[-TRACEBACK_LINES:]),
    }


if __name__ == "__main__":
    main()
