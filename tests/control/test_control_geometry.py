"""Inner products against float64, in every size, split, dtype and range."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.control import kernels
from sidestep.control.geometry import Pair, products


def exact(gs, ps):
    """The same products the plain way: one float64 vector each."""
    g = torch.cat([t.double().reshape(-1) for t in gs])
    p = torch.cat([t.double().reshape(-1) for t in ps])
    return float(g @ g), float(p @ p), float(g @ p)


def measured(gs, ps):
    return products([Pair(g, p) for g, p in zip(gs, ps, strict=True)])


def assert_accurate(got, gs, ps, relative=1e-6):
    gg, pp, gp = exact(gs, ps)
    assert got.gg == pytest.approx(gg, rel=2 * relative)
    assert got.pp == pytest.approx(pp, rel=2 * relative)
    assert abs(got.gp - gp) <= relative * math.sqrt(gg) * math.sqrt(pp)


def random_pair(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(*shape, generator=generator, dtype=torch.float64)
    p = 0.5 * g + torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (g * scale).to(dtype), (p * scale).to(dtype)


@pytest.mark.parametrize("num_elements", [1, 1000, kernels.CPU_CHUNK, 3 * kernels.CPU_CHUNK + 1])
def test_products_agree_with_float64_at_every_size(num_elements):
    g, p = random_pair(num_elements)
    assert_accurate(measured([g], [p]), [g], [p], relative=1e-12)


def test_products_of_many_equal_elements_do_not_drift():
    # Rounding always falls to the same side here: float32 dots are off by 8e-4 at this size.
    g = torch.full((2**22,), 0.1)
    assert measured([g], [g]).gg == pytest.approx(2**22 * g[0].double().item() ** 2, rel=1e-6)


def split_into(tensor, num_parts):
    """Parts of very different sizes."""
    sizes = [tensor.numel() // 2**k for k in range(1, num_parts)]
    return torch.split(tensor, [*sizes, tensor.numel() - sum(sizes)])


def assert_holds_at_size(num_elements, g_dtype, p_dtype, num_parts):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_elements, generator=generator)
    g = torch.randn(num_elements, generator=generator).add_(noise, alpha=0.3).to(g_dtype)
    p = noise.to(p_dtype)
    del noise
    got = measured(split_into(g, num_parts), split_into(p, num_parts))
    wide = [(a.double(), b.double()) for a, b in zip(g.split(2**22), p.split(2**22), strict=True)]
    gg, pp, gp = (
        math.fsum(float(torch.dot(*both)) for both in pairs)
        for pairs in (
            [(a, a) for a, _ in wide],
            [(b, b) for _, b in wide],
            wide,
        )
    )
    assert got.norm == pytest.approx(math.sqrt(gg), rel=1e-6)
    assert got.pp == pytest.approx(pp, rel=1e-6)
    assert abs(got.gp - gp) <= 1e-6 * math.sqrt(gg * pp)


@pytest.mark.parametrize("p_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("g_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_parts", [1, 9])
def test_products_agree_with_float64_at_ten_million_elements(g_dtype, p_dtype, num_parts):
    assert_holds_at_size(10**7, g_dtype, p_dtype, num_parts)


@pytest.mark.slow
@pytest.mark.parametrize("g_dtype", [torch.bfloat16, torch.float32])
def test_products_agree_with_float64_at_a_hundred_million_elements(g_dtype):
    assert_holds_at_size(10**8, g_dtype, torch.float32, 9)


@pytest.mark.parametrize("g_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("p_dtype", [torch.bfloat16, torch.float32])
def test_products_agree_with_float64_in_every_dtype(g_dtype, p_dtype):
    g, p = random_pair(1000)
    g, p = g.to(g_dtype), p.to(p_dtype)
    assert_accurate(measured([g], [p]), [g], [p], relative=1e-12)


@pytest.mark.parametrize("num_elements", [100, 10_000, 1_000_000])
def test_a_bfloat16_snapshot_moves_the_cosine_as_little_as_the_page_says(num_elements):
    g, p = random_pair(num_elements)
    moved = measured([g], [p.bfloat16()]).cosine - measured([g], [p]).cosine
    assert abs(moved) <= 3 * 0.002 / math.sqrt(num_elements)


@pytest.mark.parametrize("g_scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("p_scale", [1e-25, 1.0, 1e20])
def test_products_agree_with_float64_where_squares_leave_float32(g_scale, p_scale):
    g, p = random_pair(1000)
    g, p = g * g_scale, p * p_scale
    got = measured([g], [p])
    assert_accurate(got, [g], [p], relative=1e-12)
    assert got.cosine == pytest.approx(0.5 / math.sqrt(1.25), abs=0.05)


def test_mixed_magnitudes_in_one_model_are_all_seen():
    gs = [torch.full((10,), 1e20), torch.full((10,), 1e-25), torch.ones(10)]
    ps = [torch.zeros(10), torch.full((10,), 1e20), torch.zeros(10)]
    assert_accurate(measured(gs, ps), gs, ps, relative=1e-12)


def test_b04_cosine_of_a_vector_with_itself_is_never_above_one():
    g = torch.arange(84.0)
    assert measured([g], [g]).cosine <= 1.0
    assert measured([g], [g]).cosine == pytest.approx(1.0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        g = torch.randn(1000, generator=generator)
        assert 1.0 - 1e-12 <= measured([g], [g]).cosine <= 1.0
        assert -1.0 <= measured([g], [-g]).cosine <= -1.0 + 1e-12


def test_b06_float16_norms_past_65504_are_finite():
    assert measured([torch.tensor([300.0]).half()], [None]).norm == pytest.approx(300.0)
    assert measured([torch.full((5,), 30000.0).half()], [None]).norm == pytest.approx(
        67082, rel=1e-5
    )


@pytest.mark.parametrize("value", [1e-10, 1e-25])
def test_b08_a_tiny_gradient_has_a_direction(value):
    g = value * torch.ones(100)
    assert measured([g], [g.clone()]).cosine == pytest.approx(1.0, abs=1e-12)


def test_b09_a_huge_finite_gradient_has_a_direction_and_a_non_finite_one_is_told():
    g = torch.full((100,), 1e20)
    assert measured([g], [g.clone()]).cosine == pytest.approx(1.0, abs=1e-12)
    for odd in (math.inf, -math.inf, math.nan):
        got = measured([torch.tensor([1.0, 2.0, odd, 4.0]), torch.ones(3)], [None, None])
        assert not got.finite
        assert got.cosine is None


@pytest.mark.parametrize("shape", [(6, 4), (3, 8, 2)])
def test_non_contiguous_gradients_are_read_in_logical_order(shape):
    g, p = random_pair(*shape)
    assert_accurate(measured([g.transpose(0, 1)], [p.transpose(0, 1).contiguous()]), [g], [p])
    expanded = torch.tensor(2.0).expand(5)
    assert measured([expanded], [torch.arange(5.0)]).gp == 20.0


def test_the_norm_has_the_same_bits_with_and_without_a_reference():
    gs = [random_pair(n, seed=n)[0] for n in (1000, 7, kernels.CPU_CHUNK + 3, 12345)]
    ps = [torch.randn_like(g) for g in gs]
    alone = products([Pair(g, None) for g in gs])
    silent = Pair(None, torch.ones(99))
    beside = products([Pair(gs[0], ps[0]), silent, *map(Pair, gs[1:], ps[1:])])
    assert alone.gg == beside.gg
    assert beside.gg_compared == beside.gg


def test_parts_without_gradient_count_for_the_reference_and_new_ones_for_the_norm_alone():
    got = products(
        [
            Pair(torch.tensor([3.0]), torch.tensor([4.0])),
            Pair(None, torch.tensor([3.0])),
            Pair(torch.tensor([12.0]), None, compared=False),
            Pair(torch.tensor([4.0]), None),
        ]
    )
    assert (got.gg, got.gg_compared) == (169.0, 25.0)
    assert (got.pp, got.pp_reachable, got.gp) == (25.0, 16.0, 12.0)
    assert got.cosine == pytest.approx(12 / 25)
    assert got.reach == pytest.approx(0.8)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_products_do_not_depend_on_split_and_order(data):
    num_elements = data.draw(st.integers(1, 300))
    g, p = random_pair(num_elements, seed=data.draw(st.integers(0, 1000)))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_elements), max_size=5)))
    edges = [0, *cuts, num_elements]
    parts = [(g[a:b], p[a:b]) for a, b in itertools.pairwise(edges)]
    parts = data.draw(st.permutations(parts))
    whole, split = measured([g], [p]), measured(*zip(*parts, strict=True))
    assert split.gg == pytest.approx(whole.gg, rel=1e-12)
    assert split.gp == pytest.approx(whole.gp, abs=1e-12 * math.sqrt(whole.gg * whole.pp))
    assert split.cosine == pytest.approx(whole.cosine, abs=1e-12)


@given(g_exponent=st.integers(-80, 60), p_exponent=st.integers(-80, 60), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_cosine_does_not_depend_on_the_lengths(g_exponent, p_exponent, seed):
    g, p = random_pair(50, seed=seed)
    scaled = measured([g * 2.0**g_exponent], [p * 2.0**p_exponent])
    assert scaled.cosine == pytest.approx(measured([g], [p]).cosine, abs=1e-12)


@given(
    coefficient=st.floats(-1e3, 1e3),
    factor=st.floats(1e-3, 1.0),
    num_elements=st.sampled_from([1, 17, kernels.CPU_CHUNK + 5]),
    store_raw=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_one_pass_writes_the_projection_and_stores_the_reference(
    coefficient, factor, num_elements, store_raw
):
    g, p = random_pair(num_elements)
    kept = g.double() - coefficient * p.double()
    grad, reference = g.clone(), p.clone()
    kernels.project_(grad, reference, coefficient, factor, store_raw)
    size = g.norm() + abs(coefficient) * p.norm()
    assert (grad.double() - factor * kept).norm() <= 3e-7 * size
    if store_raw:
        assert torch.equal(reference, g)
    else:
        assert (reference.double() - kept).norm() <= 3e-7 * size


@pytest.mark.parametrize("factor", [1e-45, 1e-30, 0.3, 1e30, 1e38])
def test_scaling_works_past_the_range_of_float32_scalars(factor):
    tensor = torch.tensor([1e20, -3e18]) if factor < 1 else torch.tensor([1e-20, -3e-22])
    wanted = tensor.double() * factor
    assert torch.allclose(kernels.scale_(tensor, factor).double(), wanted, rtol=3e-7, atol=0)


def test_a_float16_element_that_would_grow_past_its_range_stays_finite():
    grad, reference = torch.tensor([60000.0, 60000.0]).half(), torch.tensor([1.0, -0.9])
    kernels.project_(grad, reference, 30000.0, 1.0, store_raw=True)
    assert grad.tolist() == [30000.0, 65504.0]
