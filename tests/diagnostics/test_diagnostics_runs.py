import re

import pytest

from sidestep.diagnostics.runs import read_run
from sidestep.errors import UsageError


def test_a_run_reads_back_by_column_and_setting(make_run, group_row):
    groups = [group_row(), group_row(index=1, step=None, dropped="late")]
    run = read_run(make_run([{"loss": 0.5}, {"loss": None, "version": 2}, {"loss": 0.25}], groups))
    assert run.column("step") == [0, 1, 2]
    assert run.column("loss") == [0.5, None, 0.25]
    assert run.column("version") == [None, 2, None]
    assert run.values("loss") == [0.5, 0.25]
    assert list(run.groups) == groups
    assert run.environment["python"] == "3.11.7"
    assert (run.setting("train.steps"), run.setting("seed")) == (100, 7)
    assert run.setting("train.speed") is None
    assert run.setting("seed.more") is None
    assert "max_lag = 4" in run.config_text


def test_a_half_written_last_line_is_left_out(make_run):
    folder = make_run([{"loss": 0.5}, {"align/reason": "é"}])
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    first_line = content.index(b"\n") + 1
    for end in range(first_line + 1, len(content) - 2):  # inside the character of two bytes too
        path.write_bytes(content[:end])
        assert read_run(folder).column("loss") == [0.5]


def test_a_last_line_that_lacks_only_its_newline_counts(make_run):
    folder = make_run([{"loss": 0.5}, {"loss": 0.25}])
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_run(folder).column("loss") == [0.5, 0.25]


@pytest.mark.parametrize(("line", "what"), [("{oops}", "not JSON"), ("[1]", "not a JSON object")])
def test_a_broken_line_inside_is_named_by_file_and_line(make_run, line, what):
    folder = make_run([{}, {}])
    path = folder / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], line, rows[1], ""]))
    with pytest.raises(UsageError, match=re.escape(f"{path}:2 is {what}")):
        read_run(folder)


def test_a_folder_that_is_not_a_run_is_refused_with_what_is_missing(tmp_path, make_run):
    with pytest.raises(UsageError, match=f"no run folder at {tmp_path / 'none'}"):
        read_run(tmp_path / "none")
    with pytest.raises(
        UsageError, match=r"no config\.toml, no env\.json, no metrics\.jsonl, no groups"
    ):
        read_run(tmp_path)
    folder = make_run([{}])
    (folder / "env.json").unlink()
    with pytest.raises(UsageError, match=r"is not a run folder: it has no env\.json$"):
        read_run(folder)


@pytest.mark.parametrize(("name", "kind"), [("config.toml", "TOML"), ("env.json", "JSON")])
def test_a_file_that_cannot_be_read_is_named(make_run, name, kind):
    folder = make_run([{}])
    (folder / name).write_text("{ no")
    with pytest.raises(UsageError, match=f"{re.escape(name)} is not {kind}: .*line 1"):
        read_run(folder)


def test_what_is_no_number_is_named_and_what_is_not_finite_is_missing(make_run):
    folder = make_run([{"loss": 0.5}, {"loss": 0.25}])
    path = folder / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text.replace("0.25", "NaN"))
    assert read_run(folder).column("loss") == [0.5, None]
    path.write_text(text.replace("0.25", '"abc"'))
    with pytest.raises(UsageError, match=re.escape(f"{path}: loss = 'abc' in step 1 is no number")):
        read_run(folder)
