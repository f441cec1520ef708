"""The real command in a process of its own: what it loads, its environment, its exit codes."""

import os
import subprocess
import sys

import pytest

import sidestep

HEAVY = ["torch", "transformers", "tensorboard", "plotly", "numpy"]


def python(code: str, *, cwd, **environment: str) -> subprocess.CompletedProcess:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "SIDESTEP_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def command(*arguments: str, before: str = "", after: str = "", cwd, **environment: str):
    """Runs `sidestep ARGUMENTS`, with Python code before it starts and after it has exited."""
    code = (
        f"import sys\n{before}\nsys.argv = ['sidestep', *{list(arguments)!r}]\n"
        "from sidestep.cli.main import main\n"
        f"try:\n    main()\nfinally:\n    {after or 'pass'}\n"
    )
    return python(code, cwd=cwd, **environment)


LOADED = f"print('loaded', [name for name in {HEAVY!r} if name in sys.modules])"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["report", "--help"],
        ["doctor", "--help"],
        ["--version"],
        ["nope"],
    ],
)
def test_help_loads_nothing_heavy(arguments, tmp_path):
    result = command(*arguments, after=LOADED, cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == "loaded []"
    assert result.returncode == (2 if arguments == ["nope"] else 0)


def test_a_bad_config_is_refused_without_torch(tmp_path):
    result = command("train", "--set", "rollout.max_lags=4", after=LOADED, cwd=tmp_path)
    assert result.stdout == "loaded []\n"
    assert result.stderr == (
        "--set: unknown config key 'rollout.max_lags' (did you mean 'rollout.max_lag'?)\n"
    )
    assert result.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_report_of_a_folder_without_a_run_is_refused_without_torch(tmp_path):
    result = command("report", "gone", after="print('torch' in sys.modules)", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert len(result.stderr.splitlines()) == 1 and "gone" in result.stderr


def test_the_version_is_the_packages(tmp_path):
    assert command("--version", cwd=tmp_path).stdout == f"sidestep {sidestep.__version__}\n"


THREADS = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"


def test_threads_are_set_before_torch_can_be_imported(tmp_path):
    watch = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        f"            {THREADS}; raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "os.sched_getaffinity = lambda pid: set(range(6))\n"
    )
    result = command("train", before=watch, cwd=tmp_path)
    assert (result.stdout, result.returncode) == ("3 passive\n", 0)


def test_threads_that_the_user_set_are_kept(tmp_path):
    result = command(
        "--version", after=THREADS, cwd=tmp_path, OMP_NUM_THREADS="7", OMP_WAIT_POLICY="active"
    )
    assert result.stdout.splitlines()[-1] == "7 active"


def test_a_bug_shows_its_traceback_and_exits_with_1(tmp_path):
    broken = (
        "import types\n"
        "build = types.ModuleType('sidestep.build')\n"
        "def train(config, run_dir, *, resume): 1 / 0\n"
        "build.train = train\n"
        "sys.modules['sidestep.build'] = build\n"
    )
    result = command("train", before=broken, cwd=tmp_path)
    assert result.returncode == 1
    assert "Traceback (most recent call last):" in result.stderr
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_the_module_runs_as_the_script_does(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "sidestep.cli.main", "train", "--resume"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("--resume needs --run-dir")
