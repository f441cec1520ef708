"""Small models with chosen gradients, for tests of the control."""

import math

import torch
from torch.nn import Parameter


def one(values, dtype=torch.float32):
    """A model of one parameter `w` as named parameters."""
    return [("w", Parameter(torch.zeros(len(values), dtype=dtype)))]


def step(control, named, *grads, **facts):
    """Set the gradients (None stays None) and apply."""
    for (_, parameter), grad in zip(named, grads, strict=True):
        given_grad = None if grad is None else torch.as_tensor(grad).to(parameter.dtype)
        parameter.grad = None if given_grad is None else given_grad.clone()
    return control.apply(named, **facts)


def grad_of(named, index=0):
    return named[index][1].grad


def pair_with_cosine(cosine, g_norm=1.0, p_norm=1.0, size=100, seed=0):
    """Float32 g and p of the given lengths and cosine."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    e, f = torch.linalg.qr(basis).Q.T
    g = cosine * e + math.sqrt(1 - cosine**2) * f
    return (g * g_norm).float(), (e * p_norm).float()


def flatten(grads, named):
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.double().reshape(-1)
            for g, (_, p) in zip(grads, named, strict=True)
        ]
    )
