"""Where Sidestep and verl differ on purpose: by exactly what docs/losses.md and docs/peers.md say.

If one of these fails after an update of verl, the two have moved: look again, change the pages.
"""

from dataclasses import replace

import pytest
import torch
from peers_support import (
    ROWS,
    SEEDS,
    Result,
    assert_acts,
    corrected,
    make_batch,
    ours,
    peer_module,
    policy_inputs,
    share,
)

from sidestep.losses import (
    centred_advantages,
    grpo_advantages,
    kl_penalty,
    normalise_weights,
    rloo_advantages,
    weight_sums,
)

PEER = "verl"
verl = peer_module(PEER, "verl_calls")

seeds = pytest.mark.parametrize("seed", SEEDS)


@pytest.mark.parametrize("theirs", ["grpo", "grpo_vectorized", "rloo"])
def test_a_group_of_one_gets_its_whole_reward_there_and_0_here(agree, theirs):
    """There is no baseline to compare with, and a reward alone pushes whatever it is given for."""
    alone = torch.tensor([[0.75]])
    assert grpo_advantages(alone) == centred_advantages(alone) == rloo_advantages(alone) == 0
    advantages = verl.group_advantages(theirs, alone[0], epsilon=1e-9)
    agree("departure: a group of one", alone[0], advantages)


@pytest.mark.parametrize("theirs", ["grpo", "grpo_vectorized"])
def test_equal_rewards_give_rounding_over_epsilon_there_and_0_here(theirs):
    equal = torch.full((8,), 1 / 3)
    assert verl.group_advantages(theirs, equal, epsilon=1e-6).abs().min() > 0.01
    assert not grpo_advantages(equal).any()


@seeds
def test_a_member_without_a_trained_token_moves_the_baseline_there_and_not_here(agree, seed):
    rewards = make_batch(seed).rewards[:4].float()
    rewards[3] = 5.0
    mine = centred_advantages(rewards, torch.tensor([3, 1, 2, 0]))
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    settings = {"norm_adv_by_std_in_grpo": False}
    theirs = verl.group_advantages("grpo", rewards, mask, **settings)
    agree(
        "departure: an untrained member",
        mine + mask * (rewards[:3].mean() - rewards.mean()),
        theirs,
    )
    assert not torch.allclose(mine, theirs)


@seeds
def test_rejection_shrinks_the_denominator_there_and_not_here(agree, seed):
    batch = make_batch(seed)
    mine = ours(batch, "dual_clip", corrections={"geometric": {"low": 0.9, "high": 1.25}})
    kept = verl.kept_by(batch, "seq_mean_k1", f"{1 / 1.25}_{1 / 0.9}")
    theirs, _ = verl.loss_of("vanilla", replace(batch, mask=kept))
    inflated = batch.mask.sum() / kept.sum()
    assert inflated > 1
    scaled = Result(mine.loss * inflated, mine.gradient * inflated)
    agree.in_loss_and_gradient("departure: rejection", scaled, theirs)


@seeds
@pytest.mark.parametrize("criterion", ["token_k1", "seq_mean_k1", "seq_sum_k1"])
def test_bounds_of_rejection_are_on_1_over_w_there_and_on_w_here(agree, criterion, seed):
    batch = make_batch(seed)
    name = {"token_k1": "icepop", "seq_mean_k1": "geometric", "seq_sum_k1": "sequence_mis"}[
        criterion
    ]
    same_words = corrected(policy_inputs(batch), {name: {"low": 0.9, "high": 2.0}})
    turned = corrected(policy_inputs(batch), {name: {"low": 1 / 2.0, "high": 1 / 0.9}})
    theirs = verl.kept_by(batch, criterion, "0.9_2.0")
    agree("departure: bounds of rejection", batch.mask * ~turned.dropped_BT, theirs)
    assert not torch.equal(batch.mask * ~same_words.dropped_BT, theirs)


@seeds
def test_mean_1_is_over_the_kept_tokens_here_and_over_all_there(agree, seed):
    batch = make_batch(seed)
    correction = corrected(policy_inputs(batch), {"icepop": {"low": 0.8, "high": 1.25}})
    mine = normalise_weights(correction, weight_sums(correction, batch.mask)).weight_BT
    theirs = verl.weights_of(batch, "token", "0.8_1.25", rollout_is_batch_normalize=True)
    kept = 1.0 - share(correction.dropped_BT, batch)
    assert kept < 1
    agree("departure: `normalise_weights` with drops", mine / kept, theirs)


@seeds
def test_gspo_with_a_weight_per_token_has_the_gradient_of_gspo_token_there(agree, seed):
    """Ours is the gradient of the weighed loss: every token of a row gets the row's mean weight.

    verl's: every token its own. The loss and the sum over a row are the same.
    """
    batch = make_batch(seed)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    mine = ours(batch, "gspo", wide, corrections={"icepop": {"low": 0.8, "high": 1.25}})
    theirs, _ = verl.loss_of(
        "gspo",
        batch,
        {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0},
        weights=verl.weights_of(batch, "token", "0.8_1.25"),
    )
    agree("departure: `gspo` with a weight per token", mine.loss, theirs.loss)
    rows = mine.gradient.sum(dim=-1), theirs.gradient.sum(dim=-1)
    agree("departure: `gspo` with a weight per token", *rows, of="gradient")
    dropped = mine.correction.dropped_BT
    assert not theirs.gradient[dropped].any()
    assert mine.gradient[dropped].any()


