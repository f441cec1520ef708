"""GradientControl.apply: what is measured, decided and written."""

import inspect
import json
import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import sidestep
from sidestep.control import GradientControl


def one(values, dtype=torch.float32):
    """A model of one parameter `w` as named parameters."""
    return [("w", Parameter(torch.zeros(len(values), dtype=dtype)))]


def step(control, named, *grads, **facts):
    """Set the gradients (None stays None) and apply."""
    for (_, parameter), grad in zip(named, grads, strict=True):
        given_grad = None if grad is None else torch.as_tensor(grad).to(parameter.dtype)
        parameter.grad = None if given_grad is None else given_grad.clone()
    return control.apply(named, **facts)


def grad_of(named, index=0):
    return named[index][1].grad


def pair_with_cosine(cosine, g_norm=1.0, p_norm=1.0, size=100, seed=0):
    """Float32 g and p of the given lengths and cosine."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    e, f = torch.linalg.qr(basis).Q.T
    g = cosine * e + math.sqrt(1 - cosine**2) * f
    return (g * g_norm).float(), (e * p_norm).float()


def test_public_signature_of_the_constructor():
    parameters = inspect.signature(sidestep.GradientControl).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "reference": "previous",
        "space": "gradient",
        "low": 0.1,
        "high": 0.6,
        "strength": 1.0,
        "residual": None,
        "above": "skip",
        "damp_power": 2.0,
        "drift_scale": 0.1,
        "max_skips": 4,
        "calibrate_steps": 50,
        "mode": "control",
        "snapshot": "raw",
        "snapshot_dtype": "float32",
        "snapshot_device": "same",
    }
    facts = list(inspect.signature(sidestep.GradientControl.apply).parameters)[1:]
    assert facts == ["named_parameters", "max_norm", "batch", "lag", "drift", "behaviour"]


@pytest.mark.parametrize("strength", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("cosine", [0.2, 0.6, 0.95])
def test_projection_keeps_its_promises(strength, cosine):
    g, p = pair_with_cosine(cosine, g_norm=0.1)
    control = GradientControl(strength=strength, high=1.0)
    named = one(g)
    step(control, named, p)
    record = step(control, named, g)
    applied, a = grad_of(named).double(), strength
    assert record.regime == "project"
    assert record.cosine == pytest.approx(cosine, abs=1e-6)
    assert float(applied @ p.double()) == pytest.approx((1 - a) * cosine * 0.1, abs=1e-6 * 0.1)
    wanted_norm = 0.1 * math.sqrt(1 - (2 * a - a * a) * cosine**2)
    assert float(applied.norm()) == pytest.approx(wanted_norm, rel=1e-6)
    assert record.norm_applied == pytest.approx(wanted_norm, rel=1e-6)
    assert record.norm_raw == pytest.approx(0.1, rel=1e-6)
    wanted_cosine = float(applied @ p.double() / applied.norm())
    assert record.cosine_applied == pytest.approx(wanted_cosine, abs=1e-6)


def test_the_circulating_summary_is_dimensionally_off_and_ours_is_not():
    """g - a cos(g, p) p at cosine 0.6, |g| = 0.1, |p| = 1 reverses the direction."""
    g, p = pair_with_cosine(0.6, g_norm=0.1)
    summary = g - 0.6 * p
    assert float(summary @ p / summary.norm()) == pytest.approx(-0.989, abs=1e-3)
    assert float(summary.norm() / g.norm()) == pytest.approx(5.5, abs=0.05)
    control, named = GradientControl(high=1.0), one(g)
    step(control, named, p)
    record = step(control, named, g)
    assert float(grad_of(named) @ p) == pytest.approx(0.0, abs=1e-7)
    assert record.cosine_applied == pytest.approx(0.0, abs=1e-6)
    assert record.norm_applied == pytest.approx(0.08, rel=1e-6)


@pytest.mark.parametrize("g_scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("p_scale", [1e-25, 1.0, 1e20])
def test_projection_holds_when_lengths_differ_by_more_than_float32_spans(g_scale, p_scale):
    g, p = pair_with_cosine(0.5, g_norm=g_scale, p_norm=p_scale)
    control, named = GradientControl(), one(g)
    step(control, named, p)
    record = step(control, named, g)
    assert record.regime == "project"
    left = float(grad_of(named).double() @ p.double())
    assert abs(left) <= 1e-6 * g_scale * p_scale


@pytest.mark.parametrize("factor", [1.0, 10.0, 0.1])
def test_b16_a_forced_projection_of_a_parallel_gradient_leaves_rounding_only(factor):
    p = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    g = factor * p
    control, named = GradientControl(above="project"), one(g)
    optimizer = torch.optim.SGD([named[0][1]], lr=1.0)
    step(control, named, p)
    record = step(control, named, g)
    assert record.regime == "project"
    assert record.cosine == pytest.approx(1.0, abs=1e-9)
    applied = grad_of(named).double()
    size = float(g.double().norm() * p.double().norm())
    assert abs(float(applied @ p.double())) <= 1e-6 * size
    assert record.cosine_applied is None  # what is left has no direction
    optimizer.step()
    assert named[0][1].norm() <= 1e-6 * g.norm()


def test_rounding_left_of_a_huge_parallel_gradient_is_still_clipped():
    p = 1e20 * torch.randn(1000, generator=torch.Generator().manual_seed(1))
    control, named = GradientControl(above="project"), one(p)
    step(control, named, p)
    step(control, named, 3.0 * p, max_norm=1.0)
    assert grad_of(named).double().norm() <= 1.0


def test_pass_leaves_the_gradient_bitwise_alone():
    g, p = pair_with_cosine(0.05)
    control, named = GradientControl(), one(g)
    step(control, named, p)
    record = step(control, named, g)
    assert (record.regime, record.reason) == ("pass", "at most low")
    assert torch.equal(grad_of(named), g)
    assert record.cosine_applied == record.cosine


def test_skip_leaves_the_gradient_and_is_capped():
    control, named = GradientControl(max_skips=2), one([0.0, 0.0])
    records = [step(control, named, [1.0, 1.0], max_norm=0.5) for _ in range(7)]
    regimes = [record.regime for record in records]
    assert regimes == ["undefined", "skip", "skip", "project", "skip", "skip", "project"]
    assert [record.skips_in_a_row for record in records] == [0, 1, 2, 0, 1, 2, 0]
    skipped = records[1]
    assert skipped.cosine == pytest.approx(1.0)
    assert (skipped.cosine_applied, skipped.norm_applied, skipped.clip_factor) == (None, 0.0, 1.0)
    step(control, named, [1.0, 1.0], max_norm=0.5)
    assert grad_of(named).tolist() == [1.0, 1.0]


def test_a_skipped_step_refreshes_the_snapshot():
    control, named = GradientControl(), one([0.0, 0.0])
    step(control, named, [1.0, 0.0])
    assert step(control, named, [1.0, 0.2]).regime == "skip"
    assert step(control, named, [1.0, 0.2]).cosine == pytest.approx(1.0)


def test_damp_tells_the_scale_and_leaves_the_gradient():
    g, p = pair_with_cosine(0.9)
    control, named = GradientControl(above="damp"), one(g)
    step(control, named, p)
    record = step(control, named, g)
    assert (record.regime, record.reason) == ("damp", "above high")
    assert record.step_scale == pytest.approx(0.01, rel=1e-4)
    assert torch.equal(grad_of(named), g)


def test_the_raw_snapshot_keeps_the_cosine_of_the_stream_and_the_applied_one_oscillates(caplog):
    """method.md: 0.61, 0.29, 0.55, 0.37 on a stream with a constant mean."""
    size, steps = 20000, 6
    cosines = {}
    for snapshot in ("raw", "applied"):
        generator = torch.Generator().manual_seed(0)
        control = GradientControl(low=0.0, high=1.0, snapshot=snapshot)
        named, noise_size = one(torch.zeros(size)), math.sqrt(1 / 0.61 - 1)
        mean = torch.randn(size, generator=generator)
        mean /= mean.norm()
        records = []
        for _ in range(steps):
            noise = torch.randn(size, generator=generator) * noise_size / math.sqrt(size)
            records.append(step(control, named, mean + noise))
        cosines[snapshot] = [record.cosine for record in records[1:]]
    assert cosines["raw"] == pytest.approx([0.61] * 5, abs=0.02)
    assert cosines["applied"][:4] == pytest.approx([0.61, 0.29, 0.55, 0.37], abs=0.02)
    assert "applied" in caplog.text


def test_an_applied_snapshot_is_never_what_rounding_left():
    control, named = GradientControl(above="project", snapshot="applied"), one([0.0, 0.0])
    for _ in range(2):
        step(control, named, [1.0, 0.1])
    assert step(control, named, [1.0, 0.1]).cosine == pytest.approx(1.0)


@pytest.mark.parametrize("mode", ["control", "observe", "off"])
def test_max_norm_clips_as_torch_does_in_every_mode(mode):
    generator = torch.Generator().manual_seed(0)
    ours = [(str(n), Parameter(torch.zeros(n))) for n in (5, 50, 500)]
    theirs = [Parameter(torch.zeros(n)) for n in (5, 50, 500)]
    control = GradientControl(mode=mode, low=1.0, high=1.0)
    for max_norm in (0.3, 1e6):
        for (_, a), b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        record = control.apply(ours, max_norm=max_norm)
        norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        assert record.norm_raw == pytest.approx(float(norm), rel=1e-6)
        assert record.clip_factor == pytest.approx(min(1.0, max_norm / (float(norm) + 1e-6)))
        for (_, a), b in zip(ours, theirs, strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-6, atol=0)


def test_the_clip_factor_follows_from_the_products_after_projection():
    g, p = pair_with_cosine(0.5, g_norm=8.0)
    control, named = GradientControl(), one(g)
    step(control, named, p)
    record = step(control, named, g, max_norm=2.0)
    assert record.norm_applied == pytest.approx(8.0 * math.sqrt(0.75), rel=1e-6)
    assert float(grad_of(named).norm()) == pytest.approx(2.0, rel=1e-6)


def test_b06_a_float16_gradient_is_clipped_from_its_true_norm():
    named = one([0.0], torch.float16)
    record = step(GradientControl(), named, [300.0], max_norm=1.0)
    assert record.norm_raw == 300.0
    assert grad_of(named).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("snapshot_dtype", ["float32", "bfloat16"])
def test_half_precision_gradients_are_projected_to_within_their_rounding(dtype, snapshot_dtype):
    g, p = pair_with_cosine(0.5, size=5000)
    control = GradientControl(snapshot_dtype=snapshot_dtype)
    named = one(torch.zeros(5000), dtype)
    step(control, named, p)
    record = step(control, named, g)
    assert record.cosine == pytest.approx(0.5, abs=1e-3)
    assert grad_of(named).dtype == dtype
    assert abs(float(grad_of(named).double() @ p.double())) <= torch.finfo(dtype).eps


def test_no_decision_on_the_first_step():
    control, named = GradientControl(), one([0.0, 0.0])
    record = step(control, named, [3.0, 4.0])
    assert (record.regime, record.reason, record.cosine) == ("undefined", "first step", None)
    assert (record.norm_raw, record.norm_applied, record.step) == (5.0, 5.0, 0)
    assert step(control, named, [3.0, 4.0]).step == 1


def test_b01_a_zero_vector_has_no_cosine_and_nothing_becomes_nan():
    control, named = GradientControl(), one([0.0, 0.0])
    for grad in ([0.0, 0.0], [0.0, 0.0], [1.0, 2.0]):
        record = step(control, named, grad)
        assert (record.regime, record.cosine, record.cosine_applied) == ("undefined", None, None)
        assert grad_of(named).tolist() == grad
        assert "NaN" not in json.dumps(record.as_dict())
    # A stored zero reference (p = 0) as a loaded state can hold it.
    state = control.state_dict()
    state["snapshot"]["w"].zero_()
    control.load_state_dict(state)
    record = step(control, named, [1.0, 2.0])
    assert (record.regime, record.reason) == ("undefined", "zero reference")
    assert grad_of(named).tolist() == [1.0, 2.0]


def test_b02_b33_a_step_without_signal_does_not_replace_the_snapshot():
    control, named = GradientControl(high=1.0), one([0.0, 0.0])
    step(control, named, [1.0, 0.0])
    record = step(control, named, [0.0, 0.0], max_norm=1.0)
    assert (record.regime, record.reason) == ("undefined", "zero gradient")
    assert (record.norm_raw, record.norm_applied, record.clip_factor) == (0.0, 0.0, 1.0)
    after = step(control, named, [0.6, 0.8])
    assert after.cosine == pytest.approx(0.6)
    assert grad_of(named).tolist() == pytest.approx([0.0, 0.8])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_b09_b34_a_non_finite_step_changes_nothing_and_is_forgotten(bad, max_norm):
    named = [("a", Parameter(torch.zeros(4))), ("b", Parameter(torch.zeros(2)))]
    control = GradientControl(max_skips=1)
    step(control, named, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])
    step(control, named, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])  # one real skip
    before = control.state_dict()
    broken = torch.tensor([1.0, 2.0, bad, 4.0])
    record = step(control, named, broken.clone(), [1.0, 1.0], max_norm=max_norm)
    assert (record.regime, record.reason, record.norm_raw) == ("skip", "non-finite", None)
    assert torch.equal(grad_of(named).nan_to_num(7.0), broken.nan_to_num(7.0))
    assert grad_of(named, 1).tolist() == [1.0, 1.0]
    assert record.skips_in_a_row == 1  # not counted
    after = control.state_dict()
    assert after.pop("snapshot").keys() == before.pop("snapshot").keys()
    assert {**before, "step": 3} == after
    assert "NaN" not in json.dumps(record.as_dict())
    record = step(control, named, [0.0, 1.0, 0.0, 0.0], [0.0, 1.0])
    assert (record.regime, record.cosine) == ("pass", 0.0)


def test_b09_huge_finite_gradients_are_decided_as_usual():
    control, named = GradientControl(), one(torch.zeros(100))
    huge = torch.full((100,), 1e20)
    step(control, named, huge)
    record = step(control, named, huge, max_norm=1.0)
    assert record.cosine == pytest.approx(1.0)
    assert record.norm_raw == pytest.approx(1e21)


@pytest.mark.parametrize("value", [1e-10, 1e-25])
def test_b08_tiny_gradients_are_decided_as_usual(value):
    control, named = GradientControl(), one(torch.zeros(100))
    step(control, named, value * torch.ones(100))
    assert step(control, named, value * torch.ones(100)).cosine == pytest.approx(1.0, abs=1e-12)


def test_b10_none_counts_as_zero_stays_none_and_the_snapshot_lines_up_by_name():
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl(high=1.0)
    step(control, named, [3.0], [4.0])
    record = step(control, named, [2.0], None)
    assert record.cosine == pytest.approx(3 / 5)
    assert grad_of(named, 1) is None
    # b had no gradient: its part of the reference is zero now.
    record = step(control, named, [1.0], [1.0])
    assert record.cosine == pytest.approx(1 / math.sqrt(2))
    assert record.reason == "above low"
    record = step(control, named, [0.0], [5.0])
    assert record.cosine == pytest.approx(1 / math.sqrt(2))


def test_b10_the_promised_product_holds_where_a_gradient_is_none():
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl(high=1.0, strength=0.5)
    step(control, named, [3.0, 0.0], [4.0])
    record = step(control, named, [2.0, 1.0], None)
    assert float(grad_of(named) @ torch.tensor([3.0, 0.0])) == pytest.approx(3.0)
    assert record.norm_applied == pytest.approx(float(grad_of(named).norm()))
    assert record.cosine_applied == pytest.approx(3.0 / (5 * math.sqrt(2)))


def test_b10_a_weight_without_gradient_is_not_moved_by_decay():
    named = [("a", Parameter(torch.ones(1))), ("b", Parameter(torch.ones(1)))]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.5)
    control = GradientControl(high=1.0)
    step(control, named, [1.0], [1.0])
    optimizer.step()
    before = named[1][1].clone()
    step(control, named, [1.0], None)
    optimizer.step()
    assert torch.equal(named[1][1], before)


def test_b11_a_new_parameter_is_left_alone_and_told_once(caplog):
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(2)))]
    named[1][1].requires_grad_(False)
    control = GradientControl()
    step(control, named, [1.0, 0.0], None)
    named[1][1].requires_grad_(True)
    with caplog.at_level(logging.WARNING, logger="sidestep.control"):
        record = step(control, named, [0.5, 0.9], [5.0, 7.0])
        assert record.cosine == pytest.approx(0.5 / math.hypot(0.5, 0.9))
        assert record.regime == "project"
        assert record.reason == "above low (parameter set changed)"
        assert grad_of(named).tolist() == pytest.approx([0.0, 0.9])
        assert grad_of(named, 1).tolist() == [5.0, 7.0]
        wanted = math.sqrt(0.9**2 + 25 + 49)
        assert record.norm_applied == pytest.approx(wanted, rel=1e-6)
        step(control, named, [0.5, 0.9], [5.0, 7.0])
    assert len(caplog.records) == 1
    assert "1 are new (b)" in caplog.text


def test_b11_the_notice_is_not_repeated_while_the_reference_stays(caplog):
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl()
    step(control, named[:1], [1.0])
    for _ in range(3):
        step(control, named, [math.nan], [1.0])
    step(control, named, [-1.0], [1.0])
    assert len(caplog.records) == 1


def test_b11_a_parameter_that_left_is_not_compared(caplog):
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl()
    step(control, named, [1.0], [10.0])
    record = step(control, named[:1], [-1.0])
    assert record.cosine == pytest.approx(-1.0)
    assert "1 gone (b)" in caplog.text
    other = [("c", Parameter(torch.zeros(1)))]
    assert step(control, other, [1.0]).reason == "no shared parameter"


def test_b13_a_sparse_gradient_is_refused_by_name_and_off_lets_it_through():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    named = [("tokens", embedding.weight)]
    with pytest.raises(ValueError, match=r"'tokens' is sparse.*sparse=False"):
        GradientControl().apply(named)
    record = GradientControl(mode="off").apply(named)
    assert (record.regime, record.reason, record.norm_raw) == ("pass", "off", None)
    with pytest.raises(ValueError, match="'tokens' is sparse"):
        GradientControl(mode="off").apply(named, max_norm=1.0)


def test_b14_the_snapshot_is_a_copy_even_of_a_view_of_a_bucket():
    bucket = torch.zeros(4)
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(2)))]
    control = GradientControl(mode="observe")
    for k, (_, parameter) in enumerate(named):
        parameter.grad = bucket[2 * k : 2 * k + 2]
    for values, cosine in (([1, 0, 0, 0], None), ([0, 1, 0, 0], 0.0), ([0, 1, 0, 1], 0.5**0.5)):
        bucket.copy_(torch.tensor(values))
        record = control.apply(named)
        assert record.cosine == (None if cosine is None else pytest.approx(cosine))


def test_b14_zero_grad_in_place_and_backward_do_not_reach_the_snapshot():
    weight = Parameter(torch.tensor([1.0, 1.0]))
    control = GradientControl(mode="observe")
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for direction, cosine in (([1.0, 0.0], None), ([0.0, 1.0], 0.0)):
        optimizer.zero_grad(set_to_none=False)
        (weight * torch.tensor(direction)).sum().backward()
        assert control.apply([("w", weight)]).cosine == cosine


@pytest.mark.parametrize("kind", ["view", "history", "transposed", "broadcast"])
def test_b15_odd_gradients_are_written_and_survive_zero_grad(kind):
    weight = Parameter(torch.zeros(3, 2))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    control = GradientControl(high=1.0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(3, 2)
    control.apply([("w", weight)])
    if kind == "view":
        weight.grad = torch.stack([torch.zeros(3, 2), values])[1]
    elif kind == "history":
        source = values.clone().requires_grad_(True)
        weight.grad = source * 1.0
    elif kind == "transposed":
        weight.grad = values.T.contiguous().T
    else:
        values = torch.full((3, 2), 2.0)
        weight.grad = torch.tensor(2.0).expand(3, 2)
    record = control.apply([("w", weight)])
    assert record.regime == "project"
    wanted = values - values.mean()
    assert torch.allclose(weight.grad, wanted, atol=1e-6)
    optimizer.step()
    if kind != "view":  # torch itself cannot detach views in place
        optimizer.zero_grad(set_to_none=False)
    assert control.apply([("w", weight)]) is not None


def test_b18_a_lora_adapter_that_starts_at_zero_is_fine_and_the_frozen_base_does_not_count():
    torch.manual_seed(0)
    base = Parameter(torch.randn(4, 4), requires_grad=False)
    base.grad = torch.full((4, 4), 100.0)  # a left-over
    a, b = Parameter(torch.randn(1, 4)), Parameter(torch.zeros(4, 1))
    named = [("base", base), ("a", a), ("b", b)]
    control = GradientControl()
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((base + b @ a) @ torch.ones(4)).square().sum().backward()
        record = control.apply(named)
        norm = math.sqrt(float(a.grad.square().sum() + b.grad.square().sum()))
        if record.regime == "undefined":
            assert record.norm_raw == pytest.approx(norm)
            assert float(a.grad.norm()) == 0.0
        assert math.isfinite(record.norm_applied)
        optimizer.step()
    assert record.cosine is not None


def test_b21_every_gradient_none_is_refused_with_the_way_out():
    named = [("w", Parameter(torch.zeros(2)))]
    for mode in ("control", "observe"):
        with pytest.raises(ValueError, match=r"every gradient is None.*safe_get_full_grad"):
            GradientControl(mode=mode).apply(named)
    assert GradientControl(mode="off").apply(named).norm_raw == 0.0


def test_b54_steps_on_one_batch_are_reported_apart_and_not_acted_on():
    control, named = GradientControl(high=1.0), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], batch=7)
    for _ in range(3):
        record = step(control, named, [1.0, 0.5], batch=7)
        assert (record.regime, record.reason) == ("pass", "same batch")
        assert record.cosine is None and record.cosine_applied is None
        assert grad_of(named).tolist() == [1.0, 0.5]
    assert record.cosine_within_batch == pytest.approx(1.0)
    record = step(control, named, [1.0, 0.0], batch=8)
    assert (record.regime, record.cosine_within_batch) == ("project", None)
    assert record.cosine == pytest.approx(1 / math.hypot(1, 0.5))
    assert step(control, named, [1.0, 0.0]).regime == "project"  # not said: not the same


def test_a_non_finite_step_between_does_not_make_two_batches_one():
    control, named = GradientControl(), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], batch=1)
    step(control, named, [math.nan, 0.0], batch=2)
    assert step(control, named, [1.0, 0.0], batch=2).regime == "skip"


def test_tied_weights_count_once_and_a_name_for_two_is_refused():
    tied = Parameter(torch.zeros(2))
    tied.grad = torch.tensor([3.0, 4.0])
    assert GradientControl().apply([("a", tied), ("b", tied)]).norm_raw == 5.0
    with pytest.raises(ValueError, match="named 'a'"):
        GradientControl().apply([("a", tied), ("a", Parameter(torch.zeros(1)))])


@pytest.mark.parametrize("named", [[], [("w", Parameter(torch.zeros(1), requires_grad=False))]])
def test_no_trained_parameter_is_refused(named):
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        GradientControl().apply(named)


def test_a_gradient_of_another_kind_is_refused_by_name():
    weight = Parameter(torch.zeros(2, dtype=torch.complex64))
    weight.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'w' has dtype torch.complex64"):
        GradientControl().apply([("w", weight)])


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"max_norm": 0.0}, "max_norm=0.0"),
        ({"max_norm": math.nan}, "max_norm=nan"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"lag": -1.0}, "lag=-1.0"),
        ({"drift": math.inf}, "drift=inf"),
    ],
)
def test_wrong_facts_about_a_step_are_named(facts, name):
    with pytest.raises(ValueError, match=name):
        step(GradientControl(), one([0.0]), [1.0], **facts)


def test_observe_decides_and_changes_nothing():
    control, named = GradientControl(mode="observe"), one([0.0, 0.0])
    step(control, named, [1.0, 0.0])
    record = step(control, named, [1.0, 0.1])
    assert (record.regime, record.decision) == ("pass", "skip")
    assert record.reason == "observe: would skip, above high"
    assert record.cosine_applied == record.cosine
    record = step(control, named, [1.0, 3.0])
    assert (record.regime, record.decision) == ("pass", "project")
    assert grad_of(named).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_b09_a_non_finite_gradient_is_never_clipped_to_zeros(mode, bad):
    control, named = GradientControl(mode=mode), one([0.0, 0.0])
    record = step(control, named, [bad, 3.0], max_norm=1.0)
    assert grad_of(named)[1].item() == 3.0
    assert (record.clip_factor, record.norm_raw, record.norm_applied) == (1.0, None, None)
    if mode == "observe":
        assert (record.regime, record.decision) == ("undefined", "skip")
        assert record.reason == "non-finite"


def test_the_environment_overrides_the_mode(monkeypatch, caplog):
    monkeypatch.setenv("SIDESTEP_MODE", "observe")
    assert GradientControl(mode="control").mode == "observe"
    assert "SIDESTEP_MODE" in caplog.text
    monkeypatch.setenv("SIDESTEP_MODE", "aus")
    with pytest.raises(ValueError, match="SIDESTEP_MODE='aus'"):
        GradientControl()
    monkeypatch.setenv("SIDESTEP_MODE", "")
    assert GradientControl(mode="off").mode == "off"


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_pattern_of_shapes_dtypes_and_nones_keeps_the_promise(data):
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)
    )
    named = [(str(k), Parameter(torch.zeros(shape))) for k, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    strength = data.draw(st.sampled_from([0.3, 1.0]))
    control = GradientControl(low=0.0, high=1.0, strength=strength)
    previous = None
    for _ in range(3):
        raw = []
        for _, parameter in named:
            missing = data.draw(st.booleans())
            grad = None if missing else torch.randn(parameter.shape, generator=generator) + 0.5
            raw.append(grad)
        if all(grad is None for grad in raw):
            continue
        record = step(control, named, *raw)
        assert [grad_of(named, k) is None for k in range(len(raw))] == [g is None for g in raw]
        flat = [flatten(gs, named) for gs in (raw, [p.grad for _, p in named])]
        g, applied = flat
        if record.cosine is not None:
            size = float(g.norm() * previous.norm())
            assert record.cosine == pytest.approx(float(g @ previous) / size, abs=1e-6)
            share = strength if record.regime == "project" else 0.0
            promised = (1 - share) * float(g @ previous)
            assert abs(float(applied @ previous) - promised) <= 1e-6 * size
            assert abs(record.norm_applied - float(applied.norm())) <= 1e-6 * float(g.norm())
        if float(g.norm()) > 0:
            previous = g


def flatten(grads, named):
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.double().reshape(-1)
            for g, (_, p) in zip(grads, named, strict=True)
        ]
    )


@given(exponents=st.tuples(st.integers(-60, 40), st.integers(-60, 40)), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_what_is_done_does_not_depend_on_the_scale(exponents, seed):
    g, p = pair_with_cosine(0.4, seed=seed)
    written = []
    for g_scale, p_scale in ((1.0, 1.0), (2.0 ** exponents[0], 2.0 ** exponents[1])):
        control, named = GradientControl(), one(g)
        step(control, named, p * p_scale)
        record = step(control, named, g * g_scale)
        written.append((record.cosine, record.regime, grad_of(named) / g_scale))
    (cosine, regime, plain), (scaled_cosine, scaled_regime, scaled) = written
    assert scaled_cosine == pytest.approx(cosine, abs=1e-12)
    assert (scaled_regime, regime) == ("project", "project")
    assert torch.allclose(plain, scaled, rtol=0, atol=3e-7)
