"""The four recipes side by side: reward curves in one picture, with their numbers.

python benchmarks/recipe_curves.py   # writes docs/images/recipes.png and its numbers
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common import save_results, train

RECIPES = {
    "sync": ("#555555", "synchronous (lag 0)"),
    "quickstart": ("#0f766e", "bounded, lag up to 4, PPO clip, control"),
    "naive-async": ("#b91c1c", "naive asynchrony, exact lag 8"),
    "naive-async-controlled": ("#2563eb", "naive asynchrony, exact lag 8, control"),
}
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "recipes.png"


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Mean over the last `width` steps, so that the picture shows the run and not its noise."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


def eighths(values: list[float]) -> list[float]:
    size = len(values) // 8
    return [round(statistics.fmean(values[i * size : (i + 1) * size]), 3) for i in range(8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=150)
    results = {}
    for recipe, (colour, label) in RECIPES.items():
        rows = train(recipe, seed=arguments.seed).rows
        rewards = [row["reward/mean"] for row in rows]
        cosines = [row["align/cosine"] or 0.0 for row in rows]
        axes.plot(range(1, len(rows) + 1), smooth(rewards), color=colour, label=label)
        results[recipe] = {
            "seed": arguments.seed,
            "steps": len(rows),
            "seconds": round(rows[-1]["time/elapsed_s"], 1),
            "reward_by_eighths": eighths(rewards),
            "cosine_by_eighths": eighths(cosines),
            "skipped": sum(row["align/regime"] == "skip" for row in rows),
            "mean_lag": round(statistics.fmean(row["lag/mean"] for row in rows), 2),
            "accuracy_eval": rows[-1]["accuracy/eval"],
        }
        print(recipe, results[recipe], flush=True)
    axes.set(xlabel="step (64 prompts x 8 answers)", ylabel="mean reward", ylim=(0, 1))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right", fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    print(save_results("recipe_curves", results))
    print(PICTURE)


if __name__ == "__main__":
    main()
