"""Weights & Biases. `WANDB_MODE=offline` writes under the run folder, for `wandb sync` later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestep.diagnostics.sinks import SinkRun, did_not_start, package

FIX = "log in with `wandb login`, or set WANDB_MODE=offline"


def open_sink(run: SinkRun) -> tuple[WandbSink, str]:
    """Start a run, or go on with the one of the same identity."""
    wandb = package("wandb", "W&B", "wandb")
    try:
        opened = wandb.init(
            project=run.project,
            name=run.name,
            id=run.identity,
            resume="allow" if run.identity else None,
            dir=str(run.run_dir),
            config=dict(run.config),
            # Ours is the terminal: the live view of the run is on it.
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.errors.Error as error:
        raise did_not_start("wandb", error, FIX) from error
    # Its own steps never go back; after a resume from a checkpoint ours do.
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")
    return WandbSink(opened), str(opened.id)


class WandbSink:
    """An open W&B run. The column `step` has our steps; those a resume redoes are there twice."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
