"""Charts of several settings over several seeds: a mean line each, and the room between seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from sidestep.diagnostics.charting import finish, line
from sidestep.diagnostics.statistics import band, smoothing_window

# Told apart in both themes and by most eyes; after the last one they start over.
PALETTE = (
    "#4c6ef5",
    "#f08c00",
    "#0ca678",
    "#e64980",
    "#7950f2",
    "#15aabf",
    "#82c91e",
    "#868e96",
    "#c92a2a",
    "#a0522d",
)

Curve = Sequence[float | None]


def colour_of(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def faded(colour: str, opacity: float = 0.15) -> str:
    """A hex colour as rgba."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def band_traces(
    x: Sequence[float], curves: Sequence[Curve], name: str, colour: str, *, window: int = 1
) -> list[go.Scatter]:
    """The mean of the curves as a line and, of several, the room between lowest and highest."""
    found = band(curves, window)
    x = list(x)[: len(found.mean)]
    traces = []
    if len(curves) > 1:
        kept = [i for i, value in enumerate(found.low) if value is not None]
        around = [x[i] for i in kept] + [x[i] for i in reversed(kept)]
        edge = [found.high[i] for i in kept] + [found.low[i] for i in reversed(kept)]
        traces.append(
            go.Scatter(
                x=around,
                y=edge,
                fill="toself",
                fillcolor=faded(colour),
                line={"width": 0},
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
                mode="lines",
            )
        )
    return [*traces, line(x, found.mean, name, colour).update(legendgroup=name)]


def curves_figure(
    groups: Mapping[str, tuple[Sequence[float], Sequence[Curve]]],
    *,
    x_title: str,
    y_title: str,
    height: int = 360,
    is_log: bool = False,
) -> go.Figure | None:
    """One band a group: name -> (x, curves of its seeds). None if no curve has a value.

    Curves are smoothed over a twentieth of the longest of their group.
    """
    figure = go.Figure()
    is_empty = True
    for number, (name, (x, curves)) in enumerate(groups.items()):
        shown = [curve for curve in curves if any(value is not None for value in curve)]
        if not shown:
            continue
        is_empty = False
        window = smoothing_window(max(map(len, shown)))
        for trace in band_traces(x, shown, name, colour_of(number), window=window):
            figure.add_trace(trace)
    if is_empty:
        return None
    figure.update_xaxes(title_text=x_title)
    figure.update_yaxes(title_text=y_title)
    if is_log:
        figure.update_yaxes(type="log")
    rows = -(-len(groups) // 3)
    figure = finish(figure, height=height + 20 * rows, top=24 + 20 * rows)
    # Labels are long: under each other at the left they stay whole.
    legend = {"orientation": "h", "x": 0.0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"}
    return figure.update_layout(legend=legend | {"yref": "paper"})
