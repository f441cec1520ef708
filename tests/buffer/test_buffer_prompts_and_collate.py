"""Which prompt a group asks, and groups as one padded batch."""

import pytest
import torch

from sidestep.buffer.collate import collate
from sidestep.buffer.prompts import PromptOrder
from sidestep.types import Completion, Example, Group, Prompt


def test_b51_three_prompts_go_on_in_new_epochs_each_prompt_once_an_epoch():
    order = PromptOrder(3, seed=0)
    asked = [order.prompt_of(index) for index in range(30)]
    epochs = [asked[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_prompt_of_a_group_depends_on_seed_and_index_alone():
    forwards = [PromptOrder(50, seed=3).prompt_of(index) for index in range(200)]
    order = PromptOrder(50, seed=3)
    backwards = [order.prompt_of(index) for index in reversed(range(200))]
    assert forwards == backwards[::-1]
    assert forwards != [PromptOrder(50, seed=4).prompt_of(index) for index in range(200)]


def test_an_empty_prompt_set_is_refused():
    with pytest.raises(ValueError, match="num_prompts must be at least 1, got 0"):
        PromptOrder(0, seed=0)


def test_collate_places_every_token_where_its_column_says():
    def prompt(*ids):
        return Prompt(0, Example("q"), ids)

    first = Group(
        5,
        prompt(11, 12, 13),
        (
            Completion((1, 2), (-0.1, -0.2), (7, 8), "stop"),
            Completion((3,), (-0.3,), (7,), "length"),
        ),
    )
    second = Group(6, prompt(21), (Completion((4, 5, 6), (-0.4, -0.5, -0.6), (9, 9, 9), "stop"),))
    batch = collate([first, second], [[1.0, -1.0], [0.5]])
    assert batch.token_ids_BL.tolist() == [
        [11, 12, 13, 1, 2, 0],
        [11, 12, 13, 3, 0, 0],
        [0, 0, 21, 4, 5, 6],
    ]
    assert batch.attention_mask_BL.tolist() == [
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    assert batch.mask_BT.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert batch.versions_BT.tolist() == [[7, 8, 0], [7, 0, 0], [9, 9, 9]]
    assert batch.advantages_BT.tolist() == [[1, 1, 0], [-1, 0, 0], [0.5, 0.5, 0.5]]
    expected = torch.tensor([[-0.1, -0.2, 0], [-0.3, 0, 0], [-0.4, -0.5, -0.6]])
    assert torch.equal(batch.behaviour_logprobs_BT, expected)
    assert batch.group_indices == (5, 5, 6)
    assert batch.num_trained_tokens == 6
