"""What a run can be told: the schema with its defaults, and how TOML becomes a config and back.

Loads no torch.
"""

from sidestep.config.loss import LossConfig
from sidestep.config.schema import (
    ControlConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainConfig,
)

__all__ = [
    "ControlConfig",
    "EngineConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
]
