"""What the tests of DeepSpeed do on every rank: the real engine, ZeRO-1, 2 and 3, gloo."""

import itertools
import os

import torch

from sidestep.control import GradientControl
from sidestep.integrations import deepspeed as adapter

STEPS = 4


def engine_of(stage, dtype="fp32", clipping=0.0, accumulation=1):
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine


def backward(engine, rank, step, factor=1.0):
    """A batch of this rank; the data repeats every second step, so that steps align."""
    generator = torch.Generator().manual_seed(10 * (step % 2) + rank)
    x = torch.randn(2, 5, generator=generator)
    dtype = next(engine.module.parameters()).dtype
    loss = engine(x.to(dtype)).float().square().mean() * factor
    engine.backward(loss)


def weights(engine):
    from deepspeed.utils import safe_get_full_fp32_param

    named = engine.module.named_parameters()
    return torch.cat([safe_get_full_fp32_param(p).detach().flatten().clone() for _, p in named])


def full_gradient(engine):
    from deepspeed.utils import safe_get_full_grad

    named = engine.module.named_parameters()
    return torch.cat([safe_get_full_grad(p).detach().float().flatten() for _, p in named])


def trained(rank, stage, dtype, control=None, **settings):
    """Weights after STEPS steps, records, and the full gradient before each step."""
    settings = {"max_norm": None, "clipping": 0.0, "accumulation": 1} | settings
    engine = engine_of(stage, dtype, settings["clipping"], settings["accumulation"])
    handle = adapter.attach(engine, control, settings["max_norm"]) if control else None
    records, gradients, counts = [], [], []
    for step in range(STEPS):
        for micro in range(settings["accumulation"]):
            backward(engine, rank, step + micro)
            if micro + 1 == settings["accumulation"]:
                gradients.append(full_gradient(engine))
            engine.step()
            counts.append(None if handle is None else handle.control.core.step)
        if handle is not None:
            records.append(handle.last)
    return engine, handle, records, gradients, counts


def observed(rank, num_ranks, folder, stage, dtype):
    """Weights without and with a control that watches, and what it saw of the real gradients."""
    bare, _, _, _, _ = trained(rank, stage, dtype)
    engine, _, records, gradients, _ = trained(
        rank, stage, dtype, GradientControl(mode="observe", low=0.1, high=0.2)
    )
    norms = [g.double().norm().item() for g in gradients]
    cosines = [
        (a.double() @ b.double() / (a.double().norm() * b.double().norm())).item()
        for a, b in itertools.pairwise(gradients)
    ]
    return {
        "equal": torch.equal(weights(bare), weights(engine)),
        "norms": norms,
        "cosines": cosines,
        "records": [one.as_dict() for one in records],
    }


def projected(rank, num_ranks, folder, stage, dtype):
    """The gradient after control, read through DeepSpeed's own API inside the real step."""
    engine = engine_of(stage, dtype)
    control = GradientControl(above="project", low=0.01, high=0.9)
    handle = adapter.attach(engine, control)
    after, before = [], []
    inner = handle._step

    def reading(*args, **kwargs):
        after.append(full_gradient(engine))
        return inner(*args, **kwargs)

    handle._step = reading
    for step in range(STEPS):
        backward(engine, rank, step % 1)
        before.append(full_gradient(engine))
        engine.step()
    g, p, out = before[-1].double(), before[-2].double(), after[-1].double()
    return {
        "regime": handle.last.regime,
        "dot": (out @ p).item(),
        "promised": handle.last.cosine_applied * handle.last.norm_applied * p.norm().item(),
        "scale": (g.norm() * p.norm()).item(),
        "norm": out.norm().item(),
        "norm_applied": handle.last.norm_applied,
    }


def skipped(rank, num_ranks, folder, stage, dtype):
    """Two equal steps: the second one is skipped by DeepSpeed's own way."""
    engine = engine_of(stage, dtype)
    handle = adapter.attach(engine, GradientControl(low=0.1, high=0.2))
    backward(engine, rank, 0)
    engine.step()
    moved = weights(engine)
    backward(engine, rank, 0)
    engine.step()
    regime, same = handle.last.regime, torch.equal(weights(engine), moved)
    found = {"regime": regime, "same": same, "skipped_steps": engine.skipped_steps}
    handle.detach()
    backward(engine, rank, 1)
    engine.step()
    found["goes_on"] = not torch.equal(weights(engine), moved)
    found["restored"] = "step" not in vars(engine.optimizer)
    return found


def accumulated(rank, num_ranks, folder, stage, dtype):
    control = GradientControl(mode="observe")
    _, _, records, gradients, counts = trained(rank, stage, dtype, control, accumulation=3)
    return {
        "counts": counts,
        "norms": [one.norm_raw for one in records],
        "true": [g.double().norm().item() for g in gradients],
    }


def refused(rank, num_ranks, folder):
    messages = {}

    def message(name, call):
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)

    engine = engine_of(0)
    message("stage 0", lambda: adapter.attach(engine, GradientControl()))
    clipping = engine_of(2, clipping=1.0)
    message("two clippings", lambda: adapter.attach(clipping, GradientControl(), 0.5))
    message("update", lambda: adapter.attach(clipping, GradientControl(space="update")))
    adapter.attach(clipping, GradientControl())
    message("twice", lambda: adapter.attach(clipping, GradientControl()))
    message("no backward", clipping.optimizer.step)
    return messages
