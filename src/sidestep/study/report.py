"""What a study writes: table.csv, merits.csv and report.html, of whatever is finished."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sidestep.diagnostics import page
from sidestep.diagnostics.compare_page import told
from sidestep.diagnostics.environment import environment_facts
from sidestep.study import figures
from sidestep.study.declaration import Study
from sidestep.study.grid import Cell
from sidestep.study.merits import CAP, Merit, Synchronous, merits, synchronous
from sidestep.study.outcome import Result
from sidestep.study.tables import write_table
from sidestep.study.warning import Verdict, verdicts

TABLE_FILE, MERITS_FILE, REPORT_FILE = "table.csv", "merits.csv", "report.html"

MERIT_HEADERS = (
    "method",
    "best lr",
    "reward, last tenth",
    "gap at own best lr",
    "gap at equal lr",
    "worst seed, worst of all lr",
    "held-out accuracy",
    "stability range",
    "stable for all seeds",
    "samples to target (x synchronous)",
    "CPU seconds",
    "steps to 90 %",
    "collapsed",
    "cost of training",
)
WARNING_HEADERS = ("signal", "limit", "collapses warned of", "steps of warning", "false alarms")


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a study."""

    table: Path
    merits: Path
    report: Path


def write_study(
    study: Study, cells: Sequence[Cell], results: Mapping[Cell, Result], out: Path
) -> Written:
    """Write the three files into `out`."""
    written = Written(out / TABLE_FILE, out / MERITS_FILE, out / REPORT_FILE)
    done = [results[cell] for cell in cells if cell in results]
    write_table(written.table, [result.row for result in done])
    found = merits(study, results)
    write_table(written.merits, [merit.flat() for merit in found])
    body = _body(study, len(cells), results, done, found)
    written.report.write_text(page.document(f"Study {study.name}", body), encoding="utf-8")
    return written


def _body(
    study: Study,
    num_cells: int,
    results: Mapping[Cell, Result],
    done: Sequence[Result],
    found: Sequence[Merit],
) -> Iterable[str]:
    yield f"<h1>Study {escape(study.name)}</h1>\n"
    for paragraph in _facts(study, num_cells, done):
        yield page.paragraph(paragraph)
    for task in study.tasks:
        reference = synchronous(study, results, task)
        if reference is not None:
            yield from _task(study, done, found, task, reference)
    yield page.section("Early warning", _warnings(study, done))
    failed = [(r.cell.id, r.row["steps"], r.row["error"]) for r in done if r.row["error"]]
    yield page.section(
        "Runs that failed",
        page.table(("cell", "steps", "why"), failed) if failed else page.paragraph("None."),
    )
    if done:
        rows = ([_short(value) for value in result.row.values()] for result in done)
        yield page.folded("All cells", page.table(list(done[0].row), rows))
    facts = ((name, str(value)) for name, value in environment_facts().items())
    yield page.folded("This machine", page.table(("fact", "value"), facts, "mono"))


def _facts(study: Study, num_cells: int, done: Sequence[Result]) -> Iterable[str]:
    yield f"{len(done)} of {num_cells} cells are finished."
    yield f"Command: {' '.join(sys.argv)}"
    commits = sorted({str(result.row["commit"]) for result in done})
    yield f"Commits of the runs: {', '.join(commits) or '-'}."
    chosen = (
        f"pilot seeds {study.pilot_seeds}"
        if study.pilot_seeds
        else "the reported seeds themselves, which flatters every method"
    )
    yield (
        f"Reported seeds {study.seeds}. Learning rates and alarm limits are chosen on {chosen}. "
        "Brackets are 95 % bootstrap intervals over seeds; with few seeds they are too narrow."
    )


