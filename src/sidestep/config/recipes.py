"""The recipes that ship with the package, and how a name on the command line becomes a file."""

from __future__ import annotations

import difflib
from pathlib import Path

from sidestep.errors import UsageError

QUICKSTART = "quickstart"


def recipes_dir() -> Path:
    """Folder of the recipes: inside the installed package, or `recipes/` of a source checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def find_recipe(name: str) -> Path:
    """The file for a RECIPE argument: a path, else the name of a packaged recipe.

    Raises UsageError with the nearest names there are.
    """
    path = Path(name)
    if path.is_file():
        return path
    packaged = {file.stem: file for file in sorted(recipes_dir().glob("*.toml"))}
    if name in packaged:
        return packaged[name]
    if path.is_dir():
        raise UsageError(f"{name}: is a folder: name a recipe file, such as {path / 'my.toml'}")
    beside = [str(file) for file in sorted(path.parent.glob("*.toml"))]
    near = difflib.get_close_matches(name, [*packaged, *beside], n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise UsageError(f"{name}: no such recipe file ({hint}packaged recipes: {', '.join(packaged)})")
