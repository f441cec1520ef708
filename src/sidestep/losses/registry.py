"""Every choice a recipe can name, with its function, settings, equation and source.

The one home of these facts: docs/losses.md's tables are made from it (`sidestep.losses.page`), and
the trainer, the configuration and `doctor` look names up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from sidestep.losses import advantages, corrections, policy, policy_batch, policy_unclipped
from sidestep.losses.corrections import Correction
from sidestep.losses.inputs import PolicyInputs, PolicyTerm
from sidestep.losses.options import NoOptions

Ratio = Literal["anchor", "behaviour"]


@dataclass(frozen=True, slots=True)
class AnchorEntry:
    """What the ratio r is taken to. `needs`: of the trainer. Function: `anchor_logprobs`."""

    name: str
    ratio: str
    weight: str
    meaning: str
    needs: str
    source: str


@dataclass(frozen=True, slots=True)
class AdvantageEntry:
    """function(rewards_G, num_tokens_G) -> advantages_G. min_group: smallest group that learns.

    whole_batch: all groups of the step must be handed over at once (or their moments).
    """

    name: str
    function: Callable[..., torch.Tensor]
    equation: str
    source: str
    min_group: int
    whole_batch: bool = False


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy loss: `term(inputs, options)`, and for some `statistics(batch, options)` before.

    ratio: what it divides by: the anchor chosen, or always the behaviour policy.
    whole_rows: reads whole sequences.
    statistics: reads every micro-batch of the optimizer step without gradient; its answer goes to
    `term`.
    """

    name: str
    function: Callable[..., PolicyTerm]
    options: type
    equation: str
    source: str
    ratio: Ratio = "anchor"
    whole_rows: bool = False
    statistics: Callable[[Iterable[PolicyInputs], Any], Any] | None = None

    def term(self, inputs: PolicyInputs, options: Any, statistics: Any = None) -> PolicyTerm:
        """Loss per token of one micro-batch.

        Raises ValueError if options are another loss's, or if the loss needs statistics and got
        none.
        """
        _check_options(self.name, self.options, options)
        if self.statistics is None:
            return self.function(inputs, options)
        if statistics is None:
            raise ValueError(
                f"policy {self.name!r} needs statistics= of the whole optimizer batch: call its "
                f"`statistics` with every micro-batch first"
            )
        return self.function(inputs, options, statistics)


@dataclass(frozen=True, slots=True)
class CorrectionEntry:
    """A correction: `apply(inputs, options)`.

    weighs: multiplies the loss by w. reads: the ratio it looks at, w or rho.
    """

    name: str
    function: Callable[..., Correction]
    options: type
    equation: str
    source: str
    weighs: bool
    reads: Literal["nothing", "w", "rho"] = "w"
    whole_rows: bool = False

    def apply(self, inputs: PolicyInputs, options: Any) -> Correction:
        """Weights and dropped tokens of one micro-batch. Raises ValueError like `term`."""
        _check_options(self.name, self.options, options)
        return self.function(inputs, options)


def _check_options(name: str, wanted: type, options: Any) -> None:
    if not isinstance(options, wanted):
        raise ValueError(
            f"options is a {type(options).__name__}: {name!r} takes {wanted.__name__} "
            f"(`make_options`)"
        )


Entry = TypeVar("Entry", AnchorEntry, AdvantageEntry, PolicyEntry, CorrectionEntry)


def _by_name(*entries: Entry) -> dict[str, Entry]:
    return {entry.name: entry for entry in entries}


ANCHORS: dict[str, AnchorEntry] = _by_name(
    AnchorEntry(
        "behaviour",
        "rho",
        "1",
        "the policy that sampled: the ratio already corrects for stale data, no further weight",
        "nothing",
        "PPO, arXiv 1707.06347",
    ),
    AnchorEntry(
        "proximal",
        "pi_theta / pi_p",
        "pi_p / pi_mu",
        "the weights before the first step on the batch; w must be applied by a correction",
        "a forward pass before the first step, and several steps on a batch",
        "decoupled PPO, arXiv 2505.24298",
    ),
    AnchorEntry(
        "loglinear",
        "rho^a, a = 1 / lag",
        "rho^(1 - a)",
        "a guess at the proximal policy from the lag of each token; w as for it",
        "the version of every token",
        "A-3PO, arXiv 2512.06547",
    ),
    AnchorEntry(
        "recomputed",
        "1",
        "rho",
        "the current policy itself: no clip ever acts; only a correction sees stale data",
        "nothing",
        "naive asynchrony",
    ),
)

ADVANTAGES: dict[str, AdvantageEntry] = _by_name(
    AdvantageEntry(
        "grpo",
        advantages.grpo_advantages,
        "(R - mean of the group) / (std of the group + 1e-4)",
        "GRPO, arXiv 2402.03300",
        2,
    ),
    AdvantageEntry(
        "dr_grpo",
        advantages.centred_advantages,
        "R - mean of the group",
        "Dr.GRPO, arXiv 2503.20783",
        2,
    ),
    AdvantageEntry(
        "rloo",
        advantages.rloo_advantages,
        "R - mean of the other members",
        "RLOO, arXiv 2402.14740",
        2,
    ),
    AdvantageEntry(
        "reinforce_pp",
        advantages.reinforce_pp_advantages,
        "(R - mean of the batch) / (std of the batch + 1e-8), tokens as weights",
        "REINFORCE++, arXiv 2501.03262",
        1,
        whole_batch=True,
    ),
    AdvantageEntry(
        "reinforce_pp_baseline",
        advantages.reinforce_pp_baseline_advantages,
        "the same of R - mean of the group",
        "REINFORCE++ with baseline, arXiv 2501.03262",
        2,
        whole_batch=True,
    ),
)

