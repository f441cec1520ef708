"""What holds for every reference and space: split, order and scale do not matter, promises hold."""

import math

import pytest
import torch
from control_steps import flatten
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.control.attach import attach

LAG, SIZE = 3, 24
FAMILY = [
    {},
    {"reference": "ema"},
    {"reference": "displacement"},
    {"reference": "displacement", "exact": True},
    {"reference": "displacement", "exact": True, "strength": "secant"},
    {"reference": "displacement", "exact": True, "strength": "drift"},
    {"space": "update"},
    {"space": "update", "reference": "ema"},
    {"space": "update", "reference": "displacement"},
    {"space": "update", "reference": "displacement", "exact": True},
    {"space": "update", "above": "damp", "high": 0.3},
]
every_member = pytest.mark.parametrize("member", FAMILY, ids=str)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def descend(member, sizes, order=None, scale=1.0, build=adamw, max_norm=0.7):
    """A stale descent of SIZE weights held in tensors of these sizes; weights and records.

    order: in which order the optimizer has them. scale: of loss and thus gradient.
    """
    member = {"low": 0.0, "high": 1.0, **member}
    exact = member.pop("exact", False)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    parts = [Parameter(part.clone()) for part in start.split(sizes)]
    named = [(f"part{k}", part) for k, part in enumerate(parts)]
    ordered = [named[k] for k in order] if order else named
    optimizer = build([p for _, p in ordered])
    handle = attach(optimizer, GradientControl(**member), max_norm, named_parameters=ordered)
    past, records = [start] * (LAG + 1), []
    for _ in range(10):
        behaviour = past[-(LAG + 1)]
        noise = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        raw = scale * (behaviour + 0.5 * noise)
        for part, grad in zip(parts, raw.split(sizes), strict=True):
            part.grad = grad.clone()
        handle.note(lag=LAG, drift=0.04)
        if exact:
            weights = dict(zip((n for n, _ in named), behaviour.split(sizes), strict=True))
            handle.note(behaviour=weights)
        optimizer.step()
        past.append(torch.cat([part.detach().clone() for part in parts]))
        records.append(handle.last)
    return past[-1], records


def assert_same_run(one, other):
    (weights, records), (other_weights, other_records) = one, other
    assert torch.allclose(weights, other_weights, rtol=0, atol=1e-6)
    assert [r.regime for r in records] == [r.regime for r in other_records]
    for a, b in zip(records, other_records, strict=True):
        assert (a.cosine is None) == (b.cosine is None)
        if a.cosine is not None:
            assert a.cosine == pytest.approx(b.cosine, abs=1e-6)
    assert {"project", "damp"} & {r.regime for r in records}


@every_member
def test_how_the_weights_are_cut_into_tensors_does_not_matter(member):
    whole = descend(member, [SIZE])
    for sizes in ([1, SIZE - 1], [7, 0, 9, 8], [1] * SIZE):
        assert_same_run(whole, descend(member, sizes))


@every_member
def test_the_order_of_the_parameters_does_not_matter(member):
    sizes = [7, 1, 9, 7]
    assert_same_run(descend(member, sizes), descend(member, sizes, order=[2, 0, 3, 1]))


@every_member
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**30])
def test_the_scale_of_the_loss_does_not_matter(member, scale):
    """SGD with a rate that undoes the scale steps alike, so everything else must be alike too."""
    runs = [
        descend(
            member,
            [7, 17],
            scale=s,
            build=lambda ps, s=s: torch.optim.SGD(ps, lr=0.02 / s),
            max_norm=None,  # torch's clip factor has an absolute 1e-6 in it
        )
        for s in (1.0, scale)
    ]
    assert_same_run(*runs)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shapes_dtypes_and_nones_keep_the_promise_in_each_space(data):
    """<v',p> = (1-a) <v,p> and |v'|^2 = |v|^2 (1 - (2a-a^2) c^2), v and p from outside."""
    shapes = data.draw(
        st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)
    )
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in shapes]
    space = data.draw(st.sampled_from(["gradient", "update"]))
    exact = data.draw(st.booleans())
    strength = data.draw(st.sampled_from([0.3, 1.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    named = [
        (str(k), Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for k, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.5, foreach=False)
    reference = "displacement" if exact else "previous"
    control = GradientControl(
        space=space, reference=reference, low=0.0, high=1.0, strength=strength
    )
    handle, previous = attach(optimizer, control, named_parameters=named), None
    for _ in range(3):
        missing = [data.draw(st.booleans()) for _ in named]
        if all(missing):
            continue
        v, p, applied, size = one_step(named, missing, space, exact, optimizer, handle, generator)
        p = p if exact else previous
        if handle.last.cosine is not None:
            # an update is read from weights, which are rounded to their own dtype
            rounding = 8 * max(torch.finfo(dtype).eps for dtype in dtypes) * size
            assert_promises(handle.last, v, p, applied, strength, rounding, any(missing))
        kept = applied if space == "update" else v
        previous = kept if float(kept.norm()) > 0 else previous


def one_step(named, missing, space, exact, optimizer, handle, generator):
    """(v, exact p, v', size of what is rounded) of one SGD step on random gradients."""
    for (_, parameter), none in zip(named, missing, strict=True):
        grad = torch.randn(parameter.shape, generator=generator) + 0.5
        parameter.grad = None if none else grad.to(parameter.dtype)
    raw = flatten([None if p.grad is None else p.grad.clone() for _, p in named], named)
    before = flatten([p.detach() for _, p in named], named)
    behaviour = {n: p.detach() + torch.tensor(0.25, dtype=p.dtype) for n, p in named}
    moved_back = flatten([behaviour[n] for n, _ in named], named) - before
    if exact:
        handle.note(behaviour=behaviour)
    optimizer.step()
    if space == "gradient":
        applied = flatten([p.grad for _, p in named], named)
        return raw, moved_back, applied, float(raw.norm())
    applied = flatten([p.detach() for _, p in named], named) - before
    return -0.5 * raw, -moved_back, applied, float(raw.norm() + before.norm())


def assert_promises(record, v, p, applied, strength, rounding, has_gaps):
    norm, length = float(v.norm()), float(p.norm())
    tolerance = rounding + 1e-6 * norm
    share = strength if record.regime == "project" else 0.0
    assert -1.0 <= record.cosine <= 1.0
    assert abs(record.cosine * record.norm_raw * length - float(v @ p)) <= tolerance * length
    assert abs(float(applied @ p) - (1 - share) * float(v @ p)) <= tolerance * length
    assert abs(record.norm_applied - float(applied.norm())) <= tolerance
    if not has_gaps:
        kept = 1 - (2 * share - share**2) * record.cosine**2
        wanted = record.norm_raw * math.sqrt(max(0.0, kept))
        assert abs(record.norm_applied - wanted) <= 1e-6 * record.norm_raw
