import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sidestep.diagnostics.jsonl import read_rows
from sidestep.diagnostics.recorder import Recorder
from sidestep.errors import UsageError


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scalars(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_rows_read_back_as_they_were_given(tmp_path):
    given_rows = [
        {
            "step": 0,
            "reward/mean": 0.1 + 0.2,
            "align/regime": "undefined",
            "align/cosine": None,
            "lag/histogram": {0: 12, 3: 4},
        },
        {"step": 1, "reward/mean": 1, "align/reason": 'a "quoted" — reason\nof two lines'},
    ]
    with Recorder(tmp_path) as recorder:
        for row in given_rows:
            recorder.step(row)
    expected = [{**given_rows[0], "lag/histogram": {"0": 12, "3": 4}}, given_rows[1]]
    assert lines(tmp_path / "metrics.jsonl") == expected


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.step({"step": np.int64(0), "loss": np.float32(0.5), "lag/max": np.int32(3)})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 0.5, "lag/max": 3}]


def test_a_step_is_on_disk_before_the_next_one(tmp_path, group_row):
    recorder = Recorder(tmp_path)
    recorder.step({"step": 0, "loss": 0.5})
    recorder.groups([group_row()])
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 0.5}]
    assert lines(tmp_path / "groups.jsonl") == [group_row()]
    assert scalars(tmp_path, "loss") == [(0, 0.5)]
    recorder.close()
    recorder.close()


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"rewrad/mean": 0.5}, "'rewrad/mean' is not one a run may record"),
        ({"not_finite": ["loss"]}, "'not_finite' is not one a run may record"),
        ({"loss": "0.5"}, "'loss' is '0.5': expected a number or None"),
        ({"loss": True}, "'loss' is True: expected a number"),
        ({"align/regime": 1}, "'align/regime' is 1: expected a text"),
        ({"lag/histogram": [1, 2]}, r"'lag/histogram' is \[1, 2\]: expected a mapping"),
        ({"lag/histogram": {0: math.nan}}, "'lag/histogram' is {0: nan}: expected a mapping"),
        ({"step": 2}, "'step' is 2, expected 0"),
        ({"step": None}, "'step' is None, expected 0"),
    ],
)
def test_a_wrong_metric_is_named_and_nothing_is_written(tmp_path, metrics, named):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match=named):
            recorder.step({"step": 0, "reward/mean": 1.0} | metrics)
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        recorder.step({"step": 0, "reward/mean": 1.0})  # and the recorder still works
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 1.0}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_null_and_named_and_tensorboard_keeps_it(tmp_path, value):
    with Recorder(tmp_path) as recorder:
        recorder.step({"step": 0, "loss": value, "reward/mean": 0.5})
    row = {"step": 0, "loss": None, "reward/mean": 0.5, "not_finite": ["loss"]}
    assert lines(tmp_path / "metrics.jsonl") == [row]
    [(_, seen)] = scalars(tmp_path, "loss")
    assert seen == value or (math.isnan(seen) and math.isnan(value))


def test_a_group_with_a_key_too_many_or_too_few_is_named(tmp_path, group_row):
    short = group_row(index=3)
    del short["lengths"]
    with Recorder(tmp_path) as recorder:
        with pytest.raises(ValueError, match="'lengths' is missing in the row of group 3"):
            recorder.groups([group_row(), short])
        with pytest.raises(ValueError, match="'colour' is unknown in the row of group 0"):
            recorder.groups([group_row(colour="red")])
    assert (tmp_path / "groups.jsonl").read_text() == ""


def test_a_fresh_recorder_does_not_touch_a_folder_that_holds_a_run(tmp_path):
    with Recorder(tmp_path) as recorder:
        recorder.step({"step": 0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="holds a run already: use --resume"):
        Recorder(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def record(folder, steps, resume_step=None):
    with Recorder(folder, resume_step) as recorder:
        for step in steps:
            recorder.step({"step": step, "loss": step / 3, "align/reason": "é\u2028" * step})


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_killed_and_resumed_run_leaves_the_file_of_an_undisturbed_one(data):
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name) / "whole", Path(name) / "broken"
        record(whole, range(6))
        record(broken, range(6))
        path = broken / "metrics.jsonl"
        content = path.read_bytes()
        cut = data.draw(st.integers(0, len(content)), label="bytes that reached the disk")
        path.write_bytes(content[:cut])
        resume_step = data.draw(st.integers(0, content[:cut].count(b"\n")), label="checkpoint")
        record(broken, range(resume_step, 6), resume_step)
        assert path.read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_resume_cuts_the_groups_that_will_be_written_again(tmp_path, group_row):
    kept = [
        group_row(step=0, index=0),
        group_row(step=None, index=1, dropped="all rewards equal"),
        group_row(step=1, index=2),
    ]
    redone = [
        group_row(step=None, index=3, dropped="all rewards equal"),
        group_row(step=2, index=4),
    ]
    with Recorder(tmp_path) as recorder:
        recorder.groups([kept[0], redone[0], *kept[1:], redone[1]])
    with (tmp_path / "groups.jsonl").open("a") as file:
        file.write('{"step": 2, "index": 5, "prom')
    with Recorder(tmp_path, resume_step=2) as recorder:
        recorder.groups([group_row(step=2, index=5)])
    # the dropped group 3 was recorded with step 1: it is never handed out again, so its row stays
    expected = [kept[0], redone[0], *kept[1:], group_row(step=2, index=5)]
    assert lines(tmp_path / "groups.jsonl") == expected


def test_resume_at_step_0_starts_over(tmp_path, group_row):
    with Recorder(tmp_path) as recorder:
        recorder.step({"step": 0})
        recorder.groups([group_row(), group_row(step=None, index=1, dropped="late")])
    Recorder(tmp_path, resume_step=0).close()
    assert read_rows(tmp_path / "metrics.jsonl") == read_rows(tmp_path / "groups.jsonl") == []


def test_tensorboard_shows_the_numbers_of_metrics_jsonl(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(4):
            cosine = None if step == 0 else step / 4
            recorder.step(
                {
                    "step": step,
                    "align/cosine": cosine,
                    "align/regime": "pass",
                    "lag/histogram": {0: 1},
                    "tokens/trained": 1000 + step,
                }
            )
    assert scalars(tmp_path, "align/cosine") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert scalars(tmp_path, "tokens/trained") == [(step, 1000.0 + step) for step in range(4)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"align/cosine", "tokens/trained"}


def test_tensorboard_forgets_the_steps_that_a_resume_redoes(tmp_path):
    with Recorder(tmp_path) as recorder:
        for step in range(5):
            recorder.step({"step": step, "loss": 1.0})
    with Recorder(tmp_path, resume_step=3) as recorder:
        recorder.step({"step": 3, "loss": 2.0})
    assert scalars(tmp_path, "loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_recording_loads_neither_torch_nor_tensorflow(tmp_path):
    program = (
        "import sys; from sidestep.diagnostics.recorder import Recorder\n"
        f"with Recorder({str(tmp_path)!r}) as recorder: recorder.step({{'step': 0, 'loss': 1.0}})\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules), 'a heavy import'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
