"""Runs on disk, grouped and compared: who belongs together, what differs, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sidestep.diagnostics.compare import compare
from sidestep.diagnostics.compare_page import write_comparison
from sidestep.diagnostics.recorder import Recorder
from sidestep.errors import UsageError

CONFIG = """\
seed = {seed}

[task]
kind = "{task}"
eval_size = {eval_size}

[rollout]
max_lag = {max_lag}
group_size = 4
groups_per_step = {groups}

[control]
mode = "{mode}"
"""


@pytest.fixture
def write_run(tmp_path):
    def write(name, rewards, seed=0, **changes):
        folder = tmp_path / name
        settings = {
            "task": "arithmetic",
            "eval_size": 200,
            "max_lag": 8,
            "groups": 2,
            "mode": "observe",
        }
        folder.mkdir()
        (folder / "config.toml").write_text(CONFIG.format(seed=seed, **settings | changes))
        (folder / "env.json").write_text(json.dumps({"python": "3.11"}))
        with Recorder(folder, sinks=[]) as recorder:
            for step, reward in enumerate(rewards):
                row = {"reward/mean": reward, "time/elapsed_s": 2.0 * (step + 1)}
                recorder.step({"step": step, "align/cosine": 0.25, **row})
        return folder

    return write


def rising(last, num_steps=20):
    return [last * (step + 1) / num_steps for step in range(num_steps)]


def test_runs_that_differ_in_the_seed_alone_are_one_setting(write_run):
    found = compare([write_run(f"r{seed}", rising(0.8), seed) for seed in range(3)])
    assert [group.label for group in found.groups] == ["all runs"]
    assert found.differing == []
    [row] = found.rows
    assert (row.num_seeds, row.num_runs, row.difference) == (3, 3, None)
    assert row.reward_last.mean == pytest.approx(0.8 * 39 / 40)


def test_what_differs_is_found_in_the_configs_and_names_the_settings(write_run):
    runs = [
        write_run("a", rising(0.5), max_lag=8),
        write_run("b", rising(0.9), max_lag=8, mode="control"),
        write_run("c", rising(0.9), max_lag=0, eval_size=50),
    ]
    found = compare(runs)
    assert found.differing == ["task.eval_size", "rollout.max_lag", "control.mode"]
    labels = [group.label for group in found.groups]
    assert labels[0] == "eval_size=200, max_lag=8, mode=observe"
    assert labels[1].endswith("max_lag=8, mode=control")


def test_differences_are_taken_seed_by_seed(write_run):
    runs = []
    for seed, level in ((0, 0.2), (1, 0.5), (5, 0.8)):
        runs.append(write_run(f"a{seed}", [level] * 10, seed))
        runs.append(write_run(f"b{seed}", [level + 0.0625] * 10, seed, mode="control"))
    runs.append(write_run("alone", [0.0] * 10, 9, mode="control"))
    first, second = compare(runs).rows
    assert first.difference is None
    assert (second.num_seeds, second.difference.num) == (4, 3)
    assert second.difference.low == pytest.approx(0.0625)
    assert second.difference.high == pytest.approx(0.0625)
    assert second.reward_last.worst == 0.0


def test_two_runs_of_one_seed_count_as_one_seed(write_run):
    runs = [write_run("a", [0.25] * 10), write_run("b", [0.75] * 10), write_run("c", [0.5] * 10, 1)]
    [row] = compare(runs).rows
    assert (row.num_seeds, row.num_runs) == (2, 3)
    assert row.reward_last.mean == 0.5


def test_samples_and_seconds_are_counted_to_a_share_of_the_best_setting(write_run):
    slow = [0.0] * 6 + [1.0] * 14
    runs = [write_run("slow", slow), write_run("never", [0.1] * 20, max_lag=32)]
    found = compare(runs)
    assert found.target == pytest.approx(0.9)
    reaching, never = found.rows
    assert reaching.samples.mean == 7 * 4 * 2  # steps x members x groups
    assert reaching.seconds.mean == 14.0
    assert (reaching.num_reached, never.num_reached, never.samples) == (1, 0, None)


def test_a_collapse_is_counted(write_run):
    runs = [write_run("a", [0.8] * 10 + [0.1] * 10), write_run("b", [0.8] * 20, 1)]
    [row] = compare(runs).rows
    assert row.num_collapsed == 1


def test_runs_of_different_tasks_are_refused_by_name(write_run):
    runs = [write_run("a", [0.5]), write_run("b", [0.5], task="jsonl")]
    with pytest.raises(UsageError, match=r"a and .*b are of different tasks .task.kind = 'arith"):
        compare(runs)


def test_one_run_is_nothing_to_compare(write_run):
    with pytest.raises(UsageError, match=r"give two or more .* sidestep report RUN"):
        compare([write_run("a", [0.5])])


def test_a_folder_that_is_no_run_is_refused_by_name(write_run, tmp_path):
    run = write_run("a", [0.5])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no run folder at .*nowhere"):
        compare([run, tmp_path / "nowhere"])
    with pytest.raises(UsageError, match=r"empty is not a run folder: it has no config\.toml"):
        compare([run, tmp_path / "empty"])
    with pytest.raises(UsageError, match="given twice"):
        compare([run, tmp_path / "x" / ".." / "a"])
    with pytest.raises(UsageError, match="no finished step"):
        compare([run, write_run("young", [])])


def test_the_page_loads_nothing_and_escapes_what_runs_say(write_run, tmp_path):
    runs = [write_run("a", rising(0.5)), write_run("b", rising(0.9), mode="<script>")]
    path = tmp_path / "page.html"
    write_comparison(path, compare(runs))
    page = path.read_text()
    assert "mode=&lt;script&gt;" in page and "mode=<script>" not in page
    assert 'id="chart-reward"' in page and 'id="chart-cosine"' in page
    assert 'id="chart-ess"' not in page  # no run has it
    assert "src=" not in page.split("<body>")[1]


def test_comparing_loads_no_torch(write_run):
    runs = [write_run("a", rising(0.5)), write_run("b", rising(0.9), 1)]
    program = (
        "import sys; from pathlib import Path; from sidestep.cli.compare import run_comparison\n"
        f"run_comparison({[str(run) for run in runs]!r}, Path({str(runs[0] / 'c.html')!r}))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
