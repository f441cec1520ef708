"""What do layouts of the training batch cost: padded, bucketed, packed?

    python benchmarks/packing.py                        # about half a minute on one thread

One real rollout batch of the quickstart (64 groups of 8) and one with answers of uneven length
(random, 1 to 64 tokens); whole training steps of the packaged model in turns, medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from common import save_results
from sidestep.config import RunConfig
from sidestep.models.loading import load_model, load_tokenizer
from sidestep.trainer.step import Trainer
from sidestep.types import Completion, Example, Group, Prompt

LAYOUTS: dict[str, dict[str, object]] = {
    "padded": {"layout": "padded"},
    "bucketed, 4096 tokens": {"layout": "bucketed", "max_tokens_per_micro_batch": 4096},
    "packed": {"layout": "packed"},
    "packed, 2048 tokens": {"layout": "packed", "max_tokens_per_micro_batch": 2048},
    "packed, 4096 tokens": {"layout": "packed", "max_tokens_per_micro_batch": 4096},
}


def batch(shortest: int, longest: int, num_groups: int) -> list[Group]:
    """Groups of 8 with made-up answers of random lengths; rewards alternate."""
    numbers = random.Random(0)
    tokenizer = load_tokenizer("packaged")
    groups = []
    for index in range(num_groups):
        text = f"{numbers.randint(10, 99)}+{numbers.randint(10, 99)}="
        prompt = Prompt(index, Example(text), tuple(tokenizer(text)["input_ids"]))
        lengths = [numbers.randint(shortest, longest) for _ in range(8)]
        completions = tuple(
            Completion(
                tuple(numbers.randint(3, 200) for _ in range(n)), (-4.0,) * n, (0,) * n, "length"
            )
            for n in lengths
        )
        groups.append(Group(index, prompt, completions, (0.0, 1.0) * 4))
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    results = {}
    for name, groups in {
        "answers of 3 to 4 tokens": batch(3, 4, 64),
        "answers of 1 to 64 tokens": batch(1, 64, 16),
    }.items():
        trainers = {}
        for layout, keys in LAYOUTS.items():
            config = RunConfig(
                engine={"max_new_tokens": 64},
                train={"numerics_every": 0, **keys},
                control={"mode": "observe"},
            )
            model = load_model("packaged", "float32", "cpu")
            trainers[layout] = Trainer(model, config, torch.device("cpu"))
        seconds: dict[str, list[float]] = {layout: [] for layout in trainers}
        work = {}
        for repeat in range(repeats + 1):
            for layout, trainer in trainers.items():
                started = time.perf_counter()
                work[layout] = trainer.train(groups, repeat).work
                if repeat:
                    seconds[layout].append(time.perf_counter() - started)
        for layout, times in seconds.items():
            results[f"{name}: {layout}"] = {
                "step_s": statistics.median(times),
                "tokens_computed": work[layout]["tokens/computed"],
                "padding_fraction": work[layout]["tokens/padding_fraction"],
            }
            print(
                f"{name}: {layout:24} {statistics.median(times):.4f} s a step, "
                f"{work[layout]['tokens/computed']} positions, "
                f"{work[layout]['tokens/padding_fraction']:.0%} padding",
                flush=True,
            )
    print(save_results("packing", results))


if __name__ == "__main__":
    main()
