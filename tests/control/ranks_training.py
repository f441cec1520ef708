"""Scenarios for several ranks: a tiny model trained under each kind of parallelism."""

import copy

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks_measuring import Watch, refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import sidestep
from sidestep.control import GradientControl
from sidestep.control.sharding import local

STEPS = 7
BATCH = 8


class Net(nn.Module):
    """Two layers that 4 ranks cannot share evenly, and a scale of one element."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.5)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


def batch_of(step):
    """Inputs and targets: each step its own, but consecutive ones alike to a varying degree."""
    generator = torch.Generator().manual_seed(100 + step // 3)
    x, y = (torch.randn(BATCH, n, generator=generator) for n in (5, 3))
    own = torch.Generator().manual_seed(step)
    return x, y + 1.5 * (step % 4) * torch.randn(BATCH, 3, generator=own)


def my_rows(rank, num_ranks):
    size = BATCH // num_ranks
    return slice(rank * size, (rank + 1) * size)


def make(kind, num_ranks, dtype=torch.float32):
    """(module to call, its parameters by the names of a plain model, arguments of attach)."""
    net = Net().to(dtype)
    if kind == "one":
        return net, dict(net.named_parameters()), {}
    if kind == "ddp":
        return DistributedDataParallel(net), dict(net.named_parameters()), {}
    if kind == "fsdp1":
        wrapped = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
        parameters = dict(net.named_parameters())
        return wrapped, parameters, {"local_parameters": [*parameters]}
    if kind in ("fsdp2", "hsdp"):
        shape = (1, num_ranks) if kind == "fsdp2" else (2, num_ranks // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
        mesh = mesh["shard"] if kind == "fsdp2" else mesh
    else:
        both = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(net, both["tp"], plan)
        mesh = both["dp"]
    for module in (net.first, net.second, net):
        fully_shard(module, mesh=mesh)
    return net, dict(net.named_parameters()), {}


def train(kind, rank, num_ranks, make_optimizer=None, attach=None, steps=STEPS, **settings):
    """Records and final weights (whole) of a training."""
    model, parameters, layout = make(kind, num_ranks)
    optimizer = (make_optimizer or sgd)(parameters.values())
    control = GradientControl(**{"low": 0.1, "high": 0.8, "max_skips": 1} | settings)
    handle = sidestep.attach(
        optimizer, control, max_norm=2.0, named_parameters=parameters.items(), **layout
    )
    records = []
    for step in range(steps):
        run_step(kind, model, optimizer, handle, step, rank, num_ranks)
        records.append(handle.last.as_dict())
    return {"records": records, "weights": whole(kind, model, parameters)}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def run_step(kind, model, optimizer, handle, step, rank, num_ranks, spoil=None):
    x, y = batch_of(step)
    if kind == "fsdp2+tp":  # ranks of one tensor-parallel pair share their rows
        rank, num_ranks = rank // 2, num_ranks // 2
    rows = my_rows(rank, num_ranks)
    dtype = next(model.parameters()).dtype
    x, y = x[rows].to(dtype), y[rows].to(dtype)
    if spoil is not None:
        y = y * spoil
    optimizer.zero_grad()
    handle.note(batch=step, lag=4.0, drift=0.05 + 0.01 * (2 * rank - num_ranks + 1))
    (model(x) - y).square().mean().backward()
    optimizer.step()


def whole(kind, model, parameters):
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().reshape(-1).tolist() for name, p in parameters.items()}
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    return {name: tensor.detach().reshape(-1).tolist() for name, tensor in full.items()}


FAMILY = {
    "previous": {},
    "project": {"above": "project", "strength": 0.7},
    "damp": {"above": "damp"},
    "residual": {"residual": 0.05, "above": "project"},
    "ema": {"reference": "ema", "above": "project"},
    "displacement": {"reference": "displacement", "above": "project"},
    "drift": {"reference": "displacement", "strength": "drift", "above": "project"},
    "update": {"space": "update"},
    "calibrate": {"low": "calibrate", "high": "calibrate", "calibrate_steps": 4},
    "observe": {"mode": "observe"},
    "off": {"mode": "off"},
    "bfloat16": {"snapshot_dtype": "bfloat16", "snapshot_device": "cpu"},
}


def family(kind, rank, num_ranks):
    return {name: train(kind, rank, num_ranks, **chosen) for name, chosen in FAMILY.items()}


def ddp(rank, num_ranks, folder):
    return family("ddp", rank, num_ranks)


def fsdp2(rank, num_ranks, folder):
    return family("fsdp2", rank, num_ranks)


def hsdp(rank, num_ranks, folder):
    return family("hsdp", rank, num_ranks)


def fsdp2_and_tensor_parallel(rank, num_ranks, folder):
    return family("fsdp2+tp", rank, num_ranks)


def fsdp1(rank, num_ranks, folder):
    return {"previous": train("fsdp1", rank, num_ranks)}


def fsdp1_unnamed(rank, num_ranks, folder):
    model, parameters, _ = make("fsdp1", num_ranks)
    model(batch_of(0)[0]).sum().backward()
    return refusal(lambda: GradientControl().apply(parameters.items()))


def adamw_identical(rank, num_ranks, folder):
    kinds = ("ddp", "fsdp2", "hsdp") if num_ranks == 4 else ("ddp", "fsdp2")
    return {kind: train(kind, rank, num_ranks, adamw)["records"] for kind in kinds}


def b24_sync_off(rank, num_ranks, folder):
    """FSDP2 that does not reduce in this backward: every p.grad is None, on all ranks."""
    model, parameters, _ = make("fsdp2", num_ranks)
    optimizer = sgd(parameters.values())
    handle = sidestep.attach(optimizer, GradientControl(), named_parameters=parameters.items())
    model.set_requires_gradient_sync(False)
    model(batch_of(0)[0]).sum().backward()
    text = refusal(optimizer.step)
    model.set_requires_gradient_sync(True)
    model(batch_of(0)[0]).sum().backward()
    optimizer.step()
    return [text, handle.last.norm_raw is not None]


def b34_spoiled_on_one_rank(rank, num_ranks, folder):
    """Steps fine, NaN on the last rank, fine, fine: reduced gradients, and an expert's own one."""
    found = {}
    for kind in ("ddp", "fsdp2"):
        model, parameters, _ = make(kind, num_ranks)
        optimizer = adamw(parameters.values())
        control = GradientControl(above="project")
        handle = sidestep.attach(optimizer, control, named_parameters=parameters.items())
        reasons, moved = [], []
        for step in range(4):
            before = whole(kind, model, parameters)
            bad = float("nan") if step == 1 and rank == num_ranks - 1 else None
            run_step(kind, model, optimizer, handle, step, rank, num_ranks, bad)
            reasons.append(handle.last.reason)
            moved.append(whole(kind, model, parameters) != before)
        snapshot = handle.state_dict()["snapshot"].values()
        finite = all(bool(torch.isfinite(local(one)).all()) for one in snapshot)
        found[kind] = {"reasons": reasons, "moved": moved, "finite": finite}
    return found | {"expert": _spoiled_expert(rank, num_ranks)}


