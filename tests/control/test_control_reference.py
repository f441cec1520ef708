"""What a gradient is compared with: the exponential mean, and the displacement of the policy."""

import logging
import weakref

import pytest
import torch
from control_steps import grad_of, one, step
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach


def cosine(a, b):
    return float(a.double() @ b.double() / (a.double().norm() * b.double().norm()))


def gradient_stream(steps, size=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) + 0.5 for _ in range(steps)]


# ---- ema ----


@pytest.mark.parametrize("lag", [1, 2, 4.5, 16])
def test_ema_is_the_mean_of_past_gradients_with_weights_that_fall_by_the_horizon(lag):
    stream = gradient_stream(12)
    control, named = GradientControl(reference="ema", mode="observe"), one(stream[0])
    rho = 1 - 1 / lag
    for t, grad in enumerate(stream):
        record = step(control, named, grad, lag=lag)
        if t:
            weights = [rho ** (t - 1 - i) for i in range(t)]
            past = zip(weights, stream, strict=False)
            mean = sum(w * g.double() for w, g in past) / sum(weights)
            assert record.cosine == pytest.approx(cosine(grad, mean), abs=1e-6)
    newest = [rho ** (11 - i) for i in range(12)]
    mean = sum(w * g for w, g in zip(newest, stream, strict=True)) / sum(newest)
    assert torch.allclose(control.state_dict()["snapshot"]["w"], mean, atol=1e-6)


@pytest.mark.parametrize("lag", [0, 0.5, 1])
def test_ema_at_a_lag_of_at_most_one_is_the_previous_gradient(lag):
    named, ema = one(torch.zeros(50)), GradientControl(reference="ema")
    previous, named_too = GradientControl(), one(torch.zeros(50))
    for grad in gradient_stream(6):
        a = step(ema, named, grad, lag=lag)
        b = step(previous, named_too, grad, lag=lag)
        assert (a.cosine, a.regime) == (b.cosine, b.regime)
        assert torch.equal(grad_of(named), grad_of(named_too))


def test_ema_without_a_noted_lag_says_which_horizon_it_takes(caplog):
    stream = gradient_stream(5)
    records = []
    for lag in (None, 8):
        control, named = GradientControl(reference="ema"), one(stream[0])
        records.append([step(control, named, grad, lag=lag) for grad in stream])
    assert records[0] == records[1]
    assert caplog.text.count("no lag was noted: a horizon of 8 steps") == 1


@pytest.mark.parametrize("snapshot_dtype", ["float32", "bfloat16"])
def test_ema_projects_on_the_mean_and_then_takes_the_raw_gradient_in(snapshot_dtype):
    control = GradientControl(reference="ema", low=0.0, high=1.0, snapshot_dtype=snapshot_dtype)
    stream = gradient_stream(6, size=400)
    named, mean, weight = one(stream[0]), None, 0.0
    for grad in stream:
        record = step(control, named, grad, lag=3, max_norm=1.0)
        if mean is not None:
            assert record.regime == "project"
            left = abs(cosine(grad_of(named), mean))
            assert left <= (1e-6 if snapshot_dtype == "float32" else 1e-3)
            assert float(grad_of(named).norm()) == pytest.approx(1.0, rel=1e-5)
        weight = (1 - 1 / 3) * weight + 1
        mean = grad.clone() if mean is None else mean + (grad - mean) / weight
    exact = 1e-6 if snapshot_dtype == "float32" else 0.02
    assert torch.allclose(control.state_dict()["snapshot"]["w"].float(), mean, atol=exact)


def test_b10_a_missing_gradient_counts_as_zero_in_the_mean():
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl(reference="ema", mode="observe")
    for grads in (([1.0], [1.0]), ([1.0], None), (None, [4.0])):
        step(control, named, *grads, lag=2)
    snapshot = control.state_dict()["snapshot"]
    total = 1 + 0.5 + 0.25
    assert snapshot["a"].item() == pytest.approx((0.25 + 0.5) / total)
    assert snapshot["b"].item() == pytest.approx((0.25 + 4.0) / total)


def test_b02_b09_ema_forgets_steps_without_a_finite_direction():
    control, named = GradientControl(reference="ema"), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], lag=4)
    before = control.state_dict()
    step(control, named, [0.0, 0.0], lag=4)
    step(control, named, [float("nan"), 0.0], lag=4)
    after = control.state_dict()
    assert torch.equal(before["snapshot"]["w"], after["snapshot"]["w"])
    assert before["weight"] == after["weight"]


def test_ema_within_a_batch_is_reported_apart():
    control, named = GradientControl(reference="ema"), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], batch=1, lag=4)
    record = step(control, named, [1.0, 0.0], batch=1, lag=4)
    assert (record.regime, record.reason, record.cosine) == ("pass", "same batch", None)
    assert record.cosine_within_batch == pytest.approx(1.0)


# ---- displacement, exact ----


