"""Combinations of policy, anchor and correction that fail without an error.

Each finding says what happens and what to change. "error": the loss is not what its parts say.
"warning": allowed, seldom meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from sidestep.losses.kl import KL_ESTIMATES
from sidestep.losses.registry import ANCHORS, CORRECTIONS, POLICIES, CorrectionEntry, PolicyEntry

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. code: stable, for tests. fix: what to set instead."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    fix: str


def check_combination(
    policy: str,
    anchor: str,
    correction: str | Collection[str] = "none",
    *,
    steps_per_batch: int = 1,
    max_lag: int | None = None,
) -> list[Finding]:
    """What goes silently wrong with these names, nothing if all is well.

    correction: one name, or several that are combined.
    steps_per_batch: optimizer steps on one rollout batch (mini-batches times epochs).
    max_lag: largest lag at the first of them; None if unknown.
    Raises ValueError for an unknown name.
    """
    names = [correction] if isinstance(correction, str) else list(correction)
    entry = _look_up("policy", POLICIES, policy)
    _look_up("anchor", ANCHORS, anchor)
    used = [_look_up("correction", CORRECTIONS, name) for name in names]
    # With one step on a batch the proximal policy is the current one.
    ratio_is_one = anchor == "recomputed" or (anchor == "proximal" and steps_per_batch == 1)
    last_lag = None if max_lag is None else max_lag + steps_per_batch - 1
    anchor_is_behaviour = anchor == "behaviour" or (
        anchor == "loglinear" and last_lag is not None and last_lag <= 1
    )
    return [
        *_dead_clip(entry, anchor, ratio_is_one),
        *_double_count(entry, anchor, used, anchor_is_behaviour),
        *_never_applied(entry, anchor, used, anchor_is_behaviour, last_lag),
        *_unused_anchor(entry, anchor, used),
        *_stacked_lag(steps_per_batch, max_lag),
    ]


def check_kl(estimate: str, place: Literal["loss", "reward"]) -> list[Finding]:
    """What goes silently wrong with a KL penalty of this estimate in this place.

    Raises ValueError for an unknown estimate.
    """
    _look_up("estimate", KL_ESTIMATES, estimate)
    if place == "loss" and estimate == "k1":
        return [
            Finding(
                "kl_without_gradient",
                "error",
                "the gradient of k1 in the loss is grad log pi_theta, whose mean is 0: the penalty "
                "only adds noise",
                "use k2 or k3 in the loss, or k1 in the reward",
            )
        ]
    if place == "reward" and estimate != "k1":
        return [
            Finding(
                "biased_kl_reward",
                "warning",
                f"{estimate} in the reward is not the divergence's own penalty: its gradient is "
                f"that of another objective",
                "use k1 in the reward",
            )
        ]
    return []


def _dead_clip(policy: PolicyEntry, anchor: str, ratio_is_one: bool) -> Iterator[Finding]:
    if policy.ratio == "anchor" and ratio_is_one:
        why = (
            "is the current policy itself"
            if anchor == "recomputed"
            else "is the current policy as long as a batch has one optimizer step"
        )
        yield Finding(
            "dead_clip",
            "warning",
            f"anchor {anchor!r} {why}: the ratio of {policy.name!r} is always 1, so its clip or "
            f"gate does nothing and it is plain policy gradient",
            "use anchor 'behaviour'"
            + ("" if anchor == "recomputed" else ", or several optimizer steps per batch"),
        )


def _double_count(
    policy: PolicyEntry, anchor: str, used: list[CorrectionEntry], anchor_is_behaviour: bool
) -> Iterator[Finding]:
    weighing = [entry.name for entry in used if entry.weighs]
    if len(weighing) > 1:
        yield Finding(
            "double_count",
            "error",
            f"corrections {_names(weighing)} each multiply by w: it counts {len(weighing)} times",
            "keep one of them; filters (geometric, opsm) may be added",
        )
    if weighing and policy.ratio == "behaviour":
        yield Finding(
            "double_count",
            "error",
            f"{policy.name!r} already weighs by rho = pi_theta / pi_mu: {_names(weighing)} would "
            f"count the staleness twice",
            "use correction 'none' (or a filter: geometric, opsm)",
        )
    elif weighing and anchor_is_behaviour:
        yield Finding(
            "double_count",
            "error",
            f"with anchor {anchor!r} the ratio is pi_theta / pi_mu, which corrects for all "
            f"staleness: w is 1 and {_names(weighing)} does nothing, and w to any other policy "
            f"would count it twice",
            "use correction 'none', or anchor 'proximal' or 'recomputed'",
        )


def _never_applied(
    policy: PolicyEntry,
    anchor: str,
    used: list[CorrectionEntry],
    anchor_is_behaviour: bool,
    last_lag: int | None,
) -> Iterator[Finding]:
    filters = [entry.name for entry in used if entry.reads == "w" and not entry.weighs]
    if filters and anchor_is_behaviour:
        yield Finding(
            "correction_never_applied",
            "error",
            f"with anchor {anchor!r} w is always 1: {_names(filters)} never drops anything",
            "use 'opsm', which reads pi_theta / pi_mu, or anchor 'proximal' or 'recomputed'",
        )
    stale = last_lag is None or last_lag > 0
    weighed = anchor_is_behaviour or any(entry.weighs for entry in used)
    if policy.ratio == "anchor" and stale and not weighed:
        yield Finding(
            "uncorrected",
            "warning",
            f"anchor {anchor!r} leaves w = pi_p / pi_mu to a correction, and none weighs by "
            f"it: stale samples are taken for fresh ones",
            "use correction 'tis', 'icepop' or 'importance', or anchor 'behaviour'",
        )


def _unused_anchor(
    policy: PolicyEntry, anchor: str, used: list[CorrectionEntry]
) -> Iterator[Finding]:
    reads_w = any(entry.reads == "w" for entry in used)
    if policy.ratio == "behaviour" and anchor != "behaviour" and not reads_w:
        yield Finding(
            "anchor_unused",
            "warning",
            f"{policy.name!r} takes its ratio to the behaviour policy: nothing reads anchor "
            f"{anchor!r}",
            "use anchor 'behaviour'",
        )


def _stacked_lag(steps_per_batch: int, max_lag: int | None) -> Iterator[Finding]:
    if steps_per_batch > 1 and max_lag:
        yield Finding(
            "stacked_lag",
            "warning",
            f"{steps_per_batch} optimizer steps on a batch add to max_lag {max_lag}: the last of "
            f"them trains on samples up to {max_lag + steps_per_batch - 1} versions old",
            "lower max_lag, or take one step per batch",
        )


def _look_up(kind: str, table: Mapping[str, Value], name: str) -> Value:
    if name not in table:
        raise ValueError(f"{kind} is {name!r}: it must be one of {', '.join(table)}")
    return table[name]


def _names(names: list[str]) -> str:
    return " and ".join(repr(name) for name in names)
