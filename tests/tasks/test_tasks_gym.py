"""reasoning-gym: any of its data sets, its own scoring, splits that share nothing."""

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.tasks.build import make_task
from sidestep.tasks.gym import Gym, GymReward
from sidestep.tasks.rewards import AnswerFinder

reasoning_gym = pytest.importorskip("reasoning_gym")

NAMES = ("chain_sum", "leg_counting", "simple_equations", "fraction_simplification", "countdown")


def gym_task(**settings):
    defaults = {"kind": "reasoning_gym", "train_size": 50, "eval_size": 10}
    return make_task(TaskConfig(**defaults | settings))


def library(name, size, seed):
    return reasoning_gym.create_dataset(name, size=size, seed=seed)


@pytest.mark.parametrize("name", NAMES)
def test_rewards_are_the_librarys_own_scores_on_50_items(name):
    task = gym_task(dataset=name, train_size=60, eval_size=0)
    rows = task.train[:50]
    assert len(rows) == 50
    own = library(name, 1, seed=1)  # scores depend on the entry alone
    wrong = [str(row.columns["answer"]) for row in rows[1:]] + ["nonsense"]
    for said in (
        [str(row.columns["answer"]) for row in rows],
        wrong,
        [""] * 50,
        [f"I say {row.columns['answer']}!" for row in rows],
    ):
        expected = [
            own.score_answer(answer, dict(row.columns))
            for row, answer in zip(rows, said, strict=True)
        ]
        assert task.score(rows, said) == expected
    rights = [str(row.columns["answer"]) for row in rows]
    assert task.score(rows, rights) == [1.0] * 50, "the library's own answers are right"


@pytest.mark.slow
def test_every_data_set_of_the_library_makes_and_scores_questions():
    from reasoning_gym.factory import DATASETS

    for name in DATASETS:
        if name == "composite":
            continue
        task = gym_task(dataset=name, train_size=3, eval_size=1)
        rewards = task.score([task.train[0]] * 3, ["", "nonsense", "0"])
        assert all(isinstance(reward, float) for reward in rewards), name


def test_wrong_empty_and_missing_answers_score_as_documented():
    task = gym_task(dataset="chain_sum", answer_regex=r"=\s*(-?\d+)")
    row = task.train[0]
    right = row.columns["answer"]
    judged = task.judge([row] * 4, [f"so it = {right}", "= 123456789", "", "I do not know"])
    assert judged.rewards == (1.0, 0.0, 0.0, 0.0)
    assert judged.parts == {"reasoning_gym": judged.rewards}
    assert judged.problems == ("",) * 4


def test_questions_follow_from_the_seed_and_held_out_ones_do_not():
    one, again, other = (gym_task(dataset="chain_sum", seed=seed) for seed in (0, 0, 1))
    assert one.train == again.train and one.held_out == again.held_out
    assert other.held_out == one.held_out
    assert not {row.prompt for row in one.train} & {row.prompt for row in other.train[:40]}


def test_no_question_is_both_trained_on_and_held_out_and_what_went_is_said():
    """A data set this small repeats itself, whatever the seeds."""
    options = {"max_terms": 2, "max_digits": 1}
    task = gym_task(dataset="chain_sum", options=options, train_size=300, eval_size=50)
    assert not {row.prompt for row in task.train} & {row.prompt for row in task.held_out}
    lost = 300 - len(task.train)
    assert lost > 0
    assert task.notices == (f"{lost} of 300 questions made to train on are held out too: left out",)


def test_neighbouring_seeds_share_no_question():
    """The library makes question i of seed s like question i - 1 of seed s + 1."""
    data = library("chain_sum", 2, seed=5), library("chain_sum", 1, seed=6)
    assert data[0][1]["question"] == data[1][0]["question"], "else this guard has no point"
    gym = Gym({"chain_sum": 1.0}, {})
    sets = [{row.prompt for row in gym.examples(split=split, size=200)} for split in range(3)]
    assert not sets[0] & sets[1] and not sets[1] & sets[2]


def test_a_mix_has_its_weights_and_scores_each_question_with_its_own_data_set():
    mix = {"chain_sum": 3.0, "leg_counting": 1.0}
    task = gym_task(mix=mix, options={"chain_sum": {"max_terms": 2}}, train_size=400)
    names = [row.columns["metadata"]["source_dataset"] for row in task.train]
    assert 0.68 < names.count("chain_sum") / len(names) < 0.82
    assert set(names) == set(mix)
    sums = [row for row in task.train if row.columns["metadata"]["source_dataset"] == "chain_sum"]
    assert {row.columns["metadata"]["num_terms"] for row in sums} == {2}
    rights = [row.columns["answer"] for row in task.train]
    assert task.score(task.train, rights) == [1.0] * len(rights)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "chainsum"}, "task.dataset 'chainsum': reasoning-gym offers "),
        ({"dataset": "chainsum"}, "did you mean 'chain_sum' or"),
        ({"mix": {"leg_countin": 1.0}}, "task.mix 'leg_countin': reasoning-gym offers"),
        ({"mix": {"leg_countin": 1.0}}, "did you mean 'leg_counting' or"),
        ({"dataset": "qqqq"}, "see reasoning_gym.factory.DATASETS"),
        ({"dataset": "chain_sum", "options": {"max_term": 3}}, "did you mean 'max_terms'?"),
        ({"dataset": "chain_sum", "options": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "options": {"seed": 1}}, "use task.seed"),
        ({"mix": {"chain_sum": 1.0}, "options": {"max_terms": 3}}, "task.options.max_terms: not"),
        ({"mix": {"chain_sum": 1.0}, "options": {"chain_sum": 3}}, "[task.options.chain_sum]"),
        (
            {"dataset": "chain_sum", "options": {"max_terms": 2, "max_digits": 1}, "train_size": 1,
             "eval_size": 2000},
            "every question is also held out",
        ),
    ],
)  # fmt: skip
def test_a_wrong_name_or_setting_is_refused_with_the_fix(settings, said):
    with pytest.raises(UsageError) as caught:
        gym_task(**settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scorer_that_raises_or_hangs_over_what_a_model_wrote_scores_0_and_is_counted():
    """Faked: a scorer of the library that does so on demand."""
    import time

    class Scorer:
        def score(self, answer, example):
            if answer == "raise":
                raise ZeroDivisionError
            time.sleep(10.0 if answer == "hang" else 0.0)
            return 1.0

    row = gym_task(dataset="chain_sum").train[0]
    reward = GymReward(Scorer(), AnswerFinder(None), 0.2)
    scores = reward.score([row] * 3, ["fine", "raise", "hang"])
    assert scores.values == (1.0, 0.0, 0.0)
    assert scores.problems == (
        "",
        "reasoning_gym: its scoring raised ZeroDivisionError",
        "reasoning_gym: timed out",
    )


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UsageError, match=r"pip install 'sidestep\[reasoning\]'"):
        gym_task(dataset="chain_sum")
