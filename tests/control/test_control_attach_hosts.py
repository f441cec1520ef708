"""The control beside what hosts do to an optimizer: scalers, closures, copies, subclasses."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach


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


def test_names_come_from_the_caller_the_optimizer_or_positions():
    model = torch.nn.Linear(2, 1)
    for named, build, wanted in (
        (model.named_parameters(), model.parameters(), ["weight", "bias"]),
        (None, model.named_parameters(), ["weight", "bias"]),
        (None, model.parameters(), ["0.0", "0.1"]),
    ):
        optimizer = torch.optim.SGD(build, lr=0.1)
        handle = attach(optimizer, GradientControl(), named_parameters=named)
        model(torch.ones(2)).sum().backward()
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


def test_an_inner_step_that_raises_and_is_caught_is_still_a_part_of_its_step():
    class Parent(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    class Falls(Parent):
        """Tries a fast way, then a slow one."""

        def step(self, closure=None):
            try:
                super().step()
            except MemoryError:
                torch.optim.SGD.step(self)

    weight = Parameter(torch.zeros(1))
    Parent([weight])  # from here on torch hooks its step
    optimizer = Falls([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(above="damp", damp_power=1.0, high=0.5))
    for t in range(3):
        weight.grad = torch.ones(1)
        optimizer.step()
        assert handle.last.step == t
        assert optimizer.param_groups[0]["lr"] == 1.0  # put back at the end of the whole step
    assert weight.item() == -1.0  # cosine 1 damps the second and third to nothing


def test_what_a_failed_step_changed_is_not_put_over_what_came_since():
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    handle = attach(optimizer, GradientControl())
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
    with pytest.raises(ValueError, match="every gradient is None"):
        optimizer.step()
    optimizer.grad_scale = torch.tensor(2.0)  # as GradScaler sets it before each step
    weight.grad = torch.tensor([6.0, 8.0])
    optimizer.step()
    assert handle.last.norm_raw == pytest.approx(5.0)
    assert optimizer.grad_scale.item() == 2.0


def test_the_wrapper_of_lightning_is_taken_for_the_optimizer_in_it():
    core = pytest.importorskip("lightning.pytorch.core.optimizer", reason="needs Lightning")
    weight = Parameter(torch.zeros(1))
    inner = torch.optim.SGD([weight], lr=1.0)
    handle = attach(core.LightningOptimizer(inner), GradientControl())
    assert handle.optimizer is inner
    weight.grad = torch.ones(1)
    inner.step()
    assert handle.last.step == 0
