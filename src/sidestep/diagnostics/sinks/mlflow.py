"""MLflow: the server of MLFLOW_TRACKING_URI, or a folder.

The small package (mlflow-skinny) has no database; a folder (file:///FOLDER) it writes only with
MLFLOW_ALLOW_FILE_STORE=true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestep.diagnostics.sinks import SinkRun, did_not_start, package

FIX = (
    "set MLFLOW_TRACKING_URI to a server, or to file:///FOLDER together with "
    "MLFLOW_ALLOW_FILE_STORE=true"
)


def open_sink(run: SinkRun) -> tuple[MlflowSink, str]:
    """Start a run in the experiment, or go on with the one of the same identity."""
    mlflow = package("mlflow", "MLflow", "mlflow")
    try:
        mlflow.set_experiment(run.project)
        opened = mlflow.start_run(run_id=run.identity, run_name=run.name)
        if run.identity is None:  # a parameter can be set once
            mlflow.log_params(_flat(run.config))
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise did_not_start("mlflow", error, FIX) from error
    identity = str(opened.info.run_id)
    return MlflowSink(mlflow, identity), identity


class MlflowSink:
    """One MLflow run. It is named in every call: the user's own code may have another one open."""

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow = mlflow
        self._run_id = run_id
        self._is_open = True

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._run_id)

    def close(self, failed: bool = False) -> None:
        if self._is_open:
            self._is_open = False
            self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Config keys by dotted name, as they are written in a recipe."""
    flat: dict[str, Any] = {}
    for section, value in config.items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{key}": inner for key, inner in value.items()}
        else:
            flat[section] = value
    return flat
