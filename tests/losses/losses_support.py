"""Batches, and a loss composed as a trainer composes it, for the tests of this folder."""

import torch

from sidestep.losses import (
    CORRECTIONS,
    POLICIES,
    PolicyInputs,
    aggregate,
    combine,
    count_denominators,
    make_options,
)

CONSTANT = 5.0
FIELDS = ("logprobs", "anchor", "behaviour", "advantages", "mask")

# Settings at which, on `random_batch`, every rule acts on some tokens and leaves others alone.
POLICY_OPTIONS = {
    "ppo": {},
    "dual_clip": {"dual_clip": 1.3},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},
    "sapo": {},
    "cispo": {"cap": 1.2},
    "dis": {"clip_high": 0.4},
    "dppo_tv": {"delta": 0.05},
    "topr": {},
    "m2po": {},
    "bapo": {},
}
CORRECTION_OPTIONS = {
    "none": {},
    "importance": {"cap": 1.2},
    "tis": {"cap": 1.2},
    "icepop": {"low": 0.8, "high": 1.2},
    "sequence_mis": {"low": 0.7, "high": 1.5},
    "geometric": {"low": 0.95, "high": 1.1},
    "opsm": {"delta": 0.02},
}


def policy_options(name):
    return make_options(POLICIES[name].options, **POLICY_OPTIONS[name])


def correction_options(name):
    return make_options(CORRECTIONS[name].options, **CORRECTION_OPTIONS[name])


def random_batch(seed=7, num_sequences=8, num_tokens=5, dtype=torch.float64):
    """Tensors in the order of FIELDS. Rows of 0, 1, ... tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sequences, num_tokens)

    def noise(scale):
        return scale * torch.randn(shape, generator=generator, dtype=dtype)

    logprobs = -noise(1.0).abs() - 0.1
    anchor, behaviour = (logprobs + noise(0.15)).clamp(max=0), (logprobs + noise(0.3)).clamp(max=0)
    advantages = torch.randn(num_sequences, 1, generator=generator, dtype=dtype).expand(shape)
    lengths = torch.arange(num_sequences) % (num_tokens + 1)
    mask = (torch.arange(num_tokens) < lengths[:, None]).to(dtype)
    return logprobs, anchor, behaviour, advantages.clone(), mask


def loss_and_gradient(
    policy,
    batch,
    sizes=None,
    *,
    correction="none",
    aggregation="token",
    options=None,
    corrected_by=None,
):
    """Loss and its gradient to the log-probabilities, by micro-batches of `sizes` rows."""
    logprobs = batch[0].clone().requires_grad_()
    sizes = sizes or [len(logprobs)]
    denominators = count_denominators(batch[-1])
    columns = [tensor.split(sizes) for tensor in (logprobs, *batch[1:])]
    parts = [PolicyInputs(*part) for part in zip(*columns, strict=True)]
    entry = POLICIES[policy]
    options = options or policy_options(policy)
    statistics = entry.statistics(parts, options) if entry.statistics else None
    total = 0.0
    for part in parts:
        names = [correction] if isinstance(correction, str) else correction
        corrected = combine(
            [CORRECTIONS[n].apply(part, corrected_by or correction_options(n)) for n in names]
        )
        loss_BT = corrected.weight_BT * entry.term(part, options, statistics).loss_BT
        share = aggregate(aggregation, loss_BT, part.mask_BT, denominators, CONSTANT)
        share.backward()
        total += share.item()
    return total, logprobs.grad


def one_row(pi, mu, advantages, p=None):
    """PolicyInputs of one or several full rows from probabilities (nested lists)."""

    def log(values):
        return torch.tensor(values, dtype=torch.float64).log()

    logprobs = log(pi).requires_grad_()
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return PolicyInputs(
        logprobs, log(mu if p is None else p), log(mu), advantages, torch.ones_like(advantages)
    )
