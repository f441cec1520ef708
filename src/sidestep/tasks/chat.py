"""Questions that are text, put as chat messages; and the system message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sidestep.types import Example


def as_chat(
    examples: Sequence[Example], *, chat: bool, system_prompt: str | None
) -> tuple[Example, ...]:
    """`examples`, text as one message of the user if `chat` or with a `system_prompt`.

    The system prompt goes before it, and before the messages of rows that have no system message
    of their own.
    """
    if not chat and system_prompt is None:
        return tuple(examples)
    return tuple(_with_system(example, system_prompt) for example in examples)


def _with_system(example: Example, system_prompt: str | None) -> Example:
    prompt = example.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return replace(example, prompt=messages)
