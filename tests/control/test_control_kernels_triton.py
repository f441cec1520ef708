"""The Triton kernels in Triton's interpreter, against the plain ones.

Run with TRITON_INTERPRET=1 where triton is installed; it must be set before triton is imported.
"""

import math
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from sidestep.control import kernels_exact, kernels_triton

SIZES = [1, 1000, kernels_triton.PER_PROGRAM, 2 * kernels_triton.PER_PROGRAM + 37]
G_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
P_DTYPES = [torch.bfloat16, torch.float32]


def pair(num_elements, g_dtype=torch.float32, p_dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(num_elements, generator=generator)
    return g.to(g_dtype), (0.5 * g + torch.randn(num_elements, generator=generator)).to(p_dtype)


@pytest.mark.parametrize("g_dtype", [*G_DTYPES, torch.float64])
@pytest.mark.parametrize("p_dtype", P_DTYPES)
def test_triton_sums_are_the_plain_ones(g_dtype, p_dtype):
    gs, ps = zip(*(pair(n, g_dtype, p_dtype, n) for n in (*SIZES, 0)), strict=True)
    ps = [None, *ps[1:]]
    found = kernels_triton.sums_of_products(gs, ps)
    assert found.dtype == torch.float64
    assert torch.allclose(found, kernels_exact.sums_of_products(gs, ps), rtol=1e-13)


@pytest.mark.parametrize("g_scale", [1e-25, 1.0, 1e20])
@pytest.mark.parametrize("p_scale", [1e-25, 1.0, 1e20])
def test_triton_sums_hold_any_finite_value_and_tell_others(g_scale, p_scale):
    g, p = pair(1000)
    gs, ps = [g * g_scale], [p * p_scale]
    plain = kernels_exact.sums_of_products(gs, ps)
    assert torch.allclose(kernels_triton.sums_of_products(gs, ps), plain, rtol=1e-13, atol=0.0)
    for odd in (math.inf, math.nan):
        gs[0][7] = odd
        assert not kernels_triton.sums_of_products(gs, ps)[0].isfinite()


def test_the_first_triton_sum_has_the_same_bits_for_any_reference():
    g, p = pair(SIZES[-1])
    alone = kernels_triton.sums_of_products([g], [None])[0]
    assert kernels_triton.sums_of_products([g], [p])[0] == alone
    assert kernels_triton.sums_of_products([g.view(1, -1).t()], [p.view(-1, 1)])[0] == alone


@pytest.mark.parametrize("g_dtype", G_DTYPES)
@pytest.mark.parametrize("p_dtype", P_DTYPES)
@pytest.mark.parametrize("store_raw", [True, False])
def test_triton_writing_is_the_plain_one_to_a_rounding(g_dtype, p_dtype, store_raw):
    for num_elements in SIZES:
        mine, plain = pair(num_elements, g_dtype, p_dtype), pair(num_elements, g_dtype, p_dtype)
        assert kernels_triton.project_(*mine, 0.3, 0.7, store_raw)
        kernels_exact.project_(*plain, 0.3, 0.7, store_raw)
        for found, wanted in zip(mine, plain, strict=True):
            unit = torch.finfo(found.dtype).eps
            assert torch.allclose(found.double(), wanted.double(), rtol=unit, atol=1e-7)


def test_triton_storing_is_copy_and_scale():
    g, p = pair(SIZES[-1])
    before = g.clone()
    assert kernels_triton.store_(p, g, 0.5)
    assert torch.equal(p, before)
    assert torch.equal(g, 0.5 * before)


def test_triton_projection_bridges_lengths_that_float32_cannot():
    g, p = torch.full((100,), 1e20), torch.full((100,), 1e-25)
    coefficient = float(g[0].double() / p[0].double())
    assert kernels_triton.project_(g, p, coefficient, 1.0, True)
    assert (g.abs() <= 1e-6 * 1e20).all()


def test_triton_projection_keeps_float16_finite():
    g, p = torch.full((100,), 60000.0).half(), torch.full((100,), -1.0)
    assert kernels_triton.project_(g, p, 30000.0, 1.0, True)
    assert (g == 65504.0).all()


def test_triton_leaves_other_layouts_and_float64_to_the_plain_kernels():
    g, p = (t.view(20, 50) for t in pair(1000))
    assert not kernels_triton.project_(g.t(), p.t(), 0.3, 1.0, True)
    assert not kernels_triton.project_(g.double(), p, 0.3, 1.0, True)
    assert not kernels_triton.store_(p.t(), g.t(), 0.5)
