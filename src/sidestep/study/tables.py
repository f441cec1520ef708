"""The tables of a study as CSV: a row a cell, and a row a method at a lag."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of equal columns; whole or not at all. Numbers are written so that they read back
    bit by bit; what does not exist is empty.
    """
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if rows:
            columns = list(rows[0])
            writer.writerow(columns)
            writer.writerows([_text(row[column]) for column in columns] for row in rows)
    os.replace(beside, path)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
