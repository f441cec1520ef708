"""Runs a function of a module on several real ranks (gloo), one process each.

As a library: `found_on(num_ranks, "module:function")` gives what it returned on each rank.
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
DEADLINE_S = 240
WAIT_S = 60  # how long a rank waits for another one: a hang becomes an error


@functools.cache
def found_on(num_ranks, target, *arguments):
    """What `module:function(rank, num_ranks, folder, *arguments)` returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        environment.pop("SIDESTEP_MODE", None)
        common = [sys.executable, __file__, target, str(num_ranks), folder]
        processes = [
            subprocess.Popen(
                [*common, str(rank), *arguments],
                env=environment,
                stdout=(Path(folder) / f"output-{rank}").open("wb"),
                stderr=subprocess.STDOUT,
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
        found = [_read(Path(folder), rank) for rank in range(num_ranks)]
    errors = [one["error"] for one in found if "error" in one]
    if errors:
        raise RuntimeError(errors[0])
    return [one["found"] for one in found]


def _read(folder, rank):
    path = folder / f"found-{rank}.json"
    if path.exists():
        return json.loads(path.read_text())
    return {"error": (folder / f"output-{rank}").read_text()[-4000:]}


def main(target, num_ranks, folder, rank, *arguments):
    import torch.distributed as dist

    rank, num_ranks, folder = int(rank), int(num_ranks), Path(folder)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE="1"
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=WAIT_S),
    )
    module, name = target.split(":")
    try:
        function = getattr(importlib.import_module(module), name)
        found = {"found": function(rank, num_ranks, folder, *arguments)}
    except Exception:
        found = {"error": traceback.format_exc()}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    # Not dist.destroy_process_group(): where one rank has failed it would wait for the other.
    os._exit(0)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(*sys.argv[1:])
