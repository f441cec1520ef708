"""What this step's gradient is compared with: a stored copy of the previous one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

SNAPSHOT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PreviousGradient:
    """The gradient of the last step that had a finite one other than zero, by parameter name.

    Tensors are copies of its own, never aliases of `p.grad`, in one dtype whatever the gradient's,
    on the gradient's device ("same") or in host memory ("cpu", pinned for CUDA). A name in `known`
    without a tensor had no gradient, which counts as zero. `batch` is the rollout batch the
    gradient came from, None if the host did not say.
    """

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self.known: tuple[str, ...] = ()
        self.batch: int | str | None = None
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    def get(self, name: str, like: Tensor) -> Tensor | None:
        """The stored part of a parameter that is shaped and placed as `like`; None for zeros.

        Raises ValueError if the stored shape differs.
        """
        stored = self._tensors.get(name)
        if stored is None:
            return None
        if stored.shape != like.shape:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(like.shape)}, its snapshot "
                f"{tuple(stored.shape)}: the loaded control state belongs to another model"
            )
        device = self._device_for(like)
        if stored.device != device:  # after load_state_dict, or when the model was moved
            stored = self._tensors[name] = stored.to(device)
        return stored

    def store(self, name: str, grad: Tensor) -> None:
        """Copy a gradient in."""
        if name not in self._tensors:
            self._tensors[name] = torch.empty(
                grad.shape,
                dtype=self._dtype,
                device=self._device_for(grad),
                pin_memory=self._device == "cpu" and grad.device.type == "cuda",
            )
        self._tensors[name].copy_(grad)

    def keep_only(self, known: Sequence[str], with_gradient: Set[str]) -> None:
        """Speak about `known` from now on, and forget the tensors of all but `with_gradient`."""
        self.known = tuple(known)
        for name in self._tensors.keys() - with_gradient:
            del self._tensors[name]

    def state_dict(self) -> dict[str, Any]:
        """`known` and `batch`, plain, and `snapshot`: copies of the tensors by name."""
        snapshot = {name: stored.clone() for name, stored in self._tensors.items()}
        return {"known": list(self.known), "batch": self.batch, "snapshot": snapshot}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Tensors are copied, in this snapshot's dtype."""
        snapshot: Mapping[str, Tensor] = state.get("snapshot") or {}
        self.known = tuple(state.get("known") or snapshot)
        self.batch = state.get("batch")
        self._tensors = {
            name: stored.detach().to(self._dtype, copy=True).contiguous()
            for name, stored in snapshot.items()
        }

    def _device_for(self, like: Tensor) -> torch.device:
        return torch.device("cpu") if self._device == "cpu" else like.device
