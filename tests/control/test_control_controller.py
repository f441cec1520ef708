"""GradientControl.apply: what is measured, decided and written."""

import inspect
import math

import pytest
import torch
from control_steps import flatten, grad_of, one, pair_with_cosine, step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

import sidestep
from sidestep.control import GradientControl


def test_public_signature_of_the_constructor():
    parameters = inspect.signature(sidestep.GradientControl).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "reference": "previous",
        "space": "gradient",
        "low": 0.1,
        "high": 0.6,
        "strength": 1.0,
        "residual": None,
        "above": None,  # skip, in space="update" project
        "damp_power": 2.0,
        "drift_scale": 0.1,
        "secant_memory": 0.98,
        "spring": None,
        "max_skips": 4,
        "calibrate_steps": 50,
        "scope": "model",
        "mode": "control",
        "snapshot": None,  # raw, in space="update" applied
        "snapshot_dtype": "float32",
        "snapshot_device": "same",
    }
    facts = list(inspect.signature(sidestep.GradientControl.apply).parameters)[1:7]
    assert facts == ["named_parameters", "max_norm", "batch", "lag", "drift", "behaviour"]
    gradient, update = GradientControl().settings, GradientControl(space="update").settings
    assert (gradient.above, gradient.snapshot) == ("skip", "raw")
    assert (update.above, update.snapshot) == ("project", "applied")


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


@pytest.mark.parametrize(("mode", "warnings"), [("control", 1), ("observe", 0)])
def test_a_control_that_skips_most_steps_says_so_once(mode, warnings, caplog):
    weight = Parameter(torch.zeros(3))
    control = GradientControl(low=0.1, high=0.5, mode=mode, max_skips=4)
    for _ in range(100):
        weight.grad = torch.tensor([1.0, 2.0, 3.0])  # always the same way
        control.apply([("w", weight)])
    told = [one for one in caplog.records if "steps were skipped" in one.getMessage()]
    assert len(told) == warnings
