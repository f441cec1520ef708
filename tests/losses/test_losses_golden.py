"""Every loss by hand on a few tokens: value, gradient, and where its rule acts."""

import math

import pytest
import torch
from losses_support import one_row

from sidestep.losses import ADVANTAGES, CORRECTIONS, POLICIES, combine, make_options

LOG_FIFTH = math.log(0.2)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def ratios(*values):
    """mu of tokens whose current probability is 0.2 and whose ratio is as given."""
    return [0.2 / value for value in values]


# name -> (options, pi, mu, advantages, loss, gradient of the sum, low side, high side), rows of
# tokens each. The anchor is the behaviour policy, so r = rho.
POLICY_GOLDEN = {
    "ppo": (
        {},
        [[0.2] * 4],
        [ratios(0.5, 1.0, 1.5, 1.5)],
        [[-1.0, 2.0, 1.0, -1.0]],
        [[0.8, -2.0, -1.2, 1.5]],
        [[0.0, -2.0, 0.0, 1.5]],
        [[1, 0, 0, 0]],
        [[0, 0, 1, 0]],
    ),
    "dual_clip": (
        {},
        [[0.2] * 4],
        [ratios(5.0, 2.0, 0.5, 5.0)],
        [[-1.0, -1.0, -1.0, 1.0]],
        [[3.0, 2.0, 0.8, -1.2]],
        [[0.0, 2.0, 0.0, 0.0]],
        [[0, 0, 1, 0]],
        [[1, 0, 0, 1]],
    ),
    # Geometric means 1, 2 and 2; every token carries its row's loss, so the sum of two tokens
    # of a row spreads 2 * s * A / 2 on each.
    "gspo": (
        {"clip_low": 0.2, "clip_high": 0.3},
        [[0.2] * 2] * 3,
        [ratios(2.0, 0.5), ratios(2.0, 2.0), ratios(4.0, 1.0)],
        [[3.0, 3.0], [1.0, 1.0], [-1.0, -1.0]],
        [[-3.0, -3.0], [-1.3, -1.3], [2.0, 2.0]],
        [[-3.0, -3.0], [0.0, 0.0], [2.0, 2.0]],
        [[0, 0]] * 3,
        [[0, 0], [1, 1], [0, 0]],
    ),
    "sapo": (
        {},
        [[0.2] * 3],
        [ratios(1.0, 1.0, 2.0)],
        [[2.0, -1.0, 1.0]],
        [[-4.0, 2.0 / 1.05, -4.0 * sigmoid(1.0)]],
        [[-2.0, 1.0, -8.0 * sigmoid(1.0) * sigmoid(-1.0)]],
        [[0, 0, 0]],
        [[0, 0, 0]],
    ),
    "cispo": (
        {},
        [[0.2] * 3],
        [ratios(0.5, 2.0, 8.0)],
        [[1.0, -1.0, 1.0]],
        [[-0.5 * LOG_FIFTH, 2.0 * LOG_FIFTH, -5.0 * LOG_FIFTH]],
        [[-0.5, 2.0, -5.0]],
        [[0, 0, 0]],
        [[0, 0, 1]],
    ),
    "dis": (
        {},
        [[0.2] * 4],
        [ratios(0.6, 0.8, 5.9, 6.5)],
        [[1.0, 1.0, -1.0, -1.0]],
        [[0.0, -0.8 * LOG_FIFTH, 5.9 * LOG_FIFTH, 0.0]],
        [[0.0, -0.8, 5.9, 0.0]],
        [[1, 0, 0, 0]],
        [[0, 0, 0, 1]],
    ),
    "dppo_tv": (
        {},
        [[0.5, 0.5, 0.05, 0.5]],
        [[0.2, 0.4, 0.3, 0.2]],
        [[1.0, 1.0, -1.0, -1.0]],
        [[0.0, -1.25, 0.0, 2.5]],
        [[0.0, -1.25, 0.0, 2.5]],
        [[0, 0, 1, 0]],
        [[1, 0, 0, 0]],
    ),
    # Products 0.5, 0.5 and 4.
    "topr": (
        {},
        [[0.2] * 2] * 3,
        [ratios(2.0, 0.25), ratios(2.0, 0.25), ratios(2.0, 2.0)],
        [[-1.0, -1.0], [2.0, 2.0], [-1.0, -1.0]],
        [[0.5 * LOG_FIFTH] * 2, [-2.0 * LOG_FIFTH] * 2, [LOG_FIFTH] * 2],
        [[0.5, 0.5], [-2.0, -2.0], [1.0, 1.0]],
        [[0, 0]] * 3,
        [[0, 0], [0, 0], [1, 1]],
    ),
    # Candidates are the first two: squares 0.01 and 0.09, mean 0.05 > 0.04, so 0.09 goes.
    "m2po": (
        {},
        [[0.2] * 4],
        [ratios(math.exp(0.1), math.exp(0.3), math.exp(-0.3), math.exp(0.5))],
        [[1.0, 1.0, 1.0, -1.0]],
        [[-math.exp(0.1), 0.0, -math.exp(-0.3), math.exp(0.5)]],
        [[-math.exp(0.1), 0.0, -math.exp(-0.3), math.exp(0.5)]],
        [[0, 0, 0, 0]],
        [[0, 1, 0, 0]],
    ),
    # Bounds 0.6 and 1.2: positive 1.0, negative 1.35. At low = 0.66 the last is out: 1 / 1.7.
    "bapo": (
        {},
        [[0.2] * 4],
        [ratios(1.0, 2.0, 0.7, 0.65)],
        [[1.0, 1.0, -1.0, -1.0]],
        [[-1.0, -1.2, 0.7, 0.66]],
        [[-1.0, 0.0, 0.7, 0.0]],
        [[0, 0, 0, 1]],
        [[0, 1, 0, 0]],
    ),
}

