"""Combinations of losses, as `sidestep.losses` knows them, about the keys of a config."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.config import RunConfig
from sidestep.config.loss import option_key
from sidestep.config.writing import toml_value
from sidestep.doctor.finding import Finding, warning
from sidestep.losses import CORRECTIONS, POLICIES, check_combination, check_kl, make_options

LOSS_KEYS = {
    "dead_clip": ("loss.anchor", "loss.policy", "train.steps_per_batch"),
    "double_count": ("loss.correction", "loss.anchor", "loss.policy"),
    "correction_never_applied": ("loss.correction", "loss.anchor"),
    "uncorrected": ("loss.anchor", "loss.correction", "rollout.max_lag"),
    "anchor_unused": ("loss.anchor", "loss.policy"),
}


def combination_findings(config: RunConfig) -> Iterator[Finding]:
    """Policy, anchor and correction together."""
    loss, num_steps = config.loss, config.train.optimizer_steps_per_batch
    choice = (
        f'loss.policy = "{loss.policy}", loss.anchor = "{loss.anchor}", '
        f"loss.correction = {toml_value(loss.correction)}"
    )
    found = check_combination(
        loss.policy,
        loss.anchor,
        loss.corrections,
        steps_per_batch=num_steps,
        max_lag=config.rollout.max_lag * num_steps,
    )
    for one in found:
        if one.code != "stacked_lag":  # `stacked_lag` below has it by our keys
            keys = LOSS_KEYS[one.code]
            yield Finding(one.code, one.severity, keys, f"{choice}: {one.message}", one.fix)


def setting_findings(config: RunConfig) -> Iterator[Finding]:
    """Values that a loss or correction refuses."""
    loss = config.loss
    records: dict[str, type] = {loss.policy: POLICIES[loss.policy].options}
    records |= {name: CORRECTIONS[name].options for name in loss.corrections}
    for name, record in records.items():
        given = loss.options_of(name)
        try:
            make_options(record, **given)
        except ValueError as error:
            keys = tuple(f"loss.{option_key(name, option)}" for option in given)
            message = f"{', '.join(keys)}: {error}"
            yield Finding("loss_setting", "error", keys, message, "change it, or leave it out")


def kl_findings(config: RunConfig) -> Iterator[Finding]:
    loss = config.loss
    if loss.kl_coef > 0:
        for one in check_kl(loss.kl_estimator, loss.kl_place):
            keys = ("loss.kl_estimate", "loss.kl_place")
            yield Finding(one.code, one.severity, keys, f"loss.kl_coef: {one.message}", one.fix)


def stacked_lag(config: RunConfig) -> Iterator[Finding]:
    num_steps, max_lag = config.train.optimizer_steps_per_batch, config.rollout.max_lag
    if num_steps > 1 and max_lag > 0:
        yield warning(
            "stacked_lag",
            ("rollout.max_lag", "train.steps_per_batch", "train.epochs_per_batch"),
            f"rollout.max_lag = {max_lag} with {num_steps} optimizer steps on each rollout batch: "
            f"the bound holds at the first of them, where samples are up to "
            f"{max_lag * num_steps} versions old; at the last they are up to "
            f"{(max_lag + 1) * num_steps - 1}",
            "lower rollout.max_lag, or take one optimizer step per batch",
        )


def aggregation(config: RunConfig) -> Iterator[Finding]:
    """Losses that are one number a sequence."""
    wanted = {"gspo": "sequence", "topr": "constant"}.get(config.loss.policy)
    if wanted is not None and config.loss.aggregation == "token":
        yield warning(
            "aggregation",
            ("loss.aggregation", "loss.policy"),
            f'loss.aggregation = "token" with loss.policy = "{config.loss.policy}": it has one '
            f"ratio a sequence, and long sequences weigh more than short ones",
            f'set loss.aggregation = "{wanted}"',
        )


def spread_weights(config: RunConfig) -> Iterator[Finding]:
    """A weight per token on a loss per sequence."""
    loss = config.loss
    per_token = [
        name
        for name in loss.corrections
        if CORRECTIONS[name].weighs and not CORRECTIONS[name].whole_rows
    ]
    if loss.policy == "gspo" and per_token:
        yield warning(
            "spread_weights",
            ("loss.correction", "loss.policy"),
            f'loss.correction = {toml_value(loss.correction)} with loss.policy = "gspo": it has '
            f"one loss a sequence, so each of its tokens gets the mean of the sequence's weights, "
            f"and one that {per_token[0]} drops still moves with its row",
            'set loss.correction = "sequence_mis" or "geometric", which act on whole sequences',
        )
