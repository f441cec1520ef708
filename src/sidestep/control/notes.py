"""What every handle of a control has: notes about the coming step, and the control's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestep.control.controller import GradientControl
from sidestep.control.facts import Behaviour, StepFacts


class Notes:
    """Facts about the coming step, said once, and the control's state."""

    def __init__(self, control: GradientControl) -> None:
        self.control = control
        self._notes: dict[str, Any] = {}

    def note(
        self,
        *,
        batch: int | str | None = None,
        lag: float | None = None,
        drift: float | None = None,
        behaviour: Behaviour | None = None,
        expected: float | None = None,
    ) -> None:
        """Say what the coming step is made of, and only that one; see `GradientControl.apply`.

        Behaviour weights are held until that step.
        """
        StepFacts(batch, lag, drift, behaviour, expected)  # a wrong one is refused here
        said = {
            "batch": batch,
            "lag": lag,
            "drift": drift,
            "behaviour": behaviour,
            "expected": expected,
        }
        self._notes.update({key: value for key, value in said.items() if value is not None})

    def take_notes(self) -> dict[str, Any]:
        """What was said about this step; said once."""
        notes, self._notes = self._notes, {}
        return notes

    def state_dict(self) -> dict[str, Any]:
        """The control's state, of this rank. Neither the optimizer's own state_dict nor a host's
        checkpoints hold it, but where its integration says so.
        """
        return self.control.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the control's state; see `GradientControl.load_state_dict`."""
        self.control.load_state_dict(state)
