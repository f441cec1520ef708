"""The losses once more, as plain Python loops over float64 numbers: slow, obvious, independent."""

import math


def logprob(logits, token_id, temperature):
    scaled = [value / temperature for value in logits]
    highest = max(scaled)
    return scaled[token_id] - highest - math.log(math.fsum(math.exp(v - highest) for v in scaled))


def ppo_term(log_ratio, advantage, clip_low, clip_high):
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    clipped = max(1 - clip_low, min(1 + clip_high, ratio))
    return -min(ratio * advantage, clipped * advantage)


def aggregate(aggregation, loss, mask, constant):
    """Over a whole optimizer batch at once: lists of rows."""
    rows = [
        [value for value, trained in zip(*row, strict=True) if trained]
        for row in zip(loss, mask, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if aggregation == "token":
        return math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
    if aggregation == "sequence":
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    return math.fsum(map(math.fsum, rows)) / (len(rows) * constant)


def ppo_loss(logits, token_ids, temperature, anchor, advantages, mask, clip, aggregation, constant):
    """The whole loss from nested lists; clip is (low, high)."""
    terms = [
        [
            ppo_term(
                logprob(logits[b][t], token_ids[b][t], temperature) - anchor[b][t],
                advantages[b][t],
                *clip,
            )
            if mask[b][t]
            else 0.0
            for t in range(len(mask[b]))
        ]
        for b in range(len(mask))
    ]
    return aggregate(aggregation, terms, mask, constant)
