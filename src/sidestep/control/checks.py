"""Checks of plain arguments. Each raises ValueError with the argument's name and value."""

from __future__ import annotations

import math
from typing import Any


def plain_number(value: Any) -> Any:
    """The Python number in a scalar of numpy or torch. All else as it is, for the checks to refuse.

    A state of plain numbers can be saved as JSON, and holds no tensor of a device.
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def require_number(
    name: str, value: float, *, above: float | None = None, at_least: float | None = None
) -> None:
    """A finite int or float (no bool), larger than `above`, not below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value!r} must be above {above:g}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value!r} must be at least {at_least:g}")


def require_cosine(name: str, value: float) -> None:
    """A number in [-1, 1]."""
    require_number(name, value)
    if not -1.0 <= value <= 1.0:
        raise ValueError(f"{name}={value!r} is not a cosine: it must be in [-1, 1]")


def require_count(name: str, value: int, *, at_least: int) -> None:
    """A whole number (no bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of a few names."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: one of {', '.join(choices)}")


def number_or_word(name: str, value: float | str, words: tuple[str, ...]) -> None:
    """If it is text, one of `words`; numbers are checked elsewhere."""
    if isinstance(value, str) and value not in words:
        choices = " or ".join(repr(word) for word in words)
        raise ValueError(f"{name}={value!r} is unknown: give a number or {choices}")