def _task(
    study: Study,
    done: Sequence[Result],
    found: Sequence[Merit],
    task: str,
    reference: Synchronous,
) -> Iterable[str]:
    key = escape(task)
    needs = "never" if reference.samples is None else f"{reference.samples:,.0f} samples"
    yield f"<h1>{key}</h1>\n"
    yield page.paragraph(
        f"Synchronous ({study.baseline}, lag 0): best at lr {reference.learning_rate:g}, reward "
        f"{reference.reward:.3f}; target {reference.target:.3f} ({study.target:.0%} of it): "
        f"{needs}."
    )
    for lag in study.lags:
        own = [merit for merit in found if (merit.task, merit.lag) == (task, lag)]
        if own:
            text = _merit_caption(reference)
            table = page.table(MERIT_HEADERS, [_merit_cells(merit) for merit in own])
            yield page.section(f"Figures of merit at lag {lag}", page.paragraph(text) + table)
    yield page.chart(
        f"map-{key}",
        "Stability maps",
        "Reward of the last tenth by lag and learning rate: mean over seeds, in brackets the worst "
        "seed. Red: nothing learned, or fallen.",
        figures.stability_map(study, done, task),
    )
    for lag in study.lags:
        best = figures.own_best(found, task, lag)
        equal = dict.fromkeys(best, reference.learning_rate)
        for name, title, rates in (
            ("best", "each at its own best learning rate", best),
            ("equal", "all at the synchronous run's best learning rate", equal),
        ):
            yield page.chart(
                f"curves-{name}-{key}-{lag}",
                f"Reward at lag {lag}, {title}",
                "Line: mean over seeds, smoothed over a twentieth of the run; band: lowest to "
                "highest seed.",
                figures.reward_curves(study, done, task, lag, rates),
            )
        yield page.chart(
            f"front-{key}-{lag}",
            f"Samples to the target against update length, lag {lag}",
            "Every cell of every seed. Hollow: does not reach the target, or falls again. Dashed: "
            "the synchronous run. Far right and low is good.",
            figures.front(study, done, task, lag, reference),
        )
    yield page.chart(
        f"signs-{key}",
        f"Before the collapses of {study.baseline}",
        "Line: mean over collapsed runs, band: lowest to highest; dashed: mean of its runs that "
        "did not collapse.",
        figures.signs_before_collapse(study, done, task),
    )


def _merit_caption(reference: Synchronous) -> str:
    return (
        "Gap: reward less the synchronous run's, seed by seed. Stability range: longest mean "
        "update per sample of a run that reaches the target and does not collapse (0: none does). "
        f"Samples to the target are capped at {CAP} times the synchronous run's "
        f"({_short(reference.cap)}) or at the length of the run. Cost: CPU time of loss, backward, "
        "control and optimizer as a multiple of the baseline's at the same place."
    )


def _merit_cells(merit: Merit) -> tuple[str, ...]:
    ratio = "-" if merit.samples_ratio is None else f"x {merit.samples_ratio:.2f}"
    return (
        merit.method,
        f"{merit.best_rate:g}",
        told(merit.reward, 3),
        told(merit.gap_at_best, 3, sign=True),
        told(merit.gap_at_equal, 3, sign=True),
        f"{merit.worst_reward:.3f}, {merit.worst_of_all_rates:.3f}",
        told(merit.accuracy, 3),
        str(merit.stability),
        f"{merit.stable_for_all_seeds:.3g}",
        f"{told(merit.samples, 0)} ({ratio}; {merit.num_reached} of {merit.num_seeds}, "
        f"lr {merit.rate_for_samples:g})",
        told(merit.cpu_s, 0),
        f"{told(merit.steps_to_90, 0)} ({merit.num_reached_90} of {merit.num_seeds})",
        f"{merit.num_collapsed} of {merit.num_cells}",
        "-" if merit.cost is None else f"x {merit.cost:.2f}",
    )


def _warnings(study: Study, done: Sequence[Result]) -> str:
    """Of the baseline's runs alone: a control changes what its signals say."""
    own = [result for result in done if result.cell.method == study.baseline]
    pilots = [result for result in own if result.cell.seed in study.pilot_seeds]
    judged = verdicts(pilots, figures.reported(study, own))
    rows = [_warning_cells(name, verdict) for name, verdict in judged.items()]
    text = (
        f"Runs of {study.baseline} at all lags and learning rates. A limit is set on the pilot "
        "seeds and judged on the others; an alarm in the step of the collapse or later is none."
    )
    return page.paragraph(text) + page.table(WARNING_HEADERS, rows)


def _warning_cells(name: str, verdict: Verdict | None) -> tuple[str, ...]:
    if verdict is None:
        return (name, "none: the pilot runs lack it, or did not collapse", "-", "-", "-")
    steps = "-" if verdict.warning_steps is None else f"{verdict.warning_steps:.1f}"
    return (
        name,
        "-" if verdict.limit is None else f"{verdict.limit:.3g}",
        f"{verdict.num_warned} of {verdict.num_collapsed}",
        steps,
        f"{verdict.num_false_alarms} of {verdict.num_quiet}",
    )


def _short(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
