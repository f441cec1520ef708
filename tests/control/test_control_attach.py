"""The control inside optimizer.step(): every optimizer, every way of calling it."""

import copy
import math

import pytest
import torch
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5, foreach=False),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5, fused=True),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.1, weight_decay=0.1),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (1,))]


def set_gradients(parameters, seed, mean=0.0, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = factor * (noise + mean)


def frozen_copy(optimizer, parameters):
    """Weights and the optimizer's state, for comparison."""
    return copy.deepcopy([p.detach() for p in parameters]), copy.deepcopy(
        [optimizer.state.get(p, {}) for p in parameters]
    )


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    else:
        assert left == right


@every_optimizer
@pytest.mark.parametrize("signs", [[1.0], [1.0, -1.0, 1.0]], ids=["no-state-yet", "with-state"])
def test_skip_leaves_weights_moments_and_decay_untouched(kind, signs):
    parameters = weights()
    optimizer = OPTIMIZERS[kind](parameters)
    handle = attach(optimizer, GradientControl())
    if len(signs) == 1:  # the control has seen a gradient, the optimizer has made no step
        set_gradients(parameters, seed=1)
        handle.control.apply([(f"0.{k}", parameter) for k, parameter in enumerate(parameters)])
    else:
        for sign in signs:
            set_gradients(parameters, seed=1, factor=sign)
            optimizer.step()
            assert handle.last.regime in ("undefined", "pass")
    before = frozen_copy(optimizer, parameters)
    set_gradients(parameters, seed=1)
    given = [parameter.grad.clone() for parameter in parameters]
    optimizer.step()
    assert handle.last.regime == "skip"
    assert_same(frozen_copy(optimizer, parameters), before)
    assert_same([parameter.grad for parameter in parameters], given)


@every_optimizer
def test_control_off_is_bitwise_equal_to_the_bare_optimizer(kind):
    bare, controlled = weights(), weights()
    optimizers = OPTIMIZERS[kind](bare), OPTIMIZERS[kind](controlled)
    handle = attach(optimizers[1], GradientControl(mode="off"))
    for t in range(6):
        for parameters, optimizer in zip((bare, controlled), optimizers, strict=True):
            set_gradients(parameters, seed=t, mean=0.5)
            if t == 4:
                parameters[1].grad = None
            if t == 5:
                parameters[2].grad.fill_(math.nan)
            optimizer.step()
    assert_same(*([p.detach().nan_to_num(9.0) for p in run] for run in (bare, controlled)))
    assert (handle.last.regime, handle.last.reason) == ("pass", "off")


@every_optimizer
@pytest.mark.parametrize("max_norm", [None, 0.5, 1e6])
def test_observe_is_bitwise_equal_to_off(kind, max_norm):
    runs = []
    for mode in ("off", "observe"):
        parameters = weights()
        optimizer = OPTIMIZERS[kind](parameters)
        handle = attach(optimizer, GradientControl(mode=mode), max_norm=max_norm)
        decisions = []
        for t in range(8):
            set_gradients(parameters, seed=t, mean=0.5)
            if t == 4:
                parameters[1].grad = None
            optimizer.step()
            decisions.append(handle.last.decision)
        runs.append([p.detach() for p in parameters])
    assert_same(*runs)
    assert {"project", "skip"} & set(decisions)  # observing had something to leave alone


def test_observe_is_bitwise_equal_to_off_when_a_parameter_joins():
    runs = []
    for mode in ("off", "observe"):
        parameters = weights()
        optimizer = torch.optim.SGD(parameters[:2], lr=0.1)
        attach(optimizer, GradientControl(mode=mode), max_norm=0.3)
        for t in range(4):
            if t == 2:
                optimizer.add_param_group({"params": parameters[2:]})
            set_gradients(parameters, seed=t, mean=0.5)
            optimizer.step()
        runs.append([p.detach() for p in parameters])
    assert_same(*runs)


def test_the_weights_move_by_the_projected_gradient():
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(high=1.0))
    weight.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    with torch.no_grad():
        weight.zero_()
    weight.grad = torch.tensor([0.6, 0.8])
    optimizer.step()
    assert handle.last.cosine == pytest.approx(0.6)
    assert weight.tolist() == pytest.approx([0.0, -0.8])


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_damp_scales_the_learning_rate_of_that_step_alone(lr):
    parameters = [Parameter(torch.ones(1)), Parameter(torch.ones(1))]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=0.0, foreach=False)
    handle = attach(optimizer, GradientControl(above="damp", low=0.1, high=0.5))
    moved = []
    for grads in ((1.0, 0.0), (0.8, 0.6)):
        before = [p.item() for p in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = torch.tensor([grad])
        optimizer.step()
        moved.append([b - p.item() for b, p in zip(before, parameters, strict=True)])
    assert handle.last.step_scale == pytest.approx(0.04)
    assert moved[0][0] == pytest.approx(0.5, rel=1e-4)
    assert moved[1][0] == pytest.approx(0.5 * 0.04, rel=0.1)  # Adam's first steps have length lr
    assert optimizer.param_groups[0]["lr"] is lr
    assert optimizer.param_groups[1]["lr"] == 1.0


def test_b19_accumulated_micro_batches_are_one_measurement_on_the_mean():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle = attach(optimizer, GradientControl(mode="observe"))
    for t in range(2):
        optimizer.zero_grad()
        for x in (1.0, 2.0, 3.0):
            (weight * x / 3).sum().backward()
        optimizer.step()
        assert handle.last.norm_raw == pytest.approx(2.0)
        assert handle.last.step == t


def test_b21_every_gradient_none_is_refused_in_the_step_too():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    attach(optimizer, GradientControl())
    with pytest.raises(ValueError, match="every gradient is None"):
        optimizer.step()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1)


