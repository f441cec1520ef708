"""The stages composed as a trainer composes them: logits in, one number and a gradient out."""

import math

import losses_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.losses import (
    PolicyInputs,
    aggregate,
    anchor_logprobs,
    bounded_log_ratio,
    count_denominators,
    importance_ratio,
    k3,
    ppo_objective,
    token_logprobs,
)

bounded = settings(deadline=None, max_examples=60)  # no deadline: machines are shared
AGGREGATIONS = ("token", "sequence", "constant")
CLIP = (0.2, 0.3)
TEMPERATURE = 0.6
CONSTANT = 5.0


def ppo_loss(logits, ids, behaviour, advantages, mask, denominators, anchor, aggregation):
    logprobs = token_logprobs(logits, ids, TEMPERATURE)
    anchored = anchor_logprobs(anchor, logprobs, behaviour)
    ratio = importance_ratio(bounded_log_ratio(logprobs, anchored, mask))
    return aggregate(
        aggregation, ppo_objective(ratio, advantages, *CLIP), mask, denominators, CONSTANT
    )


def random_batch(seed=0, num_sequences=4, num_tokens=5, vocabulary=6):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, num_tokens)
    logits = torch.randn(*shape, vocabulary, generator=generator)
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    stale = logits + 0.3 * torch.randn(logits.shape, generator=generator)
    behaviour = token_logprobs(stale, ids, TEMPERATURE)
    advantages = torch.randn(num_sequences, 1, generator=generator).expand(shape).contiguous()
    lengths = torch.arange(num_sequences) % (num_tokens + 1)  # from no token to a full row
    mask = (torch.arange(num_tokens) < lengths[:, None]).float()
    return logits, ids, behaviour, advantages, mask


def loss_and_gradient(batch, sizes, anchor="behaviour", aggregation="token"):
    logits, *rest = batch
    logits = logits.clone().requires_grad_()
    denominators = count_denominators(rest[-1])
    total = 0.0
    for parts in zip(logits.split(sizes), *(tensor.split(sizes) for tensor in rest), strict=True):
        share = ppo_loss(*parts, denominators, anchor, aggregation)
        share.backward()
        total += share.item()
    return total, logits.grad


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradient_equal_plain_loops_and_their_finite_differences(aggregation):
    batch = random_batch(num_sequences=3, num_tokens=3, vocabulary=4)
    value, gradient = loss_and_gradient(batch, [3], aggregation=aggregation)
    logits, ids, behaviour, advantages, mask = (tensor.tolist() for tensor in batch)

    def exact():
        return reference.ppo_loss(
            logits, ids, TEMPERATURE, behaviour, advantages, mask, CLIP, aggregation, CONSTANT
        )

    assert value == pytest.approx(exact(), rel=1e-5, abs=1e-6)
    step = 1e-5
    for b in range(3):
        for t in range(3):
            for v in range(4):
                kept = logits[b][t][v]
                logits[b][t][v] = kept + step
                up = exact()
                logits[b][t][v] = kept - step
                down = exact()
                logits[b][t][v] = kept
                slope = (up - down) / (2 * step)
                assert float(gradient[b, t, v]) == pytest.approx(slope, abs=2e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("anchor", ["behaviour", "recomputed"])
def test_one_two_and_four_micro_batches_give_one_gradient(aggregation, anchor):
    batch = random_batch(num_sequences=8)
    value, gradient = loss_and_gradient(batch, [8], anchor, aggregation)
    for sizes in ([4, 4], [2, 2, 2, 2], [5, 3]):
        split_value, split_gradient = loss_and_gradient(batch, sizes, anchor, aggregation)
        assert split_value == pytest.approx(value, abs=1e-6)
        assert (split_gradient - gradient).abs().max() < 1e-7


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_b61_padding_on_either_side_changes_neither_loss_nor_gradient(aggregation):
    batch = random_batch()
    value, gradient = loss_and_gradient(batch, [4], aggregation=aggregation)
    for left, right in ((5, 0), (0, 5), (2, 3)):
        padded = []
        for tensor in batch:
            junk = 0 if tensor.dtype == torch.int64 else 50.0
            pads = [tensor.new_full((4, width, *tensor.shape[2:]), junk) for width in (left, right)]
            padded.append(torch.cat([pads[0], tensor, pads[1]], dim=1))
        padded[-1][:, :left] = 0.0
        padded[-1][:, left + 5 :] = 0.0
        padded_value, padded_gradient = loss_and_gradient(padded, [4], aggregation=aggregation)
        assert padded_value == pytest.approx(value, abs=1e-6)
        assert (padded_gradient[:, left : left + 5] - gradient).abs().max() < 1e-7
        assert padded_gradient[:, :left].abs().sum() == 0
        assert padded_gradient[:, left + 5 :].abs().sum() == 0


@pytest.mark.parametrize("anchor", ["behaviour", "recomputed"])
def test_ratio_one_everywhere_gives_the_policy_gradient(anchor):
    logits, ids, _, advantages, mask = random_batch()
    behaviour = token_logprobs(logits, ids, TEMPERATURE)
    _, gradient = loss_and_gradient((logits, ids, behaviour, advantages, mask), [4], anchor)
    plain = logits.double().requires_grad_()
    logprobs = torch.log_softmax(plain / TEMPERATURE, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    (-advantages * logprobs * mask).sum().div(mask.sum()).backward()
    assert (gradient - plain.grad).abs().max() < 1e-7


def test_recomputed_anchor_never_looks_at_the_behaviour_policy():
    batch = random_batch()
    other = (*batch[:2], batch[2] - 3.0, *batch[3:])
    assert torch.equal(
        loss_and_gradient(batch, [4], "recomputed")[1],
        loss_and_gradient(other, [4], "recomputed")[1],
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_b57_the_same_temperature_on_both_sides_gives_ratio_one_before_any_update(temperature):
    logits = torch.log(torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]]))
    ids, mask = torch.tensor([[0, 2]]), torch.ones(1, 2)
    weights = logits.double().div(temperature).exp()
    sampler = (weights / weights.sum(-1, keepdim=True)).log()  # what an engine would report
    sampled = sampler.gather(-1, ids.unsqueeze(-1)).squeeze(-1).float()

    def ratio(trainer_temperature):
        ours = token_logprobs(logits, ids, trainer_temperature)
        return importance_ratio(bounded_log_ratio(ours, sampled, mask))

    assert (ratio(temperature) - 1.0).abs().max() < 1e-6
    if temperature != 1.0:
        assert (ratio(1.0) - 1.0).abs().min() > 0.05


