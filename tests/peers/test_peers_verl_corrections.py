"""Weights, filters and off-policy metrics of verl's rollout correction.

verl's threshold "low_high" bounds w for weights, but 1 / w for rejection (`*_k1`).
"""

from dataclasses import replace

import pytest
import torch
from peers_support import (
    AGGREGATIONS,
    assert_acts,
    corrected,
    make_batch,
    ours,
    over_seeds_and_dtypes,
    peer_module,
    policy_inputs,
)

from sidestep.losses import (
    effective_sample_size_fraction,
    normalise_weights,
    off_policy_sums,
    weight_sums,
)

PEER = "verl"
verl = peer_module(PEER, "verl_calls")

# Ours and its settings; level and threshold of verl's weights.
WEIGHTS = {
    "tis": ({"cap": 1.25}, "token", 1.25),
    "icepop": ({"low": 0.8, "high": 1.25}, "token", "0.8_1.25"),
    # verl has no cap alone that drops: its lower bound must be above 0.
    "importance": ({"cap": 1.25}, "token", "1e-12_1.25"),
    "sequence_mis": ({"low": 0.5, "high": 1.5}, "sequence", "0.5_1.5"),
}


@over_seeds_and_dtypes
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_same_weights(agree, name, seed, dtype):
    settings, level, threshold = WEIGHTS[name]
    batch = make_batch(seed, dtype)
    mine = corrected(policy_inputs(batch), {name: settings})
    if name != "tis":
        assert_acts(mine.dropped_BT, batch)
    agree(f"correction `{name}`: weight", mine.weight_BT, verl.weights_of(batch, level, threshold))


@over_seeds_and_dtypes
@pytest.mark.parametrize(
    ("preset", "names", "width"),
    [
        ("decoupled_token_is", ["tis"], 2.0),
        ("decoupled_token_icepop", ["icepop"], 2.0),
        ("decoupled_seq_is_rs", ["sequence_mis"], 1.0),
        ("decoupled_geo_rs", ["geometric"], 0.01),
        ("decoupled_geo_rs_token_tis", ["geometric", "tis"], 0.01),
    ],
)
def test_our_defaults_are_verls_presets(agree, preset, names, width, seed, dtype):
    """width: of the mismatch, times that of the batch, where the preset acts on some tokens."""
    batch = make_batch(seed, dtype)
    near = batch.proximal - width * (batch.proximal - batch.behaviour)
    batch = replace(batch, behaviour=near)
    mine = corrected(policy_inputs(batch), {name: {} for name in names})
    theirs = verl.weights_of_preset(preset, batch)
    agree(f"defaults of `{'` and `'.join(names)}`, verl's `{preset}`", mine.weight_BT, theirs)


@over_seeds_and_dtypes
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_same_loss_of_a_corrected_policy(agree, name, aggregation, seed, dtype):
    """`ppo` + `proximal` + `importance` is decoupled PPO. GSPO with a weight per token: see
    test_peers_verl_departures.
    """
    settings, level, threshold = WEIGHTS[name]
    batch = make_batch(seed, dtype)
    weights = verl.weights_of(batch, level, threshold)
    for policy, policy_settings, their_policy, their_settings in (
        ("dual_clip", {}, "vanilla", {}),
        ("cispo", {"cap": 1.2}, "cispo", {"clip_ratio_low": 1.0}),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, "gspo", {}),
    ):
        parts = {"corrections": {name: settings}, "aggregation": aggregation}
        mine = ours(batch, policy, policy_settings, **parts)
        theirs, _ = verl.loss_of(
            their_policy, batch, their_settings, weights=weights, aggregation=aggregation
        )
        what = f"policies `dual_clip`, `cispo`, `gspo` with `{name}`"
        if policy == "gspo" and level == "token":
            agree(what, mine.loss, theirs.loss)
        else:
            agree.in_loss_and_gradient(what, mine, theirs)


