"""What is added to rewards before they become advantages. _B sequences, _T tokens."""

from __future__ import annotations

import torch

from sidestep.losses.ratios import bounded_log_ratio, k1


def overlong_penalty(num_tokens: torch.Tensor, max_tokens: int, soft_tokens: int) -> torch.Tensor:
    """DAPO's soft overlong punishment, added to the reward: from 0 down to -1, float32.

    min(0, -(length - (max_tokens - soft_tokens)) / soft_tokens): 0 up to max_tokens - soft_tokens,
    then a straight line to -1 at max_tokens (and -1 beyond).
    num_tokens: completion lengths, any shape.
    Raises ValueError unless 0 < soft_tokens <= max_tokens.
    Source: arXiv 2503.14476, there max_tokens 20480 and soft_tokens 4096.
    """
    if not 0 < soft_tokens <= max_tokens:
        raise ValueError(
            f"soft_tokens is {soft_tokens} with max_tokens {max_tokens}: it must be above 0 and at "
            f"most max_tokens"
        )
    over = num_tokens.double() - (max_tokens - soft_tokens)
    return -(over / soft_tokens).clamp(0.0, 1.0).float()


def kl_in_reward(
    behaviour_logprobs_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    kl_coef: float,
) -> torch.Tensor:
    """-kl_coef (log pi_mu - log pi_ref) per token: a KL penalty as part of the reward.

    Of the policy that sampled (k1, bounded to +-10), not of the current one: a reward has no
    gradient. 0 where masked. Add its sum over a row to the reward of a sequence, or hand it to
    `reward_to_go`.
    Source: PPO as in arXiv 2501.03262, equation 4.
    """
    log_ratio_BT = bounded_log_ratio(behaviour_logprobs_BT.detach(), reference_logprobs_BT, mask_BT)
    return -kl_coef * k1(log_ratio_BT)


def reward_to_go(
    rewards_B: torch.Tensor, token_rewards_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """R + sum over this and later trained tokens of the row of their own reward: returns_BT.

    0 where masked. Source: arXiv 2501.03262, equation 4.
    """
    rewards_BT = torch.where(mask_BT != 0, token_rewards_BT.detach().double(), 0.0)
    to_go_BT = rewards_BT.flip(-1).cumsum(-1).flip(-1) + rewards_B.double()[:, None]
    return torch.where(mask_BT != 0, to_go_BT, 0.0).float()
