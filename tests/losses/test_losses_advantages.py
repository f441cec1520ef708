import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import (
    ADVANTAGES,
    Moments,
    centred_advantages,
    grpo_advantages,
    moments,
    normalise,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reinforce_pp_moments,
    reward_to_go,
)

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared

finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def test_one_of_four_right_by_hand():
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    advantages = grpo_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    expected = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages.dtype == torch.float32


@bounded
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_equals_the_textbook_formula(rewards):
    advantages = grpo_advantages(torch.tensor(rewards, dtype=torch.float64))
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-4) for reward in rewards]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@bounded
@given(st.lists(finite, min_size=1, max_size=8), st.data())
def test_any_finite_rewards_give_finite_advantages(rewards, data):
    trained = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    advantages = grpo_advantages(torch.tensor(rewards), torch.tensor(trained))
    assert advantages.isfinite().all()
    for advantage, is_trained in zip(advantages.tolist(), trained, strict=True):
        assert is_trained or advantage == 0.0
    assert float(advantages.double().sum()) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 3.0, -1e30])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b02_equal_rewards_and_groups_of_one_give_exactly_zero(reward, size, dtype):
    # 0.1 three times has a mean that is not 0.1: a plain formula leaves 7e-5 here in float32.
    assert grpo_advantages(torch.full((size,), reward, dtype=dtype)).tolist() == [0.0] * size


def test_b66_a_masked_out_member_gets_zero_and_gives_its_peer_no_baseline():
    token_rewards_GT = torch.tensor([[0.0, 0.0, 10.0], [0.0, 0.0, 0.0]])
    mask_GT = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    advantages = grpo_advantages(token_rewards_GT.sum(-1), mask_GT.any(-1))
    assert advantages.tolist() == [0.0, 0.0]


def test_b66_masked_out_members_change_nothing_for_the_others():
    alone = grpo_advantages(torch.tensor([1.0, 0.0, 0.5]))
    for reward in (0.0, 10.0, -1e6, math.inf, math.nan):
        rewards = torch.tensor([1.0, reward, 0.0, 0.5])
        beside = grpo_advantages(rewards, torch.tensor([True, False, True, True]))
        assert beside[[0, 2, 3]].tolist() == alone.tolist()
        assert float(beside[1]) == 0.0


def test_b66_a_group_that_is_wholly_masked_out_gives_zero():
    assert grpo_advantages(torch.tensor([5.0, 1.0]), torch.zeros(2)).tolist() == [0.0, 0.0]


def test_many_groups_at_once_give_what_each_gives_alone():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(3, 5, 8, generator=generator)
    trained = torch.rand(3, 5, 8, generator=generator) < 0.7
    together = grpo_advantages(rewards, trained)
    for i in range(3):
        for j in range(5):
            assert torch.equal(together[i, j], grpo_advantages(rewards[i, j], trained[i, j]))


def test_shifting_rewards_changes_nothing_and_order_follows_the_members():
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.5])
    advantages = grpo_advantages(rewards)
    assert torch.allclose(grpo_advantages(rewards + 64.0), advantages, atol=1e-7)
    assert torch.equal(grpo_advantages(rewards.flip(0)), advantages.flip(0))


