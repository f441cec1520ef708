"""What an evaluation asks the engine at one version, and what becomes of the answers.

_E held-out rows, _S samples of one row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from sidestep.config import RunConfig
from sidestep.engines.protocol import Engine, GenerationRequest, Sampling
from sidestep.tasks.protocol import FullTask
from sidestep.trainer.waits import Waits, in_daemon_thread
from sidestep.types import Completion, Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out rows answered with the weights of one version.

    accuracy: mean reward of one greedy answer to each row. length_mean: tokens of these.
    truncated_fraction: share of them cut at engine.max_new_tokens. sampled_mean: mean reward of
    eval.samples answers to each row, and pass_at: k to the estimate of pass@k from them; None and
    empty without samples.
    """

    accuracy: float
    length_mean: float
    truncated_fraction: float
    sampled_mean: float | None
    pass_at: Mapping[int, float]
    seconds: float

    def metrics(self, suffix: str = "") -> dict[str, Any]:
        """By their names in diagnostics/metrics.py; "_start" for the weights before any step."""
        values = {
            "accuracy/eval": self.accuracy,
            "eval/length_mean": self.length_mean,
            "eval/truncated_fraction": self.truncated_fraction,
            "eval/sampled_mean": self.sampled_mean,
            "eval/pass_at": dict(self.pass_at),
            "time/eval_s": self.seconds,
        }
        return {name + suffix: value for name, value in values.items()}


class Evaluator:
    """Asks held-out rows. Its requests are as large as the rollouts', take none of their places and
    have random numbers of their own, the same at every version.
    """

    def __init__(
        self,
        config: RunConfig,
        task: FullTask,
        held_out: Sequence[Prompt],
        engine: Engine,
        waits: Waits,
    ) -> None:
        self._config, self._task, self._held_out = config, task, held_out
        self._engine, self._waits = engine, waits

    async def evaluate(self, version: int) -> Evaluation:
        """Answers of exactly the weights of `version`, which must stay published meanwhile."""
        started = time.monotonic()
        greedy = [completions[0] for completions in await self._answers(version, 1, greedy=True)]
        rewards_E = await self._rewards(version, [[completion] for completion in greedy])
        num_cut = sum(completion.finish_reason == "length" for completion in greedy)
        sampled_mean, pass_at = await self._sampled(version)
        return Evaluation(
            accuracy=statistics.fmean(rewards[0] for rewards in rewards_E),
            length_mean=statistics.fmean(len(completion.token_ids) for completion in greedy),
            truncated_fraction=num_cut / len(greedy),
            sampled_mean=sampled_mean,
            pass_at=pass_at,
            seconds=time.monotonic() - started,
        )

    async def _sampled(self, version: int) -> tuple[float | None, dict[int, float]]:
        settings = self._config.eval
        if not settings.samples:
            return None, {}
        answers_ES = await self._answers(version, settings.samples, greedy=False)
        rewards_ES = await self._rewards(version, answers_ES)
        passed_E = [
            sum(reward >= settings.pass_reward for reward in rewards_S) for rewards_S in rewards_ES
        ]
        pass_at = {
            k: statistics.fmean(pass_at_k(settings.samples, passed, k) for passed in passed_E)
            for k in settings.pass_at
        }
        return statistics.fmean(map(statistics.fmean, rewards_ES)), pass_at

    async def _answers(
        self, version: int, samples: int, *, greedy: bool
    ) -> list[tuple[Completion, ...]]:
        engine, rollout = self._config.engine, self._config.rollout
        sampling = Sampling(
            engine.temperature,
            engine.max_new_tokens,
            greedy=greedy,
            top_p=1.0 if greedy else engine.top_p,
            top_k=0 if greedy else engine.top_k,
        )
        sequences = rollout.group_size * (engine.batch_groups or rollout.groups_per_step)
        size = max(1, sequences // samples)
        answers: list[tuple[Completion, ...]] = []
        for start in range(0, len(self._held_out), size):
            requests = [
                GenerationRequest(start + i, prompt.token_ids, samples, stream="evaluation")
                for i, prompt in enumerate(self._held_out[start : start + size])
            ]
            generation = await self._waits.within(
                self._engine.generate(requests, sampling, version=version),
                lambda: f"evaluate waited for the engine (version {version})",
            )
            answers += generation.completions
        return answers

    async def _rewards(
        self, version: int, answers_ES: Sequence[Sequence[Completion]]
    ) -> list[list[float]]:
        pairs = [
            (prompt.example, completion.text)
            for prompt, completions_S in zip(self._held_out, answers_ES, strict=True)
            for completion in completions_S
        ]
        rewards = await self._waits.within(
            in_daemon_thread(
                self._task.score, [example for example, _ in pairs], [text for _, text in pairs]
            ),
            lambda: f"evaluate waited for the rewards of version {version}",
        )
        flat = iter(rewards)
        return [[next(flat) for _ in completions_S] for completions_S in answers_ES]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples passes.

    1 - C(n - c, k) / C(n, k) for c of n samples that passed (Chen et al. 2021, arXiv:2107.03374).
    Raises ValueError for k above n.
    """
    if k > num_samples:
        raise ValueError(f"k is {k}: there are only {num_samples} samples")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)
