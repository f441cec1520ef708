"""One optimizer step: what it must leave alone, and what must not change its gradient."""

from dataclasses import replace

import pytest
import torch
from local_run import equal_weights, weights_of
from step_support import batch_of, sampled_groups, trainer_for

from sidestep.buffer.collate import collate
from sidestep.losses import count_denominators
from sidestep.models.loading import load_model
from sidestep.trainer.forward import completion_logprobs
from sidestep.trainer.parts import Sample
from sidestep.types import Completion, Example, Group, Prompt


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_b57_b61_ratio_is_1_before_any_update_alone_or_padded(tiny_model_dir, temperature):
    groups = sampled_groups(tiny_model_dir, temperature)
    model = load_model(str(tiny_model_dir), "float32", "cpu")
    together = collate(groups, [[1.0] * 4] * len(groups))  # left padding: prompts differ in length
    longer = Completion((5,) * 9, (-1.0,) * 9, (0,) * 9, "length")  # made up: it pads the others
    wide = [replace(groups[0], completions=(*groups[0].completions, longer))]
    right_padded = collate(wide, [[1.0] * 5])
    alone = [collate([group], [[1.0] * 4]) for group in groups]
    for batch in (together, right_padded, *alone):
        logprobs = completion_logprobs(model, batch, temperature)
        trained = batch.mask_BT.bool()
        if batch is right_padded:
            trained[-1] = False  # the made-up row
        difference = (logprobs - batch.behaviour_logprobs_BT)[trained]
        assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_gradients_do_not_depend_on_the_number_of_micro_batches(tiny_model_dir, aggregation):
    batch = batch_of(sampled_groups(tiny_model_dir))
    gradients = {}
    for size in (16, 8, 4, 3):
        trainer = trainer_for(
            tiny_model_dir, train={"micro_batch_size": size}, loss={"aggregation": aggregation}
        )
        trainer._backward(Sample(batch), count_denominators(batch.mask_BT))
        gradients[size] = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    for size in (8, 4, 3):
        error = (gradients[size] - gradients[16]).norm() / gradients[16].norm()
        assert error < 1e-6


def test_b33_a_batch_without_a_trained_token_makes_no_step_and_no_version(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir, train={"weight_decay": 0.1})
    batch = batch_of(sampled_groups(tiny_model_dir))
    assert trainer.step(batch, 0).advanced
    before, moments = weights_of(trainer), trainer.state_dict()["optimizer"]["state"]
    report = trainer.step(replace(batch, mask_BT=torch.zeros_like(batch.mask_BT)), 1)
    assert not report.advanced
    assert (report.version, trainer.version, report.loss) == (1, 1, 0.0)
    assert report.control is None
    assert equal_weights(before, weights_of(trainer))
    after = trainer.state_dict()["optimizer"]["state"]
    assert all(torch.equal(moments[i]["exp_avg"], after[i]["exp_avg"]) for i in moments)
    assert trainer.step(batch, 2).version == 2


def test_b34_a_nan_step_changes_nothing_and_the_next_is_finite(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir)
    batch = batch_of(sampled_groups(tiny_model_dir))
    poisoned = replace(batch, advantages_BT=batch.advantages_BT * float("nan"))
    trainer.step(batch, 0)
    before = weights_of(trainer)
    report = trainer.step(poisoned, 1)
    assert (report.advanced, report.control.regime, report.control.reason) == (
        False,
        "skip",
        "non-finite",
    )
    assert equal_weights(before, weights_of(trainer))
    third = trainer.step(batch_of(sampled_groups(tiny_model_dir), seed=1), 2)
    assert third.advanced
    assert third.control.cosine is not None
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_b02_a_step_of_equal_rewards_has_no_gradient_and_the_next_is_normal(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir)
    groups = sampled_groups(tiny_model_dir)
    trainer.step(batch_of(groups), 0)
    silent = trainer.step(collate(groups, [[0.0] * 4] * len(groups)), 1)
    assert silent.control.norm_raw == 0.0
    assert silent.control.regime == "undefined"
    following = trainer.step(batch_of(groups, seed=1), 2)
    assert following.control.cosine is not None


def test_b03_loss_of_about_0_still_has_a_gradient_that_is_measured(tiny_model_dir):
    """Advantages of +1 and -1 on equal lengths: the loss is 0 and the policy gradient is not."""
    trainer = trainer_for(tiny_model_dir)
    groups = sampled_groups(tiny_model_dir)
    cut = [
        replace(
            group,
            completions=tuple(
                Completion(c.token_ids[:1], c.logprobs[:1], (0,), "length")
                for c in group.completions
            ),
        )
        for group in groups
    ]
    report = trainer.step(collate(cut, [[1.0, -1.0, 1.0, -1.0]] * len(cut)), 0)
    assert abs(report.loss) < 1e-6
    assert report.control.norm_raw > 1e-3
    assert report.advanced


def test_the_recomputed_anchor_makes_every_ratio_1_and_no_token_is_clipped(tiny_model_dir):
    groups = sampled_groups(tiny_model_dir)
    stale = [
        replace(
            g,
            completions=tuple(
                replace(c, logprobs=tuple(x - 2 for x in c.logprobs)) for c in g.completions
            ),
        )
        for g in groups
    ]
    naive = trainer_for(tiny_model_dir, loss={"anchor": "recomputed"}).step(batch_of(stale), 0)
    clipped = trainer_for(tiny_model_dir, loss={"anchor": "behaviour"}).step(batch_of(stale), 0)
    assert naive.ratios.clip_fraction == 0.0
    assert clipped.ratios.clip_fraction > 0.3
    # off-policyness is measured against the behaviour policy whatever the anchor
    assert naive.ratios.kl_behaviour == pytest.approx(clipped.ratios.kl_behaviour)


def test_lags_are_counted_per_trained_token(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir)
    trainer.version = 7
    groups = [
        Group(
            0,
            Prompt(0, Example("x"), (5,)),
            (Completion((4, 5, 6), (-1.0,) * 3, (3, 3, 5), "stop"),),
        )
    ]
    report = trainer.step(collate(groups, [[1.0]]), 0)
    assert report.lag_counts == {2: 1, 4: 2}


def test_b34_a_nan_in_the_forward_pass_skips_the_step_too(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir)
    batch = batch_of(sampled_groups(tiny_model_dir))
    trainer.step(batch, 0)
    before = weights_of(trainer)
    hook = trainer.model.lm_head.register_forward_hook(lambda *call: call[-1] * float("nan"))
    report = trainer.step(batch, 1)
    hook.remove()
    assert (report.advanced, report.control.reason) == (False, "non-finite")
    assert equal_weights(before, weights_of(trainer))
    assert trainer.step(batch, 2).advanced
