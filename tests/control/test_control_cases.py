"""Missing, odd, aliased, empty and broken gradients: public bug reports as tests."""

import json
import logging
import math

import pytest
import torch
from control_steps import grad_of, one, step
from torch.nn import Parameter

from sidestep.control import GradientControl


def test_b01_a_zero_vector_has_no_cosine_and_nothing_becomes_nan():
    control, named = GradientControl(), one([0.0, 0.0])
    for grad in ([0.0, 0.0], [0.0, 0.0], [1.0, 2.0]):
        record = step(control, named, grad)
        assert (record.regime, record.cosine, record.cosine_applied) == ("undefined", None, None)
        assert grad_of(named).tolist() == grad
        assert "NaN" not in json.dumps(record.as_dict())
    # A stored zero reference (p = 0) as a loaded state can hold it.
    state = control.state_dict()
    state["snapshot"]["w"].zero_()
    control.load_state_dict(state)
    record = step(control, named, [1.0, 2.0])
    assert (record.regime, record.reason) == ("undefined", "zero reference")
    assert grad_of(named).tolist() == [1.0, 2.0]


def test_b02_b33_a_step_without_signal_does_not_replace_the_snapshot():
    control, named = GradientControl(high=1.0), one([0.0, 0.0])
    step(control, named, [1.0, 0.0])
    record = step(control, named, [0.0, 0.0], max_norm=1.0)
    assert (record.regime, record.reason) == ("undefined", "zero gradient")
    assert (record.norm_raw, record.norm_applied, record.clip_factor) == (0.0, 0.0, 1.0)
    after = step(control, named, [0.6, 0.8])
    assert after.cosine == pytest.approx(0.6)
    assert grad_of(named).tolist() == pytest.approx([0.0, 0.8])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_b09_b34_a_non_finite_step_changes_nothing_and_is_forgotten(bad, max_norm):
    named = [("a", Parameter(torch.zeros(4))), ("b", Parameter(torch.zeros(2)))]
    control = GradientControl(max_skips=1)
    step(control, named, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])
    step(control, named, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])  # one real skip
    before = control.state_dict()
    broken = torch.tensor([1.0, 2.0, bad, 4.0])
    record = step(control, named, broken.clone(), [1.0, 1.0], max_norm=max_norm)
    assert (record.regime, record.reason, record.norm_raw) == ("skip", "non-finite", None)
    assert torch.equal(grad_of(named).nan_to_num(7.0), broken.nan_to_num(7.0))
    assert grad_of(named, 1).tolist() == [1.0, 1.0]
    assert record.skips_in_a_row == 1  # not counted
    after = control.state_dict()
    assert after.pop("snapshot").keys() == before.pop("snapshot").keys()
    assert {**before, "step": 3} == after
    assert "NaN" not in json.dumps(record.as_dict())
    record = step(control, named, [0.0, 1.0, 0.0, 0.0], [0.0, 1.0])
    assert (record.regime, record.cosine) == ("pass", 0.0)


def test_b09_huge_finite_gradients_are_decided_as_usual():
    control, named = GradientControl(), one(torch.zeros(100))
    huge = torch.full((100,), 1e20)
    step(control, named, huge)
    record = step(control, named, huge, max_norm=1.0)
    assert record.cosine == pytest.approx(1.0)
    assert record.norm_raw == pytest.approx(1e21)


@pytest.mark.parametrize("value", [1e-10, 1e-25])
def test_b08_tiny_gradients_are_decided_as_usual(value):
    control, named = GradientControl(), one(torch.zeros(100))
    step(control, named, value * torch.ones(100))
    assert step(control, named, value * torch.ones(100)).cosine == pytest.approx(1.0, abs=1e-12)


def test_b10_none_counts_as_zero_stays_none_and_the_snapshot_lines_up_by_name():
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl(high=1.0)
    step(control, named, [3.0], [4.0])
    record = step(control, named, [2.0], None)
    assert record.cosine == pytest.approx(3 / 5)
    assert grad_of(named, 1) is None
    # b had no gradient: its part of the reference is zero now.
    record = step(control, named, [1.0], [1.0])
    assert record.cosine == pytest.approx(1 / math.sqrt(2))
    assert record.reason == "above low"
    record = step(control, named, [0.0], [5.0])
    assert record.cosine == pytest.approx(1 / math.sqrt(2))


def test_b10_the_promised_product_holds_where_a_gradient_is_none():
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl(high=1.0, strength=0.5)
    step(control, named, [3.0, 0.0], [4.0])
    record = step(control, named, [2.0, 1.0], None)
    assert float(grad_of(named) @ torch.tensor([3.0, 0.0])) == pytest.approx(3.0)
    assert record.norm_applied == pytest.approx(float(grad_of(named).norm()))
    assert record.cosine_applied == pytest.approx(3.0 / (5 * math.sqrt(2)))


