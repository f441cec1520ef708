"""space="update": the control acts on the step the optimizer made, whatever the optimizer."""

import copy
import math

import pytest
import torch
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach

LR, DECAY = 0.05, 0.3
# (optimizer, whether its weight decay is decoupled)
OPTIMIZERS = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=DECAY, foreach=False), True),
    "adamw-foreach": (
        lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=DECAY, foreach=True),
        True,
    ),
    "adamw-fused": (lambda ps: torch.optim.AdamW(ps, lr=LR, weight_decay=DECAY, fused=True), True),
    "adam": (lambda ps: torch.optim.Adam(ps, lr=LR, weight_decay=DECAY), False),
    "nadam": (
        lambda ps: torch.optim.NAdam(ps, lr=LR, weight_decay=DECAY, decoupled_weight_decay=True),
        True,
    ),
    "sgd-momentum": (
        lambda ps: torch.optim.SGD(ps, lr=LR, momentum=0.9, weight_decay=DECAY),
        False,
    ),
    "adafactor": (lambda ps: torch.optim.Adafactor(ps, lr=LR, weight_decay=DECAY), True),
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (1,))]


def set_gradients(parameters, seed, mean=0.7):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) + mean


def flat(tensors):
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def moments(optimizer):
    return [
        value.clone()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def twin_of(optimizer, kind, parameters):
    """A bare optimizer on copies, in the same state."""
    copies = [Parameter(p.detach().clone()) for p in parameters]
    twin = OPTIMIZERS[kind][0](copies)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, copies


@every_optimizer
@pytest.mark.parametrize("reference", ["previous", "displacement"])
def test_the_step_that_the_optimizer_made_loses_its_part_along_the_reference(kind, reference):
    """Against a bare twin from the same state: u' = u - a <u,r> r / |r|^2, moments alike."""
    build, is_decoupled = OPTIMIZERS[kind]
    parameters = weights()
    optimizer, strength = build(parameters), 0.75
    control = GradientControl(
        space="update", reference=reference, low=0.0, high=1.0, strength=strength
    )
    handle = attach(optimizer, control)
    kept = 1.0 - LR * DECAY if is_decoupled else 1.0
    past, previous, projected = [flat(parameters)] * 3, None, 0
    for seed in range(7):
        before = flat(parameters)
        set_gradients(parameters, seed)
        twin, copies = twin_of(optimizer, kind, parameters)
        for parameter, twin_parameter in zip(parameters, copies, strict=True):
            twin_parameter.grad = parameter.grad.clone()
        twin.step()
        behaviour = past[-3]
        parts = behaviour.float().split([p.numel() for p in parameters])
        shaped = [part.view_as(p) for p, part in zip(parameters, parts, strict=True)]
        handle.note(behaviour={f"0.{k}": part for k, part in enumerate(shaped)})
        optimizer.step()
        for ours, bare in zip(moments(optimizer), moments(twin), strict=True):
            assert torch.equal(ours, bare)
        update = flat(copies) - kept * before
        r = before - behaviour if reference == "displacement" else previous
        applied = flat(parameters) - kept * before
        record = handle.last
        if r is not None and r.norm() > 0:
            size = float(update.norm() * r.norm())
            cosine = float(update @ r) / size
            assert record.cosine == pytest.approx(cosine, abs=1e-5)
            wanted = update - strength * max(cosine, 0.0) * update.norm() * r / r.norm()
            assert (applied - wanted).norm() <= 1e-6 * before.norm()
            share = strength if cosine > 0 else 0.0
            assert float(applied @ r) == pytest.approx(
                (1 - share) * float(update @ r), abs=1e-5 * size
            )
            assert record.norm_raw == pytest.approx(float(update.norm()), rel=1e-5)
            wanted_norm = float(update.norm()) * math.sqrt(1 - (2 * share - share**2) * cosine**2)
            assert record.norm_applied == pytest.approx(wanted_norm, rel=1e-5)
            projected += record.regime == "project"
        else:
            assert record.regime == "undefined"
            assert torch.equal(flat(parameters), flat(copies))
        past, previous = [*past, flat(parameters)], applied
    assert projected >= 3


@every_optimizer
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "off"},
        {"mode": "observe"},
        {"mode": "observe", "reference": "ema"},
        {"mode": "observe", "reference": "displacement"},
        {"low": 1.0, "high": 1.0},
        {"low": 1.0, "high": 1.0, "reference": "displacement", "scope": "group"},
    ],
    ids=str,
)
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_where_nothing_is_to_be_done_the_step_is_the_bare_one_bit_for_bit(kind, settings, max_norm):
    runs, norm = [], None
    for controlled in (False, True):
        parameters = weights()
        optimizer = OPTIMIZERS[kind][0](parameters)
        if controlled:
            handle = attach(optimizer, GradientControl(space="update", **settings), max_norm)
        elif max_norm is not None:  # ours clips in every mode: the same clip, without control
            attach(optimizer, GradientControl(mode="off"), max_norm)
        for seed in range(5):
            set_gradients(parameters, seed)
            if seed == 3:
                parameters[1].grad = None
            norm = math.sqrt(
                sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
            )
            optimizer.step()
        runs.append((flat(parameters), moments(optimizer)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert handle.last.norm_gradient == pytest.approx(norm, rel=1e-6)
    if max_norm is not None:
        assert handle.last.clip_factor == pytest.approx(max_norm / norm, rel=1e-5)


def test_a_tiny_strength_is_nearly_the_bare_optimizer():
    runs = []
    for strength in (None, 1e-6):
        parameters = weights()
        optimizer = torch.optim.AdamW(parameters, lr=LR)
        if strength is not None:
            control = GradientControl(space="update", low=0.0, high=1.0, strength=strength)
            handle = attach(optimizer, control)
        for seed in range(5):
            set_gradients(parameters, seed)
            optimizer.step()
        runs.append(flat(parameters))
    assert handle.last.regime == "project"
    assert (runs[0] - runs[1]).abs().max() <= 1e-6


@every_optimizer
def test_damp_shortens_the_step_and_leaves_decoupled_decay(kind):
    build, is_decoupled = OPTIMIZERS[kind]
    kept = 1.0 - LR * DECAY if is_decoupled else 1.0
    parameters = weights()
    optimizer = build(parameters)
    control = GradientControl(space="update", above="damp", low=0.0, high=0.0, damp_power=1.0)
    handle = attach(optimizer, control)
    for seed in range(3):
        before = flat(parameters)
        set_gradients(parameters, seed)
        twin, copies = twin_of(optimizer, kind, parameters)
        for parameter, twin_parameter in zip(parameters, copies, strict=True):
            twin_parameter.grad = parameter.grad.clone()
        twin.step()
        optimizer.step()
    record = handle.last
    assert (record.regime, record.reason) == ("damp", "above high")
    assert record.step_scale == pytest.approx(1 - record.cosine)
    update = flat(copies) - kept * before
    applied = flat(parameters) - kept * before
    assert (applied - record.step_scale * update).norm() <= 1e-6 * before.norm()
    assert record.norm_applied == pytest.approx(float(applied.norm()), rel=1e-4)
    assert all(group["lr"] == LR for group in optimizer.param_groups)


def test_the_reference_is_the_applied_update_and_raw_on_request():
    for snapshot, wanted in ((None, "applied"), ("raw", "raw")):
        weight = Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        control = GradientControl(
            space="update", low=0.0, high=1.0, strength=0.5, snapshot=snapshot
        )
        handle = attach(optimizer, control)
        for grad in ([-1.0, 0.0], [-0.6, -0.8]):
            weight.grad = torch.tensor(grad)
            optimizer.step()
        assert handle.last.cosine == pytest.approx(0.6)
        assert weight.tolist() == pytest.approx([1.3, 0.8])
        stored = handle.state_dict()["snapshot"]["0.0"].tolist()
        assert stored == pytest.approx([0.3, 0.8] if wanted == "applied" else [0.6, 0.8])


def test_an_update_that_is_only_rounding_is_not_kept_as_a_direction():
    weight = Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(space="update", low=0.0, high=1.0))
    for _ in range(3):
        weight.grad = torch.linspace(1, 2, 1000)
        optimizer.step()
    assert handle.last.cosine == pytest.approx(1.0)
    assert handle.last.cosine_applied is None


def test_apply_refuses_the_update_space_and_names_the_way():
    weight = Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"space='update'.*attach"):
        GradientControl(space="update").apply([("w", weight)])


