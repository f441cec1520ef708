"""`sidestep.train`, the same run from Python."""

import asyncio
import json
import subprocess
import sys

import pytest

import sidestep
from sidestep.errors import RewardError

SMALL = (
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "engine.max_new_tokens=3",
    "train.steps=2",
    "task.eval_size=4",
)


def test_a_run_works_inside_an_event_loop_as_in_a_notebook_and_leaves_a_report(tmp_path):
    config = sidestep.load_config(None, SMALL)

    async def cell():
        return sidestep.train(config, tmp_path / "run")

    run_dir = asyncio.run(cell())
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run_dir / "final" / "model.safetensors").is_file()
    assert "2 of 2 steps" in (run_dir / "report.html").read_text()


def test_a_run_that_fails_leaves_a_report_of_the_steps_it_made(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "n": n}) + "\n" for n in range(8))
    )
    # not of the first step, which the engine needs for two requests at once
    (tmp_path / "rewards.py").write_text(
        "calls = 0\n"
        "def reward(prompts, completions, **columns):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls > 5: raise RuntimeError('no more')\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    config = sidestep.load_config(
        None,
        [
            *SMALL,
            "train.steps=50",
            "task.kind=function",
            f"task.path={tmp_path / 'rows.jsonl'}",
            f"task.function={tmp_path / 'rewards.py'}:reward",
            "task.eval_size=0",
        ],
    )
    with pytest.raises(RewardError, match="no more"):
        sidestep.train(config, tmp_path / "run")
    assert "of 50 steps" in (tmp_path / "run" / "report.html").read_text()


def test_a_disk_that_takes_no_more_ends_the_run_with_one_line(tmp_path):
    code = (
        "import resource, sys\n"
        "from sidestep.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"  # weights are 570 kB
        "main()\n"
    )
    arguments = ["train", "--run-dir", str(tmp_path / "run"), "--set", "train.steps=2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"--run-dir {tmp_path / 'run'}: could not be written to the end")
    assert "Traceback" not in done.stderr


def test_the_public_names_are_listed():
    assert set(sidestep.__all__) <= set(dir(sidestep))
