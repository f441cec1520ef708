"""Rules across keys: each is refused with the fix, whichever way the config is made."""

import pytest
from pydantic import ValidationError

from sidestep.config import RolloutConfig, RunConfig
from sidestep.config.loading import load_config
from sidestep.config.rules import find_problems
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
            ["loss.kl_estimate=k2"],
            'loss.kl_estimate = "k2" is not used with loss.kl_coef = 0.0: '
            "set loss.kl_coef, or leave loss.kl_estimate out",
        ),
        (
            ["loss.kl_coef=0.1", "loss.kl_place=reward", "loss.kl_estimate=k3"],
            'loss.kl_estimate = "k3" with loss.kl_place = "reward": in a reward only k1 is the '
            'penalty of the divergence itself: set loss.kl_estimate = "k1" or leave it out, or '
            'loss.kl_place = "loss"',
        ),
        (
            ["engine.top_p=0.9", "loss.anchor=recomputed", "loss.correction=tis"],
            'engine.top_p = 0.9 with loss.correction = "tis": importance ratios need samples of '
            "the whole distribution: set engine.top_p = 1.0",
        ),
        (
            ["engine.top_k=5", "loss.anchor=recomputed", "loss.policy=dis"],
            'engine.top_k = 5 with loss.policy = "dis": importance ratios need samples of '
            "the whole distribution: set engine.top_k = 0",
        ),
        (
            ["loss.tis_cap=3.0"],
            'loss.tis_cap = 3.0 is not used with loss.policy = "ppo" and loss.correction = "none": '
            "it is of tis: leave it out",
        ),
        (
            ["loss.policy=sapo", "loss.clip_low=0.1"],
            'loss.clip_low = 0.1 is not used with loss.policy = "sapo" and loss.correction = '
            '"none": it is of ppo and dual_clip and gspo and dis: leave it out',
        ),
        (
            ['loss.correction=["opsm", "opsm"]'],
            'loss.correction = ["opsm", "opsm"] names a correction twice: leave one of them out',
        ),
        (
            ["train.steps_per_batch=65"],
            "train.steps_per_batch = 65 is more than rollout.groups_per_step = 64: a mini-batch "
            "has whole groups: set train.steps_per_batch to at most 64 "
            "(train.epochs_per_batch uses a batch again)",
        ),
        (
            ["task.overlong_tokens=9"],
            "task.overlong_tokens = 9 is more than engine.max_new_tokens = 8: "
            "set task.overlong_tokens to at most 8",
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
            'set task.kind to "function" or "dataset", or leave task.function out',
        ),
        (
            ["task.path=a.jsonl"],
            'task.path = "a.jsonl" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl" or "function" or "math" or "dataset", or leave task.path out',
        ),
        (
            ["task.eval_path=a.jsonl"],
            'task.eval_path = "a.jsonl" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl" or "function" or "math" or "dataset", '
            "or leave task.eval_path out",
        ),
        (
            ["task.answer_regex=x"],
            'task.answer_regex = "x" is not used with task.kind = "arithmetic": '
            'set task.kind to "jsonl" or "dataset" or "reasoning_gym", '
            "or leave task.answer_regex out",
        ),
        (
            ["task.kind=reasoning_gym"],
            'task.kind = "reasoning_gym" needs task.dataset or task.mix, one of them: '
            'set task.dataset = "chain_sum", or task.mix to names with weights',
        ),
        (
            ["task.mix={chain_sum = 1}"],
            'task.mix = {chain_sum = 1.0} is not used with task.kind = "arithmetic": '
            'set task.kind to "reasoning_gym", or leave task.mix out',
        ),
        (
            ["task.kind=function", "task.path=a", "task.function=m:f", 'task.rewards=["m:g"]'],
            "task.rewards and task.function are both set: "
            "put the function into task.rewards, or leave task.rewards out",
        ),
        (
            ['task.rewards=["exact", "m:f"]', "task.reward_weights=[1.0]"],
            "task.reward_weights has 1 numbers for 2 task.rewards: give one weight for each reward",
        ),
        (
            ['task.rewards=["m:f", "n:f"]'],
            "the metric reward/f would be named twice: give that reward function another name",
        ),
        (
            ['task.rewards=["m:mean"]'],
            "the metric reward/mean would be the name of another metric: "
            "give that reward function another name",
        ),
        (
            ['task.rewards=["reasoning_gym"]'],
            'task.rewards names "reasoning_gym" with task.kind = "arithmetic": '
            'set task.kind = "reasoning_gym", or leave that reward out',
        ),
        (
            ["task.kind=dataset", "task.path=d", "task.columns={question = 'q'}"],
            "task.columns maps to 'question': "
            "map to prompt, messages, answer; other columns keep their names",
        ),
        (
            ["task.kind=dataset", "task.path=d", "task.eval_path=e", "task.eval_split=test"],
            "task.eval_split and task.eval_path both name the rows for evaluation: "
            "leave one of them out",
        ),
        (
            ["eval.samples=2", "eval.pass_at=[1, 4]"],
            "eval.pass_at = [1, 4] needs 4 samples, eval.samples = 2: "
            "set eval.samples to at least 4",
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
        ["task.kind=dataset", "task.path=d", "task.function=m:f"],
        ['task.rewards=["exact", "m:f"]', "task.reward_weights=[1, 0.5]"],
        ["eval.samples=4", "eval.pass_at=[1, 4]"],
        ["rollout.drop_equal_rewards=true"],
        ["rollout.group_size=1", "loss.advantage=reinforce_pp"],
        ["engine.top_p=0.9", "loss.anchor=proximal"],
        ["loss.policy=dis", "loss.clip_low=0.1"],
        ['loss.correction=["tis", "geometric"]', "loss.tis_cap=3", "loss.geometric_high=1.1"],
        ["loss.kl_coef=0.1", "loss.kl_place=reward"],
        ["train.steps_per_batch=64", "train.epochs_per_batch=9"],
        ["task.overlong_tokens=8"],
    ],
)
def test_the_edge_of_a_rule_is_allowed(overrides):
    assert load_config(None, overrides) != RunConfig()


def test_a_config_made_in_python_obeys_the_same_rules():
    with pytest.raises(ValidationError, match=r"rollout\.group_size = 1 with loss\.advantage"):
        RunConfig(rollout=RolloutConfig(group_size=1))


def test_without_the_rules_every_broken_one_can_be_listed():
    overrides = ["rollout.group_size=1", "engine.top_p=0.9", "loss.tis_cap=2"]
    config = load_config(None, overrides, any_combination=True)
    assert [problem.code for problem in find_problems(config)] == [
        "group_of_one",
        "truncated_sampling",
        "unused_key",
    ]


def test_a_key_of_a_wrong_kind_is_refused_even_without_the_rules():
    with pytest.raises(UsageError, match=r"rollout\.max_lag = -1"):
        load_config(None, ["rollout.max_lag=-1"], any_combination=True)
