"""From the `[task]` section of a config to a task."""

from __future__ import annotations

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.function import FunctionTask
from sidestep.tasks.jsonl import JsonlTask
from sidestep.tasks.protocol import Task

# Keys that only some kinds read. Setting one that is not read is a mistake that would go unseen:
# `--set task.path=my.jsonl` alone would still train on additions.
READ_BY = {
    "path": ("jsonl", "function"),
    "eval_path": ("jsonl", "function"),
    "answer_regex": ("jsonl",),
    "function": ("function",),
}


def make_task(config: TaskConfig) -> Task:
    """The task `config` describes, its files read and checked.

    Raises UsageError, before any work, for everything that is wrong with them.
    """
    for name, kinds in READ_BY.items():
        value = getattr(config, name)
        if value is not None and config.kind not in kinds:
            wanted = " or ".join(repr(kind) for kind in kinds)
            raise UsageError(
                f"task.{name} {value!r}: not used by task.kind {config.kind!r}; "
                f"set task.kind to {wanted}, or leave task.{name} away"
            )
    match config.kind:
        case "arithmetic":
            return ArithmeticTask(config.eval_size)
        case "jsonl":
            return JsonlTask(config.path, config.eval_path, config.eval_size, config.answer_regex)
        case "function":
            return FunctionTask(config.path, config.eval_path, config.eval_size, config.function)
