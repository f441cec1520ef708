"""How many threads a process gets, and whether it was said in time."""

import sys
from types import ModuleType

import pytest

from sidestep.threads import available_cores, set_thread_environment, threads_per_process


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8)])
def test_two_processes_share_the_cores(cores, threads):
    assert threads_per_process(cores) == threads


def test_what_the_user_set_stays_and_the_rest_is_filled_in():
    environment = {"OMP_NUM_THREADS": "5"}
    set_thread_environment(environment)
    assert environment == {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "passive"}


def test_without_settings_the_number_follows_from_the_cores():
    environment = {}
    set_thread_environment(environment)
    assert environment["OMP_NUM_THREADS"] == str(threads_per_process(available_cores()))


def test_it_says_whether_torch_was_already_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert set_thread_environment({})
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not set_thread_environment({})
