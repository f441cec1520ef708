"""The process in which math-verify compares answers.

    python -m sidestep.tasks.math_worker LIMIT_S

In a process because SymPy can take for ever, and all memory, over a short formula such as
9^(9^(9^9)), deep in code that no Python timeout stops. Each line of stdin is a JSON object `gold`
(the right answer), `completion` (or null: only look whether `gold` can be read); each line of
stdout the verdict. Before each comparison an alarm is set that kills the process, whatever it is
doing and whoever still lives: the one who asks then starts another.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 * 2**30

RIGHT, WRONG = "right", "wrong"
NO_ANSWER = "no answer found"
NO_GOLD = "right answer not understood"


def main() -> None:
    limit_s = float(sys.argv[1])
    # stdout is for verdicts alone: what a library prints goes to stderr.
    verdicts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import math_verify

    logging.disable(logging.CRITICAL)  # it says at every start that its own time limit is off
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        said = verdict(math_verify, question["gold"], question["completion"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(said, file=verdicts, flush=True)


def verdict(math_verify: Any, gold: str, completion: str | None) -> str:
    """RIGHT, WRONG, NO_ANSWER or NO_GOLD. `math_verify`: the module."""
    golds = parsed_gold(math_verify, gold)
    if not golds:
        return NO_GOLD
    if completion is None:
        return RIGHT
    answers = math_verify.parse(completion, parsing_timeout=None)
    if not answers:
        return NO_ANSWER
    # The order matters: math-verify takes a set or an interval in the answer for more than in gold.
    return RIGHT if math_verify.verify(golds, answers, timeout_seconds=None) else WRONG


@lru_cache(maxsize=4096)
def parsed_gold(math_verify: Any, gold: str) -> list[Any]:
    """What math-verify makes of a right answer, which is the answer alone, in LaTeX or not."""
    bare = gold.strip()
    if "\\boxed" not in bare:
        bare = f"\\boxed{{{bare.strip('$')}}}"
    found: list[Any] = math_verify.parse(bare, parsing_timeout=None)
    return found


if __name__ == "__main__":
    main()
