"""DistributedDataParallel on two processes: every rank measures the same and decides the same.

    python examples/ddp.py                                              starts two processes itself
    torchrun --standalone --nproc-per-node 2 examples/ddp.py

Seconds on a CPU; with gloo, and with nccl likewise.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel

import sidestep

NUM_RANKS, STEPS = 2, 20


def train() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    # The same line as on one process. Gradients are copies of each other after backward(), and
    # the control counts each of them once.
    handle = sidestep.attach(
        optimizer,
        sidestep.GradientControl(low=0.1, high=0.9),
        max_norm=1.0,
        named_parameters=model.module.named_parameters(),
    )

    torch.manual_seed(1 + rank)  # each rank has data of its own
    for step in range(STEPS):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record = handle.last
        line = f"rank {rank}  step {step:2d}  cosine {record.cosine}  {record.regime}"
        print(line + "\n", end="", flush=True)  # in one piece: two processes share the output

    # One copy is enough: the state is the same on all ranks.
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(handle.state_dict(), Path(folder) / "control.pt")


def run_rank(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    train()
    dist.destroy_process_group()


def main() -> None:
    if "LOCAL_RANK" in os.environ:  # torchrun has started us
        dist.init_process_group("gloo")
        train()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (folder,), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
