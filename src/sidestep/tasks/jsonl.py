"""Own rows with right answers: exact match, or a regular expression that finds the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sidestep.errors import UsageError
from sidestep.tasks.rows import load_split
from sidestep.types import Example


class JsonlTask:
    """Rows with `answer` from a JSONL file.

    Reward 1.0 if the answer of the completion equals that of the row, else 0.0. The completion's
    answer is all of it, or with `answer_regex` the last match: its first group, or the whole match
    if the expression has no group. Spaces around both answers do not matter.

    Raises UsageError for faulty files, an expression that does not compile, or too few rows.
    """

    def __init__(
        self, path: str | None, eval_path: str | None, eval_size: int, answer_regex: str | None
    ) -> None:
        self._pattern = None if answer_regex is None else _compiled(answer_regex)
        self.train: Sequence[Example]
        self.held_out: Sequence[Example]
        self.train, self.held_out = load_split(path, eval_path, eval_size, needs_answer=True)

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [
            float(self._answer(completion) == example.columns["answer"].strip())
            for example, completion in zip(examples, completions, strict=True)
        ]

    def _answer(self, completion: str) -> str | None:
        if self._pattern is None:
            return completion.strip()
        last: re.Match[str] | None = None
        for last in self._pattern.finditer(completion):  # noqa: B007
            pass
        if last is None:
            return None
        found: str | None = last[1] if self._pattern.groups else last[0]
        return None if found is None else found.strip()


def _compiled(answer_regex: str) -> re.Pattern[str]:
    try:
        return re.compile(answer_regex)
    except re.error as error:
        at = "" if error.pos is None else f" at character {error.pos + 1}"
        raise UsageError(
            f"task.answer_regex {answer_regex!r}: not a regular expression ({error.msg}{at}); "
            "in TOML write it in single quotes, so that backslashes stay"
        ) from error
