"""Several rewards with weights, time limits, what a reward function may raise, and chat prompts."""

import json
import subprocess
import sys
import time

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import RewardError, UsageError
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.build import make_task
from sidestep.tasks.calls import Raised, TimedOut, call
from sidestep.tasks.function import MAX_TIMEOUTS
from sidestep.tasks.protocol import FullTask, as_full

CODE = """
import asyncio, time

def short(completions, **kw):
    return [1.0 / len(c) for c in completions]

async def right(completions, answer, **kw):
    await asyncio.sleep(0)
    return [2.0 * (c == a) for c, a in zip(completions, answer)]

def sleeps(prompts, **kw):
    time.sleep(5.0 if prompts[0] == "slow" else 0.0)
    return [1.0] * len(prompts)

async def naps(prompts, **kw):
    await asyncio.sleep(5.0 if prompts[0] == "slow" else 0.0)
    return [1.0] * len(prompts)
"""


@pytest.fixture
def task_of(tmp_path):
    def make(*names, rows=({"prompt": "p", "answer": "42"},), code=CODE, **settings):
        (tmp_path / "rewards.py").write_text(code)
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        functions = [name if name in ("exact", "math") else f"{tmp_path}/rewards.py:{name}"
                     for name in names]  # fmt: skip
        return make_task(
            TaskConfig(
                **{"kind": "function", "path": str(path), "eval_size": 0, "rewards": functions}
                | settings
            )
        )

    return make


def test_the_reward_is_the_weighted_sum_and_each_part_is_kept_as_it_was(task_of):
    task = task_of("exact", "short", "right", reward_weights=[1.0, 0.5, 0.1])
    judged = task.judge([task.train[0]] * 2, ["42", "nope"])
    assert judged.parts == {"exact": (1.0, 0.0), "short": (0.5, 0.25), "right": (2.0, 0.0)}
    assert judged.rewards == pytest.approx((1.0 + 0.25 + 0.2, 0.125))
    assert task.score([task.train[0]] * 2, ["42", "nope"]) == list(judged.rewards)


def test_weights_are_1_unless_given(task_of):
    task = task_of("short", "right")
    assert task.score([task.train[0]], ["42"]) == [2.5]


def test_exact_and_math_need_answers_and_functions_do_not(task_of):
    assert task_of("short", rows=[{"prompt": "p"}]).score([], []) == []
    with pytest.raises(UsageError, match=r"data\.jsonl:1: lacks `answer`"):
        task_of("exact", "short", rows=[{"prompt": "p"}])


def test_a_name_that_is_no_reward_is_refused(task_of, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "answer": "1"}')
    config = TaskConfig(kind="jsonl", path=str(tmp_path / "d.jsonl"), rewards=["exakt"])
    with pytest.raises(UsageError, match="'exakt': neither exact, math, reasoning_gym nor"):
        make_task(config)


@pytest.mark.parametrize("name", ["sleeps", "naps"])
def test_a_call_over_the_time_limit_scores_0_is_counted_and_holds_up_nobody(task_of, name):
    rows = [{"prompt": "slow", "answer": "1"}, {"prompt": "fast", "answer": "1"}]
    task = task_of(name, "exact", rows=rows, reward_timeout_s=0.3)
    slow, fast = task.train
    started = time.monotonic()
    judged = task.judge([slow, slow], ["1", "2"])
    assert judged.parts == {name: (0.0, 0.0), "exact": (1.0, 0.0)}
    assert judged.rewards == (1.0, 0.0)
    assert judged.problems == (f"{name}: timed out",) * 2
    assert task.judge([fast], ["1"]).rewards == (2.0,)
    assert time.monotonic() - started < 4


def test_only_timeouts_in_a_row_end_the_run(task_of):
    rows = [{"prompt": "slow"}, {"prompt": "fast"}]
    task = task_of("naps", rows=rows, reward_timeout_s=0.01)
    slow, fast = task.train
    for _ in range(MAX_TIMEOUTS - 1):
        task.score([slow], ["x"])
    # generous: the limit is meant for the slow ones
    task._rewards[0][0]._limit_s = 60.0
    assert task.score([fast], ["x"]) == [1.0]
    task._rewards[0][0]._limit_s = 0.01
    for _ in range(MAX_TIMEOUTS - 1):
        task.score([slow], ["x"])
    with pytest.raises(RewardError, match=rf"task\.reward_timeout_s = 0\.01 s in {MAX_TIMEOUTS} "):
        task.score([slow], ["x"])


