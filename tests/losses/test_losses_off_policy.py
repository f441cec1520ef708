import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losses_support import correction_options, policy_options, random_batch

from sidestep.losses import (
    CORRECTIONS,
    LAG_BUCKETS,
    POLICIES,
    LagTable,
    OffPolicySums,
    PolicyInputs,
    check_combination,
    combine,
    ess_learning_rate_factor,
    lag_bucket,
    off_policy_sums,
)
from sidestep.losses.histogram import count_log_ratios, quantile
from sidestep.losses.off_policy import SequenceSums

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared


def measure(tensors, lag, corrections=("icepop",), policy="ppo"):
    inputs = PolicyInputs(*tensors)
    term = POLICIES[policy].term(inputs, policy_options(policy))
    applied = [CORRECTIONS[name].apply(inputs, correction_options(name)) for name in corrections]
    return off_policy_sums(inputs, term, combine(applied), lag), term, combine(applied)


def lags(seed=0, shape=(8, 5), highest=20):
    return torch.randint(0, highest + 1, shape, generator=torch.Generator().manual_seed(seed))


def test_total_equals_plain_loops():
    tensors = random_batch()
    table, term, correction = measure(tensors, lags(), ("icepop", "geometric"))
    rows = [
        [
            (
                float(tensors[0][b, t] - tensors[2][b, t]),
                bool(term.clipped_low_BT[b, t]),
                bool(term.clipped_high_BT[b, t]),
                {reason for reason, flags in correction.dropped.items() if flags[b, t]},
            )
            for t in range(5)
            if tensors[-1][b, t]
        ]
        for b in range(8)
    ]
    tokens = [token for row in rows for token in row]
    rho = [math.exp(d) for d, *_ in tokens]
    count = len(tokens)
    total, ratios = table.total, table.total.ratios
    assert ratios.num_tokens == count
    assert ratios.clip_fraction_low == sum(low for _, low, _, _ in tokens) / count > 0
    assert ratios.clip_fraction_high == sum(high for _, _, high, _ in tokens) / count > 0
    assert ratios.clip_fraction == ratios.clip_fraction_low + ratios.clip_fraction_high
    assert ratios.ess == pytest.approx(sum(rho) ** 2 / (count * sum(r * r for r in rho)))
    assert ratios.chi_squared == pytest.approx(sum((r - 1) ** 2 for r in rho) / count)
    assert ratios.kl_behaviour_k1 == pytest.approx(-sum(d for d, *_ in tokens) / count)
    assert ratios.kl_behaviour == pytest.approx(
        sum(math.exp(d) - 1 - d for d, *_ in tokens) / count
    )
    dropped = [reasons for *_, reasons in tokens]
    assert total.masked_fraction == sum(map(bool, dropped)) / count
    assert 0 < total.masked_fraction < 1
    filled = [row for row in rows if row]
    for reason in correction.dropped:
        assert total.drops.tokens[reason] == sum(reason in found for found in dropped)
        assert total.drops.sequences[reason] == sum(
            all(reason in token[3] for token in row) for row in filled
        )
    products = [math.exp(sum(d for d, *_ in row)) for row in filled]
    assert total.sequences.num_sequences == len(filled)
    assert total.sequences.ess == pytest.approx(
        sum(products) ** 2 / (len(products) * sum(p * p for p in products))
    )


def test_each_bucket_is_what_its_tokens_alone_give_and_rows_go_with_their_oldest_token():
    tensors, lag = random_batch(), lags()
    table, *_ = measure(tensors, lag)
    for name, sums in table.by_lag.items():
        chosen = [tensor.clone() for tensor in tensors]
        in_bucket = torch.tensor([[lag_bucket(int(value)) == name for value in row] for row in lag])
        chosen[-1] = chosen[-1] * in_bucket
        alone = measure(chosen, lag)[0].total
        assert sums.ratios == alone.ratios
        assert sums.log_ratio_counts == alone.log_ratio_counts
        assert sums.drops.tokens == alone.drops.tokens
        oldest = torch.where(tensors[-1] != 0, lag, -1).amax(1).tolist()
        expected = sum(value >= 0 and lag_bucket(value) == name for value in oldest)
        assert sums.sequences.num_sequences == expected
    assert set(table.by_lag) == {lag_bucket(int(value)) for value in lag[tensors[-1] != 0]}


