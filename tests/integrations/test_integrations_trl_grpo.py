"""TRL's GRPOTrainer, really run on the tiny model."""

import json

import pytest
import torch
from trl_hosts import (
    Probe,
    Records,
    assert_moved_by,
    assert_projected_as_promised,
    grpo_trainer,
    same,
    train,
    weights,
)

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback

ACTING = {"low": 0.0, "high": 0.95}


def host_log(trainer):
    """What the trainer itself logs, but for times."""
    own = ("loss", "grad_norm", "learning_rate", "reward", "entropy", "num_tokens")
    return [{k: line[k] for k in own if k in line} for line in trainer.state.log_history]


def test_observe_is_bitwise_the_run_without_the_callback(tiny_model_dir, tmp_path):
    bare = train(grpo_trainer(tiny_model_dir, tmp_path / "bare"))
    callback = SidestepCallback(GradientControl(mode="observe", **ACTING))
    seen = train(grpo_trainer(tiny_model_dir, tmp_path / "seen", [callback]))
    assert same(weights(bare), weights(seen))
    assert host_log(bare) == host_log(seen)
    measured = [line for line in seen.state.log_history if "align/cosine" in line]
    assert len(measured) == 19  # the first step has nothing to compare with


def test_b16_control_projects_p_grad_as_promised_and_the_weights_move_so(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    trainer = grpo_trainer(tiny_model_dir, tmp_path, [callback, records, probe])
    train(trainer)
    assert records.regimes.count("project") >= 3
    assert_projected_as_promised(records.found, probe)
    assert_moved_by(probe)
    assert [record.step for record in records.found] == list(range(20))


def test_b19_one_record_per_optimizer_step_with_accumulation(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    settings = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4, "max_steps": 5}
    train(grpo_trainer(tiny_model_dir, tmp_path, [callback, records, probe], **settings))
    assert [record.step for record in records.found] == list(range(5))
    assert_projected_as_promised(records.found, probe)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_iterations": 2}, [0, 0, 2, 2, 4, 4]),
        ({"steps_per_generation": 3}, [0, 0, 0, 3, 3, 3]),
        ({"gradient_accumulation_steps": 2, "num_iterations": 2}, [0, 0, 2, 2, 4, 4]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [None] * 6),
        ({}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_steps_on_one_rollout_batch_are_told_apart(tiny_model_dir, tmp_path, settings, expected):
    noted, sampled = [], []

    class Watch(SidestepCallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)
            note = self.handle.note
            self.handle.note = lambda **facts: (noted.append(facts), note(**facts))

    callback = Watch(GradientControl(mode="observe"))
    records = Records(callback)
    settings = {"max_steps": 6, **settings}
    trainer = grpo_trainer(tiny_model_dir, tmp_path, [callback, records], **settings)
    generate = trainer._generate_and_score_completions

    def generate_and_say(inputs):
        sampled.append(trainer.state.global_step)
        return generate(inputs)

    trainer._generate_and_score_completions = generate_and_say
    train(trainer)
    assert [facts["batch"] for facts in noted] == expected
    if None not in expected:
        assert sampled == sorted(set(expected))  # when TRL really sampled
        assert [facts["lag"] for facts in noted] == [i - e for i, e in enumerate(expected)]
    within = [record.cosine_within_batch is not None for record in records.found]
    repeated = [i > 0 and e is not None and e == expected[i - 1] for i, e in enumerate(expected)]
    assert within == repeated


def test_checkpoint_and_resume_equal_the_unbroken_run(tiny_model_dir, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}

    def run(folder, **arguments):
        callback = SidestepCallback(GradientControl(**ACTING))
        trainer = grpo_trainer(tiny_model_dir, tmp_path / folder, [callback], **settings)
        return train(trainer, **arguments), callback

    unbroken, first = run("unbroken")
    resumed, second = run(
        "resumed", resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-4")
    )
    assert same(weights(unbroken), weights(resumed))
    assert first.last == second.last
    mine, theirs = first.control.state_dict(), second.control.state_dict()
    assert same(mine.pop("snapshot"), theirs.pop("snapshot"))
    assert mine == theirs
    align = [
        [{k: v for k, v in line.items() if k.startswith(("align", "grad/", "alarm"))} for line in h]
        for h in (unbroken.state.log_history, resumed.state.log_history)
    ]
    assert align[0] == align[1]


def test_without_its_reference_a_resume_differs(tiny_model_dir, tmp_path):
    """That the comparison above can fail."""
    settings = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    make = {"low": -1.0, "high": 1.0, "strength": 1.0}
    callback = SidestepCallback(GradientControl(**make))
    unbroken = train(grpo_trainer(tiny_model_dir, tmp_path / "a", [callback], **settings))
    checkpoint = tmp_path / "a" / "checkpoint-4"
    (checkpoint / "sidestep_control.json").unlink()
    callback = SidestepCallback(GradientControl(**make))
    trainer = grpo_trainer(tiny_model_dir, tmp_path / "b", [callback], **settings)
    train(trainer, resume_from_checkpoint=str(checkpoint))
    assert not same(weights(unbroken), weights(trainer))


def test_lora_has_only_the_adapter_in_the_norm(tiny_model_dir, tmp_path):
    from peft import LoraConfig

    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    trainer = grpo_trainer(
        tiny_model_dir,
        tmp_path,
        [callback, records, probe],
        max_steps=6,
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
    )
    base = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    train(trainer)
    assert all("lora_" in name for name in callback.control.state_dict()["snapshot"])
    assert_projected_as_promised(records.found, probe)
    assert all(torch.equal(w, trainer.model.get_parameter(n)) for n, w in base.items())


def test_bf16_autocast_is_projected_as_promised(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    train(
        grpo_trainer(tiny_model_dir, tmp_path, [callback, records, probe], bf16=True, max_steps=8)
    )
    assert "project" in records.regimes
    assert_projected_as_promised(records.found, probe)


def test_values_are_in_the_line_of_their_step(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ACTING))
    records = Records(callback)
    trainer = train(grpo_trainer(tiny_model_dir, tmp_path, [callback, records], max_steps=6))
    lines = [line for line in trainer.state.log_history if "loss" in line]
    for line, record in zip(lines, records.found, strict=True):
        assert line["step"] == record.step + 1
        assert line.get("align/cosine") == record.cosine
        assert line["align/regime"] == record.regime
        assert line["align/reason"] == record.reason
        assert line["align/skipped"] == float(record.regime == "skip")
        assert line["grad/norm_raw"] == record.norm_gradient
        assert line["alarm/level"] == "ok"
    json.dumps(lines)
