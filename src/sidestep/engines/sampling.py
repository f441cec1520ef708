"""Random numbers that do not depend on scheduling, and tokens drawn with them.

Shapes: _B rows (completions), _T token positions, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestep.engines.protocol import GenerationRequest, Sampling

_STREAMS = {"rollout": 0, "evaluation": 1}
_WORD = 1 << 64  # one 64-bit word of Philox' 256-bit counter and of its 128-bit key
_DRAWS_PER_COUNT = 4


def draw_uniforms(
    requests: Sequence[GenerationRequest], max_new_tokens: int, *, seed: int
) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for every row and token position, shape (B, T).

    Row (request, member m) holds the first T numbers of the Philox stream with key
    (seed, 2 * index + stream) and counter m * 2^64: a function of these and of nothing else. No
    number changes when rows, members or positions are added.

    ValueError for a seed or an index that does not fit into its word of the key.
    """
    rows = sum(request.num_completions for request in requests)
    uniforms_BT = np.empty((rows, max_new_tokens))
    counts = -(-max_new_tokens // _DRAWS_PER_COUNT)
    row = 0
    for request in requests:
        word = 2 * request.index + _STREAMS[request.stream]
        if not (0 <= seed < _WORD and 0 <= word < _WORD):
            raise ValueError(f"seed {seed} or request index {request.index} is not in [0, 2^63)")
        philox = np.random.Philox(key=seed + word * _WORD)
        generator = np.random.Generator(philox)
        for _ in range(request.num_completions):
            generator.random(out=uniforms_BT[row])
            philox.advance(_WORD - counts)  # to the stretch of the next member
            row += 1
    return uniforms_BT


def sample_tokens(
    logits_BV: Tensor, uniforms_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverse CDF: its id and its log-probability (float32), both (B,).

    The token is the first whose cumulative probability exceeds the uniform number. A token of
    probability 0 is never drawn. Log-probabilities are those of softmax(logits / temperature) over
    the whole vocabulary, truncated or not.
    """
    logprobs_BV = torch.log_softmax(logits_BV.float() / sampling.temperature, dim=-1)
    if sampling.greedy:
        ids_B = logprobs_BV.argmax(dim=-1)
    elif sampling.top_p < 1.0 or sampling.top_k > 0:
        probs_BV, order_BV = logprobs_BV.exp().sort(dim=-1, descending=True, stable=True)
        places_B1 = _invert_cdf(_truncate(probs_BV, sampling), uniforms_B)[:, None]
        ids_B = order_BV.gather(1, places_B1)[:, 0]
    else:
        ids_B = _invert_cdf(logprobs_BV.exp(), uniforms_B)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


def _truncate(probs_BV: Tensor, sampling: Sampling) -> Tensor:
    """Zero what top-k and then top-p leave out of probabilities in descending order.

    top_p keeps the shortest head that holds at least this share of what top_k kept.
    """
    if sampling.top_k > 0:
        probs_BV = probs_BV.clone()
        probs_BV[:, sampling.top_k :] = 0.0
    cdf_BV = probs_BV.cumsum(dim=-1)
    before_BV = cdf_BV - probs_BV
    before_BV[:, 0] = 0.0
    return torch.where(before_BV < sampling.top_p * cdf_BV[:, -1:], probs_BV, 0.0)


def _invert_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Index of the first entry whose cumulative sum exceeds uniform * total, shape (B,).

    Rows need not add up to 1.
    """
    cdf_BV = probs_BV.cumsum(dim=-1)
    total_B1 = cdf_BV[:, -1:]
    # A uniform close to 1 may round up to it, and nothing exceeds the total: stay just below.
    below_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    thresholds_B1 = torch.minimum(uniforms_B.float()[:, None] * total_B1, below_B1)
    ids_B1 = torch.searchsorted(cdf_BV, thresholds_B1, right=True).clamp_(max=probs_BV.shape[1] - 1)
    # Parallel sums on a GPU round out of order, so that an entry of 0 can seem to add something:
    # once in many million draws. The likeliest token stands in for it.
    drawable_B1 = probs_BV.gather(1, ids_B1) > 0
    return torch.where(drawable_B1, ids_B1, probs_BV.argmax(dim=-1, keepdim=True))[:, 0]
