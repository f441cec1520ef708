"""Sidestep and TRL's GRPOTrainer on the CPU: the same model, task, prompts, batch, group size,
generation length, loss, optimizer and steps, in turns on one machine.

    python benchmarks/against_trl.py            # three repeats, about 15 minutes on two cores

Each side is taken at its best of one and two threads; bounded asynchrony has two processes with one
thread each. samples/s: after the first steps, which load and allocate. Time to reward 0.8: from the
start of training, imports left out; the reward is the mean over the last five steps. Memory: the
peak of the summed proportional set sizes (PSS) of all processes, looked at five times a second.
Needs TRL (pip install 'sidestep[trl]'). Goal: 2 times TRL's samples/s synchronous, 3 times bounded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from common import save_results

WARM_UP = 5  # steps
TARGET, SMOOTH = 0.8, 5
GROUPS, MEMBERS, TOKENS, RATE = 64, 8, 8, 5e-4
SETTINGS = {
    "TRL, 1 thread": ("trl", 1, 0),
    "TRL, 2 threads": ("trl", 2, 0),
    "Sidestep synchronous, 1 thread": ("sidestep", 1, 0),
    "Sidestep synchronous, 2 threads": ("sidestep", 2, 0),
    "Sidestep bounded, max_lag 4": ("sidestep", 1, 4),
}


def train_with_trl(steps: int, seed: int, out: Path) -> None:
    """In a process of its own: TRL's run; writes [[seconds since the start, reward], ...]."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from sidestep.models.packaged import packaged_model_path
    from sidestep.tasks.arithmetic import ArithmeticTask

    task = ArithmeticTask(eval_size=200)
    rows = [{"prompt": e.prompt, "answer": e.columns["answer"]} for e in task.train]
    folder = str(packaged_model_path())
    curve: list[tuple[float, float]] = []

    def right_sum(completions, answer, **_):
        rewards = [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]
        right_sum.last = statistics.fmean(rewards)
        return rewards

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.started = time.monotonic()

        def on_step_end(self, *_, **__):
            curve.append((time.monotonic() - self.started, right_sum.last))

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=GROUPS * MEMBERS,
            num_generations=MEMBERS,
            max_completion_length=TOKENS,
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # no clipping, as here
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",  # a mean over all tokens of the batch: our aggregation "token"
            seed=seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(folder),
            processing_class=transformers.AutoTokenizer.from_pretrained(folder),
            reward_funcs=right_sum,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        )
        trainer.train()
    out.write_text(json.dumps(curve))


def command_of(side: str, max_lag: int, steps: int, seed: int, folder: Path) -> list[str]:
    if side == "trl":
        arguments = [__file__, "--only-trl", str(folder / "curve.json")]
        return [sys.executable, *arguments, "--steps", str(steps), "--seed", str(seed)]
    keys = {
        "seed": seed,
        "rollout.max_lag": max_lag,
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": MEMBERS,
        "engine.max_new_tokens": TOKENS,
        "train.steps": steps,
        "train.learning_rate": RATE,
        "train.eval_every": 0,
        "train.checkpoint_every": 0,
        "task.eval_size": 200,
    }
    command = [sys.executable, "-m", "sidestep.cli.main", "train", "--run-dir", str(folder / "run")]
    return command + [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]


def curve_of(side: str, folder: Path) -> list[tuple[float, float]]:
    if side == "trl":
        return json.loads((folder / "curve.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["time/elapsed_s"], row["reward/mean"]) for row in rows]


def memory_of(process: psutil.Process) -> int:
    """Summed PSS of a process and its children, in bytes."""
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            continue
    return total


def run(side: str, threads: int, max_lag: int, steps: int, seed: int) -> dict[str, float | None]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = command_of(side, max_lag, steps, seed, folder)
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            watched, peak = psutil.Process(process.pid), 0
            while process.poll() is None:
                try:
                    peak = max(peak, memory_of(watched))
                except psutil.NoSuchProcess:
                    break
                time.sleep(0.2)
            if process.wait():
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} failed:\n{log.read()[-3000:]}")
        curve = curve_of(side, folder)
    seconds = curve[-1][0] - curve[WARM_UP - 1][0]
    return {
        "samples_per_s": (len(curve) - WARM_UP) * GROUPS * MEMBERS / seconds,
        "seconds_to_reward_0.8": time_to(curve),
        "reward_last": statistics.fmean(reward for _, reward in curve[-SMOOTH:]),
        "peak_memory_mib": peak / 2**20,
    }


def time_to(curve: list[tuple[float, float]]) -> float | None:
    for i in range(SMOOTH, len(curve) + 1):
        if statistics.fmean(reward for _, reward in curve[i - SMOOTH : i]) >= TARGET:
            return curve[i - 1][0]
    return None


def best(measured: dict[str, list[dict[str, float | None]]], start: str) -> tuple[str, float]:
    """The setting of a side with the highest median of samples/s."""
    medians = {
        name: statistics.median(result["samples_per_s"] for result in results)
        for name, results in measured.items()
        if name.startswith(start)
    }
    name = max(medians, key=lambda key: medians[key])
    return name, medians[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--only-trl", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_trl:
        train_with_trl(arguments.steps, arguments.seed, arguments.only_trl)
        return
    measured: dict[str, list[dict[str, float | None]]] = {name: [] for name in arguments.settings}
    for repeat in range(arguments.repeats):
        for name in arguments.settings:
            result = run(*SETTINGS[name], arguments.steps, arguments.seed + repeat)
            measured[name].append(result)
            print(f"{name:34} {result}", flush=True)
    sides = {start: best(measured, start) for start in ("TRL", "Sidestep syn", "Sidestep bou")}
    trl = sides["TRL"][1]
    results = {
        "steps": arguments.steps,
        "best": dict(sides.values()),
        "times_trl_synchronous": sides["Sidestep syn"][1] / trl,
        "times_trl_bounded": sides["Sidestep bou"][1] / trl,
        "repeats": measured,
    }
    print(f"synchronous {results['times_trl_synchronous']:.2f} x TRL (goal 2)")
    print(f"bounded {results['times_trl_bounded']:.2f} x TRL (goal 3)")
    print(save_results("against_trl", results))


if __name__ == "__main__":
    main()
