"""Loads Hugging Face causal language models and tokenizers: safetensors only, no code from folders.

`check_model` is called once, before any work; the loaders then need no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from sidestep.errors import UsageError
from sidestep.models.folders import check_files, refusal, resolve_model_path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What transformers and tokenizers raise for files they cannot make sense of: any kind, Exception
# itself among them. Only around their reading of a folder.
LOAD_ERRORS = (Exception,)


def check_model(path: str) -> Path:
    """The local folder of `model.path`, with all a run needs. A hub name is fetched here, once.

    Raises UsageError for: a missing folder; one without configuration, tokenizer or safetensors
    weights, or with pickled ones; a model that is no causal language model; a tokenizer with more
    ids than the model has embeddings; no end-of-sequence token; a hub name that cannot be fetched.
    """
    folder = resolve_model_path(path)
    check_files(path, folder)
    config = load_config(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refusal(
            path,
            f"{config.model_type!r} is not a causal language model",
            "give one that AutoModelForCausalLM of transformers loads",
        )
    tokenizer = load_tokenizer(path)
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    num_embeddings = int(config.get_text_config().vocab_size)
    if num_ids > num_embeddings:
        raise refusal(
            path,
            f"the tokenizer has {num_ids} ids, the model only {num_embeddings} embeddings",
            "use the model's own tokenizer, or model.resize_token_embeddings and save it again",
        )
    if not stop_token_ids(tokenizer, _generation_config(folder, config)):
        raise refusal(
            path,
            "neither tokenizer nor generation_config has an end-of-sequence token",
            'set "eos_token" in tokenizer_config.json',
        )
    return folder


def load_config(path: str) -> PretrainedConfig:
    """The configuration of the model at `model.path`. Raises UsageError if transformers cannot."""
    folder = resolve_model_path(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except LOAD_ERRORS as error:
        problem = f"config.json cannot be used ({_first_line(error)})"
        raise refusal(path, problem, "give a model that transformers knows") from error
    return config


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `model.path`. Raises UsageError if there is none."""
    folder = resolve_model_path(path)
    fix = "save the tokenizer there with tokenizer.save_pretrained(folder)"
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except LOAD_ERRORS as error:
        problem = f"the folder has no tokenizer that loads ({_first_line(error)})"
        raise refusal(path, problem, fix) from error
    # Where its files are missing, transformers makes one up that turns every text into nothing.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        raise refusal(path, "the folder has no tokenizer with a vocabulary", fix)
    return tokenizer


def load_model(
    path: str, dtype: str, device: torch.device | str, attention: str = "sdpa"
) -> PreTrainedModel:
    """The model at `model.path`, in evaluation mode, all of its weights read from the folder.

    Evaluation mode also while training: with dropout on, the trainer's log-probabilities would not
    be those of the policy that sampled, and the importance ratio would not start at 1.

    Raises UsageError if the folder's weights do not fit its configuration: transformers itself
    would fill in random numbers.
    """
    folder = resolve_model_path(path)
    try:
        # With output_loading_info this is a pair, which the annotations of transformers do not say.
        with _no_progress_bar():
            pair: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype],
                attn_implementation=attention,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except LOAD_ERRORS as error:
        problem = f"the model does not load ({_first_line(error)})"
        raise refusal(path, problem, "give a folder written by save_pretrained") from error
    model: PreTrainedModel = pair[0]
    missing = sorted(pair[1]["missing_keys"])
    if missing:
        raise refusal(
            path,
            f"its weights lack {len(missing)} tensors of the model ({missing[0]})",
            "save model and configuration together with model.save_pretrained(folder)",
        )
    # Weights are views of the mapped file until here. A file rewritten under a running process
    # (somebody saves a new model to the same folder) would change them, or kill it by SIGBUS.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    # from_pretrained leaves it in evaluation mode. Called on the class: its own `to` has no types.
    return torch.nn.Module.to(model, torch.device(device))


def resolve_device(device: str, key: str = "model.device") -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises UsageError, naming the config key, for
    one that is not there.

    `mps` has to be asked for: it has no float64, in which the control's sums are taken.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    there = {
        "cpu": True,
        "cuda": torch.cuda.is_available() and int(number or 0) < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }
    if not there[kind]:
        raise UsageError(f"{key} {device!r}: torch finds no such device here; use 'auto'")
    return torch.device(device)


def context_length(config: PretrainedConfig) -> int | None:
    """Most tokens a sequence may have, prompt and answer; None if the model names no limit."""
    limit: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the tokenizer's and those of the generation configuration.

    Chat models have several: `<|im_end|>` ends a turn, `<|endoftext|>` a document.
    """
    named: Any = None if generation_config is None else generation_config.eos_token_id
    ids = set(named) if isinstance(named, list) else {named}
    return tuple(sorted((ids | {tokenizer.eos_token_id}) - {None}))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keeps the bar of transformers out of the live view; trainer and engine each draw one."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _generation_config(folder: Path, config: PretrainedConfig) -> GenerationConfig:
    if not (folder / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(config)
    fix = "copy the file again, or delete it"
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except LOAD_ERRORS as error:
        problem = f"generation_config.json cannot be used ({_first_line(error)})"
        raise refusal(str(folder), problem, fix) from error
    ids = found.eos_token_id
    for one in ids if isinstance(ids, list) else [ids]:
        if one is not None and type(one) is not int:
            problem = f"generation_config.json: eos_token_id {ids!r} is not a number of a token"
            raise refusal(str(folder), problem, fix)
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
