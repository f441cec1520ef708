"""strength="spring": every step is pulled back by a share of how far the policy has moved."""

import logging
from collections import deque

import pytest
import torch
from torch.nn import Parameter

import sidestep
from sidestep.control import GradientControl

CURVATURES = torch.logspace(0, -1, 8, dtype=torch.float64)


def spring(pull=None, **changes):
    return GradientControl(
        reference="displacement", space="update", strength="spring", spring=pull, **changes
    )


def descend(control, lag, lr, curvatures=CURVATURES, steps=400, **options):
    """Stale descent on a bowl from 1: weights after every step, and the records."""
    weight = Parameter(torch.ones_like(curvatures))
    optimizer = torch.optim.SGD([weight], lr=lr, **options)
    handle = sidestep.attach(optimizer, control, named_parameters=[("w", weight)])
    past = deque([weight.detach().clone()], maxlen=lag + 1)
    seen, records = [], []
    for _ in range(steps):
        behaviour = past[0]
        weight.grad = curvatures * behaviour
        handle.note(behaviour={"w": behaviour}, lag=lag)
        optimizer.step()
        past.append(weight.detach().clone())
        seen.append(past[-1])
        records.append(handle.last)
    handle.detach()
    return torch.stack(seen), records


def final_size(control, lag, lr, **options):
    seen, _ = descend(control, lag, lr, **options)
    return float(seen[-1].norm())


@pytest.mark.parametrize("lag", [1, 8, 32])
def test_where_the_pull_is_the_gain_stale_descent_is_fresh_descent(lag):
    """theta - lr h b - k (theta - b) = theta - lr h theta for k = lr h."""
    bowl = torch.full((3,), 0.5, dtype=torch.float64)
    stale, _ = descend(spring(0.3), lag, 0.6, bowl, steps=60)
    fresh, _ = descend(GradientControl(mode="off"), 0, 0.6, bowl, steps=60)
    assert torch.allclose(stale, fresh, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("lag", [1, 8, 32, 100])
def test_at_any_lag_descent_is_stable_while_the_gain_is_below_twice_the_pull(lag):
    """|1 - k| + |k - gain| < 1, whatever the delay; without a pull lag 8 is unstable from 0.19."""
    start = len(CURVATURES) ** 0.5
    assert final_size(spring(0.2), lag, 0.35, steps=1200) < 0.1 * start
    if lag >= 8:
        assert final_size(GradientControl(mode="off"), lag, 0.35) > 10 * start


def test_far_beyond_twice_the_pull_it_is_not():
    assert final_size(spring(0.05), 32, 0.5, steps=600) > 10 * len(CURVATURES) ** 0.5


def test_what_is_slow_is_slowed_by_one_plus_pull_times_lag():
    """A direction of gain r shrinks by about r / (1 + k lag) a step."""
    flat = torch.tensor([0.001], dtype=torch.float64)
    pulled, _ = descend(spring(0.25), 32, 1.0, flat, steps=1600)
    rate = -float(torch.log(pulled[-1] / pulled[-801])) / 800
    assert rate == pytest.approx(0.001 / (1 + 0.25 * 32), rel=0.02)


def test_the_step_is_what_the_optimizer_made_less_the_pull_of_the_way():
    weight = Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = sidestep.attach(optimizer, spring(0.25), named_parameters=[("w", weight)])
    handle.note(behaviour={"w": torch.tensor([0.0, 4.0], dtype=torch.float64)}, lag=1)
    weight.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)
    optimizer.step()  # u = (-0.1, 0), d = (1, -2)
    assert weight.tolist() == pytest.approx([1.0 - 0.1 - 0.25, 2.0 + 0.5], abs=1e-12)
    record = handle.last
    assert (record.regime, record.reason) == ("project", "spring")
    assert record.cosine < 0.0  # u was on its way back: it is pulled all the same
    assert record.norm_applied == pytest.approx((0.35**2 + 0.5**2) ** 0.5)


@pytest.mark.parametrize(("drift", "pull"), [(0.0, 0.0), (0.05, 0.5), (0.1, 1.0), (7.0, 1.0)])
def test_without_a_number_the_pull_is_the_drift_over_its_scale(drift, pull):
    weight = Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = sidestep.attach(optimizer, spring(), named_parameters=[("w", weight)])
    handle.note(behaviour={"w": torch.zeros(1, dtype=torch.float64)}, lag=1, drift=drift)
    weight.grad = torch.ones(1, dtype=torch.float64)
    optimizer.step()
    assert weight.item() == pytest.approx(0.9 - pull, abs=1e-12)
    assert handle.last.reason == ("spring" if pull else "no drift")


def test_fresh_data_is_left_alone():
    pulled, records = descend(spring(0.5), 0, 0.3, steps=20, momentum=0.9)
    free, _ = descend(GradientControl(mode="off"), 0, 0.3, steps=20, momentum=0.9)
    assert torch.equal(pulled, free)
    assert {record.reason for record in records} == {"zero displacement"}


def test_observing_changes_nothing():
    observed, records = descend(spring(0.5, mode="observe"), 8, 0.05, steps=20)
    free, _ = descend(GradientControl(mode="off"), 8, 0.05, steps=20)
    assert torch.equal(observed, free)
    assert records[-1].decision == "project"


def test_without_behaviour_weights_an_estimate_of_them_holds_it_too(caplog):
    weight = Parameter(torch.ones_like(CURVATURES))
    optimizer = torch.optim.SGD([weight], lr=0.35)
    handle = sidestep.attach(optimizer, spring(0.25), named_parameters=[("w", weight)])
    past = deque([weight.detach().clone()], maxlen=9)
    with caplog.at_level(logging.WARNING):
        for _ in range(800):
            weight.grad = CURVATURES * past[0]
            handle.note(lag=8)
            optimizer.step()
            past.append(weight.detach().clone())
    assert float(weight.norm()) < 0.05 * len(CURVATURES) ** 0.5
    assert "estimated" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spring": 0.0}, ["spring=0.0", "(0, 1]"]),
        ({"spring": 1.5}, ["spring=1.5", "(0, 1]"]),
        ({"spring": float("nan")}, ["spring=nan"]),
        ({"spring": True}, ["spring=True"]),
        ({"strength": 1.0, "spring": 0.5}, ["spring=0.5", "strength=1.0"]),
        ({"space": "gradient"}, ["strength='spring'", "space='update'"]),
        ({"reference": "previous"}, ["strength='spring'", "reference='displacement'"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, words):
    good = {"reference": "displacement", "space": "update", "strength": "spring"}
    with pytest.raises(ValueError) as caught:
        GradientControl(**(good | changes))
    for word in words:
        assert word in str(caught.value)


def test_a_spring_by_drift_says_what_it_needs():
    weight = Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sidestep.attach(optimizer, spring(), named_parameters=[("w", weight)])
    weight.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"note\(drift=\.\.\.\).*spring a number"):
        optimizer.step()
