"""The live view of a run: Rich on a terminal, plain lines elsewhere, the same facts in both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

Loop = Literal["rollout", "train"]

REGIME_STYLES = {
    "pass": "green",
    "project": "blue",
    "damp": "yellow",
    "skip": "red",
    "undefined": "dim",
}
SPARK_STEPS = 40  # steps in the reward's sparkline
SPARKS, ASCII_SPARKS = "▁▂▃▄▅▆▇█", "_.-=+*#@"
PLAIN_LINES = 200  # about as many plain lines a run prints at most, and never two within a second


class Progress:
    """Shows where a run is. A context manager: on leaving, for whatever reason, the terminal is as
    it was before.

    total_steps: steps of the whole run, those before a resume included.
    console: where to show it; the default is standard output.
    target: what is trained and where it goes, for the title ("runs/quickstart").
    finished_steps: steps of earlier sessions, for a run that is resumed.
    clock: seconds; for tests.

    All methods are called from one thread, the event loop's.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        target: str = "",
        *,
        finished_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._target = target
        self._clock = clock
        self._total, self._finished = total_steps, finished_steps
        self._metrics: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._evaluation: tuple[int, float] | None = None  # finished steps, accuracy
        self._num_skips = 0
        self._waits: dict[Loop, str | None] = {"rollout": None, "train": None}
        # No step is too long for the estimate of time left: it is over the last steps, whenever
        # these were.
        self._bar = RichProgress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left"),
            console=self._console,
            get_time=clock,
            speed_estimate_period=float("inf"),
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=total_steps, completed=finished_steps, left=_duration(None)
        )
        is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(get_renderable=self._view, console=self._console) if is_live else None
        self._printed_step, self._printed_at = finished_steps, -float("inf")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._finished > self._printed_step:
            self._print_line()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Show a step that has finished; `metrics` as `Recorder.step` takes them."""
        self._metrics = metrics
        self._finished = int(metrics["step"]) + 1  # metrics count steps from 0, people from 1
        if metrics.get("reward/mean") is not None:
            self._rewards.append(metrics["reward/mean"])
        if metrics.get("accuracy/eval") is not None:
            self.evaluated(metrics["step"], metrics["accuracy/eval"])
        self._num_skips += metrics.get("align/regime") == "skip"
        self._bar.update(self._task, completed=self._finished)
        self._bar.update(self._task, left=_duration(self._bar.tasks[0].time_remaining))
        if self._live is None and self._is_due():
            self._print_line()

    def evaluated(self, step: int, accuracy: float) -> None:
        """Show an evaluation of the weights after `step`, which may be known long after it."""
        self._evaluation = (step + 1, accuracy)

    def waiting(self, loop: Loop, what: str | None) -> None:
        """A loop now waits for `what` ("groups", "a free place"); None: it is busy."""
        self._waits[loop] = what

    def message(self, text: str) -> None:
        """Print a line that stays, above the live view."""
        self._console.print(Text(text), soft_wrap=True)

    def _is_due(self) -> bool:
        if self._printed_at == -float("inf") or self._finished >= self._total:
            return True
        enough_steps = self._finished - self._printed_step >= self._total / PLAIN_LINES
        return enough_steps and self._clock() - self._printed_at >= 1.0

    def _print_line(self) -> None:
        self._printed_step, self._printed_at = self._finished, self._clock()
        self.message(self._line())

    def _line(self) -> str:
        """All facts in one line of plain ASCII."""
        metrics = self._metrics
        parts = [
            f"step {self._finished}/{self._total}",
            f"reward {_number(metrics.get('reward/mean'), '.2f')}",
            self._lag(),
            self._cosine(),
            f"{_compact(metrics.get('tokens/s'))} tok/s",
            f"{self._bar.tasks[0].fields['left']} left",
        ]
        if self._evaluation is not None:
            parts.append(f"eval {self._evaluation[1]:.2f}")
        parts += [
            f"{loop} waits for {what}" for loop, what in self._waits.items() if what is not None
        ]
        return " ".join(parts)

    def _lag(self) -> str:
        mean, largest = self._metrics.get("lag/mean"), self._metrics.get("lag/max")
        return f"lag {_number(mean, '.1f')} (max {_number(largest, 'g')})"

    def _cosine(self) -> str:
        regime = self._metrics.get("align/regime") or "-"
        return f"cosine {_number(self._metrics.get('align/cosine'), '+.2f')} {regime}"

    def _view(self) -> RenderableType:
        """What the live display draws, a few times a second, in its own thread: it reads and
        changes nothing.
        """
        facts = Table.grid(padding=(0, 2))
        for name, value in self._facts().items():
            facts.add_row(Text(name, style="dim"), value)
        title = Text(f"sidestep {self._target}".strip(), style="bold")
        return Panel(Group(self._bar.get_renderable(), facts), title=title, title_align="left")

    def _facts(self) -> dict[str, Text]:
        metrics = self._metrics
        reward = Text.assemble(
            (_number(metrics.get("reward/mean"), ".2f"), "bold"), "  ", (self._sparkline(), "cyan")
        )
        if self._evaluation is not None:
            reward.append(f"  eval {self._evaluation[1]:.2f} at step {self._evaluation[0]}")
        regime = metrics.get("align/regime") or "-"
        cosine = Text.assemble(
            (_number(metrics.get("align/cosine"), "+.2f"), "bold"),
            " ",
            (regime, REGIME_STYLES.get(regime, "dim")),
            f"  {self._num_skips} skipped",
        )
        lag = Text(_number(metrics.get("lag/mean"), ".1f"), style="bold")
        lag.append(f" mean  {_number(metrics.get('lag/max'), 'g')} max", style="default not bold")
        if metrics.get("lag/bound") is not None:
            lag.append(f"  bound {metrics['lag/bound']:g}", style="dim not bold")
        speed = Text.assemble((_compact(metrics.get("tokens/s")), "bold"), " tok/s")
        return {
            "reward": reward,
            "lag": lag,
            "cosine": cosine,
            "speed": speed,
            **{loop: _state(what) for loop, what in self._waits.items()},
        }

    def _sparkline(self) -> str:
        rewards = tuple(self._rewards)
        if len(rewards) < 2:
            return ""
        marks = ASCII_SPARKS if self._console.options.ascii_only else SPARKS
        low, high = min(rewards), max(rewards)
        scale = (len(marks) - 1) / (high - low) if high > low else 0.0
        return "".join(marks[round((reward - low) * scale)] for reward in rewards)


def _state(what: str | None) -> Text:
    return (
        Text("busy", style="green") if what is None else Text(f"waits for {what}", style="yellow")
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _compact(value: float | None) -> str:
    """14234 as 14.2k: three figures are enough to read a speed."""
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _duration(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=round(seconds)))
