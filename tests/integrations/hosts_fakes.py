"""Hosts of the same shape as the real ones, small enough to see through.

Each has the place that an adapter attaches to, called as the host calls it, and otherwise a plain
SGD, so that weights move by -RATE times the gradient that was stepped with. What is fake is said in
each class; the real hosts are run in test_integrations_{verl,torchtitan,deepspeed}.py.

A host here: `Host(control, max_norm, clip)`, where `clip` is the host's own clipping;
`step(micro_batches)` with one gradient by name each, which add up; `weights()`, `stepped` (by name,
what the optimizer was given last; None if it did not step) and `handle`. Every one has two
parameters, "a" (3) and "b" (2, 2).
"""

import math
import shutil
import sys
from pathlib import Path

import torch
from torch.nn import Parameter

import sidestep
from sidestep.integrations import auto, deepspeed, megatron, torchtitan, verl

RATE = 0.5
SHAPES = {"a": (3,), "b": (2, 2)}
HERE = Path(__file__).parent
# distribution, version, {module path: source beside this file}
PACKAGES = [
    ("verl", "0.9.1", {"verl/workers/engine/fsdp/transformer_impl.py": "hosts_fake_verl.py"}),
    ("torchtitan", "0.3.0", {"torchtitan/components/optimizer.py": "hosts_fake_torchtitan.py"}),
    ("deepspeed", "0.19.8", {"deepspeed/utils.py": "hosts_fake_deepspeed.py"}),
]


def make_packages(folder, versions=None):
    """Packages that can be imported and asked for their version, as installed ones can."""
    for name, version, files in PACKAGES:
        version = (versions or {}).get(name, version)
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for path, source in files.items():
            target = folder / path
            target.parent.mkdir(parents=True)
            shutil.copy(HERE / source, target)
            for parent in target.relative_to(folder).parents[:-1]:
                (folder / parent / "__init__.py").touch()


def forget_packages():
    """The next import finds what is on the path then."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("verl", "torchtitan", "deepspeed"):
            del sys.modules[name]


def new_parameters():
    """Each call gives equal ones."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()
    }


class Recording(torch.optim.SGD):
    """SGD that keeps what it was given."""

    given = None

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        self.given = [None if g is None else g.detach().clone() for g in grads]
        return super().step(closure)


class PlainHost:
    """A loop: accumulate, clip, step."""

    clips_first = True
    has_none = True
    refuses_two_clippings = False
    skips_non_finite = False  # by itself: then there is no record

    def __init__(self, control=None, max_norm=None, clip=math.inf):
        self.parameters = new_parameters()
        self.clip = clip
        self.build()
        if control is not None:
            self.attach(control, max_norm)

    def build(self):
        self.optimizer = Recording(self.parameters.values(), lr=RATE)

    def attach(self, control, max_norm):
        self.handle = sidestep.attach(
            self.optimizer, control, max_norm, named_parameters=self.parameters.items()
        )

    def close(self):
        pass

    def backward(self, gradients):
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            if gradient is not None:
                gradient = gradient.clone()
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def zero_grad(self):
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, micro_batches):
        self.zero_grad()
        for gradients in micro_batches:
            self.backward(gradients)
        self.optimizer.given = None
        self.host_step()

    def host_step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.optimizer.step()

    def weights(self):
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def load_weights(self, weights):
        with torch.no_grad():
            for name, weight in weights.items():
                self.parameters[name].copy_(weight)

    @property
    def stepped(self):
        """None also where every gradient was hidden."""
        given = self.optimizer.given
        if given is None or all(g is None for g in given):
            return None
        return dict(zip(self.parameters, given, strict=True))


class AutoHost(PlainHost):
    """The same loop, which nobody told of the control."""

    def attach(self, control, max_norm):
        self.auto = auto.enable(control, max_norm)

    @property
    def handle(self):
        return self.auto.handle

    def close(self):
        if hasattr(self, "auto"):
            self.auto.disable()


class VerlHost(PlainHost):
    """hosts_fake_verl.py: an FSDPEngine whose optimizer_step does what verl's does."""

    refuses_two_clippings = True
    skips_non_finite = True

    def build(self):
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        self.module = torch.nn.Module()
        for name, parameter in self.parameters.items():
            self.module.register_parameter(name, parameter)
        self.optimizer = Recording(self.parameters.values(), lr=RATE)
        self.engine = FSDPEngineWithLMHead(self.module, self.optimizer, self.clip)

    def attach(self, control, max_norm):
        self.installed = verl.install(control, max_norm)

    @property
    def handle(self):
        return self.installed.handle

    def host_step(self):
        self.engine.optimizer_step()

    def close(self):
        if hasattr(self, "installed"):
            self.installed.uninstall()


