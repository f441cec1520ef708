"""From groups to a batch: who is trained on, and with what advantage."""

import json

import pytest
import torch
from local_run import run_locally, small_config

from sidestep.losses import grpo_advantages
from sidestep.trainer.accounting import difficulty, group_counts, prompt_length
from sidestep.trainer.batch import make_batch
from sidestep.types import Completion, Example, Group, Prompt


def group_of(rewards, lengths=None, cut=(), index=0, prompt_tokens=3):
    lengths = lengths or [2] * len(rewards)
    completions = tuple(
        Completion((5,) * n, (-1.0,) * n, (0,) * n, "length" if i in cut else "stop")
        for i, n in enumerate(lengths)
    )
    prompt = Prompt(index, Example("x"), (4,) * prompt_tokens)
    return Group(index, prompt, completions, tuple(rewards))


def no_reference(batch):
    raise AssertionError("no loss asked for a reference model")


def made(model_dir, groups, reference=no_reference, **sections):
    sections.setdefault("rollout", {})
    sections["rollout"]["group_size"] = len(groups[0].rewards)
    return make_batch(groups, small_config(model_dir, **sections), reference)


def per_sequence(batch):
    return batch.advantages_BT[:, 0].tolist()


def test_advantages_are_those_of_each_group_on_every_trained_token(tiny_model_dir):
    groups = [group_of([0.0, 1.0], [3, 1]), group_of([2.0, 5.0], [2, 4], index=1)]
    batch = made(tiny_model_dir, groups).batch
    expected = grpo_advantages(torch.tensor([[0.0, 1.0], [2.0, 5.0]])).flatten()
    assert torch.equal(batch.advantages_BT, expected[:, None] * batch.mask_BT)


def test_b66_a_completion_that_is_not_trained_on_moves_no_baseline(tiny_model_dir):
    """Rewards 0, 0, 10; the 10 is cut and masked: its peers are equal and learn nothing."""
    group = group_of([0.0, 0.0, 10.0], cut={2})
    batch = made(tiny_model_dir, [group], rollout={"mask_truncated": True}).batch
    assert batch.mask_BT.sum(dim=1).tolist() == [2.0, 2.0, 0.0]
    assert not batch.advantages_BT.any()
    kept = made(tiny_model_dir, [group]).batch
    assert kept.advantages_BT[2, 0] > 1


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_group_cut_to_one_member_or_none_is_finite_and_teaches_nothing(tiny_model_dir, advantage):
    groups = [group_of([0.0, 1.0], cut={0}), group_of([0.0, 1.0], cut={0, 1}, index=1)]
    sections = {"rollout": {"mask_truncated": True}, "loss": {"advantage": advantage}}
    batch = made(tiny_model_dir, groups, **sections).batch
    assert not batch.advantages_BT.any()
    assert batch.advantages_BT.isfinite().all()


def test_overlong_shaping_changes_advantages_and_not_the_recorded_reward(tiny_model_dir):
    """max_new_tokens 5, over the last 4: lengths 1, 3, 5 cost 0, 0.5, 1."""
    group = group_of([1.0, 1.0, 1.0], lengths=[1, 3, 5])
    result = made(
        tiny_model_dir,
        [group],
        task={"overlong_tokens": 4},
        loss={"advantage": "dr_grpo"},
    )
    assert per_sequence(result.batch) == pytest.approx([0.5, 0.0, -0.5])
    assert result.added_to_reward == {"overlong": pytest.approx(-0.5)}
    assert group.rewards == (1.0, 1.0, 1.0)


def test_a_kl_penalty_in_the_reward_lowers_what_left_the_reference(tiny_model_dir):
    def reference(batch):  # the second sequence is 1 nat a token more likely than there
        shift = torch.tensor([0.0, 1.0])[:, None]
        return batch.behaviour_logprobs_BT - shift

    loss = {"kl_coef": 0.25, "kl_place": "reward", "advantage": "dr_grpo"}
    result = made(tiny_model_dir, [group_of([0.0, 0.0])], reference, loss=loss)
    assert per_sequence(result.batch) == pytest.approx([0.25, -0.25])  # 0 and -0.25 * 2 tokens
    assert result.added_to_reward == {"kl": pytest.approx(-0.25)}


def test_reinforce_pp_gives_each_token_the_penalty_of_itself_and_those_after_it(tiny_model_dir):
    def reference(batch):
        return batch.behaviour_logprobs_BT - torch.tensor([[0.0, 1.0]])

    loss = {"kl_coef": 1.0, "kl_place": "reward", "advantage": "reinforce_pp"}
    result = made(tiny_model_dir, [group_of([1.0, 3.0])], reference, loss=loss)
    returns = torch.tensor([[0.0, 0.0], [2.0, 2.0]])  # reward - 1 at both tokens
    assert torch.allclose(result.batch.advantages_BT, returns - 1.0, atol=1e-6)


def test_groups_are_counted_by_difficulty_and_length_of_the_prompt():
    trained = [group_of([0, 1]), group_of([0.5, 1], prompt_tokens=17), group_of([0, 0.2])]
    dropped = [group_of([0, 0]), group_of([1, 1]), group_of([0, 0], prompt_tokens=65)]
    assert group_counts(trained, dropped) == {
        "groups/dropped_by_reason": {"equal rewards": 3},
        "groups/trained_by_difficulty": {"0-0.25": 1, "0.5-0.75": 1, "0.75-1": 1},
        "groups/dropped_by_difficulty": {"0": 2, "1": 1},
        "groups/trained_by_prompt_length": {"1-16": 2, "17-32": 1},
        "groups/dropped_by_prompt_length": {"1-16": 2, "65-128": 1},
    }
    assert difficulty(group_of([-1, 0])) == "below 0"
    assert difficulty(group_of([3, 4])) == "above 1"
    assert [prompt_length(group_of([0], prompt_tokens=n)) for n in (16, 32, 64)] == [
        "1-16",
        "17-32",
        "33-64",
    ]


class MostlyEqualTask:
    """Every second prompt has equal rewards; prompts of the others get a mixture."""

    def __init__(self):
        self.train = tuple(Example(f"say {i}", columns={"equal": i % 2}) for i in range(6))
        self.held_out = ()

    def score(self, examples, completions):
        return [
            0.0 if example.columns["equal"] else float(i % 2) for i, example in enumerate(examples)
        ]


def test_dropped_groups_are_refilled_exactly_and_both_are_accounted_for(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir,
        rollout={"drop_equal_rewards": True, "mask_truncated": True},
        train={"steps": 3},
    )
    run_locally(config, tmp_path / "run", task=MostlyEqualTask())
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    with open(tmp_path / "run" / "groups.jsonl") as file:
        groups = [json.loads(line) for line in file]
    for row in rows:
        assert row["groups/trained"] == 3
        assert row["groups/trained_by_difficulty"] == {"0.5-0.75": 3}
        assert sum(row["groups/dropped_by_difficulty"].values()) == row["groups/dropped"]
        assert set(row["groups/dropped_by_reason"]) <= {"equal rewards"}
        assert sum(row["groups/trained_by_prompt_length"].values()) == 3
    assert sum(row["groups/dropped"] for row in rows) > 0
    indices = sorted(group["index"] for group in groups)
    assert indices == sorted(set(indices))
    assert sum(group["step"] is not None for group in groups) == 9
    untrained = sum(row["completion/untrained"].get("truncated", 0) for row in rows)
    cut = sum(round(12 * row["completion/truncated_fraction"]) for row in rows)
    assert untrained == cut > 0
