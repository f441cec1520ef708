"""JSONL files to examples. Every fault is a UsageError of one line: key, file:line, value, fix."""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sidestep.errors import UsageError
from sidestep.types import Example

HELD_OUT_SEED = 0
"""Not the seed of the run: runs with other seeds are compared on the same held-out rows."""

PROMPT_FIELDS = ("prompt", "messages")


def load_split(
    path: str | None, eval_path: str | None, eval_size: int, *, needs_answer: bool
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(rows to train on, rows held out), each in the order of the file.

    Held out is all of `eval_path`, or without it a fixed random choice of `eval_size` rows.
    Raises UsageError if either file is missing or faulty, or if no row is left to train on.
    """
    if path is None:
        raise UsageError("task.path is not set: give the JSONL file with the rows to train on")
    rows = load_rows("task.path", path, needs_answer=needs_answer)
    if eval_path is not None:
        if Path(eval_path).exists() and Path(eval_path).samefile(path):
            raise UsageError(
                f"task.eval_path {eval_path!r}: the same file as task.path; leave it away, "
                "and task.eval_size rows are held out"
            )
        return rows, load_rows("task.eval_path", eval_path, needs_answer=needs_answer)
    if eval_size >= len(rows):
        raise UsageError(
            f"task.eval_size {eval_size}: leaves nothing to train on, {path} has {len(rows)} rows; "
            f"set it to {len(rows) - 1} or less, or give task.eval_path"
        )
    held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(rows)), eval_size))
    return (
        tuple(row for index, row in enumerate(rows) if index not in held_out),
        tuple(row for index, row in enumerate(rows) if index in held_out),
    )


def load_rows(key: str, path: str, *, needs_answer: bool) -> tuple[Example, ...]:
    """All rows of a JSONL file. Blank lines, a byte order mark and CRLF do not matter.

    A row has `prompt` (text, or chat messages) or `messages`; with `needs_answer` also `answer`,
    text or a whole number. All other fields become columns.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise UsageError(f"{key} {path!r}: is a folder; give a JSONL file in it")
    if not file.is_file():
        raise UsageError(f"{key} {path!r}: no such file; {_nearest_file(file)}")
    rows = tuple(
        _example(where, row, needs_answer=needs_answer) for where, row in _objects(key, path, file)
    )
    if not rows:
        raise UsageError(f"{key} {path!r}: has no rows; write one JSON object a line")
    return rows


def _objects(key: str, path: str, file: Path) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """((key, file:line), row) of every line that is not blank."""
    # Split bytes, not text: str.splitlines would also cut at U+2028, which JSON allows in strings.
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = key, f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _fault(where, f"not UTF-8 ({error.reason})", "save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            problem = f"not JSON ({error.msg}, column {error.colno}): {shorten(line.decode())}"
            raise _fault(where, problem, "write one JSON object a line") from error
        if not isinstance(row, dict):
            raise _fault(where, f"{_kind(row)}, not an object", "write one JSON object a line")
        yield where, row


def _example(where: tuple[str, str], row: dict[str, Any], *, needs_answer: bool) -> Example:
    given = [name for name in PROMPT_FIELDS if name in row]
    if not given:
        raise _lacks(where, row, PROMPT_FIELDS)
    if len(given) > 1:
        raise _fault(where, "has both `prompt` and `messages`", "keep one of them")
    prompt = row[given[0]]
    if given[0] == "messages" or isinstance(prompt, list):
        _check_messages(where, given[0], prompt)
    elif not isinstance(prompt, str):
        raise _fault(where, f"`prompt` is {_kind(prompt)}", "write text or chat messages")
    columns = {name: value for name, value in row.items() if name not in PROMPT_FIELDS}
    if needs_answer:
        columns["answer"] = _answer(where, row)
    return Example(prompt, columns, where[1])


def _answer(where: tuple[str, str], row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise _lacks(where, row, ("answer",))
    answer = row["answer"]
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        # A float has no one text: 1.50 and 1.5 are the same number.
        raise _fault(where, f"`answer` is {_kind(answer)}", 'write text, "answer": "..."')
    if not answer.strip():
        raise _fault(where, "`answer` is empty", "write the right answer")
    return answer


def _check_messages(where: tuple[str, str], name: str, messages: object) -> None:
    form = 'write [{"role": "user", "content": "..."}]'
    if not isinstance(messages, list):
        raise _fault(where, f"`{name}` is {_kind(messages)}, not a list of messages", form)
    if not messages:
        raise _fault(where, f"`{name}` is empty", form)
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _fault(where, f"`{name}[{position}]` is {_kind(message)}", form)
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                problem = f"`{name}[{position}].{field}` is {_kind(message.get(field))}, not text"
                raise _fault(where, problem, form)
    if messages[-1]["role"] == "assistant":
        raise _fault(
            where,
            f"the last message of `{name}` is the assistant's, which the model is to write",
            "end with the user's and put the right answer into `answer`",
        )


def shorten(text: str, limit: int = 60) -> str:
    """`text` in quotes on one line, cut after `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def _fault(where: tuple[str, str], problem: str, fix: str) -> UsageError:
    key, place = where
    return UsageError(f"{key}: {place}: {problem}; {fix}")


def _lacks(where: tuple[str, str], row: Mapping[str, Any], names: Sequence[str]) -> UsageError:
    wanted = " or ".join(f"`{name}`" for name in names)
    has = ", ".join(f"`{name}`" for name in row) or "no fields"
    near = [match for name in names for match in difflib.get_close_matches(name, row, n=1)]
    fix = f"rename `{near[0]}`?" if near else "add it, or remove the line"
    return _fault(where, f"lacks {wanted} (it has {has})", fix)


def _kind(value: object) -> str:
    """A JSON value with its type, for people: `the number 12`."""
    if value is None:
        return "missing or null"
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {shorten(value)}"
    return "a list" if isinstance(value, list) else "an object"


def _nearest_file(file: Path) -> str:
    names = [child.name for child in file.parent.iterdir()] if file.parent.is_dir() else []
    near = difflib.get_close_matches(file.name, names, n=1)
    return f"did you mean {str(file.parent / near[0])!r}?" if near else "give a JSONL file"