# name -> (options, w, log rho, advantage of the row, weight, dropped tokens by reason)
CORRECTION_GOLDEN = {
    "none": ({}, [[0.25, 8.0]], 0.0, [1.0], [[1.0, 1.0]], {}),
    "importance": (
        {},
        [[0.25, 1.0, 2.0, 8.0]],
        0.0,
        [1.0],
        [[0.25, 1.0, 2.0, 0.0]],
        {"above_cap": [[0, 0, 0, 1]]},
    ),
    "tis": ({}, [[0.25, 1.0, 2.0, 8.0]], 0.0, [1.0], [[0.25, 1.0, 2.0, 2.0]], {}),
    "icepop": (
        {},
        [[0.25, 1.0, 2.0, 8.0]],
        0.0,
        [1.0],
        [[0.0, 1.0, 2.0, 0.0]],
        {"token_below": [[1, 0, 0, 0]], "token_above": [[0, 0, 0, 1]]},
    ),
    "sequence_mis": (
        {},
        [[0.25, 6.0], [2.0, 2.0], [0.5, 0.5]],
        0.0,
        [1.0] * 3,
        [[1.5, 1.5], [0.0, 0.0], [0.0, 0.0]],
        {
            "sequence_below": [[0, 0], [0, 0], [1, 1]],
            "sequence_above": [[0, 0], [1, 1], [0, 0]],
        },
    ),
    "geometric": (
        {"low": 0.9, "high": 1.5},
        [[0.25, 4.0], [2.0, 2.0], [0.5, 0.5]],
        0.0,
        [1.0] * 3,
        [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
        {
            "geometric_below": [[0, 0], [0, 0], [1, 1]],
            "geometric_above": [[0, 0], [1, 1], [0, 0]],
        },
    ),
    "opsm": (
        {},
        [[1.0, 1.0]] * 3,
        [[-0.6], [-0.6], [-0.4]],
        [-1.0, 1.0, -1.0],
        [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]],
        {"off_policy": [[1, 1], [0, 0], [0, 0]]},
    ),
}

