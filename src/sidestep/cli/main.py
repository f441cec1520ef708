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
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A TOML file, or the name of a packaged recipe. Default: quickstart.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. loss.policy=gspo."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects and nothing else.")
    ] = False,
) -> None:
    """Find what would fail silently in a recipe and on this machine, with the fix.

    Exit code: 0 nothing found, 1 something found, 2 the recipe cannot be read.
    """
    with exit_codes():
        from sidestep.cli.doctor import run_doctor

        run_doctor(recipe, overrides or [], as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
) -> None:
    """Write RUN/report.html: what happened in a run, in one file."""
    with exit_codes():
        from sidestep.cli.report import print_report

        print_report(run)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Two or more run folders.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")] = Path(
        "compare.html"
    ),
) -> None:
    """Compare runs: a table here and one HTML file, with intervals over seeds."""
    with exit_codes():
        from sidestep.cli.compare import run_comparison

        run_comparison(runs, out)


@app.command()
def study(
    declaration: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="A grid of runs.")],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: runs/study-<name>.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Cells at a time, one thread each. Default: one a core.")
    ] = None,
    report_only: Annotated[
        bool, typer.Option("--report", help="Run nothing: report what is finished.")
    ] = False,
) -> None:
    """Run a grid of runs, or go on with it, and report: tables and one HTML file."""
    with exit_codes():
        from sidestep.cli.study import run_study

        run_study(declaration, out, workers, report_only)


@app.command()
def simulate(
    lags: Annotated[
        str | None,
        typer.Option(metavar="S,S,...", help="Lags in steps. Default: 0,8,32."),
    ] = None,
    lrs: Annotated[
        str | None,
        typer.Option(
            metavar="X,X,...",
            help="Learning rates. Default: 0.02,0.05,0.1,0.2,0.4,0.8,1.6.",
        ),
    ] = None,
    controls: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Default: none,previous,skip,displacement,half,secant. There is spring, too.",
        ),
    ] = None,
    spring: Annotated[
        float | None, typer.Option(help="Share that control spring takes back. Default: 0.2.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="sgd (default), momentum or adam."),
    ] = None,
    momentum: Annotated[
        float | None, typer.Option(help="Of --optimizer momentum. Default: 0.9.")
    ] = None,
    lag_kind: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="fixed (default), or random with --lags as means: geometric or heavy.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run. Default: 2000.")] = None,
    dim: Annotated[int | None, typer.Option(help="Parameters. Default: 50.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Length of the gradients' noise. Default: 0.1.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(help="How many seeds.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects and nothing else.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write heat maps as well.")
    ] = None,
) -> None:
    """Map where stale gradient descent is stable, on a quadratic: no model, seconds."""
    with exit_codes():
        from sidestep.cli.simulate import run_simulation

        run_simulation(
            lags=lags,
            lrs=lrs,
            controls=controls,
            seed=seed,
            seeds=seeds,
            setting={
                "optimizer": optimizer,
                "momentum": momentum,
                "lag_kind": lag_kind,
                "steps": steps,
                "dim": dim,
                "noise": noise,
                "spring": spring,
            },
            as_json=as_json,
            picture=picture,
        )


def main() -> None:
    """Entry point of the `sidestep` script. Exits with a code of `sidestep.cli.exits`."""
    # Before any command can import torch, which reads these variables once.
    set_thread_environment()
    app(prog_name="sidestep")


if __name__ == "__main__":
    main()
