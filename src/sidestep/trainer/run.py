"""A run on one screen: four loops in one task group, and what each of them waits for.

    rollout    waits for a request slot, then for places in the buffer (freed by train);
               each of its requests waits for the engine
    train      waits for the next step's groups (put by a request); trains in a thread,
               publishes the weights, frees the places
    evaluate   waits for train to ask (once, before the first step, the run itself has asked);
               samples with a version that was pinned in the channel
    save       waits for train to hand over a copy of its state; writes it in a thread

                 +------------------- places freed -------------------+
                 v                                                     |
    rollout -> engine -> score -> buffer -> train -> weight channel ---+
                 ^                                        |
                 +------------- reads weights ------------+

The first error of any loop ends the run with that error. What is in flight when the last step is
over is cancelled.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sidestep.buffer.buffer import GroupBuffer
from sidestep.buffer.ledger import Ledger
from sidestep.buffer.prompts import PromptOrder
from sidestep.config import RunConfig
from sidestep.diagnostics.progress import Progress
from sidestep.diagnostics.recorder import Recorder
from sidestep.engines.channel import WeightChannel
from sidestep.engines.protocol import Engine, GenerationRequest, Sampling
from sidestep.errors import Interrupted, SidestepError
from sidestep.run_folder import CHECKPOINTS_FOLDER
from sidestep.tasks.protocol import Task, as_full
from sidestep.tasks.rows import shorten
from sidestep.trainer.accounting import EQUAL_REWARDS
from sidestep.trainer.checkpoint import Checkpoint, write_checkpoint
from sidestep.trainer.evaluation import Evaluator
from sidestep.trainer.metrics import Timings, group_row, step_row
from sidestep.trainer.rows import PendingRows
from sidestep.trainer.scoring import scored
from sidestep.trainer.step import StepReport, Trainer
from sidestep.trainer.waits import Waits, first_error, in_daemon_thread
from sidestep.types import Group, Prompt

# Requests an engine process holds at once: one that runs and one that waits, so that it never idles
# between them.
REQUESTS_IN_FLIGHT = 2
MAX_NOT_FINITE = 10
BEFORE_ALL_STEPS = -1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; `build.py` makes it."""

    config: RunConfig
    run_dir: Path
    task: Task
    prompts: Sequence[Prompt]
    held_out: Sequence[Prompt]
    tokenizer: Any
    trainer: Trainer
    engine: Engine
    channel: WeightChannel
    recorder: Recorder
    progress: Progress


