"""Finished cells made of numbers: what a run would have left, without the run."""

from pathlib import Path

from sidestep.diagnostics.runs import RunData
from sidestep.study.declaration import Study
from sidestep.study.grid import Cell
from sidestep.study.outcome import Outcome, Result, make_row

SAMPLES_A_STEP = 8  # 4 groups of 2


def make_study(**changes):
    values = {
        "name": "test",
        "seeds": [1, 2],
        "lags": [0, 8],
        "learning_rates": [0.1, 0.2],
        "methods": {"none": {}, "ours": {}},
    }
    return Study.model_validate(values | changes)


def make_result(
    cell,
    rewards,
    *,
    update_length=0.0,
    error=None,
    columns=None,
    planned=None,
    cpu_s=1.0,
    train_cpu_s=1.0,
):
    """update_length: mean per sample. cpu_s, train_cpu_s: of each step; None where not measured."""
    rows = [
        {"step": i, "reward/mean": reward, "time/cpu_s": cpu_s, "time/train_cpu_s": train_cpu_s}
        | {name: values[i] for name, values in (columns or {}).items()}
        for i, reward in enumerate(rewards)
    ]
    config = {
        "rollout": {"group_size": 2, "groups_per_step": 4, "max_lag": cell.lag},
        "train": {
            "steps": planned or len(rows),
            "learning_rate": cell.learning_rate,
            "skip_share": 0.0,
        },
    }
    run = RunData(Path("cell"), tuple(rows), (), "", config, {})
    total = update_length * SAMPLES_A_STEP * len(rows)
    return Result(cell, make_row(cell, run, Outcome(error, total)), run)


def make_results(curves, **keys):
    """curves: (method, lag, rate, seed) -> rewards, or (rewards, update length)."""
    results = {}
    for place, given in curves.items():
        rewards, length = given if isinstance(given, tuple) else (given, 0.0)
        cell = Cell("arithmetic", *place)
        results[cell] = make_result(cell, rewards, update_length=length, **keys)
    return results
