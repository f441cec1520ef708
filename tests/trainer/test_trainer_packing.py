"""Packed and bucketed rows: nothing changes but what is computed."""

import copy
from dataclasses import replace

import pytest
import torch
from step_support import batch_of, sampled_groups, trainer_for
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from sidestep.buffer.collate import collate
from sidestep.errors import UsageError
from sidestep.losses import count_denominators
from sidestep.models.loading import load_model
from sidestep.trainer.forward import choose_layout, completion_logprobs
from sidestep.trainer.packing import obstacle, pack
from sidestep.trainer.parts import Sample, lengths_of, micro_batches
from sidestep.types import Completion, Example, Group, Prompt


def uneven_groups(model_dir):
    """Real groups, cut to answers of 1 to 6 tokens."""
    groups = sampled_groups(model_dir)
    number = iter(range(100))

    def cut(completion):
        n = 1 + next(number) * 5 % 6
        return Completion(
            completion.token_ids[:n], completion.logprobs[:n], completion.versions[:n], "length"
        )

    return [replace(g, completions=tuple(cut(c) for c in g.completions)) for g in groups]


def gradient(model_dir, batch, **train):
    trainer = trainer_for(model_dir, train=train)
    sums = trainer._backward(Sample(batch), count_denominators(batch.mask_BT))
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double(), sums


@pytest.mark.parametrize("layout", ["packed", "bucketed"])
@pytest.mark.parametrize("sequences", [None, 8, 4])
def test_gradients_are_those_of_padded_rows_in_1_2_and_4_micro_batches(
    tiny_model_dir, layout, sequences
):
    batch = batch_of(uneven_groups(tiny_model_dir))
    plain, plain_sums = gradient(tiny_model_dir, batch, layout="padded")
    got, sums = gradient(tiny_model_dir, batch, layout=layout, micro_batch_size=sequences)
    assert plain.norm() > 0
    assert (got - plain).norm() < 1e-6 * plain.norm()
    assert sums.loss == pytest.approx(plain_sums.loss, abs=1e-6)
    ratios, plain_ratios = sums.off_policy.total.ratios, plain_sums.off_policy.total.ratios
    assert ratios.num_tokens == plain_ratios.num_tokens
    assert ratios.sum_rho == pytest.approx(plain_ratios.sum_rho, rel=1e-6)


@pytest.mark.parametrize("layout", ["packed", "bucketed", "padded"])
@pytest.mark.parametrize(
    "limits", [{}, {"max_tokens_per_micro_batch": 60}, {"micro_batch_size": 3}]
)
def test_every_trained_row_is_in_one_micro_batch_within_the_limits(tiny_model_dir, layout, limits):
    trainer = trainer_for(tiny_model_dir, train={"layout": layout, **limits})
    batch = batch_of(uneven_groups(tiny_model_dir))
    batch = replace(batch, mask_BT=batch.mask_BT.index_fill(0, torch.tensor([2, 9]), 0.0))
    cut = micro_batches(batch, layout, trainer.config.train)
    rows = [row for part in cut for row in torch.arange(16)[part.rows].tolist()]
    skipped = set() if layout == "padded" else {2, 9}
    assert sorted(rows) == [row for row in range(16) if row not in skipped]
    assert (len(cut) > 1) == bool(limits)
    for part in cut:
        of_part = Sample(batch).of(part).batch
        assert of_part.num_sequences <= limits.get("micro_batch_size", 16)
        shape = of_part.token_ids_BL.shape
        if part.packs:
            shape = pack(of_part, part.packs).token_ids_RL.shape
            assert sum(part.packs) == of_part.num_sequences
        most = limits.get("max_tokens_per_micro_batch")
        assert not most or shape.numel() <= most or shape[0] == 1


def test_b71_uneven_groups_are_all_trained_on_once(tiny_model_dir):
    """Groups of 3, 2 and 2, two sequences a micro-batch: nothing is lost to division."""
    prompts = [Prompt(i, Example("x"), (4, 5 + i)) for i in range(3)]
    answer = Completion((7, 8), (-1.0, -1.0), (0, 0), "length")
    sizes = (3, 2, 2)
    groups = [Group(i, prompts[i], (answer,) * n) for i, n in enumerate(sizes)]
    batch = collate(groups, [[1.0] * n for n in sizes])
    for layout in ("packed", "bucketed", "padded"):
        _, sums = gradient(tiny_model_dir, batch, layout=layout, micro_batch_size=2)
        assert sums.off_policy.total.ratios.num_tokens == 14
        assert sums.off_policy.total.sequences.num_sequences == 7


