"""The callback under DDP: two real ranks over gloo, started once for all tests."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from trl_hosts import Records, text_trainer, train

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback

SCRIPT = Path(__file__).with_name("trl_ranks.py")
DEADLINE_S = 200


@pytest.fixture(scope="module")
def found(tiny_model_dir, tmp_path_factory):
    """What rank 0 and rank 1 found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    shared.pop("SIDESTEP_MODE", None)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tiny_model_dir), str(folder)],
            env=shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr-{rank}").open("wb"),
        )
        for rank in ("0", "1")
    ]
    try:
        for rank, process in enumerate(processes):
            assert process.wait(DEADLINE_S) == 0, (folder / f"stderr-{rank}").read_text()[-4000:]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("run", ["plain", "resumed", "grpo", "asynchronous"])
def test_two_ranks_decide_and_move_as_one(found, run):
    first, second = (one[run] for one in found)
    assert first["wrapped"] == "DistributedDataParallel"
    assert first["records"] == second["records"]
    assert first["weights"] == second["weights"]
    assert [record["step"] for record in first["records"]][-1] == len(first["records"]) - 1 + (
        4 if run == "resumed" else 0
    )
    assert {record["regime"] for record in first["records"]} & {"project", "skip"}


def test_two_ranks_decide_as_one_process_on_the_whole_batch(found, tiny_model_dir, tmp_path):
    callback = SidestepCallback(GradientControl(low=0.0, high=0.6, max_skips=2))
    records = Records(callback)
    settings = {"per_device_train_batch_size": 8, "max_steps": 8}
    train(text_trainer(tiny_model_dir, tmp_path, [callback, records], **settings))
    both = found[0]["plain"]["records"]
    assert [record["regime"] for record in both] == records.regimes
    alone = [record.cosine for record in records.found][1:]
    assert [record["cosine"] for record in both][1:] == pytest.approx(alone, abs=1e-4)


def test_two_ranks_resume_equal_to_the_unbroken_run(found):
    for one in found:
        assert one["resumed"]["weights"] == one["plain"]["weights"]
        assert one["resumed"]["records"] == one["plain"]["records"][4:]


def test_b14_the_snapshot_is_no_alias_of_ddp_buckets(found):
    cosines = [record["cosine"] for record in found[0]["plain"]["records"]][1:]
    assert max(cosines) < 0.9999


def test_the_lag_that_rank_0_sees_is_that_of_all(found):
    """It is the only one to read the queue; `lag/mean` stands in its log, the log that counts."""
    lags = found[0]["asynchronous"]["lags"]
    assert lags[0] == 0.0
    assert max(lags) >= 2.0
    assert found[1]["asynchronous"]["lags"] == [None] * 6
