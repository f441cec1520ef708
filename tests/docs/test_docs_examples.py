"""What the documents show is true: Python examples run, commands and links lead somewhere."""

import re
from pathlib import Path

import pytest

from sidestep.config.loading import load_config
from sidestep.config.recipes import find_recipe

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/*.md")])


def blocks(page: Path, language: str):
    """(line, text) of every fenced block of that language."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield text.count("\n", 0, found.start()) + 2, found[1]


EXAMPLES = [
    pytest.param(page, line, code, id=f"{page.name}-{line}")
    for page in PAGES
    for line, code in blocks(page, "python")
]


@pytest.mark.parametrize(("page", "line", "code"), EXAMPLES)
def test_a_python_example_runs(page, line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Empty lines before it: a failure shows the line of the page.
    exec(compile("\n" * (line - 1) + code, str(page), "exec", dont_inherit=True), {})


def test_the_readme_shows_how_to_attach_to_a_loop():
    assert any("sidestep.attach(" in code for _, code in blocks(CHECKOUT / "README.md", "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_toml_example_is_a_valid_recipe(page, tmp_path):
    for _, text in blocks(page, "toml"):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text, encoding="utf-8")
        load_config(recipe)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_train_command_names_a_recipe_and_keys_that_exist(page, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"^(?:\$ )?(?:\S*/)?sidestep train ([^\n#]*)", text, re.MULTILINE):
        words = command.split()
        overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        recipe = words[0] if words and not words[0].startswith("-") else "quickstart"
        is_own_file = recipe.endswith(".toml") and not Path(recipe).exists()
        load_config(None if is_own_file else find_recipe(recipe), overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_relative_link_leads_to_a_file(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_file_map_names_everything_at_the_top_and_in_the_package():
    """Names in backquotes; what is generated or hidden from version control does not count."""
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    top = {path.name for path in CHECKOUT.iterdir() if not path.name.startswith(".")}
    generated = {"build", "dist", "runs", "shared"}
    parts = {path.name for path in (CHECKOUT / "src" / "sidestep").iterdir()}
    wanted = (top - generated) | (parts - {"__pycache__"}) | {".ci/run"}
    missing = {name for name in wanted if f"`{name}" not in text and f"/{name}" not in text}
    assert missing == set()
