"""What the schema knows about its keys, in words: for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from sidestep.config.schema import RunConfig
from sidestep.config.writing import toml_value

SECTIONS: Mapping[str, type[BaseModel]] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}

KEYS: tuple[str, ...] = (
    *(name for name in RunConfig.model_fields if name not in SECTIONS),
    *(f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields),
)

# Below this two keys share too little to be a slip of the pen.
_CUTOFF = 0.6


def unknown_key(dotted: str) -> str:
    """The message about a key that does not exist, with the nearest one or those there are."""
    return f"unknown config key '{dotted}' ({_hint(dotted)})"


def _hint(dotted: str) -> str:
    nearest = max(KEYS, key=lambda known: _likeness(dotted, known))
    if _likeness(dotted, nearest) >= _CUTOFF:
        return f"did you mean '{nearest}'?"
    section = dotted.partition(".")[0]
    if section in SECTIONS:
        return f"keys of [{section}]: {', '.join(SECTIONS[section].model_fields)}"
    return f"sections: {', '.join(SECTIONS)}"


def _likeness(dotted: str, known: str) -> float:
    """0 to 1. The name weighs more than the section: keys are often put in the wrong one."""
    section, _, name = dotted.rpartition(".")
    known_section, _, known_name = known.rpartition(".")
    return 0.75 * _ratio(name, known_name) + 0.25 * _ratio(section, known_section)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def unknown_section(section: str) -> str:
    """The message about a section that does not exist and holds no key to compare."""
    nearest = difflib.get_close_matches(section, SECTIONS, n=1)
    hint = f"did you mean [{nearest[0]}]?" if nearest else f"sections: {', '.join(SECTIONS)}"
    return f"unknown config section [{section}] ({hint})"


def allowed_values(dotted: str) -> str:
    """What `dotted`, a key of the schema, may be: `an integer of at least 0`."""
    return _in_words(_schema(dotted))


def takes_any_text(dotted: str) -> bool:
    """Whether any text is a value of `dotted`, not only a choice of words."""
    schema = _schema(dotted)
    return any(
        part.get("type") == "string" and "enum" not in part and "const" not in part
        for part in schema.get("anyOf", [schema])
    )


def _schema(dotted: str) -> Mapping[str, Any]:
    section, _, name = dotted.rpartition(".")
    model = SECTIONS[section] if section else RunConfig
    schema: Mapping[str, Any] = model.model_json_schema()["properties"][name]
    return schema


def _in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        parts = [part for part in schema["anyOf"] if part.get("type") != "null"]
        if len(parts) == 1:
            return _in_words(parts[0])
        return " or ".join(
            "a list of them" if "items" in part else _in_words(part) for part in parts
        )
    if "const" in schema:
        return toml_value(schema["const"])
    if "items" in schema:
        return f"a list, each {_in_words(schema['items'])}"
    if schema.get("type") == "object":
        values = schema["additionalProperties"]
        return "a table" if values is True else f"a table, each value {_in_words(values)}"
    if "enum" in schema:
        *most, last = (toml_value(choice) for choice in schema["enum"])
        return f"{', '.join(most)} or {last}"
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"a list of {len(items)}, each {_in_words(items[0])}"
    words = {
        "integer": "an integer",
        "number": "a number",
        "string": "text in quotes",
        "boolean": "true or false",
    }[schema["type"]]
    return words + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    names = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    bounds = [f"{words} {schema[name]:g}" for name, words in names.items() if name in schema]
    return " " + " and ".join(bounds) if bounds else ""
