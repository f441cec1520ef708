"""The adapter for Megatron-Core, on a fake of its chained optimizer (the real one needs a GPU)."""

from types import SimpleNamespace

import pytest
import torch
from hosts_fakes import RATE, FakeChain, FakePart, Recording
from hosts_ranks import found_on
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.integrations import megatron


def chain_of(*sizes, clip=0.0, group=None, counted=lambda parameter: True):
    parameters = [Parameter(torch.ones(size)) for size in sizes]
    parts = [FakePart(Recording([p], lr=RATE), clip, group, counted) for p in parameters]
    return FakeChain(parts), parameters


def test_duplicates_are_changed_on_every_rank_and_counted_on_one():
    """Rank 1 has a slice of its own, and a duplicate of what rank 0 has."""
    both = found_on(2, "hosts_contract_ranks:megatron_slices")
    assert both[0]["record"] == both[1]["record"]
    assert both[0]["record"]["norm_raw"] == pytest.approx((9 + 16 + 5) ** 0.5)
    assert both[0]["record"]["cosine"] == pytest.approx((-9 + 16 + 5) / 30)
    assert both[0]["record"]["regime"] == "project"
    assert both[0]["copy"] == both[1]["copy"]
    assert both[0]["copy"] != [1.0, 2.0]


def test_damp_scales_the_rates_of_one_step():
    chain, (weight,) = chain_of(4)
    handle = megatron.attach(chain, GradientControl(above="damp", high=0.5, damp_power=1.0, low=0))
    weight.grad = torch.tensor([1.0, 0.0, 0.0, 0.0])
    chain.step()
    weight.grad = torch.tensor([3.0, 4.0, 0.0, 0.0])
    before = weight.detach().clone()
    chain.step()
    assert handle.last.regime == "damp"
    moved = (weight.detach() - before).norm().item()
    assert moved == pytest.approx(RATE * 5.0 * handle.last.step_scale)
    assert chain.chained_optimizers[0].param_groups[0]["lr"] == RATE


def test_an_overflow_of_the_host_has_no_record_and_detach_restores():
    chain, (weight,) = chain_of(2)
    handle = megatron.attach(chain, GradientControl())
    chain.chained_optimizers[0].prepare_grads = lambda: True
    weight.grad = torch.ones(2)
    assert chain.step() == (False, None, None)
    assert handle.last is None
    handle.detach()
    assert not {"prepare_grads", "step_with_ready_grads"} & set(vars(chain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda part: setattr(part.config, "use_precision_aware_optimizer", True),
            "decoupled_grad",
        ),
        (lambda part: setattr(part.config, "clip_grad", 1.0), "both would clip"),
        (lambda part: setattr(part, "prepare_grads", None), "has no prepare_grads"),
        (lambda part: setattr(part.get_parameters()[0], "__fsdp_param__", True), "Megatron-FSDP"),
    ],
)
def test_what_cannot_be_controlled_is_refused_by_name(change, message):
    chain, _ = chain_of(2)
    change(chain.chained_optimizers[0])
    with pytest.raises(ValueError, match=message):
        megatron.attach(chain, GradientControl(), 0.5)


def test_two_controls_other_spaces_and_groups_that_differ_are_refused():
    chain, parameters = chain_of(2, 3)
    with pytest.raises(ValueError, match="space='update'"):
        megatron.attach(chain, GradientControl(space="update"))
    megatron.attach(chain, GradientControl())
    with pytest.raises(ValueError, match="has a control"):
        megatron.attach(chain, GradientControl())
    chain.chained_optimizers[1].group = SimpleNamespace()
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="over different ranks"):
        chain.step()
