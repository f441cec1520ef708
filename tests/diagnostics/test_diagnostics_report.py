import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from sidestep.diagnostics import figures
from sidestep.diagnostics.charting import MAX_BARS, binned
from sidestep.diagnostics.report import write_report
from sidestep.diagnostics.runs import read_run
from sidestep.errors import UsageError

LOADING = {"src", "href", "srcset", "data", "poster", "action", "background"}


class Page(HTMLParser):
    """What a browser makes of the file: tags, what they load, visible text, scripts, styles."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.loads, self.words = [], [], []
        self.hidden = {"script": [], "style": []}
        self._inside = None
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in LOADING]
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        self.hidden.get(self._inside, self.words).append(data)


def rows(count):
    regimes = ("undefined", "pass", "project", "project", "damp", "skip")
    return [
        {
            "version": step,
            "reward/mean": 0.4 + 0.01 * step,
            "accuracy/eval": 0.5 if step % 5 == 4 else None,
            "align/cosine": None if step == 0 else 0.05 * step,
            "align/cosine_applied": None,
            "align/regime": regimes[step % 6],
            "grad/norm_raw": 0.5,
            "grad/norm_applied": 0.0,
            "lag/mean": 1.0,
            "lag/max": 2,
            "lag/bound": 4,
            "lag/histogram": {"0": 10, "2": 10},
            "ratio/ess": 0.9,
            "ratio/clip_fraction": 0.1,
            "ratio/kl_behaviour": 0.01,
            "tokens/s": 1500.0,
            "time/step_s": 1.0,
            "time/train_s": 0.5,
            "time/weight_sync_s": 0.1,
            "time/wait_for_groups_s": 0.3,
            "time/generate_s": 0.6,
            "time/wait_for_places_s": 0.2,
            "time/elapsed_s": 1.0 + step,
        }
        for step in range(count)
    ]


def test_the_page_tells_the_facts_of_the_run(make_run, group_row):
    groups = [group_row(step=step, index=step, prompt=f"p{step}=") for step in range(12)]
    groups.append(group_row(step=None, index=12, prompt="lost=", dropped="all rewards equal"))
    path = write_report(make_run(rows(12), groups, steps=12))
    page = Page(path)
    assert path.name == "report.html"
    assert (
        "12 of 12 steps, reward 0.40 → 0.51, held-out accuracy 0.50, mean lag 1.0 (max 2)"
        in page.text
    )
    assert "2 skipped" in page.text
    assert "complete" in page.text
    assert "Steps by regime: pass 2, project 4, damp 2, skip 2, undefined 2." in page.text
    assert (
        "Trainer side: training 50%, publishing weights 10%, waiting for groups 30%, other 10%."
        in page.text
    )
    assert "Rollout side: generating 75%, scoring 0%, waiting for places 25%." in page.text
    for stage, step in (("early", 0), ("middle", 6), ("late", 11)):
        assert f"{stage} {step} p{step}= 2 1.00 3 0.00 0.50" in page.text
    assert "p5=" not in page.text
    assert "1 dropped: all rewards equal (1)." in page.text
    assert "12 all rewards equal lost=" in page.text
    assert "max_lag = 4" in page.text
    assert "torch: 2" in page.text
    assert "trained tokens by lag: an object whose keys are lags" in page.text


def test_the_page_loads_nothing(make_run, group_row):
    page = Page(write_report(make_run(rows(3), [group_row()])))
    assert page.loads == []
    assert not {"link", "iframe", "img", "base", "object", "embed"} & set(page.tags)
    [style] = page.hidden["style"]
    assert "url(" not in style
    assert "@import" not in style
    assert any("plotly.js v" in script for script in page.hidden["script"])  # inside, not beside


def test_what_a_model_writes_cannot_become_markup(make_run, group_row):
    evil = "<script>alert('x')</script></div><img src=http://evil.example/a.png>&amp;"
    group = group_row(prompt=evil, completions=[evil, evil])
    dropped = group_row(step=None, index=1, prompt=evil, dropped=evil)
    row = rows(2)[1] | {"align/reason": evil, "align/regime": evil}
    config = f"note = {json.dumps(evil)}\n"
    folder = make_run([row], [group, dropped], config=config)
    (folder / "env.json").write_text(json.dumps({"command": [evil], evil: None}))
    page = Page(write_report(folder))
    assert page.loads == []
    assert "img" not in page.tags
    assert not any(script.startswith("alert(") for script in page.hidden["script"])
    assert page.text.count("alert('x')") >= 5  # it is there, as text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_very_short_run_is_still_going_and_has_a_report(make_run, group_row, count):
    groups = [group_row(step=step, index=step) for step in range(count)]
    page = Page(write_report(make_run(rows(count), groups, steps=100)))
    assert f"{count} of 100 steps" in page.text
    assert "still going, or stopped early" in page.text
    assert page.text.count("1+1=") == count


def test_a_run_that_recorded_only_nulls_has_a_report(make_run):
    page = Page(write_report(make_run([{"reward/mean": None, "align/regime": None}] * 3)))
    assert page.text.count("This run recorded no values for this chart.") == 7
    assert "No group was trained on." in page.text


def test_a_run_without_a_finished_step_is_refused(make_run):
    folder = make_run([])
    with pytest.raises(UsageError, match="has no finished step yet"):
        write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_metric_that_was_not_finite_is_told(make_run):
    page = Page(
        write_report(make_run([{"loss": 1.0}, {"loss": float("nan")}, {"loss": float("inf")}]))
    )
    assert "Not finite: loss in 2 steps, first in step 1." in page.text


def test_a_collapse_is_told_first(make_run):
    rewards = [0.8] * 15 + [0.1] * 5
    page = Page(write_report(make_run([{"reward/mean": value} for value in rewards], steps=20)))
    assert page.text.index("reward collapsed") < page.text.index("20 of 20 steps")


def test_cosine_chart_has_a_band_for_each_run_of_a_regime_and_both_thresholds(make_run):
    figure = figures.cosine(read_run(make_run(rows(12))))
    bands = {trace.name: trace for trace in figure.data if trace.type == "bar"}
    assert list(bands) == ["pass", "project", "damp", "skip", "undefined"]
    # Steps 2-3 and 8-9 project: two bands, two steps wide, around their middles.
    assert (bands["project"].x, bands["project"].width) == ((2.5, 8.5), (2, 2))
    [line] = [trace for trace in figure.data if trace.name == "cosine"]
    assert line.y[:3] == (None, 0.05, 0.1)
    assert sorted(shape.y0 for shape in figure.layout.shapes) == [0.1, 0.6]
    low, high = figure.layout.yaxis.range
    assert low < 0.0 < 0.6 < high


def test_a_threshold_that_is_calibrated_has_no_line(make_run):
    config = '[control]\nlow = "calibrate"\nhigh = "calibrate"\n'
    figure = figures.cosine(read_run(make_run(rows(3), config=config)))
    assert not figure.layout.shapes


def test_lag_histogram_counts_the_tokens_of_the_whole_run(make_run):
    figure = figures.lag(read_run(make_run(rows(4))))
    [bars] = [trace for trace in figure.data if trace.type == "bar"]
    assert (bars.x, bars.y, bars.customdata) == ((0, 2), (0.5, 0.5), (40.0, 40.0))


def test_a_gradient_of_zero_is_a_gap_on_the_logarithmic_axis(make_run):
    figure = figures.gradient(read_run(make_run(rows(2))))
    raw, applied = figure.data
    assert figure.layout.yaxis.type == "log"
    assert (raw.y, applied.y) == ((0.5, 0.5), (None, None))


def test_what_a_step_spent_elsewhere_is_other_and_never_negative(make_run):
    slow = rows(1)[0] | {"time/step_s": 0.2}
    sides = figures.time_by_side(read_run(make_run([rows(1)[0], slow, {"time/step_s": None}])))
    assert sides["trainer"]["other"] == [pytest.approx(0.1), 0.0, None]


def test_bars_of_a_long_run_are_few_and_keep_the_mean():
    steps, seconds = range(1000), [float(step % 7) for step in range(1000)]
    middles, heights, widths = binned(steps, seconds)
    assert len(middles) == len(heights) == len(widths) <= MAX_BARS
    assert sum(widths) == 1000
    total = sum(height * width for height, width in zip(heights, widths, strict=True))
    assert total == pytest.approx(sum(seconds))


def test_a_report_needs_no_torch(make_run, group_row):
    folder = make_run(rows(3), [group_row()])
    program = (
        "import sys, pkgutil, importlib, sidestep.diagnostics as package\n"
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "from sidestep.diagnostics.report import write_report\n"
        f"write_report({str(folder)!r})\n"
        "from sidestep.diagnostics.environment import environment_facts; environment_facts()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert re.search(r"3 of 100 steps", (folder / "report.html").read_text(encoding="utf-8"))
