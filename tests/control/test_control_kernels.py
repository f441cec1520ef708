"""The fast kernels against the plain ones, on every dtype, layout and size."""

import logging
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.control import kernels, kernels_compiled, kernels_cpu, kernels_exact

# Sizes around rows, blocks and what is left of them.
SIZES = [1, 511, 512, 513, 5000, 2**18 - 1, 2**18, 2**18 + 512, 2 * 2**18 + 77]
GRADIENT_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SNAPSHOT_DTYPES = [torch.bfloat16, torch.float32]
ODD = [math.inf, -math.inf, math.nan]


def vectors(num_elements, seed=0, g_dtype=torch.float32, p_dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(num_elements, generator=generator)
    p = 0.5 * g + torch.randn(num_elements, generator=generator)
    return (g * scale).to(g_dtype), (p * scale).to(p_dtype)


def plain_sums(gs, ps):
    """The plain way: one float64 vector each."""
    g = torch.cat([t.double().reshape(-1) for t in gs])
    p = torch.cat(
        [
            torch.zeros(t.numel()) if q is None else q.double().reshape(-1)
            for t, q in zip(gs, ps, strict=True)
        ]
    ).double()
    return float(g @ g), float(p @ p), float(g @ p)


def assert_close(found, gs, ps, relative=1e-6):
    gg, pp, gp = plain_sums(gs, ps)
    assert found[0] == pytest.approx(gg, rel=relative)
    assert found[1] == pytest.approx(pp, rel=relative)
    assert abs(found[2] - gp) <= relative * math.sqrt(gg) * math.sqrt(pp)


@pytest.mark.parametrize("num_elements", SIZES)
def test_fast_sums_agree_with_float64_at_every_size(num_elements):
    g, p = vectors(num_elements)
    assert_close(kernels_cpu.sums_of_products([g], [p]), [g], [p], relative=2e-7)


@pytest.mark.parametrize("g_dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("p_dtype", SNAPSHOT_DTYPES)
def test_fast_sums_agree_with_float64_in_every_dtype(g_dtype, p_dtype):
    gs, ps = zip(*(vectors(n, n, g_dtype, p_dtype) for n in (2**18 + 5, 700, 3)), strict=True)
    assert_close(kernels_cpu.sums_of_products(gs, ps), gs, ps)


@pytest.mark.parametrize("value", [0.1, 0.7654321, 3.0, 1e-25, 1e20, 3e38])
def test_fast_sums_of_equal_elements_do_not_drift(value):
    # Rounding always falls to the same side here: float32 dots are off by 5e-4 at this size.
    g = torch.full((2**20,), value)
    assert_close(kernels_cpu.sums_of_products([g], [g]), [g], [g], relative=2e-7)


@pytest.mark.parametrize("g_scale", [1e-38, 1e-25, 1e-15, 1.0, 1e20])
@pytest.mark.parametrize("p_scale", [1e-38, 1e-25, 1e-15, 1.0, 1e20])
def test_fast_sums_agree_with_float64_where_squares_leave_float32(g_scale, p_scale):
    g, p = vectors(300_000)
    g, p = g * g_scale, p * p_scale
    assert_close(kernels_cpu.sums_of_products([g], [p]), [g], [p])


def test_blocks_of_any_magnitude_are_all_seen():
    scales = [0.0, 1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e18]
    for order in (scales, scales[::-1]):
        gs = [vectors(2**17, seed)[0] * scale for seed, scale in enumerate(order)]
        ps = [vectors(2**17, seed)[1] * scale for seed, scale in enumerate(reversed(order))]
        assert_close(kernels_cpu.sums_of_products(gs, ps), gs, ps)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("where", [0, 2**18 + 3, 300_000 - 1])
def test_one_element_that_is_not_finite_makes_the_first_sum_so(odd, where):
    g, p = vectors(300_000)
    g[where] = odd
    gg, pp, _ = kernels_cpu.sums_of_products([g], [p])
    assert not math.isfinite(gg)
    assert math.isfinite(pp)


def test_infinite_elements_of_both_signs_are_told_too():
    g, p = vectors(300_000)
    g[::70_000] = torch.tensor([math.inf, -math.inf, math.inf, -math.inf, math.nan])
    assert not math.isfinite(kernels_cpu.sums_of_products([g], [p])[0])
    assert not math.isfinite(kernels_cpu.sums_of_products([p], [g])[1])


def test_blocks_of_zeros_take_no_more_than_a_few_times_the_usual_time():
    # Embeddings have many: a block of zeros looks like one that has lost its digits.
    g, p = vectors(2**22)
    times = {}
    for name, pair in (("usual", (g, p)), ("zero", (torch.zeros_like(g), p))):
        runs = []
        for _ in range(5):
            start = time.process_time()
            kernels_cpu.sums_of_products([pair[0]], [pair[1]])
            runs.append(time.process_time() - start)
        times[name] = min(runs)
    assert times["zero"] < 5 * times["usual"]


@pytest.mark.parametrize("g_dtype", GRADIENT_DTYPES)
def test_the_first_sum_has_the_same_bits_for_any_reference(g_dtype):
    gs = [vectors(n, n, g_dtype)[0] for n in (300_001, 7, 2**18, 12345)]
    alone = kernels_cpu.sums_of_products(gs, [None] * 4)
    for dtype in SNAPSHOT_DTYPES:
        ps = [torch.randn(g.shape).to(dtype) * 1e-24 for g in gs]
        assert kernels_cpu.sums_of_products(gs, ps)[0] == alone[0]
        assert kernels_cpu.sums_of_products(gs, [ps[0], None, None, ps[3]])[0] == alone[0]
    assert alone[1:] == (0.0, 0.0)


def test_any_number_of_threads_gives_the_same_bits():
    gs, ps = zip(
        *(vectors(n, n, p_dtype=torch.bfloat16) for n in (900_000, 5, 1_500_001)), strict=True
    )
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 7):
            torch.set_num_threads(num_threads)
            found.append(kernels_cpu.sums_of_products(gs, ps))
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own():
    code = (
        "import os, torch\n"
        "from sidestep.control import kernels_cpu\n"
        "torch.set_num_threads(2)\n"
        "g = torch.ones(2_000_000)\n"
        "assert kernels_cpu.sums_of_products([g], [g])[2] == 2e6\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(kernels_cpu.sums_of_products([g], [g])[2] != 2e6)\n"
        "os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_rows_without_numpy_2_are_the_same(monkeypatch):
    g, p = vectors(300_000)
    monkeypatch.setattr(kernels_cpu, "_row_dots", kernels_cpu._row_dots_by_matmul)
    assert_close(kernels_cpu.sums_of_products([g], [p]), [g], [p], relative=2e-7)


layouts = st.sampled_from(["contiguous", "transposed", "strided", "expanded"])


def laid_out(tensor, layout):
    """The same shape and kind of numbers in another layout."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    return tensor


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_fast_sums_agree_with_the_plain_ones_on_any_list(data):
    gs, ps = [], []
    for seed in range(data.draw(st.integers(1, 5))):
        shape = data.draw(st.sampled_from([(0, 3), (1, 1), (7, 11), (64, 700), (600, 513)]))
        pair = vectors(
            math.prod(shape),
            seed,
            data.draw(st.sampled_from(GRADIENT_DTYPES)),
            data.draw(st.sampled_from(SNAPSHOT_DTYPES)),
            data.draw(st.sampled_from([1.0, 1.0, 1e-3, 1e-25, 1e3])),
        )
        g, p = (laid_out(t.view(shape), data.draw(layouts)) for t in pair)
        gs.append(g)
        ps.append(None if data.draw(st.booleans()) else p)
    plain = kernels_exact.sums_of_products(gs, ps).tolist()
    for found in (kernels_cpu.sums_of_products(gs, ps), kernels.sums_of_products(gs, ps).tolist()):
        assert found[:2] == pytest.approx(plain[:2], rel=1e-6, abs=0.0)
        assert abs(found[2] - plain[2]) <= 1e-6 * math.sqrt(plain[0]) * math.sqrt(plain[1])


def test_small_gradients_are_summed_in_float64():
    g, p = vectors(100_000)
    found = kernels.sums_of_products([g, g], [p, p]).tolist()
    assert found == pytest.approx([2 * x for x in plain_sums([g], [p])], rel=1e-13)


def test_no_tensors_have_sums_of_zero():
    assert kernels.sums_of_products([], []).tolist() == [0.0, 0.0, 0.0]


def test_large_float64_gradients_keep_their_digits_and_their_range():
    g = torch.full((300_000,), 1e-200, dtype=torch.float64)
    g[0] = 1e100
    found = kernels.sums_of_products([g, g[:3]], [g, None]).tolist()
    assert found[:2] == pytest.approx([2e200, 1e200], rel=1e-14)


@pytest.mark.parametrize("num_elements", [5, 2**18, 2**18 + 5, 2 * 2**18 + 77])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16,) * 2])
def test_store_is_copy_and_scale(num_elements, dtypes):
    g, p = vectors(num_elements, 0, *dtypes)
    before = g.clone()
    kernels.store_(p, g, 0.7)
    assert torch.equal(p, before)
    assert torch.equal(g, before * 0.7)


@pytest.mark.parametrize("store_raw", [True, False])
@pytest.mark.parametrize("g_dtype", [*GRADIENT_DTYPES, torch.float64])
@pytest.mark.parametrize("p_dtype", SNAPSHOT_DTYPES)
def test_projection_agrees_with_float64_in_every_dtype(g_dtype, p_dtype, store_raw):
    g, p = vectors(2**18 + 700, 0, g_dtype, p_dtype)
    raw, reference = (t.to(torch.float64, copy=True) for t in (g, p))
    kernels.project_(g, p, 0.3, 0.7, store_raw)
    projected = raw - 0.3 * reference
    for found, wanted in ((g, 0.7 * projected), (p, raw if store_raw else projected)):
        # one rounding to the dtype, after float32's
        unit = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
        assert torch.allclose(found.double(), wanted, rtol=unit, atol=1e-6)


def test_fast_sums_take_no_memory_to_speak_of():
    code = (
        "import resource, torch\n"
        "from sidestep.control import kernels\n"
        "g, p = torch.ones(20_000_000), torch.ones(20_000_000).bfloat16()\n"
        "kernels.sums_of_products([g[:300_000]], [p[:300_000]])\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "assert kernels.sums_of_products([g], [p])[2] == 2e7\n"
        "kernels.project_(g, p, 0.5, 0.5, True)\n"
        "kernels.store_(p, g, 0.5)\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) * 1024 < 0.5 * 20_000_000, done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """SIDESTEP_KERNELS=compiled, with an empty cache."""
    patch = pytest.MonkeyPatch()
    patch.setenv(kernels.KERNELS_VARIABLE, "compiled")
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    patch.undo()


COMPILED_DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", COMPILED_DTYPES)
def test_compiled_sums_agree_with_float64(compiled, dtypes):
    for num_elements in (kernels_compiled.SMALLEST, 1_234_567):
        g, p = vectors(num_elements, 0, *dtypes)
        assert kernels_compiled.sums_of_products(g, p) is not None
        gs, ps = [g, g[:700], g], [p, p[:700], None]
        assert_close(kernels.sums_of_products(gs, ps).tolist(), gs, ps)
    g = torch.full((2**20,), 0.1)
    assert_close(kernels.sums_of_products([g], [g]).tolist(), [g], [g], relative=5e-7)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e20])
def test_compiled_sums_leave_what_float32_cannot_to_others(compiled, scale):
    g, p = vectors(600_000)
    for gs, ps in (([g * scale], [p]), ([g], [p * scale])):
        assert_close(kernels.sums_of_products(gs, ps).tolist(), gs, ps)
    g[5] = math.inf
    assert not math.isfinite(kernels.sums_of_products([g], [p])[0])


@pytest.mark.slow
def test_the_first_compiled_sum_has_the_same_bits_for_any_float32_reference(compiled):
    g, p = vectors(1_234_567)
    alone = kernels.sums_of_products([g], [None])[0]
    for reference in (p, p * 1e-25, p * 0.0, p.view(-1, 1).expand(-1, 2)[:, 0]):
        assert kernels.sums_of_products([g], [reference])[0] == alone


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", COMPILED_DTYPES)
@pytest.mark.parametrize("store_raw", [True, False])
def test_compiled_writing_agrees_with_the_plain_one(compiled, dtypes, store_raw):
    mine, plain = vectors(1_234_567, 0, *dtypes), vectors(1_234_567, 0, *dtypes)
    assert kernels_compiled.project_(*mine, 0.3, 0.7, store_raw)
    kernels_exact.project_(*plain, 0.3, 0.7, store_raw)
    for found, wanted in zip(mine, plain, strict=True):
        unit = torch.finfo(found.dtype).eps  # the compiler may fuse a product and a difference
        assert torch.allclose(found.double(), wanted.double(), rtol=unit, atol=1e-7)
    mine[0].copy_(plain[0])
    assert kernels_compiled.store_(mine[1], mine[0], 0.7)
    kernels_exact.store_(plain[1], plain[0], 0.7)
    assert all(torch.equal(found, wanted) for found, wanted in zip(mine, plain, strict=True))


@pytest.mark.slow
def test_compiled_projection_keeps_float16_finite(compiled):
    g = torch.full((600_000,), 60000.0).half()
    p = torch.full((600_000,), -1.0)
    kernels.project_(g, p, 30000.0, 1.0, True)
    assert (g == 65504.0).all()


def test_a_compiled_kernel_that_computes_something_else_is_not_used(monkeypatch, caplog):
    def other(function, examples, num_scalars):
        return lambda *tensors: function(tensors[1], tensors[0], *tensors[2:])

    monkeypatch.setenv(kernels.KERNELS_VARIABLE, "compiled")
    monkeypatch.setattr(kernels_compiled, "_compile", other)
    monkeypatch.setattr(kernels_compiled, "_is_broken", False)
    kernels_compiled._compiled.cache_clear()
    g, p = vectors(600_000)
    before = g.clone()
    kernels.store_(p, g, 0.7)
    assert torch.equal(p, before)
    assert "wrong results" in caplog.text
    kernels_compiled._compiled.cache_clear()


@pytest.mark.slow
def test_a_missing_compiler_is_met_in_the_expected_way():
    code = (
        "import logging, torch\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from sidestep.control import kernels\n"
        "g, p = torch.ones(20_000), torch.zeros(20_000)\n"
        "kernels.store_(p, g, 0.5)\n"
        "assert (p == 1.0).all() and (g == 0.5).all()\n"
    )
    environment = os.environ | {kernels.KERNELS_VARIABLE: "compiled", "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("eager ones from now on") == 1


def test_without_a_compiler_the_eager_kernels_run_and_the_log_says_so_once(monkeypatch, caplog):
    def broken(function, examples, num_scalars):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setenv(kernels.KERNELS_VARIABLE, "compiled")
    monkeypatch.setattr(kernels_compiled, "_compile", broken)
    monkeypatch.setattr(kernels_compiled, "_is_broken", False)
    kernels_compiled._compiled.cache_clear()
    mine, plain = vectors(600_000), vectors(600_000)
    with caplog.at_level(logging.WARNING):
        found = kernels.sums_of_products([mine[0]], [mine[1]]).tolist()
        kernels.project_(*mine, 0.3, 0.7, True)
        kernels.store_(mine[1], mine[0], 0.7)
    assert tuple(found) == kernels_cpu.sums_of_products(*([t] for t in plain))
    kernels_exact.project_(*plain, 0.3, 0.7, True)
    kernels_exact.store_(plain[1], plain[0], 0.7)
    assert torch.equal(mine[0], plain[0])
    assert torch.equal(mine[1], plain[1])
    (record,) = caplog.records
    assert "no C++ compiler" in record.message
    assert "and more" not in record.message
    kernels_compiled._compiled.cache_clear()


def test_unknown_kernels_are_refused_by_name(monkeypatch):
    monkeypatch.setenv(kernels.KERNELS_VARIABLE, "fast")
    with pytest.raises(ValueError, match="SIDESTEP_KERNELS='fast' must be one of eager, compiled"):
        kernels.store_(torch.ones(3), torch.ones(3), 0.5)


def test_a_missing_triton_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "sidestep.control.kernels_triton", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'sidestep\[triton\]'"):
        __import__("sidestep.control.kernels_triton")
