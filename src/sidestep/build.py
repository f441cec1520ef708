"""From a config to a finished run: everything is checked, then built, then run. The only importer
of `trainer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from sidestep.config import RunConfig
from sidestep.config.loading import load_config
from sidestep.config.writing import to_toml
from sidestep.control.controller import GradientControl
from sidestep.diagnostics.environment import environment_facts
from sidestep.diagnostics.progress import Progress
from sidestep.diagnostics.recorder import Recorder
from sidestep.diagnostics.report import write_report
from sidestep.diagnostics.sinks import close_on_exit, open_sinks
from sidestep.doctor import checked
from sidestep.engines.channel import WeightChannel
from sidestep.engines.embedded import EmbeddedEngine
from sidestep.engines.pool import EnginePool
from sidestep.engines.protocol import Engine
from sidestep.errors import CheckpointError, UsageError
from sidestep.models.loading import (
    check_model,
    context_length,
    load_model,
    load_tokenizer,
    resolve_device,
)
from sidestep.models.loading import load_config as load_model_config
from sidestep.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    FINAL_FOLDER,
    check_new,
    check_resumable,
    default_run_dir,
    has_steps,
    only_writer,
    writing_to,
)
from sidestep.tasks.build import make_task
from sidestep.tasks.prompts import encode_examples
from sidestep.tasks.protocol import FullTask
from sidestep.trainer.checkpoint import Checkpoint, complete_checkpoints, read_checkpoint
from sidestep.trainer.run import Parts, Run
from sidestep.trainer.step import Trainer
from sidestep.types import Prompt


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a run live. A study puts many runs into one process, and without a word.

    engine, channel: called with the arguments of `EmbeddedEngine` and `WeightChannel`. console:
    where progress is shown; None: standard output. report: write report.html.
    """

    engine: Callable[..., Engine] = EmbeddedEngine
    channel: Callable[[Path], WeightChannel] = WeightChannel
    console: Console | None = None
    report: bool = True


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads, checked."""

    model_folder: Path
    tokenizer: Any
    task: FullTask
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    device: torch.device
    engine_device: torch.device


def train(
    config: RunConfig,
    run_dir: Path | str | None = None,
    *,
    resume: bool = False,
    place: Place | None = None,
) -> Path:
    """Run `config` to its last step in the folder `run_dir`; returns the folder.

    Without `run_dir` a new folder runs/run-<time> is made.
    With `resume` the run goes on from its newest complete checkpoint. The folder holds a report
    when this ends, however it ends. Works in a notebook too; stopping on Ctrl-C with a checkpoint
    is for the main thread of a script. Raises UsageError before any
    work for wrong input, Interrupted after a stop on request, another SidestepError if the run
    fails.
    """
    run_dir = Path(run_dir) if run_dir else default_run_dir("run", datetime.now())
    (check_resumable if resume else check_new)(run_dir)
    inputs = check_inputs(config)
    place = place or Place()
    with contextlib.closing(inputs.task):
        checkpoint = newest_checkpoint(run_dir) if resume else None
        if checkpoint:
            check_resume(config, load_config(run_dir / CONFIG_FILE), checkpoint)
        # its bars would write into the live view
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        with only_writer(run_dir), writing_to(run_dir):
            try:
                _run_to_the_end(_train(config, run_dir, inputs, checkpoint, place))
            finally:  # of a run that failed or was stopped too: that is when it is read most
                if place.report and has_steps(run_dir):
                    write_report(run_dir)
    return run_dir


def _run_to_the_end(run: Coroutine[Any, Any, None]) -> None:
    """asyncio.run, which a notebook cannot call where its own event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(run)
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, run).result()


def check_inputs(config: RunConfig) -> Inputs:
    """Read tokenizer and data, and refuse what cannot work: UsageError names key, file and fix."""
    try:
        GradientControl(**config.control.arguments())
    except ValueError as error:  # its messages begin with the argument's name
        raise UsageError(f"control.{error}") from error
    checked(config)
    model_folder = check_model(config.model.path)
    tokenizer = load_tokenizer(str(model_folder))
    task = make_task(config.task)
    limits = config.engine.max_new_tokens, context_length(load_model_config(str(model_folder)))
    return Inputs(
        model_folder=model_folder,
        tokenizer=tokenizer,
        task=task,
        prompts=encode_examples(task.train, tokenizer, *limits),
        held_out=encode_examples(task.held_out, tokenizer, *limits),
        device=resolve_device(config.model.device),
        engine_device=resolve_device(config.engine.device or config.model.device, "engine.device"),
    )


# What a resumed run may change: the rest would make its first half another run, or break the bound.
CHANGED_BY_RESUME = (
    "train.steps",
    "train.learning_rate",
    "train.eval_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "rollout.timeout_s",
)
# Sections that a resumed run may change whole.
WATCHING = ("control", "alarm", "eval", "log")


