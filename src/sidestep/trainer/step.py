"""One optimizer step: batch -> log-probabilities -> loss -> backward -> control -> optimizer.

Shapes: _B sequences, _T completion tokens, _L prompt and completion tokens (types.Batch).
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sidestep.config import RunConfig
from sidestep.control.attach import attach
from sidestep.control.controller import ControlRecord, GradientControl
from sidestep.losses import (
    Denominators,
    RatioSums,
    aggregate,
    anchor_logprobs,
    bounded_log_ratio,
    clip_is_active,
    count_denominators,
    importance_ratio,
    ppo_objective,
    ratio_sums,
    token_logprobs,
)
from sidestep.trainer.schedule import learning_rate_at
from sidestep.types import Batch


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did. `control` is None when there was no trained token and so no optimizer step
    (`advanced` False).
    """

    advanced: bool  # the weights changed: the version counted on
    version: int  # after the step
    loss: float
    learning_rate: float
    ratios: RatioSums
    lag_counts: dict[int, int]  # lag -> trained tokens
    control: ControlRecord | None
    train_s: float


class Trainer:
    """Model, optimizer and control, and the version they are at. Not thread-safe: one step at a
    time.
    """

    def __init__(self, model: Any, config: RunConfig, device: torch.device) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.version = 0
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=config.train.learning_rate,
            betas=config.train.betas,
            eps=config.train.adam_eps,
            weight_decay=config.train.weight_decay,
        )
        control = GradientControl(**config.control.model_dump())
        self.handle = attach(
            self.optimizer,
            control,
            max_norm=config.train.max_norm,
            named_parameters=model.named_parameters(),
        )

    def step(self, batch: Batch, step: int) -> StepReport:
        """Train on `batch` once. On a skip, or without a trained token, weights and version stay as
        they are.
        """
        started = time.perf_counter()
        lag_counts = count_lags(batch, self.version)
        denominators = count_denominators(batch.mask_BT)
        learning_rate = learning_rate_at(self.version, self.config.train)
        loss, ratios = self._backward(batch, denominators)
        advanced, record = False, None
        if denominators.num_tokens > 0:
            record = self._optimize(step, learning_rate, lag_counts, ratios.drift)
            advanced = record.regime != "skip"
        self.optimizer.zero_grad(set_to_none=True)
        self.version += advanced
        return StepReport(
            advanced=advanced,
            version=self.version,
            loss=loss,
            learning_rate=learning_rate,
            ratios=ratios,
            lag_counts=lag_counts,
            control=record,
            train_s=time.perf_counter() - started,
        )

    def copy_of_model(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by name, tied ones once, copied."""
        unique = {id(t): (name, t) for name, t in reversed(self._named_tensors())}
        return {name: tensor.detach().clone() for name, tensor in unique.values()}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model, copied: training may go on while it is written."""
        return {
            "version": self.version,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "control": copy.deepcopy(self.handle.state_dict()),
            "random": {"cpu": torch.get_rng_state(), "device": device_random_state(self.device)},
        }

    def load_state_dict(self, model: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Continue exactly where `copy_of_model` and `state_dict` were taken."""
        with torch.no_grad():
            for name, tensor in self._named_tensors():
                if name in model:  # a tied one is there under one name
                    tensor.copy_(model[name])
        self.version = state["version"]
        moments = {int(index): moment for index, moment in state["optimizer"]["state"].items()}
        self.optimizer.load_state_dict({**state["optimizer"], "state": moments})
        self.handle.load_state_dict(state["control"])
        torch.set_rng_state(state["random"]["cpu"])
        if state["random"]["device"] is not None:
            torch.cuda.set_rng_state(state["random"]["device"], self.device)

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.state_dict(keep_vars=True).items())

    def _backward(self, batch: Batch, denominators: Denominators) -> tuple[float, RatioSums]:
        """Gradients of the whole batch's loss, micro-batch by micro-batch under one denominator."""
        total, ratios = 0.0, RatioSums()
        for micro in micro_batches(batch, self.config.train.micro_batch_size):
            loss, sums = self._loss(to_device(micro, self.device), denominators)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            ratios += sums
        return total, ratios

    def _loss(self, batch: Batch, denominators: Denominators) -> tuple[torch.Tensor, RatioSums]:
        config = self.config.loss
        clip = config.clip_low, config.clip_high
        logprobs_BT = completion_logprobs(self.model, batch, self.config.engine.temperature)
        anchor_BT = anchor_logprobs(config.anchor, logprobs_BT, batch.behaviour_logprobs_BT)
        ratio_BT = importance_ratio(bounded_log_ratio(logprobs_BT, anchor_BT, batch.mask_BT))
        loss_BT = ppo_objective(ratio_BT, batch.advantages_BT, *clip)
        constant = self.config.engine.max_new_tokens if config.aggregation == "constant" else None
        loss = aggregate(config.aggregation, loss_BT, batch.mask_BT, denominators, constant)
        with torch.no_grad():
            to_behaviour_BT = bounded_log_ratio(
                logprobs_BT, batch.behaviour_logprobs_BT, batch.mask_BT
            )
            clipped_BT = clip_is_active(ratio_BT, batch.advantages_BT, *clip)
            return loss, ratio_sums(to_behaviour_BT, clipped_BT, batch.mask_BT)

    def _optimize(
        self, step: int, learning_rate: float, lag_counts: dict[int, int], drift: float | None
    ) -> ControlRecord:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.handle.note(batch=step, lag=mean_lag(lag_counts), drift=drift)
        self.optimizer.step()
        record = self.handle.last
        if record is None:
            raise RuntimeError("the control made no record of this step: its hook is gone")
        return record


def completion_logprobs(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Log-probabilities (float32, nats) of the completion tokens under the model: logprobs_BT, with
    gradient.
    """
    num_tokens = batch.mask_BT.shape[1]
    position_ids_BL = (batch.attention_mask_BL.cumsum(dim=1) - 1).clamp(min=0)
    logits = model(
        input_ids=batch.token_ids_BL,
        attention_mask=batch.attention_mask_BL,
        position_ids=position_ids_BL,
        logits_to_keep=num_tokens + 1,
        use_cache=False,
    ).logits
    # the logits at a position predict the token after it
    return token_logprobs(logits[:, :-1], batch.token_ids_BL[:, -num_tokens:], temperature)


def micro_batches(batch: Batch, size: int | None) -> Iterator[Batch]:
    """Consecutive rows, `size` at a time (None: all of them)."""
    size = size or batch.num_sequences
    for start in range(0, batch.num_sequences, size):
        rows = slice(start, start + size)
        yield Batch(**{field.name: getattr(batch, field.name)[rows] for field in fields(batch)})


def to_device(batch: Batch, device: torch.device) -> Batch:
    return replace(
        batch,
        token_ids_BL=batch.token_ids_BL.to(device),
        attention_mask_BL=batch.attention_mask_BL.to(device),
        mask_BT=batch.mask_BT.to(device),
        behaviour_logprobs_BT=batch.behaviour_logprobs_BT.to(device),
        advantages_BT=batch.advantages_BT.to(device),
    )


def device_random_state(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def count_lags(batch: Batch, version: int) -> dict[int, int]:
    """Trained tokens by lag."""
    lags = (version - batch.versions_BT)[batch.mask_BT != 0]
    return dict(sorted(Counter(lags.tolist()).items()))


def mean_lag(lag_counts: dict[int, int]) -> float:
    total = sum(lag_counts.values())
    return sum(lag * count for lag, count in lag_counts.items()) / total if total else 0.0
