"""Real trainers on the tiny model, silent, and a probe that sees what the optimizer gets."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

SILENT = {
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "disable_tqdm": True,
    "report_to": [],
    "save_strategy": "no",
    "weight_decay": 0.0,
    "seed": 1,
}


class Probe(TrainerCallback):
    """By optimizer step: gradients before the control's hook and after it, weights before and after
    the step, moments after it, learning rate.
    """

    def __init__(self):
        self.raw, self.applied, self.before, self.after = [], [], [], []
        self.moments, self.rates = [], []
        self.handles = []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        inner = optimizer.optimizer
        if not self.handles:  # after the control's hook
            self.handles.append(inner.register_step_pre_hook(self._see_applied))
            self.named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.raw.append(self._grads())
        self.before.append(self._weights())

    def _see_applied(self, optimizer, args, kwargs):
        self.applied.append(self._grads())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.after.append(self._weights())
        states = optimizer.optimizer.state
        self.moments.append(
            {
                name: {key: value.clone() for key, value in states[p].items()}
                for name, p in self.named.items()
                if p in states
            }
        )

    def on_train_end(self, args, state, control, **kwargs):
        for handle in self.handles:
            handle.remove()

    def _grads(self):
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.named.items()}

    def _weights(self):
        return {n: p.detach().clone() for n, p in self.named.items()}


class Records(TrainerCallback):
    """The record of every optimizer step."""

    def __init__(self, callback):
        self.callback, self.found, self.handles = callback, [], []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.found.append(self.callback.last)
        self.handles.append(self.callback.handle)

    @property
    def regimes(self):
        return [record.regime for record in self.found]


def text_trainer(model_dir, folder, callbacks=(), model=None, optimizers=(None, None), **settings):
    """A plain Trainer that learns to continue short sums."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = [f"{a}+{b}={a + b}" for a in range(10, 18) for b in range(10, 14)]
    dataset = Dataset.from_list([{"input_ids": tokenizer(text).input_ids} for text in texts])
    settings = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 6} | settings
    return Trainer(
        model or AutoModelForCausalLM.from_pretrained(model_dir),
        args=TrainingArguments(output_dir=str(folder), **(SILENT | settings)),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def digit_share(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / (len(text) or 1) for text in completions]


def grpo_trainer(model_dir, folder, callbacks=(), **settings):
    """TRL's GRPOTrainer that learns to say digits."""
    from trl import GRPOConfig, GRPOTrainer

    own = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-3,
        "max_steps": 20,
    }
    peft_config = settings.pop("peft_config", None)
    prompts = [f"{a}+{b}=" for a in range(10, 18) for b in range(10, 18)]
    return GRPOTrainer(
        str(model_dir),
        reward_funcs=digit_share,
        args=GRPOConfig(output_dir=str(folder), **(SILENT | own | settings)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=list(callbacks),
        peft_config=peft_config,
    )


def async_trainer(model_dir, folder, callbacks=(), rollouts=None, **settings):
    """TRL's AsyncGRPOTrainer with an in-process worker that samples when asked."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from trl_local_rollouts import LocalRollouts
    from trl_on_a_cpu import run_on_a_cpu

    class Digits(LocalRollouts):
        def reward(self, text, right):
            return digit_share([""], [text])[0]

    run_on_a_cpu()
    own = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "learning_rate": 1e-3,
        "max_steps": 30,
        "token_budget": 0,
        "model_init_kwargs": {"dtype": "float32"},
    }
    peft_config = settings.pop("peft_config", None)
    rollouts = rollouts or Digits(str(model_dir), num_prompts=4, group_size=4)
    return AsyncGRPOTrainer(
        str(model_dir),
        args=AsyncGRPOConfig(output_dir=str(folder), **(SILENT | own | settings)),
        train_dataset=Dataset.from_dict({"prompt": ["unused"]}),
        callbacks=list(callbacks),
        peft_config=peft_config,
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )


def train(trainer, **arguments):
    trainer.train(**arguments)
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(first, second):
    """Bitwise, tensor by tensor; None equals None."""
    return first.keys() == second.keys() and all(
        second[name] is None if one is None else torch.equal(one, second[name])
        for name, one in first.items()
    )


def product(first, second):
    """<first, second> in float64; None counts as zero."""
    return sum(
        float((first[n].double() * second[n].double()).sum())
        for n in first
        if first[n] is not None and second[n] is not None
    )


def length(vector):
    return product(vector, vector) ** 0.5


def assert_projected_as_promised(records, probe, clips=False):
    """|<g',p> - (1 - strength) <g,p>| <= 1e-6 |g||p| in every projected step, read from p.grad.

    For reference "previous" with raw snapshots and strength 1. clips: with max_norm.
    """
    reference = None
    for record, raw, applied in zip(records, probe.raw, probe.applied, strict=True):
        if record.regime == "project":
            assert abs(product(applied, reference)) <= 1e-6 * length(raw) * length(reference)
            assert product(raw, reference) > 0.0
        if record.regime in ("pass", "undefined") and not clips:
            assert same(raw, applied)
        reference = raw


def assert_moved_by(probe, **adamw):
    """The weights went where torch's AdamW takes them with the gradients after the hook."""
    names = list(probe.before[0])
    mine = {n: torch.nn.Parameter(probe.before[0][n].clone()) for n in names}
    optimizer = torch.optim.AdamW(mine.values(), fused=True, weight_decay=0.0, **adamw)
    for applied, rate, after in zip(probe.applied, probe.rates, probe.after, strict=True):
        for n in names:
            mine[n].grad = None if applied[n] is None else applied[n].clone()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        assert same({n: p.detach() for n, p in mine.items()}, after)
