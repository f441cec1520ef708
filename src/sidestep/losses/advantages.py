"""Advantages from the rewards of a group. _G members of one group (last dimension)."""

from __future__ import annotations

import torch


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
    rounding of its mean divided by eps. Computed in float64 on the device of the rewards; MPS has
    none, so hand over CPU tensors there.
    Raises ValueError if shapes differ, eps is not above 0, or a trained member's reward is not
    finite.
    Source: GRPO, arXiv 2402.03300; unbiased std and eps 1e-4 are ours (docs/losses.md).
    """
    trained = _trained(rewards_G, trained_G)
    if not eps > 0:
        raise ValueError(
            f"eps is {eps!r}: it must be above 0, or a group of equal rewards divides by zero"
        )
    rewards = torch.where(trained, rewards_G.detach().double(), 0.0)
    if not bool(rewards.isfinite().all()):
        position = tuple((~rewards.isfinite()).nonzero()[0].tolist())
        raise ValueError(
            f"rewards_G{list(position)} is {float(rewards[position])}: not a finite number"
        )
    num_trained = trained.sum(dim=-1, keepdim=True)
    mean = rewards.sum(dim=-1, keepdim=True) / num_trained.clamp(min=1)
    centred = torch.where(trained, rewards - mean, 0.0)
    std = (centred.square().sum(dim=-1, keepdim=True) / (num_trained - 1).clamp(min=1)).sqrt()
    has_signal = trained & _differ(rewards, trained)
    return torch.where(has_signal, centred / (std + eps), 0.0).float()


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
