"""Figures of merit on curves whose answers are known."""

import pytest
from study_support import SAMPLES_A_STEP, make_results, make_study

from sidestep.study.merits import merits, synchronous

# 20 steps, so that nothing is smoothed: the reward is reached when it is there.
WELL = [0.0] * 4 + [1.0] * 16  # the target after 5 steps
SLOW = [0.0] * 9 + [1.0] * 11  # after 10
NEVER = [0.5] * 20
FELL = [0.0] * 4 + [1.0] * 6 + [0.2] * 10


def one(found, method, lag):
    [merit] = [m for m in found if (m.method, m.lag) == (method, lag)]
    return merit


def whole(changes=None):
    """Two seeds and two rates of two methods at two lags, all well; some of them changed."""
    curves = {
        (method, lag, rate, seed): (WELL, rate)
        for method in ("none", "ours")
        for lag in (0, 8)
        for rate in (0.1, 0.2)
        for seed in (1, 2)
    }
    return curves | (changes or {})


def test_the_synchronous_best_is_the_baseline_at_lag_0_at_its_best_rate():
    lowered = [0.9 * reward for reward in WELL]
    curves = whole({("none", 0, 0.2, seed): lowered for seed in (1, 2)})
    found = synchronous(make_study(), make_results(curves), "arithmetic")
    assert (found.learning_rate, found.reward, found.target) == (0.1, 1.0, 0.95)
    assert found.samples == 5 * SAMPLES_A_STEP
    assert found.cap == 4 * 5 * SAMPLES_A_STEP


def test_equal_runs_have_no_gap():
    merit = one(merits(make_study(), make_results(whole())), "ours", 8)
    assert (merit.gap_at_best.mean, merit.gap_at_best.low, merit.gap_at_best.high) == (0, 0, 0)
    assert (merit.samples_ratio, merit.num_reached, merit.num_collapsed) == (1.0, 2, 0)


def test_gaps_are_at_the_own_best_rate_and_at_the_synchronous_one_and_paired_by_seed():
    half = [0.5 * reward for reward in WELL]
    curves = whole()
    # lag 8: at the synchronous run's rate of 0.1 half the reward, at 0.2 all but a tenth of seed 2
    curves |= {("ours", 8, 0.1, seed): half for seed in (1, 2)}
    curves[("ours", 8, 0.2, 2)] = [0.9 * reward for reward in WELL]
    merit = one(merits(make_study(), make_results(curves)), "ours", 8)
    assert merit.best_rate == 0.2
    assert merit.gap_at_best.mean == pytest.approx(-0.05)
    assert (merit.gap_at_best.low, merit.gap_at_best.high) == pytest.approx((-0.1, 0.0))
    assert merit.gap_at_equal.mean == pytest.approx(-0.5)
    assert (merit.worst_reward, merit.worst_of_all_rates) == pytest.approx((0.9, 0.5))


def test_pilot_seeds_choose_the_rate_and_are_not_reported():
    study = make_study(pilot_seeds=[0])
    curves = whole({("ours", 8, 0.2, 0): [0.9] * 20, ("ours", 8, 0.1, 0): [0.1] * 20})
    curves |= {("none", 0, rate, 0): WELL for rate in (0.1, 0.2)}
    # On the reported seeds 0.1 is the better one; that must not matter.
    curves |= {("ours", 8, 0.2, seed): NEVER for seed in (1, 2)}
    merit = one(merits(study, make_results(curves)), "ours", 8)
    assert (merit.best_rate, merit.reward.mean, merit.num_seeds) == (0.2, 0.5, 2)


def test_the_stability_range_is_the_longest_update_of_a_run_that_reaches_and_stays():
    curves = whole({("ours", 8, 0.2, 1): (WELL, 3.0), ("ours", 8, 0.2, 2): (FELL, 3.0)})
    curves |= {("ours", 8, 0.1, seed): (WELL, 1.0 + seed) for seed in (1, 2)}
    merit = one(merits(make_study(), make_results(curves)), "ours", 8)
    # seed 1: 3 at rate 0.2; seed 2: fell there, so 3 at rate 0.1
    assert merit.stability.mean == pytest.approx(3.0)
    # both seeds are stable at rate 0.1 alone: mean of 2 and 3
    assert merit.stable_for_all_seeds == pytest.approx(2.5)
    assert merit.num_collapsed == 1


