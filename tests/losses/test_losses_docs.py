import re
from pathlib import Path

import pytest

from sidestep import losses
from sidestep.losses.page import refresh, tables

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def test_every_example_of_the_page_runs():
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    assert examples
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), {})


def test_every_public_function_and_constant_is_on_the_page():
    words = set(re.findall(r"\w+", PAGE.read_text()))
    functions_and_constants = {n for n in losses.__all__ if n[0].islower() or n.isupper()}
    assert functions_and_constants <= words


def test_the_tables_of_the_page_are_those_of_the_registry():
    assert refresh(PAGE.read_text()) == PAGE.read_text(), (
        "regenerate: .venv/bin/python -m sidestep.losses.page docs/losses.md"
    )


def test_every_name_is_in_its_table():
    made = tables()
    for marker, names in (
        ("policies", losses.POLICIES),
        ("corrections", losses.CORRECTIONS),
        ("anchors", losses.ANCHORS),
        ("advantages", losses.ADVANTAGES),
    ):
        rows = re.findall(r"^\| `(\w+)` \|", made[marker], flags=re.M)
        assert rows == list(names)
    assert made["methods"].count("\n") == len(losses.METHODS) + 2


def test_a_page_without_a_marker_is_refused():
    with pytest.raises(ValueError, match=r"markers for \['methods'\]"):
        refresh("<!-- generated: methods -->\nold\n<!-- end -->\n")
