"""`sidestep study`: run a grid to its end, or go on with one, then its tables and report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from sidestep.errors import UsageError
from sidestep.run_folder import only_writer
from sidestep.study.declaration import Study, load_study
from sidestep.study.grid import Cell, check_configs, make_cells
from sidestep.study.outcome import is_finished, read_result
from sidestep.study.pool import Show, cell_folder, run_cells
from sidestep.study.report import write_study
from sidestep.threads import available_cores

DECLARATION_FILE = "study.toml"


def run_study(file: Path, out: Path | None, workers: int | None, report_only: bool) -> None:
    """Run what is not finished, then write the tables and the report; also after Ctrl-C or an
    error, of what is finished by then.

    Raises UsageError before anything runs for a declaration that cannot be run.
    """
    study = load_study(file)
    cells = make_cells(study)
    check_configs(cells, study)
    out = out or Path("runs") / f"study-{study.name}"
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: must be 1 or more")
    with only_writer(out):
        text = file.read_text(encoding="utf-8")
        (out / DECLARATION_FILE).write_text(text, encoding="utf-8")
        try:
            if not report_only:
                with _progress(study.name) as show:
                    run_cells(
                        study, cells, out, num_workers=workers or available_cores(), show=show
                    )
        finally:
            _report(study, cells, out)


def _report(study: Study, cells: list[Cell], out: Path) -> None:
    folders = {cell: cell_folder(out, cell) for cell in cells}
    results = {c: read_result(c, folder) for c, folder in folders.items() if is_finished(folder)}
    if not results:
        print("no cell is finished yet")
        return
    written = write_study(study, cells, results, out)
    print(f"{len(results)} of {len(cells)} cells finished")
    for path in (written.table, written.merits, written.report):
        print(path)


@contextmanager
def _progress(name: str) -> Iterator[Show]:
    """A bar on a terminal, else a line a cell."""
    console = Console(highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda finished, total, left, last: console.print(
            Text(f"{finished}/{total} {_left(left)} {last}".rstrip()), soft_wrap=True
        )
        return
    columns = (
        TextColumn(f"study {name}"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("", total=None, left=_left(None))

        def show(finished: int, total: int, seconds_left: float | None, last: str) -> None:
            bar.update(task, completed=finished, total=total, left=_left(seconds_left))
            if last:
                bar.console.print(Text(last), soft_wrap=True)

        yield show


def _left(seconds: float | None) -> str:
    return "-:--:-- left" if seconds is None else f"{timedelta(seconds=round(seconds))} left"