def test_a_parameter_without_gradient_is_not_moved_and_a_frozen_one_not_copied():
    moving, still, frozen = (Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW([moving, still, frozen], lr=0.1, weight_decay=0.5)
    handle = attach(optimizer, GradientControl(space="update", low=0.0, high=1.0))
    for seed in range(3):
        set_gradients([moving], seed)
        if seed == 0:
            set_gradients([still], 9)
        else:
            still.grad = None
        before = still.detach().clone()
        optimizer.step()
        assert seed == 0 or torch.equal(still, before)
    assert frozen.tolist() == [1.0, 1.0]
    assert handle.last.cosine is not None


@pytest.mark.parametrize("mode", ["control", "observe"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b34_a_non_finite_gradient_stops_the_step_before_the_moments_move(mode, bad):
    parameters = weights()
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    handle = attach(optimizer, GradientControl(space="update", mode=mode), max_norm=1.0)
    set_gradients(parameters, 0)
    optimizer.step()
    state, before = handle.state_dict(), (flat(parameters), moments(optimizer))
    set_gradients(parameters, 1)
    parameters[0].grad[0, 0] = bad
    optimizer.step()
    record = handle.last
    assert (record.decision, record.reason, record.norm_raw) == ("skip", "non-finite", None)
    assert record.regime == ("skip" if mode == "control" else "undefined")
    assert handle.state_dict()["snapshot"].keys() == state["snapshot"].keys()
    for name, stored in handle.state_dict()["snapshot"].items():
        assert torch.equal(stored, state["snapshot"][name])
    if mode == "control":
        assert torch.equal(flat(parameters), before[0])
        assert all(torch.equal(a, b) for a, b in zip(moments(optimizer), before[1], strict=True))
        assert parameters[0].grad is not None
        set_gradients(parameters, 2)
        optimizer.step()
        assert handle.last.cosine is not None and torch.isfinite(flat(parameters)).all()


def test_an_update_that_is_not_finite_is_undone():
    class Broken(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            super().step(closure)
            if self.broken:
                self.param_groups[0]["params"][0].data[0] = math.nan

    weight = Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Broken([weight], lr=0.1)
    handle = attach(optimizer, GradientControl(space="update"))
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.broken = True
    weight.grad = -torch.ones(2)
    before = weight.detach().clone()
    optimizer.step()
    assert (handle.last.regime, handle.last.reason) == ("skip", "non-finite update")
    assert torch.equal(weight, before)
    optimizer.broken = False
    optimizer.step()
    assert handle.last.cosine == pytest.approx(-1.0)


def test_a_step_that_moves_nothing_has_no_direction():
    weight = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(space="update"))
    for lr in (1.0, 0.0, 1.0):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.ones(2)
        optimizer.step()
        if lr == 0.0:
            assert (handle.last.regime, handle.last.reason) == ("undefined", "zero update")
    assert handle.last.cosine == pytest.approx(1.0)


class SubclassOfAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SubclassOfAdamW])
def test_a_closure_and_a_subclass_act_once_after_the_update(kind):
    runs = []
    for mode in ("plain", "closure"):
        weight = Parameter(torch.tensor([1.0, -2.0]))
        optimizer = kind([weight], lr=0.1)
        handle = attach(optimizer, GradientControl(space="update", low=0.0, high=1.0))
        torch.optim.AdamW([Parameter(torch.zeros(1))])

        def closure(optimizer=optimizer, weight=weight):
            optimizer.zero_grad()
            loss = (weight - 3.0).square().sum()
            loss.backward()
            return loss

        for t in range(4):
            if mode == "closure":
                assert optimizer.step(closure).item() > 0
            else:
                closure()
                optimizer.step()
            assert handle.last.step == t
        runs.append((weight.detach(), handle.last))
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]
    assert runs[0][1].regime == "project"


