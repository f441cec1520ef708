"""Groups -> the batch that is trained on: which tokens count, and with what advantage.

_N groups, _G members, _B = N G sequences, _T completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sidestep.buffer.collate import collate
from sidestep.config import RunConfig
from sidestep.losses import (
    ADVANTAGES,
    kl_in_reward,
    moments,
    normalise,
    overlong_penalty,
    reward_to_go,
)
from sidestep.types import Batch, Completion, Group

EPS = 1e-8  # of `reinforce_pp_advantages`


@dataclass(frozen=True, slots=True)
class MadeBatch:
    """A batch, and what was added to the rewards: mean over its trained sequences by name."""

    batch: Batch
    added_to_reward: Mapping[str, float]


def make_batch(
    groups: Sequence[Group],
    config: RunConfig,
    reference_logprobs: Callable[[Batch], torch.Tensor],
) -> MadeBatch:
    """All completions of `groups`, in order, with advantages of the rewards as the config says.

    A completion that is not trained on (cut, with `rollout.mask_truncated`; or empty) has a mask of
    0, no advantage, and is no baseline for the others.
    reference_logprobs: called for a KL penalty in the reward only.
    """
    batch = collate(groups, [[0.0] * len(group.completions) for group in groups])
    trained_B = torch.tensor(
        [is_trained(completion, config) for group in groups for completion in group.completions]
    )
    batch = replace(batch, mask_BT=batch.mask_BT * trained_B[:, None])
    # float64: float32 would lose small differences of large rewards, or overflow
    rewards_NG = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    num_tokens_NG = batch.mask_BT.sum(dim=1).view(rewards_NG.shape)
    added: dict[str, float] = {}
    if config.task.overlong_tokens:
        penalty_NG = overlong_penalty(
            num_tokens_NG, config.engine.max_new_tokens, config.task.overlong_tokens
        )
        rewards_NG = rewards_NG + penalty_NG
        added["overlong"] = _mean(penalty_NG, num_tokens_NG)
    if config.loss.kl_coef == 0.0 or config.loss.kl_place != "reward":
        advantages_NG = ADVANTAGES[config.loss.advantage].function(rewards_NG, num_tokens_NG)
        return MadeBatch(_with_advantages(batch, advantages_NG), added)

    kl_BT = kl_in_reward(
        batch.behaviour_logprobs_BT, reference_logprobs(batch), batch.mask_BT, config.loss.kl_coef
    )
    added["kl"] = _mean(kl_BT.sum(dim=1), trained_B)
    if config.loss.advantage == "reinforce_pp":
        # Its penalty is a reward of each token; what comes after a token is what it caused.
        returns_BT = reward_to_go(rewards_NG.flatten(), kl_BT, batch.mask_BT)
        whole = moments(returns_BT, batch.mask_BT)
        advantages_BT = normalise(returns_BT, batch.mask_BT, whole, EPS)
        return MadeBatch(replace(batch, advantages_BT=advantages_BT), added)
    rewards_NG = rewards_NG + kl_BT.sum(dim=1).view(rewards_NG.shape)
    advantages_NG = ADVANTAGES[config.loss.advantage].function(rewards_NG, num_tokens_NG)
    return MadeBatch(_with_advantages(batch, advantages_NG), added)


def is_trained(completion: Completion, config: RunConfig) -> bool:
    """Whether a completion's tokens are in the loss."""
    is_cut = completion.finish_reason == "length"
    return bool(completion.token_ids) and not (config.rollout.mask_truncated and is_cut)


def _with_advantages(batch: Batch, advantages_NG: torch.Tensor) -> Batch:
    """Every trained token has the advantage of its sequence."""
    advantages_B1 = advantages_NG.reshape(-1, 1)
    return replace(batch, advantages_BT=torch.where(batch.mask_BT != 0, advantages_B1, 0.0))


def _mean(values: torch.Tensor, trained: torch.Tensor) -> float:
    """Mean over the trained sequences; 0 without any."""
    kept = values[trained != 0]
    return float(kept.double().mean()) if kept.numel() else 0.0
