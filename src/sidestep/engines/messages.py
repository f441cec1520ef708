"""What the frames of an engine process say: calls and answers, as flat arrays with lengths.

One object per completion would cost more to decode than a small model costs to run, and it is
decoded in the process that trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sidestep.engines.protocol import Generation, GenerationRequest, Sampling
from sidestep.types import Completion


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine process needs to start.

    model_path: as `model.path`. channel: folder of the weight channel it follows. seed: the run's.
    device: a torch device. dtype: of the weights, as `model.dtype`. attention: as
    `model.attn_implementation`.
    """

    model_path: str
    channel: str
    seed: int
    device: str
    dtype: str
    attention: str = "sdpa"


@dataclass(frozen=True, slots=True)
class Rows:
    """Sampled completions, one row each, in the order of the requests and then of their members."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    stopped: list[bool]
    texts: list[str]


def pack_call(
    requests: Sequence[GenerationRequest], sampling: Sampling, version: int | None
) -> dict[str, Any]:
    return {
        "kind": "generate",
        "version": version,
        "sampling": dataclasses.asdict(sampling),
        "index": [request.index for request in requests],
        "stream": [request.stream for request in requests],
        "num_completions": [request.num_completions for request in requests],
        "lengths": [len(request.prompt_ids) for request in requests],
        "prompt_ids": list(chain.from_iterable(request.prompt_ids for request in requests)),
    }


def unpack_call(
    message: dict[str, Any],
) -> tuple[list[GenerationRequest], Sampling, int | None]:
    prompts = _split(message["prompt_ids"], message["lengths"])
    columns = zip(
        message["index"], prompts, message["num_completions"], message["stream"], strict=True
    )
    requests = [
        GenerationRequest(index=index, prompt_ids=tuple(ids), num_completions=num, stream=stream)
        for index, ids, num, stream in columns
    ]
    return requests, Sampling(**message["sampling"]), message["version"]


def pack_answer(rows: Rows, *, version: int, generate_s: float, load_s: float) -> dict[str, Any]:
    return {
        "version": version,
        "generate_s": generate_s,
        "load_s": load_s,
        "lengths": [len(ids) for ids in rows.token_ids],
        "token_ids": list(chain.from_iterable(rows.token_ids)),
        "logprobs": list(chain.from_iterable(rows.logprobs)),
        "stopped": rows.stopped,
        "texts": rows.texts,
    }


def unpack_answer(message: dict[str, Any], requests: Sequence[GenerationRequest]) -> Generation:
    """The answer as records. ValueError if it is not what was asked for, token by token."""
    lengths, version = message["lengths"], message["version"]
    asked = sum(request.num_completions for request in requests)
    if len(lengths) != asked:
        raise ValueError(f"{asked} completions were asked for and {len(lengths)} came")
    columns = zip(
        _split(message["token_ids"], lengths),
        _split(message["logprobs"], lengths),
        message["stopped"],
        message["texts"],
        strict=True,
    )
    completions = (
        Completion(
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            versions=(version,) * len(ids),
            finish_reason="stop" if stopped else "length",
            text=text,
        )
        for ids, logprobs, stopped, text in columns
    )
    groups = tuple(
        tuple(next(completions) for _ in range(request.num_completions)) for request in requests
    )
    return Generation(groups, generate_s=message["generate_s"], load_s=message["load_s"])


def _split(flat: list[Any], lengths: list[int]) -> Iterator[list[Any]]:
    """Cut a flat list into parts of the given lengths. ValueError if they do not add up."""
    if sum(lengths) != len(flat):
        raise ValueError(f"lengths add up to {sum(lengths)} but there are {len(flat)} entries")
    start = 0
    for length in lengths:
        yield flat[start : start + length]
        start += length
