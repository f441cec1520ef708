"""Sequences of one prompt in one row: the prompt is computed once, and padding hardly at all.

    padded   [ . p p p | a a . ]        packed   [ p p p | a a | b b b ]
             [ . p p p | b b b ]                  prompt   members: each sees the prompt and itself

A 4-D attention mask says who sees whom, and position ids go on from the prompt for every member. So
a model must take both: models with full attention do (sdpa and eager), those with a sliding window,
a recurrence or positions of their own do not. `obstacle` finds out, last of all by trying.

_B sequences, _T completion tokens, _L prompt and completion tokens, _R packed rows, _N completion
tokens of all sequences, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sidestep.losses import token_logprobs
from sidestep.types import Batch

MASKED_ATTENTIONS = ("sdpa", "eager")
# Largest difference of a log-probability, packed and padded, that is rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed rows, all of the width of the longest (L here).

    visible_RLL: whether a position (second axis) sees another (third).
    source_N: flat position in (R, L) whose logits predict a completion token. sequence_N, place_N:
    that token's place in (B, T). targets_N: its id.
    """

    token_ids_RL: torch.Tensor
    position_ids_RL: torch.Tensor
    visible_RLL: torch.Tensor
    source_N: torch.Tensor
    sequence_N: torch.Tensor
    place_N: torch.Tensor
    targets_N: torch.Tensor


def pack(batch: Batch, packs: Sequence[int]) -> Packed:
    """Pack consecutive sequences: the first packs[0] in the first row, and so on.

    The sequences of a row have one prompt. Any device; made on the batch's.
    """
    device = batch.token_ids_BL.device
    prompt_width = batch.token_ids_BL.shape[1] - batch.mask_BT.shape[1]
    real_BL = batch.attention_mask_BL != 0
    packs_R = torch.tensor(packs, device=device)
    first_R = packs_R.cumsum(0) - packs_R
    row_B = torch.arange(len(packs), device=device).repeat_interleave(packs_R)
    prompts_R = real_BL[first_R, :prompt_width].sum(dim=1)
    lengths_B = real_BL[:, prompt_width:].sum(dim=1)
    before_B = lengths_B.cumsum(0) - lengths_B
    start_B = prompts_R[row_B] + before_B - before_B[first_R][row_B]
    width = int((start_B + lengths_B).max())

    token_ids_RL = torch.zeros(len(packs), width, dtype=torch.int64, device=device)
    position_ids_RL = torch.zeros_like(token_ids_RL)
    part_RL = torch.full_like(token_ids_RL, -1)  # 0: prompt, 1 and up: a member, -1: padding
    row_P, column_P = real_BL[first_R, :prompt_width].nonzero(as_tuple=True)
    place_P = column_P - prompt_width + prompts_R[row_P]
    token_ids_RL[row_P, place_P] = batch.token_ids_BL[first_R[row_P], column_P]
    position_ids_RL[row_P, place_P] = place_P
    part_RL[row_P, place_P] = 0

    sequence_N, place_N = real_BL[:, prompt_width:].nonzero(as_tuple=True)
    row_N, column_N = row_B[sequence_N], start_B[sequence_N] + place_N
    targets_N = batch.token_ids_BL[sequence_N, prompt_width + place_N]
    token_ids_RL[row_N, column_N] = targets_N
    position_ids_RL[row_N, column_N] = prompts_R[row_N] + place_N
    part_RL[row_N, column_N] = sequence_N + 1

    same_RLL = part_RL[:, :, None] == part_RL[:, None, :]
    causal_LL = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    # Padding sees padding: a softmax over nothing is NaN.
    visible_RLL = causal_LL & (same_RLL | (part_RL == 0)[:, None, :])
    before_N = torch.where(place_N == 0, prompts_R[row_N] - 1, column_N - 1)
    return Packed(
        token_ids_RL,
        position_ids_RL,
        visible_RLL,
        source_N=row_N * width + before_N,
        sequence_N=sequence_N,
        place_N=place_N,
        targets_N=targets_N,
    )


