"""The staleness bound as bookkeeping: which groups are admitted, arrived, in training. No clock, no
tasks, no tensors.

A group lives through `admit -> arrive -> take -> step_over`, or `admit -> drop`. A place is held
from `admit` until `drop` or `step_over`, and there are `(max_lag + 1) * groups_per_step` places.
Groups are taken in admission order.

Why this bounds the lag: when a group is admitted, fewer than `(max_lag + 1) * groups_per_step`
groups are unfinished, itself not counted. Everything ahead of it in the queue is unfinished, so at
most `max_lag` whole steps are made between its admission and the step that trains on it; it samples
with weights no older than its admission. A drop only moves those behind it forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sidestep.types import Group


class Ledger:
    """Admission indices count up from 0 and are never reused; a dropped group's refill has a new
    one.
    """

    def __init__(self, *, groups_per_step: int, max_lag: int, total_steps: int) -> None:
        self.groups_per_step = groups_per_step
        self.max_lag = max_lag
        self.num_needed = total_steps * groups_per_step  # groups that steps still to come will use
        self.next_index = 0
        self.in_training: tuple[int, ...] = ()
        self._live: dict[int, Group | None] = {}  # admitted and not taken, in admission order
        self._again: list[int] = []  # admitted before a resume, lost in flight: handed out first

    @property
    def num_unfinished(self) -> int:
        """Places that are held."""
        return len(self._live) + len(self.in_training)

    @property
    def num_admissible(self) -> int:
        """Groups that may start now: free places, but no more than the steps to come will use."""
        free = (self.max_lag + 1) * self.groups_per_step - self.num_unfinished
        return len(self._again) + max(0, min(free, self.num_needed - len(self._live)))

    @property
    def all_admitted(self) -> bool:
        """True when the steps to come are covered (a drop can make it False again)."""
        return not self._again and len(self._live) >= self.num_needed

    @property
    def missing(self) -> tuple[int, ...]:
        """The groups that the next `take` still waits for: admitted, not arrived."""
        ahead = list(self._live.items())[: self.groups_per_step]
        return tuple(index for index, group in ahead if group is None)

    @property
    def ready(self) -> bool:
        return len(self._live) >= self.groups_per_step and not self.missing

    def admit(self, most: int) -> tuple[int, ...]:
        """Hold places for up to `most` groups; returns their admission indices (empty: none
        admissible).
        """
        again, self._again = self._again[:most], self._again[most:]
        num_new = min(self.num_admissible, most - len(again))
        new = range(self.next_index, self.next_index + num_new)
        self.next_index += num_new
        self._live.update(dict.fromkeys(new))
        return (*again, *new)

    def arrive(self, group: Group) -> None:
        if group.index not in self._live or self._live[group.index] is not None:
            raise ValueError(f"group {group.index} arrived but is not in flight")
        self._live[group.index] = group

    def drop(self, index: int) -> None:
        """Free the place of a group that will not be trained on; one more becomes admissible."""
        if index not in self._live:
            raise ValueError(
                f"group {index} cannot be dropped: it is not admitted or already taken"
            )
        del self._live[index]

    def take(self) -> tuple[Group, ...]:
        """The next step's groups. Their places stay held until `step_over`."""
        if self.in_training or not self.ready:
            raise ValueError(
                f"take: step under way {bool(self.in_training)}, missing {self.missing}"
            )
        indices = list(self._live)[: self.groups_per_step]
        groups = tuple(group for index in indices if (group := self._live.pop(index)) is not None)
        self.in_training = tuple(indices)
        self.num_needed -= self.groups_per_step
        return groups

    def step_over(self) -> None:
        """The step that used the taken groups is over: new weights are live, or it was skipped."""
        self.in_training = ()

    def waiting(self) -> tuple[Group, ...]:
        """Arrived and not taken, in admission order: what a checkpoint keeps."""
        return tuple(group for group in self._live.values() if group is not None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the waiting groups themselves are saved apart. Only between steps."""
        if self.in_training:
            raise ValueError("ledger.state_dict during a step: its groups would be lost")
        return {"next_index": self.next_index, "live": list(self._live)}

    def load_state_dict(self, state: Mapping[str, Any], waiting: Iterable[Group]) -> None:
        """Go on after the saved step: groups that were in flight are handed out again, same index,
        same noise.
        """
        arrived = {group.index: group for group in waiting}
        self.next_index = int(state["next_index"])
        self._live = {int(index): arrived.get(int(index)) for index in state["live"]}
        self._again = [index for index, group in self._live.items() if group is None]
