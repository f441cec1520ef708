"""What decoupled weight decay does in one step, which is no part of the update."""

from __future__ import annotations

import logging
from typing import Any

from torch.optim import Optimizer

# Optimizers outside torch say it by name at best (bitsandbytes, torchao, transformers, lion).
_DECOUPLED_NAMES = ("AdamW", "Adafactor", "Lion", "Muon", "Sophia")

_log = logging.getLogger(__name__)


def kept_share(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """What is left of a group's weights after decoupled decay alone: 1 - lr weight_decay.

    1 without decay, and where it is a part of the gradient (SGD, Adam).
    """
    decay, rate = group.get("weight_decay"), group.get("lr")
    if not decay or rate is None or not _is_decoupled(optimizer, group):
        return 1.0
    return 1.0 - float(rate) * float(decay)


def tell_of_unknown_decay(optimizer: Optimizer) -> None:
    """Warn of weight decay that cannot be told from the update."""
    kind = type(optimizer)
    known = any(base.__module__.startswith("torch.optim") for base in _lineage(kind))
    for group in optimizer.param_groups:
        if group.get("weight_decay") and not known and not _is_decoupled(optimizer, group):
            _log.warning(
                "space='update': the weight decay of %s is taken for a part of its update. If it "
                "is decoupled, set 'decoupled_weight_decay': True in its parameter groups",
                kind.__name__,
            )
            return


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    said = group.get("decoupled_weight_decay")
    if isinstance(said, bool):
        return said
    names = [base.__name__ for base in _lineage(type(optimizer))]
    return any(known in name for known in _DECOUPLED_NAMES for name in names)


def _lineage(kind: type) -> list[type]:
    """The classes between an optimizer and torch's Optimizer."""
    return [base for base in kind.__mro__ if issubclass(base, Optimizer) and base is not Optimizer]
