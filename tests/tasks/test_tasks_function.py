"""Own reward functions: what they are given, and what stops a run."""

import json
import sys
from pathlib import Path

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import RewardError, UsageError
from sidestep.tasks.build import make_task
from sidestep.tasks.protocol import Task

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "what is 1+1?"}]


@pytest.fixture
def task_of(tmp_path: Path):
    """A task on `rows` with the function f of a file that holds `code`."""

    def make(code: str, *rows: dict, name: str = "f") -> Task:
        data = tmp_path / "data.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in rows or ({"prompt": "47+38="},)))
        file = tmp_path / "rewards.py"
        file.write_text(code)
        function = f"{file}:{name}"
        return make_task(
            TaskConfig(kind="function", path=str(data), eval_size=0, function=function)
        )

    return make


def test_texts_and_columns_come_as_lists_and_nothing_else_is_passed(task_of):
    task = task_of(
        "seen = {}\ndef f(**passed):\n    seen.update(passed)\n    return [0.5, 2]\n",
        {"prompt": "a", "answer": 1, "tags": ["x"], "completion": "not passed, as in TRL"},
        {"prompt": "b", "level": None},
    )
    assert task.score(task.train, ["A", "B"]) == [0.5, 2.0]
    assert sys.modules["sidestep_function_rewards"].seen == {
        "prompts": ["a", "b"],
        "completions": ["A", "B"],
        "answer": [1, None],
        "tags": [["x"], None],
        "level": [None, None],
    }


def test_every_column_of_the_file_is_passed_even_if_no_row_of_the_batch_has_it(task_of):
    task = task_of(
        "def f(prompts, completions, answer):\n    return [float(a is None) for a in answer]\n",
        {"prompt": "a"},
        {"prompt": "b", "answer": "x"},
    )
    assert task.score([task.train[0]], ["A"]) == [1.0]


def test_chat_rows_come_as_message_lists_as_in_trl(task_of):
    task = task_of(
        "def f(prompts, completions, **kwargs):\n"
        "    assert prompts[0][-1]['content'] == 'what is 1+1?'\n"
        "    return [float(c == [{'role': 'assistant', 'content': '2'}]) for c in completions]\n",
        {"messages": MESSAGES},
    )
    assert task.score([task.train[0]] * 2, ["2", "3"]) == [1.0, 0.0]


def test_a_function_may_change_what_it_is_given(task_of):
    task = task_of(
        "def f(prompts, completions, tags):\n"
        "    size = len(prompts[0]) + len(tags[0])\n"
        "    prompts[0].append('x')\n"
        "    tags[0].append('x')\n"
        "    return [size]\n",
        {"messages": MESSAGES, "tags": []},
    )
    scores = [task.score(task.train, ["A"])[0] for _ in range(3)]
    assert scores == [2.0, 2.0, 2.0], "rows are asked again in every epoch"


def test_async_functions_are_awaited(task_of):
    task = task_of(
        "import asyncio\nasync def f(**kw):\n    await asyncio.sleep(0)\n    return [3.0]\n"
    )
    assert task.score(task.train, ["A"]) == [3.0]


def test_numpy_torch_and_boolean_rewards_are_numbers(task_of):
    for expression in ("numpy.array([1, 0])", "torch.tensor([1.0, 0.0])", "[True, numpy.int64(0)]"):
        task = task_of(
            f"import numpy, torch\ndef f(**kw):\n    return {expression}\n",
            {"prompt": "a"},
            {"prompt": "b"},
        )
        scores = task.score(task.train, ["A", "B"])
        assert scores == [1.0, 0.0]
        assert {type(score) for score in scores} == {float}


def test_calls_never_overlap(task_of):
    from concurrent.futures import ThreadPoolExecutor

    task = task_of(
        "import time\ninside = []\n"
        "def f(prompts, **kw):\n"
        "    inside.append(1)\n    time.sleep(0.01)\n    most = len(inside)\n    inside.pop()\n"
        "    return [most]\n"
    )
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda _: task.score(task.train, ["A"]), range(8)))
    assert scores == [[1.0]] * 8


def failed(task: Task, num: int = 1) -> str:
    with pytest.raises(RewardError) as caught:
        task.score(task.train[:num], ["A"] * num)
    message = str(caught.value)
    assert "\n" not in message
    return message


TWO = ({"prompt": "first"}, {"prompt": "second", "more": 1})


