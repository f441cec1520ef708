"""Metric rows in step order, each complete: the row of a step that is evaluated waits for its own
evaluation.
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
        self._rows: deque[tuple[Row, bool]] = deque()
        self._results: dict[int, Row] = {}
        self._changed = asyncio.Event()

    def add(self, row: Row, *, needs_evaluation: bool) -> None:
        self._rows.append((row, needs_evaluation))
        self._flush()

    def evaluated(self, step: int, result: Row) -> None:
        self._results[step] = result
        self._flush()

    async def written(self, step: int) -> None:
        """Wait until no row of `step` or earlier is pending."""
        while self._rows and self._rows[0][0]["step"] <= step:
            self._changed.clear()
            await self._changed.wait()

    def abandon(self) -> None:
        """Write what is pending without its evaluation: the run is ending early."""
        while self._rows:
            self._write(self._rows.popleft()[0])

    def _flush(self) -> None:
        while self._rows:
            row, needs_evaluation = self._rows[0]
            if needs_evaluation and row["step"] not in self._results:
                break
            self._rows.popleft()
            self._write(row | self._results.pop(row["step"], {}))
        self._changed.set()
