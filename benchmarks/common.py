"""What the benchmark scripts share: start `sidestep train` as a user does, read its rows, keep
results with the machine's facts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sidestep.diagnostics.environment import environment_facts
from sidestep.diagnostics.runs import read_run

RESULTS = Path(__file__).parent / "results"


def train(recipe: str | None, *, threads: int = 1, run_dir: Path | None = None, **keys: Any) -> Any:
    """One run in its own process; `keys` are config keys with `__` for the dot. Returns the read
    run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = run_dir or Path(scratch) / "run"
        overrides = [
            f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in keys.items()
        ]
        command = [
            sys.executable,
            "-m",
            "sidestep.cli.main",
            "train",
            *([recipe] if recipe else []),
        ]
        command += [part for override in overrides for part in ("--set", override)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [*command, "--run-dir", str(folder)], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return read_run(folder)


def save_results(name: str, results: Any) -> Path:
    """results/<name>.json with the command and the machine's facts beside the numbers."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"results": results, "environment": environment_facts()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
