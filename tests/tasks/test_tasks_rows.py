"""JSONL files: what is read, what is held out, and every fault with its key and line."""

import json
from pathlib import Path

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.tasks.build import make_task
from sidestep.tasks.rows import load_rows, load_split

ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def write(tmp_path: Path):
    def write(*lines: str | bytes, name: str = "data.jsonl") -> str:
        file = tmp_path / name
        file.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
        return str(file)

    return write


def refused(path: str, *, needs_answer: bool = True, key: str = "task.path") -> str:
    with pytest.raises(UsageError) as caught:
        load_rows(key, path, needs_answer=needs_answer)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bom_crlf_blank_lines_and_unicode_are_read_as_they_are(write):
    separator = "a\u2028b"  # a line break for str.splitlines, an ordinary character for JSON
    path = write(
        b'\xef\xbb\xbf{"prompt": "caf\xc3\xa9 \xf0\x9f\x98\x80", "answer": "x"}\r',
        "",
        "   \r",
        json.dumps({"prompt": separator, "answer": "y"}, ensure_ascii=False) + "\r",
    )
    rows = load_rows("task.path", path, needs_answer=True)
    assert [row.prompt for row in rows] == ["café 😀", separator]
    assert [row.source for row in rows] == [f"{path}:1", f"{path}:4"]


def test_all_other_fields_become_columns(write):
    row = {"prompt": "p", "answer": 7, "level": [1, {"a": None}], "id": 3}
    (example,) = load_rows("task.path", write(json.dumps(row)), needs_answer=True)
    assert example.columns == {"answer": "7", "level": [1, {"a": None}], "id": 3}
    (example,) = load_rows("task.path", write(json.dumps(row)), needs_answer=False)
    assert example.columns["answer"] == 7, "a reward function gets the column as it was written"


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_chat_messages_may_stand_under_either_name(write, name):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(json.dumps({name: messages, "answer": "x"}))
    (example,) = load_rows("task.path", path, needs_answer=True)
    assert example.prompt == messages
    assert dict(example.columns) == {"answer": "x"}


USER = '[{"role": "user", "content": "u"}]'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "answer": }', "not JSON (Expecting value, column 27)"),
        ("prompt,answer", "not JSON (Expecting value, column 1): 'prompt,answer'"),
        ("[1, 2]", "a list, not an object"),
        ('{"answer": "2"}', "lacks `prompt` or `messages` (it has `answer`)"),
        ('{"promt": "a", "answer": "2"}', "rename `promt`?"),
        ('{"prompt": "a"}', "lacks `answer` (it has `prompt`)"),
        ('{"prompt": "a", "anser": "2"}', "rename `anser`?"),
        ('{"prompt": 12, "answer": "2"}', "`prompt` is the number 12"),
        ('{"prompt": null, "answer": "2"}', "`prompt` is missing or null"),
        ('{"prompt": "a", "answer": 1.5}', "`answer` is the number 1.5; write text"),
        ('{"prompt": "a", "answer": true}', "`answer` is true; write text"),
        ('{"prompt": "a", "answer": null}', "`answer` is missing or null"),
        ('{"prompt": "a", "answer": " "}', "`answer` is empty"),
        (f'{{"prompt": "a", "messages": {USER}}}', "has both `prompt` and `messages`; keep one"),
        ('{"messages": "hi", "answer": "2"}', "`messages` is the text 'hi', not a list"),
        ('{"messages": [], "answer": "2"}', "`messages` is empty; write"),
        ('{"messages": ["hi"], "answer": "2"}', "`messages[0]` is the text 'hi'"),
        ('{"messages": [{"role": "user"}]}', "`messages[0].content` is missing or null"),
        ('{"messages": [{"content": "a", "role": 1}]}', "`messages[0].role` is the number 1"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}]}',
            "the last message of `messages` is the assistant's",
        ),
    ],
)
def test_a_faulty_line_is_named_with_key_file_and_number(write, line, said):
    path = write(json.dumps(ROW), "", line, json.dumps(ROW))
    message = refused(path)
    assert message.startswith(f"task.path: {path}:3: ")
    assert said in message


