"""Scenarios for several ranks: what a measurement sees of every kind of gradient."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from sidestep.control.geometry import Pair, Ranks
from sidestep.control.parameters import gradients, scale_gradient
from sidestep.control.sharding import holdings, layout_of, local


def plain(grad):
    """A parameter with a gradient (None: without)."""
    parameter = Parameter(torch.zeros(3 if grad is None else len(grad)))
    parameter.grad = None if grad is None else torch.tensor(grad)
    return parameter


def spread(grad, mesh, placements):
    """A parameter whose DTensor gradient is laid out from a full tensor."""
    full = torch.as_tensor(grad)
    parameter = Parameter(distribute_tensor(torch.zeros_like(full), mesh, placements))
    parameter.grad = distribute_tensor(full, mesh, placements)
    return parameter


def measure(parameters, references=None, ranks=None, own=(), **facts):
    """Everything that a rank learns from one measurement, as plain values."""
    references = references or {}
    grads, held = gradients(parameters), holdings(parameters, own)
    pairs = [Pair(grads.get(n), references.get(n), held=held[n]) for n in parameters]
    found = (ranks or Ranks()).measure([pairs], held, **facts)
    return as_json(found)


def as_json(found):
    return [
        {
            "norm": one.norm if one.finite else None,
            "cosine": one.cosine,
            "gp": one.gp if one.finite else None,
            "finite": one.finite,
            "has_gradient": one.has_gradient,
            "sums": list(found.sums),
        }
        for one in found.products
    ]


def refusal(act):
    """The text of the ValueError that `act` raises."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return None


def world(num_ranks):
    return init_device_mesh("cpu", (num_ranks,))


def b25_sharded_and_plain(rank, num_ranks, folder):
    a = spread(torch.full((4, 2), 2.0), world(num_ranks), [Shard(0)])
    return measure({"a": a, "b": plain([3.0, 3.0, 3.0])})


def b27_cosine_over_shards(rank, num_ranks, folder):
    mesh = world(num_ranks)
    g, p = torch.tensor([3.0, 0.0, 0.0, 4.0]), torch.tensor([3.0, 0.0, 0.0, -4.0])
    a = spread(g, mesh, [Shard(0)])
    reference = local(distribute_tensor(p, mesh, [Shard(0)]))
    whole = measure({"a": a}, {"a": reference})
    own = measure({"a": plain(local(a.grad).tolist())}, {"a": reference}, own=["a"])
    return whole + own


def b27_one_element(rank, num_ranks, folder):
    mesh = world(num_ranks)
    one = spread(torch.tensor([5.0]), mesh, [Shard(0)])
    other = spread(torch.ones(3, 2), mesh, [Shard(1)])
    parts = {"one": local(one.grad).clone(), "other": local(other.grad).clone()}
    return measure({"one": one, "other": other}, parts)


def b27_num_elements(rank, num_ranks, folder):
    return local(spread(torch.tensor([5.0]), world(num_ranks), [Shard(0)]).grad).numel()


def b28_sharded_and_replicated(rank, num_ranks, folder):
    mesh = world(num_ranks)
    return measure(
        {
            "a": spread(torch.ones(4), mesh, [Shard(0)]),
            "b": spread(torch.full((5,), 2.0), mesh, [Replicate()]),
            "c": plain([3.0]),
        }
    )


def b29_experts(rank, num_ranks, folder):
    """Rank 0 has squared norm 20, rank 1 100, further ranks no expert."""
    ranks = Ranks()
    grads = [[4.0, 2.0], [10.0]]
    experts = {f"expert.{rank}": plain(grads[rank])} if rank < 2 else {}
    by_name = {"expert": plain(grads[rank])} if rank < 2 else {}
    found = measure(experts, ranks=ranks, own=["expert.0", "expert.1"])
    found += measure(by_name, ranks=ranks, own=["expert"])
    # Rank 1 gets no token; then it has no expert at all.
    for one in (plain(None), None):
        idle = ({} if one is None else {"expert": one}) if rank == 1 else by_name
        found += measure(idle, ranks=ranks, own=["expert"])
    # A step with a shared part beside the experts.
    found += measure({**by_name, "shared": plain([1.0])}, ranks=ranks, own=["expert"])
    return found


def stages(rank, num_ranks, folder):
    """Pipeline stages: every rank has parameters of its own name, unnamed in local_parameters."""
    return measure({f"layer.{rank}": plain([1.0 + rank])})


