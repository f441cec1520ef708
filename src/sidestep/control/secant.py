"""strength="secant": how much of a stale gradient is spent, read from gradients and weights.

The gradient g belongs to the behaviour weights b; the policy has moved on by d. To first order the
fresh gradient is g + H d: along d, h |d| of it is spent, with h the curvature along the way. h is
the slope between consecutive steps,

    h = max(0, mean <g_t - g_(t-1), b_t - b_(t-1)> / mean |b_t - b_(t-1)|^2)

with exponential means (`secant_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.control.acted import Acted
from sidestep.control.facts import StepFacts
from sidestep.control.geometry import Pair, Products
from sidestep.control.parameters import dense
from sidestep.control.sharding import Holdings
from sidestep.control.storage import StoredVector

# In a snapshot: the behaviour weights of the last step, beside the gradients under plain names.
_BEHAVIOUR = "behaviour:"


def plain_name(key: str) -> str:
    """The parameter that a tensor of a snapshot belongs to."""
    return key.removeprefix(_BEHAVIOUR)


@dataclass(slots=True)
class Curvature:
    """The two means of one scope. Their first step counts no more than any other: both start at 0
    and only their ratio is used.
    """

    along: float = 0.0
    squared: float = 0.0

    @property
    def value(self) -> float:
        """h; 0 until behaviour weights have moved."""
        h = self.along / self.squared if self.squared > 0.0 else 0.0
        return h if math.isfinite(h) and h > 0.0 else 0.0

    def learn(self, change: Products, memory: float) -> None:
        """Take in <dg, db> and |db|^2. Weights that did not move say nothing.

        memory: the share of the old means that stays.
        """
        if change.pp > 0.0 and math.isfinite(change.pp) and math.isfinite(change.gp):
            self.along = memory * self.along + (1.0 - memory) * change.gp
            self.squared = memory * self.squared + (1.0 - memory) * change.pp


class Secant:
    """The raw gradient and behaviour weights of the last step, which the next one is compared with.

    The gradient is kept in the snapshot's dtype; the weights in float32 or better, since their
    differences are small: 4 bytes a parameter more than `reference="previous"`.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._gradient = StoredVector(dtype, device)
        self._behaviour = StoredVector(None, device)

    def changes(
        self,
        names: Sequence[str],
        acted: Acted,
        facts: StepFacts,
        holdings: Holdings,
    ) -> Iterator[Pair]:
        """(g_t - g_(t-1), b_t - b_(t-1)) of each parameter that the last step knew."""
        for name in names:
            if name not in self._behaviour.names:
                continue
            here = acted.weights(name)
            before = self._behaviour.get(name, here)
            there = facts.behaviour_of(name, here)
            moved = None if before is None else there.to(before.device) - before
            change = self._gradient_change(name, acted.vector(name), here)
            yield Pair(change, moved, held=holdings[name])

    def keep(self, names: Iterable[str], acted: Acted, facts: StepFacts) -> None:
        """Store this step's gradient, before anything is written to it, and behaviour weights."""
        members, with_gradient = set(), set()
        for name in names:
            members.add(name)
            self._behaviour.copy_in(name, facts.behaviour_of(name, acted.weights(name)))
            gradient = acted.vector(name)
            if gradient is not None:
                with_gradient.add(name)
                self._gradient.copy_in(name, dense(gradient))
        self._gradient.keep_only(with_gradient)
        self._behaviour.keep_only(members)

    @property
    def is_empty(self) -> bool:
        return not self._behaviour.names

    def snapshot(self) -> dict[str, Tensor]:
        weights = self._behaviour.copies()
        return {
            **self._gradient.copies(),
            **{_BEHAVIOUR + name: stored for name, stored in weights.items()},
        }

    def load(self, snapshot: Mapping[str, Tensor]) -> None:
        """Take over what `snapshot` gave; without behaviour weights there is nothing to take."""
        names = {plain_name(key) for key in snapshot if key.startswith(_BEHAVIOUR)}
        self._behaviour.load({name: snapshot[_BEHAVIOUR + name] for name in names})
        self._gradient.load({name: snapshot[name] for name in names & snapshot.keys()})

    def _gradient_change(self, name: str, now: Tensor | None, weights: Tensor) -> Tensor | None:
        before = self._gradient.get(name, weights)
        if now is None:
            return None if before is None else -before
        wide = dense(now).to(torch.promote_types(now.dtype, torch.float32))
        return wide if before is None else wide - before.to(wide.device)