def _spoiled_expert(rank, num_ranks):
    expert, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    named = [("expert", expert), ("shared", shared)]
    control, found = GradientControl(above="project"), []
    for step in range(4):
        bad = step == 1 and rank == num_ranks - 1
        expert.grad = torch.tensor([float("inf") if bad else 1.0, float(rank)])
        shared.grad = torch.tensor([1.0, 2.0])
        record = control.apply(named, local_parameters=["expert"])
        found.append([record.regime, record.reason, record.cosine, record.norm_raw])
    return found


def odd_ranks(rank, num_ranks, folder):
    """Ranks without gradients, or without any parameter, decide with the others."""
    named = [("w", nn.Parameter(torch.zeros(2)))]
    control, found = GradientControl(), []
    for empty in (None, 0, 1, None):
        named[0][1].grad = None if rank == empty else torch.tensor([3.0, 4.0])
        record = control.apply(named, local_parameters=["w"])
        found.append([record.regime, record.reason, record.cosine, record.norm_raw])
    other = GradientControl()
    for _ in range(2):
        some = [] if rank == 1 else named
        named[0][1].grad = torch.tensor([3.0, 4.0])
        record = other.apply(some)
        found.append([record.regime, record.reason, record.cosine, record.norm_raw])
    return found


def said_differently(rank, num_ranks, folder):
    """Drift that differs by rank is averaged; a wrong one on one rank stops all; so does a mode."""
    parameter = nn.Parameter(torch.zeros(2))
    found = []
    control = GradientControl()
    parameter.grad = torch.tensor([3.0, 4.0])
    found.append(refusal(lambda: control.apply([("w", parameter)], drift=-1.0 if rank else 0.1)))
    found.append(refusal(lambda: control.apply([("w", parameter)], max_norm=1.0)))
    modes = GradientControl(mode="observe" if rank == 0 else "control")
    found.append(refusal(lambda: modes.apply([("w", parameter)])))
    found.append(refusal(lambda: control.apply([("w", parameter)], max_norm=1.0 + rank)))
    return found


def mixed_rounding(rank, num_ranks, folder):
    """Ranks with a float32, a bfloat16 and no gradient promise the same accuracy."""
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    expert = nn.Parameter(torch.zeros(3, dtype=dtype))
    control, found = GradientControl(above="project", low=0.0), []
    for step in range(4):
        expert.grad = torch.tensor([1.0, 2.0, 2.0 + 0.004 * step], dtype=dtype)
        named = [] if rank == 2 else [("expert", expert)]
        record = control.apply(named, max_norm=0.001, local_parameters=["expert"])
        found.append(record.as_dict())
    return found


