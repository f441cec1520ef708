"""Everything a run can be told, with its default: the only home of defaults of the system half.

Keys are TOML sections and names (`rollout.max_lag`). Types are strict (`true` is not 1, "5" is not
5) and an unknown key is refused. Rules that span several keys are in `rules`, and a
RunConfig that breaks one cannot be built. `loading.load_config` reads recipes and says where a bad
value was written; `writing.to_toml` writes a config back.

Paths in a config are relative to the folder the command runs in.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from sidestep.config.loss import LossConfig
from sidestep.config.rules import find_problem
from sidestep.config.section import Section
from sidestep.config.task import EvalConfig, TaskConfig

# Context of a validation that checks each key alone, for `doctor`, which lists every broken rule.
ANY_COMBINATION = "any_combination"

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]


class ModelConfig(Section):
    """The model that is trained: a Hugging Face causal language model."""

    path: str = Field(
        "packaged", description="folder or hub name; 'packaged' is the tiny model that ships here"
    )
    device: Device = Field("auto", description="of the trainer: auto, cpu, mps, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of the weights; train.precision says what they are multiplied in"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field(
        "sdpa", description="attention of transformers, in the trainer and the engine"
    )
    reference_path: str | None = Field(
        None,
        description="reference of the KL penalty (loss.kl_coef); absent: the model as it starts",
    )


class EngineConfig(Section):
    """Where tokens come from."""

    kind: Literal["embedded"] = "embedded"
    temperature: float = Field(1.0, gt=0.0)
    max_new_tokens: int = Field(8, ge=1)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    batch_groups: int | None = Field(
        None,
        ge=1,
        description="groups generated in one batch; a divisor of rollout.groups_per_step, "
        "which is the default",
    )
    device: Device | None = Field(None, description="absent: model.device")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="of the engine's weights; absent: model.dtype"
    )
    replicas: int = Field(1, ge=1, description="engine processes")
    drop_finished: bool | None = Field(
        None,
        description="rows that have ended leave the batch; absent: where rollouts run ahead in "
        "bounded mode. Not in exact mode and not by itself at lag 0: log-probabilities depend on "
        "the shape of the batch by rounding",
    )


class RolloutConfig(Section):
    """How far rollouts may run ahead of training."""

    lag_mode: Literal["bounded", "exact"] = "bounded"
    max_lag: int = Field(
        4, ge=0, description="largest lag in steps (bounded), or the lag itself (exact)"
    )
    group_size: int = Field(8, ge=1, description="completions per prompt")
    groups_per_step: int = Field(64, ge=1, description="groups in one optimizer step")
    drop_equal_rewards: bool = Field(
        False,
        description="drop groups whose rewards are all equal and admit another (bounded mode only)",
    )
    mask_truncated: bool = Field(
        False,
        description="completions cut at engine.max_new_tokens are not trained on and are no "
        "baseline for the others",
    )
    timeout_s: float = Field(
        600.0,
        gt=0.0,
        description="a loop that waits longer stops the run and names whom it waits for",
    )


class TrainConfig(Section):
    """The optimizer and the rhythm of a run."""

    steps: int = Field(120, ge=1, description="rollout batches to train on")
    steps_per_batch: int = Field(
        1,
        ge=1,
        description="mini-batches: parts of whole groups that a rollout batch is cut into, an "
        "optimizer step on each; at most rollout.groups_per_step",
    )
    epochs_per_batch: int = Field(1, ge=1, description="times that each rollout batch is used")
    learning_rate: float = Field(5e-4, gt=0.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0, description="in optimizer steps")
    ess_learning_rate: bool = Field(
        False,
        description="multiply the learning rate of a step by the square root of its effective "
        "sample size, as a share of the sequences (VCPO)",
    )
    skip_share: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="share of the steps that is skipped at random: a rival for studies of control",
    )
    weight_decay: float = Field(0.0, ge=0.0)
    # Not strict: TOML has lists, no tuples.
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False)
    adam_eps: float = Field(1e-8, gt=0.0)
    max_norm: float | None = Field(
        None, gt=0.0, description="clip the gradient's norm to this; absent: no clipping"
    )
    micro_batch_size: int | None = Field(
        None, ge=1, description="sequences per forward pass; absent: all at once"
    )
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="positions per forward pass, padding counted; absent: no such limit",
    )
    layout: Literal["auto", "packed", "bucketed", "padded"] = Field(
        "auto",
        description="packed: completions of a prompt share a row, which holds the prompt once; "
        "bucketed: a row each, micro-batches of like length; padded: rows as they come. auto: "
        "packed if the model passes a trial, else bucketed",
    )
    pack_tokens: int = Field(
        512,
        ge=1,
        description="longest packed row: attention is computed over whole rows, so that long ones "
        "waste more than the prompt costs",
    )
    precision: Literal["model", "bfloat16"] = Field(
        "model", description="model: as model.dtype; bfloat16: autocast, weights stay model.dtype"
    )
    activation_checkpointing: bool = Field(
        False, description="compute each layer again in the backward pass instead of keeping it"
    )
    compile: bool = Field(False, description="torch.compile of each layer")
    numerics_every: int = Field(
        20,
        ge=0,
        description="steps between measurements of what batch shape and precision do to the "
        "log-probabilities of one group (numerics/*); 0: never",
    )
    eval_every: int = Field(20, ge=0, description="steps between evaluations, 0: only at the end")
    checkpoint_every: int = Field(
        50, ge=0, description="steps between checkpoints, 0: only at the end and on Ctrl-C"
    )
    keep_checkpoints: int = Field(2, ge=1)

    @property
    def optimizer_steps_per_batch(self) -> int:
        """Optimizer steps on one rollout batch: versions that it may add."""
        return self.steps_per_batch * self.epochs_per_batch


class ControlConfig(Section):
    """Arguments of `sidestep.GradientControl`; what they mean: there and docs/method.md."""

    mode: Literal["control", "observe", "off"] = "control"
    reference: Literal["previous", "ema", "displacement"] = "previous"
    space: Literal["gradient", "update"] = "gradient"
    low: Cosine | Literal["calibrate"] = 0.1
    high: Cosine | Literal["calibrate"] = 0.6
    strength: Share | Literal["secant", "drift", "spring"] = 1.0
    residual: float | None = Field(None, ge=0.0, lt=1.0)
    scope: Literal["model", "group", "block"] = "model"
    above: Literal["skip", "damp", "project"] | None = Field(
        None, description="absent: skip in space gradient, project in space update"
    )
    damp_power: float = Field(2.0, gt=0.0)
    drift_scale: float = Field(0.1, gt=0.0)
    max_skips: int = Field(4, ge=0)
    calibrate_steps: int = Field(50, ge=1)
    secant_memory: float = Field(0.98, ge=0.0, lt=1.0)
    spring: Share | None = Field(
        None,
        description="share of the displacement that strength spring takes back; absent: as "
        "strength drift",
    )
    snapshot: Literal["raw", "applied"] | None = Field(
        None, description="absent: raw in space gradient, applied in space update"
    )
    snapshot_dtype: Literal["float32", "bfloat16"] = "float32"
    snapshot_device: Literal["same", "cpu"] = "same"
    expected_every: int = Field(
        0,
        ge=0,
        description="steps between readings of the cosine that fresh data would show, from the two "
        "halves of a batch (align/expected, align/excess); 0: never. Costs a copy of the gradient",
    )

    def arguments(self) -> dict[str, Any]:
        """Those of `GradientControl`."""
        return self.model_dump(exclude={"expected_every"})


class AlarmConfig(Section):
    """Arguments of `sidestep.control.alarm.Alarm`: when a run is called likely to collapse."""

    window: int = Field(20, ge=1, description="measured steps that each sign is taken over")
    cosine_limit: Cosine = 0.6
    cosine_rise: float = Field(0.2, gt=0.0, description="of the cosine above the first window's")
    excess_limit: float = Field(0.2, gt=0.0, description="of align/excess")
    ess_limit: float = Field(0.3, ge=0.0, description="of ratio/ess")
    norm_factor: float = Field(3.0, gt=1.0, description="of grad/norm_raw over the first window's")
    patience: int = Field(40, ge=1, description="aligned steps in a row that ring the alarm alone")


Sink = Literal["tensorboard", "wandb", "trackio", "mlflow"]
# Not strict: TOML has lists, no tuples.
Sinks = Annotated[tuple[Sink, ...], Field(strict=False, min_length=0)]


class LogConfig(Section):
    """Where the numbers of metrics.jsonl go besides: docs/metrics.md has their names."""

    sinks: Sink | Sinks = Field(
        ("tensorboard",), description="one or several; an empty list: metrics.jsonl alone"
    )
    project: str = Field("sidestep", description="project (wandb, trackio) or experiment (mlflow)")

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The sinks by name, each once."""
        return (self.sinks,) if isinstance(self.sinks, str) else tuple(dict.fromkeys(self.sinks))


class RunConfig(Section):
    """One run."""

    seed: int = Field(0, ge=0, lt=2**63)
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    loss: LossConfig = LossConfig()
    control: ControlConfig = ControlConfig()
    alarm: AlarmConfig = AlarmConfig()
    log: LogConfig = LogConfig()

    @property
    def drops_finished(self) -> bool:
        """`engine.drop_finished`; where it is absent: whether nothing asks for equal bits."""
        ahead = self.rollout.lag_mode == "bounded" and self.rollout.max_lag > 0
        return ahead if self.engine.drop_finished is None else self.engine.drop_finished

    @model_validator(mode="after")
    def _keep_the_rules(self, info: ValidationInfo) -> Self:
        if (info.context or {}).get(ANY_COMBINATION):
            return self
        problem = find_problem(self)
        if problem is not None:
            raise PydanticCustomError(
                "rule", "{message}", {"message": problem.message, "keys": problem.keys}
            )
        return self
