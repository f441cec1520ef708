import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sidestep.diagnostics.recorder import Recorder

CONFIG = """\
seed = 7

[rollout]
max_lag = 4

[train]
steps = {steps}

[control]
low = 0.1
high = 0.6
"""

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write a whole run folder: make_run(rows, groups, steps=planned steps, config=TOML text)."""

    def make(
        rows: Sequence[Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]] = (),
        *,
        steps: int = 100,
        config: str | None = None,
    ) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.toml").write_text(config or CONFIG.format(steps=steps))
        (folder / "env.json").write_text(
            json.dumps({"python": "3.11.7", "packages": {"torch": "2"}})
        )
        with Recorder(folder) as recorder:
            for step, row in enumerate(rows):
                recorder.step({"step": step, **row})
            recorder.groups(groups)
        return folder

    return make


@pytest.fixture
def group_row() -> Callable[..., dict[str, Any]]:
    """A row of groups.jsonl with the given keys replaced."""

    def row(**changes: Any) -> dict[str, Any]:
        return {
            "step": 0,
            "index": 0,
            "prompt_index": 0,
            "prompt": "1+1=",
            "prompt_tokens": 5,
            "rewards": [1.0, 0.0],
            "lengths": [2, 2],
            "oldest_version": 0,
            "newest_version": 0,
            "completions": ["2", "3"],
            "dropped": None,
        } | changes

    return row
