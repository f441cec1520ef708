"""Fixtures for all tests: a random model that is real in every other way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported anywhere: spinning threads starve the other process (docs: threads).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Examples are timed by nobody: CI machines are slow and busy.
settings.register_profile("sidestep", deadline=None)
settings.load_profile("sidestep")

TINY_CHARACTERS = "0123456789+-*=()?!., abcdefghijklmnopqrstuvwxyz"
TINY_PAD, TINY_EOS, TINY_UNKNOWN = "<pad>", "<eos>", "<unk>"


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3 of 28k random weights, one token per character, safetensors.

    Always the same weights. Embeddings are tied and key heads shared, as in the real small Qwen3;
    weights are large enough that its next-token distributions are far from uniform.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokens = [TINY_PAD, TINY_EOS, TINY_UNKNOWN, *TINY_CHARACTERS]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=TINY_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=TINY_PAD,
        eos_token=TINY_EOS,
        unk_token=TINY_UNKNOWN,
    )
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=vocabulary[TINY_PAD],
        eos_token_id=vocabulary[TINY_EOS],
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