def check_resume(config: RunConfig, stored: RunConfig, checkpoint: Checkpoint) -> None:
    """Raises UsageError for a key that a resume cannot change, or steps that are done already."""
    old, new = stored.model_dump(), config.model_dump()
    for section, keys in new.items():
        for name, value in keys.items() if isinstance(keys, dict) else ():
            before, dotted = old[section][name], f"{section}.{name}"
            if value != before and dotted not in CHANGED_BY_RESUME and section not in WATCHING:
                can_change = [*CHANGED_BY_RESUME, *(f"{name}.*" for name in WATCHING)]
                raise UsageError(
                    f"--set {dotted}={value}: a resumed run keeps {dotted} = {before}; "
                    f"only {', '.join(can_change)} can change"
                )
    if config.seed != stored.seed:
        raise UsageError(f"--set seed={config.seed}: a resumed run keeps seed = {stored.seed}")
    if config.train.steps < checkpoint.step:
        raise UsageError(
            f"--set train.steps={config.train.steps}: the run has made {checkpoint.step} steps"
        )


def newest_checkpoint(run_dir: Path) -> Checkpoint:
    """The newest complete checkpoint of a run. Raises CheckpointError where there is none."""
    folders = complete_checkpoints(run_dir / CHECKPOINTS_FOLDER)
    if not folders:
        raise CheckpointError(
            f"{run_dir / 'checkpoints'} holds no complete checkpoint: the run ended before "
            f"its first one (train.checkpoint_every); start again in another --run-dir"
        )
    return read_checkpoint(folders[-1])


async def _train(
    config: RunConfig, run_dir: Path, inputs: Inputs, checkpoint: Checkpoint | None, place: Place
) -> None:
    with contextlib.ExitStack() as stack:
        # first: a sink that does not start should cost nobody's time
        resume_step = checkpoint.step if checkpoint else None
        sinks = open_sinks(
            config.log.sink_names,
            run_dir,
            project=config.log.project,
            config=config.model_dump(mode="json"),
            resume_step=resume_step,
        )
        for sink in sinks:
            stack.push(close_on_exit(sink))
        channel = place.channel(run_dir / "weights")
        channel.clear()  # what a killed run left
        stack.callback(channel.close)
        engine = make_engine(config, inputs, channel, place.engine)
        starting = asyncio.create_task(engine.start())  # imports torch while the model loads here
        try:
            trainer = await asyncio.to_thread(build_trainer, config, inputs, checkpoint)
            publish_start(channel, trainer, checkpoint)
            await starting
            # only now: a run that ended before it began leaves nothing that looks like a run
            (run_dir / CONFIG_FILE).write_text(to_toml(config), encoding="utf-8")
            if not checkpoint:
                facts = json.dumps(environment_facts(), indent=1)
                (run_dir / ENVIRONMENT_FILE).write_text(facts, encoding="utf-8")
            recorder = stack.enter_context(Recorder(run_dir, resume_step=resume_step, sinks=sinks))
            progress = stack.enter_context(
                Progress(
                    config.train.steps,
                    place.console,
                    target=str(run_dir),
                    finished_steps=checkpoint.step if checkpoint else 0,
                )
            )
            for notice in inputs.task.notices:
                progress.message(notice)
            parts = Parts(
                config=config,
                run_dir=run_dir,
                task=inputs.task,
                prompts=inputs.prompts,
                held_out=inputs.held_out,
                tokenizer=inputs.tokenizer,
                trainer=trainer,
                engine=engine,
                channel=channel,
                recorder=recorder,
                progress=progress,
            )
            await Run(parts, checkpoint).run()
        finally:
            starting.cancel()
            await engine.close()
    trainer.model.save_pretrained(run_dir / FINAL_FOLDER)
    inputs.tokenizer.save_pretrained(run_dir / FINAL_FOLDER)


def make_engine(
    config: RunConfig, inputs: Inputs, channel: WeightChannel, kind: Callable[..., Engine]
) -> Engine:
    """The engine of `[engine]`, not started; several processes behind one with replicas."""
    processes = [
        kind(
            model_path=inputs.model_folder,
            channel=channel.folder,
            seed=config.seed,
            device=str(inputs.engine_device),
            dtype=config.engine.dtype or config.model.dtype,
            attention=config.model.attn_implementation,
        )
        for _ in range(config.engine.replicas)
    ]
    return processes[0] if len(processes) == 1 else EnginePool(processes)


def build_trainer(config: RunConfig, inputs: Inputs, checkpoint: Checkpoint | None) -> Trainer:
    """Model, optimizer and control; as the checkpoint left them, if there is one."""
    torch.manual_seed(config.seed)
    model = load_model(
        str(inputs.model_folder),
        config.model.dtype,
        inputs.device,
        config.model.attn_implementation,
    )
    trainer = Trainer(model, config, inputs.device)
    if checkpoint:
        trainer.load_state_dict(checkpoint.model, checkpoint.trainer)
    return trainer


def publish_start(channel: WeightChannel, trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    """Put into the channel what the first rollouts ask for."""
    if checkpoint:
        for version in sorted(checkpoint.weights):
            channel.publish(version, checkpoint.weights[version].items())
    if not channel.has(trainer.version):
        channel.publish(trainer.version, trainer.model.named_parameters())
