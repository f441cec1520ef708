"""`sidestep simulate`: a stability map of stale gradient descent, as a table, JSON or a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sidestep.cli.simulate_table import print_tables
from sidestep.control.checks import require_count
from sidestep.control.simulate import (
    CONTROLS,
    LAGS,
    LEARNING_RATES,
    Setting,
    SimulationResult,
    stability_map,
    summarise,
)
from sidestep.errors import UsageError

Number = TypeVar("Number", int, float)


def run_simulation(
    *,
    lags: str | None,
    lrs: str | None,
    controls: str | None,
    seed: int,
    seeds: int,
    setting: dict[str, Any],
    as_json: bool,
    picture: Path | None,
) -> None:
    """Simulate the grid and print it. On stdout there is the table, or the JSON and nothing else.

    lags, lrs, controls: values with commas between them; None: the default grid.
    seed, seeds: the first seed, and how many.
    setting: arguments of Setting as the options gave them; None: the default.
    picture: an .html file to write as well.

    Raises UsageError naming the option, before anything is simulated.
    """
    lag_axis = LAGS if lags is None else _numbers("--lags", lags, int)
    lr_axis = LEARNING_RATES if lrs is None else _numbers("--lrs", lrs, float)
    control_axis = CONTROLS if controls is None else _words(controls)
    given = {name: value for name, value in setting.items() if value is not None}
    with _named_as_options():
        common = Setting(**given)
        require_count("seed", seed, at_least=0)
        require_count("seeds", seeds, at_least=1)
    if picture is not None:
        _check_picture(picture)

    with _named_as_options(), _progress() as progress:
        results = stability_map(
            lag_axis,
            lr_axis,
            control_axis,
            seeds=range(seed, seed + seeds),
            progress=progress,
            **given,
        )
    summaries = summarise(results)
    if as_json:
        print(_json(results, with_seed=seeds > 1))
    else:
        print_tables(summaries, common)
    if picture is not None:
        from sidestep.cli.simulate_picture import write_picture

        write_picture(picture, summaries, common)
        Console(stderr=as_json, soft_wrap=True, highlight=False).print(f"picture: {picture}")


def _numbers(option: str, text: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        what, example = ("whole numbers", "0,8,32") if kind is int else ("numbers", "0.05,0.1")
        raise UsageError(
            f"{option}={text!r} must be {what} with commas between them: {option} {example}"
        ) from error


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


# Errors of the library start with the argument's name; these three are called otherwise there.
_OPTIONS = {"lag": "lags", "lr": "lrs", "control": "controls"}


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Errors of the library, about the options that its arguments came from."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).partition("=")
        option = _OPTIONS.get(name, name).replace("_", "-")
        raise UsageError(f"--{option}={rest}") from error


def _check_picture(path: Path) -> None:
    if path.suffix != ".html":
        raise UsageError(f"--picture={str(path)!r} must end in .html: it is a page of its own")
    if not path.parent.is_dir():
        raise UsageError(f"--picture={str(path)!r}: no such folder {str(path.parent)!r}: make it")
    if path.is_dir():
        raise UsageError(f"--picture={str(path)!r} is a folder: name a file")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, gone when done; None where nobody would see it."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    columns = (TextColumn("simulating"), BarColumn(bar_width=None), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _json(results: Sequence[SimulationResult], *, with_seed: bool) -> str:
    """A list with one object a line. `seed` is in it where there are several."""
    rows = [result.as_dict() | ({"seed": result.seed} if with_seed else {}) for result in results]
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    return f"[\n{lines}\n]"
