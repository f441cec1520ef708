"""Random numbers and the tokens drawn with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from engine_helpers import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.engines.sampling import draw_uniforms, sample_tokens

PLAIN = Sampling(1.0, 1)
PINNED = [
    [0.3512676148532572, 0.7472523224398253, 0.8939286191454535],
    [0.5519533580849234, 0.5476224302239286, 0.13442641951765],
]
UNIFORMS = st.sampled_from([0.0, 2.0**-60, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0]) | st.floats(0, 1)


def plain_uniforms(
    request: GenerationRequest, member: int, positions: int, seed: int
) -> np.ndarray:
    """A fresh generator for one row: the definition."""
    word = 2 * request.index + (request.stream == "evaluation")
    key = np.array([seed, word], dtype=np.uint64)
    counter = np.array([0, member, 0, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).random(positions)


@given(
    index=st.integers(0, 2**62),
    seed=st.integers(0, 2**63),
    positions=st.integers(1, 40),
    evaluation=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_uniforms_are_a_function_of_seed_stream_index_member_and_position(
    index, seed, positions, evaluation
):
    stream = "evaluation" if evaluation else "rollout"
    request = GenerationRequest(index, (1,), 5, stream)
    others = ask([[1], [1, 2]], 3, first_index=11)
    got = draw_uniforms([others[0], request, others[1]], positions, seed=seed)[3:8]
    assert np.array_equal(got, draw_uniforms([request], positions, seed=seed))
    longer = draw_uniforms([request], positions + 7, seed=seed)
    assert np.array_equal(got, longer[:, :positions])
    for member in range(5):
        assert np.array_equal(got[member], plain_uniforms(request, member, positions, seed))


def test_uniforms_never_change_between_releases():
    got = draw_uniforms([GenerationRequest(3, (1,), 2, "rollout")], 3, seed=42)
    assert got.tolist() == PINNED


def test_no_two_rows_of_a_run_share_numbers():
    requests = [
        GenerationRequest(index, (1,), 8, stream)
        for index in range(64)
        for stream in ("rollout", "evaluation")
    ]
    got = draw_uniforms(requests, 16, seed=0)
    assert len(np.unique(got)) == got.size
    assert abs(got.mean() - 0.5) < 4 * math.sqrt(1 / 12 / got.size)


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (2**64, 0), (0, 2**63)])
def test_seed_or_index_without_a_key_is_refused(seed, index):
    with pytest.raises(ValueError, match=r"not in \[0, 2\^63\)"):
        draw_uniforms([GenerationRequest(index, (1,), 1)], 1, seed=seed)


@given(
    logits=arrays(np.float32, (1, 7), elements=st.floats(-200, 200, width=32)),
    holes=st.sets(st.integers(0, 6), max_size=6),
    uniform=UNIFORMS,
    top_p=st.sampled_from([1.0, 0.9, 1e-6]),
    top_k=st.integers(0, 8),
)
@settings(max_examples=300, deadline=None)
def test_a_token_of_probability_zero_is_never_drawn(logits, holes, uniform, top_p, top_k):
    logits = torch.from_numpy(logits.copy())
    logits[0, list(holes)] = -math.inf
    sampling = Sampling(1.0, 1, top_p=top_p, top_k=top_k)
    ids, logprobs = sample_tokens(logits, torch.tensor([uniform]), sampling)
    assert logits.softmax(-1)[0, ids[0]] > 0
    assert math.isfinite(logprobs[0])


@given(uniform=st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_the_token_drawn_is_where_the_uniform_falls(uniform):
    probs = torch.tensor([[0.125, 0.0, 0.5, 0.25, 0.0, 0.125]])
    edges = [0.125, 0.125, 0.625, 0.875, 0.875, 1.0]
    ids, logprobs = sample_tokens(probs.log(), torch.tensor([uniform]), PLAIN)
    as_float32 = float(np.float32(uniform))
    if all(abs(as_float32 - edge) > 1e-6 for edge in edges):
        assert ids[0] == next(i for i, edge in enumerate(edges) if uniform < edge)
    assert logprobs[0] == pytest.approx(math.log(probs[0, ids[0]]), abs=1e-6)


@pytest.mark.parametrize(
    ("probs", "uniform", "token"),
    [
        ([0.0, 0.25, 0.75], 0.0, 1),
        ([0.25, 0.0, 0.75], 0.25, 2),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.75, 0.25, 0.0], 1 - 2.0**-53, 1),
        ([0.75, 0.25, 0.0], 1.0, 1),
    ],
)
def test_edges_of_the_unit_interval_and_of_tokens_fall_where_they_should(probs, uniform, token):
    ids, _ = sample_tokens(torch.tensor([probs]).log(), torch.tensor([uniform]), PLAIN)
    assert ids.tolist() == [token]


def test_b58_truncation_limits_what_is_drawn_and_not_the_logprobs():
    probs = torch.tensor([[0.1, 0.45, 0.03, 0.3, 0.12]])
    rows = 1000
    uniforms = (torch.arange(rows) + 0.5) / rows
    for sampling, kept in [
        (Sampling(1.0, 1, top_p=0.75), {1, 3}),
        (Sampling(1.0, 1, top_p=0.7500001), {1, 3, 4}),
        (Sampling(1.0, 1, top_k=1), {1}),
        # 0.7 of what top_k keeps (0.87) is 0.609
        (Sampling(1.0, 1, top_k=3, top_p=0.5), {1}),
        (Sampling(1.0, 1, top_k=3, top_p=0.7), {1, 3}),
    ]:
        ids, logprobs = sample_tokens(probs.log().expand(rows, -1), uniforms, sampling)
        assert set(ids.tolist()) == kept
        assert torch.allclose(logprobs, probs.log()[0, ids], atol=1e-6)
        shares = torch.bincount(ids, minlength=5) / rows
        renormalised = torch.tensor([p if i in kept else 0 for i, p in enumerate(probs[0])])
        assert torch.allclose(shares, renormalised / renormalised.sum(), atol=2 / rows)


def test_b57_logprobs_are_float32_and_of_the_sampling_temperature():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids, logprobs = sample_tokens(logits, torch.full((4,), 0.4), Sampling(0.6, 1))
    expected = (logits.float() / 0.6).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert torch.equal(logprobs, expected)
    assert not torch.allclose(
        logprobs, logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    )
