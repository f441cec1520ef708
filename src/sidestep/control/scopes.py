"""Which parameters are decided on together, and what is remembered of each such scope."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sidestep.control.calibration import Calibration
from sidestep.control.checks import require_count
from sidestep.control.secant import Curvature
from sidestep.control.settings import Settings

WHOLE = "model"
REST = "rest"
# model.layers.3.mlp.up.weight, transformer.h.3.attn.weight, blocks.3.norm.weight
_BLOCK = re.compile(r"(?:.*?\.)??(?:layers|layer|blocks|block|h)\.\d+(?=\.)")


def split(
    settings: Settings, names: Iterable[str], groups: Mapping[str, str] | None
) -> dict[str, tuple[str, ...]]:
    """Parameter names by scope, in order of first appearance.

    groups: label by name, for scope="group".

    Raises ValueError: scope="group" without a label for a parameter; scope="block" where no name
    tells a block.
    """
    names = tuple(names)
    if settings.scope == "model":
        return {WHOLE: names}
    scopes: dict[str, list[str]] = {}
    for name in names:
        label = _block(name) if settings.scope == "block" else _group(name, groups)
        scopes.setdefault(label, []).append(name)
    if scopes.keys() == {REST}:
        raise ValueError(
            f"scope='block': no parameter is named as part of a block, like 'layers.0.' or 'h.0.' "
            f"(the first is {names[0]!r}): give attach named_parameters=model.named_parameters()"
        )
    return {label: tuple(members) for label, members in scopes.items()}


def _block(name: str) -> str:
    found = _BLOCK.match(name)
    return found[0] if found else REST


def _group(name: str, groups: Mapping[str, str] | None) -> str:
    if groups is None or name not in groups:
        raise ValueError(
            f"scope='group': no group is known for parameter {name!r}: use attach, or give apply "
            "groups={name: label}"
        )
    return groups[name]


@dataclass(slots=True)
class ScopeState:
    """What one scope's next decision depends on, beside the reference."""

    calibration: Calibration
    skips_in_a_row: int = 0
    curvature: Curvature = field(default_factory=Curvature)

    @classmethod
    def of(cls, settings: Settings, label: str) -> ScopeState:
        return cls(Calibration(settings, label))

    def state_dict(self) -> dict[str, Any]:
        return {
            "skips_in_a_row": self.skips_in_a_row,
            "calibration": self.calibration.state_dict(),
            "curvature": {"along": self.curvature.along, "squared": self.curvature.squared},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the counter is missing."""
        skips = state.get("skips_in_a_row", None)
        require_count("control state: skips_in_a_row", skips, at_least=0)
        self.skips_in_a_row = skips
        self.calibration.load_state_dict(state["calibration"])
        self.curvature = Curvature(**state["curvature"])
