"""`sidestep.train`, the same run from Python."""

import asyncio
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sidestep
from sidestep.errors import RewardError
from sidestep.models.packaged import packaged_model_path

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


def test_the_final_folder_is_one_that_transformers_loads(tmp_path):
    config = sidestep.load_config(None, [*SMALL, "train.steps=1", "train.checkpoint_every=1"])
    run_dir = sidestep.train(config, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "final")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "final")
    asked = tokenizer("12+30=", return_tensors="pt")
    answer = model.generate(**asked, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(answer[0], skip_special_tokens=True).startswith("12+30=42")
    trained = load_file(run_dir / "checkpoints" / "step-00000001" / "weights.safetensors")
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded)
    start = dict(AutoModelForCausalLM.from_pretrained(packaged_model_path()).named_parameters())
    assert any(not torch.equal(loaded[name], start[name]) for name in loaded)


def test_b40_resumed_with_real_engines_in_exact_mode_is_bitwise_the_unbroken_run(tmp_path):
    exact = (*SMALL, "rollout.lag_mode=exact", "rollout.max_lag=2", "train.checkpoint_every=3")
    unbroken = sidestep.train(
        sidestep.load_config(None, [*exact, "train.steps=6"]), tmp_path / "unbroken"
    )
    broken = sidestep.train(
        sidestep.load_config(None, [*exact, "train.steps=3"]), tmp_path / "broken"
    )
    sidestep.train(sidestep.load_config(None, [*exact, "train.steps=6"]), broken, resume=True)
    states = [
        load_file(run_dir / "checkpoints" / "step-00000006" / name)
        for run_dir in (unbroken, broken)
        for name in ("weights.safetensors", "state.safetensors")
    ]
    for one, other in zip(states[:2], states[2:], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


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
