import losses_reference as reference
import pytest
import torch

from sidestep.losses import logprobs as module
from sidestep.losses import token_entropy, token_logprobs


def random_case(shape, scale=5.0, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * scale).to(dtype)
    ids = torch.randint(0, shape[-1], shape[:2], generator=generator)
    return logits, ids


def float64_logprobs(logits, ids, temperature):
    logprobs = torch.log_softmax(logits.double() / temperature, dim=-1)
    return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def test_three_tokens_by_hand():
    logits = torch.log(torch.tensor([[[1.0, 2.0, 5.0], [3.0, 0.5, 0.5]]]))
    logprobs = token_logprobs(logits, torch.tensor([[2, 0]]), 1.0)
    assert logprobs.exp().tolist() == [pytest.approx([5 / 8, 3 / 4], abs=1e-6)]
    # Temperature 0.5 squares the weights: 25 / 30 and 9 / 9.5.
    colder = token_logprobs(logits, torch.tensor([[2, 0]]), 0.5)
    assert colder.exp().tolist() == [pytest.approx([25 / 30, 9 / 9.5], abs=1e-6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_equals_float64_to_1e_6_relative_and_is_float32(dtype, temperature):
    logits, ids = random_case((3, 5, 1000), dtype=dtype)
    logprobs = token_logprobs(logits, ids, temperature)
    expected = float64_logprobs(logits, ids, temperature)
    assert logprobs.dtype == torch.float32
    assert ((logprobs - expected).abs() <= 1e-6 * expected.abs().clamp(min=1.0)).all()


def test_large_common_offset_of_the_logits_costs_no_digits():
    logits, ids = random_case((2, 4, 50))
    shifted = logits.double().mul(64).round().div(64) + 4096.0  # exact in float32
    expected = float64_logprobs(shifted, ids, 1.0)
    assert (token_logprobs(shifted.float(), ids, 1.0) - expected).abs().max() < 2e-6


def test_agrees_with_plain_python_loops():
    logits, ids = random_case((2, 3, 7))
    logprobs = token_logprobs(logits, ids, 0.6)
    for b in range(2):
        for t in range(3):
            expected = reference.logprob(logits[b, t].tolist(), int(ids[b, t]), 0.6)
            assert float(logprobs[b, t]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 11, 25, 100, 10_000])
def test_chunk_size_changes_no_bit_of_values_gradients_and_entropies(chunk, monkeypatch):
    def evaluate():
        logits, ids = random_case((3, 5, 11))
        logits.requires_grad_()
        logprobs = token_logprobs(logits, ids, 0.7)
        (logprobs * torch.arange(15.0).view(3, 5)).sum().backward()
        return logprobs.detach(), logits.grad, token_entropy(logits, 0.7)

    expected = evaluate()
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    for actual, wanted in zip(evaluate(), expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("chunk", [40, 1 << 24])
def test_gradient_equals_autograd_in_float64(chunk, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    logits, ids = random_case((3, 5, 20), scale=2.0)
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    ours = logits.clone().requires_grad_()
    (token_logprobs(ours, ids, 0.6) * weights).sum().backward()
    exact = logits.double().requires_grad_()
    (float64_logprobs(exact, ids, 0.6) * weights).sum().backward()
    assert (ours.grad - exact.grad).abs().max() < 1e-6


def test_gradient_equals_finite_differences():
    logits, ids = random_case((1, 2, 4), scale=1.0)
    logits.requires_grad_()
    token_logprobs(logits, ids, 0.8).sum().backward()
    step = 1e-6
    for t in range(2):
        for v in range(4):
            row, token = logits[0, t].tolist(), int(ids[0, t])
            up = reference.logprob([x + step * (i == v) for i, x in enumerate(row)], token, 0.8)
            down = reference.logprob([x - step * (i == v) for i, x in enumerate(row)], token, 0.8)
            assert float(logits.grad[0, t, v]) == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_gradient_of_half_precision_logits_has_their_dtype_and_float32_values():
    logits, ids = random_case((2, 3, 40), dtype=torch.bfloat16)
    ours = logits.clone().requires_grad_()
    token_logprobs(ours, ids, 1.0).sum().backward()
    wide = logits.float().requires_grad_()
    token_logprobs(wide, ids, 1.0).sum().backward()
    assert ours.grad.dtype == torch.bfloat16
    assert torch.equal(ours.grad, wide.grad.bfloat16())


def test_a_shifted_view_of_the_logits_gives_what_a_copy_gives():
    full, _ = random_case((3, 6, 9))
    ids = torch.arange(15).view(3, 5) % 9
    viewed, copied = full.clone().requires_grad_(), full[:, :-1].clone().requires_grad_()
    from_view, from_copy = (
        token_logprobs(viewed[:, :-1], ids, 1.0),
        token_logprobs(copied, ids, 1.0),
    )
    from_view.sum().backward()
    from_copy.sum().backward()
    assert torch.equal(from_view, from_copy)
    assert torch.equal(viewed.grad[:, :-1], copied.grad)
    assert viewed.grad[:, -1].abs().max() == 0


def test_autograd_keeps_no_copy_of_the_logits():
    logits, ids = random_case((2, 3, 500), dtype=torch.bfloat16)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, ids, 1.0)
    assert {t.data_ptr() for t in kept} == {logits.data_ptr(), ids.data_ptr()}


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_garbage_logits_of_a_masked_token_give_gradient_exactly_zero(garbage):
    logits, ids = random_case((1, 3, 4))
    logits[0, 1] = garbage
    logits.requires_grad_()
    logprobs = token_logprobs(logits, ids, 1.0)
    torch.where(torch.tensor([[True, False, True]]), logprobs, 0.0).sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 1].tolist() == [0.0] * 4
    assert logits.grad[0, 0].abs().max() > 0


def test_forbidden_tokens_at_minus_infinity_leave_the_others_exact():
    logits = torch.tensor([[[0.0, 0.0, -torch.inf, -torch.inf]]], requires_grad=True)
    logprobs = token_logprobs(logits, torch.tensor([[1]]), 1.0)
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-0.6931472, abs=1e-6)
    assert logits.grad.tolist() == [[[-0.5, 0.5, 0.0, 0.0]]]
    assert float(token_entropy(logits, 1.0)) == pytest.approx(0.6931472, abs=1e-6)


