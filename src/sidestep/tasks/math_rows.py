"""Rows of mathematics in the forms they are published in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sidestep.tasks.rows import (
    PROMPT_FIELDS,
    answer_of,
    example_of_row,
    fault,
    kind_of,
    lacks,
)
from sidestep.types import Example

QUESTION_FIELDS = ("problem", "question")
"""Besides `prompt` and `messages`; MATH and AIME have the first, GSM8K the second."""

THOUSANDS = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")

MARK = "####"  # GSM8K: the answer stands behind it, after the way to it


def math_fields(where: tuple[str, str], row: dict[str, Any]) -> Example:
    """A row of MATH, MATH500, AIME, GSM8K or our own form as an Example with `answer`.

    Question: `problem`, `question`, `prompt` or `messages`. Answer: `answer` (text or a number;
    behind the last `####` if it has one), or without it the last \\boxed{...} of `solution`. Names
    may begin with a capital, as in AIME's files. All other fields become columns.
    """
    row = _lower_names(row)
    questions = [name for name in QUESTION_FIELDS if name in row]
    if questions and not any(name in row for name in PROMPT_FIELDS):
        row["prompt"] = row.pop(questions[0])
    elif not any(name in row for name in PROMPT_FIELDS):
        raise lacks(where, row, (*QUESTION_FIELDS, *PROMPT_FIELDS))
    row["answer"] = _answer(where, row)
    return example_of_row(where, row, needs_answer=True)


def _answer(where: tuple[str, str], row: Mapping[str, Any]) -> str:
    if "answer" not in row and "solution" in row:
        solution = row["solution"]
        boxed = last_boxed(solution) if isinstance(solution, str) else None
        if boxed is None:
            problem = f"lacks `answer`, and `solution` has no \\boxed{{}}: {kind_of(solution)}"
            raise fault(where, problem, "add `answer`, or remove the line")
        return boxed
    answer = row.get("answer")
    if isinstance(answer, float):
        return repr(answer)  # compared as a number, so any text of it will do
    text = answer_of(where, row)
    behind = text.rpartition(MARK)[2].strip() if MARK in text else text.strip()
    if not behind:
        raise fault(where, f"`answer` has nothing behind {MARK}", "write the right answer")
    # Commas between thousands: in LaTeX they would separate two numbers of a list.
    return behind.replace(",", "") if THOUSANDS.fullmatch(behind) else behind


def last_boxed(solution: str) -> str | None:
    """What stands in the last \\boxed{...} or \\fbox{...}, braces inside counted; None if none."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", solution)]
    if not starts:
        return None
    depth = 1
    for position in range(starts[-1], len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[position], 0)
        if depth == 0:
            return solution[starts[-1] : position].strip() or None
    return None


def _lower_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the names it is read by in small letters, where no other field has them."""
    known = {*QUESTION_FIELDS, *PROMPT_FIELDS, "answer", "solution"}
    return {
        name.lower() if name.lower() in known and name.lower() not in row else name: value
        for name, value in row.items()
    }
