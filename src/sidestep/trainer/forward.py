"""The model's side of a step: how rows go through it, in which precision, with what kept.

_B sequences, _T completion tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sidestep.config import TrainConfig
from sidestep.errors import UsageError
from sidestep.trainer.packing import obstacle, packed_logprobs, padded_logprobs
from sidestep.trainer.parts import Layout
from sidestep.types import Batch


def completion_logprobs(
    model: Any,
    batch: Batch,
    temperature: float,
    packs: Sequence[int] | None = None,
    *,
    autocast: bool = False,
) -> torch.Tensor:
    """Log-probabilities (float32, nats) of the completion tokens under the model: logprobs_BT, with
    gradient. What stands at padding means nothing.

    packs: consecutive sequences that share a packed row; None: one row each. autocast: multiply in
    bfloat16.
    """
    with autocasting(autocast, batch.token_ids_BL.device):
        if packs is None:
            return padded_logprobs(model, batch, temperature)
        return packed_logprobs(model, batch, packs, temperature)


def autocasting(on: bool, device: torch.device) -> AbstractContextManager[Any]:
    """bfloat16 autocast, or nothing."""
    if not on:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def choose_layout(config: TrainConfig, *models: Any) -> Layout:
    """`train.layout` with "auto" decided by trial on every model that is not None.

    Raises UsageError for "packed" where a model's log-probabilities would be wrong.
    """
    if config.layout == "padded" or config.layout == "bucketed":
        return config.layout
    for model in models:
        why_not = obstacle(model) if model is not None else None
        if why_not and config.layout == "packed":
            raise UsageError(
                f'train.layout = "packed" does not suit this model ({why_not}): set "auto" or '
                f'"bucketed"'
            )
        if why_not:
            return "bucketed"
    return "packed"


def prepare_layers(model: Any, config: TrainConfig) -> None:
    """Activation checkpointing and torch.compile, layer by layer, in place; the values stay.

    Not by the model's own switch: it acts in training mode only, which would turn dropout on.
    Layers and not the model are compiled: one compilation serves them all.
    Raises UsageError for a model that does not say what its layers are.
    """
    if not (config.activation_checkpointing or config.compile):
        return
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        key = "activation_checkpointing" if config.activation_checkpointing else "compile"
        raise UsageError(
            f"train.{key} = true: {type(model).__name__} has no layers that transformers marks: "
            f"leave it out"
        )
    for layer in layers:
        if config.compile:
            layer.compile(dynamic=True)
        if config.activation_checkpointing:
            layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # No random numbers are drawn in evaluation mode, so there is no state of theirs to keep.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
