"""Batches for both sides, and Sidestep's loss composed from its parts as its trainer does."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from sidestep.losses import (
    CORRECTIONS,
    POLICIES,
    PolicyInputs,
    aggregate,
    anchor_logprobs,
    combine,
    count_denominators,
    kl_penalty,
    make_options,
)

SEEDS = range(5)
DTYPES = (torch.float64, torch.float32)
GROUPS, MEMBERS, TOKENS = 3, 4, 9
ROWS = GROUPS * MEMBERS
CONSTANT = 7.0
AGGREGATIONS = ("token", "sequence", "constant")


def peer_module(peer, module):
    """The module, if the peer is installed; otherwise the calling test file is skipped.

    A peer that is installed and cannot be imported is an error.
    """
    if find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed here: `make test-peers`", allow_module_level=True)
    return import_module(module)


@dataclass(frozen=True)
class Batch:
    """Log-probabilities and mask (ROWS, TOKENS), advantages and rewards (ROWS,).

    Rows of 1 to TOKENS trained tokens with holes between them, as tool answers leave; junk, though
    finite, stands where the mask is 0. Both sides of every rule are met.
    """

    logprobs: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    rewards: torch.Tensor
    mask: torch.Tensor

    @property
    def advantages_BT(self):
        return self.advantages[:, None].expand_as(self.mask)

    def rows(self, chosen):
        """The same of some rows: a slice, or a flag or index for each."""
        return Batch(*(getattr(self, entry.name)[chosen] for entry in fields(self)))


def make_batch(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    logprobs = -noise(ROWS, TOKENS).abs() - 0.1
    # A drift of the whole row on top of that of each token, or rules about rows never act.
    drift = [noise(ROWS, TOKENS, scale=0.25) + noise(ROWS, 1, scale=0.1) for _ in range(3)]
    lengths = torch.randint(1, TOKENS + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths) & (torch.rand(ROWS, TOKENS, generator=generator) < 0.8)
    mask[:, 0] = True
    tensors = (
        logprobs,
        *((logprobs + shift).clamp(max=-1e-3) for shift in drift),
        noise(ROWS),
        # Eighths: sums and means of four are exact in float32 too.
        torch.randint(-8, 9, (ROWS,), generator=generator) / 8.0,
        mask,
    )
    return Batch(*(tensor.to(dtype) for tensor in tensors))


@dataclass(frozen=True)
class Result:
    """A loss, its gradient to the log-probabilities, and the parts it was made from."""

    loss: torch.Tensor
    gradient: torch.Tensor
    term: object = None
    correction: object = None


def differentiated(function, batch):
    """Result of function(logprobs with gradient) -> loss."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss = function(logprobs)
    loss.backward()
    return Result(loss.detach(), logprobs.grad)


def policy_inputs(batch, logprobs=None, anchor="proximal"):
    logprobs = batch.logprobs if logprobs is None else logprobs
    chosen = anchor_logprobs(anchor, logprobs, batch.behaviour, proximal_logprobs_BT=batch.proximal)
    return PolicyInputs(logprobs, chosen, batch.behaviour, batch.advantages_BT, batch.mask)


def corrected(inputs, corrections):
    """corrections: name -> settings."""
    return combine(
        [
            CORRECTIONS[name].apply(inputs, make_options(CORRECTIONS[name].options, **settings))
            for name, settings in corrections.items()
        ]
    )


def ours(
    batch,
    policy,
    settings=None,
    *,
    anchor="proximal",
    corrections=None,
    aggregation="token",
    kl=None,
    kl_coef=0.0,
):
    """Sidestep's loss of the batch. kl: name of the estimate against batch.reference."""
    entry, parts = POLICIES[policy], {}

    def loss(logprobs):
        inputs = policy_inputs(batch, logprobs, anchor)
        parts["term"] = entry.term(inputs, make_options(entry.options, **(settings or {})))
        parts["correction"] = corrected(inputs, corrections or {"none": {}})
        loss_BT = parts["correction"].weight_BT * parts["term"].loss_BT
        if kl is not None:
            loss_BT = loss_BT + kl_coef * kl_penalty(logprobs, batch.reference, batch.mask, kl)
        denominators = count_denominators(batch.mask)
        return aggregate(aggregation, loss_BT, batch.mask, denominators, CONSTANT)

    result = differentiated(loss, batch)
    return Result(result.loss, result.gradient, **parts)


def over_seeds_and_dtypes(test):
    test = pytest.mark.parametrize("dtype", DTYPES, ids=("float64", "float32"))(test)
    return pytest.mark.parametrize("seed", SEEDS)(test)


def share(flags, batch):
    """Mean over the trained tokens."""
    return flags[batch.mask != 0].to(batch.mask.dtype).mean()


def assert_acts(flags, batch):
    """The rule holds somewhere and not everywhere: without this a comparison says little."""
    assert 0.0 < share(flags, batch) < 1.0
