"""Parts of all kinds in one measurement: None, unknown, uncounted, sparse; and their writing."""

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from sidestep.control import sums
from sidestep.control.geometry import Pair, Products, exchange_device, products, total, unmeasurable
from sidestep.control.parameters import (
    dense,
    gradients,
    project_gradient,
    scale_gradient,
    trained_parameters,
)
from sidestep.control.sharding import Held, as_global, as_local, holdings, layout_of, local

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def embedding_gradient(tokens, rows=6, width=3, seed=0):
    """A weight with the gradient of Embedding(sparse=True): a row per token, repeated ones too."""
    weight = Parameter(torch.zeros(rows, width))
    values = torch.randn(len(tokens), width, generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor(tokens, dtype=torch.int64)
    looked_up = torch.nn.functional.embedding(ids, weight, sparse=True)
    looked_up.mul(values).sum().backward()
    return weight


def as_dict(found):
    return {name: getattr(found, name) for name in Products.__slots__}


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_mixture_of_parts_agrees_with_plain_float64_vectors(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    pairs = []
    gg = gg_compared = pp = reachable = gp = 0.0
    for _ in range(data.draw(st.integers(0, 6))):
        shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
        dtype = data.draw(st.sampled_from(DTYPES))
        compared, here = data.draw(st.booleans()), data.draw(st.booleans())
        scale = 10.0 ** data.draw(
            st.integers(-25, 18) if dtype.itemsize > 2 else st.integers(-2, 3)
        )
        has_g, has_p = data.draw(st.booleans()), compared and data.draw(st.booleans())
        g = (torch.randn(shape, generator=generator) * scale).to(dtype) if has_g else None
        p = torch.randn(shape, generator=generator).bfloat16() if has_p else None
        held = Held("w", tuple(shape), None, False, here, has_g)
        pairs.append(Pair(g, p, compared, held))
        if not here:
            continue
        wide_g = torch.zeros(shape, dtype=torch.float64) if g is None else g.double()
        wide_p = torch.zeros(shape, dtype=torch.float64) if p is None else p.double()
        gg += float(wide_g.square().sum())
        gg_compared += float(wide_g.square().sum()) if compared else 0.0
        pp += float(wide_p.square().sum())
        reachable += float(wide_p.square().sum()) if g is not None else 0.0
        gp += float((wide_g * wide_p).sum())
    found = sums.products_from(sums.row_of_sums(pairs, lambda held: held.counts).tolist())
    assert found.gg == pytest.approx(gg, rel=1e-12)
    assert found.gg_compared == pytest.approx(gg_compared, rel=1e-12)
    assert found.pp == pytest.approx(pp, rel=1e-12)
    assert found.pp_reachable == pytest.approx(reachable, rel=1e-12)
    assert abs(found.gp - gp) <= 1e-12 * math.sqrt(gg * pp)
    assert found.finite
    assert found.has_gradient == any(pair.g is not None for pair in pairs)
    assert found.has_reference == any(pair.p is not None for pair in pairs)
    assert found.cosine is None or -1.0 <= found.cosine <= 1.0


@pytest.mark.parametrize("tokens", [[1, 1, 3], [0], [5, 4, 3, 2, 1, 0], []])
def test_b13_a_sparse_gradient_is_measured_as_the_dense_one_it_stands_for(tokens):
    weight = embedding_gradient(tokens)
    (grad,) = gradients({"w": weight}).values()
    p = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    wide = torch.ones(2)
    as_sparse = products([Pair(grad, p), Pair(wide, wide)])
    as_dense = products([Pair(weight.grad.to_dense(), p), Pair(wide, wide)])
    for name in ("gg", "gg_compared", "pp", "gp"):
        assert getattr(as_sparse, name) == pytest.approx(getattr(as_dense, name), rel=1e-12)
    touched = p[sorted(set(tokens))].double().square().sum().item() + 2.0
    assert as_sparse.pp_reachable == pytest.approx(touched, rel=1e-12)


def test_b13_repeated_tokens_are_added_up_before_they_are_squared():
    weight = Parameter(torch.zeros(5, 2))
    torch.nn.functional.embedding(torch.tensor([1, 1, 3]), weight, sparse=True).sum().backward()
    assert products([Pair(gradients({"w": weight})["w"], None)]).gg == 2 * 4.0 + 2 * 1.0


@pytest.mark.parametrize("store_raw", [True, False])
def test_b13_a_projected_sparse_gradient_stays_sparse_and_keeps_the_promised_product(store_raw):
    weight = embedding_gradient([1, 1, 3], seed=2)
    raw = weight.grad.to_dense()
    grads = gradients({"w": weight})
    reference = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    p = reference.clone()
    measured = products([Pair(grads["w"], p)])
    coefficient = 0.7 * measured.gp / measured.pp_reachable
    project_gradient(weight, grads["w"], reference, coefficient, 0.5, store_raw)
    after = weight.grad
    assert after.layout == torch.sparse_coo and after.is_coalesced()
    assert sorted(after.indices()[0].tolist()) == [1, 3]
    product = float((after.to_dense().double() * p.double()).sum())
    lengths = measured.norm * math.sqrt(measured.pp)
    assert abs(product - 0.5 * (1 - 0.7) * measured.gp) <= 1e-6 * lengths
    stored = raw if store_raw else after.to_dense() / 0.5
    assert torch.allclose(reference, stored, atol=1e-6)
    assert torch.equal(reference[[0, 2, 4, 5]], torch.zeros(4, 3))


def test_b13_a_scaled_sparse_gradient_is_what_the_optimizer_gets_and_looking_does_not_change_it():
    weight = embedding_gradient([2, 2, 0])
    raw = weight.grad
    grads = gradients({"w": weight})
    assert weight.grad is raw and not raw.is_coalesced()
    before = raw.to_dense()
    assert torch.equal(dense(grads["w"]), before)
    scale_gradient(weight, grads["w"], 0.25)
    assert torch.equal(weight.grad.to_dense(), before * 0.25)
    torch.optim.SparseAdam([weight], lr=0.1).step()
    assert torch.count_nonzero(weight.detach().abs().sum(1)).item() == 2


def test_a_sparse_gradient_that_is_not_finite_is_told():
    weight = embedding_gradient([2, 2, 0])
    weight.grad._values()[0] = math.inf
    assert not products([Pair(gradients({"w": weight})["w"], torch.ones(6, 3))]).finite


@pytest.mark.parametrize("size", [sums.CPU_PACK - 1, sums.CPU_PACK + 1])
def test_the_bits_of_the_norm_do_not_depend_on_references_across_packs(size):
    gs = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (size, 7, 300_000)]
    alone = products([Pair(g, None) for g in gs])
    beside = products(
        [Pair(None, torch.ones(3)), *(Pair(g, torch.ones_like(g)) for g in gs), Pair(None, gs[0])]
    )
    assert alone.gg == beside.gg
    wanted = math.fsum(float(g.double().sum()) for g in gs)
    assert abs(beside.gp - wanted) <= 1e-6 * math.sqrt(beside.gg * beside.pp)


def test_pairs_are_let_go_as_they_are_summed():
    alive, most = set(), 0
    size = sums.CPU_PACK // 2

    class Pairs:
        def __iter__(self):
            nonlocal most
            for i in range(8):
                p = torch.ones(size)
                alive.add(i)
                weakref.finalize(p, alive.discard, i)
                most = max(most, len(alive))
                pair = Pair(torch.ones(size), p)
                del p
                yield pair
                del pair

    assert products(Pairs()).gp == 8 * size
    assert most <= 3


def test_products_of_scopes_add_up_to_those_of_the_model():
    pairs = [
        Pair(torch.tensor([3.0]), torch.tensor([4.0])),
        Pair(None, torch.tensor([3.0])),
        Pair(torch.tensor([12.0]), None, compared=False),
    ]
    parts = [products([pair]) for pair in pairs]
    assert as_dict(total(parts)) == as_dict(products(pairs))
    broken = products([Pair(torch.tensor([math.nan]), None)])
    assert not total([*parts, broken]).finite


@pytest.mark.parametrize(
    ("backends", "wanted"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("xpu:xccl", "xpu"),
    ],
)
def test_b30_the_sums_alone_hop_to_a_device_that_the_group_takes(backends, wanted):
    assert exchange_device(backends).type == wanted


def test_plain_tensors_are_their_own_local_part_and_wrap_to_themselves():
    parameter = Parameter(torch.arange(3.0))
    part = local(parameter)
    with torch.no_grad():
        part[0] = 7.0
    assert parameter[0].item() == 7.0
    assert not part.requires_grad
    assert layout_of(parameter) is None
    parts, laid_out = as_local({"w": part})
    assert laid_out == {}
    assert as_global(parts, laid_out)["w"].data_ptr() == part.data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_cannot_be_measured_is_named_with_the_fix():
    csr = torch.eye(3).to_sparse_csr()
    assert "sparse COO" in unmeasurable(csr)
    assert "complex64" in unmeasurable(torch.zeros(2, dtype=torch.complex64))
    assert unmeasurable(torch.eye(3).to_sparse()) is None


def test_a_shard_of_fsdp1_is_refused_unless_it_is_named_as_the_ranks_own():
    parameter = Parameter(torch.zeros(4))
    parameter._fsdp_flattened = True  # how torch marks them
    with pytest.raises(ValueError, match=r"'w' is a flat shard.*local_parameters="):
        holdings({"w": parameter})
    assert holdings({"w": parameter}, ["w"])["w"].own


def test_local_parameters_must_be_a_list_of_names():
    with pytest.raises(ValueError, match="local_parameters='experts'"):
        holdings({}, "experts")


def test_one_rank_of_many_may_have_no_parameter():
    assert trained_parameters([], allow_none=True) == {}
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        trained_parameters([])
