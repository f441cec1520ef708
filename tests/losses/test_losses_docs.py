import re
from pathlib import Path

from sidestep import losses

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"


def test_every_example_of_the_page_runs():
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    assert examples
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), {})


def test_every_public_function_and_constant_is_on_the_page():
    words = set(re.findall(r"\w+", PAGE.read_text()))
    types_of_names = {"Anchor", "Aggregation", "Denominators"}
    assert set(losses.__all__) - types_of_names <= words
