"""A stand-in for torchtitan 0.3.0's components/optimizer: a container that is itself an optimizer.
Copied by hosts_fakes.py to where the real module lies.
"""

from torch.optim import Optimizer


class OptimizersContainer(Optimizer):
    def __init__(self, model_parts, optimizers):
        self.model_parts, self.optimizers = model_parts, optimizers
        Optimizer.__init__(self, [p for part in model_parts for p in part.parameters()], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()
