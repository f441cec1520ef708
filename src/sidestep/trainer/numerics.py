"""What rounding does to log-probabilities, measured by itself so that nobody takes it for lag.

The same weights give a token another log-probability in a batch of another shape, and in another
precision. Both differences are measured on the first group of a batch, in nats, over its trained
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from sidestep.trainer.forward import completion_logprobs
from sidestep.trainer.parts import Sample, rows_of
from sidestep.types import Batch


def first_group(batch: Batch) -> list[int]:
    """The rows of the first group that has a trained token; empty without one."""
    trained = (batch.mask_BT != 0).any(dim=1).tolist()
    group = next((g for g, t in zip(batch.group_indices, trained, strict=True) if t), None)
    return [row for row, index in enumerate(batch.group_indices) if index == group]


@torch.no_grad()
def numerics(
    model: Any, group: Batch, in_batch_BT: torch.Tensor, temperature: float, autocast: bool
) -> dict[str, float]:
    """The `numerics/*` metrics of one group, on the model's device.

    in_batch_BT: its log-probabilities as the step computes them. Beside them: each of its sequences
    alone in the same precision, and alone with weights and products in float32.
    """
    trained_BT = group.mask_BT != 0
    alone_BT, exact_BT = torch.zeros_like(in_batch_BT), torch.zeros_like(in_batch_BT)
    precise = _Float32(model) if model.dtype != torch.float32 else model
    for row in range(group.num_sequences):
        one = Sample(rows_of(group, [row])).trimmed().batch
        width = one.mask_BT.shape[1]
        alone_BT[row, :width] = completion_logprobs(model, one, temperature, autocast=autocast)
        exact_BT[row, :width] = completion_logprobs(precise, one, temperature)
    shape = (in_batch_BT - alone_BT)[trained_BT].abs()
    precision = (alone_BT - exact_BT)[trained_BT].abs()
    return {
        "numerics/batch_shape_mean": float(shape.mean()),
        "numerics/batch_shape_max": float(shape.max()),
        "numerics/precision_mean": float(precision.mean()),
        "numerics/precision_max": float(precision.max()),
    }


class _Float32:
    """The model with its weights widened, for one measurement."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tensors = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }

    def __call__(self, **inputs: Any) -> Any:
        return functional_call(self._model, self._tensors, (), inputs)
