"""The methods of the literature, as what to write in a recipe. Paper names in, choices out.

A method is a combination of an advantage, a policy loss, an anchor, a correction and an
aggregation; few need more than that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """recipe: TOML lines; what is not there has its default. note: what a recipe does not say."""

    name: str
    source: str
    recipe: tuple[str, ...]
    note: str = ""


METHODS: tuple[Method, ...] = (
    Method(
        "GRPO",
        "arXiv 2402.03300",
        ('loss.advantage = "grpo"', 'loss.policy = "ppo"', 'loss.aggregation = "sequence"'),
    ),
    Method(
        "Dr.GRPO",
        "arXiv 2503.20783",
        ('loss.advantage = "dr_grpo"', 'loss.policy = "ppo"', 'loss.aggregation = "constant"'),
    ),
    Method(
        "DAPO",
        "arXiv 2503.14476",
        (
            'loss.policy = "ppo"',
            "loss.clip_low = 0.2",
            "loss.clip_high = 0.28",
            'loss.aggregation = "token"',
            "rollout.drop_equal_rewards = true",
        ),
        "plus `overlong_penalty` in the reward",
    ),
    Method("RLOO", "arXiv 2402.14740", ('loss.advantage = "rloo"', 'loss.policy = "ppo"')),
    Method(
        "REINFORCE++",
        "arXiv 2501.03262",
        ('loss.advantage = "reinforce_pp"', 'loss.policy = "ppo"'),
        "its KL penalty is part of the reward (`kl_in_reward`, `reward_to_go`)",
    ),
    Method(
        "REINFORCE++ with baseline",
        "arXiv 2501.03262",
        ('loss.advantage = "reinforce_pp_baseline"', 'loss.policy = "ppo"'),
        "its KL penalty is k2 in the loss (`kl_penalty`)",
    ),
    Method("PPO", "arXiv 1707.06347", ('loss.policy = "ppo"', 'loss.anchor = "behaviour"')),
    Method(
        "dual-clip PPO",
        "arXiv 1912.09729",
        ('loss.policy = "dual_clip"', 'loss.anchor = "behaviour"'),
    ),
    Method(
        "decoupled PPO",
        "arXiv 2505.24298",
        ('loss.policy = "ppo"', 'loss.anchor = "proximal"', 'loss.correction = "importance"'),
        "several optimizer steps per batch, or its clip is dead",
    ),
    Method(
        "A-3PO",
        "arXiv 2512.06547",
        ('loss.policy = "ppo"', 'loss.anchor = "loglinear"', 'loss.correction = "importance"'),
    ),
    Method(
        "TIS",
        "Yao et al. 2025",
        ('loss.policy = "ppo"', 'loss.anchor = "proximal"', 'loss.correction = "tis"'),
    ),
    Method(
        "IcePop, token MIS",
        "arXiv 2510.18855",
        ('loss.policy = "ppo"', 'loss.anchor = "proximal"', 'loss.correction = "icepop"'),
    ),
    Method(
        "sequence MIS",
        "verl",
        ('loss.policy = "ppo"', 'loss.anchor = "proximal"', 'loss.correction = "sequence_mis"'),
        "the product shrinks with the length: short completions only",
    ),
    Method(
        "geometric filter",
        "verl",
        (
            'loss.policy = "ppo"',
            'loss.anchor = "proximal"',
            'loss.correction = ["tis", "geometric"]',
        ),
        "filter on rows, weight per token",
    ),
    Method(
        "OPSM",
        "DeepSeek-V3.2, arXiv 2512.02556",
        ('loss.policy = "ppo"', 'loss.anchor = "behaviour"', 'loss.correction = "opsm"'),
    ),
    Method("DIS", "arXiv 2607.07508", ('loss.policy = "dis"',)),
    Method("DPPO-TV", "arXiv 2602.04879", ('loss.policy = "dppo_tv"',)),
    Method("GSPO", "arXiv 2507.18071", ('loss.policy = "gspo"', 'loss.aggregation = "sequence"')),
    Method("SAPO", "arXiv 2511.20347", ('loss.policy = "sapo"', 'loss.aggregation = "sequence"')),
    Method("CISPO", "arXiv 2506.13585", ('loss.policy = "cispo"', 'loss.aggregation = "token"')),
    Method("M2PO", "arXiv 2510.01161", ('loss.policy = "m2po"', 'loss.aggregation = "token"')),
    Method("BAPO", "arXiv 2510.18927", ('loss.policy = "bapo"',)),
    Method(
        "TOPR",
        "arXiv 2503.14286",
        ('loss.policy = "topr"', 'loss.aggregation = "constant"'),
        "a sum over the trajectory; its weight is a product",
    ),
    Method(
        "VCPO",
        "arXiv 2602.17616",
        ("train.ess_learning_rate = true",),
        "only the learning rate (`ess_learning_rate_factor`): its baseline needs a gradient per "
        "sample",
    ),
)
