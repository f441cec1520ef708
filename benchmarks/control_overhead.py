"""What does the control cost? Time of (control + clip + AdamW) over (clip_grad_norm_ + AdamW).

    python benchmarks/control_overhead.py                      # 1e6, 1e7, 1e8; 10 to 20 minutes
    python benchmarks/control_overhead.py --sizes 1e7 --threads 1 --kernels eager

A model shaped like a transformer, float32, clipping always active, gradients whose consecutive
cosine is 0.5. Each size, number of threads and kind of kernels (SIDESTEP_KERNELS) is a process of
its own. There, all cases take turns: a step without control, then one with it; the ratio is the
median over these pairs. 1e8 parameters take 3 GB.

"wall" is what the clock shows; "cpu" is the time of the process itself, which is the better number
for one thread on a machine that others use too (see `load`). Where the bytes go, and what came out:
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common import save_results

# Width, layers and vocabulary of a model with about this many parameters: 11, 11 and 20 tensors.
# Few layers, so that tensors have the size they have in models that are trained.
MODELS = {10**6: (256, 1, 1024), 10**7: (896, 1, 1024), 10**8: (2048, 2, 4096)}
ACTIONS = ("observe", "project")
SNAPSHOTS = ("float32", "bfloat16")
# Bytes a parameter that are read and written, and that have to come from memory: all that is read,
# and the lines of the snapshot where it is overwritten without having been read.
#   clip: norm, scaling in place. AdamW: reads four vectors, writes three.
#   observe: products of g and p; then p = g and g = f g. project: the same, and p is read again.
PLAIN_BYTES, PLAIN_FETCHED = 12 + 28, 8 + 16
ADAMW_BYTES, ADAMW_FETCHED = 28, 16
CONTROL_BYTES = {
    ("observe", "float32"): 20,
    ("observe", "bfloat16"): 16,
    ("project", "float32"): 24,
    ("project", "bfloat16"): 18,
}
CONTROL_FETCHED = {"float32": 16, "bfloat16": 12}
GOALS = {
    ("eager", "observe", "float32"): 1.40,
    ("eager", "project", "float32"): 1.70,
    ("compiled", "observe", "float32"): 1.25,
    ("compiled", "project", "float32"): 1.45,
    ("compiled", "observe", "bfloat16"): 1.20,
    ("compiled", "project", "bfloat16"): 1.30,
}


def shapes(num_parameters: int) -> list[tuple[int, ...]]:
    width, layers, vocabulary = MODELS[num_parameters]
    hidden = 8 * width // 3
    layer = [(width,), *[(width, width)] * 4, (width,), *[(hidden, width)] * 2, (width, hidden)]
    return [(vocabulary, width), *layer * layers, (width,)]


class Workload:
    """Parameters and gradients; `renew` makes a step's gradients again, `turn` makes others."""

    def __init__(self, num_parameters: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator))
            for shape in shapes(num_parameters)
        ]
        self.size = sum(p.numel() for p in self.parameters)
        self._gradients = [torch.randn(p.shape, generator=generator) for p in self.parameters]
        for p in self.parameters:
            p.grad = torch.empty_like(p)

    def renew(self) -> None:
        for p, gradient in zip(self.parameters, self._gradients, strict=True):
            p.grad.copy_(gradient)

    def turn(self) -> None:
        """A quarter of the gradient changes its sign: a cosine of 0.5."""
        for gradient in self._gradients:
            gradient.view(-1)[: gradient.numel() // 4].neg_()


def timed(
    step: Callable[[], object], workload: Workload, turn: bool = False
) -> tuple[float, float]:
    """(seconds on the clock, seconds of this process)."""
    if turn:
        workload.turn()
    workload.renew()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(num_parameters: int, optimizer_kind: str, repeats: int) -> list[dict]:
    """All cases of one optimizer, in this process."""
    import torch

    import sidestep
    from sidestep.control import GradientControl

    workload = Workload(num_parameters)
    parameters, size = workload.parameters, workload.size
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, **{optimizer_kind: True})

    def plain() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    timed(plain, workload)
    with rising_memory() as plain_rise:
        timed(plain, workload)
    rows = []
    for snapshot in SNAPSHOTS:
        for action in ACTIONS:
            regimes: set[str] = set()
            control = GradientControl(
                low=0.1,
                high=0.9,
                mode="observe" if action == "observe" else "control",
                snapshot_dtype=snapshot,
            )

            def controlled(control: GradientControl = control, regimes: set[str] = regimes) -> None:
                handle = sidestep.attach(optimizer, control, max_norm=1.0)
                optimizer.step()
                handle.detach()
                regimes.add(handle.last.regime)

            with rising_memory() as rise:
                first = [timed(controlled, workload, turn=True)[0] for _ in range(3)]
            regimes.clear()
            pairs = [
                (timed(plain, workload), timed(controlled, workload, turn=True))
                for _ in range(repeats)
            ]
            assert regimes == {"pass" if action == "observe" else "project"}, regimes
            row = {
                "parameters": size,
                "tensors": len(parameters),
                "optimizer": optimizer_kind,
                "snapshot": snapshot,
                "action": action,
                "extra_bytes_per_parameter": (rise[0] - plain_rise[0]) / size,
                "first_step_s": first[0],
                "bytes_per_parameter": CONTROL_BYTES[action, snapshot] + ADAMW_BYTES,
                "fetched_per_parameter": CONTROL_FETCHED[snapshot] + ADAMW_FETCHED,
                "bytes_per_parameter_plain": PLAIN_BYTES,
                "fetched_per_parameter_plain": PLAIN_FETCHED,
            }
            for index, clock in enumerate(("wall", "cpu")):
                ours = [controlled[index] for _, controlled in pairs]
                ratios = [after[index] / before[index] for before, after in pairs]
                row |= {
                    f"{clock}_ratio": statistics.median(ratios),
                    f"{clock}_ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                    f"{clock}_plain_s": statistics.median(plain[index] for plain, _ in pairs),
                    f"{clock}_controlled_s": statistics.median(ours),
                }
            rows.append(row)
            del control, controlled
    return rows