@pytest.mark.parametrize("form", ["mapping", "function"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gradient_is_compared_with_behaviour_minus_current_weights(form, dtype):
    """A descent step moves against the gradient: to go on that way is a positive cosine."""
    weight = Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    behaviour = {"w": torch.tensor([1.5, 2.0, 3.0], dtype=dtype)}  # the policy moved by -0.5 e1
    control = GradientControl(reference="displacement", low=0.0, high=1.0)
    weight.grad = torch.tensor([3.0, 4.0, 0.0], dtype=dtype)
    noted = behaviour if form == "mapping" else behaviour.__getitem__
    record = control.apply([("w", weight)], behaviour=noted)
    assert record.cosine == pytest.approx(0.6, abs=1e-6)
    assert (record.regime, record.reason) == ("project", "above low")
    assert weight.grad.tolist() == pytest.approx([0.0, 4.0, 0.0], abs=1e-6)
    weight.grad = torch.tensor([-3.0, 4.0, 0.0], dtype=dtype)
    record = control.apply([("w", weight)], behaviour=noted)
    assert (record.cosine, record.regime) == (pytest.approx(-0.6, abs=1e-6), "pass")
    assert control.state_dict()["snapshot"] == {}


def test_small_differences_of_large_weights_are_taken_before_rounding():
    weight = Parameter(torch.full((100,), 1000.0, dtype=torch.bfloat16))
    behaviour = torch.full((100,), 1000.0) + torch.linspace(0.01, 0.02, 100)
    weight.grad = torch.linspace(0.01, 0.02, 100).bfloat16()
    control = GradientControl(reference="displacement", mode="observe")
    record = control.apply([("w", weight)], behaviour={"w": behaviour})
    exact = cosine(weight.grad, behaviour - 1000.0)
    assert record.cosine == pytest.approx(exact, abs=1e-6)


def test_a_function_gives_the_weights_one_parameter_at_a_time():
    named = [(str(k), Parameter(torch.zeros(3))) for k in range(4)]
    alive, most = set(), [0]

    def behaviour(name):
        tensor = torch.ones(3)
        alive.add(name)
        weakref.finalize(tensor, alive.discard, name)
        most[0] = max(most[0], len(alive))
        return tensor

    control = GradientControl(reference="displacement", low=0.0, high=1.0)
    step(control, named, *[torch.ones(3)] * 4, behaviour=behaviour)
    assert most[0] == 1


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({}, r"behaviour: it has no weights for parameter 'w'"),
        ({"w": torch.zeros(3)}, r"behaviour: .* 'w' have shape \(3,\), not \(2,\)"),
        ({"w": [0.0, 0.0]}, r"behaviour: .* 'w' are a list"),
        (lambda name: None, r"behaviour: .* 'w' are a NoneType"),
        ([torch.zeros(2)], r"behaviour: list is neither a mapping"),
    ],
)
def test_wrong_behaviour_weights_are_named(behaviour, message):
    control = GradientControl(reference="displacement")
    with pytest.raises(ValueError, match=message):
        step(control, one([0.0, 0.0]), [1.0, 1.0], behaviour=behaviour)


def test_a_part_without_gradient_keeps_its_share_of_the_displacement():
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    behaviour = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    control = GradientControl(reference="displacement", low=0.0, high=1.0, strength=0.5)
    record = step(control, named, [2.0], None, behaviour=behaviour)
    assert record.cosine == pytest.approx(3 / 5)
    assert grad_of(named).item() == pytest.approx(1.0)  # half of <g,p> = 6 is gone
    assert grad_of(named, 1) is None


def test_b09_behaviour_weights_that_are_not_finite_say_so_and_change_nothing():
    control, named = GradientControl(reference="displacement"), one([0.0, 0.0])
    record = step(control, named, [1.0, 2.0], behaviour={"w": torch.tensor([float("nan"), 1.0])})
    assert (record.regime, record.reason) == ("undefined", "reference not finite")
    assert grad_of(named).tolist() == [1.0, 2.0]


def test_steps_on_one_batch_are_not_acted_on_by_displacement_either():
    control, named = GradientControl(reference="displacement"), one([0.0, 0.0])
    for reason in ("above high", "same batch"):
        record = step(control, named, [1.0, 0.0], batch=3, behaviour={"w": torch.ones(2)})
        assert record.reason.startswith(reason)
    assert record.cosine_within_batch == pytest.approx(0.5**0.5)


# ---- displacement, estimated ----


def descend(control, lag, steps, lr=0.05, size=40, exact=None, lags=None):
    """A noisy descent with the gradient of `lag` steps ago; records, and exact cosines."""
    generator = torch.Generator().manual_seed(0)
    weight = Parameter(torch.ones(size))
    optimizer = torch.optim.SGD([weight], lr=lr)
    handle = attach(optimizer, control)
    past, records, cosines = [weight.detach().clone()], [], []
    for t in range(steps):
        now = min(t, lag if lags is None else lags[t])
        behaviour = past[-(now + 1)]
        gradient = 0.3 * behaviour + 0.2 * torch.randn(size, generator=generator)
        weight.grad = gradient
        displacement = behaviour - weight.detach()
        if exact:
            handle.note(behaviour={"0.0": behaviour})
        else:
            handle.note(lag=now)
        optimizer.step()
        records.append(handle.last)
        cosines.append(cosine(gradient, displacement) if displacement.norm() > 0 else None)
        past.append(weight.detach().clone())
    return records, cosines


