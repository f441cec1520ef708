"""The entry points: one run, and a map of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sidestep.control.simulate.descent import run_cells
from sidestep.control.simulate.lags import CAP
from sidestep.control.simulate.setting import (
    ALL_CONTROLS,
    CONTROLS,
    Cell,
    Setting,
    SimulationResult,
)

LAGS = (0, 8, 32)
LEARNING_RATES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)

_DEFAULT = Setting()
# More cells side by side are no faster: the arrays of a step leave the processor's cache.
_MOST_CELLS = 256
_MOST_BYTES = 256 * 2**20


def simulate(
    lag: int,
    lr: float,
    control: str = "none",
    *,
    steps: int = _DEFAULT.steps,
    dim: int = _DEFAULT.dim,
    noise: float = _DEFAULT.noise,
    seed: int = 0,
    optimizer: str = _DEFAULT.optimizer,
    momentum: float = _DEFAULT.momentum,
    lag_kind: str = _DEFAULT.lag_kind,
    high: float = _DEFAULT.high,
    max_skips: int = _DEFAULT.max_skips,
    memory: float = _DEFAULT.memory,
    spring: float = _DEFAULT.spring,
    trajectory: bool = False,
) -> SimulationResult:
    """Stale gradient descent on a noisy quadratic from theta = 1, with one control.

    theta_{t+1} = theta_t - lr * optimizer(control(H theta_{t-s_t} + noise_t)), H diagonal.

    lag: steps between the weights a gradient is taken at and the step that uses it; with random
        lags their mean.
    control: "none", "previous", "skip", "displacement", "half", "secant" or "spring".
    trajectory: keep the loss and the cosine of every step in the result.
    The rest: see Setting.

    The same arguments give the same bits on the same machine, alone or in a map. Raises ValueError
    whose text starts with "NAME=VALUE".
    """
    setting = Setting(
        steps=steps,
        dim=dim,
        noise=noise,
        optimizer=optimizer,
        momentum=momentum,
        lag_kind=lag_kind,
        high=high,
        max_skips=max_skips,
        memory=memory,
        spring=spring,
    )
    cell = Cell(lag, lr, control, seed)
    return run_cells([cell], setting, _ignore, trajectory=trajectory)[0]


def stability_map(
    lags: Sequence[int] = LAGS,
    lrs: Sequence[float] = LEARNING_RATES,
    controls: Sequence[str] = CONTROLS,
    *,
    seeds: Sequence[int] = (0,),
    progress: Callable[[int, int], None] | None = None,
    **setting: Any,
) -> list[SimulationResult]:
    """`simulate` for every combination, in the order lag, lr, control, seed (the last fastest).

    progress: called now and then with (steps done, steps of all cells).
    setting: steps, dim, noise, optimizer, momentum, lag_kind, high, max_skips, memory, spring.

    Raises ValueError whose text starts with "NAME=VALUE"; an empty or doubled axis is one.
    """
    common = Setting(**setting)
    for name, axis in (("lags", lags), ("lrs", lrs), ("controls", controls), ("seeds", seeds)):
        _require_axis(name, axis)
    cells = [Cell(*at) for at in _product(lags, lrs, controls, seeds)]
    done, total = 0, len(cells) * common.steps

    def advance(steps: int) -> None:
        nonlocal done
        done += steps
        if progress is not None:
            progress(done, total)

    results: dict[Cell, SimulationResult] = {}
    for chunk in _chunks(cells, common):
        results.update(zip(chunk, run_cells(chunk, common, advance), strict=True))
        advance(len(results) * common.steps - done)  # what diverged early is done as well
    return [results[cell] for cell in cells]


def _product(
    lags: Sequence[int], lrs: Sequence[float], controls: Sequence[str], seeds: Sequence[int]
) -> Iterator[tuple[int, float, str, int]]:
    for lag in lags:
        for lr in lrs:
            for control in controls:
                for seed in seeds:
                    yield lag, lr, control, seed


def _chunks(cells: Sequence[Cell], setting: Setting) -> Iterator[list[Cell]]:
    """The cells in portions that fit into memory, each sorted by control."""
    reach = max(cell.lag for cell in cells) * (1 if setting.lag_kind == "fixed" else CAP)
    slots = min(reach, setting.steps - 1) + 1
    cell_bytes = 8 * (slots * setting.dim + 2 * setting.steps)
    size = max(1, min(_MOST_CELLS, _MOST_BYTES // cell_bytes))
    for start in range(0, len(cells), size):
        yield sorted(cells[start : start + size], key=lambda cell: ALL_CONTROLS.index(cell.control))


def _require_axis(name: str, axis: Sequence[Any]) -> None:
    values = list(axis)
    if not values:
        raise ValueError(f"{name}={axis!r} is empty: give at least one value")
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={axis!r} names a value twice")


def _ignore(steps: int) -> None:
    """Nobody watches a single run."""
