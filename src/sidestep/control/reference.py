"""What this step's vector is compared with: the stale direction.

The vector is the gradient (space="gradient") or the update that the optimizer made of it
(space="update"). Here are the references made of past vectors; displacement.py has the one made of
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

from torch import Tensor

from sidestep.control.facts import StepFacts
from sidestep.control.kernels import scale_
from sidestep.control.storage import StoredVector

# Where the host does not say the lag. Staleness of published runs is 0 to 32.
DEFAULT_HORIZON = 8.0

# Local weights of a parameter before the step, by name.
Weights = Callable[[str], Tensor]

_log = logging.getLogger(__name__)


class Reference(Protocol):
    """A vector p over the parameters, one name at a time. Tensors are local shares.

    A step is: `open`; `part` for what is measured; `settle`; if the vector is kept, for each
    parameter that has one `lend` if it is projected, and `keep`; `close`.

    zero_reason: what the record says where p is zero.
    """

    zero_reason: str

    @property
    def known(self) -> Set[str]:
        """The names p speaks about; empty: there is no reference."""
        ...

    def open(self, facts: StepFacts, names: Sequence[str]) -> None:
        """A new step of the parameters `names` begins."""
        ...

    def settle(self, lag: float | None) -> bool:
        """The lag of this step, one number for all ranks; whether p is zero because of it."""
        ...

    def part(self, name: str, weights: Tensor) -> Tensor | None:
        """p's part of a parameter, not to be changed; None for zeros.

        weights: the parameter before the step.
        """
        ...

    def lend(self, name: str, weights: Tensor) -> Tensor | None:
        """As `part`, and the caller may overwrite it with the vector it then gives to `keep`."""
        ...

    def keep(self, name: str, vector: Tensor, factor: float = 1.0) -> None:
        """Take in a parameter's part of this step's vector, then multiply that by `factor`."""
        ...

    def close(
        self, names: Sequence[str], kept: Set[str] | None, weights: Weights, moves: bool
    ) -> None:
        """The step of the parameters `names` is measured and written.

        kept: names whose vector went to `keep`; None: this step's vector is not kept.
        moves: the optimizer moves weights in this step.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], snapshot: Mapping[str, Tensor]) -> bool:
        """Take over what `state_dict` and `snapshot` gave; whether it was complete."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the stored tensors, by name."""
        ...


class Previous:
    """reference="previous": the vector of the last step that had a finite one other than zero.

    A name in `known` without a tensor had no vector then, which counts as zero.
    """

    zero_reason = "zero reference"

    def __init__(self, stored: StoredVector) -> None:
        self._stored = stored
        self._known: dict[str, None] = {}  # an ordered set

    @property
    def known(self) -> Set[str]:
        return self._known.keys()

    def open(self, facts: StepFacts, names: Sequence[str]) -> None:
        pass

    def settle(self, lag: float | None) -> bool:
        return False

    def part(self, name: str, weights: Tensor) -> Tensor | None:
        return self._stored.get(name, weights)

    def lend(self, name: str, weights: Tensor) -> Tensor | None:
        return self._stored.get(name, weights)

    def keep(self, name: str, vector: Tensor, factor: float = 1.0) -> None:
        self._stored.copy_in(name, vector, factor)  # what was lent is there already

    def close(
        self, names: Sequence[str], kept: Set[str] | None, weights: Weights, moves: bool
    ) -> None:
        if kept is not None:
            self._known = dict.fromkeys(names)
            self._stored.keep_only(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"known": list(self._known)}

    def load_state_dict(self, state: Mapping[str, Any], snapshot: Mapping[str, Tensor]) -> bool:
        self._stored.load(snapshot)
        self._known = dict.fromkeys(state.get("known") or snapshot) if snapshot else {}
        return bool(snapshot)

    def snapshot(self) -> dict[str, Tensor]:
        return self._stored.copies()


class ExponentialMean(Previous):
    """reference="ema": the mean of past vectors v with weights rho^age, rho = 1 - 1 / horizon.

    The horizon is the lag that the host notes (at least 1: then it is the previous vector), or
    DEFAULT_HORIZON. As a running mean, W the sum of weights: W' = rho W + 1, m' = m + (v - m) / W',
    so that the first vectors count no more than the others.
    """

    def __init__(self, stored: StoredVector) -> None:
        super().__init__(stored)
        self._weight = 0.0
        self._share = 1.0

    def settle(self, lag: float | None) -> bool:
        horizon = max(1.0, DEFAULT_HORIZON if lag is None else lag)
        if lag is None and not self._known:
            _log.warning("reference='ema': no lag was noted: a horizon of %g steps", horizon)
        self._share = 1.0 / ((1.0 - 1.0 / horizon) * self._weight + 1.0)
        return False

    def lend(self, name: str, weights: Tensor) -> Tensor | None:
        part = self.part(name, weights)
        return None if part is None else part.clone()

    def keep(self, name: str, vector: Tensor, factor: float = 1.0) -> None:
        self._stored.blend_in(name, vector, self._share)
        scale_(vector, factor)

    def close(
        self, names: Sequence[str], kept: Set[str] | None, weights: Weights, moves: bool
    ) -> None:
        if kept is None:
            return
        self._known = dict.fromkeys(names)
        self._stored.keep_only(self._known.keys())
        for name in self._stored.names - kept:
            self._stored.shrink(name, 1.0 - self._share)
        self._weight = 1.0 / self._share

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any], snapshot: Mapping[str, Tensor]) -> bool:
        complete = super().load_state_dict(state, snapshot)
        self._weight = float(state.get("weight", 0.0)) if complete else 0.0
        return complete