def copy_bandwidth(num_elements: int = 4 * 10**7) -> dict[str, float]:
    """Bytes fetched per second (those of the source, and the lines that are overwritten) by copy_
    of a float32 vector, the best of many.
    """
    import torch

    source, target = torch.ones(num_elements), torch.ones(num_elements)
    best = [math.inf, math.inf]
    for _ in range(15):
        wall, cpu = time.perf_counter(), time.process_time()
        target.copy_(source)
        best[0] = min(best[0], time.perf_counter() - wall)
        best[1] = min(best[1], time.process_time() - cpu)
    return {"wall": 8 * num_elements / best[0], "cpu": 8 * num_elements / best[1]}


@contextmanager
def rising_memory() -> Iterator[list[int]]:
    """By how many bytes the memory of this process rises at most meanwhile (Linux)."""
    rise = [0]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before = memory_of("VmRSS")
    yield rise
    rise[0] = memory_of("VmHWM") - before


def memory_of(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def work(arguments: argparse.Namespace) -> list[dict]:
    """The rows of one process."""
    import torch

    torch.set_num_threads(arguments.worker_threads)
    kernels = os.environ["SIDESTEP_KERNELS"]
    load = os.getloadavg()[0]
    bandwidth = copy_bandwidth()
    rows = []
    for optimizer_kind in ("fused", "foreach"):
        rows += measure(arguments.worker_size, optimizer_kind, arguments.repeats)
    for row in rows:
        fetched = row["fetched_per_parameter"] * row["parameters"]
        goal = GOALS.get((kernels, row["action"], row["snapshot"]))
        row |= {
            "kernels": kernels,
            "threads": arguments.worker_threads,
            "load": load,
            "copy_bytes_per_s": bandwidth["wall"],
            # of CPU time if there is one thread: it does not count the time of other processes
            "fraction_of_copy_bandwidth": fetched / row["cpu_controlled_s"] / bandwidth["cpu"]
            if arguments.worker_threads == 1
            else fetched / row["wall_controlled_s"] / bandwidth["wall"],
            "goal": goal if row["optimizer"] == "fused" else None,
        }
    return rows


def in_own_process(size: int, threads: int, kernels: str, repeats: int) -> list[dict]:
    command = [sys.executable, __file__, "--worker-size", str(size)]
    command += ["--worker-threads", str(threads), "--repeats", str(repeats)]
    with tempfile.TemporaryDirectory() as cache:  # an empty one: compile times are from zero
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "passive",
            "SIDESTEP_KERNELS": kernels,
            "TORCHINDUCTOR_CACHE_DIR": cache,
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout)


def report(row: dict) -> str:
    goal = f"goal {row['goal']:.2f}" if row["goal"] else ""
    return (
        f"{row['parameters']:>11,} {row['threads']} thread(s) {row['kernels']:8} "
        f"{row['optimizer']:7} {row['action']:7} {row['snapshot']:8} "
        f"wall {row['wall_ratio']:.2f} cpu {row['cpu_ratio']:.2f} {goal:9} "
        f"{row['extra_bytes_per_parameter']:.2f} B/parameter more, "
        f"{row['fraction_of_copy_bandwidth']:.2f} of copy, load {row['load']:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=list(MODELS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--repeats", type=int, help="default: by size")
    parser.add_argument("--worker-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker-threads", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker_size:
        print(json.dumps(work(arguments)))
        return
    results = []
    for size in map(int, arguments.sizes):
        repeats = arguments.repeats or {10**6: 101, 10**7: 31}.get(size, 9)
        for kernels in arguments.kernels:
            for threads in arguments.threads:
                rows = in_own_process(size, threads, kernels, repeats)
                results += rows
                print(*map(report, rows), sep="\n", flush=True)
    print(save_results("control_overhead", results))


if __name__ == "__main__":
    main()
