"""What every policy loss and every correction reads, and what a policy loss returns.

_B sequences, _T tokens. theta is the current policy, p the anchor, mu the behaviour policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from sidestep.losses.ratios import bounded_log_ratio, widened


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Log-probabilities, advantages and mask of some sequences, whole rows only.

    logprobs_BT: log pi_theta, with gradient. anchor_logprobs_BT: log pi_p (`anchor_logprobs`).
    behaviour_logprobs_BT: log pi_mu, from the engine. advantages_BT. mask_BT: nonzero at trained
    tokens; what stands elsewhere is never read.
    Raises ValueError if shapes differ or are not (sequences, tokens).
    """

    logprobs_BT: torch.Tensor
    anchor_logprobs_BT: torch.Tensor
    behaviour_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor

    def __post_init__(self) -> None:
        shapes = {entry.name: tuple(getattr(self, entry.name).shape) for entry in fields(self)}
        if len(set(shapes.values())) != 1 or self.mask_BT.dim() != 2:
            given = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise ValueError(f"{given}: all must have one shape (sequences, tokens)")

    def log_ratio(self) -> torch.Tensor:
        """log r = log pi_theta - log pi_p, bounded to +-20, with gradient; 0 where masked."""
        return bounded_log_ratio(self.logprobs_BT, self.anchor_logprobs_BT, self.mask_BT)

    def log_rho(self) -> torch.Tensor:
        """log rho = log pi_theta - log pi_mu, bounded to +-20, with gradient; 0 where masked."""
        return bounded_log_ratio(self.logprobs_BT, self.behaviour_logprobs_BT, self.mask_BT)

    def log_weight(self) -> torch.Tensor:
        """log w = log pi_p - log pi_mu, bounded to +-20, without gradient; 0 where masked."""
        anchor_BT = self.anchor_logprobs_BT.detach()
        return bounded_log_ratio(anchor_BT, self.behaviour_logprobs_BT, self.mask_BT)

    def advantages(self) -> torch.Tensor:
        """Advantages without gradient, at least float32, 0 where masked."""
        return torch.where(self.mask_BT != 0, widened(self.advantages_BT.detach()), 0.0)

    def logprobs(self) -> torch.Tensor:
        """log pi_theta with gradient, at least float32, 0 where masked."""
        return torch.where(self.mask_BT != 0, widened(self.logprobs_BT), 0.0)

    def detached(self) -> PolicyInputs:
        """The same without gradient, for statistics over a whole optimizer batch."""
        return PolicyInputs(*(getattr(self, entry.name).detach() for entry in fields(self)))


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """What a policy loss gives for every token.

    loss_BT: to be minimised, with gradient, 0 where masked; not yet weighted or aggregated.
    clipped_low_BT, clipped_high_BT: bool, without gradient. True where the loss's own rule holds
    back a gradient that would not be 0: cut to 0, or (CISPO, TOPR) capped. Low: the ratio is too
    small; high: it is too large.
    """

    loss_BT: torch.Tensor
    clipped_low_BT: torch.Tensor
    clipped_high_BT: torch.Tensor

    @property
    def clipped_BT(self) -> torch.Tensor:
        """True where either side acts."""
        return self.clipped_low_BT | self.clipped_high_BT


def row_sum(values_BT: torch.Tensor) -> torch.Tensor:
    """Sum over each row, kept as a column (B, 1). Masked entries must be 0."""
    return values_BT.sum(dim=-1, keepdim=True)


def row_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over each row's trained tokens, kept as a column (B, 1); 0 for a row without any.

    Masked entries must be 0.
    """
    num_tokens_B1 = (mask_BT != 0).sum(dim=-1, keepdim=True)
    return row_sum(values_BT) / num_tokens_B1.clamp(min=1)
