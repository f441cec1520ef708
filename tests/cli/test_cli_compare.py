"""`sidestep compare` as it is typed."""

import io
import json

import pytest
from rich.console import Console

from sidestep.cli.compare import print_comparison
from sidestep.diagnostics.compare import compare
from sidestep.diagnostics.recorder import Recorder


@pytest.fixture
def runs(tmp_path):
    folders = []
    for number, lag in enumerate((0, 8, 8)):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        text = f"seed = {number % 2}\n[rollout]\nmax_lag = {lag}\n"
        (folder / "config.toml").write_text(text)
        (folder / "env.json").write_text(json.dumps({}))
        with Recorder(folder, sinks=[]) as recorder:
            for step in range(4):
                recorder.step({"step": step, "reward/mean": 0.25 * (number + 1)})
        folders.append(str(folder))
    return folders


def test_compare_prints_a_table_and_writes_a_page(sidestep, runs, tmp_path):
    code, out, err = sidestep("compare", *runs)
    assert (code, err) == (0, "")
    assert "max_lag=0" in out and "max_lag=8" in out
    assert "0.625 [0.500, 0.750]" in out  # seeds 1 and 0 at lag 8
    assert "+0.500" in out  # of seed 0, which both have: 0.75 - 0.25
    assert out.endswith("page: compare.html\n")
    assert (tmp_path / "compare.html").stat().st_size > 1_000_000  # plotly is inside


def test_compare_refuses_what_it_cannot_compare_with_code_2(sidestep, runs, tmp_path):
    for arguments, said in (
        ((runs[0],), "give two or more run folders"),
        ((runs[0], str(tmp_path / "none")), "no run folder at"),
        ((*runs, "--out", "page.txt"), "must end in .html"),
        ((*runs, "--out", "nowhere/page.html"), "no such folder nowhere"),
    ):
        code, out, err = sidestep("compare", *arguments)
        assert (code, out) == (2, "")
        assert said in err
    assert not (tmp_path / "compare.html").exists()


def test_every_number_is_whole_on_a_narrow_terminal(runs):
    console = Console(file=io.StringIO(), force_terminal=True, width=70, color_system=None)
    print_comparison(compare(runs), console)
    printed = console.file.getvalue()
    assert "0.625" in printed and "…" not in printed