@pytest.mark.parametrize(
    ("returned", "said", "line"),
    [
        ("[1.0, float('nan')]", "returned nan, not a finite number, for the prompt at", 2),
        ("[float('-inf'), 0.0]", "returned -inf, not a finite number, for the prompt at", 1),
        ("[10**400, 0.0]", "returned a number too large for a float, for the prompt at", 1),
        ("[0.0, None]", "returned 'None' (NoneType), not a number, for the prompt at", 2),
        ("[0.0, '1.0']", "returned the text '1.0', not a number, for the prompt at", 2),
        ("[[1.0], 0.0]", "returned '[1.0]' (list), not a number, for the prompt at", 1),
        ("[1.0]", "returned 1 rewards, not 2, in a call that began with the prompt at", 1),
        ("[1.0] * 3", "returned 3 rewards, not 2, in a call that began with the prompt at", 1),
        ("1.0", "returned '1.0' (float), not a list of 2 numbers, in a call that began", 1),
        ("None", "returned 'None' (NoneType), not a list of 2 numbers, in a call", 1),
        ("'ab'", "returned 'ab' (str), not a list of 2 numbers, in a call that began", 1),
    ],
)
def test_a_wrong_reward_names_the_prompt_it_is_for(task_of, returned, said, line):
    task = task_of(f"def f(**kw):\n    return {returned}\n", *TWO)
    message = failed(task, 2)
    assert said in message
    assert f"data.jsonl:{line}: '{'first' if line == 1 else 'second'}'" in message


def test_a_function_that_raises_is_named_with_the_prompt_and_keeps_its_cause(task_of):
    task = task_of("def f(**kw):\n    raise KeyError('x\\ny')\n", {"messages": MESSAGES})
    with pytest.raises(RewardError) as caught:
        task.score(task.train, ["A"])
    message = str(caught.value)
    assert "raised KeyError: " in message
    assert "data.jsonl:1: 'what is 1+1?'" in message
    assert "\n" not in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_long_prompt_is_cut_in_the_message(task_of):
    message = failed(task_of("def f(**kw):\n    return []\n", {"prompt": "long " * 1000}))
    assert len(message) < 400


def test_nothing_to_score_calls_nothing(task_of):
    task = task_of("def f(**kw):\n    raise AssertionError\n")
    assert task.score([], []) == []


def refused(make, *arguments, **settings) -> str:
    with pytest.raises(UsageError) as caught:
        make(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def g(**kw): ...", "has no 'f'; define it in"),
        ("def ff(**kw): ...", "did you mean"),
        ("f = 3", "f is int, not callable; name a function"),
        ("def f(:", "failed (SyntaxError: "),
        ("import not_there_at_all", "failed (ModuleNotFoundError: No module named 'not_there"),
        ("1 / 0", "failed (ZeroDivisionError: division by zero); repair it"),
        ("def f(prompts, completions): ...", "unexpected keyword argument 'level'; take what"),
        ("def f(solution, **kw): ...", "missing a required argument: 'solution'"),
        ("def f(completion_ids, **kw): ...", "completion_ids is passed by TRL only"),
        ("def f(trainer_state, **kw): ...", "trainer_state is passed by TRL only"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_any_work(task_of, code, said):
    message = refused(task_of, code, {"prompt": "a", "level": 1})
    assert message.startswith("task.function '")
    assert said in message


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("rewards", "not 'module:name' or 'file.py:name'"),
        (":f", "not 'module:name' or 'file.py:name'"),
        ("nowhere.py:f", "no such file: "),
        ("no_such_module_here:f", "no module 'no_such_module_here'; give 'file.py:name'"),
        ("json:dump_s", "did you mean json:dumps?"),
    ],
)
def test_a_function_that_is_not_there_is_refused(function, said):
    config = TaskConfig(kind="function", path="unread.jsonl", function=function)
    message = refused(make_task, config)
    assert message.startswith("task.function ")
    assert said in message


def test_a_column_with_the_name_of_an_argument_is_refused_with_its_line(task_of):
    code = "def f(**kw): ...\n"
    message = refused(task_of, code, {"prompt": "a"}, {"prompt": "b", "completions": 1})
    assert "data.jsonl:2: the column `completions`" in message


def test_a_module_in_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text("def f(**kw):\n    return [6.0]\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = TaskConfig(kind="function", path="d.jsonl", eval_size=0, function="my_own_rewards:f")
    task = make_task(config)
    assert task.score(task.train, ["A"]) == [6.0]


def test_a_file_may_import_its_neighbours(task_of, tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("VALUE = 4.0\n")
    task = task_of("from neighbour_of_rewards import VALUE\ndef f(**kw):\n    return [VALUE]\n")
    assert task.score(task.train, ["A"]) == [4.0]
