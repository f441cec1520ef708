"""JSONL files: what is read, what is held out, and every fault with its key and line."""

import json
from pathlib import Path

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.tasks.build import make_task
from sidestep.tasks.rows import load_rows, load_split, plain_fields

ANSWERED, FREE = plain_fields(needs_answer=True), plain_fields(needs_answer=False)

ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def write(tmp_path: Path):
    def write(*lines: str | bytes, name: str = "data.jsonl") -> str:
        file = tmp_path / name
        file.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
        return str(file)

    return write


def refused(path: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_rows("task.path", path, ANSWERED)
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
    rows = load_rows("task.path", path, ANSWERED)
    assert [row.prompt for row in rows] == ["café 😀", separator]
    assert [row.source for row in rows] == [f"{path}:1", f"{path}:4"]


def test_all_other_fields_become_columns(write):
    row = {"prompt": "p", "answer": 7, "level": [1, {"a": None}], "id": 3}
    (example,) = load_rows("task.path", write(json.dumps(row)), ANSWERED)
    assert example.columns == {"answer": "7", "level": [1, {"a": None}], "id": 3}
    (example,) = load_rows("task.path", write(json.dumps(row)), FREE)
    assert example.columns["answer"] == 7, "a reward function gets the column as it was written"


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_chat_messages_may_stand_under_either_name(write, name):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(json.dumps({name: messages, "answer": "x"}))
    (example,) = load_rows("task.path", path, ANSWERED)
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
    split = load_split(path, None, 10, ANSWERED)
    train, held_out = split.train, split.held_out
    assert split.notices == (), "a number that was asked for needs no notice"
    numbers = [int(row.prompt) for row in train], [int(row.prompt) for row in held_out]
    assert numbers[0] == sorted(numbers[0])
    assert numbers[1] == sorted(numbers[1])
    assert sorted(numbers[0] + numbers[1]) == list(range(50))
    pinned = [2, 16, 19, 24, 25, 26, 30, 31, 32, 48]
    assert numbers[1] == pinned, "a random choice: files are often sorted"
    assert load_split(path, None, 10, ANSWERED) == split


def test_eval_path_is_held_out_whole_and_errors_name_its_own_key(write):
    path = write(json.dumps(ROW))
    other = write(*[json.dumps(ROW)] * 3, name="eval.jsonl")
    split = load_split(path, other, 200, ANSWERED)
    assert (len(split.train), len(split.held_out)) == (1, 3)
    faulty = write("{", name="faulty.jsonl")
    with pytest.raises(UsageError, match=r"^task\.eval_path: .*faulty\.jsonl:1: not JSON"):
        load_split(path, faulty, 0, ANSWERED)
    with pytest.raises(UsageError, match=r"^task\.eval_path .*: the same file as task\.path"):
        load_split(path, path, 0, ANSWERED)


@pytest.mark.parametrize("eval_size", [2, 200])
def test_holding_out_every_row_is_refused_with_both_numbers(write, eval_size):
    path = write(json.dumps(ROW), json.dumps(ROW))
    with pytest.raises(UsageError) as caught:
        load_split(path, None, eval_size, ANSWERED)
    assert str(caught.value) == (
        f"task.eval_size {eval_size}: leaves nothing to train on, {path} has 2 rows; "
        "set it to 1 or less, or give rows for evaluation of their own (task.eval_path)"
    )


@pytest.mark.parametrize(
    ("rows", "held_out"), [(1, 0), (4, 0), (5, 1), (40, 8), (999, 199), (1000, 200), (1500, 200)]
)
def test_by_default_200_rows_or_a_fifth_of_a_small_file_are_held_out_and_that_is_said(
    write, rows, held_out
):
    path = write(*[json.dumps(ROW)] * rows)
    split = load_split(path, None, None, ANSWERED)
    assert (len(split.train), len(split.held_out)) == (rows - held_out, held_out)
    said = [f"{held_out} of the {rows} rows of {path} are held out" in x for x in split.notices]
    assert said == ([True] if held_out < 200 else [])


def test_half_a_character_is_refused_with_its_line(write):
    """A lone surrogate is valid JSON, but no tokenizer encodes it."""
    whole = '{"prompt": "\\ud83d\\ude00", "answer": "x"}'
    for half in (
        '{"prompt": "a\\ud83d", "answer": "x"}',
        '{"prompt": "a", "answer": "\\uDE00"}',
        '{"prompt": "a", "answer": "x", "more": [{"b\\ud800": 1}]}',
        '{"messages": [{"role": "user", "content": "\\ud83d"}], "answer": "x"}',
    ):
        path = write(whole, half)
        message = refused(path)
        assert message.startswith(f"task.path: {path}:2: has half a character (\\ud")
        message.encode()
    assert load_rows("task.path", write(whole), ANSWERED)[0].prompt == "😀"


def test_json_that_python_cannot_hold_is_refused_with_its_line(write):
    deep = write(json.dumps(ROW), "[" * 100_000 + "]" * 100_000)
    assert refused(deep).startswith(f"task.path: {deep}:2: nested too deeply; ")
    long = write(json.dumps(ROW), '{"prompt": "a", "answer": ' + "9" * 5000 + "}")
    assert refused(long).startswith(f"task.path: {long}:2: not readable (")


def test_a_file_that_may_not_be_read_is_refused_in_one_line(write, monkeypatch):
    """Faked: the tests run as root, who may read everything."""
    path = write(json.dumps(ROW))

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refused(path) == (
        f"task.path {path!r}: cannot be read (Permission denied); give a file that can"
    )


def test_the_path_must_be_given():
    with pytest.raises(UsageError, match=r'^task\.kind = "jsonl" needs task\.path'):
        make_task(TaskConfig(kind="jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"path": "my.jsonl"},
            'task.path = "my.jsonl" is not used with task.kind = "arithmetic": set task.kind to',
        ),
        (
            {"kind": "jsonl", "path": "a", "function": "a:b"},
            'task.function = "a:b" is not used with task.kind = "jsonl"',
        ),
        (
            {"kind": "function", "answer_regex": "x"},
            'task.answer_regex = "x" is not used with task.kind = "function": set task.kind to',
        ),
    ],
)
def test_a_key_that_the_kind_would_not_read_is_refused(settings, message):
    with pytest.raises(UsageError) as caught:
        make_task(TaskConfig(**settings))
    assert message in str(caught.value)
