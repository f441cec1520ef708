"""Early warning on histories whose answers are known."""

import pytest
from study_support import make_results

from sidestep.study.warning import SIGNALS, History, calibrate, history, judge, verdicts

RISES = [0.1, 0.2, 0.6, 0.8, 0.9, 0.9]
CALM = [0.1, 0.2, 0.3, 0.2, 0.1, 0.2]


def test_warning_time_is_counted_from_alarm_to_collapse():
    verdict = judge("x", 0.5, [History(RISES, 5), History(RISES, 4), History(CALM, None)])
    assert (verdict.num_collapsed, verdict.num_warned, verdict.num_quiet) == (2, 2, 1)
    assert verdict.warning_steps == 2.5  # alarm in step 2
    assert verdict.num_false_alarms == 0


def test_an_alarm_in_the_step_of_the_collapse_or_later_is_no_warning():
    verdict = judge("x", 0.5, [History(RISES, 2), History(RISES, 1)])
    assert (verdict.num_warned, verdict.warning_steps) == (0, None)


def test_an_alarm_without_a_collapse_is_false_and_a_silent_collapse_is_missed():
    verdict = judge("x", 0.5, [History(RISES, None), History(CALM, 4)])
    assert (verdict.num_false_alarms, verdict.num_quiet, verdict.num_warned) == (1, 1, 0)


def test_the_limit_separates_the_runs_of_the_pilot():
    limit = calibrate([History(RISES, 5), History(CALM, None)])
    assert 0.3 < limit < 0.9
    assert judge("x", limit, [History(RISES, 5)]).num_warned == 1
    assert calibrate([History(RISES, 5)]) is None  # nothing to tell it from
    assert calibrate([History([None] * 3, 2), History(CALM, None)]) is None


def test_of_limits_that_tell_equally_well_the_earlier_warning_wins():
    # After the step of the collapse values do not count: 0.9 at the end is no sign.
    pilots = [History([0.1, 0.4, 0.6, 0.9], 3), History([0.1, 0.1, 0.1, 0.1], None)]
    pilots.append(History([0.2, 0.5, 0.8, 0.8], 3))
    limit = calibrate(pilots)
    assert limit == pytest.approx((0.1 + 0.6) / 2)


def test_a_signal_where_low_is_bad_and_one_that_is_relative_are_turned():
    by_name = {signal.name: signal for signal in SIGNALS}
    columns = {"ratio/ess": [1.0, 0.5, 0.25], "grad/norm_raw": [2.0, 4.0, 1.0]}
    [result] = make_results({("none", 0, 0.1, 1): [1.0, 1.0, 0.1]}, columns=columns).values()
    assert history(by_name["ESS"], result).badness == [-1.0, -0.5, -0.25]
    assert history(by_name["gradient norm"], result).badness == [1.0, 2.0, 0.5]
    assert history(by_name["excess alignment"], result).badness == [None] * 3


def test_limits_are_set_on_the_pilots_and_judged_on_the_others():
    fell, stayed = [1.0] * 3 + [0.1] * 3, [1.0] * 6
    high, low = {"align/cosine": RISES}, {"align/cosine": CALM}
    collapsed = make_results({("none", 8, 0.1, seed): fell for seed in (0, 1)}, columns=high)
    quiet = make_results({("none", 0, 0.1, seed): stayed for seed in (0, 1)}, columns=low)
    runs = [*collapsed.values(), *quiet.values()]
    pilots = [run for run in runs if run.cell.seed == 0]
    reported = [run for run in runs if run.cell.seed == 1]
    found = verdicts(pilots, reported)
    cosine = found["cosine"]
    assert (cosine.num_warned, cosine.num_collapsed, cosine.num_false_alarms) == (1, 1, 0)
    assert cosine.warning_steps == 1  # alarm in step 2, collapse in step 3
    assert found["KL"] is None  # no run has it
    assert found["alarm of the product"].num_warned == 0
