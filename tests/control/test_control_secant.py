"""What strength="secant" takes out by curvature, and "drift" by how far the policy moved."""

import math

import pytest
import torch
from control_steps import grad_of, one, step
from torch.nn import Parameter

from sidestep.control import GradientControl


def secant(**changes):
    return GradientControl(reference="displacement", strength="secant", **changes)


def bowl(control, curvatures, moves, noise=0.0, seed=0):
    """Stale gradients of a bowl, at behaviour weights; the current weights are `moves` on."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.tensor(curvatures, dtype=torch.float64)
    named = one(torch.zeros(len(curvatures)), torch.float64)
    weight, records = named[0][1], []
    behaviour = torch.ones(len(curvatures), dtype=torch.float64)
    for move in moves:
        behaviour = behaviour + 0.1 * torch.randn(len(h), generator=generator, dtype=torch.float64)
        jitter = noise * torch.randn(len(h), generator=generator, dtype=torch.float64)
        with torch.no_grad():
            weight.copy_(behaviour + torch.as_tensor(move, dtype=torch.float64))
        raw = h * behaviour + jitter
        records.append(step(control, named, raw, behaviour={"w": behaviour}))
    return records, grad_of(named), raw, weight.detach(), behaviour


def test_on_a_bowl_with_one_curvature_the_stale_gradient_becomes_the_fresh_one():
    records, applied, raw, weight, _ = bowl(secant(), [2.0] * 3, [[-0.2, 0.1, 0.3]] * 4)
    assert records[-1].curvature == pytest.approx(2.0, rel=1e-6)
    assert torch.allclose(applied, 2.0 * weight, atol=1e-6)
    assert not torch.allclose(applied, raw, atol=0.1)
    assert [r.regime for r in records] == ["pass", "project", "project", "project"]
    assert records[0].reason == "no curvature"


@pytest.mark.parametrize("move", [-3.0, 0.5])
def test_both_branches_take_h_times_the_way_but_never_past_zero(move):
    """Down the bowl the gradient is spent at most to zero; up the bowl it grows by h d."""
    records, applied, raw, weight, behaviour = bowl(secant(), [1.0], [[move]] * 3)
    d = float(weight - behaviour)
    share = float(raw) * d / d**2
    if move < 0:
        assert share < 0 < records[-1].curvature
        spent = min(records[-1].curvature, -share)
        assert float(applied) == pytest.approx(float(raw) + spent * d, abs=1e-9)
        assert float(applied) == pytest.approx(max(0.0, float(weight)), abs=1e-9)
        assert 0.0 < records[-1].removed <= 1.0
    else:
        assert share > 0
        assert float(applied) == pytest.approx(float(weight), abs=1e-6)
        assert records[-1].removed < 0.0


def test_a_gradient_across_the_way_gets_h_d_too():
    """share = 0 is no special case: g' = g + h d."""
    control, named = secant(), one([0.0, 0.0], torch.float64)
    for b in ([-1.0, 0.0], [1.0, 0.0]):
        weight = torch.tensor(b, dtype=torch.float64)
        step(control, named, 3.0 * weight, behaviour={"w": weight})
    with torch.no_grad():
        named[0][1].copy_(torch.tensor([1.0, 1.0]))  # d = (0, 1)
    record = step(
        control, named, [3.0, 0.0], behaviour={"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    )
    assert record.cosine == 0.0
    assert grad_of(named).tolist() == pytest.approx([3.0, 3.0])
    assert record.norm_applied == pytest.approx(math.sqrt(18))
    assert record.cosine_applied == pytest.approx(-math.sqrt(0.5))  # the reference is -d
    assert record.removed is None


def test_a_negative_curvature_is_taken_for_none():
    records, applied, raw, *_ = bowl(secant(), [-1.0, -2.0], [[0.3, 0.1]] * 4)
    assert {r.curvature for r in records} == {0.0}
    assert records[-1].reason == "no curvature"
    assert torch.equal(applied, raw)


def test_thresholds_and_skips_have_no_use():
    records, *_ = bowl(secant(low=0.9, high=0.9, above="skip"), [2.0] * 3, [[-0.2, 0.1, 0.3]] * 4)
    assert {r.regime for r in records[1:]} == {"project"}


@pytest.mark.parametrize("memory", [0.98, 0.5, 0.0])
def test_the_means_forget_at_the_rate_of_secant_memory(memory):
    control, named = secant(secant_memory=memory), one([0.0], torch.float64)
    slopes, behaviour, grad = [1.0, 1.0, 5.0, 2.0], 0.0, 0.0
    step(control, named, [1e-9], behaviour={"w": torch.tensor([0.0], dtype=torch.float64)})
    along = squared = 0.0
    for slope in slopes:
        grad, behaviour = grad + slope * 0.5, behaviour + 0.5
        weights = {"w": torch.tensor([behaviour], dtype=torch.float64)}
        record = step(control, named, [grad], behaviour=weights)
        along = memory * along + (1 - memory) * slope * 0.25
        squared = memory * squared + (1 - memory) * 0.25
        assert record.curvature == pytest.approx(along / squared, rel=1e-6)


def test_weights_that_did_not_move_leave_the_curvature_alone():
    control = secant()
    bowl(control, [2.0, 2.0], [[0.1, 0.1]] * 3)
    named, generator = one(torch.zeros(2), torch.float64), torch.Generator().manual_seed(0)
    same, curvatures = {"w": torch.ones(2, dtype=torch.float64)}, set()
    for _ in range(4):
        grad = 10.0 + torch.rand(2, generator=generator)
        curvatures.add(step(control, named, grad, behaviour=same).curvature)
    assert len(curvatures) == 1  # one move, to `same`, and none after it
    assert curvatures.pop() > 0.0


def test_b02_b34_steps_without_signal_teach_nothing():
    control = secant()
    bowl(control, [2.0, 2.0], [[0.1, 0.1]] * 3)
    state = control.state_dict()
    named = one(torch.zeros(2), torch.float64)
    for grad in ([0.0, 0.0], [math.nan, 1.0]):
        step(control, named, grad, behaviour={"w": torch.full((2,), 9.0, dtype=torch.float64)})
    after = control.state_dict()
    assert after["scopes"] == state["scopes"]
    for key, tensor in state["snapshot"].items():
        assert torch.equal(tensor, after["snapshot"][key])


def test_a_missing_gradient_counts_as_zero_in_the_slope():
    control = secant()
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    for k, grads in enumerate((([1.0], [1.0]), ([3.0], None), ([3.0], [2.0]))):
        behaviour = {"a": torch.tensor([float(k)]), "b": torch.tensor([float(k)])}
        record = step(control, named, *grads, behaviour=behaviour)
    # <dg, db>: (2 - 1) then (0 + 2), each over |db|^2 = 2
    assert record.curvature == pytest.approx((0.98 * 1 + 2) / (0.98 * 2 + 2), rel=1e-6)


@pytest.mark.parametrize("snapshot_dtype", ["float32", "bfloat16"])
def test_behaviour_weights_are_kept_exactly_whatever_the_snapshot(snapshot_dtype):
    control = secant(snapshot_dtype=snapshot_dtype)
    named = one(torch.zeros(3))
    behaviour = torch.tensor([1.0001, 2.0002, 3.0003])
    step(control, named, [1.0, 2.0, 3.0], behaviour={"w": behaviour})
    snapshot = control.state_dict()["snapshot"]
    assert torch.equal(snapshot["behaviour:w"], behaviour)
    assert snapshot["w"].dtype == getattr(torch, snapshot_dtype)


def test_what_a_strength_needs_and_was_not_said_is_an_error():
    with pytest.raises(ValueError, match=r"strength='secant'.*note\(behaviour="):
        step(secant(), one([0.0]), [1.0], lag=4)
    control = GradientControl(reference="displacement", strength="drift")
    with pytest.raises(ValueError, match=r"strength='drift'.*note\(drift="):
        step(control, one([0.0]), [1.0], lag=4)
    off = GradientControl(reference="displacement", strength="drift", mode="off")
    assert step(off, one([0.0]), [1.0]).reason == "off"


@pytest.mark.parametrize(
    ("drift", "removed"), [(0.0, 0.0), (0.02, 0.2), (0.05, 0.5), (0.1, 1.0), (7.0, 1.0)]
)
def test_drift_scales_what_is_removed(drift, removed):
    control = GradientControl(
        reference="displacement", strength="drift", drift_scale=0.1, low=0.0, high=1.0
    )
    named = one([0.0, 0.0])
    behaviour = {"w": torch.tensor([2.0, 0.0])}
    record = step(control, named, [3.0, 4.0], drift=drift, behaviour=behaviour)
    assert grad_of(named).tolist() == pytest.approx([3.0 * (1 - removed), 4.0])
    assert record.removed == pytest.approx(removed)
    assert (record.regime, record.reason) == (
        ("project", "above low") if removed else ("pass", "no drift")
    )
