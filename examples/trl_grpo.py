"""TRL's GRPOTrainer with Sidestep's control: half a minute on a laptop, no GPU.

    python examples/trl_grpo.py

A model of 0.14M parameters that ships with Sidestep learns to add two-digit numbers. Every rollout
batch is used for two optimizer steps (num_iterations=2): the callback tells the control, which
reports their alignment apart and does not act on it. Clipping is left to the control here.
"""

import argparse
import random
import tempfile

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback
from sidestep.models.packaged import packaged_model_path

SHOWN = ("reward", "align/cosine", "align/cosine_within_batch", "align/regime", "grad/norm_raw")


def is_right(prompts: list[str], completions: list[str], **columns: list[str]) -> list[float]:
    sums = [str(int(prompt[:2]) + int(prompt[3:5])) for prompt in prompts]
    return [float(said == right) for said, right in zip(completions, sums, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mode", default="control", choices=["control", "observe", "off"])
    options = parser.parse_args()
    draw = random.Random(0)
    prompts = [f"{draw.randrange(100):02d}+{draw.randrange(100):02d}=" for _ in range(2_000)]
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=8,
            num_iterations=2,
            max_completion_length=4,
            learning_rate=5e-4,
            max_grad_norm=0,  # off here, because max_norm is given below
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            disable_tqdm=True,
            save_strategy="no",
            report_to=[],
        )
        control = GradientControl(mode=options.mode)
        trainer = GRPOTrainer(
            str(packaged_model_path()),
            reward_funcs=is_right,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[SidestepCallback(control, max_norm=1.0)],
        )
        trainer.train()
    for line in trainer.state.log_history[:-1]:
        shown = [line.get(name) for name in SHOWN]
        print(line["step"], *(f"{x:.3f}" if isinstance(x, float) else x for x in shown))


if __name__ == "__main__":
    main()
