"""The examples that need no trainer of TRL run as a user runs them, in seconds, on a CPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
OURS = ("plain_loop", "accelerate_loop", "lightning", "ddp", "fsdp2")


def output_of(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment.pop("SIDESTEP_MODE", None)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", OURS)
def test_an_example_fits_on_a_screen_or_two(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 100


def test_the_plain_loop_learns_and_is_controlled():
    rows = re.findall(
        r"step +(\d+)  reward ([\d.]+)  cosine +(\S+) +(\w+)", output_of(EXAMPLES / "plain_loop.py")
    )
    assert len(rows) == 60
    rewards = [float(reward) for _, reward, _, _ in rows]
    assert sum(rewards[:8]) / 8 < 0.2
    assert sum(rewards[-8:]) / 8 > 0.9
    assert {"project", "skip"} <= {regime for _, _, _, regime in rows}


def test_accelerate_steps_once_for_two_batches():
    if find_spec("accelerate") is None:
        pytest.skip("needs sidestep[trl]")
    rows = re.findall(r"optimizer steps (\d+)", output_of(EXAMPLES / "accelerate_loop.py"))
    assert rows == ["4", "8", "12", "16"]


def test_lightning_steps_once_for_two_batches_and_has_the_numbers_in_its_log():
    if find_spec("lightning") is None:
        pytest.skip("needs sidestep[lightning]")
    out = output_of(EXAMPLES / "lightning.py")
    assert re.findall(r"^(\d+) \w+ ", out, re.MULTILINE) == [str(step) for step in range(32)]
    assert "'align/cosine'" in out


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks_decide_alike_at_every_step(name):
    rows = re.findall(
        r"rank (\d)  step +(\d+)  cosine (\S+)  (\w+)", output_of(EXAMPLES / f"{name}.py")
    )
    by_rank = [[row[1:] for row in rows if row[0] == rank] for rank in "01"]
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0]) == 20
    assert {"project", "skip"} & {regime for _, _, regime in by_rank[0]}


@pytest.mark.slow
def test_torchrun_works_as_the_example_says():
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = output_of(*launch, EXAMPLES / "ddp.py")
    assert len(re.findall(r"rank [01]  step 19  ", out)) == 2
