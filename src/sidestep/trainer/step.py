"""Train on one rollout batch: log-probabilities -> loss -> backward -> control -> optimizer.

    rollout batch --whole groups--> mini-batches: one optimizer step each, in every epoch
        mini-batch --rows--> micro-batches: their gradients add up

Shapes: _B sequences, _T completion tokens, _L prompt and completion tokens (types.Batch).
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sidestep.config import RunConfig
from sidestep.control.alarm import Alarm, AlarmState
from sidestep.control.attach import attach
from sidestep.control.controller import ControlRecord, GradientControl
from sidestep.control.expected import Halves
from sidestep.errors import CheckpointError
from sidestep.losses import (
    Denominators,
    LagTable,
    PolicyInputs,
    RatioSums,
    count_denominators,
    ess_learning_rate_factor,
)
from sidestep.trainer.accounting import untrained_completions
from sidestep.trainer.batch import make_batch
from sidestep.trainer.behaviour import BehaviourWeights, Weights
from sidestep.trainer.forward import choose_layout, completion_logprobs, prepare_layers
from sidestep.trainer.loss import LossSums, objective_of
from sidestep.trainer.numerics import first_group, numerics
from sidestep.trainer.parts import (
    MicroBatch,
    Sample,
    first_half_rows,
    micro_batches,
    mini_batches,
    rows_of,
    to_device,
)
from sidestep.trainer.random_skip import is_skipped, skip_record
from sidestep.trainer.reference_model import reference_model
from sidestep.trainer.schedule import learning_rate_at
from sidestep.trainer.work import work_of
from sidestep.types import Batch, Group


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What one optimizer step did. `control` is None when there was no trained token and so no step
    (`advanced` False).
    """

    advanced: bool
    learning_rate: float
    sums: LossSums
    lag_counts: dict[int, int]
    control: ControlRecord | None


@dataclass(frozen=True, slots=True)
class StepReport:
    """What training on one rollout batch did, over all its optimizer steps.

    advanced: the weights changed at least once. version: after all of them.
    loss: mean over the optimizer steps. kl_reference: mean of the penalty's estimate over trained
    tokens; None without one in the loss. lag_counts: lag -> trained tokens.
    control: of the first optimizer step. The later ones are of the same rollout batch, so their
    cosines say nothing about staleness; `last_control` has the last of them.
    added_to_reward: mean over trained sequences, by name. untrained: completions without a token in
    the loss, by reason. numerics, work: metrics by name.
    """

    advanced: bool
    version: int
    loss: float
    learning_rate: float
    off_policy: LagTable
    kl_reference: float | None
    lag_counts: dict[int, int]
    control: ControlRecord | None
    last_control: ControlRecord | None
    num_optimizer_steps: int
    train_s: float
    train_cpu_s: float
    alarm: AlarmState | None = None
    added_to_reward: Mapping[str, float] = field(default_factory=dict)
    untrained: Mapping[str, int] = field(default_factory=dict)
    numerics: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def ratios(self) -> RatioSums:
        """Ratios over all lags."""
        return self.off_policy.total.ratios