def test_a_long_group_is_split_into_rows_of_at_most_pack_tokens(tiny_model_dir):
    batch = batch_of(uneven_groups(tiny_model_dir))
    trainer = trainer_for(tiny_model_dir, train={"layout": "packed", "pack_tokens": 12})
    prompts_B, lengths_B = lengths_of(batch)
    (part,) = micro_batches(batch, "packed", trainer.config.train)
    first = 0
    for number in part.packs:
        rows = part.rows[first : first + number]
        first += number
        assert len({batch.group_indices[row] for row in rows}) == 1
        tokens = int(prompts_B[rows[0]] + lengths_B[rows].sum())
        assert tokens <= 12 or number == 1
    assert max(part.packs) > 1
    split, _ = gradient(tiny_model_dir, batch, layout="packed", pack_tokens=12)
    plain, _ = gradient(tiny_model_dir, batch, layout="padded")
    assert (split - plain).norm() < 1e-6 * plain.norm()


def test_members_of_a_row_do_not_see_each_other(tiny_model_dir):
    model = load_model(str(tiny_model_dir), "float32", "cpu")
    batch = batch_of(uneven_groups(tiny_model_dir))
    other = batch.token_ids_BL.clone()
    other[0, -batch.mask_BT.shape[1] :] = 9
    changed = replace(batch, token_ids_BL=other)
    before = completion_logprobs(model, batch, 1.0, (4,) * 4)
    after = completion_logprobs(model, changed, 1.0, (4,) * 4)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1:], after[1:])


def test_the_prompt_is_computed_once_and_padding_hardly(tiny_model_dir):
    batch = batch_of(uneven_groups(tiny_model_dir))
    work = {
        layout: trainer_for(tiny_model_dir, train={"layout": layout}).step(batch, 0).work
        for layout in ("packed", "padded")
    }
    assert work["padded"]["tokens/computed"] == batch.token_ids_BL.numel()
    assert work["packed"]["tokens/computed"] < 0.6 * work["padded"]["tokens/computed"]
    packed = pack(Sample(batch).batch, (4,) * 4)
    assert work["packed"]["tokens/computed"] == packed.token_ids_RL.numel()


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SMALL | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 64}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_that_take_masks_and_positions_are_packed(kind, attention):
    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(**LLAMA, attn_implementation=attention)
        model = LlamaForCausalLM(config)
    else:
        config = GPT2Config(
            vocab_size=50, n_embd=16, n_layer=2, n_head=2, attn_implementation=attention
        )
        model = GPT2LMHeadModel(config)
    assert obstacle(model.eval()) is None


def test_a_sliding_window_or_positions_of_its_own_fall_back_to_buckets(tiny_model_dir):
    trainer = trainer_for(tiny_model_dir)
    auto = trainer.config.train
    assert choose_layout(auto, trainer.model) == "packed"
    window = MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=4)).eval()
    assert choose_layout(auto, trainer.model, window) == "bucketed"

    class CountsItself(LlamaForCausalLM):
        def forward(self, position_ids=None, **inputs):
            return super().forward(**inputs)

    stubborn = CountsItself(LlamaConfig(**LLAMA, initializer_range=0.5)).eval()
    assert "differ" in obstacle(stubborn)
    packed = auto.model_copy(update={"layout": "packed"})
    with pytest.raises(UsageError, match=r'train.layout = "packed" does not suit.*differ'):
        choose_layout(packed, stubborn)


def test_the_reference_and_the_proximal_policy_go_through_the_same_rows(tiny_model_dir):
    """KL to the model itself is 0 and the proximal ratio is 1, packed or not."""
    batch = batch_of(uneven_groups(tiny_model_dir))
    for layout in ("packed", "bucketed"):
        trainer = trainer_for(
            tiny_model_dir,
            train={"layout": layout, "micro_batch_size": 6, "epochs_per_batch": 2},
            loss={"anchor": "proximal", "kl_coef": 0.1},
        )
        sample = trainer._sample(batch)
        trained = batch.mask_BT != 0
        alone = completion_logprobs(copy.deepcopy(trainer.model), batch, 1.0).detach()
        for logprobs in (sample.proximal_logprobs_BT, sample.reference_logprobs_BT):
            assert (logprobs - alone)[trained].abs().max() < 1e-5
        assert trainer.step(batch, 0).advanced
