"""What a cosine calls for, and what wrong rules say."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.control import GradientControl
from sidestep.control.geometry import Pair, products
from sidestep.control.plan import make_plan
from sidestep.control.regimes import decide


def decided(cosine, skips_in_a_row=0, reach=1.0, drift=0.0, **changes):
    settings = GradientControl(**changes).settings
    thresholds = settings.low, settings.high
    return decide(settings, thresholds, cosine, skips_in_a_row, reach, drift)


@pytest.mark.parametrize(
    ("cosine", "regime"),
    [
        (-1.0, "pass"),
        (-0.5, "pass"),
        (0.0, "pass"),
        (0.1, "pass"),
        (0.1000001, "project"),
        (0.6, "project"),
        (0.6000001, "skip"),
        (1.0, "skip"),
    ],
)
def test_regimes_are_closed_above(cosine, regime):
    assert decided(cosine).regime == regime


@given(cosine=st.floats(-1, 0), low=st.floats(-1, 1))
def test_a_cosine_that_is_not_positive_is_never_acted_on(cosine, low):
    decision = decided(cosine, low=low, high=1.0)
    assert (decision.regime, decision.removed, decision.step_scale) == ("pass", 0.0, 1.0)


def test_after_max_skips_in_a_row_the_step_is_projected():
    assert [decided(0.9, n).regime for n in range(6)] == ["skip"] * 4 + ["project"] * 2
    assert decided(0.9, 4).reason == "max_skips reached"
    assert decided(0.9, max_skips=0).regime == "project"


@pytest.mark.parametrize(("power", "scale"), [(2.0, 0.04), (1.0, 0.2)])
def test_damp_scales_the_step_by_a_power_of_what_is_not_aligned(power, scale):
    decision = decided(0.8, above="damp", damp_power=power)
    assert (decision.regime, decision.removed) == ("damp", 0.0)
    assert decision.step_scale == pytest.approx(scale)


@given(
    low=st.floats(0.0, 0.99),
    fraction=st.floats(0, 1),
    cosine=st.floats(0.001, 0.9999),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_residual_is_the_cosine_left_behind(low, fraction, cosine, seed):
    residual = low * fraction
    if cosine <= max(low, 1e-3):
        return
    decision = decided(cosine, low=low, high=1.0, residual=residual)
    assert 0.0 <= decision.removed <= 1.0
    c, s = cosine, math.sqrt(1 - cosine**2)
    g, p = torch.tensor([c, s], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    left = g - decision.removed * c * p
    assert float(left @ p / left.norm()) == pytest.approx(residual, abs=1e-6)


def test_residual_holds_where_a_part_of_the_reference_has_no_gradient():
    pairs = [
        Pair(torch.tensor([3.0, 1.0]), torch.tensor([3.0, 0.0])),
        Pair(None, torch.tensor([2.0])),
    ]
    measured = products(pairs)
    decision = decided(measured.cosine, reach=measured.reach, low=0.3, high=1.0, residual=0.2)
    plan = make_plan(measured, decision, 1.2e-7)
    left = torch.tensor([3.0, 1.0, 0.0]) - plan.coefficient * torch.tensor([3.0, 0.0, 0.0])
    p = torch.tensor([3.0, 0.0, 2.0])
    assert float(left @ p / (left.norm() * p.norm())) == pytest.approx(0.2, abs=1e-6)
    assert plan.cosine == pytest.approx(0.2, abs=1e-9)
    assert plan.norm == pytest.approx(float(left.norm()), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"low": 0.7, "high": 0.6}, ["low=0.7", "high=0.6"]),
        ({"low": -1.5}, ["low=-1.5"]),
        ({"high": 1.01}, ["high=1.01"]),
        ({"low": math.nan}, ["low=nan"]),
        ({"high": True}, ["high=True"]),
        ({"strength": 0.0}, ["strength=0.0"]),
        ({"strength": 1.5}, ["strength=1.5"]),
        ({"strength": -0.1}, ["strength=-0.1"]),
        ({"residual": 0.2}, ["residual=0.2", "low=0.1"]),
        ({"residual": -0.1}, ["residual=-0.1"]),
        ({"residual": 0.05, "strength": 0.5}, ["residual=0.05", "strength=0.5"]),
        ({"residual": 1.0, "low": 1.0, "high": 1.0}, ["residual=1.0"]),
        ({"above": "stop"}, ["above='stop'", "damp"]),
        ({"damp_power": 0.0}, ["damp_power=0.0"]),
        ({"damp_power": math.inf}, ["damp_power=inf"]),
        ({"max_skips": -1}, ["max_skips=-1"]),
        ({"max_skips": 2.5}, ["max_skips=2.5"]),
        ({"drift_scale": 0.0}, ["drift_scale=0.0"]),
        ({"calibrate_steps": 0}, ["calibrate_steps=0"]),
        ({"mode": "on"}, ["mode='on'", "observe"]),
        ({"snapshot": "clipped"}, ["snapshot='clipped'", "applied"]),
        ({"snapshot_dtype": "float16"}, ["snapshot_dtype='float16'", "bfloat16"]),
        ({"snapshot_device": "cuda"}, ["snapshot_device='cuda'", "cpu"]),
        ({"reference": "last"}, ["reference='last'", "previous"]),
        ({"space": "weights"}, ["space='weights'", "gradient"]),
        ({"low": "often"}, ["low='often'", "unknown"]),
        ({"secant_memory": 1.0}, ["secant_memory=1.0", "below 1"]),
        ({"secant_memory": -0.1}, ["secant_memory=-0.1"]),
        ({"scope": "layer"}, ["scope='layer'", "block"]),
        ({"strength": "full"}, ["strength='full'", "secant"]),
        ({"strength": "drift"}, ["strength='drift'", "reference='previous'", "displacement"]),
        ({"strength": "secant", "reference": "ema"}, ["strength='secant'", "reference='ema'"]),
        (
            {"strength": "secant", "reference": "displacement", "space": "update"},
            ["strength='secant'", "space='update'"],
        ),
        ({"space": "update", "above": "skip"}, ["above='skip'", "space='update'", "project"]),
        ({"low": "calibrate", "residual": 0.1}, ["residual=0.1", "low='calibrate'"]),
        (
            {"reference": "displacement", "strength": "drift", "residual": 0.05},
            ["residual=0.05", "strength=drift"],
        ),
        (
            {"reference": "displacement", "high": "calibrate"},
            ["high='calibrate'", "reference='displacement'"],
        ),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(arguments, names):
    with pytest.raises(ValueError) as caught:
        GradientControl(**arguments)
    for name in names:
        assert name in str(caught.value)