def test_b10_a_weight_without_gradient_is_not_moved_by_decay():
    named = [("a", Parameter(torch.ones(1))), ("b", Parameter(torch.ones(1)))]
    optimizer = torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.5)
    control = GradientControl(high=1.0)
    step(control, named, [1.0], [1.0])
    optimizer.step()
    before = named[1][1].clone()
    step(control, named, [1.0], None)
    optimizer.step()
    assert torch.equal(named[1][1], before)


def test_b11_a_new_parameter_is_left_alone_and_told_once(caplog):
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(2)))]
    named[1][1].requires_grad_(False)
    control = GradientControl()
    step(control, named, [1.0, 0.0], None)
    named[1][1].requires_grad_(True)
    with caplog.at_level(logging.WARNING, logger="sidestep.control"):
        record = step(control, named, [0.5, 0.9], [5.0, 7.0])
        assert record.cosine == pytest.approx(0.5 / math.hypot(0.5, 0.9))
        assert record.regime == "project"
        assert record.reason == "above low (parameter set changed)"
        assert grad_of(named).tolist() == pytest.approx([0.0, 0.9])
        assert grad_of(named, 1).tolist() == [5.0, 7.0]
        wanted = math.sqrt(0.9**2 + 25 + 49)
        assert record.norm_applied == pytest.approx(wanted, rel=1e-6)
        step(control, named, [0.5, 0.9], [5.0, 7.0])
    assert len(caplog.records) == 1
    assert "1 are new (b)" in caplog.text


def test_b11_the_notice_is_not_repeated_while_the_reference_stays(caplog):
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl()
    step(control, named[:1], [1.0])
    for _ in range(3):
        step(control, named, [math.nan], [1.0])
    step(control, named, [-1.0], [1.0])
    assert len(caplog.records) == 1


def test_b11_a_parameter_that_left_is_not_compared(caplog):
    named = [("a", Parameter(torch.zeros(1))), ("b", Parameter(torch.zeros(1)))]
    control = GradientControl()
    step(control, named, [1.0], [10.0])
    record = step(control, named[:1], [-1.0])
    assert record.cosine == pytest.approx(-1.0)
    assert "1 gone (b)" in caplog.text
    other = [("c", Parameter(torch.zeros(1)))]
    assert step(control, other, [1.0]).reason == "no shared parameter"


def test_b13_a_sparse_gradient_is_coalesced_measured_and_projected_as_the_dense_one():
    runs = []
    for sparse in (False, True):
        embedding, dense = torch.nn.Embedding(5, 2, sparse=sparse), Parameter(torch.ones(2))
        torch.nn.init.ones_(embedding.weight)
        named = [("tokens", embedding.weight), ("dense", dense)]
        control, records = GradientControl(low=0.0, high=1.0), []
        for tokens in ([1, 1, 3], [1, 3, 4]):
            embedding.weight.grad = dense.grad = None
            (embedding(torch.tensor(tokens)) * dense).sum().backward()
            records.append(control.apply(named, max_norm=1.0))
        grad = embedding.weight.grad
        runs.append((records, grad.to_dense() if sparse else grad, dense.grad))
    (dense_records, *dense_grads), (sparse_records, *sparse_grads) = runs
    # 2 of token 1, 1 of token 3, 3 of the dense one, twice each; then 1, 1, 1, 3
    assert sparse_records[0].norm_raw == pytest.approx(math.sqrt(2 * (4 + 1 + 9)))
    assert sparse_records[1].cosine == pytest.approx(12 / math.sqrt(14 * 12))
    assert sparse_records[1].cosine == pytest.approx(dense_records[1].cosine)
    assert sparse_records[1].regime == "project"
    # a sparse gradient stays sparse: it is projected in the rows that it has
    assert torch.equal(sparse_grads[0] != 0, torch.tensor([[r in (1, 3, 4)] * 2 for r in range(5)]))
    for sparse_grad, dense_grad in zip(sparse_grads, dense_grads, strict=True):
        assert torch.allclose(sparse_grad, dense_grad, atol=1e-6)


def test_b14_the_snapshot_is_a_copy_even_of_a_view_of_a_bucket():
    bucket = torch.zeros(4)
    named = [("a", Parameter(torch.zeros(2))), ("b", Parameter(torch.zeros(2)))]
    control = GradientControl(mode="observe")
    for k, (_, parameter) in enumerate(named):
        parameter.grad = bucket[2 * k : 2 * k + 2]
    for values, cosine in (([1, 0, 0, 0], None), ([0, 1, 0, 0], 0.0), ([0, 1, 0, 1], 0.5**0.5)):
        bucket.copy_(torch.tensor(values))
        record = control.apply(named)
        assert record.cosine == (None if cosine is None else pytest.approx(cosine))


def test_b14_zero_grad_in_place_and_backward_do_not_reach_the_snapshot():
    weight = Parameter(torch.tensor([1.0, 1.0]))
    control = GradientControl(mode="observe")
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for direction, cosine in (([1.0, 0.0], None), ([0.0, 1.0], 0.0)):
        optimizer.zero_grad(set_to_none=False)
        (weight * torch.tensor(direction)).sum().backward()
        assert control.apply([("w", weight)]).cosine == cosine