def several_meshes(rank, num_ranks, folder):
    """4 ranks as 2 x 2: HSDP, sharded twice, on one dimension alone, and copied everywhere."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    full = torch.arange(1.0, 9.0).reshape(4, 2)  # squares: 204
    found = []
    for placements in (
        [Replicate(), Shard(0)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ):
        found += measure({"a": spread(full, mesh, placements)})
    # A mesh of some of the ranks: the other ranks have a copy of it in a mesh of their own.
    inner = mesh["shard"]
    found += measure({"a": spread(full, inner, [Shard(0)])})
    # ... or something of their own under the same name.
    found += measure({"a": spread(full * (1 + rank // 2), inner, [Shard(0)])}, own=["a"])
    # All of them in one model.
    found += measure(
        {
            "a": spread(full, mesh, [Replicate(), Shard(0)]),
            "b": spread(full, inner, [Replicate()]),
            "c": spread(full, mesh["replica"], [Shard(1)]),
            "d": plain([1.0]),
        }
    )
    return found


def strided(rank, num_ranks, folder):
    """_StridedShard: 8 rows over 2 x 2 ranks, tensor parallel inside, FSDP2 outside."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    full = torch.arange(1.0, 9.0)
    by_tp = full.reshape(2, 4)[mesh.get_coordinate()[1]]
    mine = by_tp.reshape(2, 2)[mesh.get_coordinate()[0]].contiguous()
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    grad = DTensor.from_local(mine, mesh, placements, run_check=False)
    parameter = Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return measure({"a": parameter})


def partial(rank, num_ranks, folder):
    mesh = world(num_ranks)
    parameter = Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    return refusal(lambda: holdings({"a": parameter}))


def one_rank_non_finite(rank, num_ranks, folder):
    """Not finite on the last rank only: in its own part, in its copy, in its shard."""
    ranks, mesh, found = Ranks(), world(num_ranks), []
    bad = float("nan") if rank == num_ranks - 1 else 1.0
    found += measure({"expert": plain([bad])}, ranks=ranks, own=["expert"])
    found += measure({"copy": plain([bad, 1.0])}, ranks=ranks)
    sharded = spread(torch.ones(num_ranks), mesh, [Shard(0)])
    local(sharded.grad).fill_(bad)
    found += measure({"sharded": sharded}, ranks=ranks)
    copied = spread(torch.ones(2), mesh, [Replicate()])
    local(copied.grad).fill_(bad * float("inf") if rank == num_ranks - 1 else 1.0)
    found += measure({"copied": copied}, ranks=ranks)
    found += measure({"copy": plain([1.0, 1.0])}, ranks=ranks)  # and goes on
    return found


def one_rank_without_gradients(rank, num_ranks, folder):
    """All None on the first rank, on the last one, everywhere."""
    ranks, found = Ranks(), []
    for empty in ([0], [num_ranks - 1], list(range(num_ranks)), []):
        values = None if rank in empty else [1.0, 2.0, 2.0]
        found += measure({"a": plain(values), "b": plain(values)}, ranks=ranks)
    return found


def one_rank_fails(rank, num_ranks, folder):
    """One rank has an error: before measuring, on the first or a later step; while measuring."""
    texts = []
    for steps_before in (0, 2):
        ranks = Ranks()
        for _ in range(steps_before):
            measure({"a": plain([1.0])}, ranks=ranks)
        if rank == 1:
            texts.append(refusal(lambda: ranks.fail(ValueError("its own problem"))))  # noqa: B023
        else:
            texts.append(refusal(lambda: measure({"a": plain([1.0])}, ranks=ranks)))  # noqa: B023
        measure({"a": plain([1.0])}, ranks=ranks)

        def pairs():
            if rank == 1:
                raise ValueError("found on the way")
            yield Pair(torch.ones(1), None)

        class Again:
            def __iter__(self):
                return pairs()

        held = holdings({})
        texts.append(refusal(lambda: ranks.measure([Again()], held)))  # noqa: B023
        measure({"a": plain([1.0])}, ranks=ranks)
    all_fail = Ranks()
    texts.append(refusal(lambda: all_fail.fail(ValueError("the problem of all"))))
    return texts


def differences(rank, num_ranks, folder):
    """What must be the same and is not: settings, number of scopes, shapes, local_parameters."""
    ranks, texts = Ranks(), []
    one = {"a": plain([1.0])}
    for _ in range(2):
        texts.append(refusal(lambda: measure(one, ranks=ranks, same=f"mode {rank}")))
        measure(one, ranks=ranks)
    held = holdings(one)
    lists = [[Pair(one["a"].grad, None, held=held["a"])]] * (1 + (rank == 0))
    texts.append(refusal(lambda: ranks.measure(lists, held)))
    uneven = {"a": plain([1.0] * (1 + rank))}
    texts.append(refusal(lambda: measure(uneven, ranks=ranks)))
    named = ["a"] if rank == 0 else []
    texts.append(refusal(lambda: measure(one, ranks=ranks, own=named)))
    return texts + measure(one, ranks=ranks)


def beyond_the_group(rank, num_ranks, folder):
    half, mesh = dist.new_group([0, 1]), world(num_ranks)
    sharded = {"a": spread_alone(torch.ones(1), mesh)}
    return refusal(lambda: measure(sharded, ranks=Ranks(half))) if rank < 2 < num_ranks else None


