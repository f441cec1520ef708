"""How a rollout batch is cut: whole groups to optimizer steps, rows to forward passes.

_B sequences, _T completion tokens, _P prompt positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Literal

import torch

from sidestep.config import TrainConfig
from sidestep.types import Batch

Layout = Literal["packed", "bucketed", "padded"]
Rows = slice | list[int]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one forward pass. packs: how many of them share each packed row, in order; None
    where every sequence has a row of its own.

    trimmed: columns that are padding in all of these rows are left out.
    """

    rows: Rows
    packs: tuple[int, ...] | None = None
    trimmed: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a rollout batch, and the other policies that its loss compares with.

    proximal_logprobs_BT: of the weights before the first optimizer step on the batch.
    reference_logprobs_BT: of the reference model. None: the loss does not read it.
    """

    batch: Batch
    proximal_logprobs_BT: torch.Tensor | None = None
    reference_logprobs_BT: torch.Tensor | None = None

    def rows(self, rows: Rows) -> Sample:
        """Some of the rows."""
        proximal_BT, reference_BT = self.proximal_logprobs_BT, self.reference_logprobs_BT
        return Sample(
            rows_of(self.batch, rows),
            None if proximal_BT is None else proximal_BT[rows],
            None if reference_BT is None else reference_BT[rows],
        )

    def of(self, part: MicroBatch) -> Sample:
        """The rows of a micro-batch."""
        chosen = self.rows(part.rows)
        return chosen.trimmed() if part.trimmed else chosen

    def trimmed(self) -> Sample:
        """Without the columns that are padding in every row; one completion column stays."""
        batch, num_columns = self.batch, self.batch.mask_BT.shape[1]
        prompts_B, lengths_B = lengths_of(batch)
        first = batch.token_ids_BL.shape[1] - num_columns - int(prompts_B.max())
        most = max(1, int(lengths_B.max()))
        end = batch.token_ids_BL.shape[1] - num_columns + most
        proximal_BT, reference_BT = self.proximal_logprobs_BT, self.reference_logprobs_BT
        return Sample(
            replace(
                batch,
                token_ids_BL=batch.token_ids_BL[:, first:end],
                attention_mask_BL=batch.attention_mask_BL[:, first:end],
                mask_BT=batch.mask_BT[:, :most],
                behaviour_logprobs_BT=batch.behaviour_logprobs_BT[:, :most],
                versions_BT=batch.versions_BT[:, :most],
                advantages_BT=batch.advantages_BT[:, :most],
            ),
            None if proximal_BT is None else proximal_BT[:, :most],
            None if reference_BT is None else reference_BT[:, :most],
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


def micro_batches(batch: Batch, layout: Layout, config: TrainConfig) -> list[MicroBatch]:
    """How the rows go through the model; every row with a trained token once.

    padded: all rows in order, as wide as the whole batch. packed: sequences of one prompt in one
    row. bucketed: one row each. The last two leave out rows without a trained token and put rows of
    like length together.

    `train.micro_batch_size` sequences, and `train.max_tokens_per_micro_batch` positions, padding
    counted, are not exceeded unless one row alone does.
    """
    size = config.micro_batch_size or max(1, batch.num_sequences)
    budget = config.max_tokens_per_micro_batch
    if layout == "padded":
        if budget:
            size = max(1, min(size, budget // batch.token_ids_BL.shape[1]))
        return [MicroBatch(rows) for rows in micro_rows(batch.num_sequences, size)]
    prompts_B, lengths_B = (lengths.tolist() for lengths in lengths_of(batch))
    trained = [row for row, any_ in enumerate((batch.mask_BT != 0).any(dim=1).tolist()) if any_]
    if layout == "packed":
        packs = _packs(batch, trained, prompts_B, lengths_B, config.pack_tokens, size)
    else:
        packs = [[row] for row in trained]
    # (completion tokens, prompt tokens) of a row; sorted stably, so equal batches are cut equally.
    widths = [(sum(lengths_B[row] for row in pack), prompts_B[pack[0]]) for pack in packs]
    order = sorted(range(len(packs)), key=lambda i: (sum(widths[i]), widths[i]))
    cut: list[list[int]] = []
    sequences = wide = long = 0
    for i in order:
        tokens, prompt = widths[i]
        if layout == "packed":  # one width, not a prompt's and a completion's
            tokens, prompt = tokens + prompt, 0
        wide, long, sequences = max(wide, prompt), max(long, tokens), sequences + len(packs[i])
        full = cut and budget and (len(cut[-1]) + 1) * (wide + long) > budget
        if not cut or full or sequences > size:
            cut.append([])
            wide, long, sequences = prompt, tokens, len(packs[i])
        cut[-1].append(i)
    return [
        MicroBatch(
            [row for i in part for row in packs[i]],
            tuple(len(packs[i]) for i in part) if layout == "packed" else None,
            trimmed=True,
        )
        for part in cut
    ]


def _packs(
    batch: Batch,
    rows: Sequence[int],
    prompts_B: Sequence[int],
    lengths_B: Sequence[int],
    most_tokens: int,
    most_rows: int,
) -> list[list[int]]:
    """Rows of one group in packs of at most `most_tokens` (one row may be longer)."""
    packs: list[list[int]] = []
    group, num_tokens = None, 0
    for row in rows:
        num_tokens += lengths_B[row]
        new = batch.group_indices[row] != group
        if new or num_tokens > most_tokens or len(packs[-1]) == most_rows:
            packs.append([])
            group, num_tokens = batch.group_indices[row], prompts_B[row] + lengths_B[row]
        packs[-1].append(row)
    return packs


def lengths_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt tokens and completion tokens of every row."""
    prompt_width = batch.token_ids_BL.shape[1] - batch.mask_BT.shape[1]
    real_BL = batch.attention_mask_BL
    return real_BL[:, :prompt_width].sum(dim=1), real_BL[:, prompt_width:].sum(dim=1)


def micro_rows(num_rows: int, size: int) -> Iterator[slice]:
    """The rows of each micro-batch, in order."""
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


def rows_of(batch: Batch, rows: Rows) -> Batch:
    """Some of the rows of a batch."""
    groups = batch.group_indices
    chosen = groups[rows] if isinstance(rows, slice) else tuple(groups[row] for row in rows)
    names = (field.name for field in fields(batch) if field.name != "group_indices")
    return Batch(**{name: getattr(batch, name)[rows] for name in names}, group_indices=chosen)


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
