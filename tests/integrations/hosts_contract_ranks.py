"""What the contract's test on two ranks does on each of them."""

import sys

import torch
from hosts_fakes import HOSTS, SHAPES, FakeChain, FakePart, Recording, make_packages
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.integrations import megatron


def nan_on_one_rank(rank, num_ranks, folder, name):
    """Copies on both ranks; in the second of three steps rank 1 alone has a NaN."""
    packages = folder / f"packages-{rank}"
    make_packages(packages)
    sys.path.insert(0, str(packages))
    host = HOSTS[name](GradientControl())
    records, weights = {}, []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
        if step == 1 and rank == 1:
            gradients["a"][0] = torch.nan
        host.step([gradients])
        if host.handle.last.step == len(records):
            records[step] = host.handle.last.as_dict()
        weights.append(host.weights()["b"])
    return {
        "records": records,
        "same": torch.equal(weights[0], weights[1]),
        "moved": not torch.equal(weights[1], weights[2]),
    }


def megatron_slices(rank, num_ranks, folder):
    """Each rank has a slice of one parameter, and both a copy of another, counted on rank 0."""
    slices, copy = (Parameter(torch.zeros(2)) for _ in range(2))
    parts = [FakePart(Recording([p], lr=0.1), 0.0) for p in (slices, copy)]
    parts[1].counted = lambda parameter: rank == 0
    handle = megatron.attach(chain := FakeChain(parts), GradientControl(above="project"))
    for sign in (1.0, -1.0):
        slices.grad = torch.tensor([3.0 * sign, 0.0] if rank == 0 else [0.0, 4.0])
        copy.grad = torch.tensor([1.0, 2.0])
        chain.step()
    return {"record": handle.last.as_dict(), "copy": copy.grad.tolist()}
