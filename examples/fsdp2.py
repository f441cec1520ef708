"""FSDP2 (`fully_shard`) on two processes: products over shards, one decision on all ranks.

    python examples/fsdp2.py                                            starts two processes itself
    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py

Seconds on a CPU; with gloo, and with nccl likewise.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sidestep

NUM_RANKS, STEPS = 2, 20


def train() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # after fully_shard, as always

    # The same line as on one process: gradients are DTensors and say themselves who has what.
    # Each rank keeps the snapshot of its own shard; a few sums are all that travels.
    handle = sidestep.attach(
        optimizer,
        sidestep.GradientControl(low=0.1, high=0.9),
        max_norm=1.0,
        named_parameters=model.named_parameters(),
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

    # The snapshot is DTensors too: torch's distributed checkpoint keeps it, sharded.
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    state = {"control": handle.state_dict()}
    checkpoint.save(state, checkpoint_id=folder[0])
    checkpoint.load(state, checkpoint_id=folder[0])
    handle.load_state_dict(state["control"])


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
