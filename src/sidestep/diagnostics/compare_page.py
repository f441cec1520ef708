"""`sidestep compare`: the comparison as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from sidestep.diagnostics import page
from sidestep.diagnostics.bands import curves_figure
from sidestep.diagnostics.compare import (
    TARGET_SHARE,
    Comparison,
    RunGroup,
    samples_per_step,
)
from sidestep.diagnostics.statistics import Interval

HEADERS = (
    "setting",
    "seeds",
    "reward, last tenth",
    "less the first, by seed",
    "worst seed",
    "held-out accuracy",
    "samples to target",
    "seconds to target",
    "collapsed",
    "cosine",
    "ESS",
    "lag",
    "tokens/s",
)
CHARTS = (
    ("reward", "reward/mean", "Reward", "Mean reward of the completions of each step."),
    ("accuracy", "accuracy/eval", "Held-out accuracy", "Greedy answers, where they were measured."),
    (
        "cosine",
        "align/cosine",
        "Alignment of updates",
        "Cosine to the reference of the control. One that stays high: updates add up.",
    ),
    ("ess", "ratio/ess", "Effective sample size", "1: on policy. Low: few tokens carry the step."),
    ("kl", "ratio/kl_behaviour", "KL to the policy that sampled", "Per token, in nats."),
    ("lag", "lag/mean", "Lag", "Changes of the weights between sampling and training."),
)


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the page to `path`."""
    path.write_text(page.document("Sidestep: comparison", _body(comparison)), encoding="utf-8")


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """The comparison as texts, in the order of HEADERS."""
    rows: list[tuple[str, ...]] = []
    for row in comparison.rows:
        reached = f" ({row.num_reached} of {row.num_seeds})"
        seeds = f"{row.num_seeds}" + (
            f" ({row.num_runs} runs)" if row.num_runs != row.num_seeds else ""
        )
        rows.append(
            (
                row.label,
                seeds,
                told(row.reward_last, 3),
                told(row.difference, 3, sign=True),
                "-" if row.reward_last is None else f"{row.reward_last.worst:.3f}",
                told(row.accuracy, 3),
                told(row.samples, 0) + reached,
                told(row.seconds, 1),
                f"{row.num_collapsed} of {row.num_runs}",
                told(row.cosine, 2),
                told(row.ess, 2),
                told(row.lag, 1),
                told(row.tokens_per_s, 0),
            )
        )
    return rows


def told(value: Interval | None, digits: int, *, sign: bool = False) -> str:
    """`0.812 [0.790, 0.830]`; "-" for nothing."""
    if value is None:
        return "-"
    form = f"{'+' if sign else ''},.{digits}f"
    if value.low is None or value.high is None:
        return format(value.mean, form)
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"


def caption(comparison: Comparison) -> str:
    """What the numbers mean, in a line or two."""
    target = (
        "no run has a reward"
        if comparison.target is None
        else f"target: reward {comparison.target:.3f}, {TARGET_SHARE:.0%} of the best setting's, "
        "on the mean over a twentieth of the run; of the seeds that reach it"
    )
    return (
        "Brackets: 95 % bootstrap intervals over seeds (with few seeds too narrow); differences "
        f"are taken seed by seed. {target[0].upper()}{target[1:]}. Collapsed: fell under half of "
        "its own peak and stayed."
    )


def _body(comparison: Comparison) -> Iterable[str]:
    num_runs = sum(row.num_runs for row in comparison.rows)
    yield "<h1>Comparison</h1>\n"
    groups = len(comparison.groups)
    yield page.paragraph(
        f"{num_runs} runs, {groups} setting{'s' if groups != 1 else ''}", "verdict"
    )
    differing = ", ".join(comparison.differing) or "the seed alone"
    yield page.paragraph(f"They differ in: {differing}.")
    yield page.section(
        "Settings",
        page.paragraph(caption(comparison)) + page.table(HEADERS, table_rows(comparison)),
    )
    for name, metric, title, text in CHARTS:
        figure = curves_figure(
            _curves(comparison.groups, metric), x_title=_axis(comparison), y_title=title.lower()
        )
        if figure is not None:
            yield page.chart(
                name,
                title,
                f"{text} Line: mean over seeds, smoothed over a twentieth of the run; band: lowest "
                "to highest seed.",
                figure,
            )
    folders = (
        (group.label, run.config.get("seed", "-"), len(run.rows), run.path)
        for group in comparison.groups
        for run in group.all_runs()
    )
    yield page.folded("Runs", page.table(("setting", "seed", "steps", "folder"), folders))
    for group in comparison.groups:
        text = group.all_runs()[0].config_text
        yield page.folded(f"Config of the first run: {group.label}", page.preformatted(text))


def _batch_sizes(groups: Sequence[RunGroup]) -> set[int]:
    return {samples_per_step(run) for group in groups for run in group.all_runs()}


def _axis(comparison: Comparison) -> str:
    return "step" if len(_batch_sizes(comparison.groups)) == 1 else "samples"


def _curves(
    groups: Sequence[RunGroup], metric: str
) -> dict[str, tuple[list[float], list[list[float | None]]]]:
    """By steps, or by samples where batches are of different sizes: steps are then not alike."""
    by_samples = len(_batch_sizes(groups)) > 1
    curves = {}
    for group in groups:
        runs = group.all_runs()
        unit = samples_per_step(runs[0]) if by_samples else 1
        longest = max(len(run.rows) for run in runs)
        x = [float((step + 1) * unit) for step in range(longest)]
        curves[escape(group.label)] = (x, [_filled(run.column(metric), metric) for run in runs])
    return curves


def _filled(values: list[float | None], metric: str) -> list[float | None]:
    """An accuracy holds until the next one is measured; other metrics are as they are."""
    if metric != "accuracy/eval":
        return values
    held: float | None = None
    filled: list[float | None] = []
    for value in values:
        held = held if value is None else value
        filled.append(held)
    return filled
