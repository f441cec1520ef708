"""docs/tasks.md: every example in it is run as it stands."""

import re
import tomllib
from pathlib import Path

import pytest

from sidestep.config import RunConfig, TaskConfig
from sidestep.tasks.build import make_task

TEXT = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files that the recipes of the page name."""
    (tmp_path / "train.jsonl").write_text("".join(blocks("jsonl")))
    (tmp_path / "rewards.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)


def tasks_of_the_page() -> list[dict]:
    return [tomllib.loads(block)["task"] for block in blocks("toml") if "[task]" in block]


def test_the_rows_and_recipes_of_the_page_work(here):
    exact, own, several, *_ = tasks_of_the_page()
    task = make_task(TaskConfig(**exact | {"eval_size": 1}))
    assert len(task.train) + len(task.held_out) == 3
    row = next(row for row in task.train if row.columns["answer"] == "42")
    assert task.score([row] * 2, ["6 * 7 is 42, so #### 42", "42"]) == [1.0, 0.0]

    task = make_task(TaskConfig(**own | {"eval_size": 0}))
    row = next(row for row in task.train if row.columns.get("level") == 1)
    assert task.score([row] * 3, ["42", "43", "x"]) == [1.0, 0.5, 0.0]

    task = make_task(TaskConfig(**several | {"eval_size": 0}))
    row = next(row for row in task.train if row.columns.get("level") == 1)
    assert task.score([row] * 2, ["42", "43"]) == [1.2, 0.1]


def test_the_data_sets_of_the_page_work(here, tmp_path):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("reasoning_gym")
    *_, saved, made = tasks_of_the_page()
    row = {"question": "1+1=", "answer": "so #### 2", "final": "2"}
    parts = {name: datasets.Dataset.from_list([row]) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "data" / "gsm8k")
    task = make_task(TaskConfig(**saved))
    assert task.score(task.held_out, ["2"]) == [1.0]
    task = make_task(TaskConfig(**made | {"train_size": 3, "eval_size": 1}))
    right = task.held_out[0].columns["answer"]
    assert task.score(task.held_out, [f"that is {right}"]) == [1.0]


def test_the_evaluation_of_the_page_is_a_config():
    (block,) = [block for block in blocks("toml") if "[eval]" in block]
    assert RunConfig.model_validate(tomllib.loads(block)).eval.samples == 8


def test_the_python_of_the_page_runs(here):
    exec(blocks("python")[1], {})
