"""Rows reach the file in step order, each with its own evaluation; the learning rate follows the
version.
"""

import asyncio
import math

import pytest

from sidestep.config import TrainConfig
from sidestep.trainer.rows import PendingRows
from sidestep.trainer.schedule import learning_rate_at


def test_rows_wait_for_their_own_evaluation_and_stay_in_step_order():
    written = []
    rows = PendingRows(written.append)
    rows.add({"step": 0}, evaluations=0)
    rows.add({"step": 1, "accuracy/eval": None}, evaluations=1)
    rows.add({"step": 2}, evaluations=0)
    rows.add({"step": 3, "accuracy/eval": None}, evaluations=1)
    assert written == [{"step": 0}]
    rows.evaluated(1, {"accuracy/eval": 0.5})
    assert written[1:] == [{"step": 1, "accuracy/eval": 0.5}, {"step": 2}]
    rows.evaluated(3, {"accuracy/eval": 0.75})
    assert written[3:] == [{"step": 3, "accuracy/eval": 0.75}]


def test_the_first_row_may_wait_for_two_evaluations_whichever_comes_first():
    written = []
    rows = PendingRows(written.append)
    rows.evaluated(0, {"accuracy/eval_start": 0.25})  # known before the step is over
    rows.add({"step": 0}, evaluations=2)
    assert written == []
    rows.evaluated(0, {"accuracy/eval": 0.5})
    assert written == [{"step": 0, "accuracy/eval_start": 0.25, "accuracy/eval": 0.5}]


def test_an_early_end_keeps_the_evaluation_that_is_known():
    written = []
    rows = PendingRows(written.append)
    rows.evaluated(0, {"accuracy/eval_start": 0.25})
    rows.add({"step": 0}, evaluations=2)
    rows.abandon()
    assert written == [{"step": 0, "accuracy/eval_start": 0.25}]


def test_written_waits_for_exactly_the_rows_before():
    async def scenario():
        rows = PendingRows(lambda row: None)
        rows.add({"step": 0}, evaluations=1)
        rows.add({"step": 1}, evaluations=1)
        waiting = asyncio.create_task(rows.written(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        rows.evaluated(0, {})
        await asyncio.wait_for(waiting, 1)  # row 1 still pending

    asyncio.run(scenario())


def test_an_early_end_writes_what_is_pending():
    written = []
    rows = PendingRows(written.append)
    rows.add({"step": 0, "accuracy/eval": None}, evaluations=1)
    rows.add({"step": 1}, evaluations=0)
    rows.abandon()
    assert written == [{"step": 0, "accuracy/eval": None}, {"step": 1}]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_learning_rate_of_each_version_after_warmup(schedule, expected):
    config = TrainConfig(steps=6, learning_rate=1.0, warmup_steps=2, schedule=schedule)
    rates = [learning_rate_at(version, config) for version in range(6)]
    assert rates == pytest.approx(expected)
