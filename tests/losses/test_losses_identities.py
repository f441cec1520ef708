"""Losses that must be equal where theory says so."""

import math

import pytest
import torch
from losses_support import loss_and_gradient, policy_options, random_batch

from sidestep.losses import (
    CORRECTIONS,
    POLICIES,
    PolicyInputs,
    anchor_logprobs,
    bounded_log_ratio,
    importance_ratio,
    make_options,
)


def options(name, **values):
    return make_options(POLICIES[name].options, **values)


def correction(name, **values):
    return make_options(CORRECTIONS[name].options, **values)


def assert_same(first, second, tolerance=1e-13):
    assert first[0] == pytest.approx(second[0], abs=tolerance)
    assert (first[1] - second[1]).abs().max() <= tolerance


def test_gspo_is_ppo_for_rows_of_length_one():
    batch = [tensor.clone() for tensor in random_batch()]
    batch[-1].zero_()
    batch[-1][:, 2] = 1.0
    clip = {"clip_low": 0.05, "clip_high": 0.1}
    assert_same(
        loss_and_gradient("gspo", batch, options=options("gspo", **clip)),
        loss_and_gradient("ppo", batch, options=options("ppo", **clip)),
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_dual_clip_is_ppo_for_positive_advantages_and_less_steep_for_negative_ones(sign):
    logprobs, anchor, behaviour, advantages, mask = random_batch()
    batch = (logprobs, anchor, behaviour, sign * advantages.abs(), mask)
    dual = loss_and_gradient("dual_clip", batch, options=options("dual_clip", dual_clip=1.1))
    ppo = loss_and_gradient("ppo", batch, options=options("ppo"))
    if sign > 0:
        assert_same(dual, ppo, tolerance=0.0)
    else:
        assert dual[0] < ppo[0]
        assert (dual[1].abs() <= ppo[1].abs()).all()
        assert (dual[1].abs() < ppo[1].abs()).any()


@pytest.mark.parametrize("name", ["importance", "tis", "icepop"])
def test_decoupled_ppo_with_the_behaviour_policy_as_proximal_policy_is_ppo(name):
    logprobs, _, behaviour, advantages, mask = random_batch()
    batch = (logprobs, behaviour, behaviour, advantages, mask)
    assert_same(
        loss_and_gradient("ppo", batch, correction=name),
        loss_and_gradient("ppo", batch),
        tolerance=0.0,
    )


@pytest.mark.parametrize("cap", [None, math.inf, 1e9])
def test_decoupled_ppo_without_rejection_still_weighs_by_w(cap):
    batch = random_batch()
    inputs = PolicyInputs(*batch)
    found = CORRECTIONS["importance"].apply(inputs, correction("importance"))
    free = CORRECTIONS["importance"].function(inputs, type(correction("importance"))(cap=cap))
    w = (batch[1] - batch[2]).exp()
    assert torch.allclose(free.weight_BT, w * batch[-1], atol=1e-14)
    assert not free.dropped_BT.any()
    assert (free.weight_BT - batch[-1]).abs().max() > 0.1
    assert torch.allclose(found.weight_BT, free.weight_BT, atol=1e-14)  # nothing above 5 here


def test_tis_with_an_infinite_cap_is_importance_sampling():
    batch = random_batch()
    free = correction("tis", cap=math.inf)
    weight = CORRECTIONS["tis"].apply(PolicyInputs(*batch), free).weight_BT
    assert torch.allclose(weight, (batch[1] - batch[2]).exp() * batch[-1], atol=1e-14)


def test_unclipped_ratio_times_w_is_rho_whatever_the_anchor():
    wide = options("ppo", clip_low=0.999999, clip_high=1e9)
    expected = loss_and_gradient("m2po", random_batch(), options=options("m2po", tau=math.inf))
    for seed in (0, 1):
        logprobs, anchor, behaviour, advantages, mask = random_batch()
        anchor = anchor + 0.1 * seed
        found = loss_and_gradient(
            "ppo",
            (logprobs, anchor, behaviour, advantages, mask),
            options=wide,
            correction="tis",
            corrected_by=correction("tis", cap=math.inf),
        )
        assert_same(found, expected)


def test_m2po_with_infinite_tau_is_unclipped_rho_a():
    batch = random_batch()
    inputs = PolicyInputs(*batch)
    free = options("m2po", tau=math.inf)
    cut = POLICIES["m2po"].statistics([inputs], free)
    term = POLICIES["m2po"].term(inputs, free, cut)
    rho = (batch[0] - batch[2]).exp()
    assert torch.allclose(term.loss_BT, -rho * batch[3] * batch[-1], atol=1e-14)
    assert (cut.cut, cut.num_masked) == (math.inf, 0)
    assert not term.clipped_BT.any()


def test_m2po_leaves_a_mean_of_at_most_tau_and_masks_no_more_than_it_must():
    batch = random_batch()
    inputs = PolicyInputs(*batch)
    cut = POLICIES["m2po"].statistics([inputs], policy_options("m2po"))
    term = POLICIES["m2po"].term(inputs, policy_options("m2po"), cut)
    log_rho = (batch[0] - batch[2]) * batch[-1]
    candidate = batch[3] * log_rho > 0
    kept = log_rho[candidate & ~term.clipped_BT].square()
    masked = log_rho[term.clipped_BT].square()
    assert 0 < len(masked) == cut.num_masked < cut.num_candidates == int(candidate.sum())
    assert kept.mean() <= 0.04 < torch.cat([kept, masked.min()[None]]).mean()
    assert kept.max() < masked.min()


def test_m2po_masks_equal_values_together_whatever_their_order():
    def cut_of(log_rho):
        rho = torch.tensor([log_rho], dtype=torch.float64)
        inputs = PolicyInputs(rho - 1, rho * 0 - 1, rho * 0 - 1, torch.ones_like(rho), rho * 0 + 1)
        return POLICIES["m2po"].statistics([inputs], policy_options("m2po"))

    # Exactly equal in float64. Two of the three would pass the mean, and it takes all or none.
    value = 0.5
    first = cut_of([value, 0.0625, value, value, 0.0625, 0.0625, 0.0625])
    assert cut_of([0.0625, value, 0.0625, value, 0.0625, value, 0.0625]) == first
    assert (first.num_masked, first.num_candidates) == (3, 7)


def test_bapo_either_bound_can_only_raise_the_share_and_stops_as_soon_as_it_is_reached():
    batch = random_batch()
    inputs = PolicyInputs(*batch)
    found = [
        POLICIES["bapo"].statistics([inputs], options("bapo", positive_share=share))
        for share in (0.05, 0.3, 0.5, 0.7, 0.95)
    ]
    assert [clip.low for clip in found] == sorted(clip.low for clip in found)
    assert [clip.high for clip in found] == sorted(clip.high for clip in found)
    shares = [clip.positive_share for clip in found]
    assert shares == sorted(shares)
    assert (found[0].low, found[0].high) == (0.6, 1.2)
    assert (found[-1].low, found[-1].high) == (0.9, 3.0)
    for clip in found:
        if clip.high > 1.2:
            assert clip.low == 0.9  # the lower bound moves first
    fixed = options("ppo", clip_low=1 - found[1].low, clip_high=found[1].high - 1)
    assert_same(
        loss_and_gradient("bapo", batch, options=options("bapo", positive_share=0.3)),
        loss_and_gradient("ppo", batch, options=fixed),
    )


def test_cispo_and_dis_have_the_gradient_of_the_ratio_where_they_do_not_act():
    batch = random_batch()
    expected = loss_and_gradient("m2po", batch, options=options("m2po", tau=math.inf))[1]
    wide = options("dis", clip_low=0.999999, clip_high=1e9)
    assert (loss_and_gradient("dis", batch, options=wide)[1] - expected).abs().max() < 1e-14
    behaviour = (batch[0], batch[2], *batch[2:])
    free = options("cispo", cap=1e9)
    assert (loss_and_gradient("cispo", behaviour, options=free)[1] - expected).abs().max() < 1e-14


def test_sapo_has_the_gradient_of_ppo_at_ratio_one_and_less_on_either_side():
    def slope(log_ratio, advantage):
        inputs = [torch.full((1, 1), value) for value in (log_ratio - 1, -1.0, -1.0, advantage, 1)]
        return float(loss_and_gradient("sapo", inputs)[1])

    for advantage in (1.0, -1.0):
        assert slope(0.0, advantage) == pytest.approx(-advantage)
        for log_ratio in (-0.5, 0.5, 1.0):
            assert abs(slope(log_ratio, advantage)) < math.exp(log_ratio)
    assert abs(slope(1.0, -1.0)) < slope(1.0, 1.0) * -1.0


def test_topr_follows_positive_rows_fully_and_forgets_negative_ones_that_became_unlikely():
    logprobs = torch.full((2, 3), -5.0)
    behaviour = torch.full((2, 3), -1.0)
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3])
    batch = (logprobs, behaviour, behaviour, advantages, torch.ones(2, 3))
    _, gradient = loss_and_gradient("topr", batch)
    assert gradient[0].tolist() == pytest.approx([-1 / 6] * 3)
    assert gradient[1].tolist() == pytest.approx([math.exp(-12.0) / 6] * 3)


