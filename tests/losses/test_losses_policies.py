"""What holds for every policy loss, alone and with every correction."""

import math

import losses_reference as reference
import losses_reference_policies as plain
import pytest
import torch
from losses_support import (
    CONSTANT,
    CORRECTION_OPTIONS,
    FIELDS,
    POLICY_OPTIONS,
    correction_options,
    loss_and_gradient,
    policy_options,
    random_batch,
)

from sidestep.losses import CORRECTIONS, POLICIES, PolicyInputs, make_options

AGGREGATIONS = ("token", "sequence", "constant")
# What is not differentiated through stays where it is in the reference: see Token.fixed.
PAIRS = [(policy, "none") for policy in POLICIES] + [("ppo", name) for name in CORRECTIONS]


def test_settings_of_these_tests_exist_for_every_name():
    assert set(POLICY_OPTIONS) == set(POLICIES) == set(plain.POLICIES)
    assert set(CORRECTION_OPTIONS) == set(CORRECTIONS)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"sapo"}))
def test_the_random_batch_has_tokens_on_which_the_rule_acts_and_others(name):
    inputs = PolicyInputs(*random_batch())
    entry, options = POLICIES[name], policy_options(name)
    statistics = entry.statistics([inputs], options) if entry.statistics else None
    clipped = entry.term(inputs, options, statistics).clipped_BT[inputs.mask_BT != 0]
    assert 0 < int(clipped.sum()) < clipped.numel()


@pytest.mark.parametrize("name", sorted(set(CORRECTIONS) - {"none", "tis"}))
def test_the_random_batch_has_tokens_that_are_dropped_and_others(name):
    inputs = PolicyInputs(*random_batch())
    dropped = CORRECTIONS[name].apply(inputs, correction_options(name)).dropped_BT
    assert 0 < int(dropped.sum()) < int(inputs.mask_BT.sum())


def exact_loss(policy, correction, aggregation, batch, theta):
    """The whole loss in plain Python at log-probabilities `theta`, nothing fixed moved."""
    fixed, anchor, behaviour, advantages, mask = (tensor.tolist() for tensor in batch)
    rows = [
        [
            plain.Token(theta[b][t], anchor[b][t], behaviour[b][t], advantages[b][t], fixed[b][t])
            for t in range(len(mask[b]))
            if mask[b][t]
        ]
        for b in range(len(mask))
    ]
    losses = plain.POLICIES[policy](rows, policy_options(policy))
    weights = plain.weights(correction, rows, correction_options(correction))
    terms = [
        [w * loss for w, loss in zip(*pair, strict=True)]
        for pair in zip(weights, losses, strict=True)
    ]
    return reference.aggregate(aggregation, terms, [[1] * len(row) for row in terms], CONSTANT)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("policy", "correction"), PAIRS)
def test_loss_and_gradient_equal_plain_loops_and_their_finite_differences(
    policy, correction, aggregation
):
    batch = random_batch(seed=3, num_sequences=6)
    value, gradient = loss_and_gradient(
        policy, batch, correction=correction, aggregation=aggregation
    )
    theta = batch[0].tolist()
    assert value == pytest.approx(
        exact_loss(policy, correction, aggregation, batch, theta), rel=1e-9, abs=1e-12
    )
    step = 1e-6
    for b, t in (batch[-1] != 0).nonzero().tolist():
        kept = theta[b][t]
        theta[b][t] = kept + step
        up = exact_loss(policy, correction, aggregation, batch, theta)
        theta[b][t] = kept - step
        down = exact_loss(policy, correction, aggregation, batch, theta)
        theta[b][t] = kept
        assert float(gradient[b, t]) == pytest.approx((up - down) / (2 * step), abs=1e-7)
    assert (gradient[batch[-1] == 0] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_plain_loops_agree_on_many_batches_at_the_default_settings(policy):
    options = make_options(POLICIES[policy].options)
    for seed in range(20):
        batch = random_batch(seed=100 + seed)
        value, _ = loss_and_gradient(policy, batch, options=options)
        fixed, anchor, behaviour, advantages, mask = (tensor.tolist() for tensor in batch)
        rows = [
            [
                plain.Token(fixed[b][t], anchor[b][t], behaviour[b][t], advantages[b][t], f)
                for t, f in enumerate(fixed[b])
                if mask[b][t]
            ]
            for b in range(8)
        ]
        terms = plain.POLICIES[policy](rows, options)
        expected = reference.aggregate("token", terms, [[1] * len(r) for r in terms], None)
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("policy", "correction"), PAIRS)
def test_one_two_and_four_micro_batches_give_one_gradient(policy, correction, aggregation):
    batch = random_batch(num_sequences=8)
    settings = {"correction": correction, "aggregation": aggregation}
    value, gradient = loss_and_gradient(policy, batch, [8], **settings)
    for sizes in ([4, 4], [2, 2, 2, 2], [5, 3], [1] * 8):
        split_value, split_gradient = loss_and_gradient(policy, batch, sizes, **settings)
        assert split_value == pytest.approx(value, abs=1e-13)
        assert (split_gradient - gradient).abs().max() < 1e-14


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if entry.statistics])
def test_statistics_of_one_micro_batch_alone_would_give_another_gradient(policy):
    # Why the first pass over the whole batch is needed at all.
    difference = 0.0
    for seed in range(8):
        batch = random_batch(seed)
        _, whole = loss_and_gradient(policy, batch)
        for rows in (slice(0, 4), slice(4, 8)):
            part = tuple(tensor[rows] for tensor in batch)
            share = float(part[-1].sum() / batch[-1].sum())
            alone = loss_and_gradient(policy, part)[1] * share
            difference = max(difference, float((alone - whole[rows]).abs().max()))
    assert difference > 1e-3


