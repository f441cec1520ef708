"""The charts of a study's report. Each returns None where nothing is finished for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sidestep.diagnostics.bands import Curve, band_traces, colour_of, curves_figure
from sidestep.diagnostics.charting import finish
from sidestep.diagnostics.compare import samples_per_step
from sidestep.diagnostics.statistics import smoothing_window
from sidestep.diagnostics.summary import mean
from sidestep.study.declaration import Study
from sidestep.study.merits import Merit, Synchronous, samples_to
from sidestep.study.outcome import Result

COLUMNS = 3
BEFORE, AFTER = 60, 10  # steps around a collapse
SIGNS = (
    ("cosine", "align/cosine"),
    ("ESS", "ratio/ess"),
    ("KL, nats per token", "ratio/kl_behaviour"),
)


def reported(study: Study, results: Iterable[Result]) -> list[Result]:
    """Those of reported seeds."""
    return [result for result in results if result.cell.seed in study.seeds]


def reward_curves(
    study: Study, results: Sequence[Result], task: str, lag: int, rates: Mapping[str, float]
) -> go.Figure | None:
    """One band a method, each at its learning rate in `rates`."""
    groups: dict[str, tuple[Sequence[float], Sequence[Curve]]] = {}
    for method, rate in rates.items():
        cells = [
            result
            for result in reported(study, results)
            if (result.cell.task, result.cell.method) == (task, method)
            and (result.cell.lag, result.cell.learning_rate) == (lag, rate)
        ]
        if cells:
            longest = max(len(result.rewards) for result in cells)
            x = [float((i + 1) * samples_per_step(cells[0].run)) for i in range(longest)]
            name = f"{method}, lr {rate:g}"
            groups[escape(name)] = (x, [result.rewards for result in cells])
    return curves_figure(groups, x_title="samples", y_title="reward") if groups else None


def stability_map(study: Study, results: Sequence[Result], task: str) -> go.Figure | None:
    """Lag x learning rate for each method: mean reward of the last tenth, and the worst seed."""
    cells = [result for result in reported(study, results) if result.cell.task == task]
    methods = [name for name in study.methods if any(r.cell.method == name for r in cells)]
    if not methods:
        return None
    lags, rates = sorted(study.lags), sorted(study.learning_rates)
    num_rows = -(-len(methods) // COLUMNS)
    figure = make_subplots(
        rows=num_rows,
        cols=min(COLUMNS, len(methods)),
        subplot_titles=[escape(name) for name in methods],
        horizontal_spacing=0.06,
        vertical_spacing=0.4 / num_rows,
    )
    for number, method in enumerate(methods):
        at: dict[tuple[int, float], list[Result]] = {}
        for result in cells:
            if result.cell.method == method:
                place = result.cell.lag, result.cell.learning_rate
                at.setdefault(place, []).append(result)
        grid = [[_cell(at.get((lag, rate), [])) for rate in rates] for lag in lags]
        where = {"row": number // COLUMNS + 1, "col": number % COLUMNS + 1}
        figure.add_trace(
            go.Heatmap(
                z=[[value for value, _, _ in row] for row in grid],
                text=[[text for _, text, _ in row] for row in grid],
                customdata=[[told for _, _, told in row] for row in grid],
                texttemplate="%{text}",
                textfont={"size": 10},
                hovertemplate="%{customdata}<extra></extra>",
                coloraxis="coloraxis",
                xgap=1,
                ygap=1,
            ),
            **where,
        )
        figure.update_xaxes(title_text="learning rate", **where)
        figure.update_yaxes(title_text="lag" if where["col"] == 1 else None, **where)
    figure.update_xaxes(tickvals=list(range(len(rates))), ticktext=[f"{r:g}" for r in rates])
    figure.update_yaxes(tickvals=list(range(len(lags))), ticktext=[str(lag) for lag in lags])
    bar = {"thickness": 12, "outlinewidth": 0}
    figure.update_layout(coloraxis={"colorscale": "RdYlGn", "cmin": 0, "colorbar": bar})
    height = num_rows * (130 + 46 * len(lags)) + 60
    return finish(figure, height=height, top=48).update_layout(hovermode="closest")


def _cell(results: Sequence[Result]) -> tuple[float | None, str, str]:
    """Height, text in the cell, and text of its hover."""
    if not results:
        return None, "", ""
    rewards = [result.row["reward_last"] or 0.0 for result in results]
    centre, worst = sum(rewards) / len(rewards), min(rewards)
    lengths = mean([result.row["update_length"] for result in results])
    collapsed = sum(result.row["collapse_step"] is not None for result in results)
    told = (
        f"reward {centre:.3f}, worst seed {worst:.3f}<br>{collapsed} of {len(results)} collapsed"
        f"<br>update length {lengths:.3g} a sample"
    )
    return centre, f"{centre:.2f}<br>({worst:.2f})", told


def front(
    study: Study, results: Sequence[Result], task: str, lag: int, reference: Synchronous
) -> go.Figure | None:
    """Samples to the target against mean update length per sample: a point a cell. A hollow one
    does not get there, or not to stay; it stands at the samples it had.
    """
    figure = go.Figure()
    for number, method in enumerate(study.methods):
        cells = [
            result
            for result in reported(study, results)
            if (result.cell.task, result.cell.method, result.cell.lag) == (task, method, lag)
            and result.row["update_length"]
        ]
        if not cells:
            continue
        cells.sort(key=lambda result: result.row["update_length"])
        samples = [samples_to(result, reference.target) for result in cells]
        stays = [result.row["collapse_step"] is None for result in cells]
        symbols = [
            "circle" if needed is not None and stay else "circle-open"
            for needed, stay in zip(samples, stays, strict=True)
        ]
        figure.add_trace(
            go.Scatter(
                x=[result.row["update_length"] for result in cells],
                y=[
                    result.row["samples"] if needed is None else needed
                    for result, needed in zip(cells, samples, strict=True)
                ],
                name=escape(method),
                mode="markers",
                marker={"color": colour_of(number), "size": 9, "symbol": symbols},
                text=[
                    f"lr {result.cell.learning_rate:g}, seed {result.cell.seed}" for result in cells
                ],
                hovertemplate="%{text}: %{y} samples at %{x:.3g}",
            )
        )
    if not figure.data:
        return None
    figure.update_xaxes(type="log", title_text="mean update length per sample")
    figure.update_yaxes(title_text="samples to the target", rangemode="tozero")
    if reference.samples is not None:
        figure.add_hline(y=reference.samples, line={"dash": "dash", "width": 1})
    return finish(figure, height=380, top=64).update_layout(hovermode="closest")


def signs_before_collapse(study: Study, results: Sequence[Result], task: str) -> go.Figure | None:
    """Cosine, ESS and KL of the baseline in steps before its collapses, all set upon each other;
    dashed: the mean of runs of it that did not collapse.
    """
    own = [
        result
        for result in reported(study, results)
        if (result.cell.task, result.cell.method) == (task, study.baseline)
    ]
    collapsed = [result for result in own if result.row["collapse_step"] is not None]
    quiet = [result for result in own if result.row["collapse_step"] is None]
    if not collapsed:
        return None
    figure = make_subplots(cols=len(SIGNS), subplot_titles=[title for title, _ in SIGNS])
    x = [float(i) for i in range(-BEFORE, AFTER)]
    for column, (_, metric) in enumerate(SIGNS, start=1):
        curves = [_around(result, metric) for result in collapsed]
        window = smoothing_window(len(x))
        for trace in band_traces(x, curves, "collapsed", colour_of(8), window=window):
            figure.add_trace(trace.update(showlegend=bool(trace.name) and column == 1), 1, column)
        level = mean([v for result in quiet for v in result.run.values(metric)])
        if level is not None:
            figure.add_hline(y=level, line={"dash": "dash", "width": 1}, row=1, col=column)
    figure.update_xaxes(title_text="steps from the collapse")
    return finish(figure, top=64)


def _around(result: Result, metric: str) -> list[float | None]:
    values = result.run.column(metric)
    start = result.row["collapse_step"] - BEFORE
    return [
        values[i] if 0 <= i < len(values) else None for i in range(start, start + BEFORE + AFTER)
    ]


def own_best(found: Sequence[Merit], task: str, lag: int) -> dict[str, float]:
    """Learning rates by method at which each does best."""
    return {m.method: m.best_rate for m in found if (m.task, m.lag) == (task, lag)}
