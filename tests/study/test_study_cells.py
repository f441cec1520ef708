"""Real cells: a small random model, the real loops, the real worker process."""

import json

import pytest
from study_support import make_study

from sidestep.study.grid import Cell, configure, make_cells
from sidestep.study.outcome import OUTCOME_FILE, is_finished, read_result, reproducible
from sidestep.study.pool import cell_folder, run_cells
from sidestep.study.worker import run_cell

CONFIG = {
    "engine": {"max_new_tokens": 4},
    "rollout": {"group_size": 4, "groups_per_step": 3},
    "train": {"steps": 5, "eval_every": 0},
    "loss": {"anchor": "recomputed"},
    "control": {"mode": "observe"},
}


@pytest.fixture
def task_file(tmp_path):
    """Half of what the model says begins with a digit or not: rewards differ within a group."""
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(6)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "vowels.py").write_text(
        "def share(prompts, completions, **_):\n"
        "    return [sum(c in 'aeiou' for c in t) / max(1, len(t)) for t in completions]\n"
    )
    return file


@pytest.fixture
def study(tiny_model_dir, task_file):
    function = f"{task_file.parent / 'vowels.py'}:share"
    task = {"kind": "function", "path": str(task_file), "function": function, "eval_size": 2}
    return make_study(
        seeds=[1],
        lags=[0, 2],
        learning_rates=[0.01],
        config=CONFIG | {"model": {"path": str(tiny_model_dir)}, "task": task},
        methods={
            "none": {},
            "ours": {
                "lags": [2],
                "config": {"control": {"mode": "control", "low": 0.0, "high": 0.05}},
            },
            "blind": {"lags": [2], "match": "skip_share", "of": "ours"},
        },
    )


def run_here(study, cell, folder, rows=None):
    """In this process: the worker's own function."""
    config = configure(cell, study, rows or {})
    run_cell(config.model_dump(mode="json"), folder)
    return read_result(cell, folder)


def test_running_a_cell_again_gives_its_row_bit_by_bit_in_another_process_too(study, tmp_path):
    cells = [cell for cell in make_cells(study) if cell.method != "blind"]
    out = tmp_path / "out"
    run_cells(study, cells, out, num_workers=1, show=lambda *_: None)
    for cell in cells:
        there = read_result(cell, cell_folder(out, cell))
        # In reverse order and in one process: what ran before must not matter.
        here = run_here(study, cell, tmp_path / "again" / cell.id)
        assert reproducible(here.row) == reproducible(there.row)
        assert here.rewards == there.rewards
    rewards = [value for value in here.rewards if value is not None]
    assert len(set(rewards)) > 1  # it is no run of zeros that is equal to itself
    assert 0.0 < here.row["train_cpu_s"] * here.row["steps"] < here.row["cpu_s"]


def test_the_update_length_is_how_far_the_weights_moved(study, tmp_path, tiny_model_dir):
    """One step: the length of the path is the distance between start and end."""
    from safetensors.torch import load_file

    one_step = study.model_copy(
        update={"config": study.config | {"train": {"steps": 1, "eval_every": 0}}}
    )
    cell = Cell("arithmetic", "none", 0, 0.01, 1)
    from sidestep.build import train

    config = configure(cell, one_step, {})
    result = run_here(one_step, cell, tmp_path / "cell")
    final = load_file(train(config, tmp_path / "whole") / "final" / "model.safetensors")
    start = load_file(tiny_model_dir / "model.safetensors")
    squares = sum((final[name].double() - start[name].double()).square().sum() for name in final)
    samples = 3 * 4
    assert result.row["update_length"] == pytest.approx(float(squares.sqrt()) / samples, rel=1e-6)


def test_random_skips_follow_the_share_of_the_method_and_leave_the_weights(study, tmp_path):
    always = study.model_copy(update={"methods": study.methods | {"blind": study.methods["blind"]}})
    cell = Cell("arithmetic", "blind", 2, 0.01, 1)
    ours = cell.at("ours")
    result = run_here(always, cell, tmp_path / "c", {ours: {"skip_share": 1.0}})
    assert (result.row["skip_share"], result.row["update_length"]) == (1.0, 0.0)
    assert set(result.run.column("align/reason")) == {"random (train.skip_share)"}
    assert set(result.run.column("version")) == {0}


def test_a_run_that_fails_is_a_finished_cell_with_its_reason(study, tmp_path):
    """A learning rate that makes the weights infinite: the run ends with an error, a result."""
    cell = Cell("arithmetic", "none", 0, 1e30, 1)
    result = run_here(study, cell, tmp_path / "cell")
    assert "not a finite number" in result.row["error"] or "not finite" in result.row["error"]
    assert result.row["reward_last"] == 0.0
    assert result.row["collapse_step"] == len(result.rewards)


def test_what_a_cut_short_run_left_is_thrown_away_and_a_finished_cell_is_small(study, tmp_path):
    folder = tmp_path / "cell"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    (folder / "config.toml").write_text("seed = 9\n")
    run_here(study, Cell("arithmetic", "none", 0, 0.01, 1), folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        ".lock",
        OUTCOME_FILE,
        "config.toml",
        "env.json",
        "groups.jsonl",
        "metrics.jsonl",
    ]
    assert is_finished(folder)
