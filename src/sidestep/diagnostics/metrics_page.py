"""docs/metrics.md, from the table of metrics.

.venv/bin/python -m sidestep.diagnostics.metrics_page > docs/metrics.md
"""

from __future__ import annotations

from sidestep.diagnostics.metrics import GROUP_KEYS, METRICS, REWARD_PART

_INTRODUCTION = """\
# Metrics

<!-- Generated: .venv/bin/python -m sidestep.diagnostics.metrics_page > docs/metrics.md -->

What each name in a run folder's `metrics.jsonl` means. The file has one JSON object a step, in
order, and every line is valid JSON. `null` means that the step has no value. The numbers are in the
TensorBoard files too, under the same names. *Lag* is counted in versions, that is in changes of the
weights, and over tokens.

| name | unit | meaning |
|---|---|---|
"""

_GROUPS = """
## groups.jsonl

One line for each group that was trained on or dropped.

| key | meaning |
|---|---|
"""


def metrics_page() -> str:
    """The Markdown text of docs/metrics.md."""
    lines = (
        f"| `{metric.name}` | {metric.unit} | {metric.meaning} |\n"
        for metric in (*METRICS, REWARD_PART)
    )
    keys = (f"| `{key}` | {meaning} |\n" for key, meaning in GROUP_KEYS.items())
    return _INTRODUCTION + "".join(lines) + _GROUPS + "".join(keys)


if __name__ == "__main__":
    print(metrics_page(), end="")
