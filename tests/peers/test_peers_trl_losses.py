"""GRPOTrainer's loss types: loss, gradient and clipped shares are those of Sidestep's."""

import pytest
import torch
from peers_support import (
    Result,
    assert_acts,
    make_batch,
    ours,
    over_seeds_and_dtypes,
    peer_module,
    share,
)

PEER = "trl"
trl = peer_module(PEER, "trl_calls")

PPO = {"epsilon": 0.2, "epsilon_high": 0.28}
GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.08}
# Name of the case: our policy, its settings, our aggregation, TRL's settings.
SAME = {
    "`ppo`, `sequence`": ("ppo", {"clip_high": 0.28}, "sequence", {"loss_type": "grpo", **PPO}),
    "`ppo`, `token` (bnpo)": ("ppo", {"clip_high": 0.28}, "token", {"loss_type": "bnpo", **PPO}),
    "`ppo`, `token` (dapo)": ("ppo", {"clip_high": 0.28}, "token", {"loss_type": "dapo", **PPO}),
    "`ppo`, `constant`": ("ppo", {"clip_high": 0.28}, "constant", {"loss_type": "dr_grpo", **PPO}),
    "`dual_clip`": (
        "dual_clip",
        {"dual_clip": 1.3},
        "sequence",
        {"loss_type": "grpo", "delta": 1.3},
    ),
    "`gspo`, `sequence`": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.08},
        "sequence",
        {"loss_type": "grpo", **GSPO},
    ),
    "`gspo`, `token`": (
        "gspo",
        {"clip_low": 0.05, "clip_high": 0.08},
        "token",
        {"loss_type": "dapo", **GSPO},
    ),
    "`sapo`": (
        "sapo",
        {"tau_negative": 1.3},
        "sequence",
        {"loss_type": "sapo", "sapo_temperature_neg": 1.3},
    ),
    "`cispo`": ("cispo", {"cap": 1.2}, "token", {"loss_type": "cispo", "epsilon_high": 1.2}),
}


@over_seeds_and_dtypes
@pytest.mark.parametrize("case", SAME)
def test_the_same_loss_and_gradient(agree, case, seed, dtype):
    policy, settings, aggregation, their_settings = SAME[case]
    batch = make_batch(seed, dtype)
    mine = ours(batch, policy, settings, aggregation=aggregation)
    theirs, _ = trl.loss_of(batch, their_settings)
    if policy != "sapo":
        assert_acts(mine.term.clipped_BT, batch)
    agree.in_loss_and_gradient(f"policy {case}", mine, theirs)


@over_seeds_and_dtypes
@pytest.mark.parametrize("case", [case for case in SAME if "bnpo" not in case])
def test_micro_batches_add_up_to_the_same(agree, case, seed, dtype):
    """Three parts of four rows. bnpo means a mean per micro-batch: test_peers_trl_departures."""
    policy, settings, aggregation, their_settings = SAME[case]
    batch = make_batch(seed, dtype)
    mine = ours(batch, policy, settings, aggregation=aggregation)
    split = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4, **their_settings}
    parts = [
        trl.loss_of(batch.rows(slice(first, first + 4)), split, num_items=batch.mask.sum())[0]
        for first in (0, 4, 8)
    ]
    added_up = Result(
        sum(part.loss for part in parts), torch.cat([part.gradient for part in parts])
    )
    agree.in_loss_and_gradient("policies in 3 micro-batches", mine, added_up)


@over_seeds_and_dtypes
def test_the_same_shares_are_clipped_on_either_side(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = ours(batch, "ppo", {"clip_high": 0.28}).term
    _, metrics = trl.loss_of(batch, {"loss_type": "dapo", **PPO})
    for side, flags in (("low", mine.clipped_low_BT), ("high", mine.clipped_high_BT)):
        theirs = torch.tensor(metrics[f"clip_ratio/{side}_mean"], dtype=dtype)
        agree(f"clipped share, {side} side", share(flags, batch), theirs)


@over_seeds_and_dtypes
@pytest.mark.parametrize(
    ("name", "settings", "their_settings"),
    [
        ("tis", {"cap": 1.25}, {"mode": "token_truncate", "clip_max": 1.25}),
        ("importance", {"cap": 1.25}, {"mode": "token_mask", "clip_max": 1.25}),
        (
            "icepop",
            {"low": 0.8, "high": 1.25},
            {"mode": "token_mask", "clip_min": 0.8, "clip_max": 1.25},
        ),
        (
            "sequence_mis",
            {"low": 0.5, "high": 1.5},
            {"mode": "sequence_mask", "clip_min": 0.5, "clip_max": 1.5},
        ),
    ],
)
@pytest.mark.parametrize("case", ["`ppo`, `sequence`", "`gspo`, `sequence`", "`sapo`", "`cispo`"])
def test_corrections(agree, case, name, settings, their_settings, seed, dtype):
    """TRL's weights of the proximal policy over vLLM's, and the loss times them."""
    policy, policy_settings, aggregation, trl_settings = SAME[case]
    trl_settings = trl_settings | {
        f"vllm_importance_sampling_{key}": value for key, value in their_settings.items()
    }
    batch = make_batch(seed, dtype)
    mine = ours(
        batch, policy, policy_settings, corrections={name: settings}, aggregation=aggregation
    )
    if name != "tis":
        assert_acts(mine.correction.dropped_BT, batch)
    weights = trl.scored(batch, trl_settings)["importance_sampling_ratio"]
    agree(f"correction `{name}`: weight", mine.correction.weight_BT, weights * batch.mask)
    theirs, _ = trl.loss_of(batch, trl_settings, sampled_by_vllm=True)
    what = f"policies `ppo`, `gspo`, `sapo`, `cispo` with `{name}`"
    agree.in_loss_and_gradient(what, mine, theirs)


@over_seeds_and_dtypes
def test_opsm_masks_the_same_sequences(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    opsm = {"opsm": {"delta": 0.05}}
    mine = ours(batch, "ppo", corrections=opsm, aggregation="sequence")
    assert_acts(mine.correction.dropped_BT, batch)
    theirs, _ = trl.loss_of(batch, {"loss_type": "grpo", "off_policy_mask_threshold": 0.05})
    agree.in_loss_and_gradient("policy `ppo` with `opsm`", mine, theirs)


@over_seeds_and_dtypes
def test_kl_in_the_loss(agree, seed, dtype):
    """Not weighed by the ratio, unlike TRL's default: see test_peers_trl_departures."""
    batch = make_batch(seed, dtype)
    mine = ours(batch, "ppo", aggregation="sequence", kl="k3", kl_coef=0.3)
    settings = {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}
    theirs, _ = trl.loss_of(batch, settings)
    agree.in_loss_and_gradient("KL `k3` in the loss", mine, theirs)
