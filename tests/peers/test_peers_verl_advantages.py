"""verl's advantage estimators, KL, rewards and log-probabilities of tokens."""

import math

import pytest
import torch
from peers_support import (
    CONSTANT,
    GROUPS,
    MEMBERS,
    ROWS,
    SEEDS,
    differentiated,
    make_batch,
    over_seeds_and_dtypes,
    peer_module,
)

from sidestep.losses import (
    ADVANTAGES,
    aggregate,
    count_denominators,
    kl_in_reward,
    kl_penalty,
    moments,
    normalise,
    overlong_penalty,
    reward_to_go,
    token_entropy,
    token_logprobs,
)

PEER = "verl"
verl = peer_module(PEER, "verl_calls")


def in_groups(batch):
    """Rewards and numbers of trained tokens, (GROUPS, MEMBERS)."""
    shape = (GROUPS, MEMBERS)
    return batch.rewards.view(shape), batch.mask.sum(dim=-1).view(shape)


@over_seeds_and_dtypes
@pytest.mark.parametrize(
    ("name", "theirs", "settings"),
    [
        ("grpo", "grpo", {"epsilon": 1e-4}),
        ("grpo", "grpo_vectorized", {"epsilon": 1e-4}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("dr_grpo", "grpo_vectorized", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}),
        ("rloo", "rloo_vectorized", {}),
    ],
)
def test_the_same_advantages(agree, name, theirs, settings, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = ADVANTAGES[name].function(*in_groups(batch)).view(ROWS, 1) * batch.mask
    advantages = verl.advantages_of(theirs, batch, **settings)
    agree(f"advantage `{name}`, verl's `{theirs}`", mine, advantages)


@over_seeds_and_dtypes
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("reinforce_pp", "reinforce_plus_plus"),
        ("reinforce_pp_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_reinforce_pp_differs_by_the_divisor_of_the_variance(agree, name, theirs, seed, dtype):
    """Ours divides by the number of tokens N, verl by N - 1; ours adds 1e-8 to the standard
    deviation, verl to the variance.
    """
    batch = make_batch(seed, dtype)
    mine = ADVANTAGES[name].function(*in_groups(batch)).view(ROWS, 1) * batch.mask
    num_tokens = float(batch.mask.sum())
    rescaled = mine.double() * math.sqrt((num_tokens - 1) / num_tokens)
    agree(f"advantage `{name}` times `sqrt(1 - 1/N)`", rescaled, verl.advantages_of(theirs, batch))


@over_seeds_and_dtypes
def test_reinforce_pp_with_the_kl_in_the_reward(agree, seed, dtype):
    """Returns of every token, then the batch's mean and standard deviation (see above)."""
    batch = make_batch(seed, dtype)
    mine = reward_to_go(
        batch.rewards, kl_in_reward(batch.behaviour, batch.reference, batch.mask, 0.05), batch.mask
    )
    token_rewards = verl.core_algos.compute_rewards(
        verl.outcome(batch), batch.behaviour, batch.reference, 0.05
    )
    advantages, returns = verl.reinforce_pp(token_rewards, batch.mask)
    agree("`kl_in_reward` and `reward_to_go`", mine, returns)
    normal = normalise(mine, batch.mask, moments(mine, batch.mask), 1e-8)
    num_tokens = float(batch.mask.sum())
    rescaled = normal.double() * math.sqrt((num_tokens - 1) / num_tokens)
    agree("`normalise` of them times `sqrt(1 - 1/N)`", rescaled, advantages)


@over_seeds_and_dtypes
@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_the_same_kl_penalty(agree, estimate, seed, dtype):
    batch = make_batch(seed, dtype)

    def mine(logprobs):
        kl_BT = kl_penalty(logprobs, batch.reference, batch.mask, estimate)
        return aggregate("token", kl_BT, batch.mask, count_denominators(batch.mask), CONSTANT)

    def theirs(logprobs):
        kl_BT = verl.core_algos.kl_penalty(logprobs, batch.reference, estimate)
        return verl.core_algos.agg_loss(kl_BT, batch.mask, "token-mean")

    agree.in_loss_and_gradient(
        f"KL `{estimate}`", differentiated(mine, batch), differentiated(theirs, batch)
    )


@over_seeds_and_dtypes
def test_k2_has_the_gradient_that_verl_gives_its_unbiased_estimates(agree, seed, dtype):
    """verl's "k3+" has the value of k3 and the gradient of k2."""
    batch = make_batch(seed, dtype)
    mine = differentiated(
        lambda logprobs: kl_penalty(logprobs, batch.reference, batch.mask, "k2").sum(), batch
    )
    theirs = differentiated(
        lambda logprobs: (
            verl.core_algos.kl_penalty(logprobs, batch.reference, "k3+") * batch.mask
        ).sum(),
        batch,
    )
    agree.in_gradient("KL `k2`, verl's `k3+`", mine, theirs)


@pytest.mark.parametrize("log_ratio", [-200.0, -25.0, -15.0, -2.6, 2.6, 9.0, 15.0, 25.0, 200.0])
def test_k3_is_bounded_as_verls(agree, log_ratio):
    batch = make_batch(0)
    reference = batch.logprobs - log_ratio
    mine = differentiated(
        lambda logprobs: kl_penalty(logprobs, reference, batch.mask, "k3").sum(), batch
    )
    theirs = differentiated(
        lambda logprobs: (verl.core_algos.kl_penalty(logprobs, reference, "k3") * batch.mask).sum(),
        batch,
    )
    agree("KL `k3`, log-ratio up to 200", mine.loss, theirs.loss)
    agree("KL `k3`, log-ratio up to 200", mine.gradient, theirs.gradient, of="gradient")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_same_logprobs_and_entropy(agree, temperature, seed):
    """Ours are float32 whatever the logits are; verl's are float64 here, as the better judge."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(40, (3, 5), generator=generator)
    our_logits, their_logits = (logits.clone().requires_grad_() for _ in range(2))
    mine = token_logprobs(our_logits, token_ids, temperature)
    theirs = verl.logprobs_from_logits_v2(their_logits / temperature, token_ids)
    agree("`token_logprobs`", mine, theirs)
    weights = torch.randn(3, 5, generator=generator)
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    agree("`token_logprobs`", our_logits.grad, their_logits.grad, of="gradient")
    entropy = verl.entropy_from_logits(logits / temperature)
    agree("`token_entropy`", token_entropy(logits, temperature), entropy)


def test_overlong_rows_lose_the_same_reward(agree):
    lengths = range(1, 21)
    mine = overlong_penalty(torch.tensor(lengths), max_tokens=20, soft_tokens=8)
    theirs = verl.overlong_rewards(lengths, max_tokens=20, soft_tokens=8)
    agree("`overlong_penalty`", mine, theirs)