@seeds
def test_dppo_is_capped_there_by_the_dual_clip_of_3_and_not_here(agree, seed):
    """verl's own comment asks for a cap of 20, but its actor always has a `clip_ratio_c`."""
    batch = make_batch(seed)
    rare = batch.logprobs - 3.0
    batch = replace(batch, logprobs=rare, behaviour=1.25 * rare)
    mine = ours(batch, "dppo_tv", {"delta": 0.5})
    theirs, _ = verl.loss_of(
        "dppo_tv", batch, {"clip_ratio_low": 0.5, "clip_ratio_high": 0.5}, old="behaviour"
    )
    rho = (batch.logprobs - batch.behaviour).exp()
    assert_acts(rho > 3.0, batch)
    agree(
        "departure: `dppo_tv` above rho 3",
        mine.gradient * (3.0 / rho).clamp(max=1.0),
        theirs.gradient,
    )


@seeds
def test_cispo_has_a_lower_bound_there(agree, seed):
    batch = make_batch(seed)
    mine = ours(batch, "cispo", {"cap": 1.2})
    theirs, _ = verl.loss_of("cispo", batch)
    ratio = (batch.logprobs - batch.proximal).exp()
    assert_acts(ratio < 0.8, batch)
    agree(
        "departure: `cispo` below 0.8",
        mine.gradient * (0.8 / ratio).clamp(min=1.0),
        theirs.gradient,
    )


@seeds
def test_cispo_counts_as_clipped_only_what_the_cap_holds_here_and_both_bounds_there(agree, seed):
    batch = make_batch(seed)
    mine = ours(batch, "cispo", {"cap": 1.2}).term.clipped_BT
    _, metrics = verl.loss_of("cispo", batch)
    raised = (batch.logprobs - batch.proximal).exp() < 0.8
    clipped = torch.tensor(metrics["actor/pg_clipfrac"], dtype=batch.mask.dtype)
    agree("departure: clipped share of `cispo`", share(mine | raised, batch), clipped)


def test_a_missing_logprob_of_the_engine_is_nan_on_both_sides():
    batch = make_batch(0)
    batch.behaviour[0, 0] = torch.nan
    mine = ours(batch, "ppo", corrections={"tis": {"cap": 1.25}})
    assert mine.loss.isnan()
    assert verl.weights_of(batch, "token", 1.25)[0, 0].isnan()


def test_sapo_aggregates_by_sequence_there_whatever_is_asked_for(agree):
    batch = make_batch(0)
    mine = ours(batch, "sapo", aggregation="sequence")
    theirs, _ = verl.loss_of("sapo", batch, aggregation="token")
    agree.in_loss_and_gradient("departure: `sapo`, aggregation", mine, theirs)
    assert abs(mine.loss - ours(batch, "sapo", aggregation="token").loss) > 1e-4


@pytest.mark.parametrize(("estimate", "value"), [("k1", 15.0), ("k2", 112.5)])
def test_k1_and_k2_have_no_bound_there_and_10_here(estimate, value):
    batch = make_batch(0)
    reference = batch.logprobs - 15.0
    theirs = verl.core_algos.kl_penalty(batch.logprobs, reference, estimate)
    mine = kl_penalty(batch.logprobs, reference, batch.mask, estimate)
    assert theirs[0, 0] == pytest.approx(value)
    assert mine[0, 0] == 10.0


@pytest.mark.parametrize(("log_ratio", "mine", "theirs"), [(12.0, 12.0, 10.0), (30.0, 20.0, 10.0)])
def test_gspo_bounds_the_rows_mean_at_10_there_and_each_token_at_20_here(log_ratio, mine, theirs):
    batch = make_batch(0)
    batch = replace(batch, proximal=batch.logprobs - log_ratio)
    batch = batch.rows(batch.advantages < 0)
    losses = ours(batch, "gspo").loss, verl.loss_of("gspo", batch)[0].loss
    for loss, bound in zip(losses, (mine, theirs), strict=True):
        weighed = (batch.advantages_BT * batch.mask).sum() / batch.mask.sum()
        assert float(torch.log(loss / -weighed)) == pytest.approx(bound)


@seeds
def test_empty_rows_count_where_the_size_of_the_batch_is_given_there_and_never_here(agree, seed):
    batch = make_batch(seed)
    batch.mask[:3] = 0.0
    for aggregation in ("sequence", "constant"):
        mine = ours(batch, "dual_clip", aggregation=aggregation)
        theirs, _ = verl.loss_of("vanilla", batch, aggregation=aggregation)
        agree.in_loss_and_gradient("rows without a trained token", mine, theirs)
        told, _ = verl.loss_of("vanilla", batch, aggregation=aggregation, global_batch_size=ROWS)
        scaled = Result(mine.loss * (ROWS - 3) / ROWS, mine.gradient * (ROWS - 3) / ROWS)
        agree.in_loss_and_gradient("departure: rows without a trained token", scaled, told)
