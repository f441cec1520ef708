import math

import pytest
import torch
from losses_support import correction_options, random_batch

from sidestep.losses import (
    CORRECTIONS,
    POLICIES,
    PolicyInputs,
    WeightSums,
    make_options,
    normalise_weights,
    off_policy_sums,
    weight_sums,
)


def row(log_w, advantage=1.0, mask=None):
    """One row of tokens with the given log w, at current probability e^-1."""
    log_w = torch.tensor([log_w])
    mu = torch.full_like(log_w, -1.0) - log_w
    mask = torch.ones_like(log_w) if mask is None else torch.tensor([mask])
    at_one = torch.full_like(log_w, -1.0)
    return PolicyInputs(at_one, at_one, mu, torch.full_like(log_w, advantage), mask)


def apply(name, inputs, **values):
    return CORRECTIONS[name].apply(inputs, make_options(CORRECTIONS[name].options, **values))


@pytest.mark.parametrize("name", ["importance", "tis", "icepop", "sequence_mis", "geometric"])
def test_bounds_act_on_w_and_not_on_its_inverse(name):
    # The bands are lopsided, so that the inverted reading drops the other token.
    high, low = row([math.log(4.0)]), row([math.log(0.25)])
    values = {"cap": 2.0} if name in ("importance", "tis") else {"low": 0.2, "high": 2.0}
    above, below = (apply(name, inputs, **values) for inputs in (high, low))
    if name == "tis":
        assert float(above.weight_BT) == 2.0
    else:
        assert above.dropped_BT.tolist() == [[True]]
    assert below.dropped_BT.tolist() == [[False]]
    assert float(below.weight_BT) == pytest.approx(1.0 if name == "geometric" else 0.25)


def test_a_product_over_the_row_shrinks_with_its_length_and_the_geometric_mean_does_not():
    # A mismatch of +-4 % a token with mean 1 in w: log w averages -0.0008.
    pair = [math.log(0.96), math.log(1.04)]
    for length in (2, 1000, 8000):
        inputs = row(pair * (length // 2))
        product = apply("sequence_mis", inputs, low=0.0, high=1e9).weight_BT[0, 0]
        assert float(product) == pytest.approx(math.exp(-0.0008 * length), rel=0.02)
        assert not apply("geometric", inputs).dropped_BT.any()
    assert apply("sequence_mis", inputs).dropped_BT.all()


def test_b37_300_tokens_of_ratio_0_7_have_a_finite_weight():
    inputs = row([math.log(0.7)] * 300)  # the product is 3e-47, below float32
    unbounded = apply("sequence_mis", inputs, low=0.0, high=2.0).weight_BT
    assert unbounded.isfinite().all() and (unbounded > 0).all()
    dropped = apply("sequence_mis", inputs, low=0.8, high=2.0)
    assert (dropped.weight_BT == 0).all()
    assert dropped.dropped["sequence_below"].all()
    for name in CORRECTIONS:
        assert apply(name, inputs).weight_BT.isfinite().all()


def test_b37_a_small_mismatch_over_300_tokens_masks_all_and_says_so():
    inputs = row([0.005] * 300)  # the product is 4.48
    correction = apply("sequence_mis", inputs, high=3.0)
    assert (correction.weight_BT == 0).all()
    term = POLICIES["ppo"].term(inputs, make_options(POLICIES["ppo"].options))
    lag = torch.zeros(1, 300, dtype=torch.int64)
    total = off_policy_sums(inputs, term, correction, lag).total
    assert total.masked_fraction == 1.0
    assert total.drops.tokens == {"sequence_below": 0, "sequence_above": 300}
    assert total.drops.sequences == {"sequence_below": 0, "sequence_above": 1}
    assert not apply("geometric", inputs, high=1.01).dropped_BT.any()


def test_opsm_decides_for_the_whole_row_by_its_mean_advantage():
    log_rho = torch.full((1, 3), -1.0)
    at_one = torch.full((1, 3), -2.0)
    for advantages, dropped in (([-0.5, 0.25, -0.25], True), ([0.5, -0.25, -0.2], False)):
        inputs = PolicyInputs(
            at_one, at_one, at_one - log_rho, torch.tensor([advantages]), torch.ones(1, 3)
        )
        correction = apply("opsm", inputs, delta=0.1)
        assert correction.dropped["off_policy"].tolist() == [[dropped] * 3]


def test_opsm_sees_staleness_where_the_anchor_is_the_current_policy():
    logprobs, _, behaviour, advantages, mask = random_batch()
    by_anchor = [
        CORRECTIONS["opsm"].apply(
            PolicyInputs(logprobs, anchor, behaviour, advantages, mask), correction_options("opsm")
        )
        for anchor in (logprobs, behaviour)
    ]
    assert by_anchor[0].dropped_BT.any()
    assert torch.equal(by_anchor[0].dropped_BT, by_anchor[1].dropped_BT)


def test_dropped_tokens_are_trained_tokens_only():
    inputs = row([3.0, 3.0, 3.0], mask=[1.0, 0.0, 1.0])
    for name in ("importance", "icepop", "sequence_mis", "geometric"):
        correction = apply(name, inputs, **({"cap": 2.0} if name == "importance" else {}))
        assert correction.dropped_BT.tolist() == [[True, False, True]]


@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [5, 3]])
def test_normalised_weights_have_mean_one_over_the_kept_tokens_of_the_whole_batch(sizes):
    tensors = random_batch()
    columns = [tensor.split(sizes) for tensor in tensors]
    parts = [PolicyInputs(*part) for part in zip(*columns, strict=True)]
    corrections = [CORRECTIONS["icepop"].apply(p, correction_options("icepop")) for p in parts]
    sums = WeightSums()
    for part, correction in zip(parts, corrections, strict=True):
        sums += weight_sums(correction, part.mask_BT)
    weights = torch.cat([normalise_weights(c, sums).weight_BT for c in corrections])
    dropped = torch.cat([c.dropped_BT for c in corrections])
    kept = (tensors[-1] != 0) & ~dropped
    assert float(weights[kept].mean()) == pytest.approx(1.0)
    assert (weights[~kept] == 0).all()
    w = (tensors[1] - tensors[2]).exp()
    assert torch.allclose(weights[kept], w[kept] / w[kept].mean())


def test_normalising_changes_nothing_where_all_is_dropped():
    correction = apply("icepop", row([9.0, 9.0]))
    sums = weight_sums(correction, torch.ones(1, 2))
    assert sums == WeightSums(0, 0.0)
    assert torch.equal(normalise_weights(correction, sums).weight_BT, torch.zeros(1, 2))
