"""The stability map as one HTML file that loads nothing: heat maps of loss and cosine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sidestep.cli.simulate_table import edge_of
from sidestep.control.simulate import CellSummary, Setting
from sidestep.diagnostics import page
from sidestep.diagnostics.charting import finish

_COLUMNS = 3
_DIVERGED_COLOUR, _EDGE_COLOUR = "#868e96", "#e03131"
_LOSS_COLOURS, _COSINE_COLOURS = "Viridis_r", "RdBu_r"
_ROW_PIXELS, _LEAST_PIXELS = 44, 150
_COLOUR_BAR = {"thickness": 12, "outlinewidth": 0, "len": 0.9}


def write_picture(path: Path, summaries: Sequence[CellSummary], setting: Setting) -> None:
    """Write the page. The best loss is the light end of the colours, the loss at the start the
    dark one: whatever ends there has learned nothing.
    """
    title = "Stability map of stale gradient descent"
    body = (
        f"<h1>{title}</h1>\n",
        page.paragraph(_settings(summaries, setting), "path"),
        page.chart(
            "loss",
            "Loss",
            "Mean loss of the last 200 steps. Grey: diverged. "
            f"Red line: {_edge_caption(summaries, setting)}.",
            make_figure(summaries, setting, "loss"),
        ),
        page.chart(
            "cosine",
            "Cosine of consecutive gradients",
            "Mean over the run, or over its last 50 steps if it diverged. High: the updates of "
            "many steps add up.",
            make_figure(summaries, setting, "cosine"),
        ),
    )
    path.write_text(page.document(title, body), encoding="utf-8")


def _settings(summaries: Sequence[CellSummary], setting: Setting) -> str:
    momentum = f" {setting.momentum:g}" if setting.optimizer == "momentum" else ""
    seeds = summaries[0].num_seeds
    return (
        f"optimizer {setting.optimizer}{momentum}, {setting.lag_kind} lags, {setting.steps} steps, "
        f"{setting.dim} dimensions, noise {setting.noise:g}, {seeds} seed{'s' if seeds > 1 else ''}"
    )


def _edge_caption(summaries: Sequence[CellSummary], setting: Setting) -> str:
    edges = {lag: edge_of(lag, setting) for lag in sorted({cell.lag for cell in summaries})}
    known = ", ".join(f"{edge:.4g} at lag {lag}" for lag, edge in edges.items() if edge is not None)
    if not known:
        return "none, theory knows no edge here"
    return f"theory's edge, right of which descent without control is unstable ({known})"


def make_figure(summaries: Sequence[CellSummary], setting: Setting, quantity: str) -> go.Figure:
    controls = list(dict.fromkeys(cell.control for cell in summaries))
    lags = sorted({cell.lag for cell in summaries})
    lrs = sorted({cell.lr for cell in summaries})
    num_rows = -(-len(controls) // _COLUMNS)
    figure = make_subplots(
        rows=num_rows,
        cols=min(_COLUMNS, len(controls)),
        subplot_titles=controls,
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.03,
        vertical_spacing=0.16,
    )
    at = {(cell.lag, cell.lr, cell.control): cell for cell in summaries}
    for number, control in enumerate(controls):
        where = {"row": number // _COLUMNS + 1, "col": number % _COLUMNS + 1}
        grid = [[at[lag, lr, control] for lr in lrs] for lag in lags]
        figure.add_trace(_heat_map(grid, quantity), **where)
        if quantity == "loss":
            figure.add_trace(_diverged(grid), **where)
        figure.add_trace(_edge(lags, lrs, setting), **where)
        if where["col"] == 1:
            figure.update_yaxes(title_text="lag", **where)
        if number + _COLUMNS >= len(controls):  # nothing below it
            figure.update_xaxes(title_text="learning rate", showticklabels=True, **where)
    figure.update_xaxes(tickvals=list(range(len(lrs))), ticktext=[f"{lr:g}" for lr in lrs])
    figure.update_yaxes(tickvals=list(range(len(lags))), ticktext=[str(lag) for lag in lags])
    figure.update_xaxes(range=[-0.5, len(lrs) - 0.5])
    figure.update_yaxes(range=[-0.5, len(lags) - 0.5])
    figure.update_layout(coloraxis=_colours(summaries, setting, quantity), showlegend=False)
    height = num_rows * (max(_LEAST_PIXELS, _ROW_PIXELS * len(lags)) + 80)
    return finish(figure, height=height).update_layout(hovermode="closest")


def _colours(
    summaries: Sequence[CellSummary], setting: Setting, quantity: str
) -> dict[str, object]:
    if quantity == "cosine":
        return {"colorscale": _COSINE_COLOURS, "cmin": -1, "cmax": 1, "colorbar": _COLOUR_BAR}
    low = min((_height(cell) for cell in summaries if cell.loss is not None), default=-1.0)
    high = math.log10(setting.start_loss)
    ticks = list(range(math.ceil(low), math.floor(high) + 1))
    bar = _COLOUR_BAR | {"tickvals": ticks, "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    return {
        "colorscale": _LOSS_COLOURS,
        "cmin": min(low, high - 1.0),
        "cmax": high,
        "colorbar": bar,
    }


def _height(cell: CellSummary) -> float:
    """The loss as the colours show it; a loss of exactly 0 has no logarithm."""
    return math.log10(max(cell.loss or 0.0, 1e-12))


def _heat_map(grid: Sequence[Sequence[CellSummary]], quantity: str) -> go.Heatmap:
    """Cells with a value, by their place in the grid; others stay empty."""
    if quantity == "cosine":
        heights = [[cell.cosine for cell in row] for row in grid]
        texts = [["" if c.cosine is None else f"{c.cosine:+.2f}" for c in row] for row in grid]
    else:
        heights = [[None if c.loss is None else _height(c) for c in row] for row in grid]
        texts = [["" if c.loss is None else f"{c.loss:.1g}" for c in row] for row in grid]
    return go.Heatmap(
        z=heights,
        text=texts,
        texttemplate="%{text}",
        textfont={"size": 10},
        customdata=[[_told(cell) for cell in row] for row in grid],
        hovertemplate="%{customdata}<extra></extra>",
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
    )


def _diverged(grid: Sequence[Sequence[CellSummary]]) -> go.Heatmap:
    return go.Heatmap(
        z=[[1 if cell.loss is None else None for cell in row] for row in grid],
        colorscale=[[0, _DIVERGED_COLOUR], [1, _DIVERGED_COLOUR]],
        showscale=False,
        customdata=[[_told(cell) for cell in row] for row in grid],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        xgap=1,
        ygap=1,
    )


def _told(cell: CellSummary) -> str:
    diverged = f"{cell.num_diverged} of {cell.num_seeds} diverged"
    lines = [
        f"{cell.control}, lag {cell.lag}, lr {cell.lr:g}",
        diverged if cell.loss is None else f"loss {cell.loss:.3g}",
        "no cosine" if cell.cosine is None else f"cosine {cell.cosine:+.3f}",
        f"{cell.skipped:g} steps skipped",
    ]
    return "<br>".join(lines)


def _edge(lags: Sequence[int], lrs: Sequence[float], setting: Setting) -> go.Scatter:
    """A staircase between the columns: right of it are the learning rates from the edge on."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row, lag in enumerate(lags):
        edge = edge_of(lag, setting)
        place = None if edge is None else bisect_left(lrs, edge) - 0.5
        x += [place, place]
        y += [row - 0.5, row + 0.5]
    return go.Scatter(
        x=x, y=y, mode="lines", line={"color": _EDGE_COLOUR, "width": 3}, hoverinfo="skip"
    )
