"""A vector over all parameters that is kept between steps: one tensor per name."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from sidestep.control.kernels import store_

SNAPSHOT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class StoredVector:
    """Tensors by parameter name; a name without one stands for zeros.

    They are copies, never aliases of what was given, in one dtype (None: that of the first tensor
    given, at least float32), on the device of what was given ("same") or in host memory ("cpu",
    pinned for CUDA). Everything is about local tensors: one rank's share of each parameter.
    """

    def __init__(self, dtype: torch.dtype | None, device: str) -> None:
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    @property
    def names(self) -> Set[str]:
        return self._tensors.keys()

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

    def copy_in(self, name: str, given: Tensor, factor: float = 1.0) -> None:
        """stored = given; given = factor given, in one pass."""
        room = self._room(name, given)
        if room is not given:
            store_(room, given, factor)

    def blend_in(self, name: str, given: Tensor, share: float) -> None:
        """stored = (1 - share) stored + share given."""
        if name in self._tensors:
            stored = self._tensors[name]
            stored.lerp_(given.to(stored.device, stored.dtype), share)
        else:
            self._room(name, given).copy_(given).mul_(share)

    def shrink(self, name: str, factor: float) -> None:
        """stored = factor stored."""
        self._tensors[name].mul_(factor)

    def keep_only(self, names: Set[str]) -> None:
        """Forget the tensors of all other names."""
        for name in self._tensors.keys() - names:
            del self._tensors[name]

    def copies(self) -> dict[str, Tensor]:
        return {name: stored.clone() for name, stored in self._tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over copies of these, in the dtype of this vector."""
        self._tensors = {
            name: given.detach().to(self._dtype_for(given), copy=True).contiguous()
            for name, given in tensors.items()
        }

    def _room(self, name: str, like: Tensor) -> Tensor:
        if name not in self._tensors:
            self._tensors[name] = torch.empty(
                like.shape,
                dtype=self._dtype_for(like),
                device=self._device_for(like),
                pin_memory=self._device == "cpu" and like.device.type == "cuda",
            )
        return self._tensors[name]

    def _dtype_for(self, like: Tensor) -> torch.dtype:
        return self._dtype or torch.promote_types(like.dtype, torch.float32)

    def _device_for(self, like: Tensor) -> torch.device:
        return torch.device("cpu") if self._device == "cpu" else like.device
