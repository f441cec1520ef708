"""A stand-in for DeepSpeed 0.19: an engine whose ZeRO-2 optimizer keeps the gradients, on one rank.
Copied by hosts_fakes.py to where deepspeed.utils lies. The real one is run with -m hosts.
"""

from types import SimpleNamespace

import torch


class _Fragment:
    """A parameter's part of the flat float32 partition."""

    def __init__(self, optimizer, start, numel):
        self.optimizer, self.start, self.numel = optimizer, start, numel

    def get_lp_grad_fragment(self, index):
        if self.optimizer.averaged_gradients[0] is None:
            raise ValueError("Gradients are only available immediately after backward")
        return self.optimizer.averaged_gradients[0][index]

    def get_hp_fragment(self):
        return self.optimizer.partition.detach()[self.start : self.start + self.numel]


class DeepSpeedZeroOptimizer:
    cpu_offload = False
    check_grad_overflow = False
    dp_process_group = None

    def __init__(self, inner, parameters, clipping):
        self.inner, self.clipping, self.parameters = inner, clipping, parameters
        self.partition = inner.param_groups[0]["params"][0]
        self.averaged_gradients = {0: None}
        self.overflow = False

    @property
    def param_groups(self):
        return self.inner.param_groups

    def check_overflow(self, partition_gradients=True):
        self.overflow = False

    def _update_scale(self, has_overflow=False):
        pass

    def step(self, closure=None):
        self.overflow = False
        if self.check_grad_overflow:
            self.check_overflow()
        self._update_scale(self.overflow)
        if self.overflow:
            self.averaged_gradients[0] = None
            return
        flat = torch.cat([g.flatten() for g in self.averaged_gradients[0]])
        norm = flat.norm()
        self._global_grad_norm = norm
        if self.clipping > 0.0:
            flat = flat * (self.clipping / (norm + 1e-6)).clamp(max=1.0)
        self.partition.grad = flat
        self.inner.step()
        self.averaged_gradients[0] = None


class DeepSpeedEngine:
    mp_world_size = 1

    def __init__(self, parameters, inner, clipping):
        self.parameters, self.clipping, self.skipped_steps = parameters, clipping, 0
        self.module = SimpleNamespace(named_parameters=lambda: parameters.items())
        self.optimizer = DeepSpeedZeroOptimizer(inner, parameters, clipping)
        start = 0
        for index, parameter in enumerate(parameters.values()):
            parameter._hp_mapping = _Fragment(self.optimizer, start, parameter.numel())
            parameter._index_in_param_group = index
            start += parameter.numel()
        self.load_weights({name: p.detach() for name, p in parameters.items()})

    def fp16_enabled(self):
        return False

    def gradient_clipping(self):
        return self.clipping

    def zero_grad(self):
        self.optimizer.averaged_gradients[0] = None

    def add(self, gradients):
        """A backward pass: None is a parameter that took no part, which is zeros here."""
        filled = [
            torch.zeros_like(p) if gradients[name] is None else gradients[name].clone()
            for name, p in self.parameters.items()
        ]
        before = self.optimizer.averaged_gradients[0]
        if before is not None:
            filled = [a + b for a, b in zip(before, filled, strict=True)]
        self.optimizer.averaged_gradients[0] = filled

    def step(self):
        self.optimizer.step()
        self.skipped_steps += self.optimizer.overflow

    def weights(self):
        flat, found, start = self.optimizer.partition.detach(), {}, 0
        for name, parameter in self.parameters.items():
            found[name] = flat[start : start + parameter.numel()].view(parameter.shape).clone()
            start += parameter.numel()
        return found

    def load_weights(self, weights):
        with torch.no_grad():
            self.optimizer.partition.copy_(torch.cat([w.flatten() for w in weights.values()]))
