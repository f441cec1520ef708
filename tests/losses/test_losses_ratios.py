import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import (
    RatioSums,
    anchor_logprobs,
    bounded_log_ratio,
    effective_sample_size_fraction,
    importance_ratio,
    k1,
    k2,
    k3,
    ratio_sums,
)

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared
wide_log_ratios = st.floats(-200.0, 200.0, width=32)


def test_ratio_of_two_probabilities_by_hand():
    logprobs = torch.tensor([[math.log(0.3), math.log(0.2)]])
    anchor = torch.tensor([[math.log(0.1), math.log(0.4)]])
    ratio = importance_ratio(bounded_log_ratio(logprobs, anchor, torch.ones(1, 2)))
    assert ratio.tolist() == [pytest.approx([3.0, 0.5], rel=1e-6)]


def test_half_precision_is_widened_before_the_difference():
    logprobs = torch.tensor([[-7.0]], dtype=torch.bfloat16)
    anchor = torch.tensor([[-7.01]])
    difference = bounded_log_ratio(logprobs, anchor, torch.ones(1, 1))
    assert difference.dtype == torch.float32
    assert float(difference) == pytest.approx(0.01, abs=1e-6)  # 0 if subtracted in bfloat16


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(garbage):
    logprobs = torch.tensor([[-1.0, garbage, -2.0]], requires_grad=True)
    anchor = torch.tensor([[-1.0, garbage, -2.5]])
    ratio = importance_ratio(bounded_log_ratio(logprobs, anchor, torch.tensor([[1.0, 0.0, 1.0]])))
    (ratio * torch.tensor([[1.0, math.nan, 1.0]]))[0, [0, 2]].sum().backward()
    assert ratio.tolist() == [pytest.approx([1.0, 1.0, math.exp(0.5)], rel=1e-6)]
    assert logprobs.grad.tolist() == [pytest.approx([1.0, 0.0, math.exp(0.5)], rel=1e-6)]


def test_nan_at_a_trained_token_is_not_hidden():
    log_ratio = bounded_log_ratio(torch.tensor([[math.nan]]), torch.zeros(1, 1), torch.ones(1, 1))
    assert log_ratio.isnan().all()


def test_no_gradient_flows_into_an_anchor():
    logprobs = torch.zeros(1, 2, requires_grad=True)
    behaviour = torch.ones(1, 2, requires_grad=True)
    for name in ("behaviour", "recomputed"):
        anchor = anchor_logprobs(name, logprobs, behaviour)
        assert not anchor.requires_grad
    bounded_log_ratio(logprobs, behaviour, torch.ones(1, 2)).sum().backward()
    assert behaviour.grad is None


def test_recomputed_anchor_makes_the_ratio_exactly_one_and_behaviour_does_not():
    logprobs = torch.tensor([[-0.3, -7.7]])
    behaviour = torch.tensor([[-0.1, -9.0]])
    mask = torch.ones(1, 2)

    def ratio(name):
        return importance_ratio(
            bounded_log_ratio(logprobs, anchor_logprobs(name, logprobs, behaviour), mask)
        )

    assert ratio("recomputed").tolist() == [[1.0, 1.0]]
    assert ratio("behaviour").tolist() == [pytest.approx([math.exp(-0.2), math.exp(1.3)], rel=1e-5)]
    with pytest.raises(ValueError, match=r"anchor is 'old'.*behaviour, proximal, loglinear, recom"):
        ratio("old")


def test_proximal_anchor_is_what_was_handed_over_and_never_has_a_gradient():
    logprobs = torch.tensor([[-0.3, -7.7]], requires_grad=True)
    proximal = torch.tensor([[-0.4, -7.0]], requires_grad=True)
    anchor = anchor_logprobs("proximal", logprobs, logprobs, proximal_logprobs_BT=proximal)
    assert torch.equal(anchor, proximal)
    assert not anchor.requires_grad
    lag = torch.tensor([[0, 3]])
    assert not anchor_logprobs("loglinear", logprobs, proximal, lag_BT=lag).requires_grad
    with pytest.raises(ValueError, match="'proximal' needs proximal_logprobs_BT"):
        anchor_logprobs("proximal", logprobs, logprobs)
    with pytest.raises(ValueError, match="'loglinear' needs lag_BT"):
        anchor_logprobs("loglinear", logprobs, logprobs)


