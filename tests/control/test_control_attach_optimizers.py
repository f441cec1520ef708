"""The control in every optimizer of torch, compiled steps, changing groups, schedulers, numbers."""

import copy
import json
import logging
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import LambdaLR

from sidestep.control import GradientControl
from sidestep.control.attach import attach

# LBFGS is refused: test_control_attach_hosts.py.
KINDS = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
]


def test_the_kinds_are_all_that_torch_has():
    there = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert there - {*KINDS} == {"LBFGS", "Optimizer"}


def random_gradients(parameters, seed, mean=0.0, sparse=False):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator) + mean
        parameter.grad = grad.to_sparse() if sparse else grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_of_torch_skips_and_moves_by_what_the_control_left(kind):
    """After a skip the run is that of a bare optimizer which never saw the skipped gradients."""
    made = getattr(torch.optim, kind)
    sparse = kind == "SparseAdam"
    bare, controlled = ([Parameter(torch.ones(3, 4)), Parameter(torch.ones(4, 4))] for _ in "ab")
    optimizers = made(bare, lr=0.1), made(controlled, lr=0.1)
    # Over any cosine but the first of each kind of step: skip on a repeated gradient alone.
    handle = attach(optimizers[1], GradientControl(low=0.9, high=0.9))
    regimes = []
    for seed in (0, 0, 1, 1, 2):
        random_gradients(controlled, seed, sparse=sparse)
        optimizers[1].step()
        regimes.append(handle.last.regime)
        if regimes[-1] != "skip":
            for theirs, ours in zip(bare, controlled, strict=True):
                theirs.grad = ours.grad
            optimizers[0].step()
        assert all(torch.equal(a, b) for a, b in zip(bare, controlled, strict=True))
    assert regimes == ["undefined", "skip", "pass", "skip", "pass"]
    assert not torch.equal(controlled[0], torch.ones(3, 4))


class CallsSuper(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


torch.optim.SGD([Parameter(torch.zeros(1))])  # from here on torch hooks SGD.step and its children's


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, CallsSuper])
@pytest.mark.parametrize("form", ["around", "method", "in place", "closure"])
def test_a_compiled_step_decides_and_moves_like_an_eager_one(kind, form):
    runs = []
    for compiles in (False, True):
        torch._dynamo.reset()
        weights = [Parameter(torch.ones(2, 3)), Parameter(torch.ones(3))]
        optimizer = kind(weights, lr=0.1, weight_decay=0.1)
        handle = attach(optimizer, GradientControl(max_skips=1), max_norm=1.0)
        step = compiled_step(optimizer, form, weights) if compiles else None
        records = []
        for t in range(6):
            random_gradients(weights, seed=t, mean=0.8)
            if step is not None:
                step()
            elif form == "closure":
                optimizer.step(lambda: None)
            else:
                optimizer.step()
            records.append((handle.last.step, handle.last.regime, handle.last.cosine))
        runs.append((records, torch.cat([w.detach().flatten() for w in weights])))
    (eager, positions), (compiled, same_positions) = runs
    assert {"project", "skip"} <= {regime for _, regime, _ in eager}
    assert eager == compiled
    torch.testing.assert_close(same_positions, positions, rtol=1e-5, atol=1e-5)


def compiled_step(optimizer, form, weights):
    # The backend changes nothing about hooks; "eager" needs no compiler.
    def compiled(function):
        return torch.compile(function, backend="eager")

    if form == "around":
        return compiled(lambda: optimizer.step())
    if form == "closure":
        return compiled(lambda: optimizer.step(lambda: None))
    if form == "in place":
        optimizer.step = compiled(optimizer.step)
        return lambda: optimizer.step()
    return compiled(optimizer.step)


def test_a_step_in_one_full_graph_is_refused_before_anything_moves():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    step = torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ControlHandle\._before_step"):
        step()
    assert (weight.item(), handle.last) == (0.0, None)
    optimizer.step()
    assert handle.last.step == 0


def test_an_optimizer_in_backward_is_refused_by_name_before_anything_moves():
    weights = [Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in weights}
    handles = [attach(one, GradientControl()) for one in optimizers.values()]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(RuntimeError, match=r"SGD.step\(\) inside the backward pass: an optimizer"):
        sum(weight.square().sum() for weight in weights).backward()
    assert all(torch.equal(weight, torch.ones(2)) for weight in weights)
    assert [handle.last for handle in handles] == [None] * 3


