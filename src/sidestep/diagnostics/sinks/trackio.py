"""trackio: a local dashboard (`trackio show`), or a Hugging Face Space by TRACKIO_SPACE_ID."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from sidestep.diagnostics.sinks import SinkRun, did_not_start, package

FIX = "check TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL"


def open_sink(run: SinkRun) -> tuple[TrackioSink, str]:
    """Start a run, or go on with the one of the same name."""
    trackio = package("trackio", "trackio", "trackio")
    # It knows runs by their names, and folders of different places may share theirs.
    name = run.identity or f"{run.name}-{uuid.uuid4().hex[:6]}"
    try:
        trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="allow" if run.identity else "never",
            embed=False,
        )
    except (OSError, ValueError) as error:
        raise did_not_start("trackio", error, FIX) from error
    return TrackioSink(trackio), name


class TrackioSink:
    """The open trackio run of this process."""

    def __init__(self, trackio: Any) -> None:
        self._trackio = trackio
        self._is_open = True

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self, failed: bool = False) -> None:
        if self._is_open:
            self._is_open = False
            self._trackio.finish()
