"""The value of SIDESTEP_AUTO: what `auto.enable` is called with, in one readable line.

SIDESTEP_AUTO="low=0.1; high=0.6; above=skip; max_norm=1.0"
SIDESTEP_AUTO=on          all defaults
SIDESTEP_AUTO=off         nothing happens, as without it
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass, field
from typing import Any

from sidestep.control.controller import GradientControl

_CONTROL = tuple(inspect.signature(GradientControl.__init__).parameters)[1:]
_OWN = ("max_norm", "nth", "select", "local_parameters")
_WORDS: dict[str, Any] = {"none": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """control: arguments of `GradientControl`. own: other arguments of `auto.enable`."""

    control: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


def parse(text: str) -> AutoSettings | None:
    """The settings; None for "off", "0" and nothing.

    Raises ValueError naming the part that is not understood.
    """
    text = text.strip()
    if text.lower() in ("", "0", "off"):
        return None
    found = AutoSettings()
    if text.lower() in ("1", "on"):
        return found
    for part in text.replace(",", ";").split(";"):
        if not part.strip():
            continue
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(
                f"SIDESTEP_AUTO: {part.strip()!r} is not key=value; write for example "
                "SIDESTEP_AUTO='low=0.1; high=0.6; max_norm=1.0', or SIDESTEP_AUTO=on"
            )
        if key not in (*_CONTROL, *_OWN):
            close = difflib.get_close_matches(key, (*_CONTROL, *_OWN), n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"SIDESTEP_AUTO: unknown key {key!r}{hint}; there are the arguments of "
                f"GradientControl and {', '.join(_OWN)}"
            )
        (found.control if key in _CONTROL else found.own)[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
