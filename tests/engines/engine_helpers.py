"""The slow and simple versions that engines are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sidestep.engines.protocol import Generation, GenerationRequest


def ask(
    prompts: Sequence[Sequence[int]],
    num_completions: int = 4,
    *,
    first_index: int = 0,
    stream: str = "rollout",
) -> list[GenerationRequest]:
    return [
        GenerationRequest(first_index + i, tuple(prompt), num_completions, stream)
        for i, prompt in enumerate(prompts)
    ]


def prompts_of_lengths(*lengths: int, num_ids: int = 50, seed: int = 0) -> list[list[int]]:
    """Random prompts without the first three (special) ids."""
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(3, num_ids, (n,), generator=numbers).tolist() for n in lengths]


@torch.no_grad()
def plain_logprobs(
    model: torch.nn.Module,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float,
    *,
    pad_left: int = 0,
    pad_right: int = 0,
) -> torch.Tensor:
    """Log-probabilities of a completion: one forward over all of it, no cache, padded as told."""
    ids = [*prompt, *completion]
    row = torch.tensor([[0] * pad_left + ids + [0] * pad_right])
    mask = torch.tensor([[0] * pad_left + [1] * len(ids) + [0] * pad_right])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=row, attention_mask=mask, position_ids=positions).logits[0].float()
    start = pad_left + len(prompt)
    logprobs = (logits[start - 1 : start - 1 + len(completion)] / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]


def tokens(generation: Generation) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in group] for group in generation.completions]


def bits(generation: Generation) -> list[list[tuple[tuple[int, ...], tuple[float, ...]]]]:
    return [
        [(completion.token_ids, completion.logprobs) for completion in group]
        for group in generation.completions
    ]


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie has ended, though nobody has collected it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
