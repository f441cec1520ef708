"""What a step costs: positions that went through the model, padding among them, and memory."""

from __future__ import annotations

import resource
import sys

import torch

from sidestep.config import TrainConfig
from sidestep.trainer.parts import Layout, MicroBatch, lengths_of, micro_batches
from sidestep.types import Batch

Work = dict[str, float | None]


def work_of(batch: Batch, layout: Layout, config: TrainConfig, device: torch.device) -> Work:
    """The metrics of one forward pass over a batch, and the memory that this process had at most.

    device_peak_bytes: of the CUDA allocator; None on other devices.
    """
    sizes = [_positions(batch, part) for part in micro_batches(batch, layout, config)]
    computed, real = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    on_cuda = device.type == "cuda"
    return {
        "tokens/computed": computed,
        "tokens/padding_fraction": 1 - real / computed if computed else None,
        "memory/trainer_peak_bytes": _peak_bytes(),
        "memory/device_peak_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
    }


def _positions(batch: Batch, part: MicroBatch) -> tuple[int, int]:
    """Positions of a micro-batch, and those of them that hold a token."""
    prompts_B, lengths_B = (lengths[part.rows] for lengths in lengths_of(batch))
    if part.packs is None:
        whole = batch.token_ids_BL.shape[1]
        width = int(prompts_B.max() + lengths_B.max()) if part.trimmed else whole
        return width * len(lengths_B), int((prompts_B + lengths_B).sum())
    packs_R = torch.tensor(part.packs)
    ends_R = packs_R.cumsum(0)
    before_B = torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)])
    widths_R = prompts_B[ends_R - packs_R] + before_B[ends_R] - before_B[ends_R - packs_R]
    return int(widths_R.max()) * len(packs_R), int(widths_R.sum())


def _peak_bytes() -> int:
    """Largest resident size of this process so far (its tasks and its libraries too)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