def test_b69_all_equal_rewards_or_no_trained_token_give_gradient_exactly_zero():
    logits, ids, behaviour, advantages, mask = random_batch()
    for changed in ((advantages * 0, mask), (advantages, mask * 0)):
        value, gradient = loss_and_gradient((logits, ids, behaviour, *changed), [2, 2])
        assert value == 0.0
        assert (gradient == 0).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_in_every_input_under_the_mask_changes_nothing(garbage):
    batch = random_batch()
    value, gradient = loss_and_gradient(batch, [4])
    logits, ids, behaviour, advantages, mask = (tensor.clone() for tensor in batch)
    masked = mask == 0
    logits[masked], behaviour[masked], advantages[masked] = garbage, garbage, garbage
    dirty_value, dirty = loss_and_gradient((logits, ids, behaviour, advantages, mask), [4])
    assert dirty_value == value
    assert torch.equal(dirty, gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@bounded
@given(data=st.data())
def test_no_finite_input_gives_a_loss_or_gradient_that_is_not_finite(aggregation, data):
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))

    def table(values):
        row = st.lists(values, min_size=columns, max_size=columns)
        return torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)))

    logits = torch.stack([table(st.floats(-200.0, 200.0, width=32)) for _ in range(3)], dim=-1)
    logits.requires_grad_()
    ids = table(st.integers(0, 2))
    behaviour = table(st.floats(-200.0, 200.0, width=32))  # nonsense above 0 must be survived too
    advantages = table(st.floats(-1e6, 1e6, width=32))
    mask = table(st.booleans())
    loss = ppo_loss(
        logits, ids, behaviour, advantages, mask, count_denominators(mask), "behaviour", aggregation
    )
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_a_penalty_towards_a_reference_is_added_per_token_and_pulls_towards_it():
    logits = torch.zeros(1, 1, 2, requires_grad=True)
    ids, mask = torch.tensor([[0]]), torch.ones(1, 1)
    logprobs = token_logprobs(logits, ids, 1.0)
    penalty = k3(bounded_log_ratio(logprobs, torch.tensor([[math.log(0.8)]]), mask))
    aggregate("token", 0.1 * penalty, mask, count_denominators(mask)).backward()
    # d/dlogp of exp(-d) - 1 + d is 1 - exp(-d) = 1 - 0.8/0.5 = -0.6; dlogp/dlogit = +-0.5.
    assert logits.grad.tolist() == [[pytest.approx([-0.03, 0.03], abs=1e-6)]]


def test_b58_truncated_sampling_reads_the_kept_mass_and_one_on_the_same_support():
    # Two of five tokens are kept: the engine's probabilities are those of the kept ones alone.
    probs = torch.tensor([[[0.6, 0.27, 0.06, 0.05, 0.02]]])
    ids, mask = torch.tensor([[0]]), torch.ones(1, 1)
    engine = (probs[..., 0] / 0.87).log()

    def ratio(logits):
        return importance_ratio(bounded_log_ratio(token_logprobs(logits, ids, 1.0), engine, mask))

    assert float(ratio(probs.log())) == pytest.approx(0.87, abs=1e-6)
    support = torch.tensor([True, True, False, False, False])
    assert float(ratio(probs.log().masked_fill(~support, -math.inf))) == pytest.approx(1.0)


def test_b59_as_many_log_probabilities_as_sampled_ids_or_an_error():
    # "he", "llo" was sampled; its text encodes as one token, with one log-probability.
    sampled = torch.tensor([[-0.5, -0.7]])
    encoded_again = torch.tensor([[-0.4]])
    with pytest.raises(ValueError, match=r"anchor_logprobs_BT \(1, 1\)"):
        bounded_log_ratio(sampled, encoded_again, torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"behaviour_logprobs_BT \(1, 1\)"):
        PolicyInputs(sampled, sampled, encoded_again, torch.ones(1, 2), torch.ones(1, 2))
