"""Several optimizer steps on one rollout batch."""

import json
from dataclasses import replace

import pytest
import torch
from local_run import equal_weights, run_locally, small_config, weights_of
from step_support import batch_of, sampled_groups, trainer_for

from sidestep.buffer.collate import collate
from sidestep.config import TrainConfig
from sidestep.trainer.parts import mini_batches
from sidestep.trainer.schedule import learning_rate_at

OBSERVE = {"mode": "observe"}


def test_b54_lags_of_four_mini_steps_are_0_1_2_3_and_their_alignment_is_no_staleness(
    tiny_model_dir,
):
    trainer = trainer_for(
        tiny_model_dir,
        rollout={"groups_per_step": 4},
        train={"steps_per_batch": 4, "learning_rate": 1e-5},  # so small that no clip acts
        control={"low": 0.0, "high": 0.1},
    )
    # four times the same group: every two gradients go the same way
    groups = [replace(sampled_groups(tiny_model_dir)[1], index=index) for index in range(4)]
    batch = collate(groups, [[1.0, -1.0, 0.5, -0.5]] * 4)
    report = trainer.step(batch, 0)
    assert report.num_optimizer_steps == 4
    assert list(report.lag_counts) == [0, 1, 2, 3]
    assert sum(report.lag_counts.values()) == batch.num_trained_tokens
    assert set(report.off_policy.by_lag) == {"0", "1", "2", "3-4"}
    assert (report.version, report.advanced) == (4, True)
    assert report.last_control.cosine is None
    assert report.last_control.cosine_within_batch > 0.1  # it would have been skipped
    following = trainer.step(batch, 1)
    assert following.control.cosine > 0.1  # the first step on the next batch is compared
    assert following.control.regime == "skip"


def test_each_epoch_trains_on_every_token_again(tiny_model_dir):
    trainer = trainer_for(
        tiny_model_dir, train={"steps_per_batch": 2, "epochs_per_batch": 3}, control=OBSERVE
    )
    batch = batch_of(sampled_groups(tiny_model_dir))
    report = trainer.step(batch, 0)
    assert (report.version, report.num_optimizer_steps) == (6, 6)
    assert sum(report.lag_counts.values()) == 3 * batch.num_trained_tokens


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_b71_every_sample_is_in_one_mini_batch_whatever_divides(tiny_model_dir, number):
    batch = batch_of(sampled_groups(tiny_model_dir))
    parts = list(mini_batches(batch, number))
    assert len(parts) == number
    assert torch.equal(torch.cat([part.token_ids_BL for part in parts]), batch.token_ids_BL)
    groups = [set(part.group_indices) for part in parts]
    assert set.union(*groups) == {0, 1, 2, 3}
    assert sum(len(indices) for indices in groups) == 4  # no group is cut
    sizes = [part.num_sequences for part in parts]
    assert max(sizes) - min(sizes) <= 4


def test_b71_groups_of_unlike_sizes_stay_whole(tiny_model_dir):
    groups = sampled_groups(tiny_model_dir)
    batch = batch_of(groups)
    uneven = replace(batch, group_indices=(0,) * 9 + (1,) * 2 + (2,) * 5)
    parts = list(mini_batches(uneven, 2))
    assert [part.group_indices for part in parts] == [(0,) * 9, (1,) * 2 + (2,) * 5]
    with pytest.raises(ValueError, match="number is 4: the batch has 3 groups"):
        list(mini_batches(uneven, 4))


def test_mini_batches_are_the_steps_one_would_take_by_hand(tiny_model_dir):
    batch = batch_of(sampled_groups(tiny_model_dir))
    together = trainer_for(tiny_model_dir, train={"steps_per_batch": 2}, control={"mode": "off"})
    together.step(batch, 0)
    by_hand = trainer_for(tiny_model_dir, control={"mode": "off"})
    for part in mini_batches(batch, 2):
        by_hand.step(part, 0)
    assert equal_weights(weights_of(together), weights_of(by_hand))


def test_b33_a_mini_batch_without_a_trained_token_makes_no_optimizer_step(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir, train={"steps_per_batch": 2}, control=OBSERVE)
    batch = batch_of(sampled_groups(tiny_model_dir))
    mask_BT = batch.mask_BT.clone()
    mask_BT[:8] = 0.0
    report = trainer.step(replace(batch, mask_BT=mask_BT), 0)
    assert (report.version, report.advanced) == (1, True)
    assert report.control is not None
    nothing = trainer.step(replace(batch, mask_BT=torch.zeros_like(mask_BT)), 1)
    assert (nothing.version, nothing.advanced, nothing.control) == (1, False, None)


def test_warm_up_and_decay_count_optimizer_steps():
    train = TrainConfig(
        steps=2, steps_per_batch=3, learning_rate=1.0, warmup_steps=1, schedule="linear"
    )
    rates = [learning_rate_at(version, train) for version in range(6)]
    assert rates == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_a_row_of_metrics_covers_the_whole_rollout_batch(tiny_model_dir, tmp_path):
    config = small_config(tiny_model_dir, train={"steps": 3, "steps_per_batch": 3}, control=OBSERVE)
    run_locally(config, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [row["version"] for row in rows] == [3, 6, 9]
    for row in rows:
        assert row["train/optimizer_steps"] == 3
        assert list(row["lag/histogram"]) == ["0", "1", "2"]
        assert (row["lag/max"], row["lag/bound"]) == (2, 2)
        assert sum(row["lag/histogram"].values()) == row["tokens/trained"]
        assert set(row["ratio/ess_by_lag"]) == {"0", "1", "2"}
        assert row["ratio/ess_by_lag"]["0"] == pytest.approx(1.0, abs=1e-6)
    # (a mini-batch of one group with equal rewards has no gradient to compare)
    assert any(row["align/cosine_within_batch"] is not None for row in rows)
    assert rows[0]["align/cosine"] is None
    assert rows[1]["align/cosine"] is not None
