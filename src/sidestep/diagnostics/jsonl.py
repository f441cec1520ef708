"""Files of one JSON object a line, written by a process that may be killed at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sidestep.errors import UsageError


def to_line(row: Mapping[str, Any]) -> str:
    """One line with its newline. Raises ValueError for NaN and infinity: JSON has neither."""
    return json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of the file. A last line that was not written to its end is left out: its writer was
    killed.

    Raises UsageError with file and line for any other line that is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    # Split on "\n" alone and in bytes: texts may hold other line separators, and the end may lie
    # inside a character.
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise UsageError(f"{path}:{number} is not JSON: mend or delete that line") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number} is not a JSON object: mend or delete that line")
        rows.append(row)
    return rows


def replace_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the file anew, whole or not at all."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(to_line(row) for row in rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
