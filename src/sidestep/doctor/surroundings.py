"""What a run would find around it: environment, cores, packages and the model's files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sidestep.models.folders import CONFIG_FILE
from sidestep.models.packaged import PACKAGED, packaged_model_path
from sidestep.threads import available_cores


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that are not in the config.

    variables: the environment. num_cores: that this process may run on. is_installed: whether a
    module of that name can be imported. context_tokens, num_parameters: of the model; None where
    its folder is not on this machine or does not say.
    """

    variables: Mapping[str, str]
    num_cores: int
    is_installed: Callable[[str], bool]
    context_tokens: int | None = None
    num_parameters: int | None = None


def surroundings_of(model_path: str) -> Surroundings:
    """Look around. Nothing is fetched: of a hub name nothing is known."""
    folder = packaged_model_path() if model_path == PACKAGED else Path(model_path).expanduser()
    return Surroundings(
        variables=dict(os.environ),
        num_cores=available_cores(),
        is_installed=lambda module: find_spec(module) is not None,
        context_tokens=_context_tokens(folder),
        num_parameters=_num_parameters(folder),
    )


def _context_tokens(folder: Path) -> int | None:
    """`max_position_embeddings`; what is wrong with the file is for the run to say."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    limit = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


def _num_parameters(folder: Path) -> int | None:
    """From the headers of the weight files."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as weights:
                names = list(weights.keys())
                total += sum(prod(weights.get_slice(name).get_shape()) for name in names)
        except (OSError, SafetensorError):
            return None
    return total or None
