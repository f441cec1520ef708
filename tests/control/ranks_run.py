"""Runs scenarios on several real ranks (gloo): one process a rank, started once for all of them.

As a library: `found_on` starts the processes and gives back what every rank found.
As a script: it is one of them.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).parent
MODULES = ("ranks_measuring", "ranks_training")
ONLY_FOUR = {"several_meshes", "strided", "hsdp", "fsdp2_and_tensor_parallel", "resharded"}
DEADLINE_S = 200
# How long a rank waits for another one: a hang becomes an error of that scenario.
WAIT_S = 30


@functools.cache
def found_on(num_ranks):
    """What every scenario found: {name: [by rank]}; {"error": traceback} where it raised.

    Ends every process it starts.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(num_ranks, Path(folder))


def scenarios(num_ranks):
    """The functions of MODULES that take rank, num_ranks and folder, by name."""
    arguments = ("rank", "num_ranks", "folder")
    return {
        name: made
        for module in MODULES
        for name, made in vars(importlib.import_module(module)).items()
        if hasattr(made, "__code__") and made.__code__.co_varnames[:3] == arguments
        if num_ranks >= 4 or name not in ONLY_FOUR
    }


def _run(num_ranks, folder):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment.pop("SIDESTEP_MODE", None)
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(num_ranks), str(folder)],
            env=environment,
            stderr=(folder / f"stderr-{rank}").open("wb"),
        )
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline and any(one.poll() is None for one in processes):
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    by_rank = [_read(folder, rank) for rank in range(num_ranks)]
    return {name: [one.get(name) for one in by_rank] for name in by_rank[0]}


def _read(folder, rank):
    path = folder / f"found-{rank}.jsonl"
    if not path.exists():
        raise RuntimeError((folder / f"stderr-{rank}").read_text()[-3000:])
    return dict(json.loads(line) for line in path.read_text().splitlines())


def main(rank, num_ranks, folder):
    import torch.distributed as dist

    rank, num_ranks, folder = int(rank), int(num_ranks), Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=WAIT_S),
    )
    with (folder / f"found-{rank}.jsonl").open("w") as out:
        for name, scenario in scenarios(num_ranks).items():
            try:
                found = scenario(rank, num_ranks, folder)
            except Exception:
                found = {"error": traceback.format_exc()}
            out.write(json.dumps([name, found]) + "\n")
            out.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(*sys.argv[1:])
