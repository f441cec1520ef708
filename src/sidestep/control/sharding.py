"""What of a tensor lies on this rank, and who counts it when ranks add up their sums.

| tensor | on this rank | counted |
|---|---|---|
| plain | all of it, a copy (data parallel) | once, on the first rank that has it |
| plain, named in `local_parameters` | what only this rank has (experts) | here |
| plain, named in `copies` | of what another rank has and counts | not here |
| DTensor, mesh dimension with Shard, _StridedShard | a part | on every coordinate |
| DTensor, mesh dimension with Replicate (HSDP) | a copy | on coordinate 0 |
| DTensor on a mesh of some of the ranks | see above | once, in the mesh of the first rank |

Anything else (Partial: a sum still to be made) is refused by name. No communication here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# By name: `_StridedShard` (FSDP2 over tensor parallelism) is no subclass of Shard in every torch.
_SPLIT = ("Shard", "_StridedShard")
_COPIED = "Replicate"


class _Mesh(Protocol):
    mesh: Tensor

    def get_coordinate(self) -> list[int] | None: ...


class _DTensor(Protocol):
    """What is used of torch.distributed.tensor.DTensor, which is slow to import."""

    device_mesh: _Mesh
    placements: tuple[object, ...]
    _spec: Any

    def to_local(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter as this rank has it.

    ranks: the ranks of its mesh, which hold it together; None: this rank holds all of it.
    own: what another rank has under the same name is something else (`local_parameters`). If not,
        every holder (rank or mesh) has a copy, and one of them counts.
    counts: within `ranks` it is this rank that counts the elements it has.
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    own: bool
    counts: bool
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """All parameters of a step as this rank has them; made by `holdings`."""

    held: Mapping[str, Held]
    declared: tuple[str, ...]

    def __getitem__(self, name: str) -> Held:
        return self.held[name]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a DTensor is laid out over ranks; made by `layout_of`."""

    spec: Any

    def wrap(self, part: Tensor) -> Tensor:
        """The DTensor whose part on this rank is `part`, in its dtype and sharing its memory."""
        from torch.distributed.tensor import DTensor

        # Not DTensor.from_local: it would move a part that is kept in host memory to the mesh's
        # device. FSDP2 makes the DTensors of offloaded parameters like this.
        spec = copy.copy(self.spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
        return cast(Tensor, cast(Any, DTensor)(part, spec, requires_grad=False))


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, without history and without communication.

    It shares memory with the tensor: writing to it in place writes to the tensor.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        part = cast(_DTensor, tensor).to_local()
    if type(part).__name__ == "AsyncCollectiveTensor":  # on its way from other ranks
        part = cast(Any, part).wait()
    return part.detach()


def layout_of(tensor: Tensor) -> Layout | None:
    """The layout of a DTensor; None for a plain tensor."""
    return Layout(cast(_DTensor, tensor)._spec) if is_sharded(tensor) else None


def layouts(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The layouts of the DTensors among some tensors, by name."""
    found = ((name, layout_of(tensor)) for name, tensor in tensors.items())
    return {name: layout for name, layout in found if layout is not None}


def as_global(parts: Mapping[str, Tensor], laid_out: Mapping[str, Layout]) -> dict[str, Tensor]:
    """Parts of this rank as the tensors they belong to, ready for torch's distributed checkpoint.

    A name without a layout stays a plain tensor. Memory is shared.
    """
    return {
        name: laid_out[name].wrap(part) if name in laid_out else part
        for name, part in parts.items()
    }


def as_local(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """The inverse of `as_global`: this rank's parts, and the layouts of the DTensors."""
    return {name: local(tensor) for name, tensor in tensors.items()}, layouts(tensors)


def holdings(
    parameters: Mapping[str, Tensor],
    local_parameters: Iterable[str] = (),
    copies: Iterable[str] = (),
) -> Holdings:
    """How this rank holds the parameters, going by the gradient where there is one.

    local_parameters: names of parameters of which this rank has its own (experts, stages), not a
        copy of what other ranks have. Names that this rank does not have are fine.
    copies: names among those whose elements another rank counts, under whatever name: Megatron's
        tensor-parallel duplicates and shared embeddings, which its slices do not show.

    Raises ValueError, naming the parameter and the fix: a placement other than Shard,
    _StridedShard and Replicate; a shard of FullyShardedDataParallel (FSDP1), which does not say
    how it is laid out, unless it is in `local_parameters`.
    """
    if isinstance(local_parameters, str):
        raise ValueError(f"local_parameters={local_parameters!r} must be a list of names")
    declared = frozenset(local_parameters)
    counted_elsewhere = frozenset(copies)
    mesh_ranks: dict[int, tuple[int, ...]] = {}
    held = {}
    for name, parameter in parameters.items():
        grad = parameter.grad
        tensor = parameter if grad is None else grad
        own = name in declared
        ranks, counts = None, name not in counted_elsewhere
        if is_sharded(tensor):
            dtensor = cast(_DTensor, tensor)
            mesh = dtensor.device_mesh
            if id(mesh) not in mesh_ranks:
                mesh_ranks[id(mesh)] = tuple(mesh.mesh.flatten().tolist())
            ranks, counts = mesh_ranks[id(mesh)], _counts(name, dtensor)
        elif getattr(parameter, "_fsdp_flattened", False) and not own:
            raise ValueError(
                f"parameter {name!r} is a flat shard of FullyShardedDataParallel: with FULL_SHARD "
                "name it in local_parameters=, with other strategies use FSDP2 (fully_shard)"
            )
        held[name] = Held(name, tuple(tensor.shape), ranks, own, counts, grad is not None)
    return Holdings(held, tuple(sorted(declared)))


def _counts(name: str, tensor: _DTensor) -> bool:
    """Whether this rank counts its part of a DTensor among the ranks of its mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    counts = coordinate is not None
    for dimension, placement in enumerate(tensor.placements):
        kind = type(placement).__name__
        if kind == _COPIED:
            counts = counts and coordinate is not None and coordinate[dimension] == 0
        elif kind not in _SPLIT:
            raise ValueError(
                f"the gradient of parameter {name!r} has placement {placement!r}: it must be "
                "Shard or Replicate; reduce it first: "
                "p.grad = p.grad.redistribute(placements=p.placements)"
            )
    return counts
