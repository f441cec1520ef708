"""Thresholds read from the run's own first steps."""

import json

import numpy as np
import pytest
import torch
from control_steps import grad_of, one, step

from sidestep.control import GradientControl
from sidestep.control.calibration import quantile


class Walk:
    """Gradients in the plane, each with a chosen cosine to the one before."""

    def __init__(self, control):
        self.control, self.named, self.angle = control, one([0.0, 0.0]), 0.0

    def start(self, **facts):
        step(self.control, self.named, [1.0, 0.0], **facts)
        return self

    def go(self, cosines, **facts):
        records = []
        for cosine in cosines:
            self.angle += float(np.arccos(cosine))
            grad = torch.tensor([np.cos(self.angle), np.sin(self.angle)])
            records.append(step(self.control, self.named, grad, **facts))
            assert records[-1].cosine == pytest.approx(cosine, abs=1e-6)
        return records


def walk(control, cosines, **facts):
    return Walk(control).start(**facts).go(cosines, **facts)


CALM = [0.1, 0.3, -0.2, 0.2, 0.05, 0.4, 0.0, 0.15, 0.25, 0.35]


def test_thresholds_are_the_quantiles_of_the_first_steps_and_nothing_is_done_before(caplog):
    control = GradientControl(low="calibrate", high="calibrate", calibrate_steps=10)
    way = Walk(control).start()
    records = way.go(CALM)
    assert {(r.regime, r.decision, r.reason) for r in records} == {("pass", "pass", "calibrating")}
    assert float(grad_of(way.named).norm()) == pytest.approx(1.0)
    low, high = np.quantile(CALM, 0.9), np.quantile(CALM, 0.99)
    assert control.thresholds["model"] == pytest.approx((low, high), abs=1e-6)
    assert f"calibrated on 10 steps (model): low={low:.4f}, high={high:.4f}" in caplog.text
    assert "stale" not in caplog.text
    records = way.go([low - 0.01, (low + high) / 2, 0.9])
    assert [r.regime for r in records] == ["pass", "project", "skip"]


@pytest.mark.parametrize("values", [[0.3], [0.1, 0.9], CALM, [0.5] * 7])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_those_of_numpy(values, share):
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"low": 0.2, "high": "calibrate"}, (0.2, 0.3955)),
        ({"low": "calibrate", "high": 0.8}, (0.355, 0.8)),
        ({"low": 0.7, "high": "calibrate"}, (0.7, 0.7)),  # high is never below low
        ({"low": "calibrate", "high": 0.2}, (0.2, 0.2)),
    ],
)
def test_a_threshold_given_as_a_number_stays(settings, wanted):
    control = GradientControl(**settings, calibrate_steps=10)
    walk(control, CALM)
    assert control.thresholds["model"] == pytest.approx(wanted, abs=1e-6)


def test_steps_without_a_cosine_do_not_count():
    control = GradientControl(low="calibrate", high="calibrate", calibrate_steps=3)
    named = one([0.0, 0.0])
    facts = [
        ([1.0, 0.0], {"batch": 1}),  # first step
        ([0.6, 0.8], {"batch": 1}),  # same batch
        ([0.0, 0.0], {"batch": 2}),  # no signal
        ([0.8, 0.6], {"batch": 3}),
        ([float("nan"), 0.0], {"batch": 4}),
        ([1.0, 0.0], {"batch": 5}),
    ]
    for grad, fact in facts:
        record = step(control, named, grad, **fact)
        if fact["batch"] == 4:
            assert (record.regime, record.reason) == ("skip", "non-finite")
    assert control.thresholds == {}
    step(control, named, [1.0, 0.0], batch=6)
    assert control.thresholds["model"] == pytest.approx((0.992, 0.9992), abs=0.001)


def test_calibrating_on_stale_data_is_said_once(caplog):
    control = GradientControl(low="calibrate", high="calibrate", calibrate_steps=10)
    way = Walk(control).start()
    way.go(CALM, lag=4.0)
    assert caplog.text.count("calibrating on stale data (lag 4)") == 1
    caplog.clear()
    way.go([0.1, 0.2], lag=9.0)
    assert "stale" not in caplog.text  # fixed by then
    fresh = GradientControl(low="calibrate", high="calibrate", calibrate_steps=10)
    caplog.clear()
    walk(fresh, CALM, lag=0)
    assert "stale" not in caplog.text


@pytest.mark.parametrize("broken_after", [3, 10, 12])
def test_calibration_survives_a_restart(broken_after):
    settings = {"low": "calibrate", "high": "calibrate", "calibrate_steps": 10}
    cosines = [*CALM, 0.38, 0.9, 0.2]
    unbroken = GradientControl(**settings)
    wanted = walk(unbroken, cosines)
    first = GradientControl(**settings)
    named, angle, records = one([0.0, 0.0]), 0.0, []
    control = first
    for t, cosine in enumerate([None, *cosines]):
        angle += 0.0 if cosine is None else float(np.arccos(cosine))
        record = step(control, named, torch.tensor([np.cos(angle), np.sin(angle)]))
        if t > 0:
            records.append(record)
        if t == broken_after:
            state = control.state_dict()
            snapshot = state.pop("snapshot")
            control = GradientControl(**settings)
            control.load_state_dict({**json.loads(json.dumps(state)), "snapshot": snapshot})
    assert [r.regime for r in records] == [r.regime for r in wanted]
    assert control.thresholds == unbroken.thresholds


def test_numbers_given_now_win_over_calibrated_ones_of_a_state():
    calibrated = GradientControl(low="calibrate", high="calibrate", calibrate_steps=10)
    walk(calibrated, CALM)
    control = GradientControl(low=0.2, high=0.5)
    control.load_state_dict(calibrated.state_dict())
    assert control.thresholds["model"] == (0.2, 0.5)


def test_observe_calibrates_too_and_off_does_not():
    control = GradientControl(low="calibrate", high="calibrate", calibrate_steps=10, mode="observe")
    walk(control, CALM)
    assert control.thresholds.keys() == {"model"}
    off = GradientControl(low="calibrate", high="calibrate", mode="off")
    step(off, one([0.0, 0.0]), [1.0, 0.0])
    assert off.thresholds == {}


def test_each_scope_has_its_own_thresholds():
    control = GradientControl(low="calibrate", high="calibrate", calibrate_steps=2, scope="block")
    named = [(f"layers.{k}.w", one([0.0, 0.0])[0][1]) for k in range(2)]
    for grads in (([1.0, 0.0], [1.0, 0.0]), ([0.6, 0.8], [1.0, 0.0]), ([1.0, 0.0], [1.0, 0.0])):
        step(control, named, *grads)
    assert control.thresholds["layers.0"] == pytest.approx((0.6, 0.6), abs=1e-6)
    assert control.thresholds["layers.1"] == pytest.approx((1.0, 1.0), abs=1e-6)
