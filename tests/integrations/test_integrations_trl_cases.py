"""Cases B10 to B21 (shared/cases.md) in the loop of Hugging Face's Trainer.

B16, B19 and B22 are in the other files. B23 wants fp16, which Accelerate refuses on a CPU; B24
wants FSDP2, whose settings it ignores there.
"""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl_hosts import (
    SILENT,
    Probe,
    Records,
    assert_projected_as_promised,
    product,
    text_trainer,
    train,
)

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback

ALWAYS_PROJECT = {"low": -1.0, "high": 1.0}


class Toy(nn.Module):
    """Two layers, each used by the rows that say so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, use_second):
        hidden = torch.tanh(self.first(x))
        if bool(use_second.all()):
            hidden = hidden + self.second(x)
        return {"loss": (hidden - 1).square().mean()}


def toy_trainer(folder, callbacks, uses, model=None, **settings):
    """One row a step, in order; uses: whether the second layer is used in it."""
    torch.manual_seed(4)
    rows = [{"x": torch.randn(4), "use_second": torch.tensor(use)} for use in uses]
    settings = {
        "per_device_train_batch_size": 1,
        "max_steps": len(uses),
        "learning_rate": 0.1,
        "max_grad_norm": 100.0,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    } | settings
    return Trainer(
        model or Toy(),
        args=TrainingArguments(output_dir=str(folder), **(SILENT | settings)),
        train_dataset=rows,
        callbacks=callbacks,
    )


def test_b10_a_gradient_of_none_stays_none_and_the_snapshot_lines_up(tmp_path):
    callback = SidestepCallback(GradientControl(**ALWAYS_PROJECT))
    records, probe = Records(callback), Probe()
    uses = [True, False, True, True]
    train(toy_trainer(tmp_path, [callback, records, probe], uses, weight_decay=0.5))
    assert probe.raw[1]["second.weight"] is None
    assert probe.applied[1]["second.weight"] is None
    assert torch.equal(probe.before[1]["second.weight"], probe.after[1]["second.weight"])
    assert_projected_as_promised(records.found, probe)
    for before, now, record in zip(probe.raw, probe.raw[1:], records.found[1:], strict=False):
        expected = product(now, before) / (product(now, now) * product(before, before)) ** 0.5
        assert record.cosine == pytest.approx(expected, abs=1e-6)


def test_b11_a_layer_that_starts_to_train_is_left_out_of_the_comparison(tmp_path, caplog):
    class Thaw(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                model.second.requires_grad_(True)

    model = Toy()
    callback = SidestepCallback(GradientControl(**ALWAYS_PROJECT))
    records = Records(callback)
    trainer = toy_trainer(tmp_path, [callback, records, Thaw()], [True] * 4, model)
    trainer.create_optimizer()  # with both layers in it
    model.second.requires_grad_(False)
    train(trainer)
    assert [record.cosine is None for record in records.found] == [True, False, False, False]
    assert records.found[2].reason.endswith("(parameter set changed)")
    assert caplog.text.count("the set of trained parameters changed") == 1


def test_b18_lora_whose_second_factor_is_zero(tiny_model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model = get_peft_model(base, LoraConfig(r=1, target_modules=["q_proj"]))
    callback = SidestepCallback(GradientControl(**ALWAYS_PROJECT))
    records, probe = Records(callback), Probe()
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records, probe], model))
    first = probe.raw[0]
    assert all(not grad.any() for name, grad in first.items() if "lora_A" in name)
    assert all(record.norm_raw is not None for record in records.found)
    assert all(record.cosine is not None for record in records.found[1:])
    # The frozen base is not in the norm.
    assert records.found[0].norm_raw == pytest.approx(product(first, first) ** 0.5, rel=1e-6)
    assert_projected_as_promised(records.found, probe)


def test_b21_gradients_that_are_all_none_are_refused_loudly(tmp_path):
    class Lose(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            for parameter in model.parameters():
                parameter.grad = None

    trainer = toy_trainer(tmp_path, [Lose(), SidestepCallback()], [True, True])
    with pytest.raises(ValueError, match=r"every gradient is None.*DeepSpeed"):
        trainer.train()


def test_b14_the_snapshot_is_no_alias_of_gradients_that_are_zeroed_in_place(tmp_path):
    class InPlace(Toy):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    callback = SidestepCallback(GradientControl(mode="observe"))
    records, probe = Records(callback), Probe()
    train(toy_trainer(tmp_path, [callback, records, probe], [True] * 4, InPlace()))
    for before, now, record in zip(probe.raw, probe.raw[1:], records.found[1:], strict=False):
        expected = product(now, before) / (product(now, now) * product(before, before)) ** 0.5
        assert record.cosine == pytest.approx(expected, abs=1e-6)
        assert record.cosine < 0.999999
