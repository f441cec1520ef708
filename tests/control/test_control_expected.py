"""The cosine of fresh data, read from the two halves of a batch."""

import json

import pytest
import torch
from control_steps import one, step
from torch.nn import Parameter

from sidestep.control import GradientControl, Halves, excess, expected_cosine
from sidestep.control.attach import attach


def test_expected_is_two_h_over_one_plus_h():
    found = expected_cosine({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.6, 0.8])})
    assert found.halves == pytest.approx(0.6)
    assert found.expected == pytest.approx(1.2 / 1.6)


@pytest.mark.parametrize("snr", [0.1, 1.0, 5.0])
def test_two_fresh_batches_show_the_expected_cosine(snr):
    """E[c] = SNR / (1 + SNR) of the whole batch, from halves of half the SNR."""
    size, generator = 20_000, torch.Generator().manual_seed(0)
    mean = torch.randn(size, generator=generator)
    mean *= (snr / 2) ** 0.5 / mean.norm()  # a half has noise of length 1

    def half():
        return mean + torch.randn(size, generator=generator) / size**0.5

    first, second, third, fourth = (half() for _ in range(4))
    expected = expected_cosine({"w": first}, {"w": second}).expected
    one_batch, another = first + second, third + fourth
    cosine = float(one_batch @ another / (one_batch.norm() * another.norm()))
    assert expected == pytest.approx(snr / (1 + snr), abs=0.03)
    assert cosine == pytest.approx(expected, abs=0.04)
    assert excess(cosine, expected) == pytest.approx(0.0, abs=0.04)


@pytest.mark.parametrize(("h", "expected"), [(-0.2, -0.5), (-0.5, -1.0), (-1.0, -1.0), (1.0, 1.0)])
def test_noise_cannot_make_it_anything_but_a_cosine(h, expected):
    second = torch.tensor([h, (1 - h * h) ** 0.5], dtype=torch.float64)
    found = expected_cosine({"w": torch.tensor([1.0, 0.0])}, {"w": second})
    assert found.expected == pytest.approx(expected, abs=1e-9)


def test_halves_without_a_direction_expect_nothing():
    zero, right = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    for first, second in ((zero, right), (right, zero), (right, {"w": None})):
        assert expected_cosine(first, second) is None
    assert expected_cosine({"w": torch.tensor([float("inf"), 0.0])}, right) is None
    assert excess(None, 0.5) is None
    assert excess(0.5, None) is None
    with pytest.raises(ValueError, match="'b'"):
        expected_cosine({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})


def test_halves_reads_them_off_the_accumulating_gradient():
    weight, other = Parameter(torch.zeros(3)), Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight, other], lr=0.1)
    handle = attach(optimizer, GradientControl(mode="observe"))
    first, second = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.5])
    for _ in range(2):
        optimizer.zero_grad()
        halves = Halves([("w", weight), ("o", other)])
        (weight * first).sum().backward()
        halves.split()
        ((weight * second).sum() + other.sum()).backward()
        expected = halves.expected()
        direct = expected_cosine(
            {"w": first, "o": None}, {"w": second, "o": torch.ones(2)}
        ).expected
        assert expected == pytest.approx(direct, abs=1e-6)
        handle.note(expected=expected)
        optimizer.step()
    assert torch.equal(weight.grad, first + second)  # only looked at
    assert handle.last.expected == expected
    assert handle.last.excess == pytest.approx(1.0 - expected)
    json.dumps(handle.last.as_dict())
    optimizer.step()
    assert (handle.last.expected, handle.last.excess) == (None, None)
    with pytest.raises(ValueError, match="split"):
        halves.expected()


def test_excess_is_for_consecutive_gradients_alone():
    facts = {"expected": 0.25, "lag": 4}
    for settings, wanted in (
        ({}, 0.75),
        ({"reference": "ema"}, None),
        ({"reference": "displacement"}, None),
    ):
        control, named = GradientControl(mode="observe", **settings), one([0.0])
        step(control, named, [1.0], **facts)
        record = step(control, named, [1.0], **facts)
        assert (record.expected, record.excess) == (0.25, wanted)
    record = step(GradientControl(), named, [1.0], **facts)
    assert (record.expected, record.excess) == (0.25, None)  # first step: no cosine


@pytest.mark.parametrize("expected", [1.5, float("nan"), True])
def test_a_wrong_expected_cosine_is_named(expected):
    with pytest.raises(ValueError, match="expected="):
        step(GradientControl(), one([0.0]), [1.0], expected=expected)
