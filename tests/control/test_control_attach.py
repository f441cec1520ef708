"""The control inside optimizer.step(): every optimizer, every way of calling it."""

import copy
import math
import pickle

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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_b23_grad_scaler_is_measured_unscaled_and_the_step_is_bitwise_the_same(
    fused, unscale, scale
):
    weights_after = []
    for mode in ("bare", "off", "observe", "control"):
        weight = Parameter(torch.zeros(2))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused, foreach=False)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        if mode != "bare":
            handle = attach(optimizer, GradientControl(mode=mode, low=1.0, high=1.0))
        for good in (True, False, True):
            optimizer.zero_grad()
            factor = torch.tensor([1.0, 1.0 if good else math.inf])
            scaler.scale((weight * factor).sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if mode != "bare" and good:
                assert handle.last.norm_raw == pytest.approx(math.sqrt(2), rel=1e-6)
            if mode == "control" and not good and fused:
                assert handle.last.reason == "non-finite"
            scaler.update(scale)
        if mode == "control":
            assert handle.last.cosine == pytest.approx(1.0)
            snapshot = handle.state_dict()["snapshot"]["0.0"]
            assert snapshot.tolist() == pytest.approx([1.0, 1.0], rel=1e-6)
        weights_after.append(weight.detach())
    for other in weights_after[1:]:
        assert torch.equal(weights_after[0], other)


class Inherited(torch.optim.AdamW):
    """Calls its parent's step, hooked once the parent has been instantiated anywhere."""

    def step(self, closure=None):
        return super().step(closure)


class ClosureFirst(torch.optim.SGD):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        super().step()
        return loss


@pytest.mark.parametrize("parent_was_used", [False, True])
def test_a_subclass_that_calls_super_step_acts_once(parent_was_used):
    class Parent(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Child(Parent):
        def step(self, closure=None):
            return super().step(closure)

    weight = Parameter(torch.zeros(2))
    if parent_was_used:
        torch.optim.SGD([weight])
        Parent([weight])
    optimizer = Child([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(above="project"))
    for t in range(3):
        weight.grad = torch.tensor([1.0, t * 1.0])
        optimizer.step()
        assert handle.last.step == t
    assert weight.grad.norm() > 0.3  # acting twice compares it with itself and leaves nothing


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Inherited, ClosureFirst])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_runs_before_the_control_and_the_update_after(kind, by_keyword):
    weight = Parameter(torch.zeros(2))
    optimizer = kind([weight], lr=0.1)
    handle = attach(optimizer, GradientControl(max_skips=1))
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(torch.is_grad_enabled())
        loss = (weight - torch.tensor([3.0, 4.0])).square().sum() / 2
        loss.backward()
        return loss

    regimes, positions, losses = [], [weight.detach().clone()], []
    for _ in range(3):
        loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        losses.append(loss.item())
        regimes.append(handle.last.regime)
        positions.append(weight.detach().clone())
    assert seen == [True] * 3
    assert losses[0] == pytest.approx(12.5)
    assert handle.last.step == 2
    assert regimes == ["undefined", "skip", "project"]
    assert not torch.equal(positions[0], positions[1])
    assert torch.equal(positions[1], positions[2])  # the skipped step


def test_an_optimizer_that_calls_its_closure_twice_or_never_is_refused_by_name():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            closure()

    class Never(torch.optim.SGD):
        def step(self, closure=None):
            return None

    weight = Parameter(torch.zeros(1))

    def closure():
        weight.grad = torch.ones(1)

    for kind, message in ((Twice, "Twice calls its closure more than once"), (Never, "Never.step")):
        optimizer = kind([weight], lr=0.1)
        attach(optimizer, GradientControl())
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(closure)


def test_a_step_that_raises_is_put_right_at_the_next_one():
    class Fragile(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if self.broken:
                raise MemoryError
            return super().step(closure)

    weight = Parameter(torch.zeros(1))
    optimizer = Fragile([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(above="damp", damp_power=1.0, high=0.5))
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.broken = True
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.broken = False
    weight.grad = -torch.ones(1)
    optimizer.step()
    assert handle.last.step == 2  # not taken for a part of the step that raised
    assert handle.last.regime == "pass"
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert weight.item() == pytest.approx(0.0)


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


def test_names_come_from_the_caller_the_optimizer_or_positions():
    model = torch.nn.Linear(2, 1)
    for named, build, wanted in (
        (model.named_parameters(), model.parameters(), ["weight", "bias"]),
        (None, model.named_parameters(), ["weight", "bias"]),
        (None, model.parameters(), ["0.0", "0.1"]),
    ):
        optimizer = torch.optim.SGD(build, lr=0.1)
        handle = attach(optimizer, GradientControl(), named_parameters=named)
        set_gradients(model.parameters(), seed=0)
        optimizer.step()
        assert list(handle.state_dict()["snapshot"]) == wanted
    with pytest.raises(ValueError, match="parameter 1 of the optimizer's group 0 is missing"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(optimizer, GradientControl(), named_parameters=[("weight", model.weight)])


def test_what_cannot_be_controlled_is_refused_by_name():
    weight = Parameter(torch.zeros(1))
    optimizer, control = torch.optim.SGD([weight], lr=0.1), GradientControl()
    handle = attach(optimizer, control)
    with pytest.raises(ValueError, match="this SGD has a control"):
        attach(optimizer, GradientControl())
    with pytest.raises(ValueError, match="control: it is attached"):
        attach(torch.optim.SGD([weight], lr=0.1), control)
    with pytest.raises(ValueError, match="LBFGS"):
        attach(torch.optim.LBFGS([weight]), GradientControl())
    with pytest.raises(ValueError, match="max_norm=-1"):
        attach(torch.optim.SGD([weight], lr=0.1), GradientControl(), max_norm=-1)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    with pytest.raises(ValueError, match=r"Wrapper has no step hooks.*\.optimizer"):
        attach(Wrapper(torch.optim.SGD([weight], lr=0.1)), GradientControl())
    with pytest.raises(ValueError, match="Linear has no step hooks"):
        attach(torch.nn.Linear(1, 1), GradientControl())
    without_rate = torch.optim.SGD([weight], lr=0.1)
    without_rate.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="above='damp'"):
        attach(without_rate, GradientControl(above="damp"))

    handle.detach()
    attach(optimizer, GradientControl())
    attach(torch.optim.SGD([weight], lr=0.1), control)


def test_detach_leaves_the_optimizer_as_it_was():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before = set(vars(optimizer))
    handle = attach(optimizer, GradientControl())
    handle.detach()
    assert set(vars(optimizer)) == before
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == -2.0
    assert handle.last is None


def test_b38_a_deep_copy_warns_that_it_runs_without_control():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    optimizer.step()
    with pytest.warns(UserWarning, match="runs without Sidestep's control"):
        twin = copy.deepcopy(optimizer)
    twin_weight = twin.param_groups[0]["params"][0]
    assert twin_weight is not weight
    assert torch.equal(twin.state[twin_weight]["momentum_buffer"], torch.ones(1))
    attach(twin, GradientControl())  # is not taken for attached
    optimizer.step()
    assert handle.last.regime == "skip"  # the original still is
    with pytest.warns(UserWarning, match="runs without"):
        copy.deepcopy(optimizer)


def test_loading_an_optimizer_state_keeps_the_control_and_pickling_works():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert handle.last.regime == "skip"
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1


def test_a_scheduler_and_in_place_zero_grad_work_beside_the_control():
    weight = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    handle = attach(optimizer, GradientControl(above="damp", high=0.3))
    for t in range(4):
        optimizer.zero_grad(set_to_none=False)
        (weight * torch.tensor([1.0, 1.0])).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (t + 1)
    assert handle.last.regime == "damp"


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
