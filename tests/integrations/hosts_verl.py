"""What the tests of verl do on every rank: its real FSDP2 engine, on a CPU with gloo.

verl has no CPU platform; `Cpu` is one, given to it through its own `set_platform`.
"""

import os
from importlib.resources import files

import torch

from sidestep.control import GradientControl
from sidestep.integrations import verl as adapter

STEPS = 4


def engine_class(name="FSDPEngineWithLMHead"):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from verl.plugin.platform import PlatformBase, set_platform

    class Cpu(PlatformBase):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = torch.cpu

        def current_device(self):
            return torch.device("cpu")

    for missing in PlatformBase.__abstractmethods__ - set(vars(Cpu)):
        setattr(Cpu, missing, lambda self, *args, **kwargs: None)
    Cpu.__abstractmethods__ = frozenset()
    set_platform(Cpu())
    from verl.workers.engine.fsdp import transformer_impl

    return getattr(transformer_impl, name)


def engine_of(clip=float("inf")):
    kind = engine_class()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = kind(
        HFModelConfig(
            path=str(files("sidestep.models") / "packaged"),
            override_config={"attn_implementation": "eager"},
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            load_tokenizer=False,
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, clip_grad=clip),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def backward(engine, rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 10, (2, 6), generator=generator)
    engine.optimizer_zero_grad()
    engine.module(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.logsumexp(
        -1
    ).mean().backward()


def local_parts(engine, what):
    return [what(p).to_local().detach().clone() for p in engine.module.parameters()]


def product(left, right):
    """Over all ranks."""
    total = sum((a.double() * b.double()).sum() for a, b in zip(left, right, strict=True))
    torch.distributed.all_reduce(total)
    return total.item()


def run(engine, rank, steps=STEPS):
    return [(backward(engine, rank, step), engine.optimizer_step())[1] for step in range(steps)]


def observed(rank, num_ranks, folder):
    bare = engine_of(clip=1.0)
    norms = run(bare, rank)
    watched = engine_of(clip=1.0)
    log = folder / "records.jsonl"
    installed = adapter.install(GradientControl(mode="observe"), log=log)
    watched_norms = run(watched, rank)
    last = installed.handle.last.as_dict()
    installed.uninstall()
    torch.distributed.barrier()
    pairs = zip(bare.module.parameters(), watched.module.parameters(), strict=True)
    return {
        "equal": all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs),
        "norms": [norms, watched_norms],
        "last": last,
        "lines": len(log.read_text().splitlines()),
    }


def projected(rank, num_ranks, folder):
    engine = engine_of()
    installed = adapter.install(GradientControl(above="project", low=0.01, high=0.9))
    for step in (0, 0):
        backward(engine, rank, step)
        raw = local_parts(engine, lambda p: p.grad)
        engine.optimizer_step()
        if step == 0 and installed.handle.last.step == 0:
            before = raw
    after = local_parts(engine, lambda p: p.grad)
    record = installed.handle.last
    p_norm = product(before, before) ** 0.5
    found = {
        "regime": record.regime,
        "dot": product(after, before),
        "promised": record.cosine_applied * record.norm_applied * p_norm,
        "scale": record.norm_raw * p_norm,
        "true_norm": product(raw, raw) ** 0.5,
        "norm_raw": record.norm_raw,
        "names": [*installed.handle.state_dict()["snapshot"]][:1],
    }
    installed.uninstall()
    return found


def skipped(rank, num_ranks, folder):
    engine = engine_of()
    installed = adapter.install(GradientControl(low=0.05, high=0.1))
    backward(engine, rank, 0)
    engine.optimizer_step()
    before = local_parts(engine, lambda p: p)
    backward(engine, rank, 0)
    engine.optimizer_step()
    after = local_parts(engine, lambda p: p)
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    regime = installed.handle.last.regime
    installed.uninstall()
    two = adapter.install(GradientControl(), 0.5)
    engine.optimizer_config = type(engine.optimizer_config)(lr=1e-3, clip_grad=1.0)
    backward(engine, rank, 0)
    try:
        engine.optimizer_step()
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    two.uninstall()
    return {"regime": regime, "same": same, "refusal": refusal}
