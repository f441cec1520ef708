"""Real groups and trainers for tests of one step."""

import torch
from local_run import small_config

from sidestep.buffer.collate import collate
from sidestep.engines.generate import generate
from sidestep.engines.protocol import GenerationRequest, Sampling
from sidestep.models.loading import load_model, load_tokenizer, stop_token_ids
from sidestep.trainer.step import Trainer
from sidestep.types import Completion, Example, Group, Prompt

TEXTS = ("say 1", "please say 22!", "x", "12+34=")


def trainer_for(model_dir, **sections):
    config = small_config(model_dir, **sections)
    return Trainer(load_model(config.model.path, "float32", "cpu"), config, torch.device("cpu"))


def sampled_groups(model_dir, temperature=1.0, texts=TEXTS):
    """Real groups, sampled by the model itself at version 0."""
    tokenizer = load_tokenizer(str(model_dir))
    model = load_model(str(model_dir), "float32", "cpu")
    prompts = [
        Prompt(i, Example(text), tuple(tokenizer(text)["input_ids"]))
        for i, text in enumerate(texts)
    ]
    requests = [GenerationRequest(i, prompt.token_ids, 4) for i, prompt in enumerate(prompts)]
    sampled = generate(
        model,
        requests,
        Sampling(temperature, 6),
        seed=0,
        stop_ids=stop_token_ids(tokenizer, model.generation_config),
    )
    rows = zip(
        sampled.token_ids_BT.tolist(), sampled.logprobs_BT.tolist(), sampled.lengths_B, strict=True
    )
    completions = [
        Completion(tuple(ids[:n]), tuple(logprobs[:n]), (0,) * n, "length")
        for ids, logprobs, n in rows
    ]
    return [
        Group(i, prompt, tuple(completions[4 * i : 4 * i + 4])) for i, prompt in enumerate(prompts)
    ]


def batch_of(groups, seed=0):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(groups), 4, generator=generator).tolist()
    return collate(groups, advantages)