def test_the_estimate_is_exact_at_lag_one():
    control = GradientControl(reference="displacement", mode="observe")
    records, exact = descend(control, lag=1, steps=12)
    for record, wanted in zip(records[1:], exact[1:], strict=True):
        assert record.cosine == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("lag", [2, 4, 8, 16])
def test_the_estimate_is_the_exponential_sum_of_past_updates_and_points_the_exact_way(lag):
    generator = torch.Generator().manual_seed(0)
    weight, size = Parameter(torch.zeros(200)), 200
    control = GradientControl(reference="displacement", mode="observe")
    updates, past = [], [weight.detach().clone()]
    direction = torch.randn(size, generator=generator)
    for _ in range(6 * lag):
        weight.grad = torch.randn(size, generator=generator)
        control.apply([("w", weight)], lag=lag)
        update = 0.01 * (direction + 0.5 * torch.randn(size, generator=generator))
        with torch.no_grad():
            weight += update
        updates.append(update)
        past.append(weight.detach().clone())
    estimated = weight.detach() - control.state_dict()["snapshot"]["w"]
    rho = 1 - 1 / lag
    # The first steps fill the mean: the very first updates are held, and count a little more.
    tail = sum(rho**i * u for i, u in enumerate(reversed(updates)))
    assert cosine(estimated, tail) > 0.999
    exact = weight.detach() - past[-(lag + 1)]
    assert cosine(estimated, exact) > 0.9
    assert float(estimated.norm()) == pytest.approx(float(exact.norm()), rel=0.2)


@pytest.mark.parametrize("lag", [4, 8])
def test_the_estimated_cosine_follows_the_exact_one(lag):
    control = GradientControl(reference="displacement", mode="observe")
    records, exact = descend(control, lag=lag, steps=60)
    pairs = [(r.cosine, e) for r, e in zip(records, exact, strict=True) if r.cosine and e]
    differences = torch.tensor([abs(a - b) for a, b in pairs[lag:]])
    assert len(pairs) >= 50
    assert differences.mean() < 0.1


def test_the_age_of_the_estimate_follows_the_lag():
    """Lag 6, then at once 2: the mean of past weights is 2 steps old from the next step on."""
    lags = [6] * 20 + [2] * 5
    control, named = GradientControl(reference="displacement"), one(torch.zeros(3))
    for lag in lags:
        step(control, named, torch.ones(3), lag=lag)
    assert control.state_dict()["age"] == pytest.approx(2.0)
    step(control, named, torch.ones(3), lag=5)  # older than it is: held, one step more
    assert control.state_dict()["age"] == pytest.approx(3.0)


def test_weights_that_a_skipped_step_did_not_move_do_not_age_the_estimate():
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    control = GradientControl(reference="displacement", low=0.0, high=0.5, max_skips=9)
    handle = attach(optimizer, control)
    ages = []
    for _ in range(5):
        weight.grad = torch.tensor([-1.0, 0.0])
        handle.note(lag=4)
        optimizer.step()
        ages.append(handle.state_dict()["age"])
    assert handle.last.regime == "skip"
    assert handle.last.cosine == pytest.approx(1.0)
    assert ages == [1.0] * 5


def test_the_estimate_is_told_once_with_the_lag_it_takes(caplog):
    control, named = GradientControl(reference="displacement"), one(torch.zeros(3))
    with caplog.at_level(logging.WARNING, logger="sidestep.control"):
        for _ in range(3):
            step(control, named, torch.ones(3))
        assert caplog.text.count("no behaviour weights were noted (no lag either") == 1
        other = GradientControl(reference="displacement")
        step(other, named, torch.ones(3), lag=5)
    assert "the noted lag is 5" in caplog.text


def test_given_weights_need_no_estimate_and_let_it_go():
    control, named = GradientControl(reference="displacement"), one(torch.zeros(3))
    step(control, named, torch.ones(3), lag=5)
    assert control.state_dict()["snapshot"].keys() == {"w"}
    step(control, named, torch.ones(3), behaviour={"w": torch.ones(3)})
    assert control.state_dict()["snapshot"] == {}


def test_the_estimate_stays_float32_beside_bfloat16_weights_and_snapshots():
    named = one(torch.zeros(3), torch.bfloat16)
    control = GradientControl(reference="displacement", snapshot_dtype="bfloat16")
    step(control, named, torch.ones(3), lag=5)
    assert control.state_dict()["snapshot"]["w"].dtype == torch.float32
