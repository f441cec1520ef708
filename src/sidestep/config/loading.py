"""Recipes and `--set` overrides to a RunConfig, and errors that say where the bad value stands.

Every refusal is a one-line UsageError that starts with its place: `recipe.toml:12: ` for a line of
a file, `--set: ` for an override.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sidestep.config.keys import (
    KEYS,
    SECTIONS,
    allowed_values,
    takes_any_text,
    unknown_key,
    unknown_section,
)
from sidestep.config.schema import ANY_COMBINATION, RunConfig
from sidestep.config.writing import toml_value
from sidestep.errors import UsageError

OVERRIDE = "--set"


def load_config(
    recipe: Path | None = None, overrides: Sequence[str] = (), *, any_combination: bool = False
) -> RunConfig:
    """The config of a TOML file with overrides on top; without a file, the defaults.

    overrides: `section.key=value`, later ones win. The value is read as TOML; what is not TOML is
    taken as text, so `loss.anchor=recomputed` needs no quotes. `section.key=` gives the key its
    default back.
    any_combination: allow keys that break the rules between them (`rules.find_problems`).

    Raises UsageError, one line with the place, the key, the value and the fix.
    """
    source = _Source(recipe, overrides)
    try:
        return RunConfig.model_validate(source.values, context={ANY_COMBINATION: any_combination})
    except ValidationError as error:
        raise UsageError(_explain(error, source)) from error


def with_place(message: str, recipe: Path, overrides: Sequence[str] = ()) -> str:
    """A message that begins with a key, found once the config was put to use, with its place.

    As it was where it begins with no key, or with one that has its default.
    """
    source = _Source(recipe, overrides)
    key = re.match(r"[a-z0-9_.]*[a-z0-9_]", message)
    if key is None or key[0] not in KEYS or not source.sets(key[0]):
        return message
    return f"{source.place(key[0])}: {message}"


class _Source:
    """The values of a recipe with overrides on top, and where each key came from."""

    def __init__(self, recipe: Path | None, overrides: Sequence[str]) -> None:
        """Reads the file; raises UsageError if it is not TOML, for an unknown key, and for an
        override that is none.
        """
        self.recipe = recipe
        self.text = "" if recipe is None else _read_text(recipe)
        self.overridden: set[str] = set()
        try:
            self.values = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{recipe}:{_explain_toml(error, self.text)}") from error
        except (ValueError, RecursionError) as error:  # a number of 5000 digits; a list in a list
            raise UsageError(f"{recipe}: not TOML that can be read: {error}") from error
        for path, message in _misplaced(self.values):
            raise UsageError(f"{recipe}:{line_of(self.text, *path)}: {message}")
        for override in overrides:
            self._override(*_read_override(override))

    def _override(self, key: str, value: Any) -> None:
        section, _, name = key.rpartition(".")
        target = self.values.setdefault(section, {}) if section else self.values
        target[name] = value
        if value is None:
            del target[name]
        self.overridden.add(key)

    def place(self, key: str) -> str:
        """Where `key` was given: `recipe.toml:12` or `--set`."""
        if key in self.overridden:
            return OVERRIDE
        return f"{self.recipe}:{line_of(self.text, *key.split('.'))}"

    def sets(self, key: str) -> bool:
        """Whether the recipe or an override gives `key`; else its value is the default."""
        return key in self.overridden or _lookup(self.values, *key.split(".")) is not None


def _read_text(recipe: Path) -> str:
    try:
        return recipe.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"{recipe}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{recipe}: not UTF-8 text (byte {error.start}): save it so") from error


def _explain_toml(error: tomllib.TOMLDecodeError, text: str) -> str:
    """`3: not valid TOML: ...`, the line number first."""
    found = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
    if found is None:  # "(at end of document)"
        return f"{len(text.splitlines())}: not valid TOML: {error}"
    what = str(error)[: found.start()]
    hint = " (text needs quotes)" if what == "Invalid value" else ""
    return f"{found[1]}: not valid TOML: {what} at column {found[2]}{hint}"


def _misplaced(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and message for every unknown key, unknown section and section that is no table."""
    for name, value in values.items():
        if name in SECTIONS:
            if not isinstance(value, dict):
                yield (name,), _not_a_section(name)
                continue
            for key in value:
                if key not in SECTIONS[name].model_fields:
                    yield (name, key), unknown_key(f"{name}.{key}")
        elif name in KEYS and "." in name:
            yield (name,), f'"{name}" in quotes is one word: write {name} without quotes'
        elif name not in KEYS:
            if isinstance(value, dict) and value:
                key = next(iter(value))
                yield (name, key), unknown_key(f"{name}.{key}")
            else:
                yield (name,), unknown_section(name) if value == {} else unknown_key(name)


def _not_a_section(name: str) -> str:
    example = next(iter(SECTIONS[name].model_fields))
    return f"'{name}' is a section, not a key: set one of its keys, such as {name}.{example}"


def _read_override(override: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals:
        raise UsageError(f"{OVERRIDE} {override}: expected key=value, such as train.steps=20")
    if key in SECTIONS:
        raise UsageError(f"{OVERRIDE}: {_not_a_section(key)}")
    if key not in KEYS:
        raise UsageError(f"{OVERRIDE}: {unknown_key(key)}")
    if not text:
        return key, None
    try:
        values = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return key, text
    value = values["value"]
    # `task.path=2024` names a file. More than one key: a line break that only looked like TOML.
    if len(values) > 1 or (takes_any_text(key) and not isinstance(value, str)):
        return key, text
    return key, value


def _explain(error: ValidationError, source: _Source) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "rule":
        # Of several keys, one on the command line is the likely cause: the recipe was fine before.
        keys = sorted(first["ctx"]["keys"], key=lambda key: key not in source.overridden)
        blamed = next(key for key in keys if source.sets(key))
        return f"{source.place(blamed)}: {first['msg']}"
    # What follows the key in `loc` is a member of a union or an index in a list.
    parts = [str(part) for part in first["loc"]]
    key = ".".join(parts[:2] if parts[0] in SECTIONS else parts[:1])
    value = toml_value(_lookup(source.values, *key.split(".")))
    return f"{source.place(key)}: {key} = {value}: must be {allowed_values(key)}"


def _lookup(values: Mapping[str, Any], *path: str) -> Any:
    """The value at a path of keys, None if it is not there (TOML has no null)."""
    found: Any = values
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def line_of(text: str, *path: str) -> int:
    """Line number (from 1) where the statement that sets `path` begins in valid TOML `text`.

    Reads ever longer beginnings of the text until the key is there: quadratic, but exact for
    dotted keys, inline tables and strings over several lines, with the real parser.
    """
    lines = text.split("\n")
    start = 1
    for end in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("\n".join(lines[:end]) + "\n")
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a statement
        if _lookup(values, *path) is not None:
            return start
        start = end + 1
    raise ValueError(f"{'.'.join(path)} is not in the text")
