"""Metric rows in step order, each complete: the row of a step that is evaluated waits for its own
evaluation. The first row may have two: of the weights before it and after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


class PendingRows:
    """Woken by `evaluated`. Rows behind one that waits wait too, so a file of rows is always in
    step order.
    """

    def __init__(self, write: Callable[[Mapping[str, Any]], None]) -> None:
        self._write = write
        self._rows: deque[tuple[Row, int]] = deque()
        self._results: dict[int, list[Row]] = {}
        self._changed = asyncio.Event()

    def add(self, row: Row, *, evaluations: int) -> None:
        """A row that waits for so many results of `evaluated`, which may have come before it."""
        self._rows.append((row, evaluations))
        self._flush()

    def evaluated(self, step: int, result: Row) -> None:
        self._results.setdefault(step, []).append(result)
        self._flush()

    async def written(self, step: int) -> None:
        """Wait until no row of `step` or earlier is pending."""
        while self._rows and self._rows[0][0]["step"] <= step:
            self._changed.clear()
            await self._changed.wait()

    def abandon(self) -> None:
        """Write what is pending with the evaluations there are: the run is ending early."""
        while self._rows:
            self._write_first()

    def _flush(self) -> None:
        while self._rows:
            row, evaluations = self._rows[0]
            if len(self._results.get(row["step"], ())) < evaluations:
                break
            self._write_first()
        self._changed.set()

    def _write_first(self) -> None:
        row, _ = self._rows.popleft()
        for result in self._results.pop(row["step"], []):
            row = row | result
        self._write(row)
