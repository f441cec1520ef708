"""Prompts become token ids: which special tokens, which limits."""

import time

import pytest
from tokenizers.processors import TemplateProcessing

from sidestep.errors import UsageError
from sidestep.models.loading import load_tokenizer
from sidestep.models.make_packaged import END, END_ID, PAD, PAD_ID, make_tokenizer
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.prompts import encode_examples
from sidestep.types import Example

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = Example([{"role": "user", "content": "hi"}], source="d.jsonl:7")


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def with_special_tokens(tokenizer, single: str):
    """A tokenizer that by itself adds special tokens, as those of Llama (BOS) or BERT (both) do."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[(PAD, PAD_ID), (END, END_ID)]
    )
    return tokenizer


def ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def test_text_is_encoded_in_order_with_its_position_as_index(tokenizer):
    examples = [Example("b="), Example("a=😀")]
    prompts = encode_examples(examples, tokenizer, 8, 512)
    assert [prompt.index for prompt in prompts] == [0, 1]
    assert [prompt.token_ids for prompt in prompts] == [ids("b="), ids("a=😀")]
    assert [prompt.example for prompt in prompts] == examples
    assert encode_examples([], tokenizer, 8, 512) == []


@pytest.mark.parametrize(
    ("single", "expected"),
    [
        ("$A", ids("aa")),
        (f"{PAD} $A", (PAD_ID, *ids("aa"))),
        (f"$A {END}", ids("aa")),
        (f"{PAD} $A {END}", (PAD_ID, *ids("aa"))),
    ],
)
def test_special_tokens_in_front_stay_and_none_is_put_behind(tokenizer, single, expected):
    """A model that reads EOS after the prompt starts a new document instead of an answer."""
    (prompt,) = encode_examples([Example("aa")], with_special_tokens(tokenizer, single), 8, 512)
    assert prompt.token_ids == expected


def test_chat_messages_end_where_the_assistant_begins(tokenizer):
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    mixed = [Example(messages), Example("text")]
    chat, text = encode_examples(mixed, tokenizer, 8, 512)
    assert chat.token_ids == ids("<system>s\n<user>u\n<assistant>")
    assert text.token_ids == ids("text")


def test_chat_templates_write_their_own_bos_and_get_no_second_one(tokenizer):
    with_special_tokens(tokenizer, f"{PAD} $A").chat_template = PAD + TEMPLATE
    (prompt,) = encode_examples([CHAT], tokenizer, 8, 512)
    assert prompt.token_ids == (PAD_ID, *ids("<user>hi\n<assistant>"))


def test_chat_messages_without_a_template_are_refused_by_name(tokenizer):
    with pytest.raises(UsageError, match=r"^d\.jsonl:7: chat messages, but .* no chat template"):
        encode_examples([CHAT], tokenizer, 8, 512)


def test_a_template_that_refuses_the_messages_is_named_with_the_row(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"^d\.jsonl:7: .*roles must alternate"):
        encode_examples([CHAT], tokenizer, 8, 512)


def test_an_empty_prompt_is_refused_by_name(tokenizer):
    examples = [Example("a"), Example("", source="d.jsonl:9")]
    for tok in (tokenizer, with_special_tokens(make_tokenizer(), f"{PAD} $A")):
        with pytest.raises(UsageError, match=r"^d\.jsonl:9: the prompt is empty"):
            encode_examples(examples, tok, 8, 512)


def test_prompt_and_answer_may_fill_the_context_but_not_exceed_it(tokenizer):
    encode_examples([Example("x" * 24)], tokenizer, 8, 32)
    with pytest.raises(UsageError) as caught:
        encode_examples([Example("x" * 25, source="d.jsonl:3")], tokenizer, 8, 32)
    assert str(caught.value) == (
        "d.jsonl:3: the prompt has 25 tokens, and with engine.max_new_tokens 8 that is more than "
        "the model's context of 32 tokens; shorten the prompt or lower engine.max_new_tokens"
    )
    encode_examples([Example("x" * 25)], tokenizer, 8, None)


def test_all_additions_are_encoded_within_a_second():
    examples = ArithmeticTask(0).train
    tokenizer = load_tokenizer("packaged")
    start = time.process_time()
    prompts = encode_examples(examples, tokenizer, 8, 512)
    assert time.process_time() - start < 1.0
    assert {len(prompt.token_ids) for prompt in prompts} == {6}, "left padding is never needed here"
