import json
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version

import sidestep
from sidestep.diagnostics.environment import cpu_model, environment_facts, git_commit


def test_facts_are_json_and_true(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(sys, "argv", ["sidestep", "train", "--set", "seed=3"])
    facts = json.loads(json.dumps(environment_facts()))
    assert facts["sidestep"] == sidestep.__version__
    assert facts["python"] == sys.version.split()[0]
    assert facts["command"] == ["sidestep", "train", "--set", "seed=3"]
    assert facts["packages"]["torch"] == version("torch")
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["variables"]["OMP_WAIT_POLICY"] is None
    assert facts["num_cpus"] >= 1
    assert facts["memory_bytes"] > 2**28
    age = datetime.now(UTC) - datetime.fromisoformat(facts["start_time"])
    assert 0 <= age.total_seconds() < 60


def test_a_secret_in_the_environment_is_not_kept(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    assert "hf_very_secret" not in json.dumps(environment_facts())


def test_a_package_that_is_not_installed_is_null(monkeypatch):
    monkeypatch.setattr("sidestep.diagnostics.environment.PACKAGES", ("torch", "no-such-package"))
    assert environment_facts()["packages"] == {"torch": version("torch"), "no-such-package": None}


def test_cpu_model_is_read_from_the_kernel_or_else_asked_of_python(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU: 9000\nmodel name\t: other\n")
    assert cpu_model(cpuinfo) == "Fast CPU: 9000"
    cpuinfo.write_text("processor\t: 0\n")  # ARM kernels have no model name
    assert cpu_model(cpuinfo) == cpu_model(tmp_path / "none") != ""


def test_git_commit_is_that_of_the_checkout_which_tracks_the_package(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    tracked, installed = tmp_path / "package", tmp_path / "venv"
    for folder in (tracked, installed):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    assert git_commit(tracked) is None  # no checkout
    git("init")
    git("add", "package")
    assert git_commit(tracked) is None  # no commit
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tracked) == commit
    assert git_commit(installed) is None
    (tracked / "__init__.py").write_text("changed = True")
    assert git_commit(tracked) == f"{commit}+changes"