class Run:
    """State that the loops share. Only train changes `steps_done`, `versions_after` and the
    trainer.
    """

    def __init__(self, parts: Parts, checkpoint: Checkpoint | None = None) -> None:
        self.parts = parts
        self.config = config = parts.config
        self.trainer, self.engine, self.channel = parts.trainer, parts.engine, parts.channel
        self.steps_done = checkpoint.step if checkpoint else 0
        self.versions_after = checkpoint.versions_after if checkpoint else {0: 0}
        ledger = Ledger(
            groups_per_step=config.rollout.groups_per_step,
            max_lag=config.rollout.max_lag,
            total_steps=config.train.steps - self.steps_done,
        )
        if checkpoint:
            ledger.load_state_dict(checkpoint.ledger, checkpoint.waiting)
        self.buffer = GroupBuffer(
            ledger,
            timeout_s=config.rollout.timeout_s,
            versions_per_step=config.train.optimizer_steps_per_batch,
        )
        self.order = PromptOrder(len(parts.prompts), config.seed)
        self.task = as_full(parts.task)
        self.rows = PendingRows(parts.recorder.step)
        self.timings = Timings()
        self.dropped: list[Group] = []
        self.evaluations: asyncio.Queue[tuple[int, int]] = asyncio.Queue(maxsize=1)
        self.evaluates_start = (
            bool(parts.held_out) and config.train.eval_every > 0 and self.steps_done == 0
        )
        self.saves: asyncio.Queue[Checkpoint] = asyncio.Queue(maxsize=1)
        self.interrupted = False
        self.alarmed = False
        self.num_not_finite = 0  # steps in a row
        self.problems_told: set[str] = set()
        self.waits = Waits(config.rollout.timeout_s)
        self.evaluator = Evaluator(config, self.task, parts.held_out, self.engine, self.waits)
        self.buffer.blocker = self.waits.under_way
        if config.control.reference == "displacement":
            self.trainer.weights_of = self.channel.read
        self.started = time.monotonic() - (checkpoint.elapsed_s if checkpoint else 0.0)
        self.step_ended, self.step_ended_cpu = time.monotonic(), time.process_time()

    async def run(self) -> None:
        """Train to the last step. Raises Interrupted after a stop on request, with a checkpoint on
        disk.
        """
        self._handle_signals(True)
        if self.evaluates_start:
            self.channel.pin(self.trainer.version)
            self.evaluations.put_nowait((BEFORE_ALL_STEPS, self.trainer.version))
        try:
            async with asyncio.TaskGroup() as loops:
                self.rollouts = loops.create_task(self._rollout(), name="rollout")
                train = loops.create_task(self._train(), name="train")
                others = [
                    self.rollouts,
                    loops.create_task(self._evaluate(), name="evaluate"),
                    loops.create_task(self._save(), name="save"),
                ]
                await train
                await self.evaluations.join()  # theirs are rows of steps that are done
                await self.saves.join()
                for loop in others:
                    loop.cancel()
        except BaseExceptionGroup as errors:
            error = first_error(errors)
            raise error from error.__cause__  # the cause may be the user's own code
        finally:
            self._handle_signals(False)
            self.rows.abandon()
        if self.interrupted:
            await self._stop()

    # ---- the four loops ----

    async def _rollout(self) -> None:
        slots = asyncio.Semaphore(REQUESTS_IN_FLIGHT * self.config.engine.replicas)
        batch_groups = self.config.engine.batch_groups or self.config.rollout.groups_per_step
        async with asyncio.TaskGroup() as requests:
            while True:
                await slots.acquire()
                self.parts.progress.waiting("rollout", "a free place")
                with self.timings.measure("wait_for_places_s"):
                    indices = await self.buffer.admit(batch_groups)
                self.parts.progress.waiting("rollout", None)
                request = requests.create_task(self._request(indices))
                request.add_done_callback(lambda _: slots.release())

    async def _train(self) -> None:
        for step in range(self.steps_done, self.config.train.steps):
            self.parts.progress.waiting("train", "groups")
            with self.timings.measure("wait_for_groups_s"):
                groups = await self.buffer.take(self.trainer.version)
            self.parts.progress.waiting("train", None)
            if groups is None:
                return
            report = await self._finish(asyncio.to_thread(self._step, groups, step))
            self.steps_done = step + 1
            self.versions_after[self.steps_done] = report.version
            self._forget_versions()
            self.buffer.step_over()
            await self._after_step(step, groups, report)

    async def _evaluate(self) -> None:
        while True:
            step, version = await self.evaluations.get()
            evaluation = await self.evaluator.evaluate(version)
            self.channel.unpin(version)
            before = step == BEFORE_ALL_STEPS
            self.rows.evaluated(max(step, 0), evaluation.metrics("_start" if before else ""))
            self.parts.progress.evaluated(step, evaluation.accuracy)
            self.evaluations.task_done()

    async def _save(self) -> None:
        while True:
            checkpoint = await self.saves.get()
            # a resume keeps the rows of the steps before it: they must be on disk first
            await self.rows.written(checkpoint.step - 1)
            await asyncio.to_thread(self._write, checkpoint)
            self.saves.task_done()

    # ---- what they do ----

    async def _request(self, indices: Sequence[int]) -> None:
        """Generate, score and hand over the groups of one engine request."""
        config = self.config
        prompts = [self.parts.prompts[self.order.prompt_of(index)] for index in indices]
        requests = [
            GenerationRequest(index, prompt.token_ids, config.rollout.group_size)
            for index, prompt in zip(indices, prompts, strict=True)
        ]
        sampling = Sampling(
            temperature=config.engine.temperature,
            max_new_tokens=config.engine.max_new_tokens,
            top_p=config.engine.top_p,
            top_k=config.engine.top_k,
            drop_finished=config.drops_finished,
        )
        generation = await self.waits.within(
            self.engine.generate(requests, sampling, version=self._version_for(indices[0])),
            lambda: f"rollout waited for the engine: groups {indices[0]} to {indices[-1]}",
        )
        groups = [
            Group(index, prompt, completions, generate_s=generation.generate_s / len(indices))
            for index, prompt, completions in zip(
                indices, prompts, generation.completions, strict=True
            )
        ]
        with self.timings.measure("reward_s"):
            groups = await self.waits.within(
                in_daemon_thread(scored, self.task, groups),
                lambda: f"rollout waited for the rewards of groups {indices[0]} to {indices[-1]}",
            )
        self._tell_problems(groups)
        for group in groups:
            if config.rollout.drop_equal_rewards and len(set(group.rewards)) == 1:
                self.dropped.append(group)
                self.buffer.drop(group.index)
            else:
                self.buffer.put(group)

    def _tell_problems(self, groups: Sequence[Group]) -> None:
        """A line the first time that a reward could not be told, for each thing that went wrong."""
        for group in groups:
            for completion, problem in zip(group.completions, group.problems, strict=False):
                if problem and problem not in self.problems_told:
                    self.problems_told.add(problem)
                    self.parts.progress.message(
                        f"reward 0, {problem} (reward/problems counts these), "
                        f"{group.prompt.example.source}: {shorten(completion.text)}"
                    )

    def _version_for(self, index: int) -> int | None:
        """Weights that sample a group: exact mode names them, bounded mode takes the newest."""
        if self.config.rollout.lag_mode == "bounded":
            return None
        step = index // self.config.rollout.groups_per_step
        return self.versions_after[max(0, step - self.config.rollout.max_lag)]

    def _step(self, groups: Sequence[Group], step: int) -> StepReport:
        """In a thread: train on these groups, then publish the weights."""
        report = self.trainer.train(groups, step)
        if report.advanced:
            with self.timings.measure("weight_sync_s"):
                self.channel.publish(report.version, self.trainer.model.named_parameters())
        return report

    async def _finish(self, step: Coroutine[Any, Any, T]) -> T:
        """Await a step; if the run ends meanwhile, first let it come to its end: it publishes."""
        under_way = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            await asyncio.wait([under_way])
            raise

    def _forget_versions(self) -> None:
        """Keep the versions that a rollout can still ask for: those after the last max_lag + 1
        steps.
        """
        first = max(0, self.steps_done - self.config.rollout.max_lag)
        self.versions_after = {k: v for k, v in self.versions_after.items() if k >= first}
        kept = {self.trainer.version}
        if self.config.rollout.lag_mode == "exact":
            kept |= set(self.versions_after.values())
        if self.trainer.weights_of:  # the control reads the weights that sampled a batch
            oldest = self.trainer.version - self.buffer.max_lag_versions
            kept |= set(range(oldest, self.trainer.version))
        self.channel.retain(kept)

    def _stop_if_never_finite(self, step: int, report: StepReport) -> None:
        """A step that is not finite is skipped; a run of them will not heal."""
        non_finite = report.control is not None and report.control.reason == "non-finite"
        self.num_not_finite = self.num_not_finite + 1 if non_finite else 0
        if self.num_not_finite == MAX_NOT_FINITE:
            raise SidestepError(
                f"step {step}: the gradient was not finite in {MAX_NOT_FINITE} steps in a row: "
                f"lower train.learning_rate ({report.learning_rate:g}), set train.max_norm, or use "
                f"model.dtype = float32; the last checkpoint is from before"
            )

    async def _after_step(self, step: int, groups: Sequence[Group], report: StepReport) -> None:
        """Record the step; hand out an evaluation and a checkpoint where they are due."""
        self._stop_if_never_finite(step, report)
        now, cpu = time.monotonic(), time.process_time()
        self.timings.add("step_s", now - self.step_ended)
        self.timings.add("cpu_s", cpu - self.step_ended_cpu)
        seconds = self.timings.collect() | {"time/elapsed_s": now - self.started}
        self.step_ended, self.step_ended_cpu = now, cpu
        dropped, self.dropped = self.dropped, []
        # Before any wait: rollouts go on, and what they do next is the next row's.
        due = self._is_due(self.config.train.checkpoint_every)
        checkpoint = self._checkpoint() if due else None
        row = step_row(step, report, groups, dropped, self.config.rollout.max_lag, seconds)
        self.parts.recorder.groups(
            [group_row(group, None, EQUAL_REWARDS) for group in dropped]
            + [group_row(group, step, None) for group in groups]
        )
        self.parts.progress.step(row)
        if report.alarm and report.alarm.level == "alarm" and not self.alarmed:
            self.alarmed = True
            self.parts.progress.message(f"step {step}: {report.alarm.reason}")
        evaluate = bool(self.parts.held_out) and self._is_due(self.config.train.eval_every)
        self.rows.add(row, evaluations=evaluate + (self.evaluates_start and step == 0))
        if evaluate:
            self.channel.pin(report.version)
            await self.waits.within(
                self.evaluations.put((step, report.version)),
                lambda: "train waited for the evaluation before this one",
            )
        if checkpoint:
            await self.waits.within(
                self.saves.put(checkpoint),
                lambda: "train waited for the checkpoint before this one",
            )

    def _is_due(self, every: int) -> bool:
        return self.steps_done == self.config.train.steps or (
            every > 0 and self.steps_done % every == 0
        )

    def _checkpoint(self) -> Checkpoint:
        exact = self.config.rollout.lag_mode == "exact"
        needed = set(self.versions_after.values()) if exact else set()
        if self.trainer.weights_of:
            needed |= set(self.channel.versions())
        return Checkpoint(
            step=self.steps_done,
            versions_after=dict(self.versions_after),
            model=self.trainer.copy_of_model(),
            trainer=self.trainer.state_dict(),
            ledger=self.buffer.ledger.state_dict(),
            waiting=self.buffer.ledger.waiting(),
            weights={version: self.channel.read(version) for version in needed},
            elapsed_s=time.monotonic() - self.started,
        )

    def _write(self, checkpoint: Checkpoint) -> Path:
        return write_checkpoint(
            checkpoint,
            self.parts.run_dir / CHECKPOINTS_FOLDER,
            self.trainer.model,
            self.parts.tokenizer,
            self.config.train.keep_checkpoints,
        )

    # ---- ending ----

    def interrupt(self) -> None:
        """Stop after the step under way. A second Ctrl-C ends at once."""
        self.interrupted = True
        self._handle_signals(False)
        self.parts.progress.message("stopping: writing a checkpoint (Ctrl-C again to end at once)")
        self.rollouts.cancel()  # an error of a rollout must not replace the stop
        self.buffer.close()

    async def _stop(self) -> None:
        if self.steps_done == self.config.train.steps:
            return  # every step was done when the request came
        folder = await asyncio.to_thread(self._write, self._checkpoint())
        raise Interrupted(
            f"interrupted after {self.steps_done} of {self.config.train.steps} steps, checkpoint "
            f"{folder}; go on with: sidestep train --run-dir {self.parts.run_dir} --resume"
        )

    def _handle_signals(self, ours: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signals belong to whoever runs the main thread
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            if ours:
                loop.add_signal_handler(number, self.interrupt)
            else:
                loop.remove_signal_handler(number)
