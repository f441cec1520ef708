import io

import pytest
from rich.console import Console

from sidestep.diagnostics.progress import Progress

METRICS = {
    "reward/mean": 0.534,
    "lag/mean": 2.12,
    "lag/max": 4,
    "lag/bound": 4,
    "align/cosine": 0.312,
    "align/regime": "project",
    "tokens/s": 14234.0,
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Plain:
    """A progress on something that is not a terminal, 80 columns wide, and what it printed."""

    def __init__(self, total_steps, **keywords):
        self.clock, self.file = Clock(), io.StringIO()
        console = Console(file=self.file, force_terminal=False, width=80)
        self.progress = Progress(total_steps, console, clock=self.clock, **keywords)

    def step(self, step, after_s=1.0, **changes):
        self.clock.now += after_s
        self.progress.step({"step": step} | METRICS | changes)

    @property
    def lines(self):
        return self.file.getvalue().splitlines()

    @property
    def steps(self):
        return [int(line.split("/")[0].removeprefix("step ")) for line in self.lines]


def test_a_plain_line_tells_all_facts():
    plain = Plain(120)
    with plain.progress:
        for step in range(12):
            plain.step(step, after_s=0.75)
    line = "step 12/120 reward 0.53 lag 2.1 (max 4) cosine +0.31 project 14.2k tok/s 0:01:21 left"
    assert plain.lines[-1] == line
    assert plain.lines[-1].isascii()


def test_a_plain_line_has_the_last_evaluation_and_who_waits_for_what():
    plain = Plain(2)
    with plain.progress as progress:
        plain.step(0, **{"accuracy/eval": 0.25})
        progress.evaluated(0, 0.875)
        progress.waiting("train", "groups")
        progress.waiting("rollout", "a free place")
        progress.waiting("train", None)
        plain.step(1)
    facts = "reward 0.53 lag 2.1 (max 4) cosine +0.31 project 14.2k tok/s"
    assert plain.lines == [
        f"step 1/2 {facts} -:--:-- left eval 0.25",
        f"step 2/2 {facts} 0:00:00 left eval 0.88 rollout waits for a free place",
    ]


def test_a_plain_line_of_nulls_says_so():
    plain = Plain(1)
    with plain.progress:
        plain.progress.step({"step": 0, "reward/mean": None, "align/regime": "undefined"})
    expected = "step 1/1 reward - lag - (max -) cosine - undefined - tok/s 0:00:00 left"
    assert plain.lines == [expected]


def test_plain_lines_are_a_second_apart_with_the_first_and_the_last():
    plain = Plain(100)
    with plain.progress:
        for step in range(100):
            plain.step(step, after_s=0.3)
    assert plain.steps == [1, *range(5, 98, 4), 100]


def test_a_long_run_prints_about_two_hundred_plain_lines():
    plain = Plain(10_000)
    with plain.progress:
        for step in range(10_000):
            plain.step(step, after_s=5.0)
    assert plain.steps[:3] == [1, 51, 101]
    assert len(plain.lines) <= 202


def test_an_interrupted_run_prints_the_step_it_came_to():
    plain = Plain(100)
    with pytest.raises(KeyboardInterrupt), plain.progress:
        for step in range(3):
            plain.step(step, after_s=0.1)
        raise KeyboardInterrupt
    assert plain.steps == [1, 3]


def test_nothing_is_printed_of_a_run_that_made_no_step():
    plain = Plain(100)
    with plain.progress as progress:
        progress.waiting("train", "groups")
    assert plain.lines == []


def test_time_left_of_a_resumed_run_counts_its_own_steps_only():
    plain = Plain(60, finished_steps=50)
    with plain.progress:
        for step in (50, 51, 52):
            plain.step(step, after_s=40.0)
    assert plain.steps == [51, 52, 53]
    assert "0:04:40 left" in plain.lines[-1]  # 7 steps of 40 s, longer than Rich's own window


def test_a_message_is_printed_as_it_is():
    plain = Plain(10)
    text = "resume with: sidestep train --resume [bold]runs/a[/bold] " + "long " * 20
    plain.progress.message(text)
    assert plain.lines == [text]


def live(steps, **keywords):
    """The screen's text after `steps` steps on a terminal."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=30, color_system=None)
    with Progress(120, console, "runs/quickstart", **keywords) as progress:
        progress.message("a line above")
        for step in range(steps):
            skip = {"align/regime": "skip"} if step == 1 else {}
            progress.step({"step": step} | METRICS | {"reward/mean": 0.1 * step} | skip)
        progress.evaluated(19, 0.87)
        progress.waiting("rollout", "a free place")
    return file.getvalue()


def test_the_live_view_shows_the_same_facts(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    output = live(8)
    screen = output[output.rindex("╭") :]
    for fact in (
        "sidestep runs/quickstart",
        "8/120",
        "reward   0.70  ▁▂▃▄▅▆▇█  eval 0.87 at step 20",
        "lag      2.1 mean  4 max  bound 4",
        "cosine   +0.31 project  1 skipped",
        "speed    14.2k tok/s",
        "rollout  waits for a free place",
        "train    busy",
    ):
        assert fact in screen
    assert output.count("a line above") == 1


def test_the_live_view_gives_the_cursor_back_when_a_run_fails(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with pytest.raises(RuntimeError, match="boom"), Progress(10, console) as progress:
        progress.step({"step": 0} | METRICS)
        raise RuntimeError("boom")
    output = file.getvalue()
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert live(1).splitlines()[1].startswith("step 1/120 reward 0.00")
