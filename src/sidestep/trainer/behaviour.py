"""The weights that sampled a mini-batch, for a control that compares with how far they moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Weights = Mapping[str, torch.Tensor]


class BehaviourWeights:
    """Token-weighted mean of the versions that sampled a mini-batch, one parameter at a time.

    tokens_of: trained tokens by version. read: the weights of a version by name (memory-mapped by
    the weight channel, so that only the parameter asked for is held).
    """

    def __init__(self, tokens_of: Mapping[int, int], read: Callable[[int], Weights]) -> None:
        total = sum(tokens_of.values())
        self._parts = [(tokens / total, read(version)) for version, tokens in tokens_of.items()]

    def __call__(self, name: str) -> torch.Tensor:
        """The weights of one parameter. Raises KeyError for a name that the versions lack."""
        if len(self._parts) == 1:
            return self._parts[0][1][name]  # exactly these bits: at lag 0 nothing has moved
        return sum(
            (share * weights[name].float() for share, weights in self._parts),
            start=torch.zeros(()),
        )