@over_seeds_and_dtypes
def test_the_geometric_filter_keeps_what_verls_mean_of_k1_keeps(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = corrected(policy_inputs(batch), {"geometric": {"low": 0.9, "high": 1.25}})
    assert_acts(mine.dropped_BT, batch)
    # The bounds of 1 / w.
    kept = verl.kept_by(batch, "seq_mean_k1", f"{1 / 1.25}_{1 / 0.9}")
    agree("correction `geometric`: weight", mine.weight_BT, kept)


@over_seeds_and_dtypes
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_filter_and_a_weight_together(agree, aggregation, seed, dtype):
    """verl is told the counts before rejection: see test_peers_verl_departures."""
    batch = make_batch(seed, dtype)
    corrections = {"geometric": {"low": 0.9, "high": 1.25}, "tis": {"cap": 1.25}}
    mine = ours(batch, "dual_clip", corrections=corrections, aggregation=aggregation)
    assert_acts(mine.correction.dropped_BT, batch)
    kept = verl.kept_by(batch, "seq_mean_k1", f"{1 / 1.25}_{1 / 0.9}")
    theirs, _ = verl.loss_of(
        "vanilla",
        replace(batch, mask=kept),
        weights=verl.weights_of(batch, "token", 1.25),
        aggregation=aggregation,
        batch_num_tokens=int(batch.mask.sum()),
        global_batch_size=len(batch.mask),
    )
    agree.in_loss_and_gradient("policy `dual_clip` with `geometric` and `tis`", mine, theirs)


@over_seeds_and_dtypes
def test_weights_of_mean_1(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    correction = corrected(policy_inputs(batch), {"tis": {"cap": 1.25}})
    sums = weight_sums(correction, batch.mask)
    theirs = verl.weights_of(batch, "token", 1.25, rollout_is_batch_normalize=True)
    agree("`normalise_weights`", normalise_weights(correction, sums).weight_BT, theirs)


@over_seeds_and_dtypes
def test_effective_sample_size(agree, seed, dtype):
    """verl's is that of the weights it applies."""
    batch = make_batch(seed, dtype)
    weights, metrics = verl.rollout_corr_helper.compute_rollout_correction_weights(
        batch.proximal - batch.behaviour, batch.mask, "token", 1.25
    )
    theirs = torch.tensor(metrics["rollout_is_eff_sample_size"], dtype=dtype)
    agree(
        "`effective_sample_size_fraction`",
        effective_sample_size_fraction(weights, batch.mask),
        theirs,
    )


@over_seeds_and_dtypes
def test_off_policy_metrics(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    result = ours(batch, "ppo")
    lag_BT = torch.zeros_like(batch.mask, dtype=torch.long)
    mine = off_policy_sums(policy_inputs(batch), result.term, result.correction, lag_BT).total
    theirs = verl.rollout_corr_helper.compute_offpolicy_metrics(
        batch.logprobs, batch.behaviour, batch.mask
    )
    mean_rho = mine.ratios.sum_rho / mine.ratios.num_tokens
    sequences = mine.sequences
    for what, value, key in (
        ("`ratios.kl_behaviour_k1`", mine.ratios.kl_behaviour_k1, "kl"),
        ("`ratios.kl_behaviour`", mine.ratios.kl_behaviour, "k3_kl"),
        # verl's is the mean of rho^2 - 1: the same only where the mean of rho is 1.
        (
            "`ratios.chi_squared` + 2 (mean of rho - 1)",
            mine.ratios.chi_squared + 2 * (mean_rho - 1),
            "chi2_token",
        ),
        (
            "`sequences.sum_rho_squared / num_sequences - 1`",
            sequences.sum_rho_squared / sequences.num_sequences - 1,
            "chi2_seq",
        ),
    ):
        agree(what, torch.tensor(value, dtype=dtype), torch.tensor(theirs[key], dtype=dtype))
