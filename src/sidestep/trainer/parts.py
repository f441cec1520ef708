"""How a rollout batch is cut: whole groups to optimizer steps, rows to forward passes.

_B sequences, _T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise

import torch

from sidestep.types import Batch


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a rollout batch, and the other policies that its loss compares with.

    proximal_logprobs_BT: of the weights before the first optimizer step on the batch.
    reference_logprobs_BT: of the reference model. None: the loss does not read it.
    """

    batch: Batch
    proximal_logprobs_BT: torch.Tensor | None = None
    reference_logprobs_BT: torch.Tensor | None = None

    def rows(self, rows: slice) -> Sample:
        """Some of the rows."""
        proximal_BT, reference_BT = self.proximal_logprobs_BT, self.reference_logprobs_BT
        return Sample(
            rows_of(self.batch, rows),
            None if proximal_BT is None else proximal_BT[rows],
            None if reference_BT is None else reference_BT[rows],
        )

    def to(self, device: torch.device) -> Sample:
        """The same on `device`."""
        proximal_BT, reference_BT = self.proximal_logprobs_BT, self.reference_logprobs_BT
        return Sample(
            to_device(self.batch, device),
            None if proximal_BT is None else proximal_BT.to(device),
            None if reference_BT is None else reference_BT.to(device),
        )


def mini_batches(batch: Batch, number: int) -> Iterator[Batch]:
    """`number` parts of consecutive whole groups; every row is in one of them, whatever divides.

    The numbers of groups differ by at most one. Raises ValueError if there are fewer groups.
    """
    sizes = [len(list(rows)) for _, rows in groupby(batch.group_indices)]
    if number > len(sizes):
        raise ValueError(f"number is {number}: the batch has {len(sizes)} groups")
    starts = [sum(sizes[: len(sizes) * i // number]) for i in range(number + 1)]
    for start, end in pairwise(starts):
        yield rows_of(batch, slice(start, end))


def first_half_rows(batch: Batch) -> int:
    """Rows of the first half of a batch's groups."""
    return next(mini_batches(batch, 2)).num_sequences


def micro_batches(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Consecutive rows, `size` at a time (None: all of them)."""
    for rows in micro_rows(batch.num_sequences, size):
        yield rows_of(batch, rows)


def micro_rows(num_rows: int, size: int | None) -> Iterator[slice]:
    """The rows of each micro-batch."""
    size = size or max(1, num_rows)
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some of the rows of a batch."""
    return Batch(**{field.name: getattr(batch, field.name)[rows] for field in fields(batch)})


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Every tensor of a batch on `device`."""
    return replace(
        batch,
        token_ids_BL=batch.token_ids_BL.to(device),
        attention_mask_BL=batch.attention_mask_BL.to(device),
        mask_BT=batch.mask_BT.to(device),
        behaviour_logprobs_BT=batch.behaviour_logprobs_BT.to(device),
        versions_BT=batch.versions_BT.to(device),
        advantages_BT=batch.advantages_BT.to(device),
    )
