"""The facts about a machine and its software that a run keeps in env.json, read without importing
what is asked about.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import sidestep

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "tensorboard",
    "plotly",
    "rich",
)
# What changes numbers or speed. Nothing else of the environment is kept: it may hold secrets.
VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "SIDESTEP_MODE",
)


def environment_facts() -> dict[str, Any]:
    """What env.json holds, ready for JSON. A package that is not installed, or a variable that is
    not set, is null.
    """
    return {
        "sidestep": sidestep.__version__,
        "git_commit": git_commit(Path(sidestep.__file__).parent),
        "command": list(sys.argv),
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else None,
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor: Linux has it in a file only, other systems tell it to Python."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_commit(folder: Path) -> str | None:
    """Commit of the checkout that tracks the folder's `__init__.py`, with "+changes" when files
    under it differ.

    None without git, outside a checkout, or for an installed package that merely lies inside
    someone's checkout.
    """
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "--", "__init__.py") is None:
        return None
    commit = git("rev-parse", "--verify", "HEAD")
    return f"{commit}+changes" if commit and git("status", "--porcelain", "--", ".") else commit


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
