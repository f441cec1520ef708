"""From loss per token to one number, for any split in micro-batches. _B sequences, _T tokens.

Denominators belong to the whole optimizer step and are counted once, from the full mask. Each
micro-batch then gives its share; the shares and their gradients add up. A mean per micro-batch
would weigh a token by the company it is in.

A correction that rejects tokens sets their loss to 0 and leaves the mask alone: rejecting must not
inflate what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over a whole optimizer step; `a + b` is that of both parts (micro-batches, ranks).

    num_tokens: trained tokens.
    num_sequences: sequences with at least one trained token. The others count nowhere, so padding a
    batch with empty sequences changes nothing.
    With num_tokens == 0 every loss and every gradient is exactly 0: the caller sees it here, and
    makes no optimizer step.
    """

    num_tokens: int
    num_sequences: int

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(
            self.num_tokens + other.num_tokens, self.num_sequences + other.num_sequences
        )


def count_denominators(mask_BT: torch.Tensor) -> Denominators:
    """Counts of the nonzero entries of a mask. A row must not be cut between micro-batches."""
    trained_BT = mask_BT != 0
    return Denominators(int(trained_BT.sum()), int(trained_BT.any(dim=-1).sum()))


def aggregate(
    aggregation: Aggregation,
    loss_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    denominators: Denominators,
    constant: float | None = None,
) -> torch.Tensor:
    """This micro-batch's share of the loss under the aggregation of that name.

    constant: read by "constant" only, see `constant_mean`.
    Raises ValueError for an unknown name, or if "constant" comes without its constant.
    """
    if aggregation == "token":
        return token_mean(loss_BT, mask_BT, denominators)
    if aggregation == "sequence":
        return sequence_mean(loss_BT, mask_BT, denominators)
    if aggregation == "constant":
        if constant is None:
            raise ValueError(
                "aggregation 'constant' needs constant=, usually the maximum number of new tokens"
            )
        return constant_mean(loss_BT, mask_BT, denominators, constant)
    raise ValueError(
        f"aggregation is {aggregation!r}: it must be one of {', '.join(get_args(Aggregation))}"
    )


def token_mean(
    loss_BT: torch.Tensor, mask_BT: torch.Tensor, denominators: Denominators
) -> torch.Tensor:
    """sum over trained tokens / num_tokens: every token weighs the same.

    Source: DAPO, arXiv 2503.14476.
    """
    return _trained_only(loss_BT, mask_BT).sum() / max(1, denominators.num_tokens)


def sequence_mean(
    loss_BT: torch.Tensor, mask_BT: torch.Tensor, denominators: Denominators
) -> torch.Tensor:
    """Mean over sequences of the mean over their trained tokens: every sequence weighs the same.

    Source: GRPO, arXiv 2402.03300.
    """
    num_tokens_B = (mask_BT != 0).sum(dim=-1)
    means_B = _trained_only(loss_BT, mask_BT).sum(dim=-1) / num_tokens_B.clamp(min=1)
    return means_B.sum() / max(1, denominators.num_sequences)


def constant_mean(
    loss_BT: torch.Tensor, mask_BT: torch.Tensor, denominators: Denominators, constant: float
) -> torch.Tensor:
    """sum over trained tokens / (num_sequences * constant): no weight depends on any length.

    constant: usually the maximum number of new tokens. Raises ValueError unless it is above 0.
    Source: Dr.GRPO, arXiv 2503.20783; sequences without a trained token are not counted here
    (docs/losses.md).
    """
    if not constant > 0:
        raise ValueError(
            f"constant is {constant!r}: it must be above 0, usually the most new tokens allowed"
        )
    return _trained_only(loss_BT, mask_BT).sum() / (max(1, denominators.num_sequences) * constant)


def _trained_only(loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Loss with 0 at masked positions, at least float32. `where`, not a product: 0 * NaN is NaN."""
    if loss_BT.shape != mask_BT.shape:
        raise ValueError(
            f"loss_BT has shape {tuple(loss_BT.shape)}, mask_BT {tuple(mask_BT.shape)}: "
            f"they must be equal"
        )
    loss_BT = loss_BT.to(torch.promote_types(loss_BT.dtype, torch.float32))
    return torch.where(mask_BT != 0, loss_BT, 0.0)
