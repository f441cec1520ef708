"""Which rows are held out for evaluation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sidestep.errors import UsageError
from sidestep.types import Example

HELD_OUT_SEED = 0
"""Not the seed of the run: runs with other seeds are compared on the same held-out rows."""

DEFAULT_EVAL_SIZE = 200
LARGEST_SHARE = 5  # of a small file at most a fifth is held out by default


@dataclass(frozen=True, slots=True)
class Split:
    """Rows to train on and rows held out, each in their own order, and what people should know."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    notices: tuple[str, ...] = ()


def split_rows(rows: Sequence[Example], eval_size: int | None, where: str) -> Split:
    """Hold out a fixed random choice of `eval_size` rows.

    None: DEFAULT_EVAL_SIZE, or the whole part of a fifth of the rows where that is less, which is
    noticed. where: the file, for messages. Raises UsageError if no row is left to train on.
    """
    notices: tuple[str, ...] = ()
    if eval_size is None:
        eval_size = min(DEFAULT_EVAL_SIZE, len(rows) // LARGEST_SHARE)
        if eval_size < DEFAULT_EVAL_SIZE:
            held = f"{eval_size} of the {len(rows)} rows of {where} are held out for evaluation"
            notices = (f"{held} (a fifth; set task.eval_size for another number)",)
    if eval_size >= len(rows):
        raise UsageError(
            f"task.eval_size {eval_size}: leaves nothing to train on, {where} has {len(rows)} "
            f"rows; set it to {len(rows) - 1} or less, or give rows for evaluation of their own "
            f"(task.eval_path)"
        )
    held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(rows)), eval_size))
    return Split(
        tuple(row for index, row in enumerate(rows) if index not in held_out),
        tuple(row for index, row in enumerate(rows) if index in held_out),
        notices,
    )