def packed_logprobs(
    model: Any, batch: Batch, packs: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probabilities (float32, nats) of the completion tokens, with gradient: logprobs_BT, 0 at
    padding.

    Logits are computed where they predict a completion token and nowhere else.
    """
    packed = pack(batch, packs)
    mask = packed.visible_RLL[:, None]
    if model.config._attn_implementation == "eager":  # which adds it to the scores
        lowest = torch.finfo(model.dtype).min
        mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, lowest)
    with _only_at(model.get_output_embeddings(), packed.source_N):
        logits = model(
            input_ids=packed.token_ids_RL,
            attention_mask=mask,
            position_ids=packed.position_ids_RL,
            use_cache=False,
        ).logits
    logprobs_N = token_logprobs(logits, packed.targets_N[None], temperature)[0]
    logprobs_BT = torch.zeros_like(batch.mask_BT, dtype=torch.float32)
    return logprobs_BT.index_put((packed.sequence_N, packed.place_N), logprobs_N)


def obstacle(model: Any) -> str | None:
    """Why packed rows would not give this model's log-probabilities; None: they do, as tried."""
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in MASKED_ATTENTIONS:
        return f"attention {attention!r} takes no mask of who sees whom"
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"its layers have {', '.join(sorted(kinds))}"
    if getattr(text, "sliding_window", None) and not getattr(text, "layer_types", None):
        return "its attention has a sliding window"
    batch, packs = _trial(int(text.vocab_size), model.device)
    try:
        with torch.no_grad():
            packed_BT = packed_logprobs(model, batch, packs, 1.0)
            padded_BT = padded_logprobs(model, batch, 1.0)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        # What a model does with a mask that it was not written for is its own affair.
        return f"it does not take a 4-D mask ({type(error).__name__}: {error})"
    difference = float((packed_BT - padded_BT)[batch.mask_BT != 0].abs().max())
    if not difference <= TOLERANCE[model.dtype]:
        return f"its log-probabilities differ by {difference:.2g} between packed and padded rows"
    return None


def padded_logprobs(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """The same from one padded row a sequence; what stands at padding means nothing."""
    num_tokens = batch.mask_BT.shape[1]
    position_ids_BL = (batch.attention_mask_BL.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=batch.token_ids_BL,
        attention_mask=batch.attention_mask_BL,
        position_ids=position_ids_BL,
        logits_to_keep=num_tokens + 1,
        use_cache=False,
    ).logits
    # the logits at a position predict the token after it
    return token_logprobs(logits[:, :-1], batch.token_ids_BL[:, -num_tokens:], temperature)


@contextmanager
def _only_at(head: torch.nn.Module, source_N: torch.Tensor) -> Iterator[None]:
    """Within it the output layer gets the hidden states at these flat positions alone: (1, N, D).

    A hook, because `logits_to_keep` cuts the same columns out of every row, and because what a
    model does to its logits afterwards (scales, caps) is not ours to repeat.
    """

    def select(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (inputs[0].flatten(0, 1)[source_N].unsqueeze(0),)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()


def _trial(vocabulary: int, device: torch.device) -> tuple[Batch, tuple[int, ...]]:
    """Two prompts of 3 and 2 tokens; answers of 2, 3, 1 and of 2 tokens."""
    ids = torch.arange(7, 31).view(4, 6) * 7919 % vocabulary
    ids[1:3, :3] = ids[0, :3]
    attention = torch.tensor([[1] * 5 + [0], [1] * 6, [1] * 4 + [0] * 2, [0] + [1] * 4 + [0]])
    mask_BT = attention[:, 3:].float()
    zeros_BT = torch.zeros_like(mask_BT)
    batch = Batch(
        token_ids_BL=(ids * attention).to(device),
        attention_mask_BL=attention.to(device),
        mask_BT=mask_BT.to(device),
        behaviour_logprobs_BT=zeros_BT.to(device),
        versions_BT=zeros_BT.long().to(device),
        advantages_BT=zeros_BT.to(device),
        group_indices=(0, 0, 0, 1),
    )
    return batch, (3, 1)
