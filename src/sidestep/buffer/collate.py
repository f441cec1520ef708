"""Groups -> one padded batch. Prompts left-padded, completions right-padded: completions start at
one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from sidestep.types import Batch, Group

PAD_ID = 0  # padding is masked out everywhere, so any id serves


def collate(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Batch:
    """All completions of `groups` in order; `advantages[i][m]` goes to every token of member m of
    groups[i].
    """
    members = [
        (group, completion, advantage)
        for group, group_advantages in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, group_advantages, strict=True)
    ]
    prompt_width = max(len(group.prompt.token_ids) for group in groups)
    prompt_lengths_B = torch.tensor([len(group.prompt.token_ids) for group, _, _ in members])
    lengths_B = torch.tensor([len(completion.token_ids) for _, completion, _ in members])
    completion_width = int(lengths_B.max())
    columns_L = torch.arange(prompt_width + completion_width) - prompt_width
    real_BL = (columns_L >= -prompt_lengths_B[:, None]) & (columns_L < lengths_B[:, None])
    real_BT = real_BL[:, prompt_width:]
    completions = [completion for _, completion, _ in members]
    token_ids = (group.prompt.token_ids + completion.token_ids for group, completion, _ in members)
    advantages_B = torch.tensor([advantage for _, _, advantage in members], dtype=torch.float32)
    return Batch(
        token_ids_BL=_padded(real_BL, token_ids, torch.int64),
        attention_mask_BL=real_BL.to(torch.int64),
        mask_BT=real_BT.float(),
        behaviour_logprobs_BT=_padded(real_BT, (c.logprobs for c in completions), torch.float32),
        versions_BT=_padded(real_BT, (c.versions for c in completions), torch.int64),
        advantages_BT=torch.where(real_BT, advantages_B[:, None], 0.0),
        group_indices=tuple(group.index for group, _, _ in members),
    )


def _padded(
    real: torch.Tensor, rows: Iterable[Sequence[float]], dtype: torch.dtype
) -> torch.Tensor:
    """The values of `rows` where `real` is True, row by row; 0 (PAD_ID) elsewhere.

    One tensor from one list: a tensor a row took a fifth of a small model's training step.
    """
    padded = torch.full(real.shape, PAD_ID, dtype=dtype)
    padded[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return padded