def test_a_collection_of_optimizers_is_refused_with_the_alternative():
    weights = [Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    for given in (optimizers, tuple(optimizers), dict(enumerate(optimizers))):
        with pytest.raises(ValueError, match="give all parameters of the policy to one optimizer"):
            attach(given, GradientControl())


@pytest.mark.parametrize("named", [False, True])
def test_a_group_added_later_is_compared_from_its_second_gradient_on(named, caplog):
    old, new = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([old], lr=0.0)
    names = [("old", old)] if named else None
    handle = attach(optimizer, GradientControl(mode="observe"), named_parameters=names)
    cosines = []
    for t in range(4):
        if t == 1:
            optimizer.add_param_group({"params": [new], "lr": 1.0})
        old.grad = torch.tensor([1.0, 0.0])
        if t >= 1:
            new.grad = torch.tensor([0.0, 1.0 if t == 1 else -1.0])
        optimizer.step()
        cosines.append(handle.last.cosine)
    # <g,p> is 1 over the shared part, then 1 - 1, then 1 + 1.
    assert cosines == [None, pytest.approx(1.0), pytest.approx(0.0), pytest.approx(1.0)]
    assert list(handle.state_dict()["snapshot"]) == [("old" if named else "0.0"), "1.0"]
    told = [r for r in caplog.records if "is in no named_parameters" in r.getMessage()]
    assert len(told) == named


def test_groups_are_clipped_together_and_projected_with_one_coefficient():
    first, second = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    groups = [{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    handle = attach(optimizer, GradientControl(high=1.0), max_norm=0.4)
    for grads in ([1.0, 0.0], [0.6, 0.8]):
        with torch.no_grad():
            first.zero_(), second.zero_()
        first.grad, second.grad = (torch.tensor([grad]) for grad in grads)
        optimizer.step()
    assert handle.last.cosine == pytest.approx(0.6)
    assert handle.last.clip_factor == pytest.approx(0.5, rel=1e-5)
    assert (first.item(), second.item()) == (
        pytest.approx(0.0, abs=1e-7),
        pytest.approx(-0.2, rel=1e-5),
    )


@pytest.mark.parametrize("attach_first", [False, True])
def test_a_scheduler_that_wraps_step_may_come_before_or_after(attach_first):
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], lr=1.0)
    control = GradientControl()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's "lr_scheduler.step() before optimizer.step()"
        if attach_first:
            handle = attach(optimizer, control)
        scheduler = LambdaLR(optimizer, lambda t: 0.5**t)
        if not attach_first:
            handle = attach(optimizer, control)
        regimes = []
        for t in range(3):
            weight.grad = torch.ones(2)
            optimizer.step()
            scheduler.step()
            regimes.append(handle.last.regime)
            assert optimizer.param_groups[0]["lr"] == 0.5 ** (t + 1)
    assert regimes == ["undefined", "skip", "skip"]  # the first step too is counted by torch


@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)])
def test_damp_scales_the_rate_after_a_closure_too_and_restores_it(lr):
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=lr)
    handle = attach(optimizer, GradientControl(above="damp", damp_power=1.0, high=0.5))

    def closure():
        weight.grad = torch.ones(1)

    for expected in (-1.0, -1.0):  # the second gradient is the first: damped by 1 - 1
        optimizer.step(closure)
        assert weight.item() == pytest.approx(expected)
    assert handle.last.regime == "damp"
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_a_loaded_optimizer_state_goes_on_bitwise_with_the_loaded_control(when):
    def run(steps, start=None):
        weights = [Parameter(torch.ones(3)), Parameter(torch.ones(2))]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        if start is not None and when in ("before", "both"):
            optimizer.load_state_dict(start["optimizer"])
        handle = attach(optimizer, GradientControl())
        if start is not None:
            if when in ("after", "both"):
                optimizer.load_state_dict(start["optimizer"])
            handle.load_state_dict(start["control"])
            with torch.no_grad():
                for weight, there in zip(weights, start["weights"], strict=True):
                    weight.copy_(there)
        for t in steps:
            random_gradients(weights, seed=t, mean=0.3)
            optimizer.step()
        return copy.deepcopy(
            {
                "weights": [weight.detach() for weight in weights],
                "optimizer": optimizer.state_dict(),
                "control": handle.state_dict(),
                "record": handle.last.as_dict(),
            }
        )

    whole, resumed = run(range(8)), run(range(4, 8), start=run(range(4)))
    assert whole["record"] == resumed["record"]
    assert whole["record"]["cosine"] is not None
    for a, b in zip(whole["weights"], resumed["weights"], strict=True):
        assert torch.equal(a, b)


def test_shallow_and_pickled_copies_have_no_control_and_leave_the_original_alone():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    for twin in (copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.step()
        assert handle.last is None
        attach(twin, GradientControl()).detach()  # not taken for attached
    optimizer.step()
    assert handle.last.step == 0
    assert weight.item() == -2.0  # copy.copy shares the weights


def test_detaching_an_old_handle_again_leaves_the_new_one_alone():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    control = GradientControl()
    old = attach(optimizer, control)
    old.detach()
    new = attach(optimizer, control)
    old.detach()
    with pytest.raises(ValueError, match="this SGD has a control"):
        attach(optimizer, GradientControl())
    with pytest.raises(ValueError, match="control: it is attached"):
        attach(torch.optim.SGD([weight], lr=1.0), control)
    weight.grad = torch.ones(1)
    for _ in range(2):
        optimizer.step()
    assert new.last.regime == "skip"
    with pytest.warns(UserWarning, match="runs without"):
        copy.deepcopy(optimizer)


def test_a_step_passed_over_is_not_measured_and_the_next_one_is():
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl())
    weight.grad = torch.ones(1)
    optimizer.step()
    weight.grad = None
    handle.pass_over()
    optimizer.step()
    assert handle.last.step == 0
    with pytest.raises(ValueError, match="every gradient is None"):
        optimizer.step()
    weight.grad = torch.ones(1)
    optimizer.step()
    assert (handle.last.step, handle.last.regime) == (1, "skip")


