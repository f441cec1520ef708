import sys
from types import ModuleType

import pytest

from sidestep.config.writing import to_toml
from sidestep.diagnostics.recorder import Recorder


class FakeRun:
    """Stands for `sidestep.build`: notes what the command asks for, and leaves rows if told so."""

    def __init__(self) -> None:
        self.calls = []
        self.rows = []
        self.error = None

    def train(self, config, run_dir, *, resume=False):
        self.calls.append((config, run_dir, resume))
        if self.rows:
            run_dir.mkdir(parents=True)
            (run_dir / "config.toml").write_text(to_toml(config))
            (run_dir / "env.json").write_text("{}")
            with Recorder(run_dir) as recorder:
                for step, row in enumerate(self.rows):
                    recorder.step({"step": step, **row})
        if self.error is not None:
            raise self.error
        return run_dir


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """A run that takes no time, in an empty current folder."""
    run = FakeRun()
    build = ModuleType("sidestep.build")
    build.train = run.train
    monkeypatch.setitem(sys.modules, "sidestep.build", build)
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
