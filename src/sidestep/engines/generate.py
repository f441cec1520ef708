"""Batched generation with a KV cache on any transformers causal language model.

Shapes: _R requests, _B rows (completions, members of a request beside each other), _P prompt
positions (left-padded), _T token positions, _V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.engines.sampling import draw_uniforms, sample_tokens
from sidestep.models.loading import context_length

# Rows that have ended leave the batch when only this share still runs: moving the cache costs too.
KEPT_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled, on the CPU. Of row b the first lengths_B[b] positions count.

    token_ids_BT int64, logprobs_BT float32. stopped_B: whether the row ended with a stop token,
    which is then its last.
    """

    token_ids_BT: Tensor
    logprobs_BT: Tensor
    lengths_B: list[int]
    stopped_B: list[bool]


def check_requests(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], sampling: Sampling
) -> None:
    """ValueError for an empty prompt, one over the context, or a request for nothing."""
    if not requests:
        raise ValueError("generate was called with no requests")
    limit = context_length(model.config)
    if sampling.max_new_tokens < 1 or sampling.temperature <= 0:
        raise ValueError(
            f"engine.max_new_tokens must be at least 1 and engine.temperature above 0: "
            f"{sampling.max_new_tokens}, {sampling.temperature}"
        )
    for request in requests:
        length = len(request.prompt_ids)
        if length == 0 or request.num_completions < 1:
            raise ValueError(
                f"request {request.index}: a prompt of {length} tokens, "
                f"{request.num_completions} completions; both must be at least 1"
            )
        if limit is not None and length + sampling.max_new_tokens > limit:
            raise ValueError(
                f"request {request.index}: {length} prompt tokens and engine.max_new_tokens = "
                f"{sampling.max_new_tokens} are over the model's context of {limit}"
            )


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    requests: Sequence[GenerationRequest],
    sampling: Sampling,
    *,
    seed: int,
    stop_ids: Sequence[int],
) -> SampledTokens:
    """Sample every member of every request, all in one batch.

    A prompt is run once and its cache is shared out to its members. Rows that have ended stay in
    the batch until all have: every shape is then a function of the requests alone, and equal
    requests give equal bits. With `sampling.drop_finished` they leave it: the draws are the same,
    log-probabilities may differ by rounding.

    ValueError for requests that cannot be served and for log-probabilities that are not finite.
    """
    check_requests(model, requests, sampling)
    device = model.device
    uniforms = draw_uniforms(requests, sampling.max_new_tokens, seed=seed).astype("float32")
    uniforms_TB = torch.from_numpy(uniforms).to(device).T.contiguous()
    stop = torch.tensor(stop_ids, dtype=torch.int64, device=device)
    decoder = _Decoder(model, requests, sampling.max_new_tokens)
    shape = (sampling.max_new_tokens, uniforms_TB.shape[1])
    ids_TB = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs_TB = torch.zeros(shape, dtype=torch.float32, device=device)
    lengths_B = torch.zeros(shape[1], dtype=torch.int64, device=device)
    # Rows of the batch as it is: where they are among all, and which of them have not ended.
    rows = torch.arange(shape[1], device=device)
    running = torch.ones_like(rows, dtype=torch.bool)
    logits_BV = decoder.prefill()
    for t in range(sampling.max_new_tokens):
        ids, logprobs = sample_tokens(logits_BV, uniforms_TB[t, rows], sampling)
        ids_TB[t, rows], logprobs_TB[t, rows] = ids, logprobs
        lengths_B[rows] += running
        running &= ~torch.isin(ids, stop)
        num_running = int(running.sum())
        if t + 1 == sampling.max_new_tokens or num_running == 0:
            break
        if sampling.drop_finished and num_running <= KEPT_SHARE * len(rows):
            kept = running.nonzero()[:, 0]
            decoder.keep(kept)
            rows, ids, running = rows[kept], ids[kept], running[kept]
        logits_BV = decoder.step(ids)
    if not torch.isfinite(logprobs_TB).all():
        raise ValueError(
            "a sampled log-probability is not a finite number: the weights give NaN or infinity"
        )
    stopped_B = torch.ones_like(lengths_B, dtype=torch.bool)
    stopped_B[rows[running]] = False
    return SampledTokens(
        ids_TB.T.cpu(), logprobs_TB.T.cpu(), lengths_B.tolist(), stopped_B.tolist()
    )


class _Decoder:
    """The model, its KV cache and where every row stands."""

    def __init__(
        self, model: PreTrainedModel, requests: Sequence[GenerationRequest], max_new_tokens: int
    ) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        # transformers renamed the argument in 5.x, model by model.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        width = max(len(request.prompt_ids) for request in requests)
        # Padding is masked out, so any id serves.
        padded = [[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
        lengths_R = torch.tensor([len(r.prompt_ids) for r in requests])
        real_RP = torch.arange(width) >= width - lengths_R[:, None]
        after_RT = torch.ones(len(requests), max_new_tokens, dtype=torch.bool)
        device = model.device
        self._prompt_ids_RP = torch.tensor(padded).to(device)
        self._mask = torch.cat([real_RP, after_RT], dim=1).to(torch.int64).to(device)
        self._padded = bool((lengths_R < width).any())
        self._next_positions = lengths_R[:, None].to(device)
        members = torch.tensor([r.num_completions for r in requests])
        self._request_of_row_B = torch.arange(len(requests)).repeat_interleave(members).to(device)
        self._seen = width

    def prefill(self) -> Tensor:
        """Run the prompts; logits of the first new token of every row, (B, V)."""
        width = self._seen
        positions_RP = self._mask[:, :width].cumsum(dim=-1).sub_(1).clamp_(min=0)
        logits_RV = self._forward(self._prompt_ids_RP, positions_RP)
        rows = self._request_of_row_B
        if len(rows) == len(logits_RV):
            return logits_RV
        self.keep(rows)
        return logits_RV[rows]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch alone."""
        self._cache.reorder_cache(cast("torch.LongTensor", rows))
        self._mask = self._mask[rows]
        self._next_positions = self._next_positions[rows]

    def step(self, ids_B: Tensor) -> Tensor:
        """Append one token to every row; logits of the next, (B, V)."""
        self._seen += 1
        logits_BV = self._forward(ids_B[:, None], self._next_positions)
        self._next_positions = self._next_positions + 1
        return logits_BV

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            # Without padding the causal mask says it all, and building none is faster.
            attention_mask=self._mask[:, : self._seen] if self._padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        logits: Tensor = output.logits[:, -1]
        return logits