@pytest.mark.parametrize("number", [np.float32, np.float64, torch.tensor])
def test_scalars_of_numpy_and_torch_are_numbers_everywhere(number):
    control = GradientControl(
        low=number(0.25),
        high=number(0.5),
        strength=number(0.5),
        damp_power=number(2.0),
    )
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = attach(optimizer, control, max_norm=number(0.5))
    for _ in range(2):
        weight.grad = torch.ones(2)
        handle.note(lag=number(8.0), drift=number(0.25), expected=number(0.5))
        optimizer.step()
    assert handle.last.regime == "skip"
    assert control.settings == GradientControl(low=0.25, high=0.5, strength=0.5).settings
    json.dumps(handle.last.as_dict())
    json.dumps({k: v for k, v in handle.state_dict().items() if k != "snapshot"})
    applied = GradientControl().apply([("w", weight)], max_norm=number(0.5), lag=number(1.0))
    assert applied.clip_factor == pytest.approx(0.5 / math.sqrt(2))


def test_whole_numbers_and_batches_may_be_scalars_too_and_what_is_none_is_refused():
    control = GradientControl(max_skips=np.int64(2), calibrate_steps=torch.tensor(3))
    assert (control.settings.max_skips, control.settings.calibrate_steps) == (2, 3)
    weight = Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = attach(optimizer, control)
    for batch in (np.int64(3), torch.tensor(3), 3):
        handle.note(batch=batch)
        weight.grad = torch.ones(1)
        optimizer.step()
    assert handle.last.reason == "same batch"
    assert type(handle.state_dict()["batch"]) is int
    for bad in (torch.ones(2), np.ones(1), np.bool_(True), torch.tensor(math.nan), "0.1"):
        with pytest.raises(ValueError, match="max_norm="):
            attach(torch.optim.SGD([weight], lr=0.1), GradientControl(), max_norm=bad)
    with pytest.raises(ValueError, match="low="):
        GradientControl(low=torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize("size", [1e200, 1e-200])
@pytest.mark.parametrize("mode", ["control", "observe", "off"])
def test_float64_gradients_whose_squares_do_not_fit_are_not_acted_on(size, mode):
    """Not projected, clipped or remembered by a number that is not there; nothing turns to NaN."""
    weight = Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(mode=mode), max_norm=1.0)
    for _ in range(2):
        weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
        optimizer.step()
        json.dumps(handle.last.as_dict(), allow_nan=False)
        assert (handle.last.cosine, handle.last.clip_factor) == (None, 1.0)
    held = mode == "control" and size > 1
    assert torch.equal(weight, torch.zeros_like(weight) if held else -2 * weight.grad)
    weight.grad = torch.tensor([1.0, 0.0], dtype=torch.float64)
    optimizer.step()
    assert handle.last.norm_raw == 1.0


@pytest.mark.parametrize("size", [1e100, 1e-100])
def test_float64_gradients_beyond_float32_are_measured_and_clipped(size, caplog):
    weight = Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    handle = attach(optimizer, GradientControl(), max_norm=size)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
            optimizer.step()
            assert handle.last.norm_raw == pytest.approx(5 * size)
            assert handle.last.clip_factor == pytest.approx(size / (5 * size + 1e-6))  # torch's
    # The float32 snapshot cannot hold them, and the record says so rather than cosine 0 or 1.
    assert handle.last.cosine is None
    assert handle.last.reason in ("reference not finite", "zero reference")


@pytest.mark.parametrize("first", [True, False])
def test_a_scheduler_in_a_post_hook_never_sees_a_damped_rate(first):
    weight = Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    control = GradientControl(low=0.0, high=0.1, above="damp")
    if first:
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    attach(optimizer, control)
    if not first:
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    for _ in range(4):
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**4, rel=1e-12)


def test_a_step_in_the_closure_of_a_step_is_refused():
    weight = Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    attach(optimizer, GradientControl(), max_norm=1.0)

    def closure():
        weight.grad = torch.full((3,), 100.0)
        optimizer.step()

    with pytest.raises(RuntimeError, match="its closure calls step"):
        optimizer.step(closure)
    assert torch.equal(weight, torch.zeros(3))
    weight.grad = torch.ones(3)
    optimizer.step()  # and goes on
    assert float(weight.detach().norm()) == pytest.approx(0.1)


@pytest.mark.parametrize("control", [{"low": 0.1}, GradientControl, "observe", None])
def test_what_is_no_control_is_refused_by_name(control):
    with pytest.raises(ValueError, match="give a sidestep\\.GradientControl"):
        attach(torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1), control)


def test_names_may_come_as_a_mapping_and_a_function_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"call it, model\.named_parameters\(\)"):
        attach(optimizer, GradientControl(), named_parameters=model.named_parameters)
    handle = attach(optimizer, GradientControl(), named_parameters=dict(model.named_parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert set(handle.state_dict()["snapshot"]) == {"weight", "bias"}