@pytest.mark.parametrize(
    "raised",
    ["asyncio.CancelledError()", "KeyboardInterrupt()", "GeneratorExit()", "SystemExit(3)",
     "StopIteration()", "TimeoutError('mine')", "BaseExceptionGroup('g', [KeyboardInterrupt()])"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_whatever_a_function_raises_is_a_reward_error_that_names_the_prompt(task_of, raised, kind):
    code = f"import asyncio\n{kind} f(**kw):\n    raise {raised}\n"
    task = task_of("f", code=code, reward_timeout_s=30.0)
    with pytest.raises(RewardError, match=r"data\.jsonl:1: 'p'") as caught:
        task.score(task.train, ["x"])
    name = raised.partition("(")[0].rpartition(".")[2]
    if not (name == "StopIteration" and kind == "async def"):  # Python makes it a RuntimeError
        assert f"raised {name}" in str(caught.value)


@pytest.mark.parametrize("raised", ["asyncio.CancelledError()", "KeyboardInterrupt()"])
def test_a_run_ends_with_the_functions_error_and_not_as_if_by_ctrl_c(tmp_path, raised):
    (tmp_path / "r.py").write_text(f"import asyncio\ndef f(**kw):\n    raise {raised}\n")
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    sets = ["task.kind=function", "task.path=d.jsonl", "task.function=r.py:f", "train.steps=2",
            "rollout.groups_per_step=2", "rollout.group_size=2"]  # fmt: skip
    command = [sys.executable, "-m", "sidestep.cli.main", "train", "--run-dir", "run"]
    for one in sets:
        command += ["--set", one]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "task.function 'r.py:f' raised " + raised.rpartition(".")[2][:-2] in last
    assert "d.jsonl:" in last


def test_a_call_is_limited_and_what_it_raises_is_kept_apart():
    assert call(lambda x: x + 1, {"x": 1}) == 2
    with pytest.raises(TimedOut):
        call(lambda: time.sleep(3), {}, 0.01)
    with pytest.raises(Raised) as caught:
        call(lambda: sys.exit("over"), {})
    assert isinstance(caught.value.cause, SystemExit)


def test_a_plain_task_gains_what_it_lacks_and_a_full_one_stays():
    plain = ArithmeticTask(10)
    full = as_full(plain)
    assert isinstance(full, FullTask) and full.train == plain.train
    judged = full.judge(plain.train[:1], [str(plain.train[0].columns["answer"])])
    assert (judged.rewards, judged.parts, judged.problems) == ((1.0,), {}, ("",))
    assert as_full(full) is full and list(full.notices) == []
    full.close()


TEXT = {"prompt": "p", "answer": "1"}
CHAT = {"messages": [{"role": "user", "content": "u"}], "answer": "1"}
OWN = {"messages": [{"role": "system", "content": "own"}, *CHAT["messages"]], "answer": "1"}


def test_text_becomes_chat_and_the_system_prompt_comes_first_where_there_is_none(task_of):
    def prompts(**settings):
        return [row.prompt for row in task_of("exact", rows=[TEXT, CHAT, OWN], **settings).train]

    user, system = {"role": "user", "content": "p"}, {"role": "system", "content": "be brief"}
    assert prompts() == ["p", CHAT["messages"], OWN["messages"]]
    assert prompts(chat=True) == [[user], CHAT["messages"], OWN["messages"]]
    assert prompts(system_prompt="be brief") == [
        [system, user],
        [system, *CHAT["messages"]],
        OWN["messages"],
    ]


def test_an_instruct_recipe_without_a_chat_template_is_refused(task_of):
    from sidestep.models.make_packaged import make_tokenizer
    from sidestep.tasks.prompts import encode_examples

    task = task_of("exact", system_prompt="be brief")
    with pytest.raises(UsageError) as caught:
        encode_examples(task.train, make_tokenizer(), 8, 512)
    message = str(caught.value)
    assert "data.jsonl:1: chat messages, but the tokenizer of model.path has no chat template" in (
        message
    )
    assert "task.system_prompt" in message