def test_no_gradient_flows_into_rewards():
    assert not grpo_advantages(torch.tensor([0.0, 1.0], requires_grad=True)).requires_grad


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"rewards_G\[1, 0\] is nan"):
        grpo_advantages(torch.tensor([[0.0, 1.0], [math.nan, 1.0]]))
    with pytest.raises(ValueError, match=r"trained_G has shape \(3,\), rewards_G \(2,\)"):
        grpo_advantages(torch.zeros(2), torch.ones(3))
    with pytest.raises(ValueError, match="eps is 0"):
        grpo_advantages(torch.zeros(2), eps=0.0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_b66_a_masked_out_member_gets_zero_and_changes_nothing_for_the_others(name):
    function = ADVANTAGES[name].function
    alone = function(torch.tensor([[1.0, 0.0, 0.5]]), torch.tensor([[2, 1, 3]]))
    for reward in (0.0, 10.0, -1e6, math.inf, math.nan):
        rewards = torch.tensor([[1.0, reward, 0.0, 0.5]])
        beside = function(rewards, torch.tensor([[2, 0, 1, 3]]))
        assert beside[0, [0, 2, 3]].tolist() == pytest.approx(alone[0].tolist(), abs=1e-6)
        assert float(beside[0, 1]) == 0.0
    token_rewards = torch.tensor([[[0.0, 0.0, 10.0], [0.0, 0.0, 0.0]]])
    mask = torch.tensor([[[0, 0, 0], [1, 1, 1]]])
    assert function(token_rewards.sum(-1), mask.sum(-1)).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_and_groups_of_one_give_exactly_zero_in_every_advantage(name, size):
    for reward in (0.0, 0.1, 1 / 3, -1e30):
        found = ADVANTAGES[name].function(torch.full((3, size), reward), torch.ones(3, size))
        assert found.tolist() == [[0.0] * size] * 3


@pytest.mark.parametrize("name", ADVANTAGES)
@bounded
@given(st.lists(finite, min_size=2, max_size=8), st.data())
def test_any_finite_rewards_give_finite_advantages_in_every_one(name, rewards, data):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    found = ADVANTAGES[name].function(torch.tensor([rewards]), torch.tensor([counts]))
    assert not found.isnan().any()
    # R - mean of rewards near the end of float32 may pass it; a mean of them must not be NaN.
    assert found.isfinite().all() or max(map(abs, rewards)) > 1e38
    assert (found[0][torch.tensor(counts) == 0] == 0).all()


def test_min_group_is_the_smallest_group_that_learns():
    for entry in ADVANTAGES.values():
        rewards = torch.arange(6.0).square().view(-1, entry.min_group)
        assert entry.function(rewards, torch.ones_like(rewards)).abs().max() > 0
        single = entry.function(torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(3, 1))
        assert bool(single.abs().max() > 0) == (entry.min_group == 1)


@pytest.mark.parametrize("sizes", [[8], [4, 4], [1, 7], [2, 2, 2, 2]])
def test_batch_normalised_advantages_do_not_depend_on_the_split(sizes):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(8, 4, generator=generator) + 100.0
    counts = torch.randint(0, 9, (8, 4), generator=generator)
    parts = list(zip(rewards.split(sizes), counts.split(sizes), strict=True))
    plain = sum((reinforce_pp_moments(*part) for part in parts), Moments())
    centred = sum((reinforce_pp_moments(centred_advantages(r, c), c) for r, c in parts), Moments())
    found = torch.cat([reinforce_pp_advantages(r, c, batch=plain) for r, c in parts])
    assert (found - reinforce_pp_advantages(rewards, counts)).abs().max() < 1e-6
    found = torch.cat([reinforce_pp_baseline_advantages(r, c, batch=centred) for r, c in parts])
    assert (found - reinforce_pp_baseline_advantages(rewards, counts)).abs().max() < 1e-6
    weight = counts.double()
    assert float((found * weight).sum()) == pytest.approx(0.0, abs=1e-4)
    assert float((found.double().square() * weight).sum() / weight.sum()) == pytest.approx(1.0)


def test_moments_of_parts_are_those_of_the_whole_and_an_offset_costs_no_digits():
    values = torch.randn(100, generator=torch.Generator().manual_seed(1)).double() + 1e6
    weights = torch.arange(100) % 4
    whole = moments(values, weights)
    parts = sum(
        (moments(v, w) for v, w in zip(values.split(7), weights.split(7), strict=True)), Moments()
    )
    chosen = values.repeat_interleave(weights)
    for found in (whole, parts):
        assert found.weight == len(chosen)
        assert found.mean == pytest.approx(float(chosen.mean()), abs=1e-9)
        assert found.std == pytest.approx(float(chosen.std(correction=0)), rel=1e-9)
    assert Moments() + whole == whole + Moments() == whole
    assert Moments().std == 0.0
    with pytest.raises(ValueError, match="values has shape"):
        moments(values, weights[1:])
    with pytest.raises(ValueError, match="eps is 0"):
        normalise(values, weights, whole, eps=0.0)


def test_reinforce_pp_with_a_kl_penalty_in_the_reward_token_by_token():
    # Returns 1 - 0.1 * (KL to go); normalised over the four tokens of the batch.
    mask = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    returns = reward_to_go(torch.tensor([1.0, 0.0]), torch.tensor([[-0.1, -0.3], [0, 0]]), mask)
    found = normalise(returns, mask, moments(returns, mask), eps=1e-8)
    values = [0.6, 0.7, 0.0, 0.0]
    mean, std = statistics.mean(values), statistics.pstdev(values)
    assert found.flatten().tolist() == pytest.approx([(v - mean) / std for v in values], abs=1e-5)
