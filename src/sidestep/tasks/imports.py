"""Finds a function that a config names: 'module:name' or 'file.py:name'."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sidestep.errors import UsageError
from sidestep.tasks.calls import told


def load_function(key: str, path: str) -> Callable[..., Any]:
    """The callable at `path`. A module is looked for where Python looks and in the current folder.

    Raises UsageError naming `key` for a wrong form, a file or module that is not there or does not
    import, and a name that is not there or not callable.
    """
    place, colon, name = path.rpartition(":")
    if not (colon and place and name):
        raise UsageError(f"{key} {path!r}: not 'module:name' or 'file.py:name'; add the function")
    module = _from_file(key, path, place) if place.endswith(".py") else _module(key, path, place)
    if not hasattr(module, name):
        callables = [other for other, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, callables, n=1)
        fix = f"did you mean {place}:{near[0]}?" if near else f"define it in {place}"
        raise UsageError(f"{key} {path!r}: {place} has no {name!r}; {fix}")
    found = getattr(module, name)
    if not callable(found):
        raise UsageError(
            f"{key} {path!r}: {name} is {type(found).__name__}, not callable; name a function"
        )
    return found  # type: ignore[no-any-return]  # callable() cannot say what it returns


def _from_file(key: str, path: str, place: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise UsageError(f"{key} {path!r}: no such file: {file}; give an existing file.py:name")
    spec = importlib.util.spec_from_file_location(f"sidestep_function_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    _look_in(str(file.parent))
    # Dataclasses and pickle look modules up here while the file is still being executed.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # anything a user's file does on import
        del sys.modules[spec.name]
        raise _import_fault(key, path, place, error) from error
    return module


def _module(key: str, path: str, place: str) -> ModuleType:
    _look_in(os.getcwd())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:  # anything a user's module does on import
        raise _import_fault(key, path, place, error) from error


def _look_in(folder: str) -> None:
    """Lets the file's neighbours be imported; last, so that none of them hides a library."""
    if folder not in sys.path:
        sys.path.append(folder)


def _import_fault(key: str, path: str, place: str, error: BaseException) -> UsageError:
    if isinstance(error, ModuleNotFoundError) and error.name in (place, place.partition(".")[0]):
        return UsageError(
            f"{key} {path!r}: no module {error.name!r}; give 'file.py:name', or install it"
        )
    return UsageError(f"{key} {path!r}: importing {place} failed ({told(error)}); repair it")
