"""The generated tables of docs/losses.md: `python -m sidestep.losses.page docs/losses.md`.

They stand between marker lines; the rest of the page is written by hand. A test keeps the page and
the registry equal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from sidestep.losses.methods import METHODS
from sidestep.losses.options import options_of
from sidestep.losses.registry import ADVANTAGES, ANCHORS, CORRECTIONS, POLICIES

_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", flags=re.S)


def tables() -> dict[str, str]:
    """Marker -> Markdown table."""
    return {
        "methods": _methods(),
        "advantages": _advantages(),
        "anchors": _anchors(),
        "policies": _policies(),
        "corrections": _corrections(),
        "options": _options(),
    }


def refresh(page: str) -> str:
    """The page with every marked table made anew. Raises ValueError if a table has no marker."""
    made = tables()
    found = [match.group(2) for match in _MARKED.finditer(page)]
    if sorted(found) != sorted(made):
        raise ValueError(f"the page has markers for {found}, and needs one each for {list(made)}")
    return _MARKED.sub(lambda match: match.group(1) + made[match.group(2)] + match.group(3), page)


def _methods() -> str:
    return _table(
        ("method", "recipe", "source"),
        (
            (
                method.name,
                ", ".join(map(_code, method.recipe)) + (f"; {method.note}" if method.note else ""),
                method.source,
            )
            for method in METHODS
        ),
    )


def _advantages() -> str:
    return _table(
        ("name", "function", "value", "group", "needs", "source"),
        (
            (
                _code(entry.name),
                _code(entry.function.__name__),
                _code(entry.equation),
                f"{entry.min_group} or more",
                "the whole batch" if entry.whole_batch else "its group",
                entry.source,
            )
            for entry in ADVANTAGES.values()
        ),
    )


def _anchors() -> str:
    return _table(
        ("name", "ratio r", "weight w", "meaning", "needs", "source"),
        (
            (
                _code(entry.name),
                _code(entry.ratio),
                _code(entry.weight),
                entry.meaning,
                entry.needs,
                entry.source,
            )
            for entry in ANCHORS.values()
        ),
    )


def _policies() -> str:
    return _table(
        ("name", "loss per token", "ratio to", "needs", "source"),
        (
            (
                _code(entry.name),
                _code(entry.equation),
                "the anchor" if entry.ratio == "anchor" else "always the behaviour policy",
                _needs(entry.whole_rows, entry.statistics is not None),
                entry.source,
            )
            for entry in POLICIES.values()
        ),
    )


def _corrections() -> str:
    return _table(
        ("name", "weight", "multiplies by w", "reads", "needs", "source"),
        (
            (
                _code(entry.name),
                _code(entry.equation),
                "yes" if entry.weighs else "no",
                entry.reads,
                _needs(entry.whole_rows, False),
                entry.source,
            )
            for entry in CORRECTIONS.values()
        ),
    )


def _options() -> str:
    return _table(
        ("of", "option", "default", "meaning", "default from"),
        (
            (
                _code(name),
                _code(option.name),
                f"{option.default:g}",
                option.meaning,
                option.source,
            )
            for name, options in (
                *((entry.name, entry.options) for entry in POLICIES.values()),
                *((entry.name, entry.options) for entry in CORRECTIONS.values()),
            )
            for option in options_of(options)
        ),
    )


def _needs(whole_rows: bool, statistics: bool) -> str:
    if statistics:
        return "all micro-batches first (`statistics`)"
    return "whole rows" if whole_rows else "tokens"


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(refresh(path.read_text()))
