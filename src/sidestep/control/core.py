"""What both spaces share: measure a vector against the reference, decide, remember.

The vector is the gradient (gradient_space.py) or the update the optimizer made (update_space.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sidestep.control.acted import Acted
from sidestep.control.checks import require_count
from sidestep.control.displacement import Displacement
from sidestep.control.facts import StepFacts
from sidestep.control.geometry import Pair, Products, Ranks, total
from sidestep.control.plan import Plan, make_plan
from sidestep.control.reference import ExponentialMean, Previous, Reference
from sidestep.control.regimes import Decision, decide, decide_by_secant, decide_by_spring
from sidestep.control.scopes import ScopeState
from sidestep.control.secant import Secant, plain_name
from sidestep.control.settings import Settings
from sidestep.control.sharding import Holdings, Layout, as_global, as_local
from sidestep.control.storage import SNAPSHOT_DTYPES, StoredVector

STATE_FORMAT = 2
# Steps in which more than half skipped are worth a word.
MANY_STEPS = 40

_log = logging.getLogger("sidestep.control")


@dataclass(frozen=True, slots=True)
class Judged:
    """A measured step, and what is to be done.

    names: parameter names by scope; the lists are in its order.
    facts: with numbers that all ranks agree on.
    measured, whole: the products of each scope, and of all.
    wanted: what the measurement calls for.
    plans: what happens: in mode "observe" nothing.
    states: of each scope, after the decision.
    rounding: relative rounding unit of the coarsest dtype of the vector, on any rank.
    """

    names: Mapping[str, Sequence[str]]
    facts: StepFacts
    within_batch: bool
    measured: list[Products]
    whole: Products
    wanted: list[Decision]
    plans: list[Plan]
    states: list[ScopeState]
    rounding: float
    has_curvature: bool

    @property
    def all_skip(self) -> bool:
        return all(plan.decision.regime == "skip" for plan in self.plans)

    def plan_by_name(self) -> dict[str, Plan]:
        scopes = zip(self.names.values(), self.plans, strict=True)
        return {name: plan for members, plan in scopes for name in members}


class Core:
    """The state of a control: settings, reference, scopes, counters."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step = 0
        self.batch: int | str | None = None  # the rollout batch of the last vector that was kept
        self.reference = _reference(settings)
        self.secant = _secant(settings)
        self.scopes: dict[str, ScopeState] = {}
        self.layouts: Mapping[str, Layout] = {}  # of sharded parameters
        self._told = repr(settings)
        self._skipped: deque[bool] = deque(maxlen=MANY_STEPS)
        self._noticed_change: tuple[set[str], set[str]] = set(), set()

    def judge(
        self,
        acted: Acted,
        names: Mapping[str, Sequence[str]],
        facts: StepFacts,
        ranks: Ranks,
        holdings: Holdings,
        max_norm: float | None = None,
    ) -> Judged:
        """Measure, decide and plan. Raises ValueError on all ranks alike.

        max_norm: what the caller clips to, so that ranks which differ in it stop.
        """
        everything = [name for members in names.values() for name in members]
        self.reference.open(facts, everything)
        changed = self._tell_of_change(set(everything))
        within_batch = facts.batch is not None and facts.batch == self.batch
        found = ranks.measure(
            self._lists(acted, names, facts, holdings),
            holdings,
            same=self.sameness(f"scopes {[*names]}", max_norm),
            sums=_as_sums(facts, within_batch, changed),
            rounding=acted.rounding,
        )
        facts, (within_batch, changed) = _agreed(facts, found.sums)
        measured = found.products[: len(names)]
        if not any(one.has_gradient for one in measured):
            raise ValueError(acted.absent)
        vanishes = self.reference.settle(facts.lag)
        if vanishes:
            measured = [replace(one, pp=0.0, pp_reachable=0.0, gp=0.0) for one in measured]
        whole = measured[0] if len(measured) == 1 else total(measured)
        states = [self._state_of(label) for label in names]
        if self.secant is not None and whole.finite and whole.gg > 0.0:
            for state, change in zip(states, found.products[len(names) :], strict=True):
                state.curvature.learn(change, self.settings.secant_memory)
        judging = _Judging(acted, whole, facts, within_batch, changed, vanishes)
        wanted = [
            self._decide(judging, state, one) for state, one in zip(states, measured, strict=True)
        ]
        allowed = [self._allowed(decision) for decision in wanted]
        return Judged(
            names=names,
            facts=facts,
            within_batch=within_batch,
            measured=measured,
            whole=whole,
            wanted=wanted,
            plans=[
                make_plan(one, decision, found.rounding, acted.takes_scale)
                for one, decision in zip(measured, allowed, strict=True)
            ],
            states=states,
            rounding=found.rounding,
            has_curvature=self.settings.uses_secant,
        )

    def close(self, acted: Acted, judged: Judged, kept: Set[str] | None) -> None:
        """End the step. kept: names whose vector went to the reference, None if it was not kept."""
        names = [name for members in judged.names.values() for name in members]
        moves = judged.whole.finite and not judged.all_skip
        self.reference.close(names, kept, acted.weights, moves)
        if kept is not None:
            self.batch = judged.facts.batch
        self._tell_of_many_skips(judged)

    def _tell_of_many_skips(self, judged: Judged) -> None:
        """Say once that the control leaves little of the training."""
        if not judged.whole.finite or self.settings.mode != "control":
            return
        self._skipped.append(judged.all_skip)
        if len(self._skipped) == MANY_STEPS and 2 * sum(self._skipped) > MANY_STEPS:
            _log.warning(
                "%d of the last %d steps were skipped, as their cosine was above high: where "
                "samples are fresh (supervised training, lag 0) a high cosine is normal: use "
                "mode='observe', high='calibrate' with low='calibrate', or a larger high; where "
                "they are stale, a lower learning rate needs fewer skips",
                *(sum(self._skipped), MANY_STEPS),
            )
            self._skipped = deque(maxlen=0)

    def sameness(self, what: str, max_norm: float | None) -> str:
        """What must be equal on all ranks when they measure `what`."""
        return f"{what} in step {self.step}, max_norm={max_norm}, of {self._told}"

    def state_dict(self) -> dict[str, Any]:
        parts = self.reference.snapshot()
        if self.secant is not None:
            parts |= self.secant.snapshot()
        laid_out = {key: self.layouts[n] for key in parts if (n := plain_name(key)) in self.layouts}
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "batch": self.batch,
            "reference": self.settings.reference,
            "space": self.settings.space,
            **self.reference.state_dict(),
            "scopes": {label: state.state_dict() for label, state in self.scopes.items()},
            "snapshot": as_global(parts, laid_out),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"control state: format={state.get('format')!r}, not {STATE_FORMAT}")
        require_count("control state: step", state.get("step", None), at_least=0)
        scopes: dict[str, ScopeState] = {}
        for label, saved in state.get("scopes", {}).items():
            scopes[label] = ScopeState.of(self.settings, label)
            scopes[label].load_state_dict(saved)
        self.step, self.scopes, self.batch = state["step"], scopes, state.get("batch")
        snapshot, laid_out = as_local(state.get("snapshot") or {})
        self.layouts = {plain_name(key): layout for key, layout in laid_out.items()}
        same_kind = True
        for key in ("reference", "space"):
            mine, theirs = getattr(self.settings, key), state.get(key)
            if theirs != mine:
                same_kind = False
                _log.warning("the control state is of %s=%r, not %r", key, theirs, mine)
        complete = self.reference.load_state_dict(state, snapshot if same_kind else {})
        if self.secant is not None:
            self.secant.load(snapshot if same_kind else {})
            complete = not self.secant.is_empty
        if self.step > 0 and self.settings.mode != "off" and not (complete and same_kind):
            _log.warning(
                "the control state of step %d holds no snapshot: no reference for the next step",
                self.step,
            )

    def _lists(
        self,
        acted: Acted,
        names: Mapping[str, Sequence[str]],
        facts: StepFacts,
        holdings: Holdings,
    ) -> list[Iterable[Pair]]:
        """What is measured: each scope, then each scope's secant."""
        lists = [_Again(partial(self._pairs, acted, part, holdings)) for part in names.values()]
        if self.secant is not None:
            changes = partial(self.secant.changes, acted=acted, facts=facts, holdings=holdings)
            lists += [_Again(partial(changes, part)) for part in names.values()]
        return [*lists]

    def _pairs(self, acted: Acted, names: Sequence[str], holdings: Holdings) -> Iterator[Pair]:
        known = self.reference.known
        for name in names:
            compared = name in known
            part = self.reference.part(name, acted.weights(name)) if compared else None
            yield Pair(acted.vector(name), part, compared, holdings[name])

    def _decide(self, judging: _Judging, state: ScopeState, measured: Products) -> Decision:
        """What one scope's measurement calls for; counts its skips."""
        if not judging.whole.finite:
            noun = "" if judging.acted.noun == "gradient" else f" {judging.acted.noun}"
            return Decision("skip", f"non-finite{noun}")
        decision = self._decide_finite(judging, state, measured)
        state.skips_in_a_row = state.skips_in_a_row + 1 if decision.regime == "skip" else 0
        if judging.changed and measured.cosine is not None:
            return replace(decision, reason=f"{decision.reason} (parameter set changed)")
        return decision

    def _decide_finite(self, judging: _Judging, state: ScopeState, measured: Products) -> Decision:
        cosine = measured.cosine
        if cosine is None:
            return Decision("undefined", self._why_undefined(judging, measured))
        if judging.within_batch:
            return Decision("pass", "same batch")
        if self.settings.uses_secant:
            return decide_by_secant(measured, state.curvature.value)
        if self.settings.uses_spring:
            return decide_by_spring(self.settings, judging.facts.drift or 0.0)
        thresholds = state.calibration.thresholds
        if thresholds is None:
            state.calibration.observe(cosine, judging.facts.lag)
            return Decision("pass", "calibrating")
        skips, drift = state.skips_in_a_row, judging.facts.drift or 0.0
        return decide(self.settings, thresholds, cosine, skips, measured.reach, drift)

    def _why_undefined(self, judging: _Judging, measured: Products) -> str:
        noun = judging.acted.noun
        if measured.gg == 0.0:
            return f"zero {noun}"
        if judging.vanishes:
            return self.reference.zero_reason
        if not judging.whole.has_reference:
            if self.reference.known:
                return "no shared parameter"
            return "first step" if self.step == 0 else "no reference"
        if not measured.has_reference:
            return "no reference in this scope"
        if measured.gg_compared == 0.0:
            return f"zero {noun} on the shared parameters"
        return self.reference.zero_reason if measured.pp == 0.0 else "reference not finite"

    def _allowed(self, wanted: Decision) -> Decision:
        """What the mode lets happen: a record of "observe" never tells its host to act."""
        if self.settings.mode != "observe" or wanted.regime in ("pass", "undefined"):
            return wanted
        if wanted.reason.startswith("non-finite"):
            return Decision("undefined", wanted.reason)
        return Decision("pass", f"observe: would {wanted.regime}, {wanted.reason}")

    def _state_of(self, label: str) -> ScopeState:
        if label not in self.scopes:
            self.scopes[label] = ScopeState.of(self.settings, label)
        return self.scopes[label]

    def _tell_of_change(self, names: set[str]) -> bool:
        """Whether the trained parameters are others than the reference knows; said once."""
        known = self.reference.known
        change = names - known, set(known - names)
        if not known or not any(change):
            return False
        if change != self._noticed_change:
            self._noticed_change = change
            new, gone = change
            _log.warning(
                "the set of trained parameters changed, %d are new (%s) and %d gone (%s): "
                "only the shared part is compared",
                *(len(new), _some(new), len(gone), _some(gone)),
            )
        return True