POLICIES: dict[str, PolicyEntry] = _by_name(
    PolicyEntry(
        "ppo",
        policy.ppo,
        policy.PPOOptions,
        "-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)",
        "PPO, arXiv 1707.06347; two bounds: DAPO, arXiv 2503.14476",
    ),
    PolicyEntry(
        "dual_clip",
        policy.dual_clip,
        policy.DualClipOptions,
        "ppo; where A < 0 at most -dual_clip A",
        "arXiv 1912.09729",
    ),
    PolicyEntry(
        "gspo",
        policy.gspo,
        policy.GSPOOptions,
        "ppo of s = exp(mean over the row of log r)",
        "GSPO, arXiv 2507.18071",
        whole_rows=True,
    ),
    PolicyEntry(
        "sapo",
        policy_unclipped.sapo,
        policy_unclipped.SAPOOptions,
        "-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A",
        "SAPO, arXiv 2511.20347",
    ),
    PolicyEntry(
        "cispo",
        policy_unclipped.cispo,
        policy_unclipped.CISPOOptions,
        "-sg(min(r, cap)) A log pi_theta",
        "CISPO, arXiv 2506.13585",
    ),
    PolicyEntry(
        "dis",
        policy_unclipped.dis,
        policy_unclipped.DISOptions,
        "-sg(rho 1[1 - clip_low < rho < 1 + clip_high]) A log pi_theta",
        "SAO, arXiv 2607.07508",
        ratio="behaviour",
    ),
    PolicyEntry(
        "dppo_tv",
        policy_unclipped.dppo_tv,
        policy_unclipped.DPPOOptions,
        "-rho A; 0 where pi_theta - pi_mu is beyond delta in the direction of A",
        "DPPO, arXiv 2602.04879",
        ratio="behaviour",
    ),
    PolicyEntry(
        "topr",
        policy_unclipped.topr,
        NoOptions,
        "-A log pi_theta where A > 0; elsewhere times sg(min(prod over the row of rho, 1))",
        "TOPR, arXiv 2503.14286",
        ratio="behaviour",
        whole_rows=True,
    ),
    PolicyEntry(
        "m2po",
        policy_batch.m2po,
        policy_batch.M2POOptions,
        "-rho A; among A > 0, rho > 1 and A < 0, rho < 1 the largest (log rho)^2 masked until "
        "their mean is at most tau",
        "M2PO, arXiv 2510.01161",
        ratio="behaviour",
        statistics=policy_batch.m2po_cut,
    ),
    PolicyEntry(
        "bapo",
        policy_batch.bapo,
        policy_batch.BAPOOptions,
        "-min(r A, clip(r, low, high) A); low, then high, rise until positive tokens have "
        "positive_share of the loss",
        "BAPO, arXiv 2510.18927",
        statistics=policy_batch.bapo_clip,
    ),
)

CORRECTIONS: dict[str, CorrectionEntry] = _by_name(
    CorrectionEntry(
        "none", corrections.no_correction, NoOptions, "1", "", weighs=False, reads="nothing"
    ),
    CorrectionEntry(
        "importance",
        corrections.importance,
        corrections.ImportanceOptions,
        "w 1[w <= cap]",
        "decoupled PPO, arXiv 2505.24298",
        weighs=True,
    ),
    CorrectionEntry(
        "tis",
        corrections.tis,
        corrections.TISOptions,
        "min(w, cap)",
        "truncated importance sampling, Yao et al. 2025",
        weighs=True,
    ),
    CorrectionEntry(
        "icepop",
        corrections.icepop,
        corrections.IcePopOptions,
        "w 1[low <= w <= high]",
        "IcePop (token MIS), arXiv 2510.18855",
        weighs=True,
    ),
    CorrectionEntry(
        "sequence_mis",
        corrections.sequence_mis,
        corrections.SequenceMISOptions,
        "W 1[low <= W <= high], W = prod over the row of w",
        "sequence-level masked importance sampling, verl",
        weighs=True,
        whole_rows=True,
    ),
    CorrectionEntry(
        "geometric",
        corrections.geometric,
        corrections.GeometricOptions,
        "1[low <= exp(mean over the row of log w) <= high]",
        "geometric rejection, verl",
        weighs=False,
        whole_rows=True,
    ),
    CorrectionEntry(
        "opsm",
        corrections.opsm,
        corrections.OPSMOptions,
        "0 for a row with A < 0 and mean(log pi_mu - log pi_theta) > delta, else 1",
        "DeepSeek-V3.2, arXiv 2512.02556",
        weighs=False,
        reads="rho",
        whole_rows=True,
    ),
)
