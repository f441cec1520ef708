"""Frames and what they say come back as they were sent, or the error says what came instead."""

from __future__ import annotations

import asyncio
import io
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.engines.frames import MAX_FRAME_BYTES, encode_frame, read_frame, receive_frame
from sidestep.engines.messages import Rows, pack_answer, pack_call, unpack_answer, unpack_call
from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.errors import EngineError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False).filter(math.isfinite),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=5)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
REQUESTS = st.lists(
    st.builds(
        GenerationRequest,
        index=st.integers(0, 2**40),
        prompt_ids=st.lists(st.integers(0, 200_000), min_size=1, max_size=6).map(tuple),
        num_completions=st.integers(1, 3),
        stream=st.sampled_from(["rollout", "evaluation"]),
    ),
    max_size=4,
)


def receive_all(data: bytes) -> list[dict]:
    async def receive() -> list[dict]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        messages = []
        while (message := await receive_frame(reader)) is not None:
            messages.append(message)
        return messages

    return asyncio.run(receive())


def read_all(data: bytes) -> list[dict]:
    stream, messages = io.BytesIO(data), []
    while (message := read_frame(stream)) is not None:
        messages.append(message)
    return messages


@given(messages=st.lists(MESSAGES, max_size=4))
@settings(max_examples=50, deadline=None)
def test_frames_come_back_as_they_were_sent(messages):
    data = b"".join(map(encode_frame, messages))
    assert read_all(data) == receive_all(data) == messages


@given(message=MESSAGES, share=st.floats(0, 1, exclude_max=True))
@settings(max_examples=50, deadline=None)
def test_a_stream_that_ends_inside_a_frame_is_an_error_and_before_one_is_the_end(message, share):
    data = encode_frame(message)
    cut = int(share * len(data))
    for read in (read_all, receive_all):
        assert read(data) == [message]
        if cut:
            with pytest.raises(EngineError, match="ended inside a frame"):
                read(data + data[:cut])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 4) + b"oops", "is not JSON: b'oops'"),
        (struct.pack("<I", 2) + b"[]", "holds list, not an object"),
        (struct.pack("<I", 2) + b"\xff\xfe", "is not JSON"),
        (b"Traceback (most recent call last)", "claims 1667330644 bytes"),
    ],
)
def test_what_is_no_frame_is_named(data, message):
    for read in (read_all, receive_all):
        with pytest.raises(EngineError, match=message):
            read(data)
    assert MAX_FRAME_BYTES < 1667330644  # so that text printed by a library is recognised


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_b60_a_number_that_is_not_finite_cannot_be_sent(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_frame({"logprobs": [value]})


@given(values=st.lists(FLOAT32))
@settings(max_examples=50, deadline=None)
def test_float32_numbers_come_back_with_the_same_bits(values):
    (message,) = read_all(encode_frame({"logprobs": values}))
    count = len(values)
    assert struct.pack(f"<{count}f", *message["logprobs"]) == struct.pack(f"<{count}f", *values)


@given(
    requests=REQUESTS,
    temperature=st.floats(0.1, 2),
    greedy=st.booleans(),
    version=st.none() | st.integers(0),
)
@settings(max_examples=50, deadline=None)
def test_calls_come_back_as_they_were_made(requests, temperature, greedy, version):
    sampling = Sampling(temperature, 5, greedy=greedy, top_p=0.9, top_k=4)
    (message,) = read_all(encode_frame(pack_call(requests, sampling, version)))
    assert unpack_call(message) == (requests, sampling, version)


@given(requests=REQUESTS, data=st.data())
@settings(max_examples=50, deadline=None)
def test_answers_come_back_as_they_were_given(requests, data):
    num = sum(request.num_completions for request in requests)
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=num, max_size=num))
    rows = Rows(
        token_ids=[data.draw(st.lists(st.integers(0), min_size=n, max_size=n)) for n in lengths],
        logprobs=[data.draw(st.lists(FLOAT32, min_size=n, max_size=n)) for n in lengths],
        stopped=[data.draw(st.booleans()) for _ in lengths],
        texts=[data.draw(st.text()) for _ in lengths],
    )
    answer = pack_answer(rows, version=3, generate_s=0.5, load_s=0.25)
    (message,) = read_all(encode_frame(answer))
    generation = unpack_answer(message, requests)
    assert [len(group) for group in generation.completions] == [r.num_completions for r in requests]
    flat = [completion for group in generation.completions for completion in group]
    assert [list(completion.token_ids) for completion in flat] == rows.token_ids
    assert [list(completion.logprobs) for completion in flat] == rows.logprobs
    assert [completion.finish_reason == "stop" for completion in flat] == rows.stopped
    assert [completion.text for completion in flat] == rows.texts
    assert all(completion.versions == (3,) * len(completion.token_ids) for completion in flat)
    assert (generation.generate_s, generation.load_s) == (0.5, 0.25)


def test_b59_b60_an_answer_that_is_short_of_a_completion_or_a_logprob_is_refused():
    requests = [GenerationRequest(0, (1,), 2)]
    rows = Rows([[4, 5], [6]], [[-0.5, -0.25], [-1.0]], [True, False], ["a", "b"])
    good = pack_answer(rows, version=0, generate_s=0.0, load_s=0.0)
    assert len(unpack_answer(good, requests).completions[0]) == 2
    for broken, message in [
        (good | {"logprobs": [-0.5, -0.25]}, "lengths add up to 3 but there are 2"),
        (good | {"lengths": [2], "stopped": [True], "texts": ["a"]}, "2 completions.* and 1 came"),
        (good | {"texts": ["a"]}, "shorter"),
        (good | {"logprobs": [-0.5, None, -1.0]}, r"logprobs\[1\] is None"),
    ]:
        with pytest.raises(ValueError, match=message):
            unpack_answer(broken, requests)
