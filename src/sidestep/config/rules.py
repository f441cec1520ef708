"""Rules that span several config keys: what is refused.

Rules about one key alone (types, ranges, choices) are in the schema. What is allowed but seldom
meant is found by `sidestep.doctor`, and so are combinations of losses that only the losses know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sidestep.config.loss import OPTIONS, option_key
from sidestep.config.problem import Problem
from sidestep.config.task_rules import eval_problems, task_problems
from sidestep.config.writing import toml_value

if TYPE_CHECKING:
    from sidestep.config.loss import LossConfig
    from sidestep.config.schema import (
        ControlConfig,
        EngineConfig,
        RolloutConfig,
        RunConfig,
        TrainConfig,
    )
    from sidestep.config.task import TaskConfig

# Facts about names of `sidestep.losses`; a test compares them.
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
BEHAVIOUR_ANCHORS = ("behaviour", "loglinear")
BEHAVIOUR_POLICIES = ("dis", "dppo_tv", "topr", "m2po")


def find_problem(config: RunConfig) -> Problem | None:
    """The first rule that `config` breaks, or None."""
    return next(find_problems(config), None)


def find_problems(config: RunConfig) -> Iterator[Problem]:
    """Every rule that `config` breaks."""
    yield from task_problems(config.task)
    yield from eval_problems(config.eval)
    yield from _overlong_problems(config.task, config.engine)
    yield from _rollout_problems(config.rollout, config.engine, config.loss)
    yield from _truncation_problems(config.engine, config.loss)
    yield from _train_problems(config.train, config.rollout)
    yield from _loss_problems(config)
    yield from _control_problems(config.control)


def reads_behaviour(loss: LossConfig) -> str | None:
    """The key whose choice takes a ratio to the policy that sampled; None if none does."""
    if loss.policy in BEHAVIOUR_POLICIES:
        return "policy"
    if loss.anchor in BEHAVIOUR_ANCHORS:
        return "anchor"
    return "correction" if set(loss.corrections) != {"none"} else None


def _overlong_problems(task: TaskConfig, engine: EngineConfig) -> Iterator[Problem]:
    if task.overlong_tokens > engine.max_new_tokens:
        yield Problem(
            "overlong_tokens",
            ("task.overlong_tokens", "engine.max_new_tokens"),
            f"task.overlong_tokens = {task.overlong_tokens} is more than "
            f"engine.max_new_tokens = {engine.max_new_tokens}",
            f"set task.overlong_tokens to at most {engine.max_new_tokens}",
        )


def _rollout_problems(
    rollout: RolloutConfig, engine: EngineConfig, loss: LossConfig
) -> Iterator[Problem]:
    if rollout.group_size == 1 and loss.advantage in GROUP_ADVANTAGES:
        yield Problem(
            "group_of_one",
            ("rollout.group_size", "loss.advantage"),
            f'rollout.group_size = 1 with loss.advantage = "{loss.advantage}": a group of one has '
            f"no advantage and nothing would be learned",
            "set rollout.group_size to 2 or more",
        )
    if engine.batch_groups is not None and rollout.groups_per_step % engine.batch_groups:
        yield Problem(
            "batch_groups",
            ("engine.batch_groups", "rollout.groups_per_step"),
            f"engine.batch_groups = {engine.batch_groups} does not divide "
            f"rollout.groups_per_step = {rollout.groups_per_step}",
            "set it to a divisor, or leave it out",
        )
    if engine.drop_finished and rollout.lag_mode == "exact":
        yield Problem(
            "exact_mode_shapes",
            ("engine.drop_finished", "rollout.lag_mode"),
            'engine.drop_finished = true with rollout.lag_mode = "exact": bits depend on the shape '
            "of the batch",
            'leave engine.drop_finished out, or set rollout.lag_mode = "bounded"',
        )
    if rollout.drop_equal_rewards and rollout.lag_mode == "exact":
        yield Problem(
            "exact_mode_drops",
            ("rollout.drop_equal_rewards", "rollout.lag_mode"),
            'rollout.drop_equal_rewards = true with rollout.lag_mode = "exact": exact lag needs '
            "every group it admits",
            'set rollout.drop_equal_rewards = false, or rollout.lag_mode = "bounded"',
        )


def _truncation_problems(engine: EngineConfig, loss: LossConfig) -> Iterator[Problem]:
    reader = reads_behaviour(loss)
    for name, truncates in (("top_p", engine.top_p < 1.0), ("top_k", engine.top_k > 0)):
        if truncates and reader is not None:
            everything = {"top_p": "1.0", "top_k": "0"}[name]
            without = ', or loss.anchor = "recomputed"' if reader == "anchor" else ""
            yield Problem(
                "truncated_sampling",
                (f"engine.{name}", f"loss.{reader}"),
                f"engine.{name} = {getattr(engine, name)} with "
                f"loss.{reader} = {toml_value(getattr(loss, reader))}: "
                f"importance ratios need samples of the whole distribution",
                f"set engine.{name} = {everything}{without}",
            )


def _train_problems(train: TrainConfig, rollout: RolloutConfig) -> Iterator[Problem]:
    if train.warmup_steps >= train.steps:
        yield Problem(
            "warmup_steps",
            ("train.warmup_steps", "train.steps"),
            f"train.warmup_steps = {train.warmup_steps} leaves nothing of "
            f"train.steps = {train.steps}",
            "set it below train.steps",
        )
    if train.steps_per_batch > rollout.groups_per_step:
        yield Problem(
            "steps_per_batch",
            ("train.steps_per_batch", "rollout.groups_per_step"),
            f"train.steps_per_batch = {train.steps_per_batch} is more than "
            f"rollout.groups_per_step = {rollout.groups_per_step}: a mini-batch has whole groups",
            f"set train.steps_per_batch to at most {rollout.groups_per_step} "
            f"(train.epochs_per_batch uses a batch again)",
        )


def _loss_problems(config: RunConfig) -> Iterator[Problem]:
    loss = config.loss
    yield from _unused_options(loss)
    names = loss.corrections
    if len(set(names)) < len(names):
        yield Problem(
            "correction_twice",
            ("loss.correction",),
            f"loss.correction = {toml_value(names)} names a correction twice",
            "leave one of them out",
        )
    if loss.kl_coef == 0.0:
        for key, value in (
            ("loss.kl_estimate", loss.kl_estimate),
            ("model.reference_path", config.model.reference_path),
        ):
            if value is not None:
                yield Problem(
                    "unused_key",
                    (key, "loss.kl_coef"),
                    f'{key} = "{value}" is not used with loss.kl_coef = 0.0',
                    f"set loss.kl_coef, or leave {key} out",
                )
    if loss.kl_place == "reward" and loss.kl_estimator != "k1":
        yield Problem(
            "biased_kl_reward",
            ("loss.kl_estimate", "loss.kl_place"),
            f'loss.kl_estimate = "{loss.kl_estimate}" with loss.kl_place = "reward": in a reward '
            f"only k1 is the penalty of the divergence itself",
            'set loss.kl_estimate = "k1" or leave it out, or loss.kl_place = "loss"',
        )


def _unused_options(loss: LossConfig) -> Iterator[Problem]:
    """Settings of losses and corrections that are not chosen: nothing would read them."""
    chosen = (loss.policy, *loss.corrections)
    used = {option_key(name, option) for name in chosen for option in OPTIONS.get(name, ())}
    owners: dict[str, list[str]] = {}
    for owner, options in OPTIONS.items():
        for option in options:
            owners.setdefault(option_key(owner, option), []).append(owner)
    for key, names in owners.items():
        value = getattr(loss, key)
        if value is not None and key not in used:
            yield Problem(
                "unused_key",
                (f"loss.{key}", "loss.policy"),
                f'loss.{key} = {value} is not used with loss.policy = "{loss.policy}" and '
                f"loss.correction = {toml_value(loss.correction)}: it is of {' and '.join(names)}",
                "leave it out",
            )


def _control_problems(control: ControlConfig) -> Iterator[Problem]:
    low, high, residual = control.low, control.high, control.residual
    if isinstance(low, float) and isinstance(high, float) and low > high:
        yield Problem(
            "control_thresholds",
            ("control.low", "control.high"),
            f"control.low = {low} is above control.high = {high}",
            "set control.low to at most control.high",
        )
    if isinstance(low, float) and residual is not None and residual > low:
        yield Problem(
            "control_residual",
            ("control.residual", "control.low"),
            f"control.residual = {residual} is above control.low = {low}",
            "set control.residual to at most control.low",
        )
    if residual is not None and control.strength != 1.0:
        yield Problem(
            "control_strength",
            ("control.residual", "control.strength"),
            f"control.residual = {residual} replaces control.strength = {control.strength}",
            "leave one of them out",
        )
