"""TRL's AsyncGRPOTrainer with Sidestep's control: half a minute on a laptop, no GPU, no vLLM.

    python examples/trl_async_grpo.py

A model of 0.14M parameters that ships with Sidestep learns to add. `LocalRollouts` samples in this
process with weights that are up to `weight_sync_steps` old. With a GPU leave `run_on_a_cpu`,
`rollout_worker` and `weight_transfer` out, and TRL asks its vLLM server. What Sidestep needs is one
line either way: the callback.
"""

import argparse
import tempfile

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback
from sidestep.models.packaged import packaged_model_path
from trl_local_rollouts import LocalRollouts
from trl_on_a_cpu import run_on_a_cpu

SHOWN = ("reward", "align/cosine", "align/regime", "lag/mean")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--weight-sync-steps", type=int, default=8)
    parser.add_argument("--mode", default="control", choices=["control", "observe", "off"])
    options = parser.parse_args()
    run_on_a_cpu()
    path = str(packaged_model_path())
    rollouts = LocalRollouts(path, num_prompts=16, group_size=8)
    with tempfile.TemporaryDirectory() as folder:
        args = AsyncGRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            weight_sync_steps=options.weight_sync_steps,
            per_device_train_batch_size=16 * 8,
            num_generations=8,
            learning_rate=5e-4,
            token_budget=0,  # batches of a fixed number of samples
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
            train_dataset=Dataset.from_dict({"prompt": ["unused: LocalRollouts asks"]}),
            callbacks=[SidestepCallback(GradientControl(mode=options.mode))],
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        )
        trainer.train()
    for line in trainer.state.log_history[:-1]:
        shown = [line.get(name) for name in SHOWN]
        print(line["step"], *(f"{x:.3f}" if isinstance(x, float) else x for x in shown))


if __name__ == "__main__":
    main()
