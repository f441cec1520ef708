"""Groups -> one padded batch. Prompts left-padded, completions right-padded: completions start at
one column.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    num_rows = len(members)
    prompt_width = max(len(group.prompt.token_ids) for group in groups)
    completion_width = max(len(completion.token_ids) for _, completion, _ in members)
    width = prompt_width + completion_width

    token_ids_BL = torch.full((num_rows, width), PAD_ID, dtype=torch.int64)
    attention_mask_BL = torch.zeros(num_rows, width, dtype=torch.int64)
    mask_BT = torch.zeros(num_rows, completion_width)
    logprobs_BT = torch.zeros(num_rows, completion_width)
    versions_BT = torch.zeros(num_rows, completion_width, dtype=torch.int64)
    advantages_BT = torch.zeros(num_rows, completion_width)
    for row, (group, completion, advantage) in enumerate(members):
        prompt_ids, num_tokens = group.prompt.token_ids, len(completion.token_ids)
        start = prompt_width - len(prompt_ids)
        token_ids_BL[row, start : prompt_width + num_tokens] = torch.tensor(
            prompt_ids + completion.token_ids
        )
        attention_mask_BL[row, start : prompt_width + num_tokens] = 1
        mask_BT[row, :num_tokens] = 1.0
        logprobs_BT[row, :num_tokens] = torch.tensor(completion.logprobs)
        versions_BT[row, :num_tokens] = torch.tensor(completion.versions)
        advantages_BT[row, :num_tokens] = advantage
    return Batch(
        token_ids_BL=token_ids_BL,
        attention_mask_BL=attention_mask_BL,
        mask_BT=mask_BT,
        behaviour_logprobs_BT=logprobs_BT,
        versions_BT=versions_BT,
        advantages_BT=advantages_BT,
        group_indices=tuple(group.index for group, _, _ in members),
    )
