"""Where the tiny model that ships with Sidestep lies. Imports nothing heavy."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

PACKAGED = "packaged"
"""Value of `model.path` that stands for the model shipped with the package."""


def packaged_model_path() -> Path:
    """Folder of the packaged model: configuration, tokenizer and weights (see make_packaged)."""
    return Path(str(files("sidestep.models") / PACKAGED))
