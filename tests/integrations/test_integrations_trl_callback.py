"""The callback in Hugging Face's own Trainer: attaching, clipping, skipping, logging, refusals."""

import logging
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from trl_hosts import (
    Probe,
    Records,
    assert_projected_as_promised,
    length,
    same,
    text_trainer,
    train,
    weights,
)

from sidestep import GradientControl
from sidestep.control import Alarm
from sidestep.integrations.huggingface import StepLog
from sidestep.integrations.trl import SidestepCallback

ALWAYS_PROJECT = {"low": -1.0, "high": 1.0}


def hooks_of(trainer):
    inner = trainer.optimizer.optimizer
    return [*inner._optimizer_step_pre_hooks.values(), *inner._optimizer_step_post_hooks.values()]


def test_it_is_attached_while_training_and_gone_afterwards(tiny_model_dir, tmp_path):
    callback = SidestepCallback()
    records = Records(callback)
    trainer = train(text_trainer(tiny_model_dir, tmp_path, [callback, records]))
    assert all(handle is not None for handle in records.handles)
    assert hooks_of(trainer) == []
    assert callback.handle is None
    again = text_trainer(tiny_model_dir, tmp_path, [SidestepCallback(callback.control)])
    train(again)  # a control that is still attached would be refused


def test_training_goes_on_after_one_that_failed(tiny_model_dir, tmp_path):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("out of memory")

    callback = SidestepCallback()
    with pytest.raises(RuntimeError, match="out of memory"):
        train(text_trainer(tiny_model_dir, tmp_path, [callback, Fail()]))
    records = Records(callback)
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records]))
    assert len(records.found) == 6


def test_the_trainers_clipping_is_left_alone(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(mode="observe"))
    records, probe = Records(callback), Probe()
    settings = {"max_grad_norm": 0.5}
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records, probe], **settings))
    assert all(map(same, probe.raw, probe.applied))
    assert [record.norm_raw for record in records.found] == pytest.approx([0.5] * 6, rel=1e-5)
    assert all(record.clip_factor == 1.0 for record in records.found)


def test_clipping_taken_over_is_the_trainers_clipping(tiny_model_dir, tmp_path):
    theirs = train(text_trainer(tiny_model_dir, tmp_path, max_grad_norm=0.5))
    callback = SidestepCallback(GradientControl(mode="observe"), max_norm=0.5)
    records, probe = Records(callback), Probe()
    settings = {"max_grad_norm": 0}
    ours = train(text_trainer(tiny_model_dir, tmp_path, [callback, records, probe], **settings))
    assert max(map(length, probe.raw)) > 0.5
    assert max(map(length, probe.applied)) <= 0.5 * (1 + 1e-6)
    # The records have the length before clipping, and so has the trainer's own grad_norm.
    logged = [line["grad_norm"] for line in ours.state.log_history if "loss" in line]
    assert [record.norm_raw for record in records.found] == pytest.approx(logged, rel=1e-5)
    other = weights(theirs)
    for name, mine in weights(ours).items():
        torch.testing.assert_close(mine, other[name], rtol=1e-5, atol=1e-6)


def test_clipping_taken_over_comes_after_control(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ALWAYS_PROJECT), max_norm=0.5)
    records, probe = Records(callback), Probe()
    settings = {"max_grad_norm": 0}
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records, probe], **settings))
    for record, applied in zip(records.found, probe.applied, strict=True):
        clipped = min(record.norm_applied, 0.5)
        assert length(applied) == pytest.approx(clipped, rel=1e-4)
    assert_projected_as_promised(records.found, probe, clips=True)


def test_two_clippings_are_refused(tiny_model_dir, tmp_path):
    trainer = text_trainer(tiny_model_dir, tmp_path, [SidestepCallback(max_norm=1.0)])
    with pytest.raises(ValueError, match=r"max_norm=1\.0.*max_grad_norm=1\.0.*set max_grad_norm=0"):
        trainer.train()


def test_a_wrong_max_norm_is_refused_at_once():
    with pytest.raises(ValueError, match="max_norm=0"):
        SidestepCallback(max_norm=0)


def test_skip_leaves_weights_and_moments_bitwise_and_the_trainer_counts_on(
    tiny_model_dir, tmp_path
):
    callback = SidestepCallback(GradientControl(low=-1.0, high=-1.0, max_skips=2))
    records, probe = Records(callback), Probe()
    trainer = text_trainer(tiny_model_dir, tmp_path, [callback, records, probe], weight_decay=0.1)
    train(trainer)
    assert records.regimes == ["undefined", "skip", "skip", "project", "skip", "skip"]
    for i, regime in enumerate(records.regimes):
        assert same(probe.before[i], probe.after[i]) == (regime == "skip")
        if regime == "skip":
            assert all(grad is None for grad in probe.applied[i].values())
            for name, moments in probe.moments[i].items():
                assert same(moments, probe.moments[i - 1][name])
    assert trainer.state.global_step == 6
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["align/skipped"] for line in lines] == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [line["align/skips_in_a_row"] for line in lines] == [0, 1, 2, 0, 1, 2]


