"""The frozen model that a KL penalty pulls towards."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sidestep.config import RunConfig
from sidestep.models.loading import check_model, load_model


def reference_model(model: Any, config: RunConfig, device: torch.device) -> Any:
    """A frozen copy of `model` as it is now, or the model of `model.reference_path`; None without
    a penalty.

    Made before a checkpoint is loaded into `model`, so that a resumed run has the same reference.
    """
    if config.loss.kl_coef == 0.0:
        return None
    path = config.model.reference_path
    if path is None:
        reference = copy.deepcopy(model)
    else:
        reference = load_model(
            str(check_model(path)), config.model.dtype, device, config.model.attn_implementation
        )
    return reference.requires_grad_(False)
