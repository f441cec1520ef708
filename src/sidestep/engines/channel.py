"""The weight channel: a folder of safetensors files through which weights reach the engines.

The trainer publishes `weights-00000012.safetensors` under a temporary name and renames it, so a
reader sees a whole file or none. Readers map the file into memory; one that is discarded while
mapped stays readable until it is let go of. Nothing waits here: a reader asks for a version by
number, or for the newest.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from sidestep.errors import EngineError

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"weights-(\d{8,})\.safetensors")


class WeightChannel:
    """One folder, one writer (the trainer), any number of readers in other processes.

    Versions are published in ascending order. The newest is never discarded, nor is a pinned one
    (pins belong to the writer's process). Safe to use from several threads of the writer.
    """

    def __init__(self, folder: Path | str) -> None:
        """Open the folder, made if it is not there. Files that are in it stay: see `clear`."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pins: Counter[int] = Counter()
        self._lock = Lock()

    def publish(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write tensors of any device as `version`, each shared (tied) one once: its first name.

        ValueError if the channel already holds this version or a newer one: a reader that has it
        live would not load it.
        """
        from safetensors.torch import save_file

        newest = self.newest()
        if newest is not None and version <= newest:
            raise ValueError(
                f"version {version} cannot be published: the weight channel {self.folder} already "
                f"holds version {newest}, and versions ascend; clear() empties a folder left by "
                f"another run"
            )
        temporary = self.folder / f".publishing-{version:08d}-{os.getpid()}"
        save_file(_unique(named_tensors), temporary)
        os.replace(temporary, self._path(version))

    def versions(self) -> tuple[int, ...]:
        """Versions that can be read now, ascending."""
        names = (_NAME.fullmatch(name) for name in os.listdir(self.folder))
        return tuple(sorted(int(match[1]) for match in names if match))

    def newest(self) -> int | None:
        """Newest version published, None before the first."""
        return max(self.versions(), default=None)

    def has(self, version: int) -> bool:
        return self._path(version).exists()

    def read(self, version: int) -> dict[str, torch.Tensor]:
        """Tensors of `version` by name, mapped into memory: copy what is to be kept or changed.

        EngineError with the versions there are, if it was never published or has been discarded.
        """
        from safetensors.torch import load_file

        try:
            return load_file(self._path(version))
        except FileNotFoundError as error:
            raise EngineError(self._missing(version)) from error

    def read_newest(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Newest version and its tensors. EngineError before the first was published."""
        while (version := self.newest()) is not None:
            try:
                return version, self.read(version)
            except EngineError:
                # Between the look and the read a newer version came and this one was discarded:
                # take the newer one.
                if self.newest() == version:
                    raise
        raise EngineError(
            f"no weights have been published in {self.folder}: publish version 0 first"
        )

    def pin(self, version: int) -> None:
        """Keep `version` until `unpin`, whatever `retain` says. Pins count.

        EngineError if the version is not there.
        """
        with self._lock:
            if not self.has(version):
                raise EngineError(self._missing(version))
            self._pins[version] += 1

    def unpin(self, version: int) -> None:
        """Take one pin back; the next `retain` may discard the version. ValueError without one."""
        with self._lock:
            if not self._pins[version]:
                raise ValueError(f"version {version} of weight channel {self.folder} is not pinned")
            self._pins[version] -= 1

    def retain(self, versions: Collection[int]) -> tuple[int, ...]:
        """Discard all other versions, but never the newest or pinned ones. Returns what went."""
        with self._lock:
            there = self.versions()
            gone = tuple(v for v in there[:-1] if v not in versions and not self._pins[v])
            for version in gone:
                self._path(version).unlink()
        return gone

    def clear(self) -> None:
        """Remove every version and what a killed writer left half written. Pins go too."""
        with self._lock:
            for name in os.listdir(self.folder):
                if _NAME.fullmatch(name) or name.startswith(".publishing-"):
                    (self.folder / name).unlink()
            self._pins.clear()

    def close(self) -> None:
        """Remove the versions and the folder, unless something else lies in it. Safe twice."""
        if not self.folder.exists():
            return
        self.clear()
        if not os.listdir(self.folder):
            self.folder.rmdir()

    def _path(self, version: int) -> Path:
        return self.folder / f"weights-{version:08d}.safetensors"

    def _missing(self, version: int) -> str:
        there = ", ".join(map(str, self.versions())) or "none"
        return f"version {version} is not in the weight channel {self.folder} (there: {there})"


def _unique(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors on the CPU and contiguous, copied only where needed; tied ones by first name only."""
    seen = set()
    unique = {}
    for name, tensor in named_tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        unique[name] = tensor.detach().cpu().contiguous()
    return unique
