import sys
from types import ModuleType

import pytest


class FakeRun:
    """Stands for `sidestep.build` and the report: notes what the command asks for."""

    def __init__(self) -> None:
        self.calls = []
        self.error = None

    def train(self, config, run_dir, *, resume=False, progress=True):
        self.calls.append((config, run_dir, resume))
        if self.error is not None:
            raise self.error
        return run_dir

    def write_report(self, run_dir):
        return run_dir / "report.html"


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """A run that takes no time, in an empty current folder."""
    run = FakeRun()
    build = ModuleType("sidestep.build")
    build.train = run.train
    report = ModuleType("sidestep.diagnostics.report")
    report.write_report = run.write_report
    monkeypatch.setitem(sys.modules, "sidestep.build", build)
    monkeypatch.setitem(sys.modules, "sidestep.diagnostics.report", report)
    monkeypatch.chdir(tmp_path)
    # main() would set them for the whole test process.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delenv("SIDESTEP_TRACEBACK", raising=False)
    return run


@pytest.fixture
def sidestep(monkeypatch, capsys, fake_run):
    """Runs the command in this process on the fake run: (exit code, stdout, stderr)."""
    from sidestep.cli.main import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sidestep", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        captured = capsys.readouterr()
        return exited.value.code, captured.out, captured.err

    return run
