"""`sidestep report RUN`: a run folder told on one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from sidestep.diagnostics import figures, page
from sidestep.diagnostics.charting import REGIME_COLOURS
from sidestep.diagnostics.metrics import METRICS
from sidestep.diagnostics.runs import RunData, is_observed, read_run
from sidestep.diagnostics.summary import RunSummary, equal_rewards, summarise
from sidestep.errors import UsageError
from sidestep.run_folder import REPORT_FILE

GROUPS_PER_STAGE = 4
DROPPED_SHOWN = 10


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into the run folder and return its path. The run may still be going.

    Raises UsageError if the folder is not a run, or if no step of it is finished.
    """
    run = read_run(run_dir)
    if not run.rows:
        raise UsageError(f"{run.path} has no finished step yet: metrics.jsonl is empty")
    path = run.path / REPORT_FILE
    path.write_text(page.document(f"Sidestep: {run.path.name}", _body(run)), encoding="utf-8")
    return path


def _body(run: RunData) -> Iterable[str]:
    summary = summarise(run)
    yield _head(run, summary)
    yield page.chart(
        "reward",
        "Reward",
        "Mean reward of the completions of each step, and of greedy answers to held-out rows.",
        figures.reward(run),
    )
    yield page.chart(
        "cosine",
        "Alignment of updates, and what the control did",
        f"{_regimes(run, summary)} "
        "A cosine that stays high: updates add up along a stale direction.",
        figures.cosine(run),
    )
    yield page.chart(
        "lag",
        "Lag",
        "How many changes of the weights lay between sampling a token and training on it.",
        figures.lag(run),
    )
    yield page.chart(
        "ratio",
        "Distance from the policy that sampled",
        "Low effective sample size, much clipping, growing KL: the data no longer fits the policy.",
        figures.ratio(run),
    )
    yield page.chart("waits", "Where each side waited", _shares(run), figures.waits(run))
    yield page.pair(
        page.chart(
            "gradient",
            "Gradient norm",
            "Before and after control; clipping comes later.",
            figures.gradient(run),
        ),
        page.chart("speed", "Speed", "Tokens trained on per second.", figures.speed(run)),
    )
    yield page.section("Sample completions", _samples(run))
    yield page.section("Dropped groups", _dropped(run))
    yield page.folded("Resolved config", page.preformatted(run.config_text))
    facts = ((name, _fact(value)) for name, value in run.environment.items())
    yield page.folded("Environment", page.table(("fact", "value"), facts, "mono"))
    meanings = ((metric.name, metric.unit, metric.meaning) for metric in METRICS)
    yield page.folded("What each metric means", page.table(("metric", "unit", "meaning"), meanings))


def _head(run: RunData, summary: RunSummary) -> str:
    state, css_class = (
        ("complete", "good") if summary.is_complete else ("still going, or stopped early", "busy")
    )
    if summary.has_collapsed:
        state, css_class = "reward collapsed", "bad"
    elapsed = "-" if summary.elapsed_s is None else str(timedelta(seconds=round(summary.elapsed_s)))
    values = [
        (_number(summary.reward_last, 2), "reward, last tenth"),
        (_number(summary.accuracy_last, 2), "held-out accuracy, last"),
        (_number(summary.lag_mean, 1), f"mean lag, largest {_number(summary.lag_max, 0)}"),
        (f"{summary.num_skips}", f"skipped of {summary.num_steps} steps"),
        (_number(summary.tokens_per_s, 0), "trained tokens/s, mean"),
        (elapsed, "wall-clock time"),
    ]
    parts = [
        f"<h1>{escape(run.path.resolve().name)}</h1>\n",
        page.paragraph(str(run.path.resolve()), "path"),
        f'<p class="verdict"><span class="state {css_class}">{state}</span>'
        f"{escape(summary.verdict())}</p>\n",
    ]
    parts += [
        page.paragraph(problem, "bad")
        for problem in (_not_finite(run), _alarm(run), equal_rewards(summary))
        if problem
    ]
    return "".join(parts) + page.tiles(values)


