"""Rules across keys: each is refused with the fix, whichever way the config is made."""

import pytest
from pydantic import ValidationError

from sidestep.config import ControlConfig, RolloutConfig, RunConfig
from sidestep.config.loading import load_config
from sidestep.config.rules import config_warnings
from sidestep.errors import UsageError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.group_size=1"],
            'rollout.group_size = 1 with loss.advantage = "grpo": a group of one has no advantage '
            "and nothing would be learned: set rollout.group_size to 2 or more",
        ),
        (
            ["engine.top_p=0.9"],
            'engine.top_p = 0.9 with loss.anchor = "behaviour": importance ratios need samples of '
            'the whole distribution: set engine.top_p = 1.0, or loss.anchor = "recomputed"',
        ),
        (
            ["engine.top_k=40"],
            'engine.top_k = 40 with loss.anchor = "behaviour": importance ratios need samples of '
            'the whole distribution: set engine.top_k = 0, or loss.anchor = "recomputed"',
        ),
        (
            ["engine.batch_groups=24"],
            "engine.batch_groups = 24 does not divide rollout.groups_per_step = 64: "
            "set it to a divisor, or leave it out",
        ),
        (
            ["rollout.drop_equal_rewards=true", "rollout.lag_mode=exact"],
            'rollout.drop_equal_rewards = true with rollout.lag_mode = "exact": exact lag needs '
            "every group it admits: set rollout.drop_equal_rewards = false, "
            'or rollout.lag_mode = "bounded"',
        ),
        (
            ["train.warmup_steps=20", "train.steps=20"],
            "train.warmup_steps = 20 leaves nothing of train.steps = 20: set it below train.steps",
        ),
        (
            ["control.low=0.5", "control.high=0.4"],
            "control.low = 0.5 is above control.high = 0.4: "
            "set control.low to at most control.high",
        ),
        (
            ["control.residual=0.2"],
            "control.residual = 0.2 is above control.low = 0.1: "
            "set control.residual to at most control.low",
        ),
        (
            ["control.residual=0.05", "control.strength=0.5"],
            "control.residual = 0.05 replaces control.strength = 0.5: leave one of them out",
        ),
        (
            ["loss.kl_coef=0.1"],
            "loss.kl_coef = 0.1: a KL penalty is not available yet: set it to 0.0 or leave it out",
        ),
        (
            ["task.kind=jsonl"],
            'task.kind = "jsonl" needs task.path: set it to a JSONL file of prompts',
        ),
        (
            ["task.kind=function", "task.path=a.jsonl"],
            'task.kind = "function" needs task.function: set it to "module:name" or "file.py:name"',
        ),
        (
            ["task.kind=jsonl", "task.path=a.jsonl", "task.function=m:f"],
            'task.function = "m:f" is not used with task.kind = "jsonl": '
            'set task.kind to "function", or leave task.function out',
        ),
        (
            ["task.path=a.jsonl"],
            'task.path = "a.jsonl" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl" or "function", or leave task.path out',
        ),
        (
            ["task.eval_path=a.jsonl"],
            'task.eval_path = "a.jsonl" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl" or "function", or leave task.eval_path out',
        ),
        (
            ["task.answer_regex=x"],
            'task.answer_regex = "x" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl", or leave task.answer_regex out',
        ),
    ],
)
def test_a_broken_rule_is_refused_with_the_fix(overrides, message):
    with pytest.raises(UsageError) as caught:
        load_config(None, overrides)
    assert str(caught.value) == f"--set: {message}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.top_p=0.9", "loss.anchor=recomputed"],
        ["engine.batch_groups=16"],
        ["train.warmup_steps=19", "train.steps=20"],
        ["control.low=0.4", "control.high=0.4"],
        ["control.low=calibrate", "control.high=calibrate", "control.residual=0.9"],
        ["control.residual=0.1"],
        ["task.kind=function", "task.path=a.jsonl", "task.function=m:f"],
        ["rollout.drop_equal_rewards=true"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(overrides):
    assert load_config(None, overrides) != RunConfig()


def test_a_config_made_in_python_obeys_the_same_rules():
    with pytest.raises(ValidationError, match=r"rollout\.group_size = 1 with loss\.advantage"):
        RunConfig(rollout=RolloutConfig(group_size=1))


def test_the_defaults_warn_of_nothing():
    assert config_warnings(RunConfig()) == []


def test_a_ratio_that_is_always_one_is_warned_of_with_what_follows():
    config = load_config(None, ["loss.anchor=recomputed", "rollout.max_lag=8"])
    assert config_warnings(config) == [
        'loss.anchor = "recomputed": the ratio is always 1, so loss.clip_low and loss.clip_high '
        "do nothing, and nothing in the loss corrects for a lag of up to 8 "
        '(loss.anchor = "behaviour" uses the ratio)'
    ]


def test_at_lag_zero_there_is_nothing_to_correct_for():
    (warning,) = config_warnings(load_config(None, ["loss.anchor=recomputed", "rollout.max_lag=0"]))
    assert "corrects" not in warning


def test_a_truncated_sampler_is_warned_of_where_it_is_allowed():
    config = load_config(None, ["loss.anchor=recomputed", "engine.top_k=5"])
    assert config_warnings(config)[1] == (
        "engine.top_p = 1.0, engine.top_k = 5: samples come from a truncated distribution, "
        "the loss is that of the whole one"
    )


def test_snapshots_of_applied_gradients_are_warned_of_unless_control_is_off():
    applied = ControlConfig(snapshot="applied")
    (warning,) = config_warnings(RunConfig(control=applied))
    assert warning.startswith('control.snapshot = "applied": the cosine then depends on what')
    assert config_warnings(RunConfig(control=ControlConfig(snapshot="applied", mode="off"))) == []
