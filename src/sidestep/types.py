"""The records that pass between the parts of a run. All frozen: a stage returns a new record.

Shape suffixes used in this package: _B sequences, _G members of a group, _T completion tokens
(padded to the longest), _L prompt and completion tokens (padded), _V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a task before tokenisation.

    prompt: plain text, or chat messages (`[{"role": ..., "content": ...}, ...]`) for the
        tokenizer's chat template.
    columns: everything else of the row (`answer`, ...), handed to the reward function by name.
    source: where the row comes from, for error messages (`data.jsonl:12`).
    """

    prompt: str | Sequence[Mapping[str, str]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised row of a task. `index` is its position in the task's split."""

    index: int
    example: Example
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one prompt.

    token_ids: exactly the sampled ids, the end-of-sequence token included; never re-tokenised.
    logprobs: log-probabilities (float32, nats) of exactly those ids under the sampling temperature.
    versions: for every token the version of the weights that sampled it.
    text: the decoded ids without special tokens; for people and reward functions only.

    Raises ValueError if the three sequences differ in length or a log-probability is not a finite
    number.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str = ""

    def __post_init__(self) -> None:
        lengths = len(self.token_ids), len(self.logprobs), len(self.versions)
        if len(set(lengths)) != 1:
            raise ValueError(
                f"completion.logprobs and completion.versions must have one entry per sampled "
                f"token: {lengths[0]} token ids, {lengths[1]} log-probabilities, "
                f"{lengths[2]} versions"
            )
        for position, logprob in enumerate(self.logprobs):
            if not isinstance(logprob, float) or not math.isfinite(logprob):
                raise ValueError(
                    f"completion.logprobs[{position}] is {logprob!r}: not a finite number"
                )


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of one prompt.

    index: its admission index, 0 for the first group a run admitted.
    reward_parts: by the name of each reward, its values before weighting, one per completion.
    problems: one per completion: why its reward could not be told; "" if nothing was wrong.
    generate_s: seconds the engine spent on the request that produced it, divided by the groups of
        that request.
    """

    index: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...] = ()
    generate_s: float = 0.0
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token in the group; lag is counted from it."""
        return min(version for completion in self.completions for version in completion.versions)


@dataclass(frozen=True, slots=True)
class Batch:
    """All sequences of one optimizer step as padded tensors.

    Prompts are padded on the left and completions on the right, so that column P starts every
    completion (L = P + T).

    token_ids_BL (int64), attention_mask_BL (int64, 1 for real tokens), mask_BT (float32, 1 for
    trained tokens), behaviour_logprobs_BT (float32), versions_BT (int64), advantages_BT (float32,
    0 where mask_BT is 0).
    group_indices: admission index of the group of every sequence.
    """

    token_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    mask_BT: torch.Tensor
    behaviour_logprobs_BT: torch.Tensor
    versions_BT: torch.Tensor
    advantages_BT: torch.Tensor
    group_indices: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return int(self.token_ids_BL.shape[0])

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask_BT.sum().item())
