"""A cell over its seeds, for tables and pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from sidestep.control.simulate.setting import SimulationResult


@dataclass(frozen=True, slots=True)
class CellSummary:
    """Means over the seeds of one cell.

    loss: None if any seed diverged: a mean over the survivors would flatter.
    cosine: None if no seed has one.
    """

    lag: int
    lr: float
    control: str
    loss: float | None
    cosine: float | None
    skipped: float
    num_diverged: int
    num_seeds: int


def summarise(results: Iterable[SimulationResult]) -> list[CellSummary]:
    """One summary for each (lag, lr, control), in the order these come first."""
    cells: dict[tuple[int, float, str], list[SimulationResult]] = {}
    for result in results:
        cells.setdefault((result.lag, result.lr, result.control), []).append(result)
    return [_summary(*cell, members) for cell, members in cells.items()]


def _summary(lag: int, lr: float, control: str, members: list[SimulationResult]) -> CellSummary:
    losses = [member.loss for member in members if member.loss is not None]
    cosines = [member.cosine for member in members if member.cosine is not None]
    return CellSummary(
        lag=lag,
        lr=lr,
        control=control,
        loss=fmean(losses) if len(losses) == len(members) else None,
        cosine=fmean(cosines) if cosines else None,
        skipped=fmean(member.skipped for member in members),
        num_diverged=len(members) - len(losses),
        num_seeds=len(members),
    )
