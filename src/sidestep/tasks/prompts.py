"""Examples to token ids: one call of the tokenizer for a whole split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from sidestep.errors import UsageError
from sidestep.types import Example, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_examples(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    context_length: int | None,
) -> list[Prompt]:
    """Prompts in the order of `examples`, whose positions become their indices.

    Text gets the special tokens that the tokenizer puts in front (BOS) and none that it would put
    behind: after an EOS the model would start a new document instead of an answer. Chat messages go
    through the tokenizer's chat template, which ends where the assistant begins.

    Raises UsageError, naming the row, for chat messages without a chat template or that it refuses,
    for a prompt of no tokens, and for one that leaves less than `max_new_tokens` of
    `context_length` (None: no limit).
    """
    texts = [_text(example, tokenizer) for example in examples]
    if not texts:
        return []
    bare = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    leading: tuple[int, ...] | None = None
    prompts = []
    for index, (example, ids) in enumerate(zip(examples, bare, strict=True)):
        if not ids:
            raise UsageError(f"{example.source}: the prompt is empty; write one or remove the line")
        token_ids = tuple(ids)
        if isinstance(example.prompt, str):
            if leading is None:
                leading = _leading_ids(tokenizer, example.prompt)
            token_ids = leading + token_ids
        if context_length is not None and len(token_ids) + max_new_tokens > context_length:
            raise UsageError(
                f"{example.source}: the prompt has {len(token_ids)} tokens, and with "
                f"engine.max_new_tokens {max_new_tokens} that is more than the model's context of "
                f"{context_length} tokens; shorten the prompt or lower engine.max_new_tokens"
            )
        prompts.append(Prompt(index, example, token_ids))
    return prompts


def _text(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(example.prompt, str):
        return example.prompt
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{example.source}: chat messages, but the tokenizer of model.path has no chat "
            "template; give a model whose tokenizer has one, or `prompt` as text (without "
            "task.chat and task.system_prompt)"
        )
    messages = [dict(message) for message in example.prompt]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UsageError(
            f"{example.source}: the tokenizer's chat template refuses the messages ({error}); "
            "change their roles or their order"
        ) from error
    assert isinstance(text, str)  # one conversation, not tokenised
    return text


def _leading_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Ids that the tokenizer puts before any text, found by looking at what it does to one."""
    full = list(tokenizer(text, verbose=False)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    raise UsageError(
        f"model.path: the tokenizer encodes {text[:60]!r} differently beside its special tokens; "
        "use a fast tokenizer of transformers"
    )
