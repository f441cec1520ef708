"""`sidestep train`: which config, which folder, then the run and its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from sidestep.config import RunConfig
from sidestep.config.loading import load_config, with_place
from sidestep.config.recipes import QUICKSTART, find_recipe
from sidestep.errors import UsageError
from sidestep.run_folder import (
    CONFIG_FILE,
    REPORT_FILE,
    check_new,
    check_resumable,
    default_run_dir,
    has_steps,
)


def run_training(
    recipe: str | None, overrides: Sequence[str], run_dir: Path | None, resume: bool
) -> None:
    """Train as the arguments say; prints the paths of the run folder and its report.

    Raises UsageError before anything heavy is imported, later what `sidestep.build.train` raises.
    """
    if resume:
        config_file, run_dir = _resumed(recipe, run_dir)
    else:
        config_file, run_dir = _new(recipe, run_dir)
    config = load_config(config_file, overrides)
    try:
        _train(config, run_dir, resume)
    except UsageError as error:
        raise UsageError(with_place(str(error), config_file, overrides)) from error


def _train(config: RunConfig, run_dir: Path, resume: bool) -> None:
    from sidestep.doctor import checked

    for finding in checked(config):
        print(f"warning: {finding.line}", file=sys.stderr)

    from sidestep.build import train
    from sidestep.diagnostics.runs import read_run
    from sidestep.diagnostics.summary import equal_rewards, summarise

    try:
        train(config, run_dir, resume=resume)
    finally:
        if has_steps(run_dir):
            summary = summarise(read_run(run_dir))
            print(summary.verdict())
            if notice := equal_rewards(summary):
                print(f"warning: {notice}", file=sys.stderr)
            print(f"run folder: {run_dir}")
            print(f"report: {run_dir / REPORT_FILE}")


def _new(recipe: str | None, run_dir: Path | None) -> tuple[Path, Path]:
    """File of the config, and the folder."""
    file = find_recipe(recipe or QUICKSTART)
    if run_dir is None:
        run_dir = default_run_dir(file.stem, datetime.now())
    check_new(run_dir)
    return file, run_dir


def _resumed(recipe: str | None, run_dir: Path | None) -> tuple[Path, Path]:
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
    return run_dir / CONFIG_FILE, run_dir