@pytest.mark.parametrize("kind", ["view", "history", "transposed", "broadcast"])
def test_b15_odd_gradients_are_written_and_survive_zero_grad(kind):
    weight = Parameter(torch.zeros(3, 2))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    control = GradientControl(high=1.0)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.grad = torch.ones(3, 2)
    control.apply([("w", weight)])
    if kind == "view":
        weight.grad = torch.stack([torch.zeros(3, 2), values])[1]
    elif kind == "history":
        source = values.clone().requires_grad_(True)
        weight.grad = source * 1.0
    elif kind == "transposed":
        weight.grad = values.T.contiguous().T
    else:
        values = torch.full((3, 2), 2.0)
        weight.grad = torch.tensor(2.0).expand(3, 2)
    record = control.apply([("w", weight)])
    assert record.regime == "project"
    wanted = values - values.mean()
    assert torch.allclose(weight.grad, wanted, atol=1e-6)
    optimizer.step()
    if kind != "view":  # torch itself cannot detach views in place
        optimizer.zero_grad(set_to_none=False)
    assert control.apply([("w", weight)]) is not None


def test_b18_a_lora_adapter_that_starts_at_zero_is_fine_and_the_frozen_base_does_not_count():
    torch.manual_seed(0)
    base = Parameter(torch.randn(4, 4), requires_grad=False)
    base.grad = torch.full((4, 4), 100.0)  # a left-over
    a, b = Parameter(torch.randn(1, 4)), Parameter(torch.zeros(4, 1))
    named = [("base", base), ("a", a), ("b", b)]
    control = GradientControl()
    optimizer = torch.optim.SGD([a, b], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((base + b @ a) @ torch.ones(4)).square().sum().backward()
        record = control.apply(named)
        norm = math.sqrt(float(a.grad.square().sum() + b.grad.square().sum()))
        if record.regime == "undefined":
            assert record.norm_raw == pytest.approx(norm)
            assert float(a.grad.norm()) == 0.0
        assert math.isfinite(record.norm_applied)
        optimizer.step()
    assert record.cosine is not None


def test_b21_every_gradient_none_is_refused_with_the_way_out():
    named = [("w", Parameter(torch.zeros(2)))]
    for mode in ("control", "observe"):
        with pytest.raises(ValueError, match=r"every gradient is None.*safe_get_full_grad"):
            GradientControl(mode=mode).apply(named)
    assert GradientControl(mode="off").apply(named).norm_raw == 0.0


def test_b54_steps_on_one_batch_are_reported_apart_and_not_acted_on():
    control, named = GradientControl(high=1.0), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], batch=7)
    for _ in range(3):
        record = step(control, named, [1.0, 0.5], batch=7)
        assert (record.regime, record.reason) == ("pass", "same batch")
        assert record.cosine is None and record.cosine_applied is None
        assert grad_of(named).tolist() == [1.0, 0.5]
    assert record.cosine_within_batch == pytest.approx(1.0)
    record = step(control, named, [1.0, 0.0], batch=8)
    assert (record.regime, record.cosine_within_batch) == ("project", None)
    assert record.cosine == pytest.approx(1 / math.hypot(1, 0.5))
    assert step(control, named, [1.0, 0.0]).regime == "project"  # not said: not the same


@pytest.mark.parametrize("mode", ["observe", "off"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_b09_a_non_finite_gradient_is_never_clipped_to_zeros(mode, bad):
    control, named = GradientControl(mode=mode), one([0.0, 0.0])
    record = step(control, named, [bad, 3.0], max_norm=1.0)
    assert grad_of(named)[1].item() == 3.0
    assert (record.clip_factor, record.norm_raw, record.norm_applied) == (1.0, None, None)
    if mode == "observe":
        assert (record.regime, record.decision) == ("undefined", "skip")
        assert record.reason == "non-finite"


def test_a_non_finite_step_between_does_not_make_two_batches_one():
    control, named = GradientControl(), one([0.0, 0.0])
    step(control, named, [1.0, 0.0], batch=1)
    step(control, named, [math.nan, 0.0], batch=2)
    assert step(control, named, [1.0, 0.0], batch=2).regime == "skip"


def test_tied_weights_count_once_and_a_name_for_two_is_refused():
    tied = Parameter(torch.zeros(2))
    tied.grad = torch.tensor([3.0, 4.0])
    assert GradientControl().apply([("a", tied), ("b", tied)]).norm_raw == 5.0
    with pytest.raises(ValueError, match="named 'a'"):
        GradientControl().apply([("a", tied), ("a", Parameter(torch.zeros(1)))])


@pytest.mark.parametrize("named", [[], [("w", Parameter(torch.zeros(1), requires_grad=False))]])
def test_no_trained_parameter_is_refused(named):
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        GradientControl().apply(named)


def test_a_gradient_of_another_kind_is_refused_by_name():
    weight = Parameter(torch.zeros(2, dtype=torch.complex64))
    weight.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"'w' has dtype torch.complex64"):
        GradientControl().apply([("w", weight)])
