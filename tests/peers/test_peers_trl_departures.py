"""Where Sidestep and TRL differ on purpose: by exactly what docs/losses.md and docs/peers.md say.

If one of these fails after an update of TRL, the two have moved: look again, change the pages.
"""

from dataclasses import replace

import pytest
import torch
from peers_support import (
    GROUPS,
    MEMBERS,
    ROWS,
    SEEDS,
    Result,
    assert_acts,
    differentiated,
    make_batch,
    ours,
    peer_module,
    policy_inputs,
)

from sidestep.losses import (
    POLICIES,
    aggregate,
    count_denominators,
    grpo_advantages,
    importance_ratio,
    kl_penalty,
    make_options,
)

PEER = "trl"
trl = peer_module(PEER, "trl_calls")

seeds = pytest.mark.parametrize("seed", SEEDS)


@seeds
def test_the_kl_is_weighed_by_the_ratio_there_and_not_here(agree, seed):
    batch = make_batch(seed)

    def weighed(logprobs):
        inputs = policy_inputs(batch, logprobs)
        kl_BT = kl_penalty(logprobs, batch.reference, batch.mask, "k3")
        loss_BT = POLICIES["ppo"].term(inputs, make_options(POLICIES["ppo"].options)).loss_BT
        loss_BT = loss_BT + 0.3 * importance_ratio(inputs.log_ratio()) * kl_BT
        return aggregate("sequence", loss_BT, batch.mask, count_denominators(batch.mask))

    theirs, _ = trl.loss_of(batch, {"loss_type": "grpo", "beta": 0.3})
    agree.in_loss_and_gradient("departure: KL in the loss", differentiated(weighed, batch), theirs)
    mine = ours(batch, "ppo", aggregation="sequence", kl="k3", kl_coef=0.3)
    assert abs(mine.loss - theirs.loss) > 1e-5


@seeds
@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("grpo", "sequence"), ("dr_grpo", "constant")]
)
def test_rows_without_a_trained_token_count_there_and_not_here(agree, loss_type, aggregation, seed):
    batch = make_batch(seed)
    batch.mask[:3] = 0.0
    mine = ours(batch, "ppo", aggregation=aggregation)
    theirs, _ = trl.loss_of(batch, {"loss_type": loss_type})
    filled = (ROWS - 3) / ROWS
    scaled = Result(mine.loss * filled, mine.gradient * filled)
    agree.in_loss_and_gradient("departure: rows without a trained token", scaled, theirs)


@seeds
def test_bnpo_is_a_mean_per_micro_batch(agree, seed):
    """So a token weighs more in short company; ours, and TRL's dapo, count the whole step."""
    batch = make_batch(seed)
    parts = [batch.rows(slice(first, first + 4)) for first in (0, 4, 8)]
    split = {
        "loss_type": "bnpo",
        "gradient_accumulation_steps": 3,
        "per_device_train_batch_size": 4,
    }
    theirs = torch.cat([trl.loss_of(part, split)[0].gradient for part in parts])
    apart = torch.cat([ours(part, "ppo").gradient / 3 for part in parts])
    agree("departure: bnpo in micro-batches", apart, theirs, of="gradient")
    assert not torch.allclose(ours(batch, "ppo").gradient, theirs)


@seeds
def test_a_member_without_a_trained_token_moves_the_baseline_there_and_not_here(agree, seed):
    batch = make_batch(seed)
    batch.mask[0] = 0.0
    theirs = trl.scored(batch, {}, use_vllm=False)["advantages"]
    rewards = batch.rewards.view(GROUPS, MEMBERS)
    agree("departure: an untrained member", grpo_advantages(rewards).flatten(), theirs)
    mine = grpo_advantages(rewards, batch.mask.sum(dim=-1).view(GROUPS, MEMBERS)).flatten()
    assert mine[0] == 0.0
    assert not torch.allclose(mine[1:4], theirs[1:4])
    assert torch.equal(mine[4:], grpo_advantages(rewards).flatten()[4:])


def test_a_group_of_one_is_refused_there_and_gets_0_here():
    with pytest.raises(ValueError, match="at least 2 generations"):
        trl.scored(make_batch(0), {"num_generations": 1}, use_vllm=False)
    assert grpo_advantages(torch.tensor([[0.75]])) == 0


def test_equal_rewards_give_rounding_over_epsilon_there_and_0_here():
    batch = replace(make_batch(0), rewards=torch.full((ROWS,), 1.3))
    theirs = trl.scored(batch, {"num_generations": 6}, use_vllm=False)["advantages"]
    assert theirs.abs().min() > 1e-3
    assert not grpo_advantages(batch.rewards.view(2, 6)).any()


def test_a_log_ratio_of_1000_is_infinite_there_and_finite_here():
    batch = make_batch(0)
    batch.proximal[0, 0] = batch.logprobs[0, 0] - 1000.0
    batch.advantages[0] = -1.0
    mine = ours(batch, "ppo", aggregation="sequence")
    theirs, _ = trl.loss_of(batch, {"loss_type": "grpo"})
    assert mine.loss.isfinite() and mine.gradient.isfinite().all()
    assert theirs.loss.isinf()


def test_k3_has_no_bound_there_and_10_here():
    batch = make_batch(0)
    batch = replace(batch, reference=batch.logprobs + 5.0)
    settings = {"loss_type": "grpo", "beta": 1.0, "use_bias_correction_kl": False}
    without = ours(batch, "ppo", aggregation="sequence").loss
    mine = ours(batch, "ppo", aggregation="sequence", kl="k3", kl_coef=1.0).loss - without
    theirs = trl.loss_of(batch, settings)[0].loss - without
    assert float(mine) == pytest.approx(10.0)
    assert float(theirs) == pytest.approx(2.718281828459045**5 - 5 - 1)


def test_a_token_without_a_sampling_logprob_weighs_1_there_and_makes_the_step_nan_here():
    """A step that is not finite is skipped by name; a silent 1 hides a broken engine."""
    batch = make_batch(0)
    batch.behaviour[0, 0] = torch.nan
    settings = {
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.25,
    }
    assert trl.scored(batch, settings)["importance_sampling_ratio"][0, 0] == 1.0
    mine = ours(batch, "ppo", corrections={"tis": {"cap": 1.25}})
    assert mine.loss.isnan()


@seeds
def test_cispo_counts_as_clipped_only_good_tokens_there_and_both_signs_here(seed):
    """The cap holds back the gradient whatever the sign of the advantage is."""
    batch = make_batch(seed)
    mine = ours(batch, "cispo", {"cap": 1.2})
    _, metrics = trl.loss_of(batch, {"loss_type": "cispo", "epsilon_high": 1.2})
    high_BT = mine.term.clipped_high_BT
    good_BT = high_BT & (batch.advantages_BT > 0)
    assert_acts(high_BT, batch)
    assert float(good_BT.sum() / batch.mask.sum()) == pytest.approx(metrics["cispo_clip_ratio"])
    assert good_BT.sum() < high_BT.sum()
