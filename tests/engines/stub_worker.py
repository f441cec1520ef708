"""A process that misbehaves as an engine process could, without a model. The mode is its argument.

Unless the mode concerns the start, it answers `start` and misbehaves at the call after that.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from sidestep.engines.frames import encode_frame, read_frame


def say(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def linger(call: dict) -> None:
    while True:
        time.sleep(0.05)


def never_ready() -> None:
    print("still loading", file=sys.stderr, flush=True)
    linger({})


def cannot_start(start: dict) -> None:
    error = {"type": "UsageError", "message": "no such folder", "traceback": "Traceback ..."}
    say(encode_frame({"id": start["id"], "error": error}))
    linger(start)


def exit_with_words(call: dict) -> None:
    for line in range(100):
        print(f"line {line} of stderr", file=sys.stderr)
    sys.exit(3)


def print_on_stdout(call: dict) -> None:
    say(b"Downloading weights: 100%\n")
    linger(call)


def half_a_frame(call: dict) -> None:
    say(encode_frame({"id": call["id"], "version": 0})[:-4])
    sys.exit(0)


def no_version(call: dict) -> None:
    say(encode_frame({"id": call["id"]}))
    linger(call)


def no_completions(call: dict) -> None:
    empty = {"lengths": [], "token_ids": [], "logprobs": [], "stopped": [], "texts": []}
    say(encode_frame({"id": call["id"], "version": 0, "generate_s": 0, "load_s": 0, **empty}))
    linger(call)


MODES = {
    "exit": exit_with_words,
    "abort": lambda call: os.abort(),
    "prints": print_on_stdout,
    "half a frame": half_a_frame,
    "no version": no_version,
    "no completions": no_completions,
    "stubborn": linger,
}


def main(mode: str) -> None:
    if mode == "never ready":
        never_ready()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = read_frame(sys.stdin.buffer)
    if mode == "cannot start":
        cannot_start(start)
    say(encode_frame({"id": start["id"], "version": 0}))
    MODES[mode](read_frame(sys.stdin.buffer))


main(sys.argv[1])
