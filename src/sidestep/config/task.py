"""The `[task]` and `[eval]` sections: what is asked, how it is scored, and how often that is tried.

What the keys do, with examples: docs/tasks.md. Rules between them: `task_rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sidestep.config.section import Section

TaskKind = Literal["arithmetic", "jsonl", "function", "math", "dataset", "reasoning_gym"]

Weight = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class TaskConfig(Section):
    """What is asked and how answers are scored."""

    kind: TaskKind = "arithmetic"
    path: str | None = Field(
        None,
        description="JSONL file of questions (kinds jsonl, function, math); "
        "kind dataset: a folder of Hugging Face datasets, or a hub name",
    )
    eval_path: str | None = Field(
        None, description="the same for evaluation; without it `eval_size` rows are held out"
    )
    eval_size: int | None = Field(
        None,
        ge=0,
        description="rows held out for evaluation; absent: 200, or a fifth of a file with fewer "
        "than 1,000 rows",
    )
    split: str | None = Field(None, description="of kind dataset; absent: train")
    eval_split: str | None = Field(
        None,
        description="split for evaluation; absent: rows of task.split are held out",
    )
    subset: str | None = Field(
        None, description="configuration of a hub data set, such as main of openai/gsm8k"
    )
    columns: dict[str, str] | None = Field(
        None,
        description="kind dataset: which of its columns is the `prompt` (or `messages`) and the "
        "`answer`; absent: columns of these names",
    )
    dataset: str | None = Field(
        None, description="name of a data set of reasoning-gym, such as chain_sum"
    )
    mix: dict[str, Weight] | None = Field(
        None, description="several data sets of reasoning-gym: name = weight"
    )
    options: dict[str, Any] | None = Field(
        None,
        description="settings of task.dataset; with task.mix: a table of settings for each name",
    )
    train_size: int | None = Field(
        None,
        ge=1,
        le=900_000,
        description="questions that reasoning-gym makes to train on; absent: 2000",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=1000,
        description="which questions reasoning-gym makes to train on; absent: 0. "
        "Those held out are always the same",
    )
    system_prompt: str | None = Field(
        None, description="system message before every question; implies task.chat"
    )
    chat: bool = Field(
        False, description="put questions that are text through the tokenizer's chat template"
    )
    answer_regex: str | None = Field(
        None,
        description="its first group (or whole match), last occurrence, is the answer of a "
        "completion; default: all of it",
    )
    function: str | None = Field(
        None,
        description="reward function, 'module:name' or 'file.py:name', "
        "called f(prompts, completions, **columns)",
    )
    rewards: list[str] | None = Field(
        None,
        description="several rewards: functions as in task.function, `exact` (the answer, as kind "
        "jsonl scores it), `math` (as kind math does), `reasoning_gym` (its own scoring)",
    )
    reward_weights: list[Weight] | None = Field(
        None, description="weights of task.rewards; absent: 1 each"
    )
    reward_timeout_s: float | None = Field(
        None,
        gt=0.0,
        description="time limit of one call of a reward function, after which it scores 0; "
        "absent: none but rollout.timeout_s, which ends the run",
    )
    math_timeout_s: float = Field(
        5.0, gt=0.0, description="time limit of comparing one answer, after which it scores 0"
    )
    overlong_tokens: int = Field(
        0,
        ge=0,
        description="last tokens before engine.max_new_tokens over which the reward falls by up to "
        "1 (DAPO); 0: no such penalty",
    )

    @property
    def reward_names(self) -> tuple[str, ...]:
        """What scores a completion: `rewards` or `function`, else the kind's own."""
        if self.rewards is not None:
            return tuple(self.rewards)
        if self.function is not None:
            return (self.function,)
        own = {"math": "math", "reasoning_gym": "reasoning_gym", "function": None}
        name = own.get(self.kind, "exact")
        return () if name is None else (name,)


class EvalConfig(Section):
    """What an evaluation does besides a greedy answer to each held-out row (`train.eval_every`)."""

    samples: int = Field(
        0,
        ge=0,
        description="completions sampled for each held-out row, at engine.temperature; 0: none",
    )
    pass_at: list[Count] = Field(
        [1],
        min_length=1,
        description="k of pass@k over the samples, none above eval.samples; read if there are any",
    )
    pass_reward: float = Field(1.0, description="a sample passes with a reward of at least this")