@pytest.mark.parametrize(("policy", "correction"), PAIRS)
def test_b61_padding_on_either_side_changes_neither_loss_nor_gradient(policy, correction):
    batch = random_batch()
    value, gradient = loss_and_gradient(policy, batch, correction=correction)
    for left, right in ((5, 0), (0, 5), (2, 3)):
        padded = []
        for tensor in batch:
            junk = [tensor.new_full((8, width), 50.0) for width in (left, right)]
            padded.append(torch.cat([junk[0], tensor, junk[1]], dim=1))
        padded[-1][:, :left] = 0.0
        padded[-1][:, left + 5 :] = 0.0
        padded_value, padded_gradient = loss_and_gradient(policy, padded, correction=correction)
        assert padded_value == pytest.approx(value, abs=1e-13)
        assert (padded_gradient[:, left : left + 5] - gradient).abs().max() < 1e-14
        outside = torch.cat([padded_gradient[:, :left], padded_gradient[:, left + 5 :]], dim=1)
        assert (outside == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("policy", "correction"), PAIRS)
def test_garbage_under_the_mask_changes_nothing(policy, correction, garbage):
    batch = random_batch()
    value, gradient = loss_and_gradient(policy, batch, correction=correction)
    dirty = [tensor.clone() for tensor in batch]
    for tensor in dirty[:-1]:
        tensor[batch[-1] == 0] = garbage
    dirty_value, dirty_gradient = loss_and_gradient(policy, dirty, correction=correction)
    assert dirty_value == value
    assert torch.equal(dirty_gradient, gradient)
    inputs, entry, options = PolicyInputs(*dirty), POLICIES[policy], policy_options(policy)
    statistics = entry.statistics([inputs], options) if entry.statistics else None
    term = entry.term(inputs, options, statistics)
    masked = batch[-1] == 0
    assert (term.loss_BT[masked] == 0).all() and not term.clipped_BT[masked].any()


@pytest.mark.parametrize("field", FIELDS[:3])
@pytest.mark.parametrize(("policy", "correction"), PAIRS)
def test_b60_nan_at_a_trained_token_makes_the_loss_nan_and_is_never_dropped(
    policy, correction, field
):
    batch = [tensor.clone() for tensor in random_batch()]
    entry, corrected = POLICIES[policy], CORRECTIONS[correction]
    read = {
        "logprobs": True,
        "anchor": entry.ratio == "anchor",
        "behaviour": entry.ratio == "behaviour" or corrected.reads in ("w", "rho"),
    }
    batch[FIELDS.index(field)][5, 1] = math.nan
    value, _ = loss_and_gradient(policy, batch, correction=correction)
    assert math.isnan(value) == read[field]


