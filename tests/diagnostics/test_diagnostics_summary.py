import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.diagnostics.runs import read_run
from sidestep.diagnostics.summary import mean, moving_mean, sum_histograms, summarise

values = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=30)


@given(values, st.integers(1, 40))
def test_moving_mean_is_the_mean_of_each_window(numbers, window):
    for end, got in enumerate(moving_mean(numbers, window), start=1):
        seen = [value for value in numbers[max(0, end - window) : end] if value is not None]
        expected = mean(seen)
        assert got == (None if expected is None else pytest.approx(expected, abs=1e-9))


def test_histograms_add_up_by_lag_in_numeric_order():
    assert sum_histograms([{"10": 1, "2": 5}, {"2": 1, "0": 3}]) == {0: 3, 2: 6, 10: 1}
    assert list(sum_histograms([{"10": 1, "2": 5}])) == [2, 10]


def test_verdict_tells_steps_reward_accuracy_lag_and_skips(make_run):
    rows = [
        {
            "reward/mean": 0.1 + 0.04 * step,
            "accuracy/eval": 0.75 if step == 9 else None,
            "lag/mean": 1.0,
            "lag/max": min(step, 3),
            "lag/histogram": {0: 30, 3: 10} if step else {0: 40},
            "align/regime": "skip" if step in (4, 5) else "project",
            "time/elapsed_s": step * 2.0,
        }
        for step in range(20)
    ]
    summary = summarise(read_run(make_run(rows, steps=20)))
    # First and last tenth: steps 0-1 and 18-19. Lag 3 for 190 of 800 tokens.
    assert summary.verdict() == (
        "20 of 20 steps, reward 0.12 → 0.84, held-out accuracy 0.75, "
        "mean lag 0.7 (max 3), 2 skipped"
    )
    assert summary.lag_mean == pytest.approx(3 * 190 / 800)
    assert summary.is_complete
    assert not summary.has_collapsed
    assert summary.steps_by_regime == {"project": 18, "skip": 2}
    assert summary.elapsed_s == 38.0


@pytest.mark.parametrize(("last", "collapsed"), [(0.45, False), (0.35, True)])
def test_collapse_is_an_end_under_half_of_the_peak(make_run, last, collapsed):
    rewards = [0.4] * 10 + [0.8] * 5 + [last] * 5
    summary = summarise(read_run(make_run([{"reward/mean": reward} for reward in rewards])))
    assert summary.has_collapsed is collapsed
    assert ("reward collapsed from 0.80" in summary.verdict()) is collapsed


def test_a_run_without_any_value_has_a_verdict(make_run):
    summary = summarise(read_run(make_run([{"reward/mean": None}], config="seed = 1\n")))
    assert summary.verdict() == "1 steps, 0 skipped"
    assert not summary.is_complete