def test_a_line_that_is_not_utf8_is_named(write):
    path = write(json.dumps(ROW), b'{"prompt": "caf\xe9", "answer": "1"}')
    assert refused(path).startswith(f"task.path: {path}:2: not UTF-8")


def test_missing_files_folders_and_empty_files_are_refused_with_the_fix(write, tmp_path):
    path = write(json.dumps(ROW), name="train.jsonl")
    assert f"did you mean '{path}'?" in refused(str(tmp_path / "trian.jsonl"))
    assert "no such file; give a JSONL file" in refused(str(tmp_path / "no" / "x.jsonl"))
    assert "is a folder; give a JSONL file in it" in refused(str(tmp_path))
    empty = write("", " \r", name="empty.jsonl")
    assert refused(empty) == f"task.path '{empty}': has no rows; write one JSON object a line"


def test_the_held_out_rows_are_fixed_disjoint_and_in_file_order(write):
    path = write(*(json.dumps({"prompt": f"{i}", "answer": "x"}) for i in range(50)))
    train, held_out = load_split(path, None, 10, needs_answer=True)
    numbers = [int(row.prompt) for row in train], [int(row.prompt) for row in held_out]
    assert numbers[0] == sorted(numbers[0])
    assert numbers[1] == sorted(numbers[1])
    assert sorted(numbers[0] + numbers[1]) == list(range(50))
    pinned = [2, 16, 19, 24, 25, 26, 30, 31, 32, 48]
    assert numbers[1] == pinned, "a random choice: files are often sorted"
    assert load_split(path, None, 10, needs_answer=True) == (train, held_out)


def test_eval_path_is_held_out_whole_and_errors_name_its_own_key(write):
    path = write(json.dumps(ROW))
    other = write(*[json.dumps(ROW)] * 3, name="eval.jsonl")
    train, held_out = load_split(path, other, 200, needs_answer=True)
    assert (len(train), len(held_out)) == (1, 3)
    faulty = write("{", name="faulty.jsonl")
    with pytest.raises(UsageError, match=r"^task\.eval_path: .*faulty\.jsonl:1: not JSON"):
        load_split(path, faulty, 0, needs_answer=True)
    with pytest.raises(UsageError, match=r"^task\.eval_path .*: the same file as task\.path"):
        load_split(path, path, 0, needs_answer=True)


@pytest.mark.parametrize("eval_size", [2, 200])
def test_holding_out_every_row_is_refused_with_both_numbers(write, eval_size):
    path = write(json.dumps(ROW), json.dumps(ROW))
    with pytest.raises(UsageError) as caught:
        load_split(path, None, eval_size, needs_answer=True)
    assert str(caught.value) == (
        f"task.eval_size {eval_size}: leaves nothing to train on, {path} has 2 rows; "
        "set it to 1 or less, or give task.eval_path"
    )


def test_the_path_must_be_given():
    with pytest.raises(UsageError, match=r"^task\.path is not set: give the JSONL file"):
        make_task(TaskConfig(kind="jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "my.jsonl"}, "task.path 'my.jsonl': not used by task.kind 'arithmetic'"),
        (
            {"kind": "jsonl", "function": "a:b"},
            "task.function 'a:b': not used by task.kind 'jsonl'",
        ),
        (
            {"kind": "function", "answer_regex": "x"},
            "task.answer_regex 'x': not used by task.kind 'function'; set task.kind to 'jsonl'",
        ),
    ],
)
def test_a_key_that_the_kind_would_not_read_is_refused(settings, message):
    with pytest.raises(UsageError) as caught:
        make_task(TaskConfig(**settings))
    assert message in str(caught.value)
