"""Statistics on numbers whose answers are known."""

import math

import numpy as np
import pytest

from sidestep.diagnostics.statistics import (
    band,
    collapse_step,
    first_reach,
    interval,
    last_tenth,
    paired_difference,
)


def test_the_interval_of_two_values_is_exact():
    # The resamples have means 0, 0.5, 0.5, 1; each outer one has a share of 25 %, above 2.5 %.
    found = interval([0.0, 1.0])
    assert (found.mean, found.low, found.high, found.num, found.worst) == (0.5, 0.0, 1.0, 2, 0.0)


def test_the_interval_of_four_values_leaves_out_what_is_rarer_than_its_tail():
    found = interval([0.0, 0.0, 0.0, 1.0])
    assert found.low == 0.0  # 81 of 256 resamples have no 1 at all
    assert found.high == 0.75  # one has four, twelve have three: 5 % together


def test_one_seed_has_no_interval():
    found = interval([0.7])
    assert (found.mean, found.low, found.high, str(found)) == (0.7, None, None, "0.7")


def test_equal_values_have_an_interval_without_width():
    found = interval([0.25] * 4)
    assert (found.mean, found.low, found.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_an_interval_of_nothing_or_of_no_number_is_refused(values):
    with pytest.raises(ValueError, match="values"):
        interval(values)


def test_the_interval_of_many_seeds_covers_as_often_as_it_says():
    draws = np.random.default_rng(1).normal(size=(120, 30))
    found = [interval(list(values)) for values in draws]
    covered = np.mean([one.low <= 0.0 <= one.high for one in found])
    assert 0.88 <= covered <= 0.99  # 0.95 less the known shortfall at 30 values, and luck
    assert interval(list(draws[0])) == found[0]  # the dice are fixed


def test_pairing_by_seed_takes_the_seeds_apart():
    # Seeds differ far more than the methods do: unpaired, nothing could be seen.
    theirs = {0: 0.1, 1: 0.5, 2: 0.9}
    ours = {seed: value + 0.02 for seed, value in theirs.items()} | {7: 0.0}
    found = paired_difference(ours, theirs)
    assert found.num == 3
    assert (found.mean, found.low, found.high) == pytest.approx((0.02, 0.02, 0.02))
    assert interval(list(ours.values())).low < interval(list(theirs.values())).mean
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_fall_under_half_of_the_peak_that_stays_is_a_collapse():
    rewards = [0.1, 0.4, 0.8, 0.8, 0.7, 0.39, 0.2, 0.1]
    assert collapse_step(rewards, 1) == 5
    assert collapse_step([*rewards, 0.5], 1) is None  # it came back
    assert collapse_step([0.1, 0.4, 0.8, 0.41, 0.41], 1) is None  # above half
    assert collapse_step([0.1, 0.4, 0.8, 0.41, 0.41], 1, share=0.6) == 3
    assert collapse_step([0.0, 0.0, 0.0], 1) is None
    assert collapse_step([], 1) is None


def test_a_collapse_is_judged_on_the_smoothed_reward_and_has_to_last():
    high, low = [1.0] * 10, [0.0] * 10
    # The mean of four is under 0.5 from the third zero on.
    assert collapse_step(high + low, 4) == 12
    assert collapse_step([*high, 0.0, *high], 4) is None
    assert collapse_step(high + [0.0] * 5, 4) is None  # down for three steps only
    assert collapse_step(high + [0.0] * 6, 4) == 12


def test_a_peak_after_the_fall_counts_only_from_then_on():
    # 0.2 is half of 0.4 and more; only against the later peak of 0.9 it is a collapse.
    assert collapse_step([0.4, 0.2, 0.9, 0.3, 0.3], 1) == 3


def test_reaching_is_counted_in_steps_and_on_whole_windows():
    rewards = [1.0, 0.0, 0.5, 0.6, 0.7, 0.8]
    assert first_reach(rewards, 0.6, 1) == 1
    assert first_reach(rewards, 0.6, 2) == 5
    assert first_reach(rewards, 0.9, 2) is None
    assert first_reach([None, 0.9], 0.9, 1) == 2
    assert first_reach([], 0.1) is None


def test_the_last_tenth_is_a_tenth_and_never_less_than_a_step():
    assert last_tenth([0.0] * 18 + [1.0, 2.0]) == 1.5
    assert last_tenth([3.0]) == 3.0
    assert last_tenth([1.0, None]) is None
    assert last_tenth([]) is None


def test_a_band_goes_on_with_the_runs_that_are_left():
    found = band([[1.0, 3.0, None], [3.0, 5.0, 7.0, 9.0]])
    assert found.mean == [2.0, 4.0, 7.0, 9.0]
    assert found.low[:2] == [1.0, 3.0] and found.high[:2] == [3.0, 5.0]
    assert (found.low[3], found.high[3]) == (9.0, 9.0)
