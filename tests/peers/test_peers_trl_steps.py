"""TRL from rewards to loss: advantages, whole steps, and a real model under both."""

from dataclasses import replace

import pytest
import torch
from peers_support import (
    GROUPS,
    MEMBERS,
    SEEDS,
    Result,
    make_batch,
    ours,
    over_seeds_and_dtypes,
    peer_module,
)

from sidestep.losses import (
    ADVANTAGES,
    POLICIES,
    PolicyInputs,
    aggregate,
    count_denominators,
    make_options,
    overlong_penalty,
    token_entropy,
    token_logprobs,
)

PEER = "trl"
trl = peer_module(PEER, "trl_calls")

seeds = pytest.mark.parametrize("seed", SEEDS)


@seeds
@pytest.mark.parametrize(
    ("name", "settings"), [("grpo", {}), ("dr_grpo", {"scale_rewards": "none"})]
)
def test_the_same_advantages(agree, name, settings, seed):
    batch = make_batch(seed)
    mine = ADVANTAGES[name].function(batch.rewards.view(GROUPS, MEMBERS)).flatten()
    theirs = trl.scored(batch, settings, use_vllm=False)["advantages"]
    agree(f"advantage `{name}`", mine, theirs)


@seeds
def test_the_same_rloo_advantages(agree, seed):
    rewards = make_batch(seed).rewards
    mine = ADVANTAGES["rloo"].function(rewards.view(GROUPS, MEMBERS)).flatten()
    agree("advantage `rloo`", mine, trl.rloo_advantages(rewards))


@over_seeds_and_dtypes
def test_a_whole_step_from_rewards_to_gradient(agree, seed, dtype):
    """GRPO, truncated importance sampling, a KL penalty and OPSM, all at once."""
    batch = make_batch(seed, dtype)
    advantages = ADVANTAGES["grpo"].function(batch.rewards.view(GROUPS, MEMBERS)).flatten()
    mine = ours(
        replace(batch, advantages=advantages.to(dtype)),
        "ppo",
        corrections={"tis": {"cap": 1.25}, "opsm": {"delta": 0.05}},
        aggregation="sequence",
        kl="k3",
        kl_coef=0.1,
    )
    settings = {
        "loss_type": "grpo",
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.25,
        "off_policy_mask_threshold": 0.05,
        "beta": 0.1,
        "use_bias_correction_kl": False,
    }
    theirs = trl.step_of(batch, settings)
    agree.in_loss_and_gradient("a whole step: `grpo`, `ppo`, `tis`, `opsm`, `k3`", mine, theirs)


@seeds
def test_a_real_model_gets_the_same_gradient(agree, seed):
    """TRL's own forward pass, at a temperature, against ours over the model's logits."""
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(seed, torch.float32)
    trainer = trl.real_trainer(loss_type="grpo", temperature=0.7)
    completion_ids = torch.randint(2, trl.VOCABULARY, batch.mask.shape, generator=generator)
    inputs = trl.inputs_of(batch) | {"completion_ids": completion_ids}
    # TRL masks attention with it, too: rows without holes.
    mask = (torch.arange(batch.mask.shape[1]) < batch.mask.sum(dim=-1, keepdim=True)).float()
    inputs["completion_mask"] = mask.long()
    token_ids = torch.cat([inputs["prompt_ids"], completion_ids], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)

    def logprobs_of_model():
        logits = trainer.model(input_ids=token_ids, attention_mask=attention).logits
        return token_logprobs(logits[:, 1:-1], completion_ids, temperature=0.7)

    with torch.no_grad():
        drift = 0.2 * torch.randn(batch.mask.shape, generator=generator)
        inputs["old_per_token_logps"] = logprobs_of_model() + drift

    def gradient_of(loss):
        trainer.model.zero_grad()
        loss.backward()
        gradients = [p.grad.flatten() for p in trainer.model.parameters()]
        return Result(loss.detach(), torch.cat(gradients))

    theirs = gradient_of(trainer.compute_loss(trainer.model, inputs))
    old = inputs["old_per_token_logps"]
    parts = PolicyInputs(logprobs_of_model(), old, old, batch.advantages_BT, mask)
    term = POLICIES["ppo"].term(parts, make_options(POLICIES["ppo"].options))
    assert term.clipped_BT.any()
    mine = gradient_of(aggregate("sequence", term.loss_BT, mask, count_denominators(mask)))
    agree.in_loss_and_gradient("gradient of a model's weights", mine, theirs)


@seeds
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_same_logprobs_and_entropy(agree, temperature, seed):
    """Ours are float32 whatever the logits are; TRL's are float64 here, as the better judge."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 5, 40, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(40, (3, 5), generator=generator)
    mine = token_logprobs(logits, token_ids, temperature)
    theirs = trl.selective_log_softmax(logits, token_ids, temperature)
    agree("`token_logprobs`", mine, theirs)
    entropy = trl.entropy_from_logits(logits / temperature)
    agree("`token_entropy`", token_entropy(logits, temperature), entropy)


def test_overlong_rows_lose_the_same_reward(agree):
    lengths = range(1, 25)
    theirs = trl.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=8)
    mine = overlong_penalty(torch.tensor(lengths), max_tokens=20, soft_tokens=8)
    agree("`overlong_penalty`", mine, torch.tensor(theirs([[4] * n for n in lengths])))