def test_entropy_equals_float64_and_is_log_of_the_vocabulary_for_equal_logits():
    logits, _ = random_case((2, 3, 30), scale=2.0)
    exact = torch.distributions.Categorical(logits=logits.double() / 0.7).entropy()
    assert (token_entropy(logits, 0.7) - exact).abs().max() < 2e-6
    flat = token_entropy(torch.full((1, 1, 8), 3.0), 0.7)
    assert float(flat) == pytest.approx(2.0794415, abs=1e-6)
    assert not token_entropy(logits.requires_grad_(), 1.0).requires_grad


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_no_sequences_or_no_tokens_give_an_empty_answer_and_a_zero_gradient(shape):
    logits = torch.zeros(shape, requires_grad=True)
    logprobs = token_logprobs(logits, torch.zeros(shape[:2], dtype=torch.int64), 1.0)
    logprobs.sum().backward()
    assert logprobs.shape == shape[:2]
    assert logits.grad.shape == shape


def test_wrong_arguments_are_named():
    logits, ids = random_case((2, 3, 5))
    with pytest.raises(ValueError, match=r"token_ids_BT has shape \(2, 2\).*\(2, 3, 5\)"):
        token_logprobs(logits, ids[:, :2], 1.0)
    with pytest.raises(ValueError, match=r"logits_BTV has shape \(3, 5\)"):
        token_logprobs(logits[0], ids[0], 1.0)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature is"):
            token_logprobs(logits, ids, temperature)
        with pytest.raises(ValueError, match="temperature is"):
            token_entropy(logits, temperature)
