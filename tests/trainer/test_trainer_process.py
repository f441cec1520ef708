"""`sidestep train` as a user runs it, in its own processes: overlap, Ctrl-C, resume, a killed
engine, bad input.
"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

COMMAND = [sys.executable, "-m", "sidestep.cli.main", "train"]
SMALL = ("rollout.groups_per_step=4", "engine.max_new_tokens=4", "train.eval_every=0")


def start(run_dir, *overrides, resume=False, model=None):
    command = [*COMMAND, "--run-dir", str(run_dir), *(["--resume"] if resume else [])]
    keys = [*overrides, *([f"model.path={model}"] if model else [])]
    command += [part for key in keys for part in ("--set", key)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_of(run_dir):
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_rows(process, run_dir, num_rows, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while len(rows_of(run_dir)) < num_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.05)


def engine_of(process):
    """The engine's process: the one child that runs the worker module."""
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [c for c in children if "sidestep.engines.worker" in " ".join(c.cmdline())]
    assert len(workers) == 1
    return workers[0]


def test_ctrl_c_writes_a_checkpoint_says_how_to_resume_and_resume_finishes(
    tiny_model_dir, tmp_path
):
    run_dir = tmp_path / "run"
    process = start(run_dir, "train.steps=5000", *SMALL, model=tiny_model_dir)
    wait_for_rows(process, run_dir, 3)
    engine = engine_of(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    last = errors.strip().splitlines()[-1]
    assert "interrupted after" in last
    assert f"sidestep train --run-dir {run_dir} --resume" in last
    assert not engine.is_running()
    steps_done = len(rows_of(run_dir))

    resumed = start(run_dir, f"train.steps={steps_done + 3}", resume=True)
    output, errors = resumed.communicate(timeout=90)
    assert resumed.returncode == 0, errors
    assert [row["step"] for row in rows_of(run_dir)] == list(range(steps_done + 3))
    assert max(row["lag/max"] for row in rows_of(run_dir)) <= 4
    assert (run_dir / "final" / "model.safetensors").exists()
    assert "report.html" in output


def test_b49_a_killed_engine_ends_the_run_within_seconds_and_is_named(tiny_model_dir, tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_dir, "train.steps=5000", *SMALL, model=tiny_model_dir)
    wait_for_rows(process, run_dir, 2)
    engine = engine_of(process)
    os.kill(engine.pid, signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - killed < 15
    assert process.returncode == 1, errors
    assert f"engine process {engine.pid} was killed by SIGKILL" in errors
    assert "Traceback" not in errors


def test_generation_and_training_really_overlap(tiny_model_dir, tmp_path):
    """The two sides together take longer than the wall clock: they run at the same time."""
    run_dir = tmp_path / "run"
    overrides = ("train.steps=40", "rollout.groups_per_step=16", "engine.max_new_tokens=12")
    process = start(run_dir, *overrides, "train.eval_every=0", model=tiny_model_dir)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    steady = rows_of(run_dir)[5:]
    both = sum(row["time/generate_s"] + row["time/train_s"] for row in steady)
    assert both > 1.15 * sum(row["time/step_s"] for row in steady)
    assert max(row["lag/mean"] for row in steady) > 0.5


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("raise RuntimeError('no such unit')", "RuntimeError"),
        ("return [1.0]", "1 reward"),
        ("return [float('nan')] * len(prompts)", "nan"),
    ],
)
def test_a_broken_reward_function_ends_the_run_and_names_the_prompt(
    tiny_model_dir, tmp_path, reward, message
):
    (tmp_path / "rewards.py").write_text(
        f"def grade(prompts, completions, **columns):\n    {reward}\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "say seven"}\n{"prompt": "say eight"}\n')
    process = start(
        tmp_path / "run",
        "task.kind=function",
        f"task.path={tmp_path / 'data.jsonl'}",
        f"task.function={tmp_path / 'rewards.py'}:grade",
        "task.eval_size=0",
        *SMALL,
        model=tiny_model_dir,
    )
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    last = errors.strip().splitlines()[-1]
    assert message in last
    assert "say seven" in last or "say eight" in last


def test_sigterm_to_the_whole_process_group_still_writes_a_checkpoint(tiny_model_dir, tmp_path):
    run_dir = tmp_path / "run"
    command = [*COMMAND, "--run-dir", str(run_dir), "--set", f"model.path={tiny_model_dir}"]
    for key in ("train.steps=5000", *SMALL):
        command += ["--set", key]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_rows(process, run_dir, 2)
    os.killpg(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert list((run_dir / "checkpoints").glob("step-*/state.json"))


def test_a_reward_function_that_hangs_ends_the_run_by_its_deadline(tiny_model_dir, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import time\ndef grade(prompts, completions, **columns):\n    time.sleep(3600)\n"
    )
    (tmp_path / "data.jsonl").write_text('{"prompt": "say seven"}\n')
    process = start(
        tmp_path / "run",
        "task.kind=function",
        f"task.path={tmp_path / 'data.jsonl'}",
        f"task.function={tmp_path / 'rewards.py'}:grade",
        "task.eval_size=0",
        "rollout.timeout_s=3",
        *SMALL,
        model=tiny_model_dir,
    )
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1, errors
    assert "rollout waited for the rewards of groups 0 to" in errors.strip().splitlines()[-1]


@pytest.mark.parametrize("key", ["rollout.max_lag=1", "seed=3", "rollout.group_size=2"])
def test_a_resume_refuses_what_it_cannot_change(tiny_model_dir, tmp_path, key):
    run_dir = tmp_path / "run"
    first = start(run_dir, "train.steps=1", *SMALL, model=tiny_model_dir)
    assert first.wait(timeout=90) == 0
    resumed = start(run_dir, key, "train.steps=3", resume=True)
    _, errors = resumed.communicate(timeout=90)
    assert resumed.returncode == 2, errors
    assert f"--set {key}: a resumed run keeps" in errors.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_quickstart_learns_within_three_minutes(tmp_path):
    started = time.monotonic()
    process = subprocess.run([*COMMAND, "--run-dir", str(tmp_path / "run")], timeout=600)
    assert process.returncode == 0
    rewards = [row["reward/mean"] for row in rows_of(tmp_path / "run")]
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-10:]) / 10 > 0.85
    assert time.monotonic() - started < 180
