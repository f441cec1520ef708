"""Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted; the last line of stderr says why."""

from pathlib import Path

import pytest

from sidestep.errors import (
    CheckpointError,
    EngineError,
    Interrupted,
    LagError,
    RewardError,
    SidestepError,
    StalledError,
    UsageError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x: no such folder"), 2),
        (Interrupted("interrupted after step 3: resume with --resume"), 130),
        (EngineError("engine died"), 1),
        (RewardError("reward of prompt 4"), 1),
        (LagError("lag 9"), 1),
        (StalledError("train waited for rollout"), 1),
        (CheckpointError("half a checkpoint"), 1),
        (SidestepError("some failure"), 1),
    ],
)
def test_every_error_raised_on_purpose_is_its_code_and_one_line(sidestep, fake_run, error, code):
    fake_run.error = error
    assert sidestep("train") == (code, "", f"{error}\n")


def test_an_error_of_several_lines_is_still_told_on_the_last_line(sidestep, fake_run):
    fake_run.error = RewardError("reward of prompt 4: ValueError: first\nsecond")
    assert sidestep("train")[2] == "reward of prompt 4: ValueError: first second\n"


def test_ctrl_c_outside_the_run_is_130_without_a_traceback(sidestep, fake_run):
    fake_run.error = KeyboardInterrupt()
    assert sidestep("train") == (130, "", "interrupted\n")


def test_the_traceback_is_there_for_those_who_ask_and_the_reason_stays_last(
    sidestep, fake_run, monkeypatch
):
    monkeypatch.setenv("SIDESTEP_TRACEBACK", "1")
    fake_run.error = EngineError("engine died")
    code, _, err = sidestep("train")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")
    assert err.splitlines()[-1] == "engine died"


@pytest.mark.parametrize(
    ("arguments", "last_line"),
    [
        (["train", "--sett", "a=1"], "Error: No such option: --sett"),
        (["train", "a", "b"], "Error: Got unexpected extra argument"),
        (["report"], "Error: Missing argument 'RUN'."),
        (["trane"], "Error: No such command 'trane'."),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_2_and_ends_with_the_reason(
    sidestep, fake_run, arguments, last_line
):
    code, out, err = sidestep(*arguments)
    assert (code, out, fake_run.calls) == (2, "", [])
    assert err.splitlines()[-1].startswith(last_line)


def test_report_prints_where_it_is(sidestep, fake_run):
    fake_run.rows = [{"reward/mean": 0.5}]
    sidestep("train", "--run-dir", "runs/a")
    assert sidestep("report", "runs/a") == (0, "runs/a/report.html\n", "")
    assert Path("runs/a/report.html").is_file()
