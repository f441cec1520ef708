import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import (
    KL_ESTIMATES,
    aggregate,
    check_kl,
    count_denominators,
    kl_in_reward,
    kl_penalty,
    overlong_penalty,
    reward_to_go,
    token_logprobs,
)

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared


@pytest.mark.parametrize("estimate", KL_ESTIMATES)
@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4])
def test_b35_a_huge_gap_gives_at_most_ten_and_a_finite_gradient(estimate, gap):
    policy = torch.full((1, 2), -1.0, requires_grad=True)
    reference = torch.tensor([[-1.0 + gap, -1.5]])
    value = kl_penalty(policy, reference, torch.ones(1, 2), estimate)
    value.sum().backward()
    assert value.abs().max() <= 10.0
    assert policy.grad.isfinite().all()
    assert float(policy.grad[0, 0]) == 0.0
    assert float(policy.grad[0, 1]) != 0.0


@bounded
@given(
    st.lists(st.floats(-200.0, 200.0, width=32), min_size=1, max_size=5),
    st.sampled_from(sorted(KL_ESTIMATES)),
)
def test_any_finite_gap_gives_a_finite_value_and_gradient(gaps, estimate):
    policy = torch.zeros(1, len(gaps), requires_grad=True)
    value = kl_penalty(policy, torch.tensor([gaps]), torch.ones(1, len(gaps)), estimate)
    value.sum().backward()
    assert value.isfinite().all() and policy.grad.isfinite().all()


def exact_gradient(estimate, weights_of_tokens):
    """Gradient of the mean of an estimate over the policy's own distribution, to its logits."""
    logits = torch.tensor([[[0.3, -0.2, 0.8]]], requires_grad=True)
    reference = torch.tensor([0.1, 0.5, -0.4]).log_softmax(-1)
    ids = torch.tensor([[0], [1], [2]])
    logprobs = token_logprobs(logits.expand(3, 1, 3), ids, 1.0)
    value = kl_penalty(logprobs, reference[ids], torch.ones(3, 1), estimate)
    probs = logits.detach().softmax(-1).flatten()
    (value.flatten() * weights_of_tokens(probs)).sum().backward()
    return logits, reference, logits.grad.flatten()


def divergence_gradient(logits, reference, forward):
    logits = logits.detach().double().requires_grad_()
    log_p = logits.log_softmax(-1).flatten()
    p, q = log_p.exp(), reference.double().exp()
    value = (p * (log_p - reference)).sum() if forward else (q * (reference - log_p)).sum()
    value.backward()
    return logits.grad.flatten()


def test_gradients_in_the_loss_k2_is_the_divergence_k3_the_other_one_and_k1_nothing():
    found = {name: exact_gradient(name, lambda probs: probs) for name in KL_ESTIMATES}
    logits, reference, k2_gradient = found["k2"]
    to_reference = divergence_gradient(logits, reference, forward=True)
    from_reference = divergence_gradient(logits, reference, forward=False)
    assert (k2_gradient - to_reference).abs().max() < 1e-6
    assert (found["k3"][2] - from_reference).abs().max() < 1e-6
    assert found["k1"][2].abs().max() < 1e-6
    assert to_reference.abs().max() > 0.1
    assert [finding.code for finding in check_kl("k1", "loss")] == ["kl_without_gradient"]
    assert check_kl("k2", "loss") == check_kl("k3", "loss") == check_kl("k1", "reward") == []
    assert [finding.code for finding in check_kl("k3", "reward")] == ["biased_kl_reward"]


def test_a_penalty_in_the_loss_pulls_towards_the_reference_and_leaves_masked_tokens_alone():
    logprobs = torch.tensor([[-1.0, -1.0, math.nan]], requires_grad=True)
    reference = torch.tensor([[-0.5, -1.5, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    penalty = kl_penalty(logprobs, reference, mask)
    aggregate("token", 0.1 * penalty, mask, count_denominators(mask)).backward()
    assert float(penalty[0, 2].detach()) == 0.0
    # d/dlogp of exp(-d) - 1 + d is 1 - exp(-d).
    assert logprobs.grad.tolist() == [
        pytest.approx([0.05 * (1 - math.exp(0.5)), 0.05 * (1 - math.exp(-0.5)), 0.0], abs=1e-7)
    ]
    with pytest.raises(ValueError, match="estimate is 'k4'"):
        kl_penalty(logprobs, reference, mask, "k4")
    with pytest.raises(ValueError, match="estimate is 'k4'"):
        check_kl("k4", "loss")


def test_kl_in_the_reward_and_reward_to_go_by_hand():
    behaviour = torch.tensor([[-1.0, -2.0, -3.0, math.nan]])
    reference = torch.tensor([[-1.5, -2.0, -2.0, math.nan]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    rewards = kl_in_reward(behaviour, reference, mask, kl_coef=0.1)
    assert rewards.tolist() == [pytest.approx([-0.05, 0.0, 0.1, 0.0], abs=1e-7)]
    returns = reward_to_go(torch.tensor([2.0]), rewards, mask)
    assert returns.tolist() == [pytest.approx([2.05, 2.1, 2.1, 0.0], abs=1e-6)]
    assert not returns.requires_grad


def test_kl_in_the_reward_is_bounded_and_has_no_gradient():
    behaviour = torch.tensor([[-150.0, 0.0]], requires_grad=True)
    rewards = kl_in_reward(behaviour, torch.tensor([[0.0, -150.0]]), torch.ones(1, 2), 1.0)
    assert rewards.tolist() == [[10.0, -10.0]]
    assert not rewards.requires_grad


def test_overlong_penalty_by_hand_with_the_settings_of_dapo():
    lengths = torch.tensor([0, 16384, 18432, 20480, 30000])
    assert overlong_penalty(lengths, 20480, 4096).tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    for soft, most in ((0, 10), (11, 10)):
        with pytest.raises(ValueError, match=f"soft_tokens is {soft} with max_tokens {most}"):
            overlong_penalty(lengths, most, soft)
