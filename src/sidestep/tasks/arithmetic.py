"""Two-digit addition, the task of the packaged model: `47+38=`, answered by `85`."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.errors import UsageError
from sidestep.models.addition import NUM_PAIRS, addition_answer, addition_prompt, operand_pairs
from sidestep.types import Example


class ArithmeticTask:
    """All 10,000 pairs of 0..99; the first `eval_size` of their fixed order are held out.

    Up to 1,000 held-out pairs are also new to the packaged model. Reward 1.0 for the right sum
    (spaces around it do not matter), else 0.0. Raises UsageError if no pair is left to train on.
    """

    def __init__(self, eval_size: int) -> None:
        if eval_size >= NUM_PAIRS:
            raise UsageError(
                f"task.eval_size {eval_size}: leaves nothing to train on, "
                f"arithmetic has {NUM_PAIRS} pairs; set it to {NUM_PAIRS - 1} or less"
            )
        examples = [_example(left, right) for left, right in operand_pairs()]
        self.held_out: Sequence[Example] = tuple(examples[:eval_size])
        self.train: Sequence[Example] = tuple(examples[eval_size:])

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(completion.strip() == example.columns["answer"])
            for example, completion in zip(examples, completions, strict=True)
        ]


def _example(left: int, right: int) -> Example:
    prompt = addition_prompt(left, right)
    return Example(prompt, {"answer": addition_answer(left, right)}, f"arithmetic {prompt}")