# name -> (rewards, token counts, advantages)
ADVANTAGE_GOLDEN = {
    # Mean 1/4, unbiased std 1/2.
    "grpo": (
        [[1.0, 0.0, 0.0, 0.0]],
        [[1, 2, 3, 4]],
        [[0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]],
    ),
    "dr_grpo": ([[1.0, 0.0, 0.0, 0.0]], [[1, 2, 3, 4]], [[0.75, -0.25, -0.25, -0.25]]),
    "rloo": ([[1.0, 0.0, 0.0, 0.0]], [[1, 2, 3, 4]], [[1.0, -1 / 3, -1 / 3, -1 / 3]]),
    # Tokens with reward 1: 4 of 8; mean and std are 1/2.
    "reinforce_pp": ([[1.0, 0.0], [1.0, 0.0]], [[1, 3], [3, 1]], [[1.0, -1.0], [1.0, -1.0]]),
    # Centred 1/2, -1/2, 0, 0 with 2 tokens each: mean 0, std sqrt(1/8).
    "reinforce_pp_baseline": (
        [[1.0, 0.0], [1.0, 1.0]],
        [[2, 2], [2, 2]],
        [[math.sqrt(2.0), -math.sqrt(2.0)], [0.0, 0.0]],
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policy_by_hand(name):
    settings, pi, mu, advantages, loss, gradient, low, high = POLICY_GOLDEN[name]
    entry, inputs = POLICIES[name], one_row(pi, mu, advantages)
    options = make_options(entry.options, **settings)
    statistics = entry.statistics([inputs], options) if entry.statistics else None
    term = entry.term(inputs, options, statistics)
    term.loss_BT.sum().backward()
    assert term.loss_BT.tolist() == [pytest.approx(row, abs=1e-9) for row in loss]
    assert inputs.logprobs_BT.grad.tolist() == [pytest.approx(row, abs=1e-9) for row in gradient]
    assert term.clipped_low_BT.int().tolist() == low
    assert term.clipped_high_BT.int().tolist() == high
    assert torch.equal(term.clipped_BT, term.clipped_low_BT | term.clipped_high_BT)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_by_hand(name):
    settings, w, log_rho, advantage, weight, dropped = CORRECTION_GOLDEN[name]
    entry = CORRECTIONS[name]
    weights = torch.tensor(w, dtype=torch.float64)
    mu = torch.full_like(weights, 0.1)
    pi = mu * torch.tensor(log_rho, dtype=torch.float64).exp()
    advantages = torch.tensor(advantage, dtype=torch.float64)[:, None].expand_as(weights)
    inputs = one_row(pi.tolist(), mu.tolist(), advantages.tolist(), p=(mu * weights).tolist())
    correction = entry.apply(inputs, make_options(entry.options, **settings))
    assert correction.weight_BT.tolist() == [pytest.approx(row, abs=1e-12) for row in weight]
    assert {reason: flags.int().tolist() for reason, flags in correction.dropped.items()} == dropped
    assert not correction.weight_BT.requires_grad


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_by_hand(name):
    rewards, num_tokens, advantages = ADVANTAGE_GOLDEN[name]
    found = ADVANTAGES[name].function(torch.tensor(rewards), torch.tensor(num_tokens))
    assert found.tolist() == [pytest.approx(row, abs=1e-6) for row in advantages]
    assert found.dtype == torch.float32


def test_dis_drops_the_ends_of_its_band_and_the_bands_of_corrections_keep_theirs():
    inputs = one_row([[0.25, 0.5]], [[0.5, 0.25]], [[1.0, 1.0]], p=[[0.25, 0.5]])  # 1/2 and 2
    ends = {"clip_low": 0.5, "clip_high": 1.0}
    term = POLICIES["dis"].term(inputs, make_options(POLICIES["dis"].options, **ends))
    assert term.loss_BT.tolist() == [[0.0, 0.0]]
    options = make_options(CORRECTIONS["icepop"].options, low=0.5, high=2.0)
    assert CORRECTIONS["icepop"].apply(inputs, options).weight_BT.tolist() == [[0.5, 2.0]]


def test_filter_and_weight_combine_to_weight_per_token_on_the_rows_that_stay():
    inputs = one_row([[0.1] * 2] * 2, [[0.1] * 2] * 2, [[1.0] * 2] * 2, [[0.4, 0.025], [0.2, 0.2]])
    parts = [
        CORRECTIONS[name].apply(inputs, make_options(CORRECTIONS[name].options))
        for name in ("tis", "geometric")
    ]
    both = combine(parts)
    assert both.weight_BT.tolist() == [pytest.approx([2.0, 0.25]), [0.0, 0.0]]
    assert both.dropped_BT.tolist() == [[False, False], [True, True]]
    assert sorted(both.dropped) == ["geometric_above", "geometric_below"]
    with pytest.raises(ValueError, match="geometric_below"):
        combine([parts[1], parts[1]])
    with pytest.raises(ValueError, match="corrections is empty"):
        combine([])
