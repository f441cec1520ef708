"""What ranks tell each other about their parameters, and what follows: pure functions of reports.

Reports are exchanged when something is new (first step, other parameters) or wrong on any rank, not
in every step. Every rank draws the same conclusion from them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sidestep.control.sharding import Held, Holdings

# Rows of sums that one exchange has place for, at first. It is agreed on beforehand, so that a rank
# which has nothing to say sends as much as the others.
FIRST_CAPACITY = 16


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of itself.

    held: by parameter name the ranks that hold this copy of it together, its shape, whether it is
        the rank's own, and whether it has a gradient.
    declared: the names in `local_parameters`.
    same: what has to be the same everywhere.
    problem: why this rank cannot go on; empty if it can.
    """

    rank: int
    held: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], bool, bool]]
    declared: tuple[str, ...]
    num_lists: int
    same: str
    problem: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(report: Mapping[str, Any]) -> Report:
        held = {
            name: (tuple(ranks), tuple(shape), own, has_gradient)
            for name, (ranks, shape, own, has_gradient) in report["held"].items()
        }
        return Report(**{**report, "held": held, "declared": tuple(report["declared"])})


def make_report(rank: int, holdings: Holdings, num_lists: int, same: str, problem: str) -> Report:
    held = {
        name: (_unit(one, rank), one.shape, one.own, one.has_gradient)
        for name, one in holdings.held.items()
    }
    return Report(rank, held, holdings.declared, num_lists, same, problem)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Who counts what, as agreed by all ranks.

    rank: this rank.
    known: what it had reported of itself: while that stays the same the agreement holds.
    counting: for every parameter that ranks have copies of, the ranks of the copy that counts.
    holders: how many ranks have it, and the first of them.
    capacity: how many rows of sums an exchange has place for.
    """

    rank: int
    known: object
    counting: Mapping[str, tuple[int, ...]]
    holders: Mapping[str, tuple[int, int]]
    capacity: int

    def counts(self, held: Held) -> bool:
        """Whether this rank counts its elements of a parameter."""
        copy_counts = held.own or self.counting[held.name] == _unit(held, self.rank)
        return held.counts and copy_counts

    def covers(self, holdings: Holdings, num_lists: int) -> bool:
        """Whether nothing has changed on this rank since the reports."""
        return num_lists <= self.capacity and _known(holdings) == self.known

    def presence(self, holdings: Holdings) -> float:
        """A number whose sum over ranks is 0 if, and practically only if, every parameter has a
        gradient on all of its holders or on none.
        """
        weighted = 0
        for name, held in holdings.held.items():
            if held.has_gradient and not held.own:
                num_holders, first = self.holders[name]
                weight = zlib.crc32(name.encode()) % 2**20 + 1
                weighted += weight * (num_holders - 1 if self.rank == first else -1)
        return float(weighted)  # exact: far below 2**53


def agree(reports: Sequence[Report], rank: int, holdings: Holdings, capacity: int) -> Agreement:
    """The agreement that follows from the reports of all ranks, in the order of ranks.

    The copy that counts is the first one with a gradient, or the first one if there is none.

    capacity: the present one; it only grows.
    """
    first: dict[str, tuple[int, ...]] = {}
    first_with_gradient: dict[str, tuple[int, ...]] = {}
    holders: dict[str, tuple[int, int]] = {}
    for report in reports:
        for name, (unit, _, own, has_gradient) in report.held.items():
            if own:
                continue
            first.setdefault(name, unit)
            if has_gradient:
                first_with_gradient.setdefault(name, unit)
            num_holders, first_holder = holders.get(name, (0, report.rank))
            holders[name] = num_holders + 1, first_holder
    num_lists = max(report.num_lists for report in reports)
    return Agreement(
        rank,
        _known(holdings),
        {**first, **first_with_gradient},
        holders,
        max(capacity, 1 << (num_lists - 1).bit_length() if num_lists else 1),
    )


def outside(holdings: Holdings, ranks: Sequence[int]) -> str | None:
    """Names a parameter that lies on ranks which are not asked; None if all are."""
    for held in holdings.held.values():
        if held.ranks is not None and not set(held.ranks) <= set(ranks):
            return (
                f"parameter {held.name!r} lies on ranks {list(held.ranks)}, and process_group has "
                f"only {list(ranks)}: give a group of all ranks that hold the model"
            )
    return None


def why_not(reports: Sequence[Report]) -> str | None:
    """Why the ranks cannot go on together, in the same words on all of them; None if they can."""
    problems = [(one.rank, one.problem) for one in reports if one.problem]
    if problems:
        rank, problem = problems[0]
        everywhere = all(one.problem == problem for one in reports)
        return problem if everywhere else f"{problem} (on rank {rank}; all ranks stop with it)"
    base = reports[0]
    for one in reports[1:]:
        if one.same != base.same:
            return (
                f"the ranks must have the same settings and steps: rank {base.rank} has "
                f"{_apart(base.same, one.same)}, rank {one.rank} {_apart(one.same, base.same)}"
            )
        if one.num_lists != base.num_lists:
            return (
                f"rank {base.rank} decides on {base.num_lists} scopes, rank {one.rank} on "
                f"{one.num_lists}: scopes must be the same on all ranks (use one for the model)"
            )
    return _mismatch(reports)


def _apart(text: str, other: str) -> str:
    """The parts of a comma-separated text that the other one does not have."""
    parts = other.split(", ")
    return ", ".join(part for part in text.split(", ") if part not in parts) or "nothing more"


def _mismatch(reports: Sequence[Report]) -> str | None:
    """Names a parameter whose copies cannot be copies of each other."""
    seen: dict[str, tuple[int, tuple[int, ...], bool]] = {}
    for report in reports:
        for name, (_, shape, own, _) in report.held.items():
            rank, first_shape, first_own = seen.setdefault(name, (report.rank, shape, own))
            if own != first_own:
                return (
                    f"parameter {name!r} is in local_parameters on one of ranks {rank} and "
                    f"{report.rank} and not on the other: give all ranks the same names"
                )
            if shape != first_shape and not own:
                return (
                    f"parameter {name!r} has shape {list(first_shape)} on rank {rank} and "
                    f"{list(shape)} on rank {report.rank}: these are no copies. If every rank has "
                    "its own, name it in local_parameters="
                )
    return None


def suspicions(reports: Sequence[Report]) -> list[str]:
    """What looks like a mistake and can be lived with, one line each."""
    notices = []
    with_gradient: dict[str, list[int]] = {}
    without: dict[str, list[int]] = {}
    for report in reports:
        for name, (_, _, own, has_gradient) in report.held.items():
            if not own:
                (with_gradient if has_gradient else without).setdefault(name, []).append(
                    report.rank
                )
    odd = [name for name in with_gradient if name in without]
    if odd:
        some, none = with_gradient[odd[0]], without[odd[0]]
        notices.append(
            f"parameter {odd[0]!r} has a gradient on ranks {some} and None on ranks {none}: it is "
            f"counted as rank {some[0]} has it. If every rank has its own, name it in "
            "local_parameters="
        )
    declared = {name for report in reports for name in report.declared}
    unknown = sorted(declared.difference(*(report.held for report in reports)))
    if unknown:
        notices.append(f"local_parameters: no rank trains a parameter named {unknown[0]!r}")
    return notices


def _unit(held: Held, rank: int) -> tuple[int, ...]:
    """The ranks that hold one copy together."""
    return (rank,) if held.ranks is None else held.ranks


def _known(holdings: Holdings) -> object:
    facts = [(one.name, one.shape, one.ranks, one.own) for one in holdings.held.values()]
    return facts, holdings.declared
