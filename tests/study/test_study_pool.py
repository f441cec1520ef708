"""Handing out cells: the processes are real, the runs in them are not (study_worker.py)."""

import shutil
import sys
from pathlib import Path

import pytest
from study_support import make_study

from sidestep.errors import SidestepError, UsageError
from sidestep.study.grid import make_cells
from sidestep.study.outcome import is_finished, read_result
from sidestep.study.pool import cell_folder, run_cells

COMMAND = (sys.executable, str(Path(__file__).parent / "study_worker.py"))
METHODS = {
    "none": {},
    "blind": {"lags": [8], "match": "skip_share", "of": "ours"},
    "ours": {"lags": [8], "config": {"control": {"mode": "control"}}},
}


@pytest.fixture
def study():
    return make_study(
        seeds=[1],
        learning_rates=[0.1],
        config={"train": {"steps": 8}, "control": {"mode": "observe"}},
        methods=METHODS,
    )


def run(study, out, num_workers=1):
    shown = []
    cells = make_cells(study)
    run_cells(
        study,
        cells,
        out,
        num_workers=num_workers,
        show=lambda *told: shown.append(told),
        command=COMMAND,
    )
    return cells, shown


def order(out):
    return (out / "order.txt").read_text().splitlines()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_cell_is_run_once_and_after_those_it_needs(study, tmp_path, num_workers):
    cells, shown = run(study, tmp_path, num_workers)
    ran = order(tmp_path)
    assert len(ran) == len(set(ran)) == len(cells) == 4
    names = [name.split("/")[0] for name in ran]
    assert names.index("ours") < names.index("blind")
    blind = next(cell for cell in cells if cell.method == "blind")
    row = read_result(blind, cell_folder(tmp_path, blind)).row
    assert row["skip_share_used"] == 0.25  # of the steps of `ours`
    assert [told[:2] for told in shown] == [(i, 4) for i in range(5)]
    assert shown[-1][2] == 0.0  # no time left


def test_a_finished_study_runs_nothing_and_a_missing_cell_alone_is_run_again(study, tmp_path):
    cells, _ = run(study, tmp_path)
    before = order(tmp_path)
    run(study, tmp_path)
    assert order(tmp_path) == before
    shutil.rmtree(cell_folder(tmp_path, cells[0]))
    run(study, tmp_path)
    assert order(tmp_path) == [*before, f"none/{cells[0].id.rpartition('/')[2]}"]


def test_a_cell_that_was_cut_short_is_not_taken_for_finished(study, tmp_path):
    cells = make_cells(study)
    folder = cell_folder(tmp_path, cells[0])
    folder.mkdir(parents=True)
    assert not is_finished(folder)


def test_a_finished_cell_whose_config_changed_is_refused_and_kept(study, tmp_path):
    run(study, tmp_path)
    changed = study.model_copy(update={"config": {"train": {"steps": 9}}})
    message = "train.steps = 8, the study now says 9: give another --out, or delete"
    with pytest.raises(UsageError, match=message):
        run(changed, tmp_path)
    assert len(order(tmp_path)) == 4


def test_more_seeds_can_be_added_to_a_finished_study(study, tmp_path):
    run(study, tmp_path)
    run(study.model_copy(update={"seeds": [1, 2]}), tmp_path)
    assert len(order(tmp_path)) == 8


def test_a_worker_that_dies_ends_the_study_with_its_last_words_and_the_rest_is_kept(
    study, tmp_path, monkeypatch
):
    monkeypatch.setenv("STUDY_FAULT", "die")
    with pytest.raises(SidestepError, match=r"worker of cell .*exit code 9: out of memory"):
        run(study, tmp_path)
    monkeypatch.delenv("STUDY_FAULT")
    assert len(order(tmp_path)) == 1
    cut = next(p for p in (tmp_path / "cells").glob("*/*/*") if not is_finished(p))
    shutil.rmtree(cut)  # the real worker does that itself
    run(study, tmp_path)
    assert len(order(tmp_path)) == 4


def test_a_cell_that_cannot_run_ends_the_study_by_its_name(study, tmp_path, monkeypatch):
    monkeypatch.setenv("STUDY_FAULT", "refuse")
    with pytest.raises(UsageError, match=r"cell arithmetic/none/lag0.*: task.path: no such file"):
        run(study, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", "", "metrics.jsonl has 0 of 8 steps, though the cell was finished"),
        ("cell.json", "{", "cell.json cannot be read"),
        ("cell.json", '{"error": null}', "cell.json cannot be read"),
    ],
)
def test_a_finished_cell_that_was_spoiled_is_no_result(study, tmp_path, name, content, said):
    cells, _ = run(study, tmp_path)
    folder = cell_folder(tmp_path, cells[0])
    (folder / name).write_text(content)
    with pytest.raises(UsageError, match=f"{said}.*delete that folder to run the cell again"):
        read_result(cells[0], folder)
