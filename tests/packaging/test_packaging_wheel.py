"""The built wheel, installed away from the checkout, trains: nothing it needs was left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
SMALL_RUN = {
    "train.steps": 2,
    "rollout.groups_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_lag": 1,
    "task.eval_size": 8,
}


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder that holds the wheel's files and nothing else."""
    dist, target = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("installed")
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(CHECKOUT)]
    built = run(*build, cwd=dist)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = dist.glob("sidestep-*.whl")
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    done = run(*install, str(wheel), cwd=dist)
    assert done.returncode == 0, done.stderr
    return target


def test_the_wheel_holds_types_recipes_licence_and_the_packaged_model(installed):
    package = installed / "sidestep"
    assert (package / "py.typed").is_file()
    recipes = {path.name: path.read_bytes() for path in (CHECKOUT / "recipes").glob("*.toml")}
    assert recipes == {path.name: path.read_bytes() for path in (package / "recipes").iterdir()}
    assert list(installed.glob("sidestep-*.dist-info/licenses/LICENSE"))
    model = package / "models" / "packaged"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (model / name).is_file(), name
    assert sum(path.stat().st_size for path in model.iterdir()) < 3_000_000


def test_the_wheel_holds_the_package_and_its_command_and_no_more_of_the_checkout(installed):
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"bin", "sidestep"}


@pytest.mark.timeout(300)
def test_the_installed_wheel_trains_two_steps_outside_the_checkout(installed, tmp_path):
    path = {"PYTHONPATH": str(installed)}
    where = run("-c", "import sidestep; print(sidestep.__file__)", cwd=tmp_path, **path)
    assert where.stdout.strip() == str(installed / "sidestep" / "__init__.py")
    overrides = [f"--set={key}={value}" for key, value in SMALL_RUN.items()]
    command = ["-m", "sidestep.cli.main", "train", "--run-dir", "run", *overrides]
    trained = run(*command, cwd=tmp_path, **path)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    rows = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1]
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "final" / "config.json").is_file()