def test_notes_hold_for_the_coming_step_only():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    regimes = []
    for batch in (1, 1, None):
        handle.note(lag=8.0, drift=0.03)
        if batch is not None:
            handle.note(batch=batch, behaviour={"w": torch.zeros(1)})
        optimizer.step()
        regimes.append((handle.last.regime, handle.last.reason))
    assert regimes == [("undefined", "first step"), ("pass", "same batch"), ("skip", "above high")]
    with pytest.raises(ValueError, match="lag=-2"):
        handle.note(lag=-2)


def test_a_frozen_parameter_in_the_optimizer_does_not_count_and_is_held_on_skip():
    trained, frozen = Parameter(torch.zeros(1)), Parameter(torch.ones(1), requires_grad=False)
    optimizer = torch.optim.SGD([trained, frozen], lr=1.0, weight_decay=0.5)
    handle = attach(optimizer, GradientControl())
    for _ in range(2):
        trained.grad = torch.ones(1)
        optimizer.step()
        assert handle.last.norm_raw == 1.0
    assert handle.last.regime == "skip"
    frozen.grad = torch.ones(1)
    optimizer.step()
    assert handle.last.regime == "skip"
    assert (frozen.item(), frozen.grad.item()) == (1.0, 1.0)


def test_b34_a_non_finite_step_leaves_weights_and_the_next_one_is_normal():
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    handle = attach(optimizer, GradientControl(low=0.5, high=1.0), max_norm=1.0)
    positions = []
    for grad in ([1.0, 0.0], [math.nan, 1.0], [0.0, 1.0], [1.0, -1.0]):
        weight.grad = torch.tensor(grad)
        optimizer.step()
        positions.append(weight.detach().clone())
    assert torch.equal(positions[0], positions[1])
    assert not torch.equal(positions[1], positions[2])
    assert all(torch.isfinite(position).all() for position in positions)
    assert handle.last.cosine == pytest.approx(-math.sqrt(0.5))
