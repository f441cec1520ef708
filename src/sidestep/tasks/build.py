"""From the `[task]` section of a config to a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from sidestep.config import TaskConfig
from sidestep.config.task_rules import BUILTIN_REWARDS, task_problems
from sidestep.errors import UsageError
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.chat import as_chat
from sidestep.tasks.datasets_rows import load_dataset_split
from sidestep.tasks.function import FunctionReward
from sidestep.tasks.gym import Gym, GymReward, gym_split
from sidestep.tasks.imports import load_function
from sidestep.tasks.math_reward import MathReward
from sidestep.tasks.math_rows import math_fields
from sidestep.tasks.protocol import FullTask
from sidestep.tasks.rewards import AnswerFinder, ExactReward, Reward, RewardedTask
from sidestep.tasks.rows import load_split, plain_fields
from sidestep.tasks.split import DEFAULT_EVAL_SIZE, Split
from sidestep.types import Example


def make_task(config: TaskConfig) -> FullTask:
    """The task `config` describes, its files read and checked.

    Raises UsageError, before any work, for everything that is wrong with them. Close the task when
    it is done with: some have started a process.
    """
    for problem in task_problems(config):
        raise UsageError(problem.message)
    answer_of = AnswerFinder(config.answer_regex)  # first what costs nothing to check
    functions = _functions(config)
    gym = _gym(config) if config.kind == "reasoning_gym" else None
    split = _split(config, gym)
    split = replace(
        split,
        train=as_chat(split.train, chat=config.chat, system_prompt=config.system_prompt),
        held_out=as_chat(split.held_out, chat=config.chat, system_prompt=config.system_prompt),
    )
    with ExitStack() as if_one_fails:
        rewards: list[Reward] = []
        for name in config.reward_names:
            rewards.append(_reward(name, config, split, answer_of, gym, functions))
            if_one_fails.callback(rewards[-1].close)
        math = next((reward for reward in rewards if isinstance(reward, MathReward)), None)
        if math is not None:
            split = _without_unreadable(split, math)
        if_one_fails.pop_all()
    weights = config.reward_weights or [1.0] * len(rewards)
    return RewardedTask(split.train, split.held_out, rewards, weights, split.notices)


def _split(config: TaskConfig, gym: Gym | None) -> Split:
    """The rows of the task."""
    needs_answer = bool({"exact", "math"} & set(config.reward_names))
    match config.kind:
        case "arithmetic":
            size = DEFAULT_EVAL_SIZE if config.eval_size is None else config.eval_size
            additions = ArithmeticTask(size)
            return Split(tuple(additions.train), tuple(additions.held_out))
        case "reasoning_gym":
            assert gym is not None
            return gym_split(gym, config.train_size, config.eval_size, config.seed)
        case "dataset":
            return load_dataset_split(
                config.path,
                config.eval_path,
                config.eval_size,
                splits=(config.split, config.eval_split),
                subset=config.subset,
                columns=config.columns,
                needs_answer=needs_answer,
            )
        case "math":
            return load_split(config.path, config.eval_path, config.eval_size, math_fields)
        case "jsonl" | "function":
            fields = plain_fields(needs_answer=needs_answer)
            return load_split(config.path, config.eval_path, config.eval_size, fields)


def _gym(config: TaskConfig) -> Gym:
    if config.mix is not None:
        return Gym(config.mix, config.options or {}, key="task.mix")
    assert config.dataset is not None  # one of the two: a rule
    return Gym({config.dataset: 1.0}, {config.dataset: config.options or {}})


def _functions(config: TaskConfig) -> dict[str, Callable[..., Any]]:
    """The reward functions by the names that the config gives them."""
    key = "task.function" if config.function is not None else "task.rewards"
    names = [name for name in config.reward_names if name not in BUILTIN_REWARDS]
    for name in names:
        if ":" not in name and key == "task.rewards":
            raise UsageError(
                f"{key} {name!r}: neither {', '.join(BUILTIN_REWARDS)} nor 'module:name' or "
                f"'file.py:name'; name one of these"
            )
    return {name: load_function(key, name) for name in names}


def _reward(
    name: str,
    config: TaskConfig,
    split: Split,
    answer_of: AnswerFinder,
    gym: Gym | None,
    functions: Mapping[str, Callable[..., Any]],
) -> Reward:
    match name:
        case "exact":
            return ExactReward(answer_of)
        case "math":
            return MathReward(config.math_timeout_s)
        case "reasoning_gym":
            assert gym is not None  # a rule
            return GymReward(gym, answer_of, config.reward_timeout_s)
    return FunctionReward(
        functions[name],
        (*split.train, *split.held_out),
        config.reward_timeout_s,
        key="task.function" if config.function is not None else "task.rewards",
        path=name,
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    rows: tuple[Example, ...]
    lost: tuple[Example, ...]


def _without_unreadable(split: Split, math: MathReward) -> Split:
    """Without the rows whose right answer math-verify cannot read: nobody could be right there.

    Noticed with their number and the first of them. Raises UsageError if no row is left.
    """
    train, held_out = _readable(split.train, math), _readable(split.held_out, math)
    lost = (*train.lost, *held_out.lost)
    if not lost:
        return split
    first = f"{lost[0].source}: {lost[0].columns['answer']!r}"
    if not train.rows:
        raise UsageError(
            f"task.path: math-verify understands no `answer` (the first: {first}); "
            "write numbers or LaTeX, or score them by task.kind 'jsonl'"
        )
    num_rows = len(split.train) + len(split.held_out)
    notice = (
        f"{len(lost)} of {num_rows} rows left out: math-verify does not understand their `answer` "
        f"(the first: {first})"
    )
    return replace(
        split, train=train.rows, held_out=held_out.rows, notices=(*split.notices, notice)
    )


def _readable(rows: Sequence[Example], math: MathReward) -> _Kept:
    known: dict[str, bool] = {}
    for row in rows:
        answer = row.columns["answer"]
        if answer not in known:
            known[answer] = math.understands(answer)
    return _Kept(
        tuple(row for row in rows if known[row.columns["answer"]]),
        tuple(row for row in rows if not known[row.columns["answer"]]),
    )
