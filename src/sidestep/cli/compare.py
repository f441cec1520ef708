"""`sidestep compare`: several runs as a table on the terminal and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestep.diagnostics.compare import Comparison, compare
from sidestep.diagnostics.compare_page import HEADERS, caption, table_rows, write_comparison
from sidestep.errors import UsageError

# Nobody folds lines for a file or a pipe.
_UNFOLDED = 240


def run_comparison(run_dirs: Sequence[Path], page: Path) -> None:
    """Print the table of the runs and write the page. Raises UsageError before anything is written.

    page: an .html file, written anew.
    """
    if page.suffix != ".html":
        raise UsageError(f"--out {page}: must end in .html: it is a page of its own")
    if not page.parent.is_dir():
        raise UsageError(f"--out {page}: no such folder {page.parent}: make it")
    comparison = compare(run_dirs)
    print_comparison(comparison)
    write_comparison(page, comparison)
    print(f"page: {page}")


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """One column a setting on a terminal of any width: lines are what is measured."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNFOLDED, file=console.file)
    rows = table_rows(comparison)
    table = Table(show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for row in rows:
        table.add_column(Text(row[0]), justify="right", overflow="fold")
    for number, header in enumerate(HEADERS[1:], start=1):
        table.add_row(header, *(Text(row[number]) for row in rows))
    console.print(table)
    console.print(Text(caption(comparison)))
