"""Advantages from rewards, one function per baseline. _G members of one group (last dimension).

All take (rewards_G, trained_G) and give advantages_G; leading dimensions are groups. Groups of
unlike sizes: pad, and give the padding 0 in trained_G. trained_G may be token counts: nonzero means
trained, and the batch-normalised ones weigh by them.
A member without a trained token gets 0 and is no baseline for the others: its reward is not read.
Computed in float64 on the device of the rewards; MPS has none, so hand over CPU tensors there.
"""

from __future__ import annotations

import torch

from sidestep.losses.moments import Moments, moments, normalise


def grpo_advantages(
    rewards_G: torch.Tensor, trained_G: torch.Tensor | None = None, eps: float = 1e-4
) -> torch.Tensor:
    """A = (R - mean) / (std + eps) over the trained members of each group: advantages_G, float32.

    rewards_G: (..., G), one group or many. Groups of unlike sizes: pad, and say so in `trained_G`.
    trained_G: (..., G), nonzero for members with at least one trained token; None means all. The
    others get 0 and are left out of mean and std, their rewards unread: a completion that gives no
    gradient must not move the baseline of those that do.
    std is unbiased (n - 1).

    A group with fewer than two trained members, or with equal rewards, gives exactly 0, and not the
    rounding of its mean divided by eps.
    Raises ValueError if shapes differ, eps is not above 0, or a trained member's reward is not
    finite.
    Source: GRPO, arXiv 2402.03300; unbiased std and eps 1e-4 are ours (docs/losses.md).
    """
    if not eps > 0:
        raise ValueError(
            f"eps is {eps!r}: it must be above 0, or a group of equal rewards divides by zero"
        )
    trained, rewards = _read(rewards_G, trained_G)
    centred = _centred(rewards, trained)
    freedom = (trained.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    std = (centred.square().sum(dim=-1, keepdim=True) / freedom).sqrt()
    return (centred / (std + eps)).float()


def centred_advantages(
    rewards_G: torch.Tensor, trained_G: torch.Tensor | None = None
) -> torch.Tensor:
    """A = R - mean of the group's trained members: no division, so no bias towards easy prompts.

    Fewer than two trained members, or equal rewards: exactly 0. Raises ValueError like
    `grpo_advantages`. Source: Dr.GRPO, arXiv 2503.20783.
    """
    trained, rewards = _read(rewards_G, trained_G)
    return _centred(rewards, trained).float()


def rloo_advantages(rewards_G: torch.Tensor, trained_G: torch.Tensor | None = None) -> torch.Tensor:
    """A = R - mean of the *other* trained members: n / (n - 1) times `centred_advantages`.

    Fewer than two trained members, or equal rewards: exactly 0. Raises ValueError like
    `grpo_advantages`. Source: RLOO, arXiv 2402.14740.
    """
    trained, rewards = _read(rewards_G, trained_G)
    count = trained.sum(dim=-1, keepdim=True)
    return (_centred(rewards, trained) * count / (count - 1).clamp(min=1)).float()


def reinforce_pp_advantages(
    rewards_G: torch.Tensor,
    trained_G: torch.Tensor | None = None,
    eps: float = 1e-8,
    batch: Moments | None = None,
) -> torch.Tensor:
    """A = (R - mean) / (std + eps) over the tokens of the whole batch, not of the group.

    trained_G: token counts, by which mean and std are weighted; None weighs all members alike.
    batch: `reinforce_pp_moments` of all parts of the batch; None: of `rewards_G` alone.
    A batch of equal rewards gives exactly 0; a group of one is fine.
    Raises ValueError like `grpo_advantages`. With a KL penalty in the reward use
    `rewards.reward_to_go` and `normalise`, token by token.
    Source: REINFORCE++, arXiv 2501.03262, equation 5.
    """
    trained, rewards = _read(rewards_G, trained_G)
    weights = trained.double() if trained_G is None else trained_G.double()
    return normalise(rewards, weights, batch or moments(rewards, weights), eps)


def reinforce_pp_baseline_advantages(
    rewards_G: torch.Tensor,
    trained_G: torch.Tensor | None = None,
    eps: float = 1e-8,
    batch: Moments | None = None,
) -> torch.Tensor:
    """`reinforce_pp_advantages` of R - mean of the group.

    batch: `reinforce_pp_moments(centred_advantages(rewards_G, trained_G), trained_G)` of all parts;
    None: of `rewards_G` alone. Groups with equal rewards keep the small advantage that the batch's
    mean leaves them.
    Source: REINFORCE++ with baseline, arXiv 2501.03262, equations 6 and 7.
    """
    centred = centred_advantages(rewards_G, trained_G)
    return reinforce_pp_advantages(centred, trained_G, eps, batch)


def reinforce_pp_moments(rewards_G: torch.Tensor, trained_G: torch.Tensor | None = None) -> Moments:
    """What the REINFORCE++ advantages need to know of one part of the batch; parts add up."""
    trained, rewards = _read(rewards_G, trained_G)
    return moments(rewards, trained.double() if trained_G is None else trained_G)


def _read(
    rewards_G: torch.Tensor, trained_G: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(trained, rewards in float64 with 0 for the untrained). Raises ValueError for bad input."""
    trained = _trained(rewards_G, trained_G)
    rewards = torch.where(trained, rewards_G.detach().double(), 0.0)
    if not bool(rewards.isfinite().all()):
        position = tuple((~rewards.isfinite()).nonzero()[0].tolist())
        raise ValueError(
            f"rewards_G{list(position)} is {float(rewards[position])}: not a finite number"
        )
    return trained, rewards


def _centred(rewards: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """R - mean of the group's trained members; exactly 0 where they are all equal or too few."""
    num_trained = trained.sum(dim=-1, keepdim=True)
    mean = rewards.sum(dim=-1, keepdim=True) / num_trained.clamp(min=1)
    return torch.where(trained & _differ(rewards, trained), rewards - mean, 0.0)


def _trained(rewards_G: torch.Tensor, trained_G: torch.Tensor | None) -> torch.Tensor:
    if trained_G is None:
        return torch.ones_like(rewards_G, dtype=torch.bool)
    if trained_G.shape != rewards_G.shape:
        raise ValueError(
            f"trained_G has shape {tuple(trained_G.shape)}, rewards_G {tuple(rewards_G.shape)}: "
            f"it takes one flag per member"
        )
    return trained_G != 0


def _differ(rewards: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Whether the trained members of a group have at least two different rewards: (..., 1)."""
    highest = torch.where(trained, rewards, -torch.inf).amax(dim=-1, keepdim=True)
    lowest = torch.where(trained, rewards, torch.inf).amin(dim=-1, keepdim=True)
    return highest > lowest
