"""What `sidestep doctor` prints and which code it exits with."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sidestep.cli.doctor import print_findings
from sidestep.doctor import Finding

FINDING = Finding("a_code", "warning", ("loss.anchor",), "something happens", "change it")


def test_a_clean_recipe_exits_with_0(sidestep):
    code, out, err = sidestep("doctor")
    assert (code, err) == (0, "")
    assert out.endswith("quickstart.toml: nothing found\n")


def test_findings_exit_with_1_and_name_code_and_fix(sidestep):
    code, out, _ = sidestep("doctor", "naive-async")
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("warning: dead_clip: ")
    assert lines[1] == "  fix: use anchor 'behaviour'"
    assert lines[-1].endswith("naive-async.toml: 2 warnings")


def test_json_is_a_list_of_findings_and_nothing_else(sidestep):
    code, out, _ = sidestep("doctor", "--json", "--set", "rollout.group_size=1")
    (found,) = json.loads(out)
    assert code == 1
    assert (found["code"], found["severity"]) == ("group_of_one", "error")
    assert found["keys"] == ["rollout.group_size", "loss.advantage"]
    assert found["fix"] == "set rollout.group_size to 2 or more"
    assert sidestep("doctor", "--json")[:2] == (0, "[]\n")


@pytest.mark.parametrize("text", ["[train]\nsteps = 0\n", "[train]\nstepz = 1\n", "not toml"])
def test_a_recipe_that_cannot_be_read_exits_with_2(sidestep, text):
    Path("bad.toml").write_text(text)
    code, out, err = sidestep("doctor", "bad.toml")
    assert (code, out) == (2, "")
    assert err.startswith("bad.toml:") and len(err.splitlines()) == 1
    assert sidestep("doctor", "gone.toml")[0] == 2


def test_a_terminal_gets_a_table_with_the_same_facts():
    screen = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    print_findings([FINDING], "my.toml", screen)
    shown = screen.file.getvalue()
    for fact in ("my.toml: 1 warning", "a_code", "something happens", "change it"):
        assert fact in shown
    assert (
        "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in shown or "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown
    )
