"""What does the callback cost in TRL's GRPOTrainer? Its share of each step's time.

    python benchmarks/trl_overhead.py

The packaged model (0.14M parameters), 64 or 512 completions of up to 4 tokens a step, one thread.
Own time is that of the callback's events and of the control's two hooks in `optimizer.step()`; a
step is all from its beginning to the next one's, sampling included. Each step gives a ratio, own
time over the rest; the median is reported, in CPU time of the thread and by the clock.
"""

import random
import statistics
import tempfile
import time
from collections import defaultdict

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from common import save_results
from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback
from sidestep.models.packaged import packaged_model_path

STEPS, WARM_UP = 50, 10
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}
EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_log",
)


class OwnTime:
    """Seconds spent between `start` and `stop`, by clock, since the last `take`."""

    def __init__(self):
        self.spent, self.began = dict.fromkeys(CLOCKS, 0.0), {}

    def start(self, *args, **kwargs):
        self.began = {name: clock() for name, clock in CLOCKS.items()}

    def stop(self, *args, **kwargs):
        for name, clock in CLOCKS.items():
            self.spent[name] += clock() - self.began[name]

    def take(self):
        spent, self.spent = self.spent, dict.fromkeys(CLOCKS, 0.0)
        return spent


class Timed(SidestepCallback):
    """The callback, with its own time; the optimizer's hooks run in the order of registration."""

    def __init__(self, control):
        super().__init__(control)
        self.own = OwnTime()
        for event in EVENTS:
            setattr(self, event, self._timed(getattr(self, event)))

    def _timed(self, method):
        def call(*args, **kwargs):
            self.own.start()
            method(*args, **kwargs)
            self.own.stop()

        return call

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        inner = optimizer.optimizer
        inner.register_step_pre_hook(self.own.start)
        inner.register_step_post_hook(self.own.start)
        super().on_train_begin(args, state, control, optimizer=optimizer, **kwargs)
        inner.register_step_pre_hook(self.own.stop)
        inner.register_step_post_hook(self.own.stop)


class Steps(TrainerCallback):
    """Ratios of own time to the rest, step by step. Before the callback: it begins first."""

    def __init__(self, own):
        self.own, self.ratios, self.seconds = own, defaultdict(list), defaultdict(list)

    def on_substep_end(self, *args, **kwargs):
        raise RuntimeError("this measures steps of one micro-batch")

    def on_step_begin(self, *args, **kwargs):
        if hasattr(self, "began"):
            spent = self.own.take()
            for name, clock in CLOCKS.items():
                whole = clock() - self.began[name]
                self.ratios[name].append(spent[name] / (whole - spent[name]))
                self.seconds[name].append(whole)
        self.began = {name: clock() for name, clock in CLOCKS.items()}


def is_right(prompts, completions, **columns):
    sums = [str(int(prompt[:2]) + int(prompt[3:5])) for prompt in prompts]
    return [float(said == right) for said, right in zip(completions, sums, strict=True)]


def measure(batch_size, **settings):
    draw = random.Random(0)
    prompts = [f"{draw.randrange(100):02d}+{draw.randrange(100):02d}=" for _ in range(8_000)]
    callback = Timed(GradientControl(**settings))
    steps = Steps(callback.own)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=batch_size,
            num_generations=8,
            max_completion_length=4,
            learning_rate=1e-4,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        trainer = GRPOTrainer(
            str(packaged_model_path()),
            reward_funcs=is_right,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[steps, callback],
        )
        trainer.train()
    return {
        name: {
            "ratio_median": statistics.median(steps.ratios[name][WARM_UP:]),
            "own_ms_median": 1e3
            * statistics.median(
                seconds * ratio / (1 + ratio)
                for seconds, ratio in zip(
                    steps.seconds[name][WARM_UP:], steps.ratios[name][WARM_UP:], strict=True
                )
            ),
            "step_ms_median": 1e3 * statistics.median(steps.seconds[name][WARM_UP:]),
        }
        for name in CLOCKS
    }


def main():
    torch.set_num_threads(1)
    cases = {
        "observe": {"mode": "observe"},
        "control, always projecting": {"low": -1.0, "high": 1.0},
        "control, update space": {"space": "update", "reference": "displacement"},
    }
    results = {
        f"{name}, {batch_size} completions": measure(batch_size, **settings)
        for batch_size in (64, 512)
        for name, settings in cases.items()
    }
    for name, found in results.items():
        print(name, *(f"{key} {value:.4f}" for key, value in found["cpu"].items()))
    print(save_results("trl_overhead", results))


if __name__ == "__main__":
    main()
