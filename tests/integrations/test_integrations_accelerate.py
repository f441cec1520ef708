"""Hugging Face Accelerate with `attach`: the recipe of docs/plain-pytorch.md, on the CPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs sidestep[trl]")
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState

from sidestep.control import GradientControl
from sidestep.control.attach import attach


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def train(control=None, *, epochs=1, accumulate=2, clip=0.5, max_norm=None, folder=None, save=None):
    """Records, gradients as step() got them, and the weights. folder: go on from there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inputs = torch.randn(16 * accelerator.num_processes, 4)
    batches = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True) + 3.0), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    handle, records, grads = None, [], []
    if control is not None:
        named = accelerator.unwrap_model(model).named_parameters()
        handle = attach(optimizer, control, max_norm, named)
        accelerator.register_for_checkpointing(handle)
    if folder is not None:
        accelerator.load_state(folder)
    for _ in range(epochs):
        for batch, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - targets).square().mean())
                if accelerator.sync_gradients and clip:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if accelerator.sync_gradients:
                    records.append(handle and handle.last)
                    grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
                optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(save)
    if handle is not None:
        handle.detach()
    return records, grads, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_observe_is_bitwise_the_bare_loop_with_one_record_per_optimizer_step():
    records, grads, weights = train(GradientControl(mode="observe"), epochs=2)
    AcceleratorState._reset_state(True)
    _, same_grads, same_weights = train(epochs=2)
    assert torch.equal(weights, same_weights)
    assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
    assert [record.step for record in records] == [*range(8)]  # 16 batches accumulated by 2
    assert {"project", "skip"} & {record.decision for record in records}


def test_both_ways_to_clip_leave_the_promised_length():
    records, grads, _ = train(GradientControl(low=-1.0, high=1.0), clip=0.5)
    projected = [k for k, record in enumerate(records) if record.regime == "project"]
    assert projected
    for k in projected:  # clipped to 0.5 by Accelerate, then projected
        assert records[k].norm_raw == pytest.approx(0.5, rel=1e-4)
        assert grads[k].norm().item() == pytest.approx(records[k].norm_applied, rel=1e-5)
        assert records[k].norm_applied < 0.5
    AcceleratorState._reset_state(True)
    records, grads, _ = train(GradientControl(low=-1.0, high=1.0), clip=None, max_norm=0.5)
    for record, grad in zip(records, grads, strict=True):  # projected, then clipped to 0.5
        assert grad.norm().item() == pytest.approx(min(0.5, record.norm_applied), rel=1e-4)


def test_a_resumed_run_is_bitwise_the_unbroken_one(tmp_path):
    def control():
        return GradientControl(low=0.2, high=0.9)

    whole, _, weights = train(control(), epochs=2)
    AcceleratorState._reset_state(True)
    first, _, _ = train(control(), save=tmp_path / "saved")
    AcceleratorState._reset_state(True)
    rest, _, same_weights = train(control(), folder=tmp_path / "saved")
    assert first + rest == whole
    assert whole[len(first)].cosine is not None
    assert torch.equal(weights, same_weights)


@pytest.mark.parametrize("fused", [False, True])
def test_b23_accelerates_scaler_is_measured_unscaled_and_overflow_is_not(fused):
    """Accelerate's own mixed precision with a scaler wants a GPU; its optimizer does not."""
    Accelerator(cpu=True)
    weight = Parameter(torch.zeros(2))
    inner = torch.optim.AdamW([weight], lr=0.1, fused=fused, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler)
    handle = attach(optimizer, GradientControl())
    assert handle.optimizer is inner
    skipped = []
    for good in (True, False, True):
        optimizer.zero_grad()
        factor = torch.tensor([1.0, 1.0 if good else math.inf])
        scaler.scale((weight * factor).sum()).backward()
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        if good:
            assert handle.last.norm_raw == pytest.approx(math.sqrt(2))
    # A fused step is called all the same and leaves the overflow out itself.
    assert skipped == [False, not fused, False]
    assert (handle.last.regime, handle.last.step) == ("skip", 2 if fused else 1)
    assert weight.tolist() == pytest.approx([-0.1, -0.1])


def test_a_wrapper_of_deepspeed_is_refused_with_the_alternative():
    class ZeroOptimizer:
        """A stand-in: DeepSpeed is not installed here."""

    ZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"
    Accelerator(cpu=True)
    wrapper = AcceleratedOptimizer.__new__(AcceleratedOptimizer)
    wrapper.optimizer = ZeroOptimizer()
    with pytest.raises(ValueError, match="ZeroOptimizer of DeepSpeed steps inside its engine"):
        attach(wrapper, GradientControl())


TWO_RANKS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from test_integrations_accelerate import *
records, _, weights = train(GradientControl(low=0.2, high=0.9), epochs=2)
found = [[r.regime, r.cosine, r.norm_raw] for r in records], weights.tolist()
with open(f"{sys.argv[2]}/rank-{os.environ['RANK']}.json", "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""


def test_two_ranks_decide_and_move_alike(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, str(script), str(Path(__file__).parent), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert len(one[0]) == 8  # 32 samples by 2 ranks, 2 a batch, 2 accumulated, 2 epochs
    assert {regime for regime, _, _ in one[0]} > {"undefined"}
