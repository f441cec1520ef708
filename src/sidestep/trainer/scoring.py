"""Groups get their rewards; what the rewards of a step were made of."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sidestep.tasks.protocol import FullTask
from sidestep.types import Group


def scored(task: FullTask, groups: Sequence[Group]) -> list[Group]:
    """`groups` with rewards, their parts and problems; one call of the task for all of them."""
    judgement = task.judge(
        [group.prompt.example for group in groups for _ in group.completions],
        [completion.text for group in groups for completion in group.completions],
    )
    done, end = [], 0
    for group in groups:
        start, end = end, end + len(group.completions)
        parts = {name: values[start:end] for name, values in judgement.parts.items()}
        done.append(
            replace(
                group,
                rewards=judgement.rewards[start:end],
                reward_parts=parts,
                problems=judgement.problems[start:end],
            )
        )
    return done


def reward_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """`reward/<name>`, the mean of each reward before weighting, and `reward/problems`."""
    names = dict.fromkeys(name for group in groups for name in group.reward_parts)
    means = {
        f"reward/{name}": statistics.fmean(
            value for group in groups for value in group.reward_parts.get(name, ())
        )
        for name in names
    }
    problems = Counter(problem for group in groups for problem in group.problems if problem)
    return {**means, "reward/problems": dict(sorted(problems.items()))}