def test_update_space_control_acts_on_the_step(tiny_model_dir, tmp_path):
    control = GradientControl(space="update", low=-1.0, high=1.0)
    callback = SidestepCallback(control)
    records, probe = Records(callback), Probe()
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records, probe]))
    moved = [
        {n: after[n] - before[n] for n in before}
        for before, after in zip(probe.before, probe.after, strict=True)
    ]
    for i, record in enumerate(records.found):
        if record.regime == "project":
            dot = sum(
                float((moved[i][n].double() * moved[i - 1][n].double()).sum()) for n in moved[i]
            )
            assert abs(dot) <= 1e-5 * length(moved[i]) * length(moved[i - 1])
    assert "project" in records.regimes


def test_a_line_of_several_steps_has_means_and_shares(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(low=-1.0, high=-1.0, max_skips=2))
    records = Records(callback)
    trainer = text_trainer(tiny_model_dir, tmp_path, [callback, records], logging_steps=3)
    train(trainer)
    line = next(line for line in trainer.state.log_history if line["step"] == 6)
    cosines = [record.cosine for record in records.found[3:]]
    assert line["align/cosine"] == pytest.approx(sum(cosines) / 3, rel=1e-12)
    assert line["align/skipped"] == pytest.approx(2 / 3)
    assert line["align/projected"] == pytest.approx(1 / 3)
    assert line["align/regime"] == "skip"


def test_evaluations_and_the_last_line_are_left_as_they_are(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(mode="observe"))
    settings = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = train(text_trainer(tiny_model_dir, tmp_path, [callback], **settings))
    for line in trainer.state.log_history:
        assert ("align/regime" in line) == ("loss" in line)


def test_values_reach_a_sink_that_the_trainer_calls_first(tiny_model_dir, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = SidestepCallback(GradientControl(mode="observe"))
    records = Records(callback)
    settings = {"report_to": ["tensorboard"]}
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records], **settings))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    found = [(event.step, event.value) for event in board.Scalars("train/align/cosine")]
    expected = [(r.step + 1, r.cosine) for r in records.found if r.cosine is not None]
    assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert "train/align/regime/text_summary" in board.Tags()["tensors"]


def test_a_sink_that_takes_only_numbers_gets_only_numbers():
    log = StepLog([{"align/cosine": 0.5}], {"align/regime": "pass"})
    line, history = {"loss": 1.0}, {"loss": 1.0}
    log.write(SimpleNamespace(report_to=["mlflow"]), line, history)
    assert line == {"loss": 1.0, "align/cosine": 0.5}
    assert history == {"loss": 1.0, "align/cosine": 0.5, "align/regime": "pass"}
    assert (log.numbers, log.texts) == ([], {})


def test_the_alarm_stands_in_the_log_with_its_reason_and_warns_once(
    tiny_model_dir, tmp_path, caplog
):
    alarm = Alarm(window=2, cosine_limit=-1.0, patience=2)  # any cosine is too high
    callback = SidestepCallback(GradientControl(mode="observe"), alarm=alarm)
    trainer = text_trainer(tiny_model_dir, tmp_path, [callback])
    with caplog.at_level(logging.WARNING, logger="sidestep"):
        train(trainer)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    levels = ["ok", "ok", "watch", "alarm", "alarm", "alarm"]
    assert [line["alarm/level"] for line in lines] == levels
    assert [line["alarm/raised"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert "likely to collapse: cosine" in lines[3]["alarm/reason"]
    assert caplog.text.count("likely to collapse") == 1


def test_b22_deepspeed_is_refused_by_name(tiny_model_dir, tmp_path, monkeypatch):
    """A fake: DeepSpeed is not installed, Accelerate is told it were at work."""

    class Pretend(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            kind = DistributedType.DEEPSPEED
            monkeypatch.setitem(AcceleratorState._shared_state, "distributed_type", kind)

    trainer = text_trainer(tiny_model_dir, tmp_path, [Pretend(), SidestepCallback()])
    with pytest.raises(ValueError, match=r"DeepSpeed.*sidestep\.integrations\.deepspeed"):
        trainer.train()


def test_fsdp1_is_refused_by_name(tiny_model_dir, tmp_path):
    """A fake: FullyShardedDataParallel wants an accelerator, so an empty one is put in place."""

    class Wrap(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            wrapped = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
            trainer.callback_handler.model = wrapped

    trainer = text_trainer(tiny_model_dir, tmp_path, [Wrap(), SidestepCallback()])
    with pytest.raises(ValueError, match=r"FSDP1.*fsdp_config=\{'version': 2\}"):
        trainer.train()


def test_an_optimizer_that_steps_layer_by_layer_is_refused(tiny_model_dir, tmp_path):
    optimizer = LayerWiseDummyOptimizer(optimizer_dict={}, model=None, lr=1e-3)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    trainer = text_trainer(
        tiny_model_dir, tmp_path, [SidestepCallback()], optimizers=(optimizer, schedule)
    )
    with pytest.raises(ValueError, match="optimizer"):
        trainer.train()


def test_what_is_no_control_is_refused_when_the_callback_is_made():
    with pytest.raises(ValueError, match="give a sidestep\\.GradientControl"):
        SidestepCallback("observe")
