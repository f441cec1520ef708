"""What all charts of a report share: colours, lines, axes and margins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from sidestep.diagnostics.summary import mean, moving_mean

# One colour, one meaning, in every chart.
MAIN, SECOND, THIRD, MUTED = "#4c6ef5", "#f08c00", "#0ca678", "#909296"
REGIME_COLOURS = {
    "pass": "#2f9e44",
    "project": "#4c6ef5",
    "damp": "#f59f00",
    "skip": "#e03131",
    "undefined": "#909296",
}
TIME_COLOURS = {
    "training": MAIN,
    "publishing weights": "#9775fa",
    "generating": THIRD,
    "scoring": "#63e6be",
    "waiting for groups": "#ffa94d",
    "waiting for places": "#ffa94d",
    "other": "#868e96",
}
TOP_RIGHT = {"yref": "container", "y": 1.0, "yanchor": "top", "x": 1.0, "xanchor": "right"}
FEW_STEPS, MANY_STEPS = 12, 500
MAX_BARS = 160  # more bars than this are thinner than a pixel or two


def line(
    x: Sequence[Any],
    y: Sequence[Any],
    name: str,
    colour: str,
    width: float = 2,
    opacity: float = 1.0,
) -> go.Scatter:
    """One line; None in y is a gap. A single point has no line to draw, so it gets a marker."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        name=name,
        mode="lines" if len(x) > 1 else "markers",
        opacity=opacity,
        line={"color": colour, "width": width},
        hovertemplate="%{y:.4g}",
    )


def smoothed(steps: Sequence[int], values: Sequence[float | None], name: str) -> list[go.Scatter]:
    """A noisy series and, for a run long enough, its mean over a twentieth of the run."""
    window = len(steps) // 20
    if window < 2:
        return [line(steps, values, name, MAIN)]
    return [
        line(steps, values, name, MAIN, width=1, opacity=0.4),
        line(steps, moving_mean(values, window), f"mean of {window} steps", MAIN, width=2.5),
    ]


def step_axis(figure: go.Figure, steps: Sequence[int], **where: int) -> None:
    """Make the x axis (of one subplot, with row= and col=) the steps of the run, the same in every
    chart.
    """
    figure.update_xaxes(title_text="step", range=[steps[0] - 0.5, steps[-1] + 0.5], **where)
    if len(steps) < FEW_STEPS:
        figure.update_xaxes(dtick=1, **where)  # else plotly labels fractions of a step


def finish(figure: go.Figure, height: int = 320, top: int = 40) -> go.Figure:
    """Set the look all charts share. Colours of text and grid are the page's, which knows the
    reader's theme.

    top: pixels above the plot for the legend, and for titles of subplots under it.
    """
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(zeroline=False)
    figure.update_annotations(font_size=12)
    return figure.update_layout(
        template=go.layout.Template(),
        height=height,
        margin={"l": 56, "r": 16, "t": top, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12},
        legend={**TOP_RIGHT, "orientation": "h", "traceorder": "normal"},
        hovermode="x unified",
    )


def binned(
    steps: Sequence[int], values: Sequence[float | None]
) -> tuple[list[float], list[float | None], list[int]]:
    """At most MAX_BARS bars of equally many steps (the last may have fewer): middles, means,
    widths.
    """
    size = -(-len(steps) // MAX_BARS)
    bins = [range(start, min(start + size, len(steps))) for start in range(0, len(steps), size)]
    middles = [(steps[which[0]] + steps[which[-1]]) / 2 for which in bins]
    means = [mean([v for v in values[which.start : which.stop] if v is not None]) for which in bins]
    return middles, means, [len(which) for which in bins]