def spread_alone(part, mesh):
    parameter = Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
    parameter.grad = DTensor.from_local(part.clone(), mesh, [Shard(0)], run_check=False)
    return parameter


def gradient_on_some(rank, num_ranks, folder):
    """A copied parameter with a gradient on one rank only, before and after normal steps."""
    ranks, found = Ranks(), []
    for holder in (0, 1, None, num_ranks - 1):
        has = holder is None or rank == holder
        odd = plain([3.0, 4.0, 0.0] if has else None)
        found += measure({"a": plain([12.0]), "odd": odd}, ranks=ranks)
    return found


def changes(rank, num_ranks, folder):
    """Parameters come, go and grow between steps; more scopes than there was place for."""
    ranks, found = Ranks(), []
    for names in (["a"], ["a", "b"], ["b"], ["b", "c", "a"]):
        found += measure({name: plain([1.0]) for name in names}, ranks=ranks)
    for num_lists in (3, 40, 3, 100):
        parameters = {str(i): plain([float(i)]) for i in range(num_lists)}
        held = holdings(parameters)
        lists = [[Pair(p.grad, p.grad, held=held[n])] for n, p in parameters.items()]
        answer = ranks.measure(lists, held, sums=[rank, 1.0])
        found.append({"norms": [one.norm for one in answer.products], "sums": answer.sums})
    return found


def wrapped(rank, num_ranks, folder):
    """A part in another dtype becomes the DTensor it is a part of, and back, in the same memory."""
    full = torch.arange(10.0).reshape(5, 2)
    grad = spread(full, world(num_ranks), [Shard(0)]).grad
    part = local(grad).bfloat16()
    whole = layout_of(grad).wrap(part)
    local(whole).add_(1.0)
    assert local(whole).data_ptr() == part.data_ptr() or part.numel() == 0
    doubled = whole + whole
    return [str(whole.dtype), str(doubled.dtype), doubled.full_tensor().float().tolist()]


def broadcast_view(rank, num_ranks, folder):
    """A sharded gradient whose parts are broadcast views: one element in memory."""
    mesh = world(num_ranks)
    parameter = spread(torch.zeros(4, 2), mesh, [Shard(0)])
    view = torch.ones(1, 1).expand(4 // num_ranks, 2)
    parameter.grad = DTensor.from_local(view, mesh, [Shard(0)], run_check=False)
    before = local(parameter.grad).stride()
    scale_gradient(parameter, gradients({"a": parameter})["a"], 0.5)
    return [0 in before, parameter.grad.full_tensor().tolist(), measure({"a": parameter})]


def sparse(rank, num_ranks, folder):
    """Sparse gradients: a copy on every rank, and one of each rank's own."""
    copy, own = (Parameter(torch.zeros(5, 2)) for _ in range(2))
    for weight, tokens in ((copy, [1, 1, 3]), (own, [rank, rank])):
        torch.nn.functional.embedding(torch.tensor(tokens), weight, sparse=True).sum().backward()
    references = {"copy": torch.ones(5, 2), "own": torch.ones(5, 2)}
    return measure({"copy": copy, "own": own}, references, own=["own"])


def roundings(rank, num_ranks, folder):
    """The coarsest dtype is on the last rank; then nobody has a gradient."""
    held = holdings({})
    units = [0.0, torch.finfo(torch.float32).eps, 0.0, torch.finfo(torch.bfloat16).eps]
    mine = units[rank - num_ranks]
    return [Ranks().measure([], held, rounding=unit).rounding for unit in (mine, 0.0)]


class Watch(TorchDispatchMode):
    """Counts collectives and remembers the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.collectives = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            self.collectives.append(func.__name__)
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor) and type(one) is torch.Tensor:
                self.largest = max(self.largest, one.numel())
        return out


def b32_one_small_all_reduce(rank, num_ranks, folder):
    mesh, ranks = world(num_ranks), Ranks()
    sharded = spread(torch.ones(1000 * num_ranks, 100), mesh, [Shard(0)])
    parameters = {"a": sharded, "b": plain([1.0])}
    reference = {"a": torch.ones(1000, 100)}
    measure(parameters, reference, ranks=ranks)
    with Watch() as watch:
        measure(parameters, reference, ranks=ranks)
    return {"collectives": watch.collectives, "largest": watch.largest}


def a_group_of_some_ranks(rank, num_ranks, folder):
    """Ranks outside the group (say, those that generate) take no part and nobody waits."""
    group = dist.new_group([0])
    pair = dist.new_group([0, 1])
    found = measure({"a": plain([float(rank)])}, ranks=Ranks(group)) if rank == 0 else []
    if rank < 2:
        found += measure({"a": plain([1.0 + rank])}, ranks=Ranks(pair), own=["a"])
    return found


def not_a_member(rank, num_ranks, folder):
    group = dist.new_group([0])
    return None if rank == 0 else refusal(lambda: measure({"a": plain([1.0])}, ranks=Ranks(group)))
