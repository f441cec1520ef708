"""Stands in for a GPU kernel in trl_async_grpo.py. Nothing here is about Sidestep's control."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing


class PaddedAttention:
    """What TRL asks flash-attn for, causal attention of ragged segments, by padding them."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ends_q: Tensor,
        ends_k: Tensor,
        longest_q: int,
        longest_k: int,
        softmax_scale: float | None = None,
        **options: object,
    ) -> Tensor:
        places_q, real_q = padded_places(ends_q, longest_q)
        places_k, real_k = padded_places(ends_k, longest_k)
        # The last query of a segment sees all of its keys, the one before all but one.
        behind = ends_k.diff() - ends_q.diff()
        last_seen = behind[:, None] + torch.arange(longest_q)
        mask = (torch.arange(longest_k) <= last_seen[:, :, None]) & real_k[:, None, :]
        q, k, v = (x.transpose(1, 2) for x in (q[places_q], k[places_k], v[places_k]))
        out = scaled_dot_product_attention(
            q, k, v, mask[:, None], scale=softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2)[real_q]


def padded_places(ends: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Where each segment's tokens lie, one row a segment, and which of them are real."""
    places = ends[:-1, None] + torch.arange(longest)
    return places.clamp(max=int(ends[-1]) - 1), places < ends[1:, None]


def run_on_a_cpu() -> None:
    packing._flash_attn = lambda: PaddedAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *args: 1e12  # only for a metric
