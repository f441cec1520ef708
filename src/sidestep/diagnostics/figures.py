"""The charts of a report, as plotly figures. Each takes a run and returns None where the run
recorded nothing for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sidestep.diagnostics.charting import (
    MAIN,
    MANY_STEPS,
    MUTED,
    REGIME_COLOURS,
    SECOND,
    THIRD,
    TIME_COLOURS,
    binned,
    finish,
    line,
    smoothed,
    step_axis,
)
from sidestep.diagnostics.runs import RunData, is_observed
from sidestep.diagnostics.summary import sum_histograms


def reward(run: RunData) -> go.Figure | None:
    """Mean reward of every step, its moving mean, and held-out accuracy where it was measured."""
    rewards = run.column("reward/mean")
    if not run.values("reward/mean"):
        return None
    steps = run.column("step")
    figure = go.Figure(smoothed(steps, rewards, "reward"))
    evaluated = [
        (row["step"], row["accuracy/eval"])
        for row in run.rows
        if row.get("accuracy/eval") is not None
    ]
    if evaluated:
        trace = line(
            [step for step, _ in evaluated],
            [value for _, value in evaluated],
            "held-out accuracy",
            SECOND,
        )
        figure.add_trace(trace.update(mode="lines+markers", marker_size=8))
    figure.update_yaxes(title_text="reward")
    step_axis(figure, steps)
    return finish(figure)


def cosine(run: RunData) -> go.Figure | None:
    """Cosine of every step with its regime as a coloured band, and the two thresholds when they are
    numbers.
    """
    regimes = shown_regimes(run)
    if not any(regimes):
        return None
    steps, cosines, applied = (
        run.column(name) for name in ("step", "align/cosine", "align/cosine_applied")
    )
    limits = {name: run.setting(f"control.{name}") for name in ("low", "high")}
    lines = {name: value for name, value in limits.items() if isinstance(value, int | float)}
    shown = [value for value in (*cosines, *applied, *lines.values(), 0.0) if value is not None]
    bottom, top = max(-1.05, min(shown) - 0.08), min(1.05, max(shown) + 0.08)
    figure = go.Figure()
    for regime, bands in regime_bands(steps, regimes).items():
        figure.add_trace(
            go.Bar(
                x=[(first + last) / 2 for first, last in bands],
                width=[last - first + 1 for first, last in bands],
                y=[top - bottom] * len(bands),
                base=bottom,
                name=regime,
                marker={"color": REGIME_COLOURS.get(regime, MUTED), "line_width": 0},
                opacity=0.22,
                hoverinfo="skip",
            )
        )
    figure.add_trace(
        line(steps, applied, "after control", MUTED, width=1.2).update(line_dash="dot")
    )
    colours = [REGIME_COLOURS.get(regime or "", MUTED) for regime in regimes]
    figure.add_trace(
        line(steps, cosines, "cosine", MAIN, width=1.4).update(
            mode="lines+markers" if len(steps) < MANY_STEPS else "lines",
            marker={"size": 5, "color": colours},
            text=regimes,
            hovertemplate="%{y:.3f} %{text}",
        )
    )
    for name, value in lines.items():
        figure.add_hline(
            y=value,
            line={"dash": "dash", "width": 1, "color": MUTED},
            annotation_text=f"{name} {value:g}",
            annotation_position="top left",
        )
    figure.update_layout(
        bargap=0, barmode="overlay", yaxis={"range": [bottom, top], "title_text": "cosine"}
    )
    step_axis(figure, steps)
    return finish(figure)


def shown_regimes(run: RunData) -> list[str | None]:
    """The regime of each row; of a control that only watched, what it would have done."""
    regimes = run.column("align/regime")
    if not is_observed(run):
        return regimes
    decisions = run.column("align/decision")
    return [decision or regime for decision, regime in zip(decisions, regimes, strict=True)]


def regime_bands(
    steps: Sequence[int], regimes: Sequence[str | None]
) -> dict[str, list[tuple[int, int]]]:
    """Runs of consecutive steps with one regime as (first step, last step), by regime in the order
    of REGIME_COLOURS.
    """
    bands: dict[str, list[tuple[int, int]]] = {regime: [] for regime in REGIME_COLOURS}
    for regime, group in groupby(zip(steps, regimes, strict=True), key=lambda pair: pair[1]):
        if regime is not None:
            members = [step for step, _ in group]
            bands.setdefault(regime, []).append((members[0], members[-1]))
    return {regime: found for regime, found in bands.items() if found}


def lag(run: RunData) -> go.Figure | None:
    """Trained tokens by lag over the whole run; mean, largest and allowed lag by step."""
    tokens = sum_histograms(run.values("lag/histogram"))
    if not tokens and not run.values("lag/mean"):
        return None
    total = sum(tokens.values()) or 1.0
    figure = make_subplots(
        cols=2,
        column_widths=[0.45, 0.55],
        subplot_titles=("share of trained tokens", "lag by step"),
    )
    shares = [count / total for count in tokens.values()]
    bars = go.Bar(x=list(tokens), y=shares, marker_color=MAIN, showlegend=False)
    bars.update(
        customdata=list(tokens.values()),
        hovertemplate="lag %{x}: %{y:.1%}, %{customdata:,} tokens<extra></extra>",
    )
    figure.add_trace(bars, row=1, col=1)
    steps = run.column("step")
    for name, title, colour in (
        ("lag/mean", "mean", MAIN),
        ("lag/max", "largest", SECOND),
        ("lag/bound", "bound", MUTED),
    ):
        trace = line(steps, run.column(name), title, colour)
        figure.add_trace(
            trace.update(line_dash="dash") if name == "lag/bound" else trace, row=1, col=2
        )
    figure.update_xaxes(title_text="lag (versions)", row=1, col=1)
    if len(tokens) <= 40:
        figure.update_xaxes(dtick=1, row=1, col=1)
    figure.update_yaxes(tickformat=".0%", row=1, col=1)
    figure.update_yaxes(rangemode="tozero")
    step_axis(figure, steps, row=1, col=2)
    return finish(figure, top=64)


def ratio(run: RunData) -> go.Figure | None:
    """How far the trained policy is from the one that sampled: effective sample size, clipped
    share, KL divergence.
    """
    names = ("ratio/ess", "ratio/clip_fraction", "ratio/kl_behaviour")
    if not any(run.values(name) for name in names):
        return None
    figure = make_subplots(
        cols=2, subplot_titles=("share of tokens", "KL to the behaviour policy (nats)")
    )
    steps = run.column("step")
    ess, clipped, divergence = (run.column(name) for name in names)
    figure.add_trace(line(steps, ess, "effective sample size", MAIN), row=1, col=1)
    figure.add_trace(line(steps, clipped, "clipped", SECOND), row=1, col=1)
    figure.add_trace(line(steps, divergence, "KL", THIRD), row=1, col=2)
    figure.update_yaxes(range=[-0.02, 1.04], row=1, col=1)
    step_axis(figure, steps)
    return finish(figure, top=64)


def gradient(run: RunData) -> go.Figure | None:
    """Length of the gradient before and after control, on a logarithmic axis."""
    names = ("grad/norm_raw", "grad/norm_applied")
    raw, applied = (
        [value or None for value in run.column(name)] for name in names
    )  # log 0 has no place
    if not any(raw) and not any(applied):
        return None
    figure = go.Figure()
    figure.add_trace(line(run.column("step"), raw, "raw", MAIN))
    figure.add_trace(line(run.column("step"), applied, "after control", SECOND, width=1.2))
    figure.update_yaxes(type="log")
    figure.update_yaxes(title_text="gradient norm")
    step_axis(figure, run.column("step"))
    return finish(figure)


def speed(run: RunData) -> go.Figure | None:
    """Trained tokens per second."""
    rates = run.column("tokens/s")
    if not run.values("tokens/s"):
        return None
    figure = go.Figure(smoothed(run.column("step"), rates, "tokens/s"))
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="tokens/s")
    step_axis(figure, run.column("step"))
    return finish(figure)


def time_by_side(run: RunData) -> dict[str, dict[str, list[float | None]]]:
    """Seconds of every step by what each side did: {"trainer": {...}, "rollout": {...}}."""
    trainer = {
        "training": run.column("time/train_s"),
        "publishing weights": run.column("time/weight_sync_s"),
        "waiting for groups": run.column("time/wait_for_groups_s"),
    }
    spent = zip(*trainer.values(), strict=True)
    trainer["other"] = [
        None if step_s is None else max(0.0, step_s - sum(value or 0.0 for value in values))
        for step_s, values in zip(run.column("time/step_s"), spent, strict=True)
    ]
    rollout = {
        "generating": run.column("time/generate_s"),
        "scoring": run.column("time/reward_s"),
        "waiting for places": run.column("time/wait_for_places_s"),
    }
    return {"trainer": trainer, "rollout": rollout}


def waits(run: RunData) -> go.Figure | None:
    """Seconds of every step, stacked by what the trainer did (above) and what the rollout side did
    (below).
    """
    sides = time_by_side(run)
    if not any(
        value is not None for side in sides.values() for column in side.values() for value in column
    ):
        return None
    titles = [f"{side} side, seconds of each step" for side in sides]
    figure = make_subplots(
        rows=len(sides), shared_xaxes=True, vertical_spacing=0.14, subplot_titles=titles
    )
    for row, columns in enumerate(sides.values(), start=1):
        for what, seconds in columns.items():
            middles, heights, widths = binned(run.column("step"), seconds)
            bars = go.Bar(x=middles, y=heights, width=widths, name=what)
            bars.update(marker={"color": TIME_COLOURS[what], "line_width": 0})
            figure.add_trace(bars.update(hovertemplate="%{y:.3f} s"), row=row, col=1)
    figure.update_layout(barmode="stack", bargap=0)
    step_axis(figure, run.column("step"), row=len(sides), col=1)
    return finish(figure, height=450, top=64)
