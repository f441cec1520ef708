"""`sidestep study` as it is typed; the workers are stand-ins (tests/study/study_worker.py)."""

import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "study" / "study_worker.py"
STUDY = """\
name = "tiny"
seeds = [1, 2]
lags = [0, 8]
learning_rates = [0.1]

[config.train]
steps = 40

[methods.none.config.control]
mode = "observe"

[methods."<ours>"]
"""


@pytest.fixture
def study_file(tmp_path, monkeypatch):
    from sidestep.study import pool

    monkeypatch.setattr(
        pool.run_cells, "__kwdefaults__", {"command": (sys.executable, str(WORKER))}
    )
    file = tmp_path / "tiny.toml"
    file.write_text(STUDY)
    return file


def test_a_study_runs_its_cells_and_writes_tables_and_a_report(sidestep, study_file):
    code, out, err = sidestep("study", str(study_file), "--workers", "2")
    assert (code, err) == (0, "")
    folder = Path("runs/study-tiny")
    assert out.splitlines()[-4:] == [
        "8 of 8 cells finished",
        str(folder / "table.csv"),
        str(folder / "merits.csv"),
        str(folder / "report.html"),
    ]
    assert "0/8" in out and "8/8 0:00:00 left" in out
    assert len((folder / "table.csv").read_text().splitlines()) == 9
    assert len((folder / "merits.csv").read_text().splitlines()) == 5
    page = (folder / "report.html").read_text()
    assert "&lt;ours&gt;" in page and "<ours>" not in page
    assert 'id="chart-map-arithmetic"' in page
    assert "src=" not in page.split("<body>")[1]


def test_a_second_call_runs_nothing_and_report_alone_neither(sidestep, study_file):
    sidestep("study", str(study_file), "--out", "o")
    ran = Path("o/order.txt").read_text()
    table = Path("o/table.csv").read_text()
    for option in ((), ("--report",)):
        code, out, _ = sidestep("study", str(study_file), "--out", "o", *option)
        assert code == 0 and "8 of 8 cells finished" in out
        assert Path("o/order.txt").read_text() == ran
        assert Path("o/table.csv").read_text() == table


def test_a_study_cut_short_is_readable(sidestep, study_file, monkeypatch):
    monkeypatch.setenv("STUDY_FAULT", "die")
    code, out, err = sidestep("study", str(study_file), "--out", "o", "--workers", "1")
    assert code == 1
    assert "1 of 8 cells finished" in out and "ended: exit code 9: out of memory" in err
    assert Path("o/report.html").stat().st_size > 1_000_000


def test_report_of_nothing_says_so(sidestep, study_file):
    code, out, _ = sidestep("study", str(study_file), "--report")
    assert (code, out) == (0, "no cell is finished yet\n")


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        ("seeds = [1, 2]", (), "seeds"),
        ("mode =", (), "unknown config key 'control.mood'"),
        ("", ("--workers", "0"), "--workers 0: must be 1 or more"),
    ],
)
def test_wrong_use_ends_with_2_before_anything_runs(sidestep, study_file, change, options, said):
    replacement = {"mode =": "mood ="}.get(change, "")
    if change:
        study_file.write_text(STUDY.replace(change, replacement))
    code, out, err = sidestep("study", str(study_file), "--out", "o", *options)
    assert (code, out) == (2, "")
    assert said in err and len(err.splitlines()) == 1
    assert not Path("o/cells").exists()


def test_two_studies_in_one_folder_are_refused(sidestep, study_file):
    from sidestep.run_folder import only_writer

    with only_writer(Path("o")):
        code, _, err = sidestep("study", str(study_file), "--out", "o")
    assert code == 2 and "another process is writing" in err
