"""Config to TOML. The standard library reads TOML but does not write it; a config needs little."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.config.schema import RunConfig


def to_toml(config: RunConfig) -> str:
    """Every key of `config`, defaults included. `load_config` reads it back to an equal config.

    TOML has no null: a key that is not set becomes the comment `# train.max_norm: not set`.
    """
    return "\n".join(_lines(config)) + "\n"


def _lines(config: RunConfig) -> Iterator[str]:
    sections = config.model_dump()
    yield f"seed = {toml_value(sections.pop('seed'))}"
    for section, values in sections.items():
        yield ""
        yield f"[{section}]"
        for key, value in values.items():
            if value is None:
                yield f"# {section}.{key}: not set"
            else:
                yield f"{key} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """One value as it is written in TOML; what no config holds (dates) as Python shows it.

    >>> toml_value([0.9, "a", True])
    '[0.9, "a", true]'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML also wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return repr(value)


def _toml_key(key: str) -> str:
    """A key of a table: bare where TOML allows it."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)