def _alarm(run: RunData) -> str:
    """When the alarm first rang, and why."""
    alarms = [row for row in run.rows if row.get("alarm/level") == "alarm"]
    if not alarms:
        return ""
    first = alarms[0]
    return (
        f"Alarm in {len(alarms)} of {len(run.rows)} steps, first in step {first['step']}: "
        f"{first['alarm/reason']}."
    )


def _not_finite(run: RunData) -> str:
    """Which metrics were NaN or infinite, and when; empty if none was."""
    steps: dict[str, list[int]] = {}
    for row in run.rows:
        for name in row.get("not_finite") or ():
            steps.setdefault(name, []).append(row["step"])
    told = [
        f"{name} in {len(where)} steps, first in step {where[0]}" for name, where in steps.items()
    ]
    return f"Not finite: {'; '.join(told)}." if told else ""


def _regimes(run: RunData, summary: RunSummary) -> str:
    counts = summary.steps_by_regime
    if not counts:
        return "No regime was recorded."
    told = _counted(counts)
    decisions = Counter(one for one in figures.shown_regimes(run) if one)
    if is_observed(run) and decisions != counts:
        return (
            f"Nothing was changed (control.mode = observe). Colours show what control would have "
            f"done: {_counted(decisions)}."
        )
    return f"Steps by regime: {told}."


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in REGIME_COLOURS if name in counts)


def _shares(run: RunData) -> str:
    """Where the time of each side went, as one sentence a side."""
    told = []
    for side, columns in figures.time_by_side(run).items():
        spent = {what: sum(value or 0.0 for value in seconds) for what, seconds in columns.items()}
        total = sum(spent.values())
        if total > 0:
            shares = ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in spent.items())
            told.append(f"{side.capitalize()} side: {shares}.")
    return " ".join(told)


def _samples(run: RunData) -> str:
    trained = [group for group in run.groups if group["step"] is not None]
    if not trained:
        return page.paragraph("No group was trained on.")
    steps = sorted({group["step"] for group in trained})
    stages = {"early": steps[0], "middle": steps[len(steps) // 2], "late": steps[-1]}
    if len(steps) < len(stages):  # too short a run for three stages: show its steps once each
        stages = {f"step {step}": step for step in steps}
    rows = []
    for stage, step in stages.items():
        groups = [group for group in trained if group["step"] == step][:GROUPS_PER_STAGE]
        rows += [_sample_row(stage, group) for group in groups]
    headers = (
        "stage",
        "step",
        "prompt",
        "completion",
        "reward",
        "another",
        "reward",
        "group's mean",
    )
    return page.table(headers, rows, "mono")


def _sample_row(stage: str, group: dict[str, Any]) -> tuple[object, ...]:
    rewards = group["rewards"]
    pairs = list(zip(group["completions"], rewards, strict=False))[:2]
    pairs += [("", None)] * (2 - len(pairs))
    (first, first_reward), (second, second_reward) = pairs
    group_mean = sum(rewards) / len(rewards) if rewards else None
    return (
        stage,
        group["step"],
        group["prompt"],
        first,
        _number(first_reward, 2),
        second,
        _number(second_reward, 2),
        _number(group_mean, 2),
    )


def _dropped(run: RunData) -> str:
    dropped = [group for group in run.groups if group["dropped"] is not None]
    if not dropped:
        return page.paragraph("None.")
    counts = Counter(group["dropped"] for group in dropped)
    told = ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())
    rows = [
        (group["index"], group["dropped"], group["prompt"]) for group in dropped[:DROPPED_SHOWN]
    ]
    headers = ("group", "reason", "prompt")
    more = f" The first {len(rows)} of them:" if len(dropped) > len(rows) else ""
    return page.paragraph(f"{len(dropped)} dropped: {told}.{more}") + page.table(
        headers, rows, "mono"
    )


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(
            f"{key}: {'-' if inner is None else inner}" for key, inner in value.items()
        )
    if isinstance(value, list):
        return " ".join(str(inner) for inner in value)
    return "-" if value is None else str(value)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
