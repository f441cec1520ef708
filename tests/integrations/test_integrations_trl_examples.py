"""The TRL examples, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("script", "steps"), [("trl_grpo.py", 4), ("trl_async_grpo.py", 4)])
def test_example_trains_and_shows_alignment(script, steps):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown = [line.split() for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [int(line[0]) for line in shown] == list(range(1, steps + 1))
    regimes = {"pass", "project", "skip", "undefined"}
    assert all(regimes & set(line) for line in shown)
    assert any("0." in word for line in shown for word in line[2:])


@pytest.mark.parametrize("script", ["trl_grpo.py", "trl_async_grpo.py"])
def test_example_stays_short(script):
    assert len((ROOT / "examples" / script).read_text().splitlines()) < 100
