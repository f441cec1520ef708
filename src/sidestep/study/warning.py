"""Early warning: how long before a collapse a signal passes its limit, and how often for nothing.

The limit of each signal is set on the pilot seeds and judged on the others. The product's own alarm
(`alarm/level`) has fixed limits and is judged as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sidestep.diagnostics.statistics import smoothing_window
from sidestep.diagnostics.summary import mean, moving_mean
from sidestep.study.outcome import Result

Values = Sequence[float | None]
PRODUCT_ALARM = "alarm of the product"


@dataclass(frozen=True, slots=True)
class Signal:
    """A metric that should tell a collapse. high: whether high values are bad. relative: whether it
    is read as a multiple of its mean over the first window of the run.
    """

    name: str
    metric: str
    high: bool = True
    relative: bool = False


SIGNALS = (
    Signal("cosine", "align/cosine"),
    Signal("excess alignment", "align/excess"),
    Signal("ESS", "ratio/ess", high=False),
    Signal("KL", "ratio/kl_behaviour"),
    Signal("gradient norm", "grad/norm_raw", relative=True),
)


@dataclass(frozen=True, slots=True)
class History:
    """One run as a signal sees it. badness: the smoothed signal, turned so that high is bad; None
    where there is no value. collapse: the step of the collapse, if there was one.
    """

    badness: Values
    collapse: int | None

    def alarm(self, limit: float) -> int | None:
        """First step whose badness is above the limit."""
        return next(
            (i for i, value in enumerate(self.badness) if value is not None and value > limit), None
        )

    def worst(self) -> float | None:
        """The highest badness before the collapse."""
        before = self.badness if self.collapse is None else self.badness[: self.collapse]
        return max((value for value in before if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a signal did. limit: as the signal is read; None for the product's alarm.

    warned: collapses with an alarm before them. warning_steps: from alarm to collapse, mean of
    those. false_alarms: runs without a collapse that had an alarm.
    """

    name: str
    limit: float | None
    num_collapsed: int
    num_warned: int
    warning_steps: float | None
    num_quiet: int
    num_false_alarms: int


def history(signal: Signal, result: Result) -> History:
    """A run as `signal` sees it, smoothed over a twentieth of the planned steps."""
    values = result.run.column(signal.metric)
    window = smoothing_window(result.row["steps_planned"] or len(values))
    smooth: list[float | None] = list(moving_mean(values, window))
    smooth[: window - 1] = [None] * min(window - 1, len(smooth))
    if signal.relative:
        first = next((value for value in smooth if value), None)
        smooth = [None if value is None or first is None else value / first for value in smooth]
    turned = [None if v is None else (v if signal.high else -v) for v in smooth]
    return History(turned, result.row["collapse_step"])


def calibrate(histories: Sequence[History]) -> float | None:
    """The limit that tells collapses from other runs best: share warned less share of false alarms,
    then longest warning. None without a run of each kind that has the signal.
    """
    seen = [(one, worst) for one in histories if (worst := one.worst()) is not None]
    collapsed = [one for one, _ in seen if one.collapse is not None]
    quiet = [one for one, _ in seen if one.collapse is None]
    if not collapsed or not quiet:
        return None
    edges = sorted({worst for _, worst in seen})
    limits = [(a + b) / 2 for a, b in pairwise(edges)] or edges

    def score(limit: float) -> tuple[float, float]:
        verdict = judge("", limit, [*collapsed, *quiet])
        warned = verdict.num_warned / len(collapsed)
        return warned - verdict.num_false_alarms / len(quiet), verdict.warning_steps or 0.0

    return max(limits, key=score)


def judge(name: str, limit: float, histories: Sequence[History]) -> Verdict:
    """Alarms of runs that the limit was not set on."""
    alarms = [(one.alarm(limit), one.collapse) for one in histories]
    return _verdict(name, limit, alarms)


def verdicts(pilots: Sequence[Result], reported: Sequence[Result]) -> Mapping[str, Verdict | None]:
    """By signal; None where the pilot runs could not set a limit."""
    found: dict[str, Verdict | None] = {}
    for signal in SIGNALS:
        limit = calibrate([history(signal, result) for result in pilots])
        found[signal.name] = None
        if limit is not None:
            judged = judge(signal.name, limit, [history(signal, result) for result in reported])
            found[signal.name] = replace(judged, limit=limit if signal.high else -limit)
    alarms = [(_product_alarm(result), result.row["collapse_step"]) for result in reported]
    found[PRODUCT_ALARM] = _verdict(PRODUCT_ALARM, None, alarms)
    return found


def _product_alarm(result: Result) -> int | None:
    levels = result.run.column("alarm/level")
    return levels.index("alarm") if "alarm" in levels else None


def _verdict(
    name: str, limit: float | None, alarms: Sequence[tuple[int | None, int | None]]
) -> Verdict:
    warnings = [
        collapse - alarm
        for alarm, collapse in alarms
        if collapse is not None and alarm is not None and alarm < collapse
    ]
    quiet = [alarm for alarm, collapse in alarms if collapse is None]
    return Verdict(
        name=name,
        limit=limit,
        num_collapsed=len(alarms) - len(quiet),
        num_warned=len(warnings),
        warning_steps=mean(warnings),
        num_quiet=len(quiet),
        num_false_alarms=sum(alarm is not None for alarm in quiet),
    )
