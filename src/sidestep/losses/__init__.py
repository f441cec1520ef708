"""Losses as pure functions, tensors in and tensors out. Equations and examples: docs/losses.md.

A loss is a choice at each stage, and each stage is one short function:
logprobs (log-probabilities) -> anchors (what the ratio is taken to) -> ratios -> policy (loss per
token) -> reduce (one number). `advantages` comes before, from rewards alone.
"""

from sidestep.losses.advantages import grpo_advantages
from sidestep.losses.anchors import Anchor, anchor_logprobs, behaviour_anchor, recomputed_anchor
from sidestep.losses.logprobs import token_entropy, token_logprobs
from sidestep.losses.policy import clip_is_active, ppo_objective
from sidestep.losses.ratios import (
    MAX_KL,
    MAX_LOG_RATIO,
    RatioSums,
    bounded_log_ratio,
    effective_sample_size_fraction,
    importance_ratio,
    k1,
    k3,
    ratio_sums,
)
from sidestep.losses.reduce import (
    Aggregation,
    Denominators,
    aggregate,
    constant_mean,
    count_denominators,
    sequence_mean,
    token_mean,
)

__all__ = [
    "MAX_KL",
    "MAX_LOG_RATIO",
    "Aggregation",
    "Anchor",
    "Denominators",
    "RatioSums",
    "aggregate",
    "anchor_logprobs",
    "behaviour_anchor",
    "bounded_log_ratio",
    "clip_is_active",
    "constant_mean",
    "count_denominators",
    "effective_sample_size_fraction",
    "grpo_advantages",
    "importance_ratio",
    "k1",
    "k3",
    "ppo_objective",
    "ratio_sums",
    "recomputed_anchor",
    "sequence_mean",
    "token_entropy",
    "token_logprobs",
    "token_mean",
]
