"""Stands in for a vLLM server in trl_async_grpo.py. Nothing here is about Sidestep's control."""

import queue
import random
from collections.abc import Iterable

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from sidestep.engines.generate import generate
from sidestep.engines.protocol import GenerationRequest, Sampling


class LocalRollouts(queue.Queue):
    """A rollout worker, its queue and its weight transfer in one: two-digit additions.

    It samples when the trainer asks, `num_prompts` groups at a time, with the weights that were
    sent last.
    """

    def __init__(self, model_path: str, num_prompts: int, group_size: int, seed: int = 0) -> None:
        super().__init__()
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.model = AutoModelForCausalLM.from_pretrained(model_path)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
        self.num_prompts, self.group_size, self.seed = num_prompts, group_size, seed
        self.draw, self.num_groups, self.version = random.Random(seed), 0, 0

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        if self.empty():
            self.sample()
        return super().get()

    def sample(self) -> None:
        pairs = [divmod(self.draw.randrange(10_000), 100) for _ in range(self.num_prompts)]
        prompts = [tuple(self.tokenizer(f"{a:02d}+{b:02d}=").input_ids) for a, b in pairs]
        first, size = self.num_groups, self.group_size
        requests = [GenerationRequest(first + i, ids, size) for i, ids in enumerate(prompts)]
        stop = [self.tokenizer.eos_token_id]
        drawn = generate(self.model, requests, Sampling(1.0, 4), seed=self.seed, stop_ids=stop)
        for i, (prompt, (a, b)) in enumerate(zip(prompts, pairs, strict=True)):
            rows = range(i * size, (i + 1) * size)
            answers = [drawn.token_ids_BT[row, : drawn.lengths_B[row]] for row in rows]
            texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
            rewards = np.array([self.reward(text, a + b) for text in texts])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            for k, row in enumerate(rows):
                length = len(answers[k])
                logprobs = drawn.logprobs_BT[row, :length].numpy()
                sample = RolloutSample(
                    prompt=[],
                    completion=[{"role": "assistant", "content": texts[k]}],
                    input_ids=np.concatenate([prompt, answers[k].numpy()]),
                    completion_mask=np.repeat([0, 1], [len(prompt), length]),
                    old_log_probs=np.pad(logprobs, (len(prompt), 0)),
                    advantage=float(advantages[k]),
                    model_version=self.version,
                    group_id=first + i,
                    metrics={"reward": float(rewards[k])},
                )
                self.put(sample)
        self.num_groups += len(prompts)

    def reward(self, text: str, right: int) -> float:
        return float(text == str(right))

    def update_model_version(self, version: int) -> None:
        self.version = version

    @torch.no_grad()
    def send_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, weights in named_weights:
            own[name].copy_(weights)

    def nothing_to_do(self, *args: object) -> None:
        pass

    start = stop = check_health = init_weight_transfer = pause = resume = destroy = nothing_to_do
