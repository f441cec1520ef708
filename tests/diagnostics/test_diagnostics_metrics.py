import subprocess
import sys
from pathlib import Path

from sidestep.diagnostics.metrics import BY_NAME, METRICS
from sidestep.diagnostics.metrics_page import metrics_page

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"

PUBLIC_KEYS = [
    "step",
    "version",
    "reward/mean",
    "accuracy/eval",
    "align/cosine",
    "align/cosine_applied",
    "align/regime",
    "align/reason",
    "grad/norm_raw",
    "grad/norm_applied",
    "lag/mean",
    "lag/max",
    "lag/histogram",
    "ratio/ess",
    "ratio/clip_fraction",
    "ratio/kl_behaviour",
    "groups/trained",
    "groups/dropped",
    "time/step_s",
    "time/generate_s",
    "time/train_s",
    "time/wait_for_groups_s",
    "time/weight_sync_s",
    "tokens/generated",
    "tokens/trained",
    "loss",
    "learning_rate",
    "samples/s",
    "tokens/s",
    "lag/bound",
    "time/reward_s",
    "time/wait_for_places_s",
    "time/eval_s",
    "time/elapsed_s",
    "completion/length_mean",
    "completion/truncated_fraction",
    "reward/std",
    "groups/equal_reward_fraction",
    "align/cosine_within_batch",
    "grad/clip_factor",
    "align/skips_in_a_row",
]


def test_every_public_key_is_in_the_table_with_unit_and_meaning():
    missing = [name for name in PUBLIC_KEYS if name not in BY_NAME]
    assert missing == []
    assert all(metric.unit and metric.meaning for metric in METRICS)


def test_no_name_has_two_meanings():
    assert len(BY_NAME) == len(METRICS)


def test_names_with_a_unit_in_them_have_that_unit():
    assert {metric.unit for metric in METRICS if metric.name.endswith("_s")} == {"s"}
    assert {metric.unit for metric in METRICS if metric.name.endswith("_fraction")} == {"fraction"}


def test_docs_page_is_what_the_table_says():
    assert DOCS.read_text(encoding="utf-8") == metrics_page(), (
        "regenerate: .venv/bin/python -m sidestep.diagnostics.metrics_page > docs/metrics.md"
    )


def test_module_prints_the_page():
    command = [sys.executable, "-W", "error", "-m", "sidestep.diagnostics.metrics_page"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == metrics_page()


def test_a_bar_in_a_meaning_would_break_the_page_and_there_is_none():
    assert all("|" not in metric.meaning and "\n" not in metric.meaning for metric in METRICS)
