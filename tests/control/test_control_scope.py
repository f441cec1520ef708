"""Decisions for the whole model, each parameter group or each block."""

import math

import pytest
import torch
from control_steps import step
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach


def named_parameters(*names):
    return [(name, Parameter(torch.zeros(2))) for name in names]


BLOCKS = ["embed.weight", "layers.0.up", "layers.0.down", "layers.1.up", "head.weight"]
UP, RIGHT, SLANTED, BACK = [0.0, 1.0], [1.0, 0.0], [0.8, 0.6], [-1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("model.layers.12.mlp.experts.7.up.weight", "model.layers.12"),
        ("transformer.h.0.attn.weight", "transformer.h.0"),
        ("blocks.1.weight", "blocks.1"),
        ("encoder.layer.2.output.dense.bias", "encoder.layer.2"),
        ("decoder.block.5.layer.0.weight", "decoder.block.5"),
        ("module.model.layers.3.norm.weight", "module.model.layers.3"),
        ("embed.weight", "rest"),
        ("playlayers.0.weight", "rest"),
        ("path.0.weight", "rest"),
        ("layers.weight", "rest"),
        ("norm.layers.3", "rest"),
    ],
)
def test_a_block_is_found_by_its_name(name, block):
    control, named = GradientControl(scope="block"), named_parameters(name, "layers.99.weight")
    record = step(control, named, RIGHT, RIGHT)
    assert [*record.scopes] == [block, "layers.99"]


def test_each_block_gets_its_own_decision_and_the_record_is_of_the_whole():
    control = GradientControl(scope="block", low=0.1, high=0.9)
    named = named_parameters(*BLOCKS)
    step(control, named, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT)
    record = step(control, named, BACK, SLANTED, RIGHT, RIGHT, UP, max_norm=1.0)
    rest, first, second = (record.scopes[k] for k in ("rest", "layers.0", "layers.1"))
    assert (rest.regime, rest.cosine) == ("pass", pytest.approx(-0.5))
    assert (first.regime, first.cosine) == ("project", pytest.approx(0.9))
    assert (second.regime, second.cosine) == ("skip", pytest.approx(1.0))
    # The whole: <g,p> = -1 + .8 + 1 + 1 + 0 over sqrt(5 * 5).
    assert record.cosine == pytest.approx(1.8 / 5)
    assert record.norm_raw == pytest.approx(math.sqrt(5))
    assert (record.regime, record.decision) == ("project", "project")
    assert record.reason == "scopes: 1 pass, 1 project, 1 skip"
    # layers.0 keeps what is across (1,0,1,0)/sqrt(2): (-.1, .6, .1, 0); layers.1 is left out.
    norm = math.sqrt(2 + 0.1**2 + 0.6**2 + 0.1**2)
    assert record.norm_applied == pytest.approx(norm)
    assert record.clip_factor == pytest.approx(1 / norm, rel=1e-5)
    factor = record.clip_factor
    grads = [p.grad for _, p in named]
    wanted = [BACK, [-0.1, 0.6], [0.1, 0.0], None, UP]
    for grad, values in zip(grads, wanted, strict=True):
        if values is None:
            assert grad is None  # apply() cannot stop its caller: this block must not move
        else:
            assert grad.tolist() == pytest.approx([v * factor for v in values], abs=1e-6)
    applied_product = -1 - 0.1 + 0.1
    assert record.cosine_applied == pytest.approx(applied_product / (norm * math.sqrt(5)))
    assert record.as_dict()["scopes"]["layers.1"]["regime"] == "skip"


def test_every_scope_counts_its_own_skips_and_all_skipped_is_a_skip():
    control = GradientControl(scope="block", high=0.5, max_skips=1)
    named = named_parameters("layers.0.w", "layers.1.w")
    step(control, named, RIGHT, RIGHT)
    record = step(control, named, RIGHT, BACK)
    assert [s.regime for s in record.scopes.values()] == ["skip", "pass"]
    record = step(control, named, RIGHT, BACK)
    assert [s.regime for s in record.scopes.values()] == ["project", "skip"]
    assert [s.skips_in_a_row for s in record.scopes.values()] == [0, 1]
    record = step(control, named, BACK, [0.0, 2.0])
    assert [s.regime for s in record.scopes.values()] == ["pass", "pass"]
    record = step(control, named, BACK, UP)
    assert (record.regime, record.norm_applied, record.clip_factor) == ("skip", 0.0, 1.0)
    assert [p.grad.tolist() for _, p in named] == [BACK, UP]  # a whole skip leaves them
    assert record.skips_in_a_row == 1


def test_one_scope_without_signal_or_reference_is_undefined_alone():
    control = GradientControl(scope="block", high=1.0)
    named = named_parameters("layers.0.w", "layers.1.w", "layers.2.w")
    step(control, named, RIGHT, RIGHT, None)
    record = step(control, named, RIGHT, [0.0, 0.0], RIGHT)
    reasons = [(s.regime, s.reason) for s in record.scopes.values()]
    assert reasons == [
        ("project", "above low"),
        ("undefined", "zero gradient"),
        ("undefined", "no reference in this scope"),
    ]
    assert record.regime == "project"
    assert record.cosine == pytest.approx(1 / 2)


def test_a_non_finite_value_in_one_block_skips_them_all():
    control = GradientControl(scope="block")
    named = named_parameters("layers.0.w", "layers.1.w")
    step(control, named, RIGHT, RIGHT)
    record = step(control, named, [math.nan, 0.0], RIGHT)
    assert (record.regime, record.norm_raw) == ("skip", None)
    assert {s.reason for s in record.scopes.values()} == {"non-finite"}


