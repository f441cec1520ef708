"""What the callback of trl.py needs from a Hugging Face Trainer beside its events: which trainer it
runs in, what cannot work there, lines of its log, files in its checkpoints.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback, TrainingArguments

from sidestep.control.alarm import AlarmState
from sidestep.control.record import ControlRecord
from sidestep.errors import CheckpointError
from sidestep.integrations.records import log_numbers

FORMAT = 1
STATE_FILE = "sidestep_control.json"
TENSOR_FILE = "sidestep_control.safetensors"

# Sinks of transformers that warn of every text in every line of the log.
_NUMBERS_ONLY = frozenset({"mlflow", "clearml", "dvclive"})

# Of several steps in one line of the log the largest is kept; of all other numbers the mean.
_LARGEST = frozenset({"align/skips_in_a_row", "lag/max"})


@dataclass(frozen=True, slots=True)
class Host:
    """The trainer that calls, and the checkpoint folder its `train()` resumes from."""

    trainer: Trainer
    resumed_from: Path | None

    def calls_first(self, callback: TrainerCallback) -> None:
        """Let `callback` be the first that events reach.

        Reporting callbacks come before a user's, so that what he adds to a log in `on_log` would
        miss their sinks.
        """
        callbacks = self.trainer.callback_handler.callbacks
        callbacks.remove(callback)
        callbacks.insert(0, callback)


def find_host(frame: FrameType | None) -> Host | None:
    """The Trainer whose method is the nearest caller of `frame`; None without one.

    Events carry neither the trainer nor the folder that is resumed from, which may lie anywhere.
    """
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            folder = frame.f_locals.get("resume_from_checkpoint")
            return Host(owner, None if folder is None else Path(folder))
        frame = frame.f_back
    return None


def refuse_unsupported(
    args: TrainingArguments, host: Host | None, model: Any, max_norm: float | None
) -> None:
    """Raise ValueError, naming the way out, for what the callback cannot do."""
    kind = "" if host is None else host.trainer.accelerator.distributed_type.name
    if kind == "DEEPSPEED" or args.deepspeed:
        raise ValueError(
            "SidestepCallback: DeepSpeed keeps the gradients to itself and steps inside its "
            "engine: use sidestep.integrations.deepspeed"
        )
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FullyShardedDataParallel

        if isinstance(model, FullyShardedDataParallel):
            raise ValueError(
                "SidestepCallback: FullyShardedDataParallel (FSDP1) does not say how it lays out "
                "gradients: use FSDP2, fsdp_config={'version': 2}"
            )
    if max_norm is not None and args.max_grad_norm > 0:
        raise ValueError(
            f"SidestepCallback(max_norm={max_norm}) with max_grad_norm={args.max_grad_norm} in the "
            "trainer's arguments would clip twice: set max_grad_norm=0 there, or leave max_norm out"
        )


@dataclass(slots=True)
class StepLog:
    """The optimizer steps since the last line of the trainer's log.

    numbers: of each step, by name. texts: of the last one.
    """

    numbers: list[dict[str, float]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, record: ControlRecord, alarm: AlarmState, lags: list[int]) -> None:
        """lags: of the samples of this step; empty where they are not known."""
        numbers = log_numbers(record, alarm)
        if lags:
            numbers |= {"lag/mean": statistics.fmean(lags), "lag/max": float(max(lags))}
        self.numbers.append(numbers)
        texts = {
            "align/regime": record.regime,
            "align/reason": record.reason,
            "alarm/level": alarm.level,
            "alarm/reason": alarm.reason,
        }
        self.texts = {name: text for name, text in texts.items() if text}

    def write(self, args: TrainingArguments, logs: dict[str, Any], saved: dict[str, Any]) -> None:
        """Add numbers and texts to a line on its way to the sinks and to the same line in the
        trainer's history; begin anew.
        """
        line: dict[str, Any] = {}
        for name in sorted({name for numbers in self.numbers for name in numbers}):
            values = [numbers[name] for numbers in self.numbers if name in numbers]
            line[name] = max(values) if name in _LARGEST else statistics.fmean(values)
        saved.update(line, **self.texts)
        logs.update(line)
        if _NUMBERS_ONLY.isdisjoint(args.report_to or ()):
            logs.update(self.texts)
        self.numbers, self.texts = [], {}


def write_state(
    folder: Path, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a safetensors and a JSON file into a checkpoint. The JSON file is the last to appear,
    so that it never stands for a missing one.
    """
    draft = folder / f".{TENSOR_FILE}"
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, draft)
    os.replace(draft, folder / TENSOR_FILE)
    draft = folder / f".{STATE_FILE}"
    draft.write_text(json.dumps({"format": FORMAT, **state}, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, folder / STATE_FILE)


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """What `write_state` wrote; None if the folder does not have it.

    Raises CheckpointError, naming the file, if it cannot be read.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state = dict(json.loads(path.read_text(encoding="utf-8")))
        tensors = load_file(folder / TENSOR_FILE)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the control's state cannot be read ({error!r}): delete this file to go on "
            "without it"
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {state.get('format')!r}, this version reads {FORMAT}"
        )
    return state, tensors
