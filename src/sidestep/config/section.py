"""What every section of a config has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, strict about types, and without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, strict=True, allow_inf_nan=False
    )