class TitanHost(PlainHost):
    """hosts_fake_torchtitan.py: an OptimizersContainer of two optimizers."""

    def __init__(self, control=None, max_norm=None, clip=math.inf):
        self.control, self.max_norm = control, max_norm
        super().__init__(None, None, clip)

    def build(self):
        from torchtitan.components.optimizer import OptimizersContainer

        if self.control is not None:
            self.installed = torchtitan.install(self.control, self.max_norm)
        module = torch.nn.Module()
        for name, parameter in self.parameters.items():
            module.register_parameter(name, parameter)
        self.container = OptimizersContainer(
            [module], [Recording([p], lr=RATE) for p in self.parameters.values()]
        )
        self.optimizer = self.container.optimizers[0]

    @property
    def handle(self):
        return self.installed.handle

    @property
    def stepped(self):
        given = [one.given[0] for one in self.container.optimizers]
        if all(g is None for g in given):
            return None
        return dict(zip(self.parameters, given, strict=True))

    def host_step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.container.step()

    def close(self):
        if hasattr(self, "installed"):
            self.installed.uninstall()


class MegatronHost(PlainHost):
    """A chained optimizer: prepare_grads, clip by the norm over all, step_with_ready_grads.

    Main gradients are those of the parameters themselves (as with float32 models); one part for
    each parameter. Megatron's kernels need a GPU, so the norm is taken here.
    """

    clips_first = False
    refuses_two_clippings = True

    def build(self):
        clip = 0.0 if math.isinf(self.clip) else self.clip
        optimizers = [Recording([p], lr=RATE) for p in self.parameters.values()]
        self.chain = FakeChain([FakePart(one, clip) for one in optimizers])
        self.inner = optimizers
        self.optimizer = optimizers[0]

    def attach(self, control, max_norm):
        self.handle = megatron.attach(self.chain, control, max_norm)

    def host_step(self):
        for one in self.inner:
            one.given = None
        assert self.chain.step()[0] in (True, False)

    @property
    def stepped(self):
        if self.inner[0].given is None:
            return None
        return {name: one.given[0] for name, one in zip(self.parameters, self.inner, strict=True)}


class FakeConfig:
    def __init__(self, clip_grad):
        self.clip_grad = clip_grad
        self.use_precision_aware_optimizer = False


class FakePart:
    """What megatron-core's MegatronOptimizer has, as far as a chain uses it."""

    def __init__(self, optimizer, clip_grad, group=None, counted=lambda parameter: True):
        self.optimizer, self.config, self.group = optimizer, FakeConfig(clip_grad), group
        self.counted = counted

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def get_parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    def get_main_grads_for_grad_norm(self):
        mine = [p for p in self.get_parameters() if self.counted(p)]
        return [p.grad for p in mine if p.grad is not None]

    def get_grad_stats_parallel_group(self):
        return self.group

    def prepare_grads(self):
        return False

    def step_with_ready_grads(self):
        self.optimizer.step()
        return True


class FakeChain:
    """megatron-core 0.16.1: ChainedOptimizer.step does not call clip_grad_norm."""

    def __init__(self, parts):
        self.chained_optimizers = parts
        self.config = parts[0].config

    def prepare_grads(self):
        return any(part.prepare_grads() for part in self.chained_optimizers)

    def step_with_ready_grads(self):
        return all(part.step_with_ready_grads() for part in self.chained_optimizers)

    def get_grad_norm(self):
        grads = [g for one in self.chained_optimizers for g in one.get_main_grads_for_grad_norm()]
        return math.sqrt(sum(g.double().square().sum().item() for g in grads))

    def step(self):
        if self.prepare_grads():
            return False, None, None
        norm = self.get_grad_norm()
        factor = self.config.clip_grad / (norm + 1e-6)
        if self.config.clip_grad > 0.0 and factor < 1.0:
            for part in self.chained_optimizers:
                for p in part.get_parameters():
                    if p.grad is not None:
                        p.grad.mul_(factor)
        return self.step_with_ready_grads(), norm, None


class DeepSpeedHost(PlainHost):
    """hosts_fake_deepspeed.py: a ZeRO-2 engine on one rank, gradients in the optimizer."""

    clips_first = False
    has_none = False
    refuses_two_clippings = True

    def build(self):
        from deepspeed.utils import DeepSpeedEngine

        clip = 0.0 if math.isinf(self.clip) else self.clip
        self.optimizer = Recording([Parameter(torch.zeros(7))], lr=RATE)
        self.engine = DeepSpeedEngine(self.parameters, self.optimizer, clip)

    def attach(self, control, max_norm):
        self.handle = deepspeed.attach(self.engine, control, max_norm)

    def zero_grad(self):
        self.engine.zero_grad()

    def backward(self, gradients):
        self.engine.add(gradients)

    def host_step(self):
        self.engine.step()

    @property
    def stepped(self):
        if self.optimizer.given is None:
            return None
        flat = self.optimizer.given[0]
        return {"a": flat[:3], "b": flat[3:].view(2, 2)}

    def weights(self):
        return self.engine.weights()

    def load_weights(self, weights):
        self.engine.load_weights(weights)


HOSTS = {
    "attach": PlainHost,
    "auto": AutoHost,
    "verl": VerlHost,
    "torchtitan": TitanHost,
    "megatron": MegatronHost,
    "deepspeed": DeepSpeedHost,
}
