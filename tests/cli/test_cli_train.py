"""What `sidestep train` hands to a run, and what it refuses before one starts."""

import re
from pathlib import Path

import pytest

from sidestep.config import RunConfig
from sidestep.config.loading import load_config
from sidestep.config.recipes import find_recipe
from sidestep.config.writing import to_toml
from sidestep.errors import EngineError, UsageError


def test_without_arguments_the_packaged_quickstart_runs_in_a_new_dated_folder(sidestep, fake_run):
    code, out, err = sidestep("train")
    ((config, run_dir, resume),) = fake_run.calls
    assert (code, err, resume) == (0, "", False)
    assert config == load_config(find_recipe("quickstart"))
    assert re.fullmatch(r"runs/quickstart-\d{8}-\d{6}", str(run_dir))
    assert out == ""  # no step, nothing to tell


def test_at_the_end_stands_what_the_run_came_to_and_where_it_is(sidestep, fake_run):
    fake_run.rows = [{"reward/mean": reward, "align/regime": "pass"} for reward in (0.25, 0.75)]
    fake_run.rows[0]["accuracy/eval_start"] = 0.5
    fake_run.rows[1]["accuracy/eval"] = 1.0
    code, out, err = sidestep("train", "quickstart", "--run-dir", "a", "--set", "train.steps=2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "2 of 2 steps, reward 0.25 \N{RIGHTWARDS ARROW} 0.75, "
        "held-out accuracy 0.50 \N{RIGHTWARDS ARROW} 1.00, 0 skipped",
        "run folder: a",
        "report: a/report.html",
    ]


def test_a_run_that_failed_tells_the_same_and_its_error_last(sidestep, fake_run):
    fake_run.rows = [{"reward/mean": 0.5, "alarm/level": "alarm", "alarm/reason": "x"}]
    fake_run.error = EngineError("the engine died")
    code, out, err = sidestep("train", "sync", "--run-dir", "a")
    assert code == 1
    assert "1 of 200 steps" in out and "alarm in 1 steps" in out and "report: a/" in out
    assert err.splitlines()[-1] == "the engine died"


def test_groups_that_teach_nothing_are_told(sidestep, fake_run):
    fake_run.rows = [{"reward/mean": 0.0, "groups/equal_reward_fraction": 1.0}]
    _, _, err = sidestep("train", "sync", "--run-dir", "a")
    assert "100% of the groups of the last tenth all rewards are equal" in err


@pytest.mark.parametrize(
    ("message", "overrides", "place"),
    [
        ("task.path 'no.jsonl': no such file", [], "mine.toml:3: "),
        ("task.path 'no.jsonl': no such file", ["task.path=no.jsonl"], "--set: "),
        ("model.path 'packaged': odd", [], ""),  # a default stands nowhere
        ("rows.jsonl:3: not JSON", [], ""),
    ],
)
def test_what_is_found_wrong_later_also_says_where_it_was_written(
    sidestep, fake_run, message, overrides, place
):
    Path("mine.toml").write_text("# mine\n[task]\npath = 'no.jsonl'\nkind = 'jsonl'\n")
    fake_run.error = UsageError(message)
    arguments = [part for key in overrides for part in ("--set", key)]
    code, _, err = sidestep("train", "mine.toml", *arguments)
    assert (code, err) == (2, f"{place}{message}\n")


def test_a_recipe_its_overrides_and_the_run_folder_reach_the_run(sidestep, fake_run):
    Path("mine.toml").write_text("seed = 5\n[train]\nsteps = 7\n")
    code, _, _ = sidestep("train", "mine.toml", "--set", "train.steps=9", "--run-dir", "out/a")
    ((config, run_dir, _),) = fake_run.calls
    assert (code, config.seed, config.train.steps, run_dir) == (0, 5, 9, Path("out/a"))


def test_the_default_run_folder_is_named_after_the_recipe(sidestep, fake_run):
    sidestep("train", "sync")
    assert fake_run.calls[0][1].name.startswith("sync-")


def test_warnings_come_before_the_run_and_name_their_key(sidestep, fake_run):
    code, _, err = sidestep("train", "naive-async")
    assert code == 0
    first, second = err.splitlines()
    assert first.startswith('warning: loss.policy = "ppo", loss.anchor = "recomputed", ')
    assert "always 1" in first and "(use anchor 'behaviour')" in first
    assert "stale samples are taken for fresh ones" in second