@pytest.mark.parametrize("sizes", [[4, 4], [2, 2, 2, 2], [5, 3], [1] * 8])
def test_micro_batches_add_up(sizes):
    tensors, lag = random_batch(), lags()
    whole, *_ = measure(tensors, lag, ("icepop", "opsm"))
    total = LagTable()
    for parts in zip(*(tensor.split(sizes) for tensor in (*tensors, lag)), strict=True):
        total += measure(parts[:-1], parts[-1], ("icepop", "opsm"))[0]
    assert set(total.by_lag) == set(whole.by_lag)
    for added, expected in (
        (total.total, whole.total),
        *((total.by_lag[name], whole.by_lag[name]) for name in whole.by_lag),
    ):
        assert added.drops == expected.drops
        assert added.log_ratio_counts == expected.log_ratio_counts
        for name in ("ess", "chi_squared", "kl_behaviour", "kl_behaviour_k1", "clip_fraction_low"):
            assert getattr(added.ratios, name) == pytest.approx(getattr(expected.ratios, name))
        assert added.sequences.ess == pytest.approx(expected.sequences.ess)


def test_on_policy_reads_exactly_one_and_zero_and_nothing_at_all_reads_none():
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    total = measure((zeros - 1, zeros - 1, zeros - 1, ones, ones), zeros.long())[0].total
    ratios = total.ratios
    assert (ratios.ess, total.sequences.ess, total.ratio_quantile(0.99)) == (1.0, 1.0, 1.0)
    assert (ratios.chi_squared, ratios.kl_behaviour, ratios.kl_behaviour_k1) == (0.0, 0.0, 0.0)
    assert (ratios.clip_fraction_low, ratios.clip_fraction_high) == (0.0, 0.0)
    assert total.masked_fraction == 0.0
    one_row = torch.tensor([[0.0] * 3, [1.0] * 3])
    half = measure((zeros - 1, zeros - 1, zeros - 1, ones, one_row), zeros.long())[0].total
    assert half.sequences.num_sequences == 1  # a row without a trained token counts nowhere
    empty = measure((zeros, zeros, zeros, zeros, zeros), zeros.long())[0]
    assert empty.by_lag == {}
    assert empty.total == OffPolicySums()
    found = empty.total
    nothing = (found.ratios.ess, found.ratios.chi_squared, found.sequences.ess)
    assert (*nothing, found.masked_fraction, found.ratio_quantile(0.5)) == (None,) * 5


@bounded
@given(
    st.lists(st.floats(-20.0, 20.0), min_size=1, max_size=40),
    st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0]),
    st.integers(0, 40),
)
def test_quantiles_are_right_to_one_percent_and_do_not_depend_on_the_split(values, share, cut):
    counts = OffPolicySums(log_ratio_counts=count_log_ratios(torch.tensor(values[:cut])))
    counts += OffPolicySums(log_ratio_counts=count_log_ratios(torch.tensor(values[cut:])))
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = quantile(counts.log_ratio_counts, share)
    assert found == pytest.approx(exact, rel=0.0105, abs=1e-4)
    assert counts.ratio_quantile(share) == pytest.approx(math.exp(found))


def test_a_share_outside_0_to_1_is_named():
    with pytest.raises(ValueError, match=r"share is 1\.5"):
        quantile({0: 1}, 1.5)