def test_groups_come_from_the_optimizer_and_a_skipped_one_alone_stays():
    first, second = Parameter(torch.zeros(2)), Parameter(torch.ones(2))
    groups = [{"params": [first]}, {"params": [second], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    handle = attach(optimizer, GradientControl(scope="group"))
    for k, second_grad in enumerate((RIGHT, RIGHT)):
        before = [p.detach().clone() for p in (first, second)]
        state = {key: v.clone() for key, v in optimizer.state.get(second, {}).items()}
        first.grad, second.grad = torch.tensor([RIGHT, BACK][k]), torch.tensor(second_grad)
        optimizer.step()
    assert [*handle.last.scopes] == ["group 0", "group 1"]
    assert [s.regime for s in handle.last.scopes.values()] == ["pass", "skip"]
    assert handle.last.regime == "pass"
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])
    assert all(torch.equal(optimizer.state[second][key], v) for key, v in state.items())
    assert second.grad.tolist() == RIGHT  # put back


def test_damp_by_group_scales_the_rates_of_those_groups():
    first, second = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1.0)
    control = GradientControl(scope="group", above="damp", damp_power=1.0, high=0.5)
    handle = attach(optimizer, control)
    for grads in ((RIGHT, RIGHT), (SLANTED, UP)):
        before = [p.detach().clone() for p in (first, second)]
        first.grad, second.grad = (torch.tensor(grad) for grad in grads)
        optimizer.step()
    assert [s.regime for s in handle.last.scopes.values()] == ["damp", "pass"]
    assert handle.last.step_scale == 1.0  # not shared
    assert (before[0] - first).tolist() == pytest.approx([0.16, 0.12])
    assert (before[1] - second).tolist() == UP
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]


@pytest.mark.parametrize("space", ["gradient", "update"])
def test_damp_by_block_inside_one_group_shortens_the_step_of_those_blocks(space):
    named = named_parameters("layers.0.w", "layers.1.w")
    parameters = [p for _, p in named]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    control = GradientControl(scope="block", space=space, above="damp", damp_power=1.0, high=0.5)
    handle = attach(optimizer, control, named_parameters=named)
    for grads in ((RIGHT, RIGHT), (SLANTED, UP)):
        before = [p.detach().clone() for p in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = torch.tensor(grad)
        optimizer.step()
    assert [s.regime for s in handle.last.scopes.values()] == ["damp", "pass"]
    assert (before[0] - parameters[0]).tolist() == pytest.approx([0.16, 0.12])
    assert (before[1] - parameters[1]).tolist() == UP
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_update_space_decides_by_block():
    named = named_parameters("layers.0.w", "layers.1.w")
    optimizer = torch.optim.SGD([p for _, p in named], lr=1.0)
    control = GradientControl(scope="block", space="update", low=0.1, high=1.0)
    handle = attach(optimizer, control, named_parameters=named)
    for grads in ((RIGHT, RIGHT), (SLANTED, BACK)):
        before = [p.detach().clone() for _, p in named]
        for (_, parameter), grad in zip(named, grads, strict=True):
            parameter.grad = torch.tensor(grad)
        optimizer.step()
    assert [s.regime for s in handle.last.scopes.values()] == ["project", "pass"]
    assert (before[0] - named[0][1]).tolist() == pytest.approx([0.0, 0.6], abs=1e-6)
    assert (before[1] - named[1][1]).tolist() == BACK


def test_secants_are_learned_by_block():
    """Curvature 2 in one block, 6 in the other: each reads its own."""
    named = named_parameters("layers.0.w", "layers.1.w")
    control = GradientControl(scope="block", reference="displacement", strength="secant")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        b = [torch.randn(2, generator=generator) for _ in named]
        weights = {name: part for (name, _), part in zip(named, b, strict=True)}
        record = step(control, named, 2.0 * b[0], 6.0 * b[1], behaviour=weights)
    h = [s.curvature for s in record.scopes.values()]
    assert h == pytest.approx([2.0, 6.0], rel=1e-5)
    assert record.curvature is None


def test_one_scope_decides_as_the_whole_model_does():
    generator = torch.Generator().manual_seed(0)
    whole, named = GradientControl(), named_parameters("layers.0.a", "layers.0.b")
    blocks, named_too = GradientControl(scope="block"), named_parameters("layers.0.a", "layers.0.b")
    for _ in range(8):
        grads = [torch.randn(2, generator=generator) + 0.7 for _ in named]
        a, b = step(whole, named, *grads), step(blocks, named_too, *grads)
        assert (a.regime, a.cosine, a.norm_applied) == (b.regime, b.cosine, b.norm_applied)
        assert b.scopes["layers.0"].reason == a.reason
        for (_, p), (_, q) in zip(named, named_too, strict=True):
            assert torch.equal(p.grad, q.grad)


def test_what_cannot_be_split_is_refused_by_name():
    named = named_parameters("weight", "bias")
    with pytest.raises(ValueError, match=r"scope='block'.*'weight'.*named_parameters"):
        step(GradientControl(scope="block"), named, RIGHT, RIGHT)
    with pytest.raises(ValueError, match=r"scope='group'.*'weight'.*groups="):
        step(GradientControl(scope="group"), named, RIGHT, RIGHT)
    control = GradientControl(scope="group")
    record = step(control, named, RIGHT, RIGHT, groups={"weight": "matrices", "bias": "vectors"})
    assert [*record.scopes] == ["matrices", "vectors"]
