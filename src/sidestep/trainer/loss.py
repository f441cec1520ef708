"""The loss that a config chooses: micro-batch -> PolicyInputs -> policy loss x correction -> sum.

_B sequences, _T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from sidestep.config import RunConfig
from sidestep.losses import (
    CORRECTIONS,
    POLICIES,
    Aggregation,
    Anchor,
    Correction,
    CorrectionEntry,
    Denominators,
    KLEstimate,
    LagTable,
    PolicyEntry,
    PolicyInputs,
    aggregate,
    anchor_logprobs,
    combine,
    kl_penalty,
    make_options,
    off_policy_sums,
)
from sidestep.trainer.parts import Sample


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a step's loss read, over micro-batches: `a + b` is that of both.

    loss: value of the loss, in nats. sum_kl: of the KL penalty's estimate over trained tokens;
    None without one.
    """

    loss: float = 0.0
    off_policy: LagTable = field(default_factory=LagTable)
    sum_kl: float | None = None

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss,
            self.off_policy + other.off_policy,
            other.sum_kl if self.sum_kl is None else self.sum_kl + (other.sum_kl or 0.0),
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """The choices of the `[loss]` section, looked up. `objective_of` makes it.

    constant: of the aggregation "constant". kl_coef: of the penalty in the loss; 0 for one in the
    reward.
    """

    policy: PolicyEntry
    policy_options: Any
    corrections: tuple[tuple[CorrectionEntry, Any], ...]
    anchor: Anchor
    aggregation: Aggregation
    constant: float
    kl_coef: float
    kl_estimate: KLEstimate

    def inputs(self, logprobs_BT: torch.Tensor, sample: Sample, version: int) -> PolicyInputs:
        """What the policy loss and the corrections read; `version` is the trainer's."""
        batch = sample.batch
        anchor_BT = anchor_logprobs(
            self.anchor,
            logprobs_BT,
            batch.behaviour_logprobs_BT,
            proximal_logprobs_BT=sample.proximal_logprobs_BT,
            lag_BT=version - batch.versions_BT,
        )
        return PolicyInputs(
            logprobs_BT,
            anchor_BT,
            batch.behaviour_logprobs_BT,
            batch.advantages_BT,
            batch.mask_BT,
        )

    def statistics(self, batch: Iterable[PolicyInputs]) -> Any:
        """What the policy loss wants to know of all micro-batches of a step; None: nothing."""
        if self.policy.statistics is None:
            return None
        return self.policy.statistics(batch, self.policy_options)

    def correct(self, inputs: PolicyInputs) -> Correction:
        """All corrections together."""
        return combine([entry.apply(inputs, options) for entry, options in self.corrections])

    def loss(
        self,
        inputs: PolicyInputs,
        sample: Sample,
        version: int,
        denominators: Denominators,
        statistics: Any,
    ) -> tuple[torch.Tensor, LossSums]:
        """This micro-batch's share of the loss, with gradient, and the sums about it."""
        term = self.policy.term(inputs, self.policy_options, statistics)
        correction = self.correct(inputs)
        loss_BT = correction.weight_BT * term.loss_BT
        sum_kl = None
        if sample.reference_logprobs_BT is not None:
            kl_BT = kl_penalty(
                inputs.logprobs_BT, sample.reference_logprobs_BT, inputs.mask_BT, self.kl_estimate
            )
            loss_BT = loss_BT + self.kl_coef * kl_BT
            sum_kl = float(kl_BT.detach().sum())
        loss = aggregate(self.aggregation, loss_BT, inputs.mask_BT, denominators, self.constant)
        lag_BT = version - sample.batch.versions_BT
        table = off_policy_sums(inputs, term, correction, lag_BT)
        return loss, LossSums(float(loss.detach()), table, sum_kl)


def objective_of(config: RunConfig) -> Objective:
    """Look up what `[loss]` names. Raises ValueError for a setting that its loss refuses."""
    loss = config.loss
    policy = POLICIES[loss.policy]
    corrections = tuple(CORRECTIONS[name] for name in loss.corrections)
    # With one step on a batch the proximal policy is the current one: no forward pass for it.
    is_current = loss.anchor == "proximal" and config.train.optimizer_steps_per_batch == 1
    return Objective(
        policy=policy,
        policy_options=make_options(policy.options, **loss.options_of(policy.name)),
        corrections=tuple(
            (entry, make_options(entry.options, **loss.options_of(entry.name)))
            for entry in corrections
        ),
        anchor="recomputed" if is_current else loss.anchor,
        aggregation=loss.aggregation,
        constant=config.engine.max_new_tokens,
        kl_coef=loss.kl_coef if loss.kl_place == "loss" else 0.0,
        kl_estimate=loss.kl_estimator,
    )