def test_loglinear_ratio_is_rho_to_the_alpha_and_its_weight_is_the_rest():
    logprobs, _, behaviour, _, mask = random_batch()
    lag = torch.arange(40).view(8, 5) % 6
    anchor = anchor_logprobs("loglinear", logprobs, behaviour, lag_BT=lag)
    log_rho = bounded_log_ratio(logprobs, behaviour, mask)
    alpha = 1.0 / lag.clamp(min=1)
    ratio = importance_ratio(bounded_log_ratio(logprobs, anchor, mask))
    weight = importance_ratio(bounded_log_ratio(anchor, behaviour, mask))
    assert torch.allclose(ratio, (alpha * log_rho).exp(), atol=1e-6)
    assert torch.allclose(weight, ((1 - alpha) * log_rho).exp(), atol=1e-6)
    assert torch.equal(ratio[(lag <= 1) & (mask != 0)], log_rho.exp()[(lag <= 1) & (mask != 0)])


def test_loglinear_has_ratio_exactly_one_before_any_update_at_every_lag():
    logprobs = random_batch(dtype=torch.float32)[0]
    lag = torch.arange(40).view(8, 5)
    assert torch.equal(anchor_logprobs("loglinear", logprobs, logprobs, lag_BT=lag), logprobs)


def test_every_clip_is_dead_where_the_anchor_is_the_current_policy():
    logprobs, _, behaviour, advantages, mask = random_batch()
    anchor = anchor_logprobs("recomputed", logprobs, behaviour)
    for name, entry in POLICIES.items():
        if entry.ratio == "anchor":
            inputs = PolicyInputs(logprobs, anchor, behaviour, advantages, mask)
            statistics = (
                entry.statistics([inputs], policy_options(name)) if entry.statistics else None
            )
            assert not entry.term(inputs, policy_options(name), statistics).clipped_BT.any()


def test_recomputed_anchor_with_tis_is_truncated_importance_sampled_reinforce():
    logprobs, _, behaviour, advantages, mask = random_batch()
    batch = (logprobs, logprobs, behaviour, advantages, mask)
    _, gradient = loss_and_gradient("ppo", batch, correction="tis")
    weight = (logprobs - behaviour).exp().clamp(max=1.2)
    assert (gradient + weight * advantages * mask / mask.sum()).abs().max() < 1e-14
