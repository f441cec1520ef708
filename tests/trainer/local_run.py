"""A whole run in this process: the real loops, sampler, channel and trainer; only the engine's
process is left out.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from sidestep.config import RunConfig
from sidestep.diagnostics.progress import Progress
from sidestep.diagnostics.recorder import Recorder
from sidestep.engines.channel import WeightChannel
from sidestep.engines.messages import EngineSettings, pack_call, unpack_answer
from sidestep.engines.protocol import Generation, GenerationRequest, Sampling
from sidestep.engines.server import EngineServer
from sidestep.models.loading import load_model, load_tokenizer
from sidestep.tasks.prompts import encode_examples
from sidestep.trainer.checkpoint import Checkpoint, complete_checkpoints, read_checkpoint
from sidestep.trainer.run import Parts, Run
from sidestep.trainer.step import Trainer
from sidestep.types import Example


class LocalEngine:
    """The worker's own server, called in a thread instead of through a pipe."""

    def __init__(self, settings: EngineSettings) -> None:
        self.server = EngineServer(settings)
        self._turn = asyncio.Lock()

    @property
    def version(self) -> int:
        return self.server.version

    async def start(self) -> None:
        pass

    async def load_weights(self, version: int) -> None:
        self.server.load(version)

    async def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, version: int | None
    ) -> Generation:
        async with self._turn:
            call = pack_call(requests, sampling, version)
            answer = await asyncio.to_thread(self.server.handle, call)
        return unpack_answer(answer, requests)

    async def close(self) -> None:
        pass


class VowelTask:
    """Reward: how many of the characters are vowels. A random model has some and can learn more."""

    def __init__(self, num_prompts: int = 5) -> None:
        self.train = tuple(
            Example(f"say {'xyz'[: i % 3]}{i}", source=f"row {i}") for i in range(num_prompts)
        )
        self.held_out = (Example("say it"), Example("well?"))

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> list[float]:
        return [sum(c in "aeiou" for c in text) / max(1, len(text)) for text in completions]


def small_config(model_dir: Path, **sections: dict) -> RunConfig:
    defaults: dict[str, dict] = {
        "model": {"path": str(model_dir)},
        "engine": {"max_new_tokens": 5},
        "rollout": {"group_size": 4, "groups_per_step": 3, "max_lag": 0, "timeout_s": 60.0},
        "train": {"steps": 4, "learning_rate": 1e-3, "eval_every": 0, "checkpoint_every": 0},
        "control": {"mode": "control", "low": 0.05, "high": 0.3},
    }
    merged = {name: values | sections.pop(name, {}) for name, values in defaults.items()}
    return RunConfig(**merged, **sections)


def run_locally(
    config: RunConfig,
    run_dir: Path,
    *,
    task: object | None = None,
    resume: bool = False,
    watch: Callable[[Run], None] | None = None,
) -> Trainer:
    """Run to the end; `watch` sees the Run before it starts. Returns the trainer, whose model is
    the result.
    """
    checkpoint: Checkpoint | None = None
    if resume:
        checkpoint = read_checkpoint(complete_checkpoints(run_dir / "checkpoints")[-1])
    task = task or VowelTask()
    tokenizer = load_tokenizer(config.model.path)
    channel = WeightChannel(run_dir / "weights")
    channel.clear()
    trainer = Trainer(load_model(config.model.path, "float32", "cpu"), config, torch.device("cpu"))
    if checkpoint:
        trainer.load_state_dict(checkpoint.model, checkpoint.trainer)
        for version in sorted(checkpoint.weights):
            channel.publish(version, checkpoint.weights[version].items())
    if not channel.has(trainer.version):
        channel.publish(trainer.version, trainer.model.named_parameters())
    recorder = Recorder(run_dir, resume_step=checkpoint.step if checkpoint else None)
    with recorder, Progress(config.train.steps, Console(file=io.StringIO())) as progress:
        parts = Parts(
            config=config,
            run_dir=run_dir,
            task=task,
            prompts=encode_examples(task.train, tokenizer, config.engine.max_new_tokens, 128),
            held_out=encode_examples(task.held_out, tokenizer, config.engine.max_new_tokens, 128),
            tokenizer=tokenizer,
            trainer=trainer,
            engine=LocalEngine(
                EngineSettings(
                    config.model.path, str(channel.folder), config.seed, "cpu", "float32"
                )
            ),
            channel=channel,
            recorder=recorder,
            progress=progress,
        )

        async def drive() -> None:
            run = Run(parts, checkpoint)
            if watch:
                watch(run)
            await run.run()

        asyncio.run(drive())
    return trainer


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
