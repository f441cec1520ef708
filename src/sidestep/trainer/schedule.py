"""Learning rate as a function of the version: it does not advance on a skipped step (method.md)."""

from __future__ import annotations

import math

from sidestep.config import TrainConfig


def learning_rate_at(version: int, config: TrainConfig) -> float:
    """Rate of the optimizer step that makes `version` + 1.

    Linear warm-up over `warmup_steps`, then constant, or linear / cosine decay that would reach 0
    after the last optimizer step. Warm-up and decay count optimizer steps.
    """
    num_steps = config.steps * config.optimizer_steps_per_batch
    if version < config.warmup_steps:
        return config.learning_rate * (version + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = (version - config.warmup_steps) / (num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
