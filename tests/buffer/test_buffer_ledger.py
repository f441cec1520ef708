"""The staleness bound over random schedules: anything may be slow, dropped or skipped."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.buffer.ledger import Ledger
from sidestep.types import Completion, Example, Group, Prompt


def group_of(index: int, version: int) -> Group:
    completion = Completion((1,), (-0.5,), (version,), "stop")
    return Group(index, Prompt(index, Example("q"), (1,)), (completion,))


class Simulation:
    """Drives a ledger the way the run does, choosing at random what happens next."""

    def __init__(self, ledger: Ledger, total_steps: int, chance: random.Random) -> None:
        self.ledger, self.total_steps, self.chance = ledger, total_steps, chance
        self.steps = self.version = 0
        self.in_flight: dict[int, int] = {}  # index -> version when it started
        self.lags: list[int] = []
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.most_unfinished = 0

    def possible(self) -> list:
        actions = []
        if self.ledger.num_admissible:
            actions.append(self.admit)
        if self.in_flight:
            actions += [self.finish, self.finish, self.drop]
        if self.ledger.ready and self.steps < self.total_steps:
            actions.append(self.train)
        return actions

    def admit(self) -> None:
        for index in self.ledger.admit(self.chance.randint(1, 7)):
            self.in_flight[index] = self.version
        self.most_unfinished = max(self.most_unfinished, self.ledger.num_unfinished)

    def finish(self) -> None:
        index = self.chance.choice(list(self.in_flight))  # any order: the oldest may be a straggler
        self.ledger.arrive(group_of(index, self.in_flight.pop(index)))

    def drop(self) -> None:
        if len(self.dropped) < 40:
            index = self.chance.choice(list(self.in_flight))
            del self.in_flight[index]
            self.ledger.drop(index)
            self.dropped.append(index)

    def train(self) -> None:
        groups = self.ledger.take()
        self.trained += [group.index for group in groups]
        self.lags += [self.version - group.oldest_version for group in groups]
        while self.chance.random() < 0.5 and self.ledger.num_admissible:
            self.admit()  # rollouts go on while a step is under way
        self.steps += 1
        self.version += self.chance.random() < 0.8  # some steps are skipped
        self.ledger.step_over()

    def run(self) -> None:
        while self.steps < self.total_steps:
            actions = self.possible()
            assert actions, "deadlock: nothing can happen and steps are left"
            self.chance.choice(actions)()


schedules = st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 12), st.integers())


@given(schedules)
def test_lag_never_exceeds_bound_over_random_schedules(schedule):
    groups_per_step, max_lag, total_steps, seed = schedule
    ledger = Ledger(groups_per_step=groups_per_step, max_lag=max_lag, total_steps=total_steps)
    simulation = Simulation(ledger, total_steps, random.Random(seed))
    simulation.run()
    assert max(simulation.lags) <= max_lag
    assert min(simulation.lags) >= 0
    assert simulation.most_unfinished <= (max_lag + 1) * groups_per_step


@given(schedules)
def test_every_step_is_full_each_group_once_in_admission_order_and_none_left_over(schedule):
    groups_per_step, max_lag, total_steps, seed = schedule
    ledger = Ledger(groups_per_step=groups_per_step, max_lag=max_lag, total_steps=total_steps)
    simulation = Simulation(ledger, total_steps, random.Random(seed))
    simulation.run()
    assert simulation.trained == sorted(set(simulation.trained))
    assert len(simulation.trained) == total_steps * groups_per_step
    # a dropped group is refilled by exactly one: what was admitted is what was trained or dropped
    everything = sorted(simulation.trained + simulation.dropped)
    assert everything == list(range(ledger.next_index))
    assert ledger.all_admitted
    assert ledger.num_admissible == 0


@given(schedules, st.integers(0, 11))
def test_a_resumed_ledger_trains_the_same_groups_as_an_unbroken_one(schedule, stop_after):
    groups_per_step, max_lag, total_steps, seed = schedule
    stop_after = min(stop_after, total_steps)
    broken = Ledger(groups_per_step=groups_per_step, max_lag=max_lag, total_steps=total_steps)
    before = Simulation(broken, stop_after, random.Random(seed))
    before.run()
    state, waiting = broken.state_dict(), broken.waiting()

    resumed = Ledger(
        groups_per_step=groups_per_step, max_lag=max_lag, total_steps=total_steps - stop_after
    )
    resumed.load_state_dict(state, [replace(group) for group in waiting])
    after = Simulation(resumed, total_steps - stop_after, random.Random(seed + 1))
    after.version = before.version
    after.run()
    assert max(after.lags, default=0) <= max_lag
    assert not set(before.trained) & set(after.trained)
    ended = before.trained + before.dropped + after.trained + after.dropped
    assert sorted(ended) == list(range(resumed.next_index))


def test_b41_capacity_does_not_depend_on_the_version_at_resume():
    for running in (0, 3):
        ledger = Ledger(groups_per_step=4, max_lag=2, total_steps=1000)
        ledger.load_state_dict({"next_index": 200, "live": list(range(200 - running, 200))}, [])
        assert ledger.num_unfinished == running
        assert ledger.num_admissible == 12  # the lost ones again, and 12 - running new ones
        assert ledger.admit(100) == tuple(range(200 - running, 212 - running))


def test_b42_resume_trains_on_the_next_waiting_groups_each_exactly_once():
    ledger = Ledger(groups_per_step=2, max_lag=1, total_steps=4)
    for index in ledger.admit(4):
        ledger.arrive(group_of(index, 0))
    assert [group.index for group in ledger.take()] == [0, 1]
    ledger.step_over()
    resumed = Ledger(groups_per_step=2, max_lag=1, total_steps=3)
    resumed.load_state_dict(ledger.state_dict(), ledger.waiting())
    assert [group.index for group in resumed.take()] == [2, 3]


def test_b52_admission_stops_when_the_steps_to_come_are_covered():
    for total_steps in (1, 2):
        ledger = Ledger(groups_per_step=4, max_lag=2, total_steps=total_steps)
        assert len(ledger.admit(100)) == 4 * total_steps
        assert ledger.all_admitted
        assert ledger.admit(100) == ()


def test_a_dropped_group_of_the_last_step_is_refilled_by_exactly_one():
    ledger = Ledger(groups_per_step=2, max_lag=3, total_steps=1)
    assert ledger.admit(100) == (0, 1)
    ledger.drop(0)
    assert not ledger.all_admitted
    assert ledger.admit(100) == (2,)
    ledger.arrive(group_of(1, 0))
    assert not ledger.ready
    ledger.arrive(group_of(2, 0))
    assert [group.index for group in ledger.take()] == [1, 2]


def test_places_of_a_step_are_held_until_it_is_over():
    ledger = Ledger(groups_per_step=2, max_lag=0, total_steps=5)
    for index in ledger.admit(2):
        ledger.arrive(group_of(index, 0))
    ledger.take()
    assert ledger.num_admissible == 0  # lag 0: nothing may start while the step runs
    ledger.step_over()
    assert ledger.num_admissible == 2


def test_misuse_is_refused():
    ledger = Ledger(groups_per_step=1, max_lag=1, total_steps=5)
    ledger.admit(1)
    with pytest.raises(ValueError, match="group 7 arrived but is not in flight"):
        ledger.arrive(group_of(7, 0))
    ledger.arrive(group_of(0, 0))
    with pytest.raises(ValueError, match="group 0 arrived but is not in flight"):
        ledger.arrive(group_of(0, 0))
    ledger.take()
    with pytest.raises(ValueError, match="during a step"):
        ledger.state_dict()
    with pytest.raises(ValueError, match="already taken"):
        ledger.drop(0)
