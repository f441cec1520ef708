"""Log-probabilities of sampled tokens, without a float32 copy of the logits.

_B sequences, _T tokens, _V vocabulary. With a vocabulary of 150 000 a float32 copy of the logits,
and the one that autograd would keep, are the largest tensors of a training step. So the work goes
through slices, autograd keeps only the logits that exist anyway, and the backward pass computes the
softmax again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

# 64 MiB in float32: large enough to keep a GPU busy, small beside a model that needs slices at all.
_CHUNK_ELEMENTS = 1 << 24


def token_logprobs(
    logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log softmax(logits / temperature) at the given ids: logprobs_BT in nats, always float32.

    logits_BTV: row t predicts token t (already shifted). Any float dtype, any strides.
    token_ids_BT: int64 in [0, V), padding too: any id will do there, the mask comes later.
    temperature: the one the tokens were sampled with; with another the ratio to the behaviour
    policy is not 1 before any update.

    The gradient is grad * (onehot - softmax) / temperature in the dtype of the logits; there is no
    second derivative. Rows that receive a gradient of exactly 0 (masked tokens) pass on exactly 0,
    even where their logits are NaN or infinite.
    Raises ValueError for shapes that do not fit or a temperature that is not a positive number; an
    id out of range is torch's RuntimeError.
    """
    _check(logits_BTV, temperature)
    if token_ids_BT.shape != logits_BTV.shape[:2]:
        raise ValueError(
            f"token_ids_BT has shape {tuple(token_ids_BT.shape)}, but logits_BTV has shape "
            f"{tuple(logits_BTV.shape)}: there must be one row of logits per token"
        )
    logprobs_BT: torch.Tensor = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch has no type for it
        logits_BTV, token_ids_BT, temperature
    )
    return logprobs_BT


@torch.no_grad()
def token_entropy(logits_BTV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of softmax(logits / temperature): entropy_BT in nats, float32, without gradient.

    Logits of -inf count as probability 0. Raises ValueError like `token_logprobs`.
    """
    _check(logits_BTV, temperature)
    entropy_BT = logits_BTV.new_empty(logits_BTV.shape[:2], dtype=torch.float32)
    for chunk in _chunks(logits_BTV.shape):
        probs = torch.softmax(logits_BTV[chunk].float() / temperature, dim=-1)
        entropy_BT[chunk] = torch.special.entr(probs).sum(dim=-1)
    return entropy_BT


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_BTV, token_ids_BT)
        ctx.temperature = temperature
        logprobs_BT = logits_BTV.new_empty(token_ids_BT.shape, dtype=torch.float32)
        for chunk in _chunks(logits_BTV.shape):
            logprobs = torch.log_softmax(logits_BTV[chunk].float() / temperature, dim=-1)
            logprobs_BT[chunk] = logprobs.gather(-1, token_ids_BT[chunk].unsqueeze(-1)).squeeze(-1)
        return logprobs_BT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BT: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_BTV, token_ids_BT = ctx.saved_tensors
        grad_BTV = torch.empty_like(logits_BTV)
        for chunk in _chunks(logits_BTV.shape):
            grad = grad_BT[chunk].unsqueeze(-1)
            scaled = grad / ctx.temperature
            rows = torch.softmax(logits_BTV[chunk].float() / ctx.temperature, dim=-1).mul_(-scaled)
            rows.scatter_add_(-1, token_ids_BT[chunk].unsqueeze(-1), scaled)
            grad_BTV[chunk] = rows.masked_fill_(grad == 0, 0.0)
        return grad_BTV, None, None


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Slices over (B, T) of about `_CHUNK_ELEMENTS` logits each; one row of V is never cut."""
    num_sequences, num_tokens, vocabulary = shape
    tokens = max(1, min(num_tokens, _CHUNK_ELEMENTS // max(1, vocabulary)))
    sequences = max(1, _CHUNK_ELEMENTS // max(1, tokens * vocabulary))
    for first in range(0, num_sequences, sequences):
        for start in range(0, num_tokens, tokens):
            yield slice(first, first + sequences), slice(start, start + tokens)


def _check(logits_BTV: torch.Tensor, temperature: float) -> None:
    if logits_BTV.dim() != 3:
        raise ValueError(
            f"logits_BTV has shape {tuple(logits_BTV.shape)}: "
            f"it must be (sequences, tokens, vocabulary)"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature is {temperature!r}: "
            f"it must be the positive number that the tokens were sampled with"
        )
