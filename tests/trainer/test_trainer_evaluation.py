"""Evaluation: pass@k without bias, every held-out row once, a curve from the untrained model."""

import asyncio
import itertools
import json

import pytest
from local_run import VowelTask, run_locally, small_config

from fakes import FakeEngine
from sidestep.tasks.protocol import Judgement, as_full
from sidestep.trainer.evaluation import Evaluator, pass_at_k
from sidestep.trainer.waits import Waits
from sidestep.types import Example, Prompt


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_with_one_that_passes(num_samples):
    for passed in range(num_samples + 1):
        samples = [True] * passed + [False] * (num_samples - passed)
        for k in range(1, num_samples + 1):
            choices = [any(chosen) for chosen in itertools.combinations(samples, k)]
            expected = sum(choices) / len(choices)
            assert pass_at_k(num_samples, passed, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="k is 6"):
        pass_at_k(5, 1, 6)


class DigitTask:
    """Reward 1 if the completion's member number is below the row's."""

    def __init__(self, rows):
        self.train = self.held_out = tuple(
            Example(f"row {n}", {"below": n}, f"row {n}") for n in range(rows)
        )

    def score(self, examples, completions):
        return [
            float(int(text) < example.columns["below"])
            for example, text in zip(examples, completions, strict=True)
        ]


def evaluated(tiny_model_dir, rows, **sections):
    config = small_config(tiny_model_dir, **sections)
    engine = FakeEngine(lambda: 3, script=lambda request, member, version: str(member))
    task = as_full(DigitTask(rows))
    prompts = [Prompt(i, row, (i + 1,)) for i, row in enumerate(task.held_out)]
    evaluator = Evaluator(config, task, prompts, engine, Waits(30.0))
    return asyncio.run(evaluator.evaluate(3)), engine


@pytest.mark.parametrize("rows", [1, 3, 8, 13])
def test_b71_every_held_out_row_is_asked_once_whatever_divides(tiny_model_dir, rows):
    """Requests hold 12 sequences here; with 4 samples 3 rows."""
    _, engine = evaluated(tiny_model_dir, rows, eval={"samples": 4, "pass_at": [1, 4]})
    for samples in (1, 4):
        calls = [
            [request.index for request in requests]
            for requests, _, version in engine.calls
            if requests[0].num_completions == samples and version == 3
        ]
        assert [index for call in calls for index in call] == list(range(rows))
        assert max(map(len, calls)) <= 12 // samples


def test_greedy_and_sampled_answers_are_measured_apart(tiny_model_dir):
    """Row n: n of the 4 samples pass (0, 1, 2 of 4); the greedy answer is member 0."""
    result, engine = evaluated(tiny_model_dir, 3, eval={"samples": 4, "pass_at": [1, 2, 4]})
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.sampled_mean == pytest.approx((0 + 0.25 + 0.5) / 3)
    assert result.pass_at == pytest.approx(
        {1: (0 + 0.25 + 0.5) / 3, 2: (0 + 0.5 + 5 / 6) / 3, 4: 2 / 3}
    )
    assert (result.length_mean, result.truncated_fraction) == (1.0, 0.0)
    assert [sampling.greedy for _, sampling, _ in engine.calls] == [True, False]


def test_without_samples_only_the_greedy_answer_is_asked(tiny_model_dir):
    result, engine = evaluated(tiny_model_dir, 3)
    assert (result.sampled_mean, dict(result.pass_at)) == (None, {})
    assert len(engine.calls) == 1


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_curve_starts_at_the_untrained_model(tiny_model_dir, tmp_path):
    """At lag 0 too; evaluations of one version are equal, so step 0 skipped would show the same."""
    sections = {"train": {"steps": 3, "eval_every": 1}, "eval": {"samples": 2, "pass_at": [1, 2]}}
    run_locally(small_config(tiny_model_dir, **sections), tmp_path / "run")
    first, *others = rows_of(tmp_path / "run")
    assert first["accuracy/eval_start"] is not None and first["accuracy/eval"] is not None
    assert set(first["eval/pass_at_start"]) == {"1", "2"}
    assert all("accuracy/eval_start" not in row for row in others)
    assert all(row["accuracy/eval"] is not None for row in others)
    # the same weights, asked again by a run that trains on nothing of them
    frozen = sections | {"train": {"steps": 1, "eval_every": 1, "learning_rate": 1e-30}}
    run_locally(small_config(tiny_model_dir, **frozen), tmp_path / "frozen")
    (row,) = rows_of(tmp_path / "frozen")
    assert row["accuracy/eval"] == row["accuracy/eval_start"] == first["accuracy/eval_start"]
    assert row["eval/pass_at"] == row["eval/pass_at_start"]


def test_evaluation_at_the_start_changes_no_weight(tiny_model_dir, tmp_path):
    from local_run import equal_weights, weights_of

    one = run_locally(small_config(tiny_model_dir, train={"eval_every": 0}), tmp_path / "a")
    two = run_locally(small_config(tiny_model_dir, train={"eval_every": 2}), tmp_path / "b")
    assert equal_weights(weights_of(one), weights_of(two))


class PartsTask(VowelTask):
    """Two rewards; the third completion of every group has a problem."""

    notices = ()

    def judge(self, examples, completions):
        vowels = tuple(self.score(examples, completions))
        lengths = tuple(float(len(text)) for text in completions)
        total = tuple(v + 0.1 * n for v, n in zip(vowels, lengths, strict=True))
        problems = tuple("parts: odd" if i % 4 == 2 else "" for i in range(len(completions)))
        return Judgement(total, {"vowels": vowels, "length": lengths}, problems)

    def close(self):
        pass


def test_the_mean_of_each_reward_and_the_problems_are_in_the_rows(tiny_model_dir, tmp_path):
    run_locally(small_config(tiny_model_dir), tmp_path / "run", task=PartsTask())
    for row in rows_of(tmp_path / "run"):
        expected = row["reward/vowels"] + 0.1 * row["reward/length"]
        assert row["reward/mean"] == pytest.approx(expected)
        assert row["reward/problems"] == {"parts: odd": 3}


def test_parts_and_problems_of_waiting_groups_survive_a_checkpoint(tiny_model_dir, tmp_path):
    from sidestep.trainer.checkpoint import group_from_json, group_to_json
    from sidestep.types import Completion, Group

    example = Example("p", {"when": object()}, "row 1")  # a column JSON does not have
    completions = (Completion((1,), (-0.5,), (0,), "stop", "a"),)
    group = Group(
        0, Prompt(0, example, (1,)), completions, (1.0,), 0.5, {"exact": (1.0,)}, ("odd",)
    )
    back = group_from_json(json.loads(json.dumps(group_to_json(group))))
    assert (back.reward_parts, back.problems) == ({"exact": (1.0,)}, ("odd",))
    assert (back.rewards, back.completions) == (group.rewards, group.completions)