def test_kl_estimates_by_hand():
    d = torch.tensor([0.0, math.log(2.0), -math.log(2.0)])
    assert k1(d).tolist() == pytest.approx([0.0, 0.6931472, -0.6931472], abs=1e-6)
    assert k2(d).tolist() == pytest.approx([0.0, 0.2402265, 0.2402265], abs=1e-6)
    assert k3(d).tolist() == pytest.approx([0.0, 0.1931472, 0.3068528], abs=1e-6)


def test_kl_estimates_average_to_the_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    d = p.log() - q.log()
    exact = float((p.double() * (p.double() / q.double()).log()).sum())
    assert float((p * k1(d)).sum()) == pytest.approx(exact, abs=1e-6)
    assert float((p * k3(d)).sum()) == pytest.approx(exact, abs=1e-6)


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor([1e-3, -1e-3, 1e-4])
    exact = [math.expm1(-x) + x for x in d.double().tolist()]
    assert k3(d).tolist() == pytest.approx(exact, rel=2e-3)
    tiny = torch.logspace(-12, 1, 20_001)
    assert (k3(torch.cat([tiny, -tiny])) >= 0).all()


@pytest.mark.parametrize("gap", [100.0, -100.0, 1e4, -1e4, 3e38, -3e38, math.inf, -math.inf])
@pytest.mark.parametrize("estimate", [k2, k3])
def test_b35_a_huge_gap_gives_a_value_of_at_most_ten_and_a_finite_gradient(estimate, gap):
    policy = torch.zeros(1, 1, requires_grad=True)
    reference_minus_policy = torch.full((1, 1), gap) - policy
    value = estimate(-reference_minus_policy)
    value.sum().backward()
    assert 0.0 <= value.item() <= 10.0
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize("estimate", [k1, k2, k3, importance_ratio])
@bounded
@given(d=wide_log_ratios)
def test_b35_every_estimate_is_finite_and_bounded_with_its_gradient(estimate, d):
    log_ratio = torch.tensor([d], requires_grad=True)
    value = estimate(log_ratio)
    value.sum().backward()
    assert value.isfinite().all() and log_ratio.grad.isfinite().all()
    assert value.abs().item() <= (math.exp(20.0) * 1.001 if estimate is importance_ratio else 10.0)


