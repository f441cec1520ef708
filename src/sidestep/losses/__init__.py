"""Losses as pure functions, tensors in and tensors out. Equations and examples: docs/losses.md.

A loss is a choice at each stage, and each stage is one short function:
logprobs (log-probabilities) -> anchors (what the ratio is taken to) -> inputs (all that a loss
reads) -> policy, policy_unclipped, policy_batch (loss per token) times corrections (weights and
drops) plus kl -> reduce (one number). `rewards` and `advantages` come before, from rewards alone;
`off_policy` measures. `registry` has every choice by name, `methods` the papers as choices,
`combinations` what silently fails.
"""

from sidestep.losses.advantages import (
    centred_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reinforce_pp_moments,
    rloo_advantages,
)
from sidestep.losses.anchors import (
    Anchor,
    anchor_logprobs,
    behaviour_anchor,
    loglinear_anchor,
    proximal_anchor,
    recomputed_anchor,
)
from sidestep.losses.combinations import Finding, check_combination, check_kl
from sidestep.losses.corrections import (
    Correction,
    WeightSums,
    combine,
    normalise_weights,
    weight_sums,
)
from sidestep.losses.inputs import PolicyInputs, PolicyTerm
from sidestep.losses.kl import KL_ESTIMATES, KLEstimate, kl_penalty
from sidestep.losses.logprobs import token_entropy, token_logprobs
from sidestep.losses.methods import METHODS, Method
from sidestep.losses.moments import Moments, moments, normalise
from sidestep.losses.off_policy import (
    LAG_BUCKETS,
    LagTable,
    OffPolicySums,
    RatioSums,
    ess_learning_rate_factor,
    lag_bucket,
    off_policy_sums,
    ratio_sums,
)
from sidestep.losses.options import make_options, options_of
from sidestep.losses.policy import clip_is_active, ppo_objective
from sidestep.losses.ratios import (
    MAX_KL,
    MAX_LOG_RATIO,
    bounded_log_ratio,
    effective_sample_size_fraction,
    importance_ratio,
    k1,
    k2,
    k3,
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
from sidestep.losses.registry import (
    ADVANTAGES,
    ANCHORS,
    CORRECTIONS,
    POLICIES,
    AdvantageEntry,
    AnchorEntry,
    CorrectionEntry,
    PolicyEntry,
)
from sidestep.losses.rewards import kl_in_reward, overlong_penalty, reward_to_go

__all__ = [
    "ADVANTAGES",
    "ANCHORS",
    "CORRECTIONS",
    "KL_ESTIMATES",
    "LAG_BUCKETS",
    "MAX_KL",
    "MAX_LOG_RATIO",
    "METHODS",
    "POLICIES",
    "AdvantageEntry",
    "Aggregation",
    "Anchor",
    "AnchorEntry",
    "Correction",
    "CorrectionEntry",
    "Denominators",
    "Finding",
    "KLEstimate",
    "LagTable",
    "Method",
    "Moments",
    "OffPolicySums",
    "PolicyEntry",
    "PolicyInputs",
    "PolicyTerm",
    "RatioSums",
    "WeightSums",
    "aggregate",
    "anchor_logprobs",
    "behaviour_anchor",
    "bounded_log_ratio",
    "centred_advantages",
    "check_combination",
    "check_kl",
    "clip_is_active",
    "combine",
    "constant_mean",
    "count_denominators",
    "effective_sample_size_fraction",
    "ess_learning_rate_factor",
    "grpo_advantages",
    "importance_ratio",
    "k1",
    "k2",
    "k3",
    "kl_in_reward",
    "kl_penalty",
    "lag_bucket",
    "loglinear_anchor",
    "make_options",
    "moments",
    "normalise",
    "normalise_weights",
    "off_policy_sums",
    "options_of",
    "overlong_penalty",
    "ppo_objective",
    "proximal_anchor",
    "ratio_sums",
    "recomputed_anchor",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "reinforce_pp_moments",
    "reward_to_go",
    "rloo_advantages",
    "sequence_mean",
    "token_entropy",
    "token_logprobs",
    "token_mean",
    "weight_sums",
]
