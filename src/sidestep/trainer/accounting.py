"""What the data of a step really was: trained and dropped groups by reason, difficulty and length.

Dropping groups and masking completions selects; here it shows what is selected.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sidestep.types import Group

EQUAL_REWARDS = "equal rewards"  # why a group was dropped: so far the only reason

_QUARTERS = ("0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1")


def group_counts(groups: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Any]:
    """The `groups/*_by_*` metrics."""
    return {
        "groups/dropped_by_reason": {EQUAL_REWARDS: len(dropped)} if dropped else {},
        "groups/trained_by_difficulty": _count(groups, difficulty),
        "groups/dropped_by_difficulty": _count(dropped, difficulty),
        "groups/trained_by_prompt_length": _count(groups, prompt_length),
        "groups/dropped_by_prompt_length": _count(dropped, prompt_length),
    }


def untrained_completions(groups: Sequence[Group], mask_truncated: bool) -> dict[str, int]:
    """Completions of trained groups that have no token in the loss, by reason."""
    reasons: Counter[str] = Counter()
    for group in groups:
        for completion in group.completions:
            if not completion.token_ids:
                reasons["empty"] += 1
            elif mask_truncated and completion.finish_reason == "length":
                reasons["truncated"] += 1
    return dict(reasons)


def difficulty(group: Group) -> str:
    """The bucket of a group's mean reward: "0" (nobody was right) to "1", quarters between.

    Made for rewards from 0 to 1; beyond them "below 0" and "above 1".
    """
    mean = statistics.fmean(group.rewards)
    for name, is_in in (("below 0", mean < 0), ("0", mean == 0), ("1", mean == 1)):
        if is_in:
            return name
    return "above 1" if mean > 1 else _QUARTERS[int(mean * 4)]


def prompt_length(group: Group) -> str:
    """The bucket of a prompt's length in tokens: "1-16", "17-32", "33-64", ..., doubling."""
    end = 16
    while len(group.prompt.token_ids) > end:
        end *= 2
    return f"{1 if end == 16 else end // 2 + 1}-{end}"


def _count(groups: Sequence[Group], bucket: Callable[[Group], str]) -> dict[str, int]:
    return dict(sorted(Counter(bucket(group) for group in groups).items()))