def test_a_method_that_never_reaches_the_target_has_no_range_and_the_cap():
    curves = whole({("ours", 8, rate, seed): NEVER for rate in (0.1, 0.2) for seed in (1, 2)})
    merit = one(merits(make_study(), make_results(curves)), "ours", 8)
    assert (merit.stability.mean, merit.stable_for_all_seeds) == (0.0, 0.0)
    assert (merit.num_reached, merit.samples_ratio) == (0, 4.0)
    assert merit.samples.mean == 20 * SAMPLES_A_STEP


def test_what_takes_more_than_four_times_the_synchronous_samples_has_not_reached():
    late = [0.0] * 20 + [1.0] * 5
    curves = whole({("ours", 8, rate, seed): late for rate in (0.1, 0.2) for seed in (1, 2)})
    merit = one(merits(make_study(), make_results(curves)), "ours", 8)
    assert (merit.num_reached, merit.samples_ratio) == (0, 4.0)


def test_samples_are_those_of_the_rate_that_is_quickest():
    curves = whole({("ours", 8, 0.1, seed): SLOW for seed in (1, 2)})
    merit = one(merits(make_study(), make_results(curves)), "ours", 8)
    assert (merit.rate_for_samples, merit.samples.mean) == (0.2, 5 * SAMPLES_A_STEP)
    assert merit.cpu_s.mean == 5.0


def test_seconds_are_cpu_time_of_the_steps_to_the_target_or_of_the_whole_run():
    study, target = make_study(), 5
    curves = whole({("ours", 8, rate, 2): NEVER for rate in (0.1, 0.2)})
    merit = one(merits(study, make_results(curves, cpu_s=2.0)), "ours", 8)
    assert merit.cpu_s.mean == (2.0 * target + 2.0 * len(NEVER)) / 2


def test_cost_is_cpu_time_of_training_against_the_baseline_at_the_same_place():
    results = make_results(whole(), train_cpu_s=2.0)
    dearer = {k: v for k, v in make_results(whole(), train_cpu_s=3.0).items() if k.method == "ours"}
    found = merits(make_study(), results | dearer)
    assert one(found, "ours", 8).cost == 1.5
    assert one(found, "none", 8).cost == 1.0


def test_runs_without_cpu_time_have_no_seconds_and_no_cost():
    """Wall-clock time does not stand in: it measures what else the machine did."""
    results = make_results(whole(), cpu_s=None, train_cpu_s=None)
    merit = one(merits(make_study(), results), "ours", 8)
    assert (merit.cpu_s, merit.cost) == (None, None)


def test_a_failed_run_is_a_collapse_without_reward_and_is_not_left_out():
    study = make_study()
    curves = whole()
    results = make_results(curves)
    cell = next(c for c in results if c.method == "ours" and c.lag == 8 and c.seed == 1)
    failed = make_results(
        {(cell.method, cell.lag, cell.learning_rate, cell.seed): WELL[:7]},
        error="the gradient was not finite",
        planned=20,
    )
    merit = one(merits(study, results | failed), "ours", 8)
    assert merit.num_collapsed == 1
    assert merit.worst_of_all_rates == 0.0
    assert merit.num_cells == 4


def test_what_is_not_finished_is_left_out_and_the_rest_is_readable():
    study = make_study()
    results = make_results({("none", 0, 0.1, 1): WELL, ("ours", 8, 0.1, 1): SLOW})
    found = merits(study, results)
    assert [(m.method, m.lag) for m in found] == [("none", 0), ("ours", 8)]
    assert one(found, "ours", 8).gap_at_best.num == 1
    assert merits(study, {}) == []


def test_a_merit_is_a_flat_row_with_the_ends_of_its_intervals():
    merit = one(merits(make_study(), make_results(whole())), "ours", 8)
    row = merit.flat()
    assert row["reward"] == row["reward_low"] == row["reward_high"] == 1.0
    assert row["gap_at_equal"] == 0.0
    # Of a study cut short some have no gap: they are rows of the same table.
    cut = make_results({("none", 0, 0.1, 1): WELL, ("ours", 8, 0.2, 1): SLOW})
    without = one(merits(make_study(), cut), "ours", 8)
    assert without.gap_at_equal is None
    assert list(without.flat()) == list(row)
    assert without.flat()["gap_at_equal_high"] is None
    assert not any(isinstance(value, dict) for value in row.values())
