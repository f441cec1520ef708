"""TRL's trainers, with the log-probabilities of a Batch in the place of a model's."""

from __future__ import annotations

import tempfile
from functools import cache

import torch
from datasets import Dataset
from peers_support import CONSTANT, MEMBERS, ROWS, differentiated
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

__all__ = ["entropy_from_logits", "get_soft_overlong_punishment", "selective_log_softmax"]

VOCABULARY = 12
PROMPT = "w2 w3"


class GivenLogprobs(GRPOTrainer):
    """GRPOTrainer whose log-probabilities are given; all else is TRL's.

    Where it asks for a gradient they are `leaf`; else the reference's for the reference model and
    the proximal policy's for the model in training.
    """

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *_, **__
    ):
        if torch.is_grad_enabled():
            logprobs = self.leaf
        else:
            logprobs = self.batch.reference if model is self.ref_model else self.batch.proximal
        return logprobs[:, :logits_to_keep], torch.ones_like(logprobs[:, :logits_to_keep]), None


class Rewards:
    """A reward function whose answers are given."""

    __name__ = "given"

    def __call__(self, **_):
        return self.values


@cache
def model_folder():
    folder = tempfile.mkdtemp(prefix="peers-trl-model-")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.5,  # far from uniform
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _tokenizer():
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )


def _built(kind, config, settings, **arguments):
    defaults = {
        "output_dir": tempfile.mkdtemp(prefix="peers-trl-run-"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": ROWS,
        "num_generations": MEMBERS,
        "max_completion_length": int(CONSTANT),
    }
    trainer = kind(
        Qwen3ForCausalLM.from_pretrained(model_folder()),
        reward_funcs=Rewards(),
        args=config(**defaults | dict(settings)),
        train_dataset=Dataset.from_dict({"prompt": [PROMPT] * ROWS}),
        processing_class=_tokenizer(),
        **arguments,
    )
    # As the training loop leaves them before a step.
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


@cache
def _given(settings):
    return _built(
        GivenLogprobs, GRPOConfig, settings, rollout_func=lambda _, trainer: trainer.rollout
    )


@cache
def real_trainer(**settings):
    """GRPOTrainer with its own small model, nothing replaced."""
    return _built(GRPOTrainer, GRPOConfig, tuple(settings.items()))


@cache
def _rloo():
    # Short: its completions are really generated, by 12 tokens of chance.
    return _built(RLOOTrainer, RLOOConfig, (("max_completion_length", 2), ("beta", 0.0)))


def loss_of(batch, settings, *, sampled_by_vllm=False, num_items=None):
    """(Result, TRL's metrics) of GRPOTrainer's loss with the advantages of the batch.

    sampled_by_vllm: multiply by TRL's own weights of proximal over behaviour.
    num_items: trained tokens of the whole step; None means of this batch.
    """
    inputs = scored(batch, settings) if sampled_by_vllm else inputs_of(batch, num_items)
    return _differentiated(batch, settings, inputs | {"advantages": batch.advantages})


def step_of(batch, settings):
    """Result of scoring and loss, as if vLLM had sampled: from the rewards of the batch."""
    return _differentiated(batch, settings, scored(batch, settings))[0]


def _differentiated(batch, settings, inputs):
    trainer = _given(tuple(settings.items()))
    trainer.use_vllm = "importance_sampling_ratio" in inputs
    trainer._metrics["train"].clear()

    def loss(logprobs):
        trainer.leaf = logprobs
        return trainer.compute_loss(trainer.model, inputs)

    result = differentiated(loss, batch)
    return result, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def scored(batch, settings, use_vllm=True):
    """What GRPOTrainer makes of completions, their rewards and the sampler's log-probabilities.

    use_vllm: as if vLLM had sampled, which is when TRL corrects for it.
    """
    trainer = _given(tuple(settings.items()))
    trainer.batch, trainer.use_vllm = batch, use_vllm
    trainer._last_loaded_step = trainer.state.global_step  # no weights to send anywhere
    trainer.reward_funcs[0].values = batch.rewards.tolist()
    rows, tokens = batch.mask.shape
    trainer.rollout = {
        "prompt_ids": [[2, 3]] * rows,
        "completion_ids": [[4] * tokens] * rows,
        "logprobs": batch.behaviour.tolist(),
        # Holes and padding alike: tokens that are not the model's.
        "env_mask": batch.mask.long().tolist(),
    }
    return trainer._generate_and_score_completions([{"prompt": PROMPT}] * rows)


def rloo_advantages(rewards):
    trainer = _rloo()
    trainer.reward_funcs[0].values = rewards.tolist()
    return trainer._generate_and_score_completions([{"prompt": PROMPT}] * len(rewards))[
        "advantages"
    ]


def inputs_of(batch, num_items=None):
    """What GRPOTrainer's loss reads of a batch: a prompt of two tokens, and its completions."""
    mask = batch.mask.long()
    return {
        "prompt_ids": torch.full((len(mask), 2), 2),
        "prompt_mask": torch.ones(len(mask), 2, dtype=torch.long),
        "completion_ids": torch.full_like(mask, 4),
        "completion_mask": mask,
        "advantages": batch.advantages,
        "num_items_in_batch": mask.sum() if num_items is None else num_items,
        "old_per_token_logps": batch.proximal,
        "sampling_per_token_logps": batch.behaviour,
        "ref_per_token_logps": batch.reference,
    }
