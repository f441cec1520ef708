"""Two-digit addition: its pairs, their text, and which of them the packaged model never saw.

The one home of these facts: `make_packaged` teaches the model, `tasks.arithmetic` asks it.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256

NUM_PAIRS = 10_000

NUM_UNSEEN_PAIRS = 1_000
"""So many of `operand_pairs()`, the first, were never shown to the packaged model."""


def addition_prompt(left: int, right: int) -> str:
    """`47+38=`. Both operands always have two digits, so that all prompts have one length."""
    return f"{left:02d}+{right:02d}="


def addition_answer(left: int, right: int) -> str:
    """The sum without leading zeros: `85`, `7`, `198`."""
    return str(left + right)


@cache
def operand_pairs() -> tuple[tuple[int, int], ...]:
    """All pairs of 0..99 in a fixed order that mixes easy and hard sums.

    The order is that of a hash, not of a random generator: it must be the same in every version of
    Python, because the packaged model was taught on a part of it.
    """
    pairs = [(left, right) for left in range(100) for right in range(100)]
    return tuple(sorted(pairs, key=lambda pair: sha256(addition_prompt(*pair).encode()).digest()))