@pytest.mark.parametrize("fused", [False, True])
def test_b23_grad_scaler_the_update_is_that_of_unscaled_gradients(fused):
    results = []
    for scale in (None, 1024.0):
        weight = Parameter(torch.tensor([1.0, 1.0]))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused, foreach=False)
        control = GradientControl(space="update", low=0.0, high=1.0)
        handle = attach(optimizer, control, max_norm=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for t in range(4):
            optimizer.zero_grad()
            scaler.scale((weight * torch.tensor([1.0, 0.5 * t])).sum()).backward()
            if scale and not fused:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append((weight.detach(), handle.last.cosine, handle.last.norm_gradient))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-5)


def test_a_step_that_raises_leaves_nothing_behind():
    class Fragile(torch.optim.SGD):
        broken = False

        def step(self, closure=None):
            if self.broken:
                raise MemoryError
            return super().step(closure)

    weight = Parameter(torch.zeros(1))
    optimizer = Fragile([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(space="update"))
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.broken = True
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.broken = False
    optimizer.step()
    assert weight.item() == pytest.approx(-1.0)  # the second update was all along the first
    assert handle.last.step == 1


def test_half_precision_weights_are_corrected_to_within_their_rounding():
    weight = Parameter(torch.randn(2000, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(space="update", low=0.0, high=1.0))
    generator, mean = torch.Generator().manual_seed(1), torch.ones(2000)
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = (mean + torch.randn(2000, generator=generator)).bfloat16()
        optimizer.step()
        stored = handle.state_dict()["snapshot"]["0.0"]
        assert torch.equal(stored, weight.float() - before.float())  # what was really applied
    assert handle.last.regime == "project"
    assert handle.last.cosine == pytest.approx(0.5, abs=0.05)
    assert abs(handle.last.cosine_applied) <= 1e-6


def test_weight_decay_that_cannot_be_told_from_the_update_is_said(caplog):
    class Unknown(torch.optim.Optimizer):
        def __init__(self, params, **extra):
            super().__init__(params, {"lr": 0.1, "weight_decay": 0.1, **extra})

    attach(Unknown([Parameter(torch.zeros(1))]), GradientControl())
    attach(Unknown([Parameter(torch.zeros(1))], decoupled_weight_decay=False), GradientControl())
    assert caplog.text == ""
    attach(Unknown([Parameter(torch.zeros(1))]), GradientControl(space="update"))
    assert "weight decay of Unknown" in caplog.text


def test_a_group_can_say_itself_that_its_decay_is_decoupled():
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad, alpha=group["lr"])

    for said, norm in ((True, 0.1), (False, 0.11)):
        weight = Parameter(torch.ones(1))
        defaults = {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": said}
        handle = attach(Own([weight], defaults), GradientControl(space="update"))
        weight.grad = torch.ones(1)
        handle.optimizer.step()
        assert handle.last.norm_raw == pytest.approx(norm, rel=1e-5)


def test_copies_live_only_for_the_length_of_the_step():
    weight = Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = attach(optimizer, GradientControl(space="update"))
    weight.grad = torch.ones(4)
    optimizer.step()
    assert handle._step is None


def test_an_update_that_is_damped_away_is_not_the_next_reference():
    weight = Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    control = GradientControl(space="update", low=0.0, high=0.1, above="damp")
    handle = attach(optimizer, control)
    regimes = []
    for _ in range(5):
        weight.grad = torch.tensor([1.0, 2.0, 2.0])
        optimizer.step()
        regimes.append(handle.last.regime)
    assert regimes == ["undefined", *["damp"] * 4]
    assert torch.allclose(weight, torch.tensor([-0.1, -0.2, -0.2]))
