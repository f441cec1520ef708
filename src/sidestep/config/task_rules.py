"""Rules between the keys of `[task]` and `[eval]`: the one home of which kind reads which key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sidestep.config.problem import Problem
from sidestep.config.writing import toml_value

if TYPE_CHECKING:
    from sidestep.config.task import EvalConfig, TaskConfig

# Keys that only some kinds read. Setting one that is not read is a mistake that would go unseen:
# `--set task.path=my.jsonl` alone would still train on additions.
FILES = ("jsonl", "function", "math", "dataset")
READ_BY: Mapping[str, tuple[str, ...]] = {
    "path": FILES,
    "eval_path": FILES,
    "split": ("dataset",),
    "eval_split": ("dataset",),
    "subset": ("dataset",),
    "columns": ("dataset",),
    "dataset": ("reasoning_gym",),
    "mix": ("reasoning_gym",),
    "options": ("reasoning_gym",),
    "train_size": ("reasoning_gym",),
    "seed": ("reasoning_gym",),
    "answer_regex": ("jsonl", "dataset", "reasoning_gym"),
    "function": ("function", "dataset"),
}

BUILTIN_REWARDS = ("exact", "math", "reasoning_gym")
"""Names in task.rewards that are no functions."""

MAPPED_COLUMNS = ("prompt", "messages", "answer")
"""Names that task.columns may give to columns."""

# reward/<name> is a metric; these are metrics already.
METRIC_NAMES = ("mean", "std", "added", "problems")


def task_problems(task: TaskConfig) -> Iterator[Problem]:
    """Every rule that the section breaks."""
    for name, kinds in READ_BY.items():
        value = getattr(task, name)
        if value is not None and task.kind not in kinds:
            fixes = " or ".join(f'"{kind}"' for kind in kinds)
            yield Problem(
                "unused_key",
                (f"task.{name}", "task.kind"),
                f'task.{name} = {toml_value(value)} is not used with task.kind = "{task.kind}"',
                f"set task.kind to {fixes}, or leave task.{name} out",
            )
    yield from _data_problems(task)
    yield from _reward_problems(task)


def _data_problems(task: TaskConfig) -> Iterator[Problem]:
    if task.kind in FILES and task.path is None:
        where = "a folder or hub name" if task.kind == "dataset" else "a JSONL file of prompts"
        yield Problem(
            "task_without_data",
            ("task.kind", "task.path"),
            f'task.kind = "{task.kind}" needs task.path',
            f"set it to {where}",
        )
    if task.eval_split is not None and task.eval_path is not None:
        yield Problem(
            "two_evaluations",
            ("task.eval_split", "task.eval_path"),
            "task.eval_split and task.eval_path both name the rows for evaluation",
            "leave one of them out",
        )
    for name in task.columns or ():
        if name not in MAPPED_COLUMNS:
            yield Problem(
                "unknown_column",
                ("task.columns",),
                f"task.columns maps to {name!r}",
                f"map to {', '.join(MAPPED_COLUMNS)}; other columns keep their names",
            )
    if task.kind == "reasoning_gym" and (task.dataset is None) == (task.mix is None):
        yield Problem(
            "task_without_data",
            ("task.kind", "task.dataset", "task.mix"),
            'task.kind = "reasoning_gym" needs task.dataset or task.mix, one of them',
            'set task.dataset = "chain_sum", or task.mix to names with weights',
        )


def _reward_problems(task: TaskConfig) -> Iterator[Problem]:
    if task.rewards is not None and task.function is not None:
        yield Problem(
            "two_rewards",
            ("task.rewards", "task.function"),
            "task.rewards and task.function are both set",
            "put the function into task.rewards, or leave task.rewards out",
        )
    elif not task.reward_names:
        yield Problem(
            "task_without_function",
            ("task.kind", "task.function"),
            f'task.kind = "{task.kind}" needs task.function',
            'set it to "module:name" or "file.py:name"',
        )
    given, weights = len(task.rewards or ()), task.reward_weights
    if weights is not None and len(weights) != given:
        yield Problem(
            "reward_weights",
            ("task.reward_weights", "task.rewards"),
            f"task.reward_weights has {len(weights)} numbers for {given} task.rewards",
            "give one weight for each reward",
        )
    if "reasoning_gym" in task.reward_names and task.kind != "reasoning_gym":
        yield Problem(
            "reward_of_other_kind",
            ("task.rewards", "task.kind"),
            f'task.rewards names "reasoning_gym" with task.kind = "{task.kind}"',
            'set task.kind = "reasoning_gym", or leave that reward out',
        )
    names = [reward_name(name) for name in task.reward_names]
    for name in sorted(set(names)):
        if names.count(name) > 1 or name in METRIC_NAMES:
            why = "named twice" if names.count(name) > 1 else "the name of another metric"
            yield Problem(
                "reward_name",
                ("task.rewards" if task.rewards is not None else "task.function",),
                f"the metric reward/{name} would be {why}",
                "give that reward function another name",
            )


def eval_problems(evaluation: EvalConfig) -> Iterator[Problem]:
    """Every rule that the section breaks."""
    samples, largest = evaluation.samples, max(evaluation.pass_at)
    if samples and largest > samples:
        yield Problem(
            "pass_at",
            ("eval.pass_at", "eval.samples"),
            f"eval.pass_at = {toml_value(evaluation.pass_at)} needs {largest} samples, "
            f"eval.samples = {samples}",
            f"set eval.samples to at least {largest}",
        )


def reward_name(name: str) -> str:
    """What a reward is called in metrics: the function's own name."""
    return name.rpartition(":")[2]
