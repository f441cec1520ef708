"""The steps of many cells at once: one numpy call moves them all. Cells never mix, and every cell
does the same float operations in the same order as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from sidestep.control.simulate.arrays import BoolArray, FloatArray, IntArray, Shrinking, dots
from sidestep.control.simulate.controls import MAKERS as CONTROL_MAKERS
from sidestep.control.simulate.controls import Control, Seen
from sidestep.control.simulate.lags import draw_lags
from sidestep.control.simulate.optimizers import MAKERS as OPTIMIZER_MAKERS
from sidestep.control.simulate.optimizers import unless_skipped
from sidestep.control.simulate.setting import Cell, Setting, SimulationResult

DIVERGED = 1e8  # a loss above it never comes back
LAST_LOSSES = 200
LAST_COSINES = 50  # of a run that diverged
_EPSILON = 1e-12  # in the cosine's denominator
_REPORT_EVERY = 20  # steps


def run_cells(
    cells: Sequence[Cell],
    setting: Setting,
    advance: Callable[[int], None],
    *,
    trajectory: bool = False,
) -> list[SimulationResult]:
    """Run the cells side by side; they must be sorted by control.

    advance: called now and then with the number of steps (cells x steps) done since.
    """
    descent = _Descent(cells, setting)
    with np.errstate(over="ignore", invalid="ignore"):  # a cell may run off within one step
        for step in range(setting.steps):
            if descent.is_over:
                break
            descent.step(step)
            if (step + 1) % _REPORT_EVERY == 0:
                advance(_REPORT_EVERY * len(cells))
    return [descent.result(number, cell, trajectory) for number, cell in enumerate(cells)]


@dataclass
class _Running(Shrinking):
    """The cells that still run, one row each."""

    number_N: IntArray  # which cell
    lr_N1: FloatArray
    source_N: IntArray  # which row of the lags
    noise_N: IntArray  # which noise
    theta_ND: FloatArray
    history_NHD: FloatArray  # theta of the last H steps; step t is in slot t % H
    gradient_ND: FloatArray  # of the step before, as the three below
    square_N: FloatArray
    behaviour_ND: FloatArray


class _Descent:
    def __init__(self, cells: Sequence[Cell], setting: Setting) -> None:
        n, dim, steps = len(cells), setting.dim, setting.steps
        self._setting = setting
        self._curvature_D = setting.curvature_D
        sources = list(dict.fromkeys((cell.lag, cell.seed) for cell in cells))
        seeds = list(dict.fromkeys(cell.seed for cell in cells))
        self._noises = [np.random.default_rng(seed) for seed in seeds]
        self._lags_KT = np.stack(
            [draw_lags(setting.lag_kind, lag, steps, seed) for lag, seed in sources]
        )
        # Before step 0 the weights were those of step 0, so no lag reaches further than the run.
        slots = min(int(self._lags_KT.max()), steps - 1) + 1
        self._cells = _Running(
            number_N=np.arange(n),
            lr_N1=np.array([[cell.lr] for cell in cells]),
            source_N=np.array([sources.index((cell.lag, cell.seed)) for cell in cells]),
            noise_N=np.array([seeds.index(cell.seed) for cell in cells]),
            theta_ND=np.ones((n, dim)),
            history_NHD=np.ones((n, slots, dim)),
            gradient_ND=np.zeros((n, dim)),
            square_N=np.zeros(n),
            behaviour_ND=np.ones((n, dim)),
        )
        self._optimizer = OPTIMIZER_MAKERS[setting.optimizer](setting, (n, dim))
        self._controls: list[tuple[slice, Control]] = []
        for control, group in groupby(cells, key=attrgetter("control")):
            start = self._controls[-1][0].stop if self._controls else 0
            rows = slice(start, start + len(list(group)))
            self._controls.append((rows, CONTROL_MAKERS[control](setting, rows.stop - rows.start)))
        self._losses_CT = np.full((n, steps), np.nan)
        self._cosines_CT = np.full((n, steps), np.nan)
        self._num_steps_C = np.full(n, steps)
        self._skipped_C = np.zeros(n, dtype=np.int64)
        self._has_diverged_C = np.zeros(n, dtype=np.bool_)

    @property
    def is_over(self) -> bool:
        """Every cell has diverged."""
        return self._cells.number_N.size == 0

    def step(self, step: int) -> None:
        """One step of every cell that still runs."""
        cells = self._cells
        behaviour_ND = self._behaviour(step)
        gradient_ND = self._curvature_D * behaviour_ND + self._noise()
        square_N = dots(gradient_ND, gradient_ND)
        applied_ND, pulled_ND, skip_N = gradient_ND, None, None
        if step > 0:
            dot_N = dots(gradient_ND, cells.gradient_ND)
            cosine_N = dot_N / (np.sqrt(square_N) * np.sqrt(cells.square_N) + _EPSILON)
            self._cosines_CT[cells.number_N, step] = cosine_N
            seen = Seen(
                theta_ND=cells.theta_ND,
                gradient_ND=gradient_ND,
                previous_ND=cells.gradient_ND,
                behaviour_ND=behaviour_ND,
                behaviour_before_ND=cells.behaviour_ND,
                dot_N=dot_N,
                previous_square_N=cells.square_N,
                cosine_N=cosine_N,
            )
            applied_ND, pulled_ND, skip_N = self._apply_controls(seen)
        cells.gradient_ND, cells.square_N = gradient_ND, square_N
        cells.behaviour_ND = behaviour_ND
        direction_ND = self._optimizer.direction(applied_ND, skip_N)
        new_ND = cells.theta_ND - cells.lr_N1 * direction_ND
        if pulled_ND is not None:
            new_ND -= pulled_ND
        cells.theta_ND = unless_skipped(new_ND, cells.theta_ND, skip_N)
        cells.history_NHD[:, (step + 1) % cells.history_NHD.shape[1]] = cells.theta_ND
        if skip_N is not None:
            self._skipped_C[cells.number_N] += skip_N
        self._note_losses(step)

    def _behaviour(self, step: int) -> FloatArray:
        """The weights whose gradient each cell gets: those of its lag's number of steps ago."""
        cells = self._cells
        source_step_N = np.maximum(step - self._lags_KT[:, step], 0)[cells.source_N]
        slot_N = source_step_N % cells.history_NHD.shape[1]
        behaviour_ND: FloatArray = cells.history_NHD[np.arange(slot_N.size), slot_N]
        return behaviour_ND

    def _noise(self) -> FloatArray:
        """One draw for each seed, shared by its cells."""
        dim, noise = self._setting.dim, self._setting.noise
        drawn = np.stack([rng.standard_normal(dim) for rng in self._noises])
        noise_ND: FloatArray = (noise * drawn / np.sqrt(dim))[self._cells.noise_N]
        return noise_ND

    def _apply_controls(self, seen: Seen) -> tuple[FloatArray, FloatArray | None, BoolArray | None]:
        """The gradients to step with, what steps are pulled back by, and which are skipped."""
        applied_ND = np.empty_like(seen.gradient_ND)
        pulled_ND: FloatArray | None = None
        skip_N: BoolArray | None = None
        for rows, control in self._controls:
            seen_here = seen.rows(rows)
            applied_ND[rows], skips = control.applied(seen_here)
            pulled = control.pulled(seen_here)
            if pulled is not None:
                pulled_ND = np.zeros_like(applied_ND) if pulled_ND is None else pulled_ND
                pulled_ND[rows] = pulled
            if skips is not None:
                skip_N = np.zeros(len(applied_ND), dtype=np.bool_) if skip_N is None else skip_N
                skip_N[rows] = skips
        return applied_ND, pulled_ND, skip_N

    def _note_losses(self, step: int) -> None:
        cells = self._cells
        losses_N = 0.5 * (self._curvature_D * cells.theta_ND * cells.theta_ND).sum(axis=1)
        self._losses_CT[cells.number_N, step] = losses_N
        kept_N = losses_N <= DIVERGED  # False for NaN
        if kept_N.all():
            return
        gone = cells.number_N[~kept_N]
        self._has_diverged_C[gone] = True
        self._num_steps_C[gone] = step + 1
        self._drop(kept_N)

    def _drop(self, kept_N: BoolArray) -> None:
        self._cells.keep(kept_N)
        self._optimizer.keep(kept_N)
        controls: list[tuple[slice, Control]] = []
        start = 0
        for rows, control in self._controls:
            control.keep(kept_N[rows])
            stop = start + int(kept_N[rows].sum())
            if stop > start:
                controls.append((slice(start, stop), control))
            start = stop
        self._controls = controls

    def result(self, number: int, cell: Cell, trajectory: bool) -> SimulationResult:
        """What a cell did, after the last step."""
        num_steps = int(self._num_steps_C[number])
        has_diverged = bool(self._has_diverged_C[number])
        losses = self._losses_CT[number, :num_steps]
        cosines = self._cosines_CT[number, 1:num_steps]
        counted = cosines[-LAST_COSINES:] if has_diverged else cosines
        return SimulationResult(
            lag=cell.lag,
            lr=cell.lr,
            control=cell.control,
            seed=cell.seed,
            loss=None if has_diverged else float(np.mean(losses[-LAST_LOSSES:])),
            cosine=float(np.mean(counted)) if counted.size else None,
            skipped=int(self._skipped_C[number]),
            losses=tuple(losses.tolist()) if trajectory else None,
            cosines=tuple(cosines.tolist()) if trajectory else None,
        )
