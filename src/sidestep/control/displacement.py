"""reference="displacement": how far the policy has moved since its data was sampled."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sidestep.control.facts import StepFacts
from sidestep.control.kernels import scale_
from sidestep.control.reference import DEFAULT_HORIZON, Weights
from sidestep.control.storage import StoredVector

_log = logging.getLogger(__name__)


class Displacement:
    """p = weights - behaviour weights for updates, behaviour weights - weights for gradients.

    The signs differ because a descent step moves against the gradient: c > 0 means in both spaces
    that the step goes on the same way.

    Exact where the host gives the behaviour weights: nothing is stored, p is made one parameter at
    a time. Otherwise the behaviour weights are estimated by a mean a of past weights w whose mean
    age is the lag L: a' = (1 - s) a + s w after each step, s = (age + 1 - L) / age in [0, 1], which
    is 1 / L while the lag does not change. Then w - a is the exponential sum of past updates with
    horizon L, sum of (1 - 1/L)^(i-1) u_(t-i), without a copy of the weights beside the mean. It is
    kept in float32 or better: differences of bfloat16 weights would be rounding.
    """

    zero_reason = "zero displacement"

    def __init__(self, sign: float, device: str) -> None:
        self._sign = sign
        self._mean = StoredVector(None, device)
        self._age: float | None = None  # of the mean, in steps; None: there is no mean
        self._facts = StepFacts()
        self._names: dict[str, None] = {}
        self._lag = DEFAULT_HORIZON

    @property
    def known(self) -> Set[str]:
        return self._names.keys() if self._is_exact else self._mean.names

    @property
    def _is_exact(self) -> bool:
        return self._facts.behaviour is not None

    def open(self, facts: StepFacts, names: Sequence[str]) -> None:
        self._facts = facts
        self._names = dict.fromkeys(names)
        if self._is_exact:
            self._forget_mean()

    def settle(self, lag: float | None) -> bool:
        self._lag = DEFAULT_HORIZON if lag is None else lag
        if self._age is None and not self._is_exact:
            how = "no lag either: it is taken as %g" if lag is None else "the noted lag is %g"
            _log.warning(
                "reference='displacement': no behaviour weights were noted (%s): they are "
                "estimated by a mean of past weights",
                how % self._lag,
            )
        return self._lag == 0.0 and not self._is_exact

    def part(self, name: str, weights: Tensor) -> Tensor | None:
        """A new tensor, float32 or better."""
        behaviour = self.behaviour_of(name, weights)
        if behaviour is None:
            return None
        dtype = torch.promote_types(weights.dtype, torch.float32)
        there = behaviour.to(weights.device, torch.promote_types(behaviour.dtype, dtype))
        return torch.sub(weights, there) if self._sign > 0 else torch.sub(there, weights)

    def behaviour_of(self, name: str, weights: Tensor) -> Tensor | None:
        """The behaviour weights of one parameter, as noted or estimated."""
        if not self._is_exact:
            return self._mean.get(name, weights)
        return self._facts.behaviour_of(name, weights)

    def lend(self, name: str, weights: Tensor) -> Tensor | None:
        return self.part(name, weights)

    def keep(self, name: str, vector: Tensor, factor: float = 1.0) -> None:
        scale_(vector, factor)

    def close(
        self, names: Sequence[str], kept: Set[str] | None, weights: Weights, moves: bool
    ) -> None:
        was_exact, self._facts = self._is_exact, StepFacts()  # lets the host's weights go
        if was_exact or not moves:
            return
        age = self._age
        share = 1.0 if age is None else min(1.0, max(0.0, (age + 1.0 - self._lag) / age))
        self._age = 1.0 if age is None else (1.0 - share) * (age + 1.0) + share
        for name in names:
            if name in self._mean.names:
                self._mean.blend_in(name, weights(name), share)
            else:
                self._mean.copy_in(name, weights(name))
        self._mean.keep_only(self._names.keys())

    def state_dict(self) -> dict[str, Any]:
        return {"age": self._age}

    def load_state_dict(self, state: Mapping[str, Any], snapshot: Mapping[str, Tensor]) -> bool:
        age = state.get("age")
        estimated = snapshot if age is not None else {}  # else what is there is the secant's
        self._mean.load(estimated)
        self._age = float(age) if age is not None and estimated else None
        return bool(estimated) or age is None

    def snapshot(self) -> dict[str, Tensor]:
        return self._mean.copies()

    def _forget_mean(self) -> None:
        if self._age is not None:
            self._mean.keep_only(set())
            self._age = None
