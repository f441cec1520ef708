"""What the contract's test on two ranks does on each of them."""

import sys

import torch
from hosts_fakes import HOSTS, SHAPES, make_packages

from sidestep.control import GradientControl


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