@pytest.mark.parametrize("policy", POLICIES)
def test_b57_ratio_one_everywhere_gives_the_policy_gradient(policy):
    logprobs, _, _, advantages, mask = random_batch()
    batch = (logprobs, logprobs, logprobs, advantages, mask)
    _, gradient = loss_and_gradient(policy, batch, aggregation="token")
    expected = -advantages * mask / mask.sum()
    if policy == "gspo":  # each token of a row carries the whole row: a mean over the row instead
        assert (gradient.sum(1) - expected.sum(1)).abs().max() < 1e-14
        _, gradient = loss_and_gradient(policy, batch, aggregation="sequence")
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        expected = -advantages * mask / lengths / (mask.sum(1) > 0).sum()
    assert (gradient - expected).abs().max() < 1e-14


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_w_one_everywhere_leaves_every_loss_as_it_is(correction):
    logprobs, anchor, _, advantages, mask = random_batch()
    batch = (logprobs, anchor, anchor, advantages.abs(), mask)
    plain_value, plain_gradient = loss_and_gradient("ppo", batch)
    value, gradient = loss_and_gradient("ppo", batch, correction=correction)
    assert value == plain_value
    assert torch.equal(gradient, plain_gradient)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_b69_zero_advantages_or_no_trained_token_give_exactly_zero(policy, correction):
    logprobs, anchor, behaviour, advantages, mask = random_batch()
    for changed in ((advantages * 0, mask), (advantages, mask * 0)):
        batch = (logprobs, anchor, behaviour, *changed)
        value, gradient = loss_and_gradient(policy, batch, [4, 4], correction=correction)
        assert value == 0.0
        assert (gradient == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_b69_an_empty_micro_batch_adds_exactly_zero(policy):
    batch = [tensor.clone() for tensor in random_batch()]
    batch[-1][4:] = 0.0
    value, gradient = loss_and_gradient(policy, batch, [4, 4])
    alone, alone_gradient = loss_and_gradient(policy, [tensor[:4] for tensor in batch])
    assert value == alone
    assert torch.equal(gradient[:4], alone_gradient)
    assert (gradient[4:] == 0).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_b71_rows_of_unlike_length_are_all_used_in_parts_that_do_not_divide_the_batch(policy):
    batch = [tensor.clone() for tensor in random_batch()]
    batch[-1].zero_()
    batch[-1][:, :2] = 1.0
    batch[-1][0, 2] = 1.0  # one row of three tokens, seven of two
    value, gradient = loss_and_gradient(policy, batch, [8], aggregation="constant")
    for sizes in ([3, 3, 2], [5, 3], [7, 1]):
        split_value, split = loss_and_gradient(policy, batch, sizes, aggregation="constant")
        assert split_value == pytest.approx(value, abs=1e-13)
        assert (split - gradient).abs().max() < 1e-14


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_no_rows_no_tokens_and_a_single_token_are_finite(policy, correction, shape):
    batch = [torch.full(shape, value) for value in (-1.0, -1.1, -0.7, 0.5, 1.0)]
    value, gradient = loss_and_gradient(policy, batch, correction=correction)
    assert math.isfinite(value)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_loss_is_at_least_float32_and_close_to_float64(policy, dtype):
    # Half precision is widened before it is subtracted, so all three see the same numbers.
    batch = [tensor.to(dtype) for tensor in random_batch(seed=1)]
    inputs = PolicyInputs(*batch)
    exact = PolicyInputs(*(tensor.double() for tensor in batch))
    entry, options = POLICIES[policy], policy_options(policy)
    terms = [
        entry.term(part, options, entry.statistics([part], options) if entry.statistics else None)
        for part in (inputs, exact)
    ]
    assert terms[0].loss_BT.dtype == torch.float32
    assert (terms[0].loss_BT - terms[1].loss_BT).abs().max() < 1e-5


def test_wrong_arguments_are_named():
    tensors = [torch.zeros(2, 3)] * 4
    with pytest.raises(ValueError, match=r"behaviour_logprobs_BT \(2, 2\).*one shape"):
        PolicyInputs(*tensors[:2], torch.zeros(2, 2), *tensors[:2])
    with pytest.raises(ValueError, match=r"mask_BT \(3,\).*\(sequences, tokens\)"):
        PolicyInputs(*[torch.zeros(3)] * 5)
    inputs = PolicyInputs(*tensors, tensors[0])
    with pytest.raises(ValueError, match=r"'gspo' takes GSPOOptions"):
        POLICIES["gspo"].term(inputs, policy_options("ppo"))
    with pytest.raises(ValueError, match=r"'tis' takes TISOptions"):
        CORRECTIONS["tis"].apply(inputs, correction_options("icepop"))
    with pytest.raises(ValueError, match=r"policy 'm2po' needs statistics="):
        POLICIES["m2po"].term(inputs, policy_options("m2po"))
