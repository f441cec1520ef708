"""The stability map on a terminal: one table for each lag, with theory's edge as a line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from sidestep.control.simulate import CellSummary, Setting, stability_edge

# Nobody folds lines for a file or a pipe; wide enough for every control.
_UNFOLDED = 160
_LEGEND = (
    "In each cell: loss, mean cosine of consecutive gradients, skipped steps if any. "
    "*: best learning rate of that control at that lag."
)


def print_tables(summaries: Sequence[CellSummary], setting: Setting) -> None:
    """Print the map to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_UNFOLDED)
    for lag in sorted({cell.lag for cell in summaries}):
        console.print(_title(lag, setting), style="bold")
        console.print(_table([cell for cell in summaries if cell.lag == lag], lag, setting))
        console.print()
    console.print(_LEGEND)


def edge_of(lag: int, setting: Setting) -> float | None:
    """Theory's edge for a lag of the map; None where there is none."""
    return stability_edge(
        lag,
        optimizer=setting.optimizer,
        momentum=setting.momentum,
        lag_kind=setting.lag_kind,
    )


def _table(cells: Sequence[CellSummary], lag: int, setting: Setting) -> Table:
    controls = list(dict.fromkeys(cell.control for cell in cells))
    edge = edge_of(lag, setting)
    # Without edge and left padding all six controls fit into 80 columns: cells then fold between
    # their numbers and no number is cut.
    table = Table(show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("lr", justify="right", no_wrap=True)
    for control in controls:
        table.add_column(control, justify="right", overflow="fold")
    best = {id(cell) for cell in _best(cells)}
    at = {(cell.lr, cell.control): cell for cell in cells}
    edge_row: list[RenderableType] = [Rule(style="yellow") for _ in controls]
    is_drawn = edge is None
    for lr in sorted({cell.lr for cell in cells}):
        if not is_drawn and edge is not None and lr >= edge:
            table.add_row(Text(f"{edge:.4g}", style="yellow"), *edge_row)
            is_drawn = True
        row = [_cell(at[lr, control], id(at[lr, control]) in best) for control in controls]
        table.add_row(f"{lr:g}", *row)
    if not is_drawn and edge is not None:
        table.add_row(Text(f"{edge:.4g}", style="yellow"), *edge_row)
    return table


def _title(lag: int, setting: Setting) -> str:
    edge = edge_of(lag, setting)
    kind = "" if setting.lag_kind == "fixed" else f" on average, {setting.lag_kind}"
    theory = "theory knows no edge" if edge is None else f"unstable from lr {edge:.4g} (theory)"
    return f"lag {lag}{kind}; without control: {theory}"


def _best(cells: Iterable[CellSummary]) -> Iterable[CellSummary]:
    """For each control, the cell with the least loss."""
    best: dict[str, tuple[float, CellSummary]] = {}
    for cell in cells:
        if cell.loss is not None and (
            cell.control not in best or cell.loss < best[cell.control][0]
        ):
            best[cell.control] = (cell.loss, cell)
    return [cell for _, cell in best.values()]


def _cell(cell: CellSummary, is_best: bool) -> Text:
    if cell.loss is not None:
        mark, style = ("*", "bold green") if is_best else ("", "")
        text = Text(f"{mark}{cell.loss:.3g}", style=style)
    elif cell.num_seeds == 1:
        text = Text("diverged", style="red")
    else:
        text = Text(f"{cell.num_diverged}/{cell.num_seeds} diverged", style="red")
    if cell.cosine is not None:
        text.append(f" {cell.cosine:+.2f}", style="not bold default")
    if cell.skipped:
        text.append(f" {cell.skipped:.0f}", style="not bold default")
    return text