def test_a_combination_that_the_losses_call_an_error_is_refused(sidestep, fake_run):
    code, out, err = sidestep("train", "--set", "loss.correction=tis")
    assert (code, out, fake_run.calls) == (2, "", [])
    assert len(err.splitlines()) == 1
    assert "loss.correction" in err and "use correction 'none'" in err


def written_run(path="runs/a", **changes) -> Path:
    run_dir = Path(path)
    run_dir.mkdir(parents=True)
    config = load_config(None, [f"{key}={value}" for key, value in changes.items()])
    (run_dir / "config.toml").write_text(to_toml(config))
    return run_dir


def test_resume_takes_the_config_of_the_run_folder_and_overrides_on_top(sidestep, fake_run):
    run_dir = written_run(**{"train.steps": 33, "rollout.max_lag": 2})
    code, _, _ = sidestep("train", "--resume", "--run-dir", str(run_dir), "--set", "train.steps=44")
    expected = load_config(None, ["train.steps=44", "rollout.max_lag=2"])
    assert (code, fake_run.calls) == (0, [(expected, run_dir, True)])


def test_a_bad_key_in_a_resumed_config_is_refused_with_its_line(sidestep, fake_run):
    run_dir = written_run()
    (run_dir / "config.toml").write_text("[train]\nstepz = 1\n")
    code, _, err = sidestep("train", "--resume", "--run-dir", str(run_dir))
    assert (code, fake_run.calls) == (2, [])
    assert err == (
        "runs/a/config.toml:2: unknown config key 'train.stepz' (did you mean 'train.steps'?)\n"
    )


@pytest.mark.parametrize("trace", ["config.toml", "metrics.jsonl", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused_with_both_ways_out(sidestep, fake_run, trace):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a", trace).touch()
    code, _, err = sidestep("train", "--run-dir", "runs/a")
    assert (code, fake_run.calls) == (2, [])
    assert err == (
        "runs/a: holds a run already: go on with it by --resume, "
        "or give another folder as --run-dir\n"
    )


def test_a_folder_without_a_run_in_it_may_be_used(sidestep, fake_run):
    Path("out").mkdir()
    Path("out/notes.txt").touch()
    assert sidestep("train", "--run-dir", "out")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--resume"],
            "--resume needs --run-dir, the folder of the run to go on with: "
            "sidestep train --resume --run-dir runs/NAME",
        ),
        (
            ["sync", "--resume", "--run-dir", "runs/a"],
            "--resume takes its config from runs/a/config.toml: leave out the recipe 'sync' "
            "(single keys can be changed by --set)",
        ),
        (
            ["--resume", "--run-dir", "nowhere"],
            "nowhere: holds no run to resume (no config.toml): check --run-dir, "
            "or leave out --resume to start a run there",
        ),
        (
            ["--run-dir", "notes.txt/run"],
            "notes.txt/run: notes.txt is a file: give another folder as --run-dir",
        ),
        (
            ["snyc"],
            "snyc: no such recipe file (did you mean 'sync'? packaged recipes: "
            "math, naive-async-controlled, naive-async, quickstart, reasoning-mix, "
            "smollm2-chain-sum, sync)",
        ),
        (
            ["bad.toml"],
            "bad.toml:2: rollout.max_lag = -1: must be an integer of at least 0",
        ),
        (
            ["--set", "rollout.group_size=1"],
            '--set: rollout.group_size = 1 with loss.advantage = "grpo": a group of one has no '
            "advantage and nothing would be learned: set rollout.group_size to 2 or more",
        ),
    ],
)
def test_wrong_use_is_one_line_and_code_2_before_any_work(sidestep, fake_run, arguments, message):
    Path("notes.txt").touch()
    Path("bad.toml").write_text("[rollout]\nmax_lag = -1\n")
    assert sidestep("train", *arguments) == (2, "", message + "\n")
    assert fake_run.calls == []
    assert sorted(path.name for path in Path().iterdir()) == ["bad.toml", "notes.txt"]


def test_the_run_gets_a_complete_config(sidestep, fake_run):
    sidestep("train", "--set", "seed=1")
    assert isinstance(fake_run.calls[0][0], RunConfig)
    assert fake_run.calls[0][0].seed == 1
