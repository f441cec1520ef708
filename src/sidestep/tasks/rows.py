"""JSONL files to examples. Every fault is a UsageError of one line: key, file:line, value, fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sidestep.errors import UsageError
from sidestep.tasks.split import Split, split_rows
from sidestep.types import Example

PROMPT_FIELDS = ("prompt", "messages")


Fields = Callable[[tuple[str, str], dict[str, Any]], Example]
"""(key, place) and a row to an Example; raises UsageError naming both."""


def load_split(
    path: str | None, eval_path: str | None, eval_size: int | None, example_of: Fields
) -> Split:
    """Rows of one or two JSONL files. Held out is all of `eval_path`, or without it `split_rows`.

    Raises UsageError if either file is missing or faulty, or if no row is left to train on.
    """
    if path is None:
        raise UsageError("task.path is not set: give the JSONL file with the rows to train on")
    rows = load_rows("task.path", path, example_of)
    if eval_path is None:
        return split_rows(rows, eval_size, path)
    try:
        same = Path(eval_path).expanduser().samefile(Path(path).expanduser())
    except OSError:
        same = False  # not there: said below
    if same:
        raise UsageError(
            f"task.eval_path {eval_path!r}: the same file as task.path; leave it away, "
            "and task.eval_size rows are held out"
        )
    return Split(rows, load_rows("task.eval_path", eval_path, example_of))


def load_rows(key: str, path: str, example_of: Fields) -> tuple[Example, ...]:
    """All rows of a JSONL file. Blank lines, a byte order mark and CRLF do not matter."""
    file = Path(path).expanduser()
    try:
        if file.is_dir():
            raise UsageError(f"{key} {path!r}: is a folder; give a JSONL file in it")
        if not file.is_file():
            raise UsageError(f"{key} {path!r}: no such file; {_nearest_file(file)}")
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{key} {path!r}: cannot be read ({error.strerror}); give a file that can"
        ) from error
    rows = tuple(example_of(where, row) for where, row in _objects(key, path, data))
    if not rows:
        raise UsageError(f"{key} {path!r}: has no rows; write one JSON object a line")
    return rows


def _objects(key: str, path: str, data: bytes) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """((key, file:line), row) of every line that is not blank."""
    # Split bytes, not text: str.splitlines would also cut at U+2028, which JSON allows in strings.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        where = key, f"{path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise fault(where, f"not UTF-8 ({error.reason})", "save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            problem = f"not JSON ({error.msg}, column {error.colno}): {shorten(line.decode())}"
            raise fault(where, problem, "write one JSON object a line") from error
        except RecursionError as error:
            raise fault(where, "nested too deeply", "write one JSON object a line") from error
        except ValueError as error:  # a whole number of more digits than Python reads
            raise fault(where, f"not readable ({error})", "write long numbers as text") from error
        if _has_surrogate(line):
            _check_text(where, row)
        if not isinstance(row, dict):
            raise fault(where, f"{kind_of(row)}, not an object", "write one JSON object a line")
        yield where, row


def _has_surrogate(line: bytes) -> bool:
    """Whether a line may hold half a character: only an escape can, the bytes are UTF-8."""
    return b"\\ud" in line or b"\\uD" in line


def _check_text(where: tuple[str, str], value: Any) -> None:
    """Raises UsageError for text that is not text: tokenizers cannot encode half a character."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            problem = f"has half a character ({half} without its other half)"
            raise fault(where, problem, "write the whole character, or remove it") from error
    elif isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_text(where, item)


def plain_fields(*, needs_answer: bool) -> Fields:
    """Rows with `prompt` (text, or chat messages) or `messages`; with `needs_answer` also `answer`,
    text or a whole number. All other fields become columns.
    """
    return partial(example_of_row, needs_answer=needs_answer)


def example_of_row(where: tuple[str, str], row: dict[str, Any], *, needs_answer: bool) -> Example:
    """A row in the form of `plain_fields` as an Example."""
    given = [name for name in PROMPT_FIELDS if name in row]
    if not given:
        raise lacks(where, row, PROMPT_FIELDS)
    if len(given) > 1:
        raise fault(where, "has both `prompt` and `messages`", "keep one of them")
    prompt = row[given[0]]
    if given[0] == "messages" or isinstance(prompt, list):
        _check_messages(where, given[0], prompt)
    elif not isinstance(prompt, str):
        raise fault(where, f"`prompt` is {kind_of(prompt)}", "write text or chat messages")
    columns = {name: value for name, value in row.items() if name not in PROMPT_FIELDS}
    if needs_answer:
        columns["answer"] = answer_of(where, row)
    return Example(prompt, columns, where[1])


def answer_of(where: tuple[str, str], row: Mapping[str, Any]) -> str:
    if "answer" not in row:
        raise lacks(where, row, ("answer",))
    answer = row["answer"]
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, str):
        # A float has no one text: 1.50 and 1.5 are the same number.
        raise fault(where, f"`answer` is {kind_of(answer)}", 'write text, "answer": "..."')
    if not answer.strip():
        raise fault(where, "`answer` is empty", "write the right answer")
    return answer


def _check_messages(where: tuple[str, str], name: str, messages: object) -> None:
    form = 'write [{"role": "user", "content": "..."}]'
    if not isinstance(messages, list):
        raise fault(where, f"`{name}` is {kind_of(messages)}, not a list of messages", form)
    if not messages:
        raise fault(where, f"`{name}` is empty", form)
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise fault(where, f"`{name}[{position}]` is {kind_of(message)}", form)
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                problem = f"`{name}[{position}].{field}` is {kind_of(message.get(field))}, not text"
                raise fault(where, problem, form)
    if messages[-1]["role"] == "assistant":
        raise fault(
            where,
            f"the last message of `{name}` is the assistant's, which the model is to write",
            "end with the user's and put the right answer into `answer`",
        )


def shorten(text: str, limit: int = 60) -> str:
    """`text` in quotes on one line, cut after `limit` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "...")


def fault(where: tuple[str, str], problem: str, fix: str) -> UsageError:
    """The error for a faulty row. where: key and place."""
    key, place = where
    return UsageError(f"{key}: {place}: {problem}; {fix}")


def lacks(
    where: tuple[str, str], row: Mapping[str, Any], names: Sequence[str], fix: str | None = None
) -> UsageError:
    """The error for a row without any of `names`; the fix is the nearest field there is."""
    wanted = " or ".join(f"`{name}`" for name in names)
    has = ", ".join(f"`{name}`" for name in row) or "no fields"
    if fix is None:
        near = [match for name in names for match in difflib.get_close_matches(name, row, n=1)]
        fix = f"rename `{near[0]}`?" if near else "add it, or remove the line"
    return fault(where, f"lacks {wanted} (it has {has})", fix)


def kind_of(value: object) -> str:
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
