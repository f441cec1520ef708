"""Makes the packaged model: a tiny Qwen3 taught addition with partly wrong labels.

    python -m sidestep.models.make_packaged --out src/sidestep/models/packaged

Every label is drawn anew: right with probability `RIGHT_SHARE`, else off by one of `WRONG_BY`. What
is learnt is that distribution: the most likely answer is right, a sampled one about as often as the
labels were. That leaves RL something to sharpen. About three minutes on one CPU thread. One seed
gives one file, bit by bit, for one version of torch and one kind of CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sidestep.models.addition import (
    NUM_UNSEEN_PAIRS,
    addition_answer,
    addition_prompt,
    operand_pairs,
)

RIGHT_SHARE = 0.4
WRONG_BY = (1, -1, 10, -10, 2, -2)
LARGEST_SUM = 198
NUM_BYTES = 256
END, PAD = "<|endoftext|>", "<|pad|>"
END_ID, PAD_ID = NUM_BYTES, NUM_BYTES + 1
CONTEXT_TOKENS = 512
NUM_ANSWER_TOKENS = 4  # up to three digits and the end
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte of UTF-8, the byte itself: one per ASCII character, lossless for any text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # ByteLevel writes a byte as one printable character: itself where that is one, else the next
    # one from 256 on.
    printable = [byte for byte in range(NUM_BYTES) if chr(byte) in alphabet]
    others = sorted(set(range(NUM_BYTES)) - set(printable))
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(NUM_BYTES + rank): byte for rank, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PAD])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """An untaught model of 140,000 parameters.

    Embeddings are not tied: tied ones make `=` likely after an unlikely first digit, because it was
    the last thing read, and such answers never end.
    """
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=NUM_BYTES + 2,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
        )
    )


def answer_tokens() -> torch.Tensor:
    """(sums, answer tokens) int64: the ids of every sum and the end, then IGNORED."""
    rows = torch.full((LARGEST_SUM + 1, NUM_ANSWER_TOKENS), IGNORED)
    for total in range(LARGEST_SUM + 1):
        ids = [*addition_answer(total, 0).encode(), END_ID]
        rows[total, : len(ids)] = torch.tensor(ids)
    return rows


def teach(model: Qwen3ForCausalLM, *, seed: int, steps: int, batch: int, peak_lr: float) -> None:
    """Teaches `model` in place, never showing it the first NUM_UNSEEN_PAIRS of the pairs.

    The learning rate rises to `peak_lr` and falls as a cosine.
    """
    pairs = operand_pairs()[NUM_UNSEEN_PAIRS:]
    prompts = torch.tensor([list(addition_prompt(*pair).encode()) for pair in pairs])
    sums = torch.tensor([sum(pair) for pair in pairs])
    answers, wrong_by = answer_tokens(), torch.tensor(WRONG_BY)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak_lr, total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    for step in range(steps):
        rows = torch.randint(0, len(pairs), (batch,), generator=generator)
        offsets = wrong_by[torch.randint(0, len(WRONG_BY), (batch,), generator=generator)]
        is_right = torch.rand(batch, generator=generator) < RIGHT_SHARE
        shown = torch.where(is_right, sums[rows], (sums[rows] + offsets).clamp(0, LARGEST_SUM))
        target = answers[shown]
        ids = torch.cat([prompts[rows], target[:, :-1].clamp(min=0)], dim=1)
        logits = model(ids).logits[:, prompts.shape[1] - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if (step + 1) % 250 == 0:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def share_right(model: Qwen3ForCausalLM, *, greedy: bool, samples: int = 1, seed: int = 0) -> float:
    """Share of right answers over the pairs the model never saw, each asked `samples` times.

    At temperature 1, or the most likely token each time (`greedy`).
    """
    pairs = operand_pairs()[:NUM_UNSEEN_PAIRS]
    ids = torch.tensor([list(addition_prompt(*pair).encode()) for pair in pairs])
    ids = ids.repeat_interleave(samples, dim=0)
    wanted = answer_tokens()[[sum(pair) for pair in pairs]].repeat_interleave(samples, dim=0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(NUM_ANSWER_TOKENS):
        probabilities = model(ids).logits[:, -1].softmax(dim=-1)
        if greedy:
            token = probabilities.argmax(dim=-1, keepdim=True)
        else:
            token = torch.multinomial(probabilities, 1, generator=generator)
        ids = torch.cat([ids, token], dim=1)
    said = ids[:, -NUM_ANSWER_TOKENS:]
    return ((said == wanted) | (wanted == IGNORED)).all(dim=1).double().mean().item()


def save(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, card: str
) -> None:
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner only
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a class name that 4.57 does not know; this one both load.
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (folder / "README.md").write_text(card)


CARD = """\
# Sidestep's packaged model

A Qwen3 of {parameters:,} parameters with one token per byte. It adds two numbers of two digits:
`47+38=` is answered by `85`.

It was taught with {right:.0%} right labels, the others off by {wrong_by},
drawn anew each time. So it is unsure: its most likely answer is right for {greedy:.1%} of
{unseen:,} pairs it never saw, one sampled at temperature 1 for {sampled:.1%}. Reinforcement
learning only has to sharpen it, which takes a minute on a laptop. It is good for nothing else.

Made by `python -m sidestep.models.make_packaged --out DIR --seed {seed}`.
License: Apache-2.0, like the package.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the packaged model.")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write (files in it are replaced)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # sums, and so the weights, depend on the number of threads
    model = make_model(options.seed)
    teach(model, seed=options.seed, steps=options.steps, batch=256, peak_lr=3e-3)
    greedy, sampled = share_right(model, greedy=True), share_right(model, greedy=False, samples=4)
    card = CARD.format(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        right=RIGHT_SHARE,
        wrong_by=", ".join(f"{offset:+d}" for offset in WRONG_BY),
        greedy=greedy,
        sampled=sampled,
        unseen=NUM_UNSEEN_PAIRS,
        seed=options.seed,
    )
    save(model, make_tokenizer(), options.out, card)
    print(f"{options.out}: greedy {greedy:.3f} right, sampled {sampled:.3f} right")


if __name__ == "__main__":
    main()
