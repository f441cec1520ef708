"""What the parameters of an optimizer are called."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer

_log = logging.getLogger(__name__)


class OptimizerNames:
    """Names of an optimizer's parameters, those of groups added later too.

    From `named_parameters` if given, else the optimizer's own (built with named parameters), else
    group and position ("0.3").

    Raises ValueError for a parameter that is missing in `named_parameters`.
    """

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
    ) -> None:
        self._optimizer = optimizer
        # By id, as tensors compare by elements. Ids are used again once a parameter is gone.
        self._given: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._told = named_parameters is None
        if named_parameters is None:
            return
        if isinstance(named_parameters, Mapping):
            named_parameters = named_parameters.items()
        if callable(named_parameters):
            raise ValueError("named_parameters is a function: call it, model.named_parameters()")
        for name, parameter in named_parameters:
            self._given.setdefault(id(parameter), (weakref.ref(parameter), name))
        for i, group in enumerate(optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if self._given_to(parameter) is None:
                    raise ValueError(
                        f"named_parameters: parameter {j} of the optimizer's group {i} is missing"
                    )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for i, group in enumerate(self._optimizer.param_groups):
            own_names = group.get("param_names")
            for j, parameter in enumerate(group["params"]):
                name = self._given_to(parameter)
                if name is None:
                    name = own_names[j] if own_names else f"{i}.{j}"
                    self._tell(name)
                yield name, parameter

    def _given_to(self, parameter: Tensor) -> str | None:
        found, name = self._given.get(id(parameter), (None, ""))
        return name if found is not None and found() is parameter else None

    def _tell(self, name: str) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "a parameter that came into the optimizer after attach() is in no "
                "named_parameters: it is called %r",
                name,
            )
