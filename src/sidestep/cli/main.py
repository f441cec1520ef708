"""The `sidestep` command: what can be typed. What a command does is in the module of its name.

Everything heavy is imported inside the commands, after the arguments are known to be right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sidestep import __version__
from sidestep.cli.exits import exit_codes
from sidestep.threads import set_thread_environment

app = typer.Typer(
    name="sidestep",
    help="Asynchronous reinforcement learning for language models that stays stable.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: the last line of an error says why
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sidestep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file, or the name of a packaged recipe. Default: quickstart.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.steps=20."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run folder itself. Default: runs/<recipe>-<date>-<time>."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir.")
    ] = False,
) -> None:
    """Train by asynchronous reinforcement learning, then report."""
    with exit_codes():
        from sidestep.cli.train import run_training

        run_training(recipe, overrides or [], run_dir, resume)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
) -> None:
    """Write RUN/report.html: what happened in a run, in one file."""
    with exit_codes():
        from sidestep.cli.report import print_report

        print_report(run)


def main() -> None:
    """Entry point of the `sidestep` script. Exits with a code of `sidestep.cli.exits`."""
    # Before any command can import torch, which reads these variables once.
    set_thread_environment()
    app(prog_name="sidestep")


if __name__ == "__main__":
    main()
