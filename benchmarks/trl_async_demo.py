"""TRL's AsyncGRPOTrainer with lag imposed by `weight_sync_steps`, without and with the control.

    python benchmarks/trl_async_demo.py            # 36 runs in turn, 7 to 8 minutes of one core
    python benchmarks/trl_async_demo.py --pilot    # how the learning rate was chosen

The packaged model (0.14M parameters, two-digit addition) from where it ships; 16 prompts x 8
completions a step, TRL's loss (PPO clip on the ratio to the sampling policy) and TRL's clipping at
norm 1, constant learning rate. Weights reach the sampler every 1, 8 or 32 steps. The arms differ in
the callback alone: "observe" changes nothing; "control" is `GradientControl()`; "displacement"
compares the update with how far the policy moved since its data was sampled, which the control
estimates with the lag that the callback reads from TRL.

The learning rate was chosen on the pilot's seed, which is none of those reported, as one at which
the bare run suffers at 32 and not at 1; the controls' settings were not tuned. A lower rate is the
rival of any control: half of it, the bare run's best at 32 in the pilot, is run there too.
Writes results/trl_async_demo.json and docs/images/trl.png.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from common import save_results
from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback
from sidestep.models.packaged import packaged_model_path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from trl_local_rollouts import LocalRollouts  # noqa: E402
from trl_on_a_cpu import run_on_a_cpu  # noqa: E402

SYNCS = (1, 8, 32)
SEEDS = (0, 1, 2)
PILOT_SEED = 100
PILOT_RATES = (5e-4, 1e-3, 2e-3)
LEARNING_RATE, LOWER_RATE = 1e-3, 5e-4
STEPS = 160
PROMPTS, GROUP = 16, 8
ARMS = {
    "observe": {"mode": "observe"},
    "control": {},
    "displacement": {"reference": "displacement", "space": "update"},
}
SERIES = {
    "reward": "reward",
    "cosine": "align/cosine",
    "skipped": "align/skipped",
    "projected": "align/projected",
    "lag": "lag/mean",
}


def run(arm, sync, seed, learning_rate, steps):
    """The series of one run, by step; None where a step has no such number."""
    path = str(packaged_model_path())
    rollouts = LocalRollouts(path, PROMPTS, GROUP, seed)
    with tempfile.TemporaryDirectory() as folder:
        args = AsyncGRPOConfig(
            output_dir=folder,
            seed=seed,
            max_steps=steps,
            weight_sync_steps=sync,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            token_budget=0,
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = AsyncGRPOTrainer(
            path,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
            callbacks=[SidestepCallback(GradientControl(**ARMS[arm]))],
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {name: [line.get(key) for line in lines] for name, key in SERIES.items()}


def summary(series):
    """Mean reward of the first and last eighth, the lowest eighth after the first, mean lag."""
    eighth = len(series["reward"]) // 8
    eighths = [
        statistics.fmean(series["reward"][i : i + eighth]) for i in range(0, 8 * eighth, eighth)
    ]
    cosines = [c for c in series["cosine"] if c is not None]
    return {
        "reward_by_eighth": eighths,
        "end": eighths[-1],
        "cosine": statistics.fmean(cosines),
        "skipped": statistics.fmean(series["skipped"]),
        "projected": statistics.fmean(series["projected"]),
        "lag_mean": statistics.fmean(series["lag"]),
        "lag_max": max(series["lag"]),
    }


def grid(arms, syncs, seeds, rates, steps):
    found = []
    for rate in rates:
        for sync in syncs:
            for arm in arms:
                for seed in seeds:
                    began = time.perf_counter()
                    series = run(arm, sync, seed, rate, steps)
                    row = {"arm": arm, "sync": sync, "seed": seed, "learning_rate": rate}
                    row |= summary(series) | {"seconds": time.perf_counter() - began}
                    found.append(row | {"reward": series["reward"], "lag": series["lag"]})
                    shown = " ".join(f"{reward:.2f}" for reward in row["reward_by_eighth"])
                    print(
                        f"{arm:12} sync {sync:2} seed {seed:3} lr {rate:g}: {shown}  "
                        f"cos {row['cosine']:+.2f} skip {row['skipped']:.2f} "
                        f"lag {row['lag_mean']:.1f} ({row['seconds']:.0f} s)",
                        flush=True,
                    )
    return found


def draw(found, path):
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = {"observe": "#777777", "control": "#1f77b4", "displacement": "#d95f02"}
    figure, axes = pyplot.subplots(1, len(SYNCS), figsize=(12, 3.6), sharey=True)
    for axis, sync in zip(axes, SYNCS, strict=True):
        rows = [r for r in found if (r["sync"], r["learning_rate"]) == (sync, LEARNING_RATE)]
        for row in rows:
            smooth = [
                statistics.fmean(row["reward"][max(0, i - 7) : i + 1])
                for i in range(len(row["reward"]))
            ]
            label = row["arm"] if row["seed"] == SEEDS[0] else None
            axis.plot(smooth, color=colours[row["arm"]], label=label, linewidth=1.2, alpha=0.85)
        lag = statistics.fmean(row["lag_mean"] for row in rows)
        axis.set_title(f"weight_sync_steps {sync}: mean lag {lag:.1f}", fontsize=10)
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("reward, mean of 8 steps")
    axes[0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pilot", action="store_true")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("sidestep").setLevel(logging.ERROR)
    run_on_a_cpu()
    if options.pilot:
        grid(["observe"], (1, 32), [PILOT_SEED], PILOT_RATES, options.steps)
        return
    found = grid(ARMS, SYNCS, SEEDS, [LEARNING_RATE], options.steps)
    found += grid(ARMS, (32,), SEEDS, [LOWER_RATE], options.steps)
    print(save_results("trl_async_demo", found))
    draw(found, ROOT / "docs" / "images" / "trl.png")


if __name__ == "__main__":
    main()
