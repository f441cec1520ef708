"""Which prompt a group asks: reshuffled epochs, a function of (seed, admission index) alone."""

from __future__ import annotations

import numpy as np


class PromptOrder:
    """Every epoch is its own permutation of all prompts, so nothing but the seed has to be saved
    for a resume.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts must be at least 1, got {num_prompts}")
        self.num_prompts = num_prompts
        self.seed = seed
        self._epochs: dict[int, list[int]] = {}

    def prompt_of(self, group_index: int) -> int:
        epoch, position = divmod(group_index, self.num_prompts)
        if epoch not in self._epochs:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.num_prompts)
            self._epochs = {k: v for k, v in self._epochs.items() if k >= epoch - 1}
            self._epochs[epoch] = order.tolist()
        return self._epochs[epoch][position]
