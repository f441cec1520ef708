"""`sidestep train`: which config, which folder, then the run and its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sidestep.config import RunConfig
from sidestep.config.loading import load_config
from sidestep.config.recipes import QUICKSTART, find_recipe
from sidestep.errors import UsageError
from sidestep.run_folder import CONFIG_FILE, check_new, check_resumable, default_run_dir


def run_training(
    recipe: str | None, overrides: Sequence[str], run_dir: Path | None, resume: bool
) -> None:
    """Train as the arguments say; prints the paths of the run folder and its report.

    Raises UsageError before anything heavy is imported, later what `sidestep.build.train` raises.
    """
    if resume:
        config, run_dir = _resumed(recipe, overrides, run_dir)
    else:
        config, run_dir = _new(recipe, overrides, run_dir)

    from sidestep.doctor import checked

    for finding in checked(config):
        print(f"warning: {finding.line}", file=sys.stderr)

    from sidestep.build import train
    from sidestep.diagnostics.report import write_report

    run_dir = train(config, run_dir, resume=resume)
    print(f"run folder: {run_dir}")
    print(f"report: {write_report(run_dir)}")


def _new(
    recipe: str | None, overrides: Sequence[str], run_dir: Path | None
) -> tuple[RunConfig, Path]:
    file = find_recipe(recipe or QUICKSTART)
    config = load_config(file, overrides)
    if run_dir is None:
        run_dir = default_run_dir(file.stem, datetime.now())
    check_new(run_dir)
    return config, run_dir


def _resumed(
    recipe: str | None, overrides: Sequence[str], run_dir: Path | None
) -> tuple[RunConfig, Path]:
    if run_dir is None:
        raise UsageError(
            "--resume needs --run-dir, the folder of the run to go on with: "
            "sidestep train --resume --run-dir runs/NAME"
        )
    if recipe is not None:
        raise UsageError(
            f"--resume takes its config from {run_dir / CONFIG_FILE}: leave out the recipe "
            f"'{recipe}' (single keys can be changed by --set)"
        )
    check_resumable(run_dir)
    return load_config(run_dir / CONFIG_FILE, overrides), run_dir
