"""The picture of a study's table: reward at the end against the learning rate, a line a method.

    sidestep study studies/small.toml --out runs/study-small
    python benchmarks/study_picture.py runs/study-small/table.csv docs/images/study-small.png

One panel a lag; the synchronous run (method "none" at lag 0) is drawn in each. Lines are means over
the reported seeds, dots the seeds; pilot seeds are left out. Prints the same numbers as a table.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rewards = dict[float, list[float]]  # by learning rate, one a seed


def read(table: Path, pilot_seeds: set[int]) -> dict[tuple[str, int], Rewards]:
    found: dict[tuple[str, int], Rewards] = defaultdict(lambda: defaultdict(list))
    with table.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["seed"]) not in pilot_seeds:
                reward = float(row["reward_last"] or 0.0)  # a run that failed counts 0
                place = row["method"], int(row["lag"])
                found[place][float(row["learning_rate"])].append(reward)
    return found


def draw(axes, rewards: Rewards, label: str, **style) -> None:
    rates = sorted(rewards)
    means = [statistics.fmean(rewards[rate]) for rate in rates]
    (line,) = axes.plot(rates, means, label=label, **style)
    for rate in rates:
        values = rewards[rate]
        axes.plot([rate] * len(values), values, "o", ms=3, color=line.get_color())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--pilot-seeds", type=int, nargs="*", default=[0])
    arguments = parser.parse_args()
    found = read(arguments.table, set(arguments.pilot_seeds))
    lags = sorted({lag for _, lag in found if lag > 0})
    figure, panels = plt.subplots(1, len(lags), figsize=(5.2 * len(lags), 3.6), squeeze=False)
    for lag, axes in zip(lags, panels[0], strict=True):
        draw(axes, found["none", 0], "synchronous", color="black", ls="--")
        for method, at in found:
            if at == lag:
                draw(axes, found[method, lag], method)
        axes.set(xscale="log", xlabel="learning rate", ylabel="reward, last tenth", ylim=(0, 1))
        axes.set_title(f"lag {lag}")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(arguments.picture, dpi=130)
    for (method, lag), rewards in found.items():
        told = "  ".join(
            f"{rate:g}: {statistics.fmean(rewards[rate]):.2f} (worst {min(rewards[rate]):.2f})"
            for rate in sorted(rewards)
        )
        print(f"{method:14} lag {lag:2}  {told}")


if __name__ == "__main__":
    main()
