"""verl's own functions, called as its actor calls them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from peers_support import CONSTANT, GROUPS, MEMBERS, differentiated
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits_v2
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

AGGREGATION = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
# vanilla always has a dual clip; at this ratio it never acts.
NO_DUAL_CLIP = 1e9

__all__ = ["core_algos", "entropy_from_logits", "logprobs_from_logits_v2", "rollout_corr_helper"]


def actor_config(settings=None, **batch_info):
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        use_dynamic_bsz=True,
        global_batch_info={"loss_scale_factor": CONSTANT, **batch_info},
        **(settings or {}),
    )


def bypass(**rollout_correction):
    """Settings of verl's bypass mode, where the old policy is the one that sampled."""
    correction = RolloutCorrectionConfig(**rollout_correction)
    return {"policy_loss": PolicyLossConfig(rollout_correction=correction)}


def loss_of(
    name, batch, settings=None, *, old="proximal", aggregation="token", weights=None, **batch_info
):
    """(Result, verl's metrics) of a registered policy loss. old: field of the batch."""
    config, metrics = actor_config(settings, **batch_info), {}

    def loss(logprobs):
        value, found = core_algos.get_policy_loss_fn(name)(
            old_log_prob=getattr(batch, old),
            log_prob=logprobs,
            advantages=batch.advantages_BT,
            response_mask=batch.mask,
            loss_agg_mode=AGGREGATION[aggregation],
            config=config,
            rollout_is_weights=weights,
        )
        metrics.update(found)
        return value

    return differentiated(loss, batch), metrics


def weights_of(batch, level, threshold, **settings):
    """verl's weights of the proximal policy over the one that sampled."""
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        batch.proximal - batch.behaviour, batch.mask, level, threshold, **settings
    )
    return weights


def kept_by(batch, criterion, threshold):
    """verl's mask after rejection."""
    mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
        batch.proximal - batch.behaviour, batch.mask, criterion, threshold
    )
    return mask


def outcome(batch):
    """The reward of each row at its last trained token, as verl's reward managers put it."""
    last = batch.mask.shape[1] - 1 - batch.mask.flip(-1).argmax(dim=-1)
    rewards = torch.zeros_like(batch.mask)
    rewards[torch.arange(len(rewards)), last] = batch.rewards
    return rewards


def weights_of_preset(name, batch):
    """Weights after rejection under one of verl's presets, as they come."""
    preset = getattr(RolloutCorrectionConfig, name)()
    weights, mask, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        batch.proximal,
        batch.behaviour,
        batch.mask,
        preset.rollout_is,
        preset.rollout_is_threshold,
        rollout_rs=preset.rollout_rs,
        rollout_rs_threshold=preset.rollout_rs_threshold,
    )
    return mask if weights is None else mask * weights.batch["rollout_is_weights"]


def advantages_of(name, batch, **settings):
    """Advantages per token of a registered estimator, groups one after the other."""
    estimator = core_algos.get_adv_estimator_fn(name)
    if name != "reinforce_plus_plus":
        settings["index"] = np.repeat(np.arange(GROUPS), MEMBERS)
    # The only estimator that reads it has no discount in the paper either.
    config = SimpleNamespace(gamma=1.0)
    rewards = outcome(batch)
    return estimator(rewards, response_mask=batch.mask, config=config, **settings)[0]


def group_advantages(name, rewards, mask=None, **settings):
    """Advantages (G,) of one group by a registered estimator, a token each."""
    mask = torch.ones_like(rewards) if mask is None else mask
    estimator = core_algos.get_adv_estimator_fn(name)
    index = np.zeros(len(rewards), dtype=np.int64)
    return estimator(rewards[:, None], mask[:, None], index=index, **settings)[0][:, 0]


def reinforce_pp(token_rewards, mask):
    """(advantages, returns) per token."""
    estimator = core_algos.get_adv_estimator_fn("reinforce_plus_plus")
    return estimator(token_rewards, response_mask=mask, config=SimpleNamespace(gamma=1.0))


def overlong_rewards(lengths, max_tokens, soft_tokens):
    """What DAPO's reward manager adds to a score of 0, for completions of these lengths."""
    manager = DAPORewardManager(
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="<eos>"),
        num_examine=0,
        compute_score=lambda **_: 0.0,
        max_resp_len=max_tokens,
        overlong_buffer_cfg=SimpleNamespace(
            enable=True, len=soft_tokens, penalty_factor=1.0, log=False
        ),
    )
    rows = len(lengths)
    response_mask = torch.arange(max_tokens) < torch.tensor(lengths)[:, None]
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(rows, 1, dtype=torch.long),
            "responses": torch.ones(rows, max_tokens, dtype=torch.long),
            "attention_mask": torch.cat([torch.ones(rows, 1), response_mask], dim=1).long(),
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * rows),
            "data_source": np.array(["none"] * rows),
        },
    )
    return manager(data).sum(dim=-1)
