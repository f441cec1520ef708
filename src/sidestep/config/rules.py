"""Rules that span several config keys: what is refused, and what is worth a warning.

Rules about one key alone (types, ranges, choices) are in the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidestep.config.schema import ControlConfig, RunConfig, TaskConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. `keys`: the keys it is about, the one to blame first. `message`: one line."""

    keys: tuple[str, ...]
    message: str


def find_problem(config: RunConfig) -> Problem | None:
    """The first rule that `config` breaks, or None."""
    return next(_problems(config), None)


def _problems(config: RunConfig) -> Iterator[Problem]:
    yield from _task_problems(config.task)
    yield from _rollout_problems(config)
    yield from _train_problems(config.train)
    yield from _control_problems(config.control)
    if config.loss.kl_coef > 0:
        yield Problem(
            ("loss.kl_coef",),
            f"loss.kl_coef = {config.loss.kl_coef}: a KL penalty is not available yet: "
            f"set it to 0.0 or leave it out",
        )


def _task_problems(task: TaskConfig) -> Iterator[Problem]:
    if task.kind != "arithmetic" and task.path is None:
        yield Problem(
            ("task.kind", "task.path"),
            f'task.kind = "{task.kind}" needs task.path: set it to a JSONL file of prompts',
        )
    if task.kind == "function" and task.function is None:
        yield Problem(
            ("task.kind", "task.function"),
            'task.kind = "function" needs task.function: set it to "module:name" or "file.py:name"',
        )
    wanted_kinds = {
        "path": ("jsonl", "function"),
        "eval_path": ("jsonl", "function"),
        "answer_regex": ("jsonl",),
        "function": ("function",),
    }
    for name, kinds in wanted_kinds.items():
        value = getattr(task, name)
        if value is not None and task.kind not in kinds:
            fixes = " or ".join(f'"{kind}"' for kind in kinds)
            yield Problem(
                (f"task.{name}", "task.kind"),
                f'task.{name} = "{value}" is not used with task.kind = "{task.kind}": '
                f"set task.kind to {fixes}, or leave task.{name} out",
            )


def _rollout_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, engine, loss = config.rollout, config.engine, config.loss
    if rollout.group_size == 1 and loss.advantage == "grpo":
        yield Problem(
            ("rollout.group_size", "loss.advantage"),
            'rollout.group_size = 1 with loss.advantage = "grpo": a group of one has no advantage '
            "and nothing would be learned: set rollout.group_size to 2 or more",
        )
    for name, truncates in (("top_p", engine.top_p < 1.0), ("top_k", engine.top_k > 0)):
        if truncates and loss.anchor == "behaviour":
            everything = {"top_p": "1.0", "top_k": "0"}[name]
            yield Problem(
                (f"engine.{name}", "loss.anchor"),
                f'engine.{name} = {getattr(engine, name)} with loss.anchor = "behaviour": '
                f"importance ratios need samples of the whole distribution: "
                f'set engine.{name} = {everything}, or loss.anchor = "recomputed"',
            )
    if engine.batch_groups is not None and rollout.groups_per_step % engine.batch_groups:
        yield Problem(
            ("engine.batch_groups", "rollout.groups_per_step"),
            f"engine.batch_groups = {engine.batch_groups} does not divide "
            f"rollout.groups_per_step = {rollout.groups_per_step}: set it to a divisor, "
            f"or leave it out",
        )
    if rollout.drop_equal_rewards and rollout.lag_mode == "exact":
        yield Problem(
            ("rollout.drop_equal_rewards", "rollout.lag_mode"),
            'rollout.drop_equal_rewards = true with rollout.lag_mode = "exact": exact lag needs '
            "every group it admits: set rollout.drop_equal_rewards = false, "
            'or rollout.lag_mode = "bounded"',
        )


def _train_problems(train: TrainConfig) -> Iterator[Problem]:
    if train.warmup_steps >= train.steps:
        yield Problem(
            ("train.warmup_steps", "train.steps"),
            f"train.warmup_steps = {train.warmup_steps} leaves nothing of "
            f"train.steps = {train.steps}: set it below train.steps",
        )


def _control_problems(control: ControlConfig) -> Iterator[Problem]:
    low, high, residual = control.low, control.high, control.residual
    if isinstance(low, float) and isinstance(high, float) and low > high:
        yield Problem(
            ("control.low", "control.high"),
            f"control.low = {low} is above control.high = {high}: "
            f"set control.low to at most control.high",
        )
    if isinstance(low, float) and residual is not None and residual > low:
        yield Problem(
            ("control.residual", "control.low"),
            f"control.residual = {residual} is above control.low = {low}: "
            f"set control.residual to at most control.low",
        )
    if residual is not None and control.strength != 1.0:
        yield Problem(
            ("control.residual", "control.strength"),
            f"control.residual = {residual} replaces control.strength = {control.strength}: "
            f"leave one of them out",
        )


def config_warnings(config: RunConfig) -> list[str]:
    """What is allowed but seldom meant: one line each, naming the key and what follows from it."""
    warnings = []
    rollout, engine, loss, control = config.rollout, config.engine, config.loss, config.control
    if loss.anchor == "recomputed":
        uncorrected = (
            f", and nothing in the loss corrects for a lag of up to {rollout.max_lag}"
            if rollout.max_lag
            else ""
        )
        warnings.append(
            'loss.anchor = "recomputed": the ratio is always 1, so loss.clip_low and '
            f'loss.clip_high do nothing{uncorrected} (loss.anchor = "behaviour" uses the ratio)'
        )
        if engine.top_p < 1.0 or engine.top_k > 0:
            warnings.append(
                f"engine.top_p = {engine.top_p}, engine.top_k = {engine.top_k}: samples come from "
                "a truncated distribution, the loss is that of the whole one"
            )
    if control.mode != "off" and control.snapshot == "applied":
        warnings.append(
            'control.snapshot = "applied": the cosine then depends on what control did before '
            '(control.snapshot = "raw" compares raw gradients)'
        )
    return warnings
