"""How fast is the embedded engine's sampling beside `transformers.generate`?

    python benchmarks/engine.py                         # packaged model, about half a minute
    python benchmarks/engine.py --model models/smollm2  # and a model of your own

Batch 64, both sample at temperature 1 from the same prompts, one after the other in turns, medians
and their ratio. Ours returns the log-probability of every token, `generate` is not asked for any.
`fixed`: no end token, every row has all its tokens. `ragged`: rows end at random, a tenth at every
token; ours with and without rows that leave the batch (`engine.drop_finished`).
Goals: ratio 1.2 on the packaged model, 1.0 on any other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from common import save_results
from sidestep.engines.generate import generate
from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.models.loading import load_model, load_tokenizer

BATCH = 64


def measure(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Median tokens/s of each way, taken in turns after one call of each."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            num_tokens = way()
            if repeat:
                rates[name].append(num_tokens / (time.perf_counter() - started))
    return {name: statistics.median(rate) for name, rate in rates.items()}


def of_model(path: str, num_tokens: int, group_size: int, repeats: int) -> dict[str, object]:
    model = load_model(path, "float32", "cpu").requires_grad_(False)
    tokenizer = load_tokenizer(path)
    texts = [f"{10 + 3 * i}+{99 - 2 * i}=" for i in range(BATCH // group_size)]
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    requests = [GenerationRequest(i, prompt, group_size) for i, prompt in enumerate(prompts)]
    width = max(len(prompt) for prompt in prompts)
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    numbers = torch.Generator().manual_seed(0)
    some = torch.randperm(model.config.vocab_size, generator=numbers)
    results: dict[str, object] = {}
    for kind, stop_ids in (("fixed", []), ("ragged", some[: len(some) // 10].tolist())):

        def theirs(stop_ids: list[int] = stop_ids) -> int:
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    max_new_tokens=num_tokens,
                    eos_token_id=stop_ids or None,
                    pad_token_id=0,
                )[:, width:]
            stopped = torch.isin(out, torch.tensor(stop_ids, dtype=torch.int64)).cumsum(1)
            return int((stopped.cumsum(1) <= 1).sum())

        def ours(drop: bool, stop_ids: list[int] = stop_ids) -> int:
            sampling = Sampling(1.0, num_tokens, drop_finished=drop)
            sampled = generate(model, requests, sampling, seed=0, stop_ids=stop_ids)
            return sum(sampled.lengths_B)

        ways = {
            "transformers": theirs,
            "sidestep": lambda: ours(False),
            "sidestep, drop_finished": lambda: ours(True),
        }
        rates = measure(ways, repeats)
        base = rates["transformers"]
        ratios = {name: rate / base for name, rate in rates.items() if name != "transformers"}
        results[kind] = {"tokens_per_s": rates, "ratio": ratios}
        for name, rate in rates.items():
            print(
                f"{path:24.24} groups of {group_size}, {kind:6} {name:24} {rate:9.0f} tokens/s "
                f"{rate / base:5.2f}",
                flush=True,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder to measure too")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    results = {
        f"packaged, groups of {size}": of_model(
            "packaged", arguments.tokens, size, arguments.repeats
        )
        for size in (1, 8)
    }
    if arguments.model:
        results[arguments.model] = of_model(arguments.model, arguments.tokens, 8, 3)
    print(save_results("engine", results))


if __name__ == "__main__":
    main()
