"""How much faster is bounded asynchrony than the synchronous run, and how near to what overlap can
give at most?

    python benchmarks/async_throughput.py            # about 6 minutes on two cores

The synchronous run (max_lag 0) is taken at its best of one and two threads. Generation and training
overlap at best so that a step takes as long as the slower of the two: the bound is (Tgen + Ttrain)
/ max(Tgen, Ttrain), from the times of the best synchronous run. All runs in turns, several repeats,
medians. Goal: at least 0.85 of the bound.
"""

from __future__ import annotations

import argparse
import statistics

from common import save_results, train

WARM_UP = 5  # steps left out: imports, first allocations


def steady(run) -> dict[str, float]:
    """Samples/s after the warm-up from wall-clock time, and medians of the parts of a step."""
    rows = run.rows[WARM_UP:]
    seconds = sum(row["time/step_s"] for row in rows)
    samples = sum(row["samples/s"] * row["time/step_s"] for row in rows)
    parts = {
        name: statistics.median(row[f"time/{name}"] for row in rows)
        for name in ("generate_s", "train_s", "wait_for_groups_s")
    }
    return {"samples_per_s": samples / seconds, **parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    settings = {
        "synchronous, 1 thread": {"threads": 1, "rollout__max_lag": 0},
        "synchronous, 2 threads": {"threads": 2, "rollout__max_lag": 0},
        "bounded, max_lag 4": {"threads": 1, "rollout__max_lag": 4},
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for repeat in range(arguments.repeats):
        for name, keys in settings.items():
            run = train(
                None,
                train__steps=arguments.steps,
                train__eval_every=0,
                train__numerics_every=0,
                engine__drop_finished=True,  # by itself it would be on in the bounded run alone
                seed=repeat,
                **keys,
            )
            measured[name].append(steady(run))
            print(f"{name:24} {measured[name][-1]['samples_per_s']:8.0f} samples/s", flush=True)

    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in measured[name])

    best = max(list(settings)[:2], key=lambda name: median(name, "samples_per_s"))
    generate_s, train_s = median(best, "generate_s"), median(best, "train_s")
    bound = (generate_s + train_s) / max(generate_s, train_s)
    speedup = median("bounded, max_lag 4", "samples_per_s") / median(best, "samples_per_s")
    results = {
        "best_synchronous": best,
        "synchronous_generate_s": generate_s,
        "synchronous_train_s": train_s,
        "bound": bound,
        "speedup": speedup,
        "fraction_of_bound": speedup / bound,
        "repeats": measured,
    }
    print(f"best synchronous: {best} (generate {generate_s:.3f} s, train {train_s:.3f} s)")
    print(f"speed-up {speedup:.2f}, bound {bound:.2f}, fraction {speedup / bound:.2f} (goal 0.85)")
    print(save_results("async_throughput", results))


if __name__ == "__main__":
    main()