def b32_memory(rank, num_ranks, folder):
    """What a step makes and keeps, with layers much larger than their shards."""
    size = 2048  # a quarter of a layer is as much as the kernels work on at once
    layers = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(2)])
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(layers, mesh=mesh)
    named = dict(layers.named_parameters())
    control = GradientControl(above="project", low=0.0)
    found = []
    for _ in range(3):
        layers.zero_grad()
        layers(torch.ones(2, size)).square().sum().backward()
        with Watch() as watch:
            record = control.apply(named.items(), max_norm=1.0)
        found.append([record.regime, watch.collectives, watch.largest * num_ranks / size**2])
    kept = sum(local(one).numel() for one in control.state_dict()["snapshot"].values())
    return {"steps": found, "kept": kept * num_ranks / (2 * size**2)}


def _resumable(kind, num_ranks, dtype=torch.float32, **settings):
    model, parameters, layout = make(kind, num_ranks, dtype)
    optimizer = sgd(parameters.values())
    control = GradientControl(above="project", **settings)
    handle = sidestep.attach(
        optimizer, control, max_norm=2.0, named_parameters=parameters.items(), **layout
    )
    return model, parameters, optimizer, handle


RESUMED = {
    "float32": {},
    "bfloat16 snapshot": {"snapshot_dtype": "bfloat16"},
    "bfloat16 weights": {"dtype": torch.bfloat16, "reference": "ema"},
}


def resumed(rank, num_ranks, folder):
    """Unbroken, and saved with torch's distributed checkpoint and gone on with: same layout."""
    found = {}
    # Not DDP on 4 ranks: it cuts its buckets anew after the first backward, which changes the order
    # in which it sums the gradients of 4 ranks.
    for kind in ("fsdp2", "hsdp") if num_ranks == 4 else ("ddp", "fsdp2"):
        for label, settings in RESUMED.items():
            path = folder / f"{kind}-{label}"
            unbroken = _resumable(kind, num_ranks, **settings)
            for step in range(3):
                run_step(kind, unbroken[0], *unbroken[2:], step, rank, num_ranks)
            _save(path, *unbroken)
            fresh = _resumable(kind, num_ranks, **settings)
            _load(path, *fresh)
            for run in (unbroken, fresh):
                for step in range(3, 6):
                    run_step(kind, run[0], *run[2:], step, rank, num_ranks)
            found[f"{kind} {label}"] = [
                {"last": run[3].last.as_dict(), "weights": whole(kind, run[0], run[1])}
                for run in (unbroken, fresh)
            ]
    return found


def resharded(rank, num_ranks, folder):
    """Saved under FSDP2, gone on with under HSDP: close, not bitwise."""
    saved = _resumable("fsdp2", num_ranks)
    for step in range(3):
        run_step("fsdp2", saved[0], *saved[2:], step, rank, num_ranks)
    _save(folder / "resharded", *saved)
    fresh = _resumable("hsdp", num_ranks)
    _load(folder / "resharded", *fresh)
    run_step("fsdp2", saved[0], *saved[2:], 3, rank, num_ranks)
    run_step("hsdp", fresh[0], *fresh[2:], 3, rank, num_ranks)
    return [run[3].last.as_dict() for run in (saved, fresh)]


def _save(path, model, parameters, optimizer, handle):
    state = handle.state_dict()
    weights = {name: p.detach() for name, p in parameters.items()}
    momentum = {n: optimizer.state[p]["momentum_buffer"] for n, p in parameters.items()}
    dcp.save({"weights": weights, "momentum": momentum, "control": state}, checkpoint_id=path)


def _load(path, model, parameters, optimizer, handle):
    weights = {name: p.detach() for name, p in parameters.items()}
    momentum = {name: torch.empty_like(p).detach() for name, p in parameters.items()}
    # A fresh control has no snapshot yet: room for it, laid out as the parameters, in a dtype that
    # loses nothing.
    control = handle.state_dict()
    control["snapshot"] = {
        name: torch.empty_like(p, dtype=torch.float32).detach() for name, p in parameters.items()
    }
    state = {"weights": weights, "momentum": momentum, "control": control}
    dcp.load(state, checkpoint_id=path)
    for name, parameter in parameters.items():
        optimizer.state[parameter]["momentum_buffer"] = state["momentum"][name]
    handle.load_state_dict(state["control"])


def one_group_twice(rank, num_ranks, folder):
    """A control may be copied; the copy decides with the same ranks."""
    group = dist.new_group(list(range(num_ranks)))
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    control = GradientControl()
    control.apply([("w", parameter)], process_group=group)
    twin = copy.deepcopy(control)
    return [one.apply([("w", parameter)], process_group=group).as_dict() for one in (control, twin)]
