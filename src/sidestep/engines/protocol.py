"""What an engine is: the one interface between the run and whatever samples tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sidestep.types import Completion


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Log-probabilities are those of softmax(logits / temperature) over the whole vocabulary.
    greedy takes the most likely token (log-probabilities stay those at `temperature`).
    top_p < 1 and top_k > 0 truncate what can be drawn, not the log-probabilities: see `loss.anchor`
    for why the config refuses them together with importance ratios.
    drop_finished: rows that have ended may leave the batch. Without it equal requests have equal
    shapes, and so equal bits.
    """

    temperature: float
    max_new_tokens: int
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    drop_finished: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how many completions to sample for it.

    The random numbers of member m are a function of (seed of the run, stream, index, m) and of
    nothing else, so neither the moment nor the worker nor the neighbours in the batch change what a
    group draws.
    """

    index: int
    prompt_ids: tuple[int, ...]
    num_completions: int
    stream: Literal["rollout", "evaluation"] = "rollout"


@dataclass(frozen=True, slots=True)
class Generation:
    """Answer to one `generate` call: completions per request, in the order of the requests.

    generate_s counts the seconds of sampling alone; load_s those that loading the weights took
    before it (0 when they were live).
    """

    completions: tuple[tuple[Completion, ...], ...]
    generate_s: float
    load_s: float


class Engine(Protocol):
    """Calls are served in the order they were made.

    Any failure raises EngineError, in every call that is waiting.
    """

    async def start(self) -> None:
        """Start whatever the engine needs and return once it can answer."""

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        """Sample with exactly the weights of `version`.

        None means the newest published when sampling starts.
        """

    async def load_weights(self, version: int) -> None:
        """Make `version` live, which must have been published in the weight channel."""

    @property
    def version(self) -> int:
        """Version that was live when the engine last answered."""

    async def close(self) -> None:
        """End the engine and everything it started. Safe to call twice."""
