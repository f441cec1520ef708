"""Policy losses of verl's registry: loss, gradient and clipped share are those of Sidestep's."""

import pytest
import torch
from peers_support import (
    AGGREGATIONS,
    Result,
    assert_acts,
    make_batch,
    ours,
    over_seeds_and_dtypes,
    peer_module,
    share,
)

PEER = "verl"
verl = peer_module(PEER, "verl_calls")

PPO = {"clip_ratio_high": 0.28, "clip_ratio_c": verl.NO_DUAL_CLIP}
GSPO = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}
# A lower bound of 0 is none.
CISPO = {"clip_ratio_low": 1.0, "clip_ratio_high": 0.2}
# Ours, its settings, verl's, its settings, aggregations. verl's sapo aggregates by sequence,
# whatever it is told.
SAME = {
    "ppo": ({"clip_high": 0.28}, "vanilla", PPO, AGGREGATIONS),
    "dual_clip": ({"dual_clip": 1.3}, "vanilla", {"clip_ratio_c": 1.3}, AGGREGATIONS),
    "gspo": ({"clip_low": 0.05, "clip_high": 0.08}, "gspo", GSPO, AGGREGATIONS),
    "sapo": ({"tau_negative": 1.3}, "sapo", {"tau_neg": 1.3}, ("sequence",)),
    "cispo": ({"cap": 1.2}, "cispo", CISPO, AGGREGATIONS),
}


@over_seeds_and_dtypes
@pytest.mark.parametrize(
    ("policy", "aggregation"), [(name, mode) for name, case in SAME.items() for mode in case[-1]]
)
def test_the_same_loss_and_gradient(agree, policy, aggregation, seed, dtype):
    settings, name, their_settings, _ = SAME[policy]
    batch = make_batch(seed, dtype)
    mine = ours(batch, policy, settings, aggregation=aggregation)
    theirs, _ = verl.loss_of(name, batch, their_settings, aggregation=aggregation)
    if policy != "sapo":
        assert_acts(mine.term.clipped_BT, batch)
    agree.in_loss_and_gradient(f"policy `{policy}`", mine, theirs)


@over_seeds_and_dtypes
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up_to_the_same(agree, aggregation, seed, dtype):
    """verl is told the counts of the whole batch, as its engine does; ours counts them."""
    batch = make_batch(seed, dtype)
    whole = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": len(batch.mask)}
    mine = ours(batch, "dual_clip", aggregation=aggregation)
    theirs = [
        verl.loss_of("vanilla", batch.rows(rows), aggregation=aggregation, **whole)[0]
        for rows in (slice(0, 5), slice(5, 6), slice(6, None))
    ]
    added_up = Result(
        sum(part.loss for part in theirs), torch.cat([part.gradient for part in theirs])
    )
    agree.in_loss_and_gradient("policies in 3 micro-batches", mine, added_up)


@over_seeds_and_dtypes
def test_the_same_share_of_tokens_is_clipped(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    for policy in ("ppo", "dual_clip", "gspo"):
        settings, name, their_settings, _ = SAME[policy]
        _, metrics = verl.loss_of(name, batch, their_settings)
        clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
        mine = share(ours(batch, policy, settings).term.clipped_BT, batch)
        agree(f"clipped share of `{policy}`", mine, torch.tensor(clipped, dtype=dtype))


@over_seeds_and_dtypes
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dis_is_verls_reinforce_with_icepop_weights(agree, aggregation, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = ours(batch, "dis", {"clip_low": 0.2, "clip_high": 0.4}, aggregation=aggregation)
    band = verl.bypass(loss_type="reinforce", rollout_is="token", rollout_is_threshold="0.8_1.4")
    theirs, _ = verl.loss_of("bypass_mode", batch, band, old="behaviour", aggregation=aggregation)
    assert_acts(mine.term.clipped_low_BT, batch)
    assert_acts(mine.term.clipped_high_BT, batch)
    agree.in_loss_and_gradient("policy `dis`", mine, theirs)


@over_seeds_and_dtypes
def test_topr_is_verls_gpg_on_good_rows_and_its_sequence_weight_up_to_1_on_bad(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = ours(batch, "topr", aggregation="constant")
    taper = verl.bypass(loss_type="reinforce", rollout_is="sequence", rollout_is_threshold=1.0)
    whole = {"aggregation": "constant", "global_batch_size": len(batch.mask)}
    good = batch.advantages > 0
    pushed, _ = verl.loss_of("gpg", batch.rows(good), **whole)
    held, _ = verl.loss_of("bypass_mode", batch.rows(~good), taper, old="behaviour", **whole)
    assert_acts(mine.term.clipped_BT, batch)
    gradient = torch.empty_like(mine.gradient)
    gradient[good], gradient[~good] = pushed.gradient, held.gradient
    agree.in_loss_and_gradient("policy `topr`", mine, Result(pushed.loss + held.loss, gradient))


@over_seeds_and_dtypes
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dppo_has_verls_gradient(agree, aggregation, seed, dtype):
    """Its loss is rho A, verl's sg(rho) A log pi: one gradient, two values."""
    batch = make_batch(seed, dtype)
    mine = ours(batch, "dppo_tv", {"delta": 0.05}, aggregation=aggregation)
    settings = {
        "clip_ratio_low": 0.05,
        "clip_ratio_high": 0.05,
        "clip_ratio_c": verl.NO_DUAL_CLIP,
    }
    theirs, metrics = verl.loss_of(
        "dppo_tv", batch, settings, old="behaviour", aggregation=aggregation
    )
    assert_acts(mine.term.clipped_BT, batch)
    agree.in_gradient("policy `dppo_tv`", mine, theirs)
    clipped = torch.tensor(metrics["actor/pg_clipfrac"], dtype=dtype)
    agree("clipped share of `dppo_tv`", share(mine.term.clipped_BT, batch), clipped)


@over_seeds_and_dtypes
def test_with_the_recomputed_anchor_the_gradient_is_verls_policy_gradient(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    theirs, _ = verl.loss_of("gpg", batch)
    mine = ours(batch, "ppo", anchor="recomputed")
    agree.in_gradient("anchor `recomputed`", mine, theirs)
    # With a weight, too: verl's bypass mode weighs by pi_theta / pi_mu, capped.
    weighed = verl.bypass(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.2)
    theirs, _ = verl.loss_of("bypass_mode", batch, weighed, old="behaviour")
    mine = ours(batch, "ppo", anchor="recomputed", corrections={"tis": {"cap": 1.2}})
    agree.in_gradient("anchor `recomputed` with `tis`", mine, theirs)


@over_seeds_and_dtypes
def test_with_the_behaviour_anchor_ppo_is_verls_bypass_mode(agree, seed, dtype):
    batch = make_batch(seed, dtype)
    mine = ours(batch, "dual_clip", anchor="behaviour")
    theirs, _ = verl.loss_of(
        "bypass_mode", batch, verl.bypass(loss_type="ppo_clip"), old="behaviour"
    )
    agree.in_loss_and_gradient("anchor `behaviour`", mine, theirs)
