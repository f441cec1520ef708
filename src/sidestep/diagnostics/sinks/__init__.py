"""Where the numbers of a run go besides metrics.jsonl: one small file a service (`log.sinks`).

A sink is a copy for people to look at: reports and `--resume` read the run folder alone.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sidestep.diagnostics.events import EventFile
from sidestep.errors import UsageError
from sidestep.run_folder import TENSORBOARD_FOLDER

IDENTITIES_FILE = "sinks.json"


class Sink(Protocol):
    """One open run at a service."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of one step; NaN and infinity are allowed. Steps ascend."""

    def close(self, failed: bool = False) -> None:
        """Hand over what is left and end the run there. Safe to call twice."""


@dataclass(frozen=True, slots=True)
class SinkRun:
    """What a service is told about the run.

    identity: what `open` said the run is called there when it began; None for a new one.
    """

    run_dir: Path
    project: str
    config: Mapping[str, Any]
    identity: str | None

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name


def open_sinks(
    names: Sequence[str],
    run_dir: Path,
    *,
    project: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
) -> list[Sink]:
    """Start a run at every sink of `log.sinks`; with `resume_step` go on with the one it has.

    Raises UsageError naming sink and fix if its package is missing or it does not start; those that
    were open already are closed.
    """
    opened: list[Sink] = []
    identities = _read_identities(run_dir) if resume_step is not None else {}
    with ExitStack() as if_one_fails:
        for name in names:
            if name == "tensorboard":
                sink: Sink = EventFile(run_dir / TENSORBOARD_FOLDER, purge_step=resume_step)
            else:
                run = SinkRun(run_dir, project, config, identities.get(name))
                sink, identities[name] = _opener(name)(run)
            if_one_fails.push(close_on_exit(sink))
            opened.append(sink)
            if name != "tensorboard":
                _write_identities(run_dir, identities)
        if_one_fails.pop_all()
    return opened


def close_on_exit(sink: Sink) -> Callable[[type[BaseException] | None, object, object], None]:
    """For `ExitStack.push`: closes the sink, as failed after an error."""

    def close(error: type[BaseException] | None, *_: object) -> None:
        sink.close(failed=error is not None)

    return close


def _opener(name: str) -> Callable[[SinkRun], tuple[Sink, str]]:
    module = importlib.import_module(f"sidestep.diagnostics.sinks.{name}")
    opener: Callable[[SinkRun], tuple[Sink, str]] = module.open_sink
    return opener


def package(name: str, shown: str, extra: str) -> Any:
    """Import the package of a sink, or say which extra brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UsageError(
            f"{shown} is needed here (log.sinks): pip install 'sidestep[{extra}]'"
        ) from error


def did_not_start(name: str, error: Exception, fix: str) -> UsageError:
    """The error of a sink that refused to begin, in one line."""
    why = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"log.sinks: {name} did not start: {why}: {fix}, or leave {name} out")


def _read_identities(run_dir: Path) -> dict[str, str]:
    path = run_dir / IDENTITIES_FILE
    if not path.exists():
        return {}
    identities: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return identities


def _write_identities(run_dir: Path, identities: Mapping[str, str]) -> None:
    (run_dir / IDENTITIES_FILE).write_text(json.dumps(identities, indent=1), encoding="utf-8")
