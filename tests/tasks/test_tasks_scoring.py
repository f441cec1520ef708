"""Arithmetic and JSONL rows: which answers are right."""

import json
import time

import pytest

from sidestep.config import TaskConfig
from sidestep.errors import UsageError
from sidestep.models.addition import NUM_UNSEEN_PAIRS, operand_pairs
from sidestep.tasks.arithmetic import ArithmeticTask
from sidestep.tasks.build import make_task

PINNED_PAIRS = ((71, 63), (46, 48), (1, 5), (9, 25), (12, 62))


def test_arithmetic_splits_all_pairs_and_its_answers_are_the_sums():
    task = make_task(TaskConfig(eval_size=300))
    assert (len(task.train), len(task.held_out)) == (9_700, 300)
    prompts = {example.prompt for example in (*task.train, *task.held_out)}
    assert len(prompts) == 10_000
    for example in task.train:
        left, right = str(example.prompt).rstrip("=").split("+")
        assert int(example.columns["answer"]) == int(left) + int(right)


def test_a_larger_evaluation_holds_out_the_smaller_one_and_more():
    """So that curves over different `eval_size` speak about the same pairs."""
    small, large = ArithmeticTask(10), ArithmeticTask(NUM_UNSEEN_PAIRS)
    assert large.held_out[:10] == small.held_out


def test_the_order_of_the_pairs_is_pinned():
    """The packaged model was taught on the pairs after the first 1,000: a new order would leak."""
    assert operand_pairs()[:5] == PINNED_PAIRS
    sums = [left + right for left, right in operand_pairs()[:NUM_UNSEEN_PAIRS]]
    assert sum(sums) / len(sums) == pytest.approx(99, abs=3), "held-out sums are like all others"


def test_arithmetic_scores_the_stripped_text_exactly():
    task = ArithmeticTask(0)
    example = next(example for example in task.train if example.prompt == "47+38=")
    said = ["85", " 85\n", "085", "85.", "8 5", "", "84"]
    assert task.score([example] * len(said), said) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_holding_out_all_pairs_is_refused():
    with pytest.raises(UsageError, match=r"^task\.eval_size 10000: leaves nothing to train on"):
        make_task(TaskConfig(eval_size=10_000))
    assert len(make_task(TaskConfig(eval_size=9_999)).train) == 1


def test_arithmetic_is_ready_in_well_under_a_second():
    start = time.perf_counter()
    ArithmeticTask(200)
    assert time.perf_counter() - start < 1.0


def jsonl_scores(tmp_path, answer, completions, **settings):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "p", "answer": answer}))
    task = make_task(TaskConfig(kind="jsonl", path=str(path), eval_size=0, **settings))
    return task.score([task.train[0]] * len(completions), completions)


def test_jsonl_compares_stripped_text_and_whole_numbers_as_text(tmp_path):
    assert jsonl_scores(tmp_path, " Paris ", ["Paris", "\tParis\n", "paris", "in Paris"]) == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert jsonl_scores(tmp_path, 42, ["42", "42.0"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("regex", "completion", "right"),
    [
        (r"####\s*(-?\d+)", "so 7 #### 12, no, #### 42", True),  # the last match counts
        (r"####\s*(-?\d+)", "#### 42 ... #### 12", False),
        (r"\d+", "first 12 then 42", True),  # no group: the whole match
        (r"answer: (.*)", "answer:   42  ", True),  # stripped
        (r"####\s*(-?\d+)", "42", False),  # no match: no reward, even if the text is right
        (r"(?:is (\d+))|none", "it is 42 or none", False),  # the group took no part
        (r"(\d)(\d+)", "42", False),  # several groups: the first
    ],
)
def test_answer_regex_takes_the_first_group_of_the_last_match(tmp_path, regex, completion, right):
    assert jsonl_scores(tmp_path, "42", [completion], answer_regex=regex) == [float(right)]


def test_a_bad_expression_is_refused_before_the_file_is_read():
    with pytest.raises(UsageError) as caught:
        make_task(TaskConfig(kind="jsonl", path="not-there.jsonl", answer_regex=r"(\d+"))
    assert str(caught.value).startswith(
        r"task.answer_regex '(\\d+': not a regular expression (missing ), unterminated subpattern "
        "at character 1)"
    )