@pytest.mark.parametrize(
    ("lag", "bucket"),
    [(0, "0"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"), (16, "9-16"), (99, "17+")],
)
def test_lag_buckets(lag, bucket):
    assert lag_bucket(lag) == bucket
    tensors = [torch.full((1, 1), value) for value in (-1.0, -1.0, -1.0, 1.0, 1.0)]
    assert list(measure(tensors, torch.full((1, 1), lag))[0].by_lag) == [bucket]
    assert bucket in LAG_BUCKETS


def test_a_negative_lag_is_named_unless_it_is_under_the_mask():
    tensors = [torch.full((1, 2), value) for value in (-1.0, -1.0, -1.0, 1.0, 1.0)]
    with pytest.raises(ValueError, match="lag_BT has -3"):
        measure(tensors, torch.tensor([[0, -3]]))
    with pytest.raises(ValueError, match="lag is -1"):
        lag_bucket(-1)
    tensors[-1][0, 1] = 0.0
    assert list(measure(tensors, torch.tensor([[0, -3]]))[0].by_lag) == ["0"]


def test_b54_steps_on_one_batch_show_as_lag_0_1_2_3_and_stacking_them_on_max_lag_is_announced():
    tensors = random_batch()
    versions = torch.full((8, 5), 17)
    trained = [
        measure([tensor[2 * i : 2 * i + 2] for tensor in tensors], (17 + i - versions)[:2])[0]
        for i in range(4)
    ]
    rows = [list(table.by_lag) for table in trained]
    assert rows == [["0"], ["1"], ["2"], ["3-4"]]
    assert trained[3].total.ratios.num_tokens > 0
    codes = [f.code for f in check_combination("ppo", "behaviour", steps_per_batch=4, max_lag=4)]
    assert codes == ["stacked_lag"]
    assert check_combination("ppo", "behaviour", steps_per_batch=4, max_lag=0) == []
    assert check_combination("ppo", "behaviour", steps_per_batch=1, max_lag=4) == []


def test_b63_b65_a_sampler_that_kept_other_weights_shows_and_an_equal_one_reads_exactly_one():
    logits = torch.randn(1, 400, 8, generator=torch.Generator().manual_seed(0))
    base = logits + 0.5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    ids = torch.distributions.Categorical(logits=logits).sample()

    def at_ids(table):
        return table.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

    ours, ones = at_ids(logits), torch.ones(1, 400)
    lag = torch.zeros(1, 400, dtype=torch.int64)
    good = measure((ours, ours, ours, ones, ones), lag)[0].total
    stale = measure((ours, at_ids(base), at_ids(base), ones, ones), lag)[0].total
    assert (good.ratios.ess, good.ratio_quantile(0.01), good.ratio_quantile(0.99)) == (1.0,) * 3
    assert stale.ratios.ess < 0.9
    assert stale.ratio_quantile(0.01) < 0.8 and stale.ratio_quantile(0.99) > 1.2
    assert stale.ratios.kl_behaviour > 0.02


@bounded
@given(
    st.lists(st.floats(-200.0, 200.0, width=32), min_size=1, max_size=6),
    st.sampled_from(sorted(set(CORRECTIONS))),
)
def test_metrics_are_finite_and_in_range_for_any_finite_log_ratio(values, correction):
    d = torch.tensor([values])
    zeros, ones = torch.zeros_like(d), torch.ones_like(d)
    total = measure((d, zeros, zeros, ones, ones), zeros.long(), (correction,))[0].total
    assert 1 / len(values) - 1e-9 <= total.ratios.ess <= 1 + 1e-9
    assert 0.0 <= total.ratios.kl_behaviour <= 10.0
    assert -10.0 <= total.ratios.kl_behaviour_k1 <= 10.0
    assert 0.0 <= total.ratios.chi_squared < math.inf
    assert 0.0 <= total.masked_fraction <= 1.0
    assert 0.0 < total.sequences.ess <= 1 + 1e-9
    assert math.exp(-20.5) < total.ratio_quantile(0.5) < math.exp(20.5)


def test_vcpo_scales_the_learning_rate_by_the_root_of_the_effective_sample_size():
    # Weights 1 and 3: (1 + 3)^2 / (2 * 10) = 0.8.
    sums = SequenceSums(1, 1.0, 1.0) + SequenceSums(1, 3.0, 9.0)
    assert sums.ess == pytest.approx(0.8)
    assert ess_learning_rate_factor(sums.ess) == pytest.approx(math.sqrt(0.8))
    assert ess_learning_rate_factor(0.25, base_ess=0.5) == pytest.approx(math.sqrt(0.5))
    assert ess_learning_rate_factor(0.9, base_ess=0.5) == 1.0
    assert ess_learning_rate_factor(None) == 1.0
    with pytest.raises(ValueError, match="base_ess is 0"):
        ess_learning_rate_factor(0.5, base_ess=0.0)
