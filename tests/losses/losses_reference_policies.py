"""Policies and corrections once more, in plain Python and float64: slow, obvious, independent.

A batch is a list of rows, a row a list of its trained tokens. A token has the log-probabilities
theta, p and mu, the advantage, and `fixed`: theta where a loss must not be differentiated through.
"""

import math
from dataclasses import dataclass


@dataclass
class Token:
    theta: float
    p: float
    mu: float
    advantage: float
    fixed: float


def ratio(d):
    return math.exp(max(-20.0, min(20.0, d)))


def clipped(r, advantage, low, high):
    return -min(r * advantage, max(low, min(high, r)) * advantage)


def ppo(rows, o):
    return [
        [clipped(ratio(t.theta - t.p), t.advantage, 1 - o.clip_low, 1 + o.clip_high) for t in row]
        for row in rows
    ]


def dual_clip(rows, o):
    return [
        [
            loss if t.advantage >= 0 else min(loss, -o.dual_clip * t.advantage)
            for loss, t in zip(losses, row, strict=True)
        ]
        for losses, row in zip(ppo(rows, o), rows, strict=True)
    ]


def gspo(rows, o):
    losses = []
    for row in rows:
        s = ratio(sum(t.theta - t.p for t in row) / max(1, len(row)))
        losses.append([clipped(s, t.advantage, 1 - o.clip_low, 1 + o.clip_high) for t in row])
    return losses


def sapo(rows, o):
    def term(t):
        tau = o.tau_positive if t.advantage > 0 else o.tau_negative
        return -4 / tau / (1 + math.exp(-tau * (ratio(t.theta - t.p) - 1))) * t.advantage

    return [[term(t) for t in row] for row in rows]


def cispo(rows, o):
    return [
        [-min(ratio(t.fixed - t.p), o.cap) * t.advantage * t.theta for t in row] for row in rows
    ]


def dis(rows, o):
    def term(t):
        rho = ratio(t.fixed - t.mu)
        kept = 1 - o.clip_low < rho < 1 + o.clip_high
        return -rho * t.advantage * t.theta if kept else 0.0

    return [[term(t) for t in row] for row in rows]


def dppo_tv(rows, o):
    def term(t):
        moved = math.exp(t.fixed) - math.exp(t.mu)
        beyond = moved > o.delta if t.advantage > 0 else moved < -o.delta
        return 0.0 if beyond else -ratio(t.theta - t.mu) * t.advantage

    return [[term(t) for t in row] for row in rows]


def topr(rows, o):
    losses = []
    for row in rows:
        weight = min(1.0, ratio(sum(t.fixed - t.mu for t in row)))
        losses.append([-(1.0 if t.advantage > 0 else weight) * t.advantage * t.theta for t in row])
    return losses


def m2po(rows, o):
    """Algorithm 1 of the paper, as printed."""
    left = [
        t
        for row in rows
        for t in row
        if (t.advantage > 0 and t.fixed > t.mu) or (t.advantage < 0 and t.fixed < t.mu)
    ]
    masked = []
    while left and sum((t.fixed - t.mu) ** 2 for t in left) / len(left) > o.tau:
        worst = max(left, key=lambda t: (t.fixed - t.mu) ** 2)
        left.remove(worst)
        masked.append(id(worst))
    return [
        [0.0 if id(t) in masked else -ratio(t.theta - t.mu) * t.advantage for t in row]
        for row in rows
    ]


def bapo(rows, o):
    tokens = [(ratio(t.fixed - t.p), t.advantage) for row in rows for t in row]

    def share(low, high):
        positive = sum(r * a for r, a in tokens if a > 0 and r <= high)
        negative = sum(-r * a for r, a in tokens if a < 0 and r >= low)
        return positive / (positive + negative)

    low, high = o.low_start, o.high_start
    while share(low, high) < o.positive_share and low < o.low_stop - 1e-9:
        low = min(o.low_stop, low + o.low_step)
    while share(low, high) < o.positive_share and high < o.high_stop - 1e-9:
        high = min(o.high_stop, high + o.high_step)
    return [[clipped(ratio(t.theta - t.p), t.advantage, low, high) for t in row] for row in rows]


def weights(name, rows, o):
    """Weight of every token under the correction of that name."""

    def of(row):
        w = [ratio(t.p - t.mu) for t in row]
        product = ratio(sum(t.p - t.mu for t in row))
        mean = ratio(sum(t.p - t.mu for t in row) / max(1, len(row)))
        fall = sum(t.mu - t.fixed for t in row) / max(1, len(row))
        advantage = sum(t.advantage for t in row)
        return {
            "none": lambda: [1.0 for _ in row],
            "importance": lambda: [x if x <= o.cap else 0.0 for x in w],
            "tis": lambda: [min(x, o.cap) for x in w],
            "icepop": lambda: [x if o.low <= x <= o.high else 0.0 for x in w],
            "sequence_mis": lambda: [product if o.low <= product <= o.high else 0.0 for _ in row],
            "geometric": lambda: [1.0 if o.low <= mean <= o.high else 0.0 for _ in row],
            "opsm": lambda: [0.0 if advantage < 0 and fall > o.delta else 1.0 for _ in row],
        }[name]()

    return [of(row) for row in rows]


POLICIES = {
    "ppo": ppo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "dis": dis,
    "dppo_tv": dppo_tv,
    "topr": topr,
    "m2po": m2po,
    "bapo": bapo,
}
