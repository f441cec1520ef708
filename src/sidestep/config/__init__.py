"""What a run can be told: the schema with its defaults, and how TOML becomes a config and back.

Loads no torch.
"""

from sidestep.config.loss import LossConfig
from sidestep.config.schema import (
    AlarmConfig,
    ControlConfig,
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from sidestep.config.task import EvalConfig, TaskConfig

__all__ = [
    "AlarmConfig",
    "ControlConfig",
    "EngineConfig",
    "EvalConfig",
    "LossConfig",
    "ModelConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
]
