"""What this step's gradient is compared with: a stored copy of the previous one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SNAPSHOT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PreviousGradient:
    """The gradient of the last step that had a finite one other than zero, by parameter name.

    Tensors are its own copies, never aliases of `p.grad`, in one dtype whatever the gradient's
    dtype, on the gradient's device ("same") or in pinned host memory ("cpu"). Names in `known`
    without a tensor had no gradient, which counts as zero. `batch` is the rollout batch the
    gradient came from, None if the host did not say.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self.known: tuple[str, ...] = ()
        self.batch: int | str | None = None
        self._tensors: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    def get(self, name: str, like: Tensor) -> Tensor | None:
        """The stored part for a parameter shaped and placed like `like`; None if it had no gradient.

        Raises ValueError if the stored shape differs.
        """
        stored = self._tensors.get(name)
        if stored is None:
            return None
        if stored.shape != like.shape:
            raise ValueError(
                f"the snapshot of parameter {name!r} has shape {tuple(stored.shape)}, the parameter "
                f"{tuple(like.shape)}: the loaded control state belongs to another model"
            )
        device = self._device_for(like)
        if stored.device != device:  # a loaded state, or a model that was moved
            stored = self._tensors[name] = stored.to(device)
        return stored

    def store(self, name: str, grad: Tensor) -> None:
        """Copy a gradient in."""
        if name not in self._tensors:
            device = self._device_for(grad)
            self._tensors[name] = torch.empty(
                grad.shape,
                dtype=self.dtype,
                device=device,
                pin_memory=device.type == "cpu" and grad.device.type == "cuda",
            )
        self._tensors[name].copy_(grad)

    def keep_only(self, known: Sequence[str], with_tensor: set[str]) -> None:
        """Forget what the step did not have: parameters that left, and those whose gradient was None."""
        self.known = tuple(known)
        for name in self._tensors.keys() - with_tensor:
            del self._tensors[name]

    def state_dict(self) -> dict[str, Any]:
        """`known` and `batch` (plain) and `snapshot` (own copies of the tensors by name)."""
        snapshot = {name: stored.detach().clone() for name, stored in self._tensors.items()}
        return {"known": list(self.known), "batch": self.batch, "snapshot": snapshot}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; tensors are copied and cast to this snapshot's dtype."""
        snapshot: Mapping[str, Tensor] = state.get("snapshot") or {}
        self.known = tuple(state.get("known") or snapshot)
        self.batch = state.get("batch")
        self._tensors = {
            name: stored.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)
            for name, stored in snapshot.items()
        }

    def _device_for(self, grad: Tensor) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else grad.device