class Trainer:
    """Model, optimizer and control, and the version they are at. Not thread-safe: one step at a
    time.
    """

    def __init__(self, model: Any, config: RunConfig, device: torch.device) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.version = 0
        self.objective = objective_of(config)
        self.reference = reference_model(model, config, device)
        self.layout = choose_layout(config.train, model, self.reference)
        prepare_layers(model, config.train)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.train.learning_rate,
            betas=config.train.betas,
            eps=config.train.adam_eps,
            weight_decay=config.train.weight_decay,
        )
        control = GradientControl(**config.control.arguments())
        self.handle = attach(
            self.optimizer,
            control,
            max_norm=config.train.max_norm,
            named_parameters=model.named_parameters(),
        )
        self.alarm = Alarm(**config.alarm.model_dump())
        # Weights of a past version, for a control that compares with them; the run says where from.
        self.weights_of: Callable[[int], Weights] | None = None

    def train(self, groups: Sequence[Group], step: int) -> StepReport:
        """Make the batch of `groups` and train on it; see `step`."""
        made = make_batch(groups, self.config, self._reference_logprobs)
        return replace(
            self.step(made.batch, step),
            added_to_reward=made.added_to_reward,
            untrained=untrained_completions(groups, self.config.rollout.mask_truncated),
        )

    def step(self, batch: Batch, step: int) -> StepReport:
        """Train on the rollout batch of iteration `step`: `train.optimizer_steps_per_batch`
        optimizer steps.

        One that is skipped, or has no trained token, leaves weights and version as they are.
        """
        started, cpu_started = time.perf_counter(), time.process_time()
        config = self.config.train
        samples = [self._sample(part) for part in mini_batches(batch, config.steps_per_batch)]
        rounding = self._numerics(batch, step)
        done = [
            self._optimizer_step(sample, step)
            for _ in range(config.epochs_per_batch)
            for sample in samples
        ]
        cpu_s = time.process_time() - cpu_started
        report = _report(done, self.version, time.perf_counter() - started, cpu_s)
        work = work_of(batch, self.layout, config, self.device)
        return replace(report, alarm=self._alarm(report), numerics=rounding, work=work)

    def copy_of_model(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by their own names, tied ones once, on the CPU."""
        return {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._named_tensors().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model, copied: training may go on while it is written."""
        return {
            "version": self.version,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "control": self.handle.state_dict(),
            "alarm": self.alarm.state_dict(),
            "random": {"cpu": torch.get_rng_state(), "device": device_random_state(self.device)},
        }

    def load_state_dict(self, model: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Continue exactly where `copy_of_model` and `state_dict` were taken."""
        own = self._named_tensors()
        missing, unknown = sorted(own.keys() - model.keys()), sorted(model.keys() - own.keys())
        if missing or unknown:
            raise CheckpointError(
                f"the checkpoint is not of this model (model.path): missing {missing[:3]}, "
                f"unknown {unknown[:3]}"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(model[name])
        self.version = state["version"]
        moments = {int(index): moment for index, moment in state["optimizer"]["state"].items()}
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        self.handle.load_state_dict(state["control"])
        self.alarm.load_state_dict(state["alarm"])
        torch.set_rng_state(state["random"]["cpu"])
        if state["random"]["device"] is not None:
            torch.cuda.set_rng_state(state["random"]["device"], self.device)

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers, tied ones under their first name only."""
        named = self.model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(named.items())}
        return {name: named[name] for name in named if first[id(named[name])] == name}

    def _sample(self, batch: Batch) -> Sample:
        """A mini-batch with the other policies that the loss asks for, before any step on it."""
        objective = self.objective
        proximal_BT = reference_BT = None
        if objective.anchor == "proximal":
            proximal_BT = self._fixed_logprobs(self.model, batch)
        if objective.kl_coef > 0:
            reference_BT = self._reference_logprobs(batch)
        return Sample(batch, proximal_BT, reference_BT)

    def _reference_logprobs(self, batch: Batch) -> torch.Tensor:
        return self._fixed_logprobs(self.reference, batch)

    @torch.no_grad()
    def _fixed_logprobs(self, model: Any, batch: Batch) -> torch.Tensor:
        """logprobs_BT under `model`, without gradient, on the CPU; 0 where nothing is trained."""
        logprobs_BT = torch.zeros_like(batch.mask_BT)
        for part in micro_batches(batch, self.layout, self.config.train):
            of_part = Sample(batch).of(part).batch
            values = self._logprobs(model, to_device(of_part, self.device), part)
            logprobs_BT[part.rows, : of_part.mask_BT.shape[1]] = values.cpu()
        return logprobs_BT

    def _logprobs(self, model: Any, moved: Batch, part: MicroBatch) -> torch.Tensor:
        config = self.config
        autocast = config.train.precision == "bfloat16"
        return completion_logprobs(
            model, moved, config.engine.temperature, part.packs, autocast=autocast
        )

    def _optimizer_step(self, sample: Sample, step: int) -> OptimizerStep:
        """One optimizer step on a mini-batch. Without a trained token nothing changes."""
        lag_counts = count_lags(sample.batch, self.version)
        denominators = count_denominators(sample.batch.mask_BT)
        learning_rate = learning_rate_at(self.version, self.config.train)
        halves = self._halves(sample, step)
        sums = self._backward(sample, denominators, halves)
        total = sums.off_policy.total
        if self.config.train.ess_learning_rate:
            learning_rate *= ess_learning_rate_factor(total.sequences.ess)
        advanced, record = False, None
        if is_skipped(self.config.train.skip_share, self.config.seed, step):
            record = skip_record(step)
        elif denominators.num_tokens > 0:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.handle.note(
                batch=step,
                lag=mean_lag(lag_counts),
                drift=finite(total.ratios.drift),
                behaviour=self._behaviour(lag_counts),
                expected=halves.expected() if halves else None,
            )
            record = self._optimize()
            advanced = record.regime != "skip"
        self.optimizer.zero_grad(set_to_none=True)
        self.version += advanced
        return OptimizerStep(advanced, learning_rate, sums, lag_counts, record)

    def _backward(
        self, sample: Sample, denominators: Denominators, halves: Halves | None = None
    ) -> LossSums:
        """Gradients of the whole mini-batch's loss, micro-batch by micro-batch under one
        denominator. With `halves` no micro-batch crosses the middle, where they are split.
        """
        objective, version = self.objective, self.version
        num_rows = sample.batch.num_sequences
        middle = first_half_rows(sample.batch) if halves else num_rows
        halved = [sample.rows(rows) for rows in (slice(middle), slice(middle, num_rows))]
        cuts = [micro_batches(half.batch, self.layout, self.config.train) for half in halved]
        parts = [
            (half.of(part), part) for half, cut in zip(halved, cuts, strict=True) for part in cut
        ]
        statistics = None
        if objective.policy.statistics is not None:
            with torch.no_grad():
                statistics = objective.statistics(
                    self._inputs(chosen.to(self.device), part) for chosen, part in parts
                )
        sums = LossSums()
        for i, (chosen, part) in enumerate(parts):
            if halves and i == len(cuts[0]):
                halves.split()
            moved = chosen.to(self.device)
            inputs = self._inputs(moved, part)
            loss, of_part = objective.loss(inputs, moved, version, denominators, statistics)
            loss.backward()  # type: ignore[no-untyped-call]
            sums += of_part
        return sums

    def _inputs(self, moved: Sample, part: MicroBatch) -> PolicyInputs:
        logprobs_BT = self._logprobs(self.model, moved.batch, part)
        return self.objective.inputs(logprobs_BT, moved, self.version)

    def _numerics(self, batch: Batch, step: int) -> dict[str, float]:
        """What rounding alone does, where its measurement is due; see `numerics`."""
        config = self.config
        every = config.train.numerics_every
        rows = first_group(batch) if every and step % every == 0 else []
        if not rows:
            return {}
        in_batch_BT = self._fixed_logprobs(self.model, batch)[rows].to(self.device)
        group = to_device(rows_of(batch, rows), self.device)
        autocast = config.train.precision == "bfloat16"
        return numerics(self.model, group, in_batch_BT, config.engine.temperature, autocast)

    def _halves(self, sample: Sample, step: int) -> Halves | None:
        """Where this step's expected cosine is due and its mini-batch has two groups or more."""
        every = self.config.control.expected_every
        if every == 0 or step % every != 0 or len(set(sample.batch.group_indices)) < 2:
            return None
        if not sample.batch.mask_BT.any():
            return None
        return Halves(self.model.named_parameters())

    def _behaviour(self, lag_counts: Mapping[int, int]) -> BehaviourWeights | None:
        if self.weights_of is None:
            return None
        tokens_of = {self.version - lag: tokens for lag, tokens in lag_counts.items()}
        return BehaviourWeights(tokens_of, self.weights_of)

    def _alarm(self, report: StepReport) -> AlarmState:
        """What the alarm says after this step; a step without a record tells it nothing."""
        control = report.control
        return self.alarm.update(
            cosine=control.cosine if control else None,
            norm=control.norm_gradient if control else None,
            ess=finite(report.ratios.ess),
            excess=control.excess if control else None,
        )

    def _optimize(self) -> ControlRecord:
        self.optimizer.step()
        record = self.handle.last
        if record is None:
            raise RuntimeError("the control made no record of this step: its hook is gone")
        return record


def finite(value: float | None) -> float | None:
    """None for what is no number: a NaN in the forward pass is the control's to skip."""
    return value if value is not None and math.isfinite(value) else None


def device_random_state(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def count_lags(batch: Batch, version: int) -> dict[int, int]:
    """Trained tokens by lag."""
    lags = (version - batch.versions_BT)[batch.mask_BT != 0]
    return dict(sorted(Counter(lags.tolist()).items()))


def mean_lag(lag_counts: dict[int, int]) -> float:
    total = sum(lag_counts.values())
    return sum(lag * count for lag, count in lag_counts.items()) / total if total else 0.0


def _report(
    done: Sequence[OptimizerStep], version: int, train_s: float, train_cpu_s: float
) -> StepReport:
    sums = sum((one.sums for one in done), LossSums())
    lag_counts = sum((Counter(one.lag_counts) for one in done), Counter())
    num_tokens = sum(lag_counts.values())
    records = [one.control for one in done if one.control is not None]
    return StepReport(
        advanced=any(one.advanced for one in done),
        version=version,
        loss=sums.loss / len(done),
        learning_rate=done[-1].learning_rate,
        off_policy=sums.off_policy,
        kl_reference=None if sums.sum_kl is None or not num_tokens else sums.sum_kl / num_tokens,
        lag_counts=dict(sorted(lag_counts.items())),
        control=records[0] if records else None,
        last_control=records[-1] if records else None,
        num_optimizer_steps=len(done),
        train_s=train_s,
        train_cpu_s=train_cpu_s,
    )
