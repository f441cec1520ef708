"""A stand-in for verl 0.9.1's verl/workers/engine/fsdp/transformer_impl.py: the step, and the names
of its classes. Copied by hosts_fakes.py to where the real file lies.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist


class FSDPEngine:
    def __init__(self, module, optimizer, clip_grad):
        self.module, self.optimizer = module, optimizer
        self.optimizer_config = SimpleNamespace(clip_grad=clip_grad)

    def optimizer_step(self):
        """Clips, and steps unless the norm is not finite."""
        limit = self.optimizer_config.clip_grad
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        if dist.is_initialized():  # verl's norm is one over all ranks
            dist.all_reduce(norm)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return norm.item()


class FSDPEngineWithLMHead(FSDPEngine):
    pass


class FSDPEngineWithValueHead(FSDPEngineWithLMHead):
    pass
