"""Hugging Face Trainer and TRL (GRPOTrainer, AsyncGRPOTrainer): one callback.

    from sidestep.integrations.trl import SidestepCallback

    trainer = GRPOTrainer(..., callbacks=[SidestepCallback(GradientControl())])

The control acts in the step hook of the trainer's own optimizer: after gradient accumulation, the
reduction over ranks and the trainer's clipping, and before the update. The callback's events tell
it what the trainer knows about each step (rollout batch, lag), and put what it did into the
trainer's log and checkpoints.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sidestep.control.alarm import Alarm, AlarmState
from sidestep.control.attach import ControlHandle, attach
from sidestep.control.controller import GradientControl, require_control
from sidestep.control.facts import require_max_norm
from sidestep.control.record import ControlRecord
from sidestep.control.sharding import is_sharded
from sidestep.integrations.huggingface import (
    STATE_FILE,
    Host,
    StepLog,
    find_host,
    read_state,
    refuse_unsupported,
    write_state,
)

__all__ = ["SidestepCallback"]

_log = logging.getLogger(__name__)


class SidestepCallback(TrainerCallback):
    """Gradient alignment control in a Hugging Face Trainer or one of TRL's.

    control: what is measured and done; None: `GradientControl()`.
    max_norm: clip here instead of in the trainer, after control; wants `max_grad_norm=0` in the
        trainer's arguments. None: the trainer clips as it did, before control.
    alarm: when to say "likely to collapse"; None: `Alarm()`.

    handle: the attached control, for a `note` of your own; None outside of `train()`.
    last: record of the last optimizer step.

    Per step the control is told: with GRPOTrainer the rollout batch (several optimizer steps on one
    are aligned for an innocent reason) and the steps since it was sampled; with AsyncGRPOTrainer
    the mean lag of its samples in optimizer steps. Docs: docs/trl.md.

    When training begins, ValueError for DeepSpeed, FSDP1, two clippings, and what `attach` refuses
    (optimizers that step layer by layer).
    """

    def __init__(
        self,
        control: GradientControl | None = None,
        max_norm: float | None = None,
        *,
        alarm: Alarm | None = None,
    ) -> None:
        require_max_norm(max_norm)
        self.control = GradientControl() if control is None else require_control(control)
        self.handle: ControlHandle | None = None
        self.last: ControlRecord | None = None
        self._max_norm = max_norm
        self._alarm = Alarm() if alarm is None else alarm
        self._alarm_state = AlarmState("ok", "")
        self._step_log = StepLog()
        self._moves = 0  # optimizer steps that moved the weights
        self._reuse = _BatchReuse()
        self._rollouts: _AsyncRollouts | None = None
        self._lags: list[int] = []  # of the samples of the step under way
        self._told_unsaved = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._reuse = _BatchReuse()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        self._detach()  # of a training that failed or is tried again with a smaller batch
        host = find_host(sys._getframe(1))
        refuse_unsupported(args, host, model, self._max_norm)
        self.handle = attach(
            getattr(optimizer, "optimizer", optimizer),  # Accelerate's wrapper has no step hooks
            self.control,
            self._max_norm,
            model.named_parameters(),
        )
        if host is not None:
            host.calls_first(self)
            self._resume(host)
        self._reuse.end_step()
        self._rollouts = _async_rollouts(args, train_dataloader)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._rollouts is not None:
            self._rollouts.read(self._moves)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        batch: int | None = None
        step = state.global_step
        self._lags = []
        if self._rollouts is not None:
            lags = self._rollouts.take(self._reuse.num_micro_batches, self._moves)
            if lags is None:
                _log.warning("step %d: samples without a staleness: no lag from here on", step)
                self._rollouts = None
            self._lags = lags or []
        elif _reuses_batches(args):
            batch, lag = self._reuse.look(args, step, self._moves)
            self._lags = [lag]
        if self.handle is not None:
            lag_mean = sum(self._lags) / len(self._lags) if self._lags else None
            self.handle.note(batch=batch, lag=lag_mean)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        record = None if self.handle is None else self.handle.last
        if record is None or record is self.last:
            return  # GradScaler found infinities and left the optimizer out
        self.last = record
        self._moves += record.regime != "skip"
        before = self._alarm_state
        self._alarm_state = self._alarm.update(
            cosine=record.cosine, norm=record.norm_gradient, excess=record.excess
        )
        if self._alarm_state.level == "alarm" != before.level and state.is_world_process_zero:
            _log.warning("step %d: %s", state.global_step, self._alarm_state.reason)
        self._step_log.add(record, self._alarm_state, self._lags)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._reuse.end_micro_batch()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._reuse.end_micro_batch()
        self._reuse.end_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Lines of an evaluation and of the end have no loss.
        if logs is not None and "loss" in logs and self._step_log.numbers:
            self._step_log.write(args, logs, state.log_history[-1])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.should_save or args.save_only_model:
            return
        folder = Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        saved = self.control.state_dict()
        tensors = saved.pop("snapshot")
        if any(map(is_sharded, tensors.values())) or not folder.is_dir():
            self._tell_unsaved(folder)
            return
        own = {
            "control": saved,
            "alarm": self._alarm.state_dict(),
            "alarm_level": self._alarm_state.level,
            "log": {"numbers": self._step_log.numbers, "texts": self._step_log.texts},
        }
        write_state(folder, own, tensors)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.handle is not None:
            self.handle.detach()
            self.handle = None

    def _resume(self, host: Host) -> None:
        folder = host.resumed_from
        if folder is None:
            return
        found = read_state(folder)
        if found is None:
            _log.warning(
                "%s has no %s: the control begins anew, without a reference for the next step",
                *(folder, STATE_FILE),
            )
            return
        state, tensors = found
        self.control.load_state_dict({**state["control"], "snapshot": tensors})
        self._alarm.load_state_dict(state["alarm"])
        self._alarm_state = AlarmState(state["alarm_level"], "")
        self._step_log = StepLog(**state["log"])

    def _tell_unsaved(self, folder: Path) -> None:
        if not self._told_unsaved:
            self._told_unsaved = True
            _log.warning(
                "%s: the control's state is not saved (%s): a resumed run begins without a "
                "reference",
                *(folder, "sharded parameters" if folder.is_dir() else "no such folder"),
            )


class _BatchReuse:
    """Which rollout batch an optimizer step of GRPOTrainer is made of.

    It samples one for every `steps_per_generation * num_iterations` micro-batches, counted since it
    was made (so this counts them too), and for the first one after a resume.
    """

    def __init__(self) -> None:
        self._done = 0  # micro-batches
        self._first = 0  # the first micro-batch of the optimizer step under way
        self._generation = -1
        self._sampled = 0, 0  # global step and moves when the batch was sampled

    @property
    def num_micro_batches(self) -> int:
        """Of the optimizer step that is about to be made: its last one has not ended yet."""
        return self._done - self._first + 1

    def end_micro_batch(self) -> None:
        self._done += 1

    def end_step(self) -> None:
        self._first = self._done

    def look(self, args: Any, step: int, moves: int) -> tuple[int | None, int]:
        """Name of the rollout batch, the step that sampled it; and how many steps ago in which the
        weights moved. No name where a step takes micro-batches of more than one.
        """
        every = args.steps_per_generation * args.num_iterations
        first, last = self._first // every, self._done // every
        if last != self._generation:
            self._generation, self._sampled = last, (step, moves)
        sampled_at, moves_then = self._sampled
        return (sampled_at if first == last else None), moves - moves_then


def _reuses_batches(args: TrainingArguments) -> bool:
    return bool(getattr(args, "steps_per_generation", 0) and getattr(args, "num_iterations", 0))


class _AsyncRollouts:
    """Lag of the samples in each optimizer step of AsyncGRPOTrainer, on its main process.

    Its `sample/staleness_mean` counts weight syncs, at the moment a sample leaves the queue: one
    sample after the other, a micro-batch ahead of the training. Micro-batches are made of them in
    this order, `batch/samples_per_row` says of how many. Here they are followed up to the step that
    trains on them, and versions become optimizer steps by when they went live.
    """

    def __init__(self, dataset: Any, num_rows: int) -> None:
        self._model_version = dataset.model_version_fn
        self._max_staleness = dataset.max_staleness
        self._num_rows = num_rows
        self._staleness = _Sink(dataset.metrics, "sample/staleness_mean")
        self._sizes = _Sink(dataset.metrics, "batch/samples_per_row")
        self._oversize = _Sink(dataset.metrics, "batch/dropped_oversize_total")
        self._live: dict[int, int] = {}  # version -> moves made when it went live
        self._versions: deque[int] = deque()  # of the samples in no optimizer step yet
        self._micro_batches: deque[int] = deque()  # numbers of samples

    def read(self, moves: int) -> None:
        """See what came out of the queue; when an optimizer step begins.

        Weights are synced when a step ends and the queue is read before the next one begins, so all
        that is new was taken at the present version.
        """
        version = self._model_version()
        self._live.setdefault(version, moves)
        self._versions.extend(version - round(staleness) for staleness in self._staleness.new())
        self._micro_batches.extend(round(self._num_rows * mean) for mean in self._sizes.new())
        for _ in self._oversize.new():  # one of the samples counted above; which is not said
            self._versions.popleft()
        for past in [past for past in self._live if past < version - self._max_staleness - 2]:
            del self._live[past]

    def take(self, num_micro_batches: int, moves: int) -> list[int] | None:
        """Lag of each sample of the optimizer step under way; None if they were not all seen."""
        if len(self._micro_batches) < num_micro_batches:
            return None
        size = sum(self._micro_batches.popleft() for _ in range(num_micro_batches))
        if len(self._versions) < size:
            return None
        oldest = min(self._live)  # stands for what was sampled before a resume
        return [moves - self._live[max(oldest, self._versions.popleft())] for _ in range(size)]


class _Sink:
    """What is new in one list of the trainer's metrics, which it empties with every log."""

    def __init__(self, metrics: Any, key: str) -> None:
        self._metrics, self._key = metrics, key
        self._list: list[float] = []
        self._seen = 0

    def new(self) -> Iterator[float]:
        values = self._metrics.get(self._key, [])
        if values is not self._list:
            self._list, self._seen = values, 0
        seen, self._seen = self._seen, len(values)
        return iter(values[seen:])


def _async_rollouts(args: TrainingArguments, dataloader: Any) -> _AsyncRollouts | None:
    """AsyncGRPOTrainer's queue of samples behind its dataloader; None elsewhere."""
    kinds = {kind.__name__ for kind in type(args).__mro__}
    if "AsyncGRPOConfig" not in kinds or args.process_index != 0:
        return None  # other ranks are handed ready micro-batches
    dataset = getattr(dataloader, "dataset", None)
    while dataset is not None and not hasattr(dataset, "model_version_fn"):
        dataset = getattr(dataset, "dataset", None)
    if dataset is None:
        _log.warning(
            "no queue of samples (RolloutQueueDataset) behind the dataloader of AsyncGRPOTrainer, "
            "as trl 1.16 has it: the control is not told the lag; note it yourself, "
            "callback.handle.note(lag=...)"
        )
        return None
    return _AsyncRollouts(dataset, args.world_size)
