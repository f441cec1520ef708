import losses_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import Denominators, aggregate, count_denominators

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared

AGGREGATIONS = ("token", "sequence", "constant")


def reduce_whole(aggregation, loss, mask, constant=4.0):
    return aggregate(aggregation, loss, mask, count_denominators(mask), constant)


def random_loss(seed=0, shape=(8, 6)):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(shape, generator=generator),
        (torch.rand(shape, generator=generator) < 0.6).float(),
    )


def test_the_three_aggregations_by_hand():
    loss = torch.tensor([[1.0, 2.0, 3.0, 9.0], [5.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    assert count_denominators(mask) == Denominators(num_tokens=4, num_sequences=2)
    assert float(reduce_whole("token", loss, mask)) == 11 / 4
    assert float(reduce_whole("sequence", loss, mask)) == (2 + 5) / 2
    assert float(reduce_whole("constant", loss, mask, constant=10)) == pytest.approx(11 / 20)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_b69_a_sequence_without_trained_tokens_does_not_dilute_the_mean(aggregation):
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    assert float(reduce_whole(aggregation, torch.ones(2, 4), mask)) == 1.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_b69_an_empty_micro_batch_adds_exactly_zero_to_loss_and_gradient(aggregation):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    share = aggregate(aggregation, loss, torch.zeros(2, 3), Denominators(7, 3), 4.0)
    share.backward()
    assert share.item() == 0.0
    assert loss.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0), (1, 1)])
def test_b69_a_wholly_empty_step_gives_loss_and_gradient_zero_and_says_so(aggregation, shape):
    mask = torch.zeros(shape)
    loss = torch.randn(shape, requires_grad=True)
    denominators = count_denominators(mask)
    value = aggregate(aggregation, loss, mask, denominators, 4.0)
    value.backward()
    assert denominators.num_tokens == 0
    assert value.item() == 0.0
    assert (loss.grad == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [3, 3, 2], [1, 7]])
def test_b71_any_split_into_micro_batches_gives_the_whole_loss_and_gradient(aggregation, sizes):
    loss, mask = random_loss()
    mask[6:] = 0.0  # the last of four micro-batches trains nothing
    whole = loss.clone().requires_grad_()
    total = reduce_whole(aggregation, whole, mask)
    total.backward()
    split = loss.clone().requires_grad_()
    denominators = sum(map(count_denominators, mask.split(sizes)), Denominators(0, 0))
    assert denominators == count_denominators(mask)
    shares = [
        aggregate(aggregation, part, part_mask, denominators, 4.0)
        for part, part_mask in zip(split.split(sizes), mask.split(sizes), strict=True)
    ]
    for share in shares:
        share.backward(retain_graph=True)
    assert sum(shares).item() == pytest.approx(total.item(), abs=1e-6)
    assert torch.equal(split.grad, whole.grad)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@bounded
@given(data=st.data())
def test_equals_plain_float64_for_any_mask(aggregation, data):
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    entries = st.lists(st.booleans(), min_size=columns, max_size=columns)
    mask = data.draw(st.lists(entries, min_size=rows, max_size=rows))
    loss, _ = random_loss(data.draw(st.integers(0, 99)), (rows, columns))
    value = reduce_whole(aggregation, loss, torch.tensor(mask))
    expected = reference.aggregate(aggregation, loss.tolist(), mask, 4.0)
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_side_of_the_padding_and_more_of_it_change_nothing(aggregation):
    loss, mask = random_loss(shape=(3, 4))
    expected = reduce_whole(aggregation, loss, mask)
    junk, off = torch.full((3, 5), float("nan")), torch.zeros(3, 5)
    for order in (1, -1):
        padded = torch.cat([loss, junk][::order], dim=1)
        padded_mask = torch.cat([mask, off][::order], dim=1)
        assert float(reduce_whole(aggregation, padded, padded_mask)) == pytest.approx(
            float(expected), rel=1e-6
        )


def test_a_rejected_token_does_not_inflate_the_survivors():
    loss, mask = torch.ones(1, 4, requires_grad=True), torch.ones(1, 4)
    kept = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    for aggregation in AGGREGATIONS:
        (grad,) = torch.autograd.grad(reduce_whole(aggregation, loss * kept, mask), loss)
        assert grad.tolist() == [[0.25, 0.0, 0.25, 0.25]]


def test_half_precision_losses_are_summed_in_float32():
    loss = torch.ones(1, 1000, dtype=torch.bfloat16)
    value = aggregate("token", loss, torch.ones(1, 1000), Denominators(1, 1))
    assert value.dtype == torch.float32
    assert value.item() == 1000.0


def test_wrong_arguments_are_named():
    loss, mask = random_loss()
    with pytest.raises(ValueError, match=r"aggregation is 'mean'.*token, sequence, constant"):
        reduce_whole("mean", loss, mask)
    with pytest.raises(ValueError, match="needs constant="):
        reduce_whole("constant", loss, mask, constant=None)
    with pytest.raises(ValueError, match="constant is 0"):
        reduce_whole("constant", loss, mask, constant=0.0)
    with pytest.raises(ValueError, match=r"loss_BT has shape \(8, 6\), mask_BT \(8, 5\)"):
        reduce_whole("token", loss, mask[:, :5])
