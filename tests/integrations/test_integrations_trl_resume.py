"""The control's state in the checkpoints of Hugging Face's Trainer."""

import json
import logging
import shutil

import pytest
from safetensors.torch import load_file
from trl_hosts import Records, same, text_trainer, train, weights

from sidestep import GradientControl
from sidestep.control import Alarm
from sidestep.errors import CheckpointError
from sidestep.integrations.huggingface import STATE_FILE, TENSOR_FILE
from sidestep.integrations.trl import SidestepCallback

SAVING = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
CONTROLS = [
    {"low": -0.5, "high": 0.9},
    {"reference": "ema", "low": -1.0, "high": 1.0, "strength": 0.5},
    {"reference": "displacement", "space": "update", "low": -1.0, "high": 1.0},
    {"low": "calibrate", "high": "calibrate", "calibrate_steps": 5},
    {"low": -1.0, "high": -1.0, "max_skips": 2},
    {"mode": "off"},
]


def make(control):
    return SidestepCallback(GradientControl(**control), alarm=Alarm(window=3, cosine_limit=0.1))


def lines(trainer):
    kept = ("align", "grad/", "alarm", "step")  # the trainer's loss forgets the window it was in
    return [
        {name: value for name, value in line.items() if name.startswith(kept)}
        for line in trainer.state.log_history
        if "loss" in line
    ]


@pytest.mark.parametrize("settings", CONTROLS, ids=str)
@pytest.mark.parametrize("logging_steps", [1, 2])
def test_resume_equals_the_unbroken_run(tiny_model_dir, tmp_path, settings, logging_steps):
    """From a folder that was moved; the log's window reaches over the break."""
    saving = SAVING | {"logging_steps": logging_steps}
    first = make(settings)
    unbroken = train(text_trainer(tiny_model_dir, tmp_path / "a", [first], **saving))
    checkpoint = shutil.move(tmp_path / "a" / "checkpoint-3", tmp_path / "elsewhere")
    second = make(settings)
    resumed = text_trainer(tiny_model_dir, tmp_path / "b", [second], **saving)
    train(resumed, resume_from_checkpoint=str(checkpoint))
    assert same(weights(unbroken), weights(resumed))
    assert lines(unbroken) == lines(resumed)
    mine, theirs = first.control.state_dict(), second.control.state_dict()
    assert same(mine.pop("snapshot"), theirs.pop("snapshot"))
    assert mine == theirs
    assert first._alarm.state_dict() == second._alarm.state_dict()


def test_the_files_are_safetensors_and_json(tiny_model_dir, tmp_path):
    callback = make(CONTROLS[0])
    trainer = train(text_trainer(tiny_model_dir, tmp_path, [callback], **SAVING))
    folder = tmp_path / "checkpoint-8"
    assert json.loads((folder / STATE_FILE).read_text())["control"]["step"] == 8
    assert load_file(folder / TENSOR_FILE).keys() == dict(trainer.model.named_parameters()).keys()
    ours = {path.name for path in folder.iterdir() if "sidestep" in path.name}
    assert ours == {STATE_FILE, TENSOR_FILE}


def test_a_checkpoint_without_our_files_says_so_once(tiny_model_dir, tmp_path, caplog):
    train(text_trainer(tiny_model_dir, tmp_path, **SAVING))
    callback = make(CONTROLS[0])
    records = Records(callback)
    trainer = text_trainer(tiny_model_dir, tmp_path, [callback, records], **SAVING)
    with caplog.at_level(logging.WARNING, logger="sidestep"):
        train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert caplog.text.count(STATE_FILE) == 1
    assert "without a reference" in caplog.text
    assert records.found[0].reason == "first step"
    assert len(records.found) == 5


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (STATE_FILE, "{", "cannot be read"),
        (STATE_FILE, "[1]", "cannot be read"),
        (STATE_FILE, '{"format": 99}', "format 99"),
        (TENSOR_FILE, "no tensors", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(tiny_model_dir, tmp_path, file, content, words):
    train(text_trainer(tiny_model_dir, tmp_path, [make(CONTROLS[0])], **SAVING))
    (tmp_path / "checkpoint-3" / file).write_text(content)
    trainer = text_trainer(tiny_model_dir, tmp_path, [make(CONTROLS[0])], **SAVING)
    with pytest.raises(CheckpointError, match=rf"checkpoint-3.*{STATE_FILE}.*{words}"):
        train(trainer, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_of_the_model_alone_has_none_of_ours(tiny_model_dir, tmp_path):
    settings = SAVING | {"save_only_model": True}
    train(text_trainer(tiny_model_dir, tmp_path, [make(CONTROLS[0])], **settings))
    assert not (tmp_path / "checkpoint-3" / STATE_FILE).exists()
