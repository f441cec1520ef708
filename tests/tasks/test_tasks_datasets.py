"""Hugging Face datasets: folders as they are saved, columns as the recipe maps them."""

import json

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.tasks.build import make_task

datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"{n}+1=", "result": str(n + 1), "level": n} for n in range(30)]
COLUMNS = {"prompt": "question", "answer": "result"}


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    return folder


def dataset_task(path, **settings):
    return make_task(
        TaskConfig(**{"kind": "dataset", "path": str(path), "columns": COLUMNS} | settings)
    )


def test_a_saved_folder_is_read_with_its_columns_mapped_and_scored(saved):
    task = dataset_task(saved, eval_size=10)
    assert (len(task.train), len(task.held_out)) == (20, 10)
    row = task.train[0]
    number = row.columns["level"]
    assert (row.prompt, dict(row.columns)) == (
        f"{number}+1=",
        {"answer": str(number + 1), "level": number},
    )
    assert row.source == f"{saved}[train] row {number}"
    assert task.score([row] * 3, [str(number + 1), "x", ""]) == [1.0, 0.0, 0.0]


def test_exact_scores_on_50_items_are_string_equality(tmp_path):
    rows = [{"prompt": f"{n}", "answer": str(n % 9)} for n in range(50)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    task = dataset_task(tmp_path / "d", columns=None, eval_size=0)
    said = [str(n % 7) for n in range(50)]
    expected = [float(n % 7 == n % 9) for n in range(50)]
    assert task.score(task.train, said) == expected


def test_splits_of_a_saved_dict_are_chosen_by_name(tmp_path):
    parts = {"train": ROWS[:20], "test": ROWS[20:]}
    several = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    datasets.DatasetDict(several).save_to_disk(tmp_path / "d")
    task = dataset_task(tmp_path / "d", eval_split="test")
    assert (len(task.train), len(task.held_out)) == (20, 10)
    with pytest.raises(UsageError, match=r"has no split 'tset' .*; did you mean 'test'"):
        dataset_task(tmp_path / "d", split="tset")
    with pytest.raises(UsageError, match=r"task\.eval_split 'train': the split that is trained on"):
        dataset_task(tmp_path / "d", eval_split="train")


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_folders_of_files_are_read_by_the_splits_in_their_names(tmp_path, ending):
    for name, rows in {"train-00000-of-00001": ROWS[:20], "test-00000-of-00001": ROWS[20:]}.items():
        file = tmp_path / "data" / f"{name}.{ending}"
        file.parent.mkdir(exist_ok=True)
        if ending == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(file)
        else:
            file.write_text("\n".join(map(json.dumps, rows)))
    task = dataset_task(tmp_path, eval_split="test")
    assert (len(task.train), len(task.held_out)) == (20, 10)
    assert task.held_out[0].prompt == "20+1="


def test_reward_functions_get_the_columns(saved, tmp_path):
    (tmp_path / "r.py").write_text("def f(level, **kw):\n    return [float(x) for x in level]\n")
    columns = {"prompt": "question"}
    task = dataset_task(saved, columns=columns, function=f"{tmp_path}/r.py:f", eval_size=0)
    assert task.score(task.train[:3], ["a"] * 3) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"prompt": "qestion"}}, "task.columns.prompt = 'qestion': "),
        ({"columns": {"prompt": "qestion"}}, "(it has question, result, level); did you mean 'que"),
        ({"columns": {"prompt": "question"}}, "name its column in task.columns.answer"),
        ({"columns": {"answer": "result"}}, "name it in task.columns.prompt"),
        ({"columns": {"prompt": "level", "answer": "result"}}, "row 0: `prompt` is the number 0"),
        ({"eval_size": 30}, "task.eval_size 30: leaves nothing to train on"),
    ],
)
def test_a_missing_column_is_refused_with_the_nearest(saved, settings, said):
    with pytest.raises(UsageError) as caught:
        dataset_task(saved, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_in_the_way_gives_way(tmp_path):
    """GSM8K-like: the row has an `answer` of its own, and the recipe wants another column there."""
    rows = [{"prompt": "p", "answer": "long", "final": "1"}] * 2
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    task = dataset_task(tmp_path / "d", columns={"answer": "final"}, eval_size=0)
    assert dict(task.train[0].columns) == {"answer": "1"}


def test_a_hub_name_without_network_says_so_and_suggests_a_folder(monkeypatch):
    """Offline by the library's own switch: no test waits for a network that is not there."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError) as caught:
        dataset_task("openai/gsm8k", subset="main")
    message = str(caught.value)
    assert message.startswith(
        "task.path 'openai/gsm8k': no such folder, and the Hugging Face hub did"
    )
    assert "save_to_disk(folder)" in message and "\n" not in message


def test_what_is_no_data_set_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.jsonl").write_text("{}")
    cases = {
        tmp_path / "empty": "the folder holds no data set; give one written by save_to_disk",
        tmp_path / "file.jsonl": "is a file; give its folder, or task.kind = 'jsonl'",
        "./nowhere": "no such folder; give a folder",
    }
    for path, said in cases.items():
        with pytest.raises(UsageError) as caught:
            dataset_task(path)
        assert said in str(caught.value)
