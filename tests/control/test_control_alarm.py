"""The rule that says "likely to collapse", sign by sign."""

import json
import subprocess
import sys

import pytest

from sidestep.control import Alarm, AlarmState

CALM = {"cosine": 0.1, "norm": 1.0, "ess": 0.9}


def told(alarm, steps, **numbers):
    for _ in range(steps):
        state = alarm.update(**numbers)
    return state


def settled(**settings):
    alarm = Alarm(window=5, patience=10, **settings)
    assert told(alarm, 20, **CALM) == AlarmState("ok", "")
    return alarm


def test_nothing_is_said_before_a_window_is_full():
    alarm = Alarm(window=5)
    assert told(alarm, 4, cosine=0.99, norm=1e9, ess=0.01) == AlarmState("ok", "")
    assert told(alarm, 1, cosine=0.99, norm=1e9, ess=0.01).level == "alarm"


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({**CALM, "cosine": 0.35}, "cosine 0.35 (0.10 at the start)"),
        ({**CALM, "cosine": 0.65}, "cosine 0.65 (limit 0.6)"),
        ({**CALM, "ess": 0.2}, "effective sample size 0.20 (limit 0.3)"),
        ({**CALM, "norm": 3.5}, "gradient norm 3.5 times that of the start"),
    ],
)
def test_one_sign_is_watched(numbers, reason):
    assert told(settled(), 5, **numbers) == AlarmState("watch", reason)


def test_alignment_with_another_sign_is_an_alarm():
    state = told(settled(), 5, cosine=0.7, norm=4.0, ess=0.1)
    assert state.level == "alarm"
    assert state.reason == (
        "likely to collapse: cosine 0.70 (limit 0.6), effective sample size 0.10 (limit 0.3), "
        "gradient norm 4.0 times that of the start"
    )


def test_alignment_that_stays_is_an_alarm_and_one_that_goes_is_not():
    alarm = settled()
    assert told(alarm, 5, **{**CALM, "cosine": 0.9}).level == "watch"
    assert told(alarm, 5, **CALM).level == "ok"
    state = told(alarm, 14, **{**CALM, "cosine": 0.9})
    assert state.level == "alarm"
    assert state.reason.startswith("likely to collapse: cosine 0.90 (limit 0.6) for ")


def test_weights_and_norm_without_alignment_are_no_alarm():
    assert told(settled(), 50, cosine=0.0, norm=9.0, ess=0.1).level == "watch"


def test_excess_replaces_the_cosine_where_it_is_known():
    """A big batch has a high cosine without staleness: no excess, no sign."""
    alarm = Alarm(window=5, patience=10)
    assert told(alarm, 30, **{**CALM, "cosine": 0.9, "excess": 0.0}).level == "ok"
    state = told(alarm, 5, **{**CALM, "cosine": 0.9, "excess": 0.3})
    assert state == AlarmState("watch", "excess alignment 0.30 (limit 0.2)")


def test_steps_without_a_number_are_left_out():
    alarm = settled()
    assert told(alarm, 50, cosine=None, norm=None, ess=None).level == "ok"
    for _ in range(5):
        alarm.update(cosine=0.9)
        state = alarm.update()
    assert state.level == "watch"


def test_a_restored_alarm_goes_on_as_unbroken():
    numbers = [0.1] * 8 + [0.5] * 20
    whole, half = Alarm(window=5, patience=10), Alarm(window=5, patience=10)
    wanted = [whole.update(cosine=c, norm=c + 1, ess=0.5, excess=None) for c in numbers]
    got = []
    for t, c in enumerate(numbers):
        if t in (3, 15):
            state = json.loads(json.dumps(half.state_dict()))
            half = Alarm(window=5, patience=10)
            half.load_state_dict(state)
        got.append(half.update(cosine=c, norm=c + 1, ess=0.5, excess=None))
    assert got == wanted
    assert {state.level for state in got} == {"ok", "watch", "alarm"}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("window", 0),
        ("cosine_limit", 1.5),
        ("cosine_rise", 0.0),
        ("excess_limit", -0.1),
        ("ess_limit", -1.0),
        ("norm_factor", 1.0),
        ("patience", 0),
    ],
)
def test_a_wrong_argument_is_named(argument, value):
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        Alarm(**{argument: value})


def test_reading_past_runs_needs_no_torch():
    use = "from sidestep.control import Alarm; Alarm().update()"
    code = f"import sys; {use}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