@dataclass(frozen=True, slots=True)
class _Judging:
    """What the decisions of all scopes share."""

    acted: Acted
    whole: Products
    facts: StepFacts
    within_batch: bool
    changed: bool
    vanishes: bool


class _Again:
    """Something that can be iterated more than once without being held."""

    def __init__(self, make: Callable[[], Iterator[Pair]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Pair]:
        return self._make()


def _as_sums(facts: StepFacts, within_batch: bool, changed: bool) -> list[float]:
    """Numbers that may differ between ranks, for their means: flags, then value and count."""
    sums = [float(within_batch), float(changed)]
    for value in (facts.lag, facts.drift, facts.expected):
        sums += [0.0, 0.0] if value is None else [value, 1.0]
    return sums


def _agreed(facts: StepFacts, sums: Sequence[float]) -> tuple[StepFacts, tuple[bool, bool]]:
    means = [sums[k] / sums[k + 1] if sums[k + 1] else None for k in (2, 4, 6)]
    same = replace(facts, lag=means[0], drift=means[1], expected=means[2])
    return same, (sums[0] > 0.0, sums[1] > 0.0)


def _reference(settings: Settings) -> Reference:
    if settings.reference == "displacement":
        sign = 1.0 if settings.space == "update" else -1.0
        return Displacement(sign, settings.snapshot_device)
    stored = StoredVector(SNAPSHOT_DTYPES[settings.snapshot_dtype], settings.snapshot_device)
    return Previous(stored) if settings.reference == "previous" else ExponentialMean(stored)


def _secant(settings: Settings) -> Secant | None:
    if not settings.uses_secant:
        return None
    return Secant(SNAPSHOT_DTYPES[settings.snapshot_dtype], settings.snapshot_device)


def _some(names: Set[str]) -> str:
    """The first few names, for a message."""
    shown = sorted(names)[:3]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "")
