"""TRL's AsyncGRPOTrainer, really run on the tiny model, with a rollout worker in this process."""

import logging
import random
from itertools import chain

import pytest
from trl_hosts import (
    Probe,
    Records,
    assert_moved_by,
    assert_projected_as_promised,
    async_trainer,
    digit_share,
    same,
    train,
    weights,
)

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback
from trl_local_rollouts import LocalRollouts

ACTING = {"low": 0.0, "high": 0.95}


class Scripted(LocalRollouts):
    """Its samples are those of the first weights and depend on nothing but their number."""

    def __init__(self, model_dir, num_batches_before=0):
        super().__init__(str(model_dir), num_prompts=4, group_size=4)
        self.num_groups = 4 * num_batches_before
        for _ in range(self.num_groups):
            self.draw.randrange(10_000)

    def reward(self, text, right):
        return digit_share([""], [text])[0]

    def send_weights(self, named_weights):
        for _ in named_weights:
            pass


class Versioned(LocalRollouts):
    """Each sample says the version it was sampled at where it reaches the loss: as its advantage.

    Its answers differ in length.
    """

    def put(self, sample, **options):
        sample.advantage = float(self.version)
        cut = random.Random(self.qsize()).randrange(1, 5)
        for name in ("input_ids", "completion_mask", "old_log_probs"):
            setattr(sample, name, getattr(sample, name)[: 6 + cut])
        super().put(sample, **options)


def test_observe_is_bitwise_the_run_without_the_callback(tiny_model_dir, tmp_path):
    bare = train(async_trainer(tiny_model_dir, tmp_path / "bare"))
    callback = SidestepCallback(GradientControl(mode="observe", **ACTING))
    seen = train(async_trainer(tiny_model_dir, tmp_path / "seen", [callback]))
    assert same(weights(bare), weights(seen))
    own = ("loss", "grad_norm", "reward", "ratio", "kl", "sample/staleness_mean")
    logs = [[{k: line.get(k) for k in own} for line in t.state.log_history] for t in (bare, seen)]
    assert logs[0] == logs[1]
    assert sum("align/cosine" in line for line in seen.state.log_history) == 29


