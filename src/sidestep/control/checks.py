"""Checks of plain arguments. Each raises ValueError with the argument's name and value."""

from __future__ import annotations

import math


def require_number(name: str, value: float, *, above: float | None = None) -> None:
    """A finite int or float (no bool), larger than `above` where that is given."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value!r} must be above {above:g}")


def require_count(name: str, value: int, *, at_least: int) -> None:
    """A whole number (no bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")


def require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """One of a few names."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: one of {', '.join(choices)}")


def require_available(name: str, value: str, now: str, later: tuple[str, ...]) -> None:
    """The one name that works now; for those to come the message says so."""
    if value in later:
        raise ValueError(f"{name}={value!r} is not available yet: use {name}={now!r}")
    require_choice(name, value, (now,))


def plain_number(name: str, value: float | str, later: tuple[str, ...]) -> float:
    """`value` if it is no text; for the words to come the message says so."""
    if isinstance(value, str):
        problem = "is not available yet" if value in later else "is unknown"
        raise ValueError(f"{name}={value!r} {problem}: give a number")
    return value


def require_step_facts(
    max_norm: float | None = None,
    batch: int | str | None = None,
    lag: float | None = None,
    drift: float | None = None,
) -> None:
    """What a host says about a step, each None or: max_norm above 0, batch an int or a str (it is
    saved with the state), lag and drift at least 0.
    """
    if max_norm is not None:
        require_number("max_norm", max_norm, above=0.0)
    if batch is not None and not isinstance(batch, int | str):
        raise ValueError(f"batch={batch!r} must be an int or a str")
    for name, value in (("lag", lag), ("drift", drift)):
        if value is not None:
            require_number(name, value)
            if value < 0.0:
                raise ValueError(f"{name}={value!r} must be at least 0")
