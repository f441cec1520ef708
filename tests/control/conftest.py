import pytest


@pytest.fixture(autouse=True)
def no_mode_from_the_environment(monkeypatch):
    monkeypatch.delenv("SIDESTEP_MODE", raising=False)
