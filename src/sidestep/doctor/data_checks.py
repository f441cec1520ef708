"""Rewards, groups, tokens, learning rate and number format."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sidestep.config import RunConfig
from sidestep.config.rules import GROUP_ADVANTAGES, reads_behaviour
from sidestep.doctor.finding import Finding, warning
from sidestep.doctor.surroundings import Surroundings

# Sampling this cold gives nearly the same completion every time.
COLD = 0.3
# Of equally likely right and wrong answers, groups smaller than this are all equal in a quarter of
# the cases or more: 2 in 2^size.
SMALL_GROUP = 4
# (parameters, largest lag times learning rate): the larger model from arXiv 2607.01083 (1 to 3
# billion parameters), the smaller an estimate for the packaged model. Between and beyond them
# a straight line in logarithms: an order of magnitude, not a law.
STABLE_PRODUCTS = ((1.4e5, 5e-3), (1e9, 1.6e-6))
# bfloat16 keeps 8 bits: a weight of 0.02, a common size, takes up no change below 2^-9 of it.
BFLOAT16_STEP = 0.02 * 2**-9


def truncated_sampling(config: RunConfig) -> Iterator[Finding]:
    """Where the rules allow it, because no ratio to the behaviour policy is taken."""
    engine = config.engine
    if (engine.top_p < 1.0 or engine.top_k > 0) and reads_behaviour(config.loss) is None:
        yield warning(
            "truncated_sampling",
            ("engine.top_p", "engine.top_k"),
            f"engine.top_p = {engine.top_p}, engine.top_k = {engine.top_k}: samples come from a "
            f"truncated distribution, the loss is that of the whole one",
            "set engine.top_p = 1.0 and engine.top_k = 0",
        )


def equal_rewards(config: RunConfig) -> Iterator[Finding]:
    engine, rollout = config.engine, config.rollout
    if engine.temperature <= COLD:
        yield warning(
            "equal_rewards_likely",
            ("engine.temperature",),
            f"engine.temperature = {engine.temperature}: the completions of a group will be nearly "
            f"the same, and so will their rewards",
            "set engine.temperature to about 1.0",
        )
    if 1 < rollout.group_size < SMALL_GROUP and config.loss.advantage in GROUP_ADVANTAGES:
        share = 2.0 ** (1 - rollout.group_size)
        yield warning(
            "equal_rewards_likely",
            ("rollout.group_size",),
            f"rollout.group_size = {rollout.group_size}: of right-or-wrong rewards at least "
            f"{share:.0%} of the groups will be all equal and teach nothing",
            f"set rollout.group_size to {SMALL_GROUP} or more",
        )


def dropped_signal(config: RunConfig) -> Iterator[Finding]:
    if config.rollout.drop_equal_rewards and config.loss.advantage == "reinforce_pp":
        yield warning(
            "dropped_signal",
            ("rollout.drop_equal_rewards", "loss.advantage"),
            'rollout.drop_equal_rewards = true with loss.advantage = "reinforce_pp": its baseline '
            "is that of the batch, so groups of equal rewards have an advantage too",
            "set rollout.drop_equal_rewards = false",
        )


def reward_scale(config: RunConfig) -> Iterator[Finding]:
    if config.task.kind == "function" and config.loss.advantage in ("dr_grpo", "rloo"):
        yield warning(
            "reward_scale",
            ("loss.advantage", "task.function"),
            f'loss.advantage = "{config.loss.advantage}" does not divide by the spread of the '
            f"rewards: rewards ten times as large are a gradient ten times as large",
            'let the reward function give numbers of about 1, or set loss.advantage = "grpo"',
        )


def token_budget(config: RunConfig, around: Surroundings) -> Iterator[Finding]:
    context, new = around.context_tokens, config.engine.max_new_tokens
    keys = ("engine.max_new_tokens", "model.path")
    if context is not None and new >= context:
        yield Finding(
            "token_budget",
            "error",
            keys,
            f"engine.max_new_tokens = {new}: the model's context of {context} tokens has no place "
            f"for a prompt",
            f"set engine.max_new_tokens well below {context}",
        )
    elif context is not None and new > 0.9 * context:
        yield warning(
            "token_budget",
            keys,
            f"engine.max_new_tokens = {new}: the model's context of {context} tokens leaves "
            f"{context - new} for the prompt",
            "lower engine.max_new_tokens if prompts are longer",
        )


def learning_rate_lag(config: RunConfig, around: Surroundings) -> Iterator[Finding]:
    if around.num_parameters is None:
        return
    num_steps = config.train.optimizer_steps_per_batch
    lag = (config.rollout.max_lag + 1) * num_steps - 1
    product, limit = lag * config.train.learning_rate, stable_product(around.num_parameters)
    if product > limit:
        yield warning(
            "learning_rate_lag",
            ("train.learning_rate", "rollout.max_lag"),
            f"train.learning_rate = {config.train.learning_rate:g} at a lag of up to {lag} "
            f"versions: their product is {product:.2g}; for {around.num_parameters:.2g} parameters "
            f"{limit:.2g} is an estimate, within a factor of ten, of where training stays stable",
            f"set train.learning_rate to about {limit / lag:.1g}, or lower rollout.max_lag",
        )


def stable_product(num_parameters: float) -> float:
    """Largest lag times learning rate that such a model is likely to stand."""
    (small, at_small), (large, at_large) = STABLE_PRODUCTS
    slope = math.log(at_large / at_small) / math.log(large / small)
    return float(at_small * (num_parameters / small) ** slope)


def bfloat16(config: RunConfig) -> Iterator[Finding]:
    if config.model.dtype != "bfloat16":
        return
    weighed = set(config.loss.corrections) - {"none", "opsm", "geometric"}
    if reads_behaviour(config.loss) in ("anchor", "policy") and not weighed:
        yield warning(
            "bfloat16_logprobs",
            ("model.dtype", "loss.anchor"),
            'model.dtype = "bfloat16": the log-probabilities of engine and trainer differ by '
            "rounding, so ratios are not 1 before any update",
            'set model.dtype = "float32", or loss.anchor = "proximal" with '
            'loss.correction = "tis" and several optimizer steps per batch',
        )
    if config.train.learning_rate < BFLOAT16_STEP:
        yield warning(
            "bfloat16_updates",
            ("model.dtype", "train.learning_rate"),
            f'model.dtype = "bfloat16" with train.learning_rate = '
            f"{config.train.learning_rate:g}: the weights themselves are in bfloat16, and a "
            f"typical one takes up no change below {BFLOAT16_STEP:.0e}: most updates are lost",
            'set model.dtype = "float32"',
        )