@pytest.mark.parametrize("estimate", [k1, k2, k3, importance_ratio])
def test_gradients_equal_finite_differences(estimate):
    d = torch.tensor([-1.5, -0.1, 0.2, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(estimate, (d,))


def test_effective_sample_size_by_hand():
    mask = torch.ones(1, 4)
    assert float(effective_sample_size_fraction(torch.full((1, 4), 7.0), mask)) == 1.0
    one_holds_all = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert float(effective_sample_size_fraction(one_holds_all, mask)) == 0.25
    # (1 + 3)^2 / (2 * 10) over the two unmasked tokens.
    masked = torch.tensor([[1.0, 99.0, 3.0, math.nan]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    assert float(effective_sample_size_fraction(masked, mask)) == pytest.approx(0.8)


def test_effective_sample_size_without_weight_is_zero_and_scale_does_not_matter():
    ratio = torch.tensor([[1.0, 3.0]])
    assert float(effective_sample_size_fraction(ratio, torch.zeros(1, 2))) == 0.0
    assert float(effective_sample_size_fraction(ratio * 0, torch.ones(1, 2))) == 0.0
    for scale in (1e-38, 1e37):
        ess = effective_sample_size_fraction(ratio * scale, torch.ones(1, 2))
        assert float(ess) == pytest.approx(0.8, rel=1e-5)


def random_ratios(seed=0, shape=(8, 6)):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = torch.randn(shape, generator=generator)
    mask = (torch.rand(shape, generator=generator) < 0.6).float()
    clipped = torch.rand(shape, generator=generator) < 0.3
    return log_ratio, clipped, mask


def test_ratio_metrics_equal_plain_loops():
    log_ratio, clipped, mask = random_ratios()
    sums = ratio_sums(log_ratio, clipped, mask)
    trained = [
        (float(d), bool(c))
        for d, c, m in zip(log_ratio.ravel(), clipped.ravel(), mask.ravel(), strict=True)
        if m
    ]
    rho = [math.exp(d) for d, _ in trained]
    count = len(trained)
    assert sums.num_tokens == count
    assert sums.ess == pytest.approx(sum(rho) ** 2 / (count * sum(r * r for r in rho)))
    assert sums.clip_fraction == sum(c for _, c in trained) / count
    assert sums.drift == pytest.approx(sum(abs(r - 1) for r in rho) / count)
    assert sums.kl_behaviour == pytest.approx(
        sum(r - 1 - d for r, (d, _) in zip(rho, trained, strict=True)) / count
    )
    ess = effective_sample_size_fraction(log_ratio.exp(), mask)
    assert sums.ess == pytest.approx(float(ess), rel=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_ratio_sums_of_micro_batches_add_up(parts):
    log_ratio, clipped, mask = random_ratios()
    mask[:2] = 0.0  # with 4 or 8 parts one micro-batch trains nothing
    chunks = zip(log_ratio.chunk(parts), clipped.chunk(parts), mask.chunk(parts), strict=True)
    total = sum((ratio_sums(*chunk) for chunk in chunks), RatioSums())
    whole = ratio_sums(log_ratio, clipped, mask)
    assert (total.num_tokens, total.num_clipped) == (whole.num_tokens, whole.num_clipped)
    for name in ("ess", "clip_fraction", "kl_behaviour", "drift"):
        assert getattr(total, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_on_policy_metrics_are_exact_and_no_token_means_no_metric():
    zeros = torch.zeros(2, 3)
    on_policy = ratio_sums(zeros, zeros.bool(), torch.ones(2, 3))
    metrics = (on_policy.ess, on_policy.clip_fraction, on_policy.kl_behaviour, on_policy.drift)
    assert metrics == (1.0, 0.0, 0.0, 0.0)
    empty = ratio_sums(zeros, zeros.bool(), zeros)
    assert empty == RatioSums()
    assert (empty.ess, empty.clip_fraction, empty.kl_behaviour, empty.drift) == (None,) * 4


def test_kl_behaviour_averages_to_the_divergence_from_behaviour_to_current():
    behaviour, current = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    # Every outcome as often as the behaviour policy samples it.
    outcomes = torch.tensor([[0, 0, 1, 2]])
    log_ratio = current.log()[outcomes] - behaviour.log()[outcomes]
    sums = ratio_sums(log_ratio, torch.zeros(1, 4, dtype=torch.bool), torch.ones(1, 4))
    assert sums.kl_behaviour == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), abs=1e-6)


@bounded
@given(st.lists(wide_log_ratios, min_size=1, max_size=6))
def test_ratio_metrics_are_finite_and_in_range_for_any_finite_log_ratio(values):
    log_ratio = torch.tensor([values])
    sums = ratio_sums(log_ratio, log_ratio > 0, torch.ones_like(log_ratio))
    assert 1 / len(values) - 1e-9 <= sums.ess <= 1 + 1e-9
    assert 0.0 <= sums.kl_behaviour <= 10.0
    assert math.isfinite(sums.drift)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"logprobs_BT \(1, 2\).*mask_BT \(1, 3\)"):
        bounded_log_ratio(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 3))
