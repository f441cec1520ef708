"""All checks, in the order of what they are about."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.config import RunConfig
from sidestep.config.rules import find_problems
from sidestep.doctor import data_checks, loss_checks, machine_checks
from sidestep.doctor.finding import Finding
from sidestep.doctor.surroundings import Surroundings, surroundings_of
from sidestep.errors import UsageError


def diagnose(config: RunConfig, around: Surroundings | None = None) -> list[Finding]:
    """Everything that is found, errors first. Empty: nothing known to fail.

    around: None looks at this machine.
    """
    around = around or surroundings_of(config.model.path)
    return sorted(_findings(config, around), key=lambda one: one.severity != "error")


def checked(config: RunConfig, around: Surroundings | None = None) -> list[Finding]:
    """The warnings about a config that is to be run. Raises UsageError for the first error."""
    findings = diagnose(config, around)
    for one in findings:
        if one.severity == "error":
            raise UsageError(f"{one.message}: {one.fix}")
    return findings


def _findings(config: RunConfig, around: Surroundings) -> Iterator[Finding]:
    for problem in find_problems(config):
        yield Finding(problem.code, "error", problem.keys, problem.what, problem.fix)
    yield from loss_checks.combination_findings(config)
    yield from loss_checks.setting_findings(config)
    yield from loss_checks.kl_findings(config)
    yield from loss_checks.stacked_lag(config)
    yield from loss_checks.aggregation(config)
    yield from loss_checks.spread_weights(config)
    yield from data_checks.truncated_sampling(config)
    yield from data_checks.equal_rewards(config)
    yield from data_checks.dropped_signal(config)
    yield from data_checks.reward_scale(config)
    yield from data_checks.token_budget(config, around)
    yield from data_checks.learning_rate_lag(config, around)
    yield from data_checks.bfloat16(config)
    yield from machine_checks.control(config, around)
    yield from machine_checks.threads(around)
    choices = {"engine.kind": config.engine.kind, "task.kind": config.task.kind}
    yield from machine_checks.missing_extras(choices, around)