def test_b16_control_projects_p_grad_as_promised_and_the_weights_move_so(tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    train(async_trainer(tiny_model_dir, tmp_path, [callback, records, probe], weight_sync_steps=4))
    assert records.regimes.count("project") >= 5
    assert_projected_as_promised(records.found, probe)
    assert_moved_by(probe)
    assert [record.step for record in records.found] == list(range(30))


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_sync_steps": 1},
        {"weight_sync_steps": 4},
        {"weight_sync_steps": 3, "gradient_accumulation_steps": 2},
        {"weight_sync_steps": 2, "token_budget": 40},
        {"weight_sync_steps": 2, "token_budget": 40, "gradient_accumulation_steps": 3},
        {"weight_sync_steps": 2, "logging_steps": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("skips", [False, True])
def test_lag_is_that_of_the_very_samples_of_the_step(tiny_model_dir, tmp_path, settings, skips):
    """In steps that moved the weights, from when the sampling weights were sent."""
    told = {"low": -1.0, "high": -1.0, "max_skips": 1} if skips else {"mode": "observe"}
    callback = SidestepCallback(GradientControl(**told))
    records = Records(callback)
    rollouts = Versioned(str(tiny_model_dir), num_prompts=4, group_size=4)
    trainer = async_trainer(
        tiny_model_dir,
        tmp_path,
        [callback, records],
        rollouts,
        **{"max_steps": 9, "per_device_train_batch_size": 8, "logging_steps": 1, **settings},
    )
    trained, went_live = [], {}
    training_step, update = trainer.training_step, rollouts.update_model_version

    def num_moves():
        return sum(regime != "skip" for regime in records.regimes)

    def training_step_and_say(model, inputs, num_items_in_batch):
        selected = inputs["token_index"] >= 0
        versions = dict(
            zip(
                inputs["segment_id"][selected].tolist(),
                inputs["advantages"][selected].tolist(),
                strict=True,
            )
        )
        trained.append([num_moves() - went_live[int(v)] for v in versions.values()])
        return training_step(model, inputs, num_items_in_batch)

    def update_and_say(version):
        went_live[version] = num_moves()
        update(version)

    trainer.training_step = training_step_and_say
    rollouts.update_model_version = update_and_say
    seen = []
    take = callback.on_pre_optimizer_step

    def take_and_say(*args, **kwargs):
        take(*args, **kwargs)
        seen.append(sorted(callback._lags))

    callback.on_pre_optimizer_step = take_and_say
    train(trainer)
    per_step = settings.get("gradient_accumulation_steps", 1)
    expected = [sorted(chain(*trained[i : i + per_step])) for i in range(0, len(trained), per_step)]
    assert seen == expected
    assert max(max(lags) for lags in expected) >= 2 or skips or settings["weight_sync_steps"] == 1
    if skips:
        assert "skip" in records.regimes
    lines = [line for line in trainer.state.log_history if "loss" in line]
    if settings.get("logging_steps", 1) == 1:
        means = [sum(lags) / len(lags) for lags in expected]
        assert [line["lag/mean"] for line in lines] == pytest.approx(means, rel=1e-12)
        assert [line["lag/max"] for line in lines] == [max(lags) for lags in expected]


def test_the_lag_reaches_the_reference(tiny_model_dir, tmp_path):
    """ "displacement" is zero for fresh samples and is not for stale ones."""
    callback = SidestepCallback(GradientControl(reference="displacement", mode="observe"))
    records = Records(callback)
    train(async_trainer(tiny_model_dir, tmp_path, [callback, records], max_steps=6))
    assert records.found[0].reason == "zero displacement"
    assert all(record.cosine is not None for record in records.found[2:])


def test_checkpoint_and_resume_equal_the_unbroken_run(tiny_model_dir, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}

    def run(folder, before, **arguments):
        callback = SidestepCallback(GradientControl(**ACTING))
        trainer = async_trainer(
            tiny_model_dir,
            tmp_path / folder,
            [callback],
            Scripted(tiny_model_dir, before),
            **settings,
        )
        return train(trainer, **arguments), callback

    unbroken, first = run("unbroken", 0)
    resumed, second = run(
        "resumed", 5, resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-5")
    )
    assert same(weights(unbroken), weights(resumed))
    assert first.last == second.last
    assert same(first.control.state_dict()["snapshot"], second.control.state_dict()["snapshot"])


def test_lora_is_controlled_as_promised(tiny_model_dir, tmp_path):
    from peft import LoraConfig

    callback = SidestepCallback(GradientControl(**ACTING))
    records, probe = Records(callback), Probe()
    train(
        async_trainer(
            tiny_model_dir,
            tmp_path,
            [callback, records, probe],
            Scripted(tiny_model_dir),
            max_steps=8,
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        )
    )
    assert all("lora_" in name for name in callback.control.state_dict()["snapshot"])
    assert_projected_as_promised(records.found, probe)


def test_a_queue_that_is_not_found_is_told_once(tiny_model_dir, tmp_path, caplog):
    """A fake: the dataloader of a trl in which the place has moved."""

    class Opaque:
        def __init__(self, dataloader):
            self._dataloader = dataloader

        def __iter__(self):
            return iter(self._dataloader)

    callback = SidestepCallback(GradientControl(mode="observe"))
    trainer = async_trainer(tiny_model_dir, tmp_path, [callback], max_steps=3)
    get = trainer.get_train_dataloader
    trainer.get_train_dataloader = lambda: Opaque(get())
    with caplog.at_level(logging.WARNING, logger="sidestep"):
        train(trainer)
    assert caplog.text.count("is not told the lag") == 1
    assert not any("lag/mean" in line for line in trainer.state.log_history)
    assert any("align/cosine" in line for line in trainer.state.log_history)
