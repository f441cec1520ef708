"""GRPO on two-digit addition with an exact lag: a run small enough for a test, with our control.

The setting of prototypes/stale_grpo_toy.py (project method notes): a 110k-parameter transformer is
taught addition with 70 % wrong labels, so that it samples right answers 40 % of the time; RL then
sharpens it. Same draws in the same order, so that runs without control agree with its table.

_B sequences, _P prompts, _T answer tokens.
"""

import collections
import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from sidestep.control.attach import attach

PLUS, EQUALS, END, NUM_TOKENS = 10, 11, 12, 16
GROUP = 8


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x, past=None):
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if past:
            k, v = torch.cat([past["k"], k], 2), torch.cat([past["v"], v], 2)
        if past is not None:
            past.update(k=k, v=v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=64, layers=2, heads=4, context=16):
        super().__init__()
        self.embed, self.position = nn.Embedding(NUM_TOKENS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, NUM_TOKENS, bias=False)

    def forward(self, tokens, pasts=None, offset=0):
        x = self.embed(tokens) + self.position(torch.arange(offset, offset + tokens.shape[1]))
        for block, past in zip(self.blocks, pasts or [None] * len(self.blocks), strict=True):
            x = block(x, past)
        return self.head(self.norm(x))


def answer_tokens(total):
    """Digits, the last one first, and the end."""
    return torch.stack([total % 10, total // 10 % 10, total // 100, torch.full_like(total, END)], 1)


def problems(number, generator):
    a, b = (torch.randint(0, 100, (number,), generator=generator) for _ in range(2))
    plus, equals = torch.full_like(a, PLUS), torch.full_like(a, EQUALS)
    return torch.stack([a // 10, a % 10, plus, b // 10, b % 10, equals], 1), a + b


@functools.cache
def warm_model(steps=2500, wrong=0.7):
    """Two minutes on one core."""
    torch.manual_seed(0)
    model, generator = Transformer(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        prompts, totals = problems(256, generator)
        errors = torch.tensor([1, -1, 10, -10, 2, -2])
        errors = errors[torch.randint(0, 6, totals.shape, generator=generator)]
        is_wrong = torch.rand(totals.shape, generator=generator) < wrong
        targets = answer_tokens(torch.where(is_wrong, (totals + errors).clamp(0, 199), totals))
        logits = model(torch.cat([prompts, targets[:, :-1]], 1))[:, 5:]
        optimizer.zero_grad()
        F.cross_entropy(logits.reshape(-1, NUM_TOKENS), targets.reshape(-1)).backward()
        optimizer.step()
    return model


@torch.no_grad()
def sample(model, prompts, greedy=False):
    pasts, tokens, offset, chosen, logprobs = [{} for _ in model.blocks], prompts, 0, [], []
    for _ in range(4):
        logp = F.log_softmax(model(tokens, pasts, offset)[:, -1], -1)
        offset += tokens.shape[1]
        token = logp.argmax(-1) if greedy else torch.multinomial(logp.exp(), 1)[:, 0]
        chosen.append(token)
        logprobs.append(logp.gather(1, token[:, None])[:, 0])
        tokens = token[:, None]
    return torch.stack(chosen, 1), torch.stack(logprobs, 1)


def naive(logp_BT, ratio_BT, advantage_B):
    """The recomputed anchor: a ratio of 1."""
    return logp_BT * advantage_B


def ppo(logp_BT, ratio_BT, advantage_B, clip=0.2):
    clipped = ratio_BT.clamp(1 - clip, 1 + clip)
    return torch.minimum(ratio_BT * advantage_B, clipped * advantage_B)


def train(control, lag, lr, objective=naive, steps=240, prompts=64):
    """(mean reward of each eighth of the run, greedy accuracy, records)."""
    model, actor = copy.deepcopy(warm_model()), copy.deepcopy(warm_model())
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    handle = attach(optimizer, control, named_parameters=model.named_parameters())
    past = collections.deque([copy_of(model)], maxlen=lag + 1)
    rewards, records = [], []
    for _ in range(steps):
        actor.load_state_dict(past[0])
        questions, totals = (t.repeat_interleave(GROUP, 0) for t in problems(prompts, generator))
        tokens, behaviour_BT = sample(actor, questions)
        reward_PG = (tokens == answer_tokens(totals)).all(1).float().view(prompts, GROUP)
        spread = reward_PG.std(1, keepdim=True) + 1e-4
        advantage_B = ((reward_PG - reward_PG.mean(1, keepdim=True)) / spread).view(-1, 1)
        logits = model(torch.cat([questions, tokens[:, :-1]], 1))[:, 5:]
        logp_BT = F.log_softmax(logits, -1).gather(2, tokens[..., None])[..., 0]
        ended = (tokens == END).float()
        mask_BT = ((ended.cumsum(1) - ended) == 0).float()
        ratio_BT = (logp_BT - behaviour_BT).exp()
        model.zero_grad()
        loss_BT = -objective(logp_BT, ratio_BT, advantage_B) * mask_BT
        (loss_BT.sum() / mask_BT.sum()).backward()
        drift = float(((ratio_BT.detach() - 1).abs() * mask_BT).sum() / mask_BT.sum())
        handle.note(behaviour=past[0], drift=drift, lag=len(past) - 1)
        optimizer.step()
        past.append(copy_of(model))
        rewards.append(float(reward_PG.mean()))
        records.append(handle.last)
    eighth = steps // 8
    parts = [sum(rewards[k : k + eighth]) / eighth for k in range(0, 8 * eighth, eighth)]
    held_out, totals = problems(1000, torch.Generator().manual_seed(999))
    right = (sample(model, held_out, greedy=True)[0] == answer_tokens(totals)).all(1)
    return parts, float(right.float().mean()), records


def copy_of(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
