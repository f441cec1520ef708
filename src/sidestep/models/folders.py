"""From `model.path` to a local folder that has all its files. Loads no torch.

Every fault is a UsageError of one line with the key, the value and the fix.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sidestep.errors import UsageError
from sidestep.models.packaged import PACKAGED, packaged_model_path

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
# Exports in folders of their own and second copies of the weights: gigabytes nobody would read.
HUB_IGNORED = ["*/*", "consolidated*"]


def refusal(path: str, problem: str, fix: str) -> UsageError:
    """The error for a `model.path` that cannot be used."""
    return UsageError(f"model.path {path!r}: {problem}; {fix}")


def resolve_model_path(path: str) -> Path:
    """The local folder that `model.path` stands for; a hub name is fetched (or found in the cache).

    Raises UsageError if it is no folder and cannot be fetched.
    """
    if path == PACKAGED:
        return packaged_model_path()
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise refusal(path, "is a file, not a folder", f"give its folder, {str(folder.parent)!r}")
    if not HUB_NAME.fullmatch(path):
        raise refusal(path, "no such folder", _nearest(folder))
    return _fetch(path, folder)


def check_files(path: str, folder: Path) -> None:
    """Raises UsageError unless `folder` has a configuration and all its weights as safetensors."""
    if not (folder / CONFIG_FILE).is_file():
        inside = sorted(child.name for child in folder.iterdir() if (child / CONFIG_FILE).is_file())
        fix = "give a folder written by save_pretrained"
        if inside:
            fix = f"did you mean {str(folder / inside[-1])!r}?"
        raise refusal(path, f"the folder has no {CONFIG_FILE}", fix)
    if (folder / WEIGHTS_FILE).is_file():
        _check_weights(path, folder, [WEIGHTS_FILE])
        return
    if (folder / INDEX_FILE).is_file():
        _check_weights(path, folder, _shards(path, folder))
        return
    patterns = ("*.bin", "*.pt", "*.pth")
    pickled = sorted(file.name for pattern in patterns for file in folder.glob(pattern))
    if pickled:
        raise refusal(
            path,
            f"its weights are pickled ({pickled[0]}), which can run code when loaded",
            "save them as safetensors with model.save_pretrained(folder)",
        )
    raise refusal(
        path,
        f"the folder has no weights ({WEIGHTS_FILE} or {INDEX_FILE})",
        "save them with model.save_pretrained(folder)",
    )


def _shards(path: str, folder: Path) -> list[str]:
    try:
        index = json.loads((folder / INDEX_FILE).read_text("utf-8"))
        return sorted(set(index["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        problem = f"{INDEX_FILE} is not an index of weights"
        raise refusal(path, problem, "copy the model folder again") from error


def _check_weights(path: str, folder: Path, names: list[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise refusal(
            path,
            f"{len(missing)} of its {len(names)} weight files are missing ({missing[0]})",
            "copy the model folder again",
        )
    for name in names:
        try:
            with safe_open(folder / name, framework="np"):  # reads the header, compares the size
                pass
        except SafetensorError as error:
            problem = f"{name} is cut short or no safetensors file ({error})"
            fix = "copy it again (after a git clone: git lfs pull)"
            raise refusal(path, problem, fix) from error


def _fetch(path: str, folder: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        local = snapshot_download(path, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED)
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"no such folder, and the Hugging Face hub did not give it ({reason})"
        raise refusal(path, problem, _nearest(folder)) from error
    return Path(local)


def _nearest(folder: Path) -> str:
    """The fix for a folder that is not there: the model beside it with the nearest name, if any."""
    offered = {PACKAGED: PACKAGED}
    if folder.parent.is_dir():
        beside = (child for child in folder.parent.iterdir() if (child / CONFIG_FILE).is_file())
        offered |= {child.name: str(child) for child in beside}
    near = difflib.get_close_matches(folder.name, offered, n=1)
    if near:
        return f"did you mean {offered[near[0]]!r}?"
    return f"give a Hugging Face model folder, or {PACKAGED!r} for the model that ships here"
