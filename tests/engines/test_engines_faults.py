"""However an engine process ends, every call hears of it at once and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_helpers import ask, is_running, prompts_of_lengths

from sidestep.engines.channel import WeightChannel
from sidestep.engines.embedded import EmbeddedEngine, child_environment
from sidestep.engines.protocol import Sampling
from sidestep.errors import EngineError
from sidestep.models.loading import load_model

STUB = Path(__file__).with_name("stub_worker.py")
PROMPT_S = 5.0
LONG = Sampling(1.0, 120)  # with 2048 completions: many seconds


def stub(mode: str, close_timeout_s: float = 0.2, **arguments) -> EmbeddedEngine:
    return EmbeddedEngine(
        model_path="nowhere",
        channel="nowhere",
        seed=0,
        command=(sys.executable, str(STUB), mode),
        close_timeout_s=close_timeout_s,
        **arguments,
    )


def wait_until_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs after {seconds} s"
        time.sleep(0.02)


async def errors_of_calls(engine: EmbeddedEngine, num: int, meanwhile=None) -> list[str]:
    """Start `num` calls, do something meanwhile, and return the error of every one of them."""
    requests = ask(prompts_of_lengths(4), 2048)
    calls = [asyncio.create_task(engine.generate(requests, LONG, version=0)) for _ in range(num)]
    await asyncio.sleep(0)
    if meanwhile is not None:
        await meanwhile()
    async with asyncio.timeout(PROMPT_S):
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineError] * num
    return [str(error) for error in errors]


# ---- a process that misbehaves -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "messages"),
    [
        ("exit", ["exited with code 3", "line 50 of stderr", "line 99 of stderr"]),
        ("abort", ["was killed by SIGABRT"]),
        ("prints", ["was killed by SIGKILL", "its last frame was broken"]),
        ("half a frame", ["exited with code 0", "ended inside a frame"]),
        ("no version", ["its last frame was broken: KeyError('version')"]),
    ],
)
def test_b49_every_waiting_and_later_call_says_how_the_process_ended(mode, messages):
    async def check() -> None:
        engine = stub(mode)
        await engine.start()
        errors = await errors_of_calls(engine, 3)
        assert errors[0] == errors[1] == errors[2]
        for message in [*messages, f"engine process {engine.pid}"]:
            assert message in errors[0]
        assert "line 49 of" not in errors[0]
        for later in (engine.load_weights(0), engine.start()):
            with pytest.raises(EngineError):
                await later
        await engine.close()
        assert await errors_of_calls(engine, 1) == errors[:1]

    asyncio.run(check())


def test_an_answer_with_a_completion_missing_is_refused():
    async def check() -> None:
        engine = stub("no completions")
        await engine.start()
        (error,) = await errors_of_calls(engine, 1)
        assert "gave a wrong answer" in error
        assert "2048 completions were asked for and 0 came" in error
        await engine.close()

    asyncio.run(check())


def test_a_process_that_is_never_ready_is_ended_at_the_deadline():
    async def check() -> None:
        engine = stub("never ready", start_timeout_s=1.0)
        with pytest.raises(EngineError, match=r"not ready after 1 s.*\n.*still loading"):
            await engine.start()
        assert not is_running(engine.pid)

    asyncio.run(check())


def test_close_ends_a_process_that_ignores_the_end_of_stdin_and_sigterm():
    async def check() -> None:
        engine = stub("stubborn")
        await engine.start()
        calls = asyncio.create_task(errors_of_calls(engine, 2))
        await asyncio.sleep(0.1)
        await engine.close()
        assert await calls == ["the engine was closed"] * 2
        assert not is_running(engine.pid)
        await engine.close()

    asyncio.run(check())


def test_calls_before_start_and_second_starts_are_refused():
    async def check() -> None:
        engine = stub("exit")
        with pytest.raises(EngineError, match="was not started"):
            await engine.load_weights(0)
        await engine.start()
        with pytest.raises(EngineError, match="was started already"):
            await engine.start()
        await engine.close()
        await stub("exit").close()

    asyncio.run(check())


def test_a_start_that_fails_raises_its_error_and_leaves_no_process():
    async def check() -> None:
        engine = stub("cannot start")
        with pytest.raises(EngineError, match=r"raised UsageError: no such folder\nTraceback"):
            await engine.start()
        assert not is_running(engine.pid)

    asyncio.run(check())


# ---- the real process
# ------------------------------------------------------------------------------


@pytest.fixture
def published(tiny_model_dir, tmp_path):
    channel = WeightChannel(tmp_path / "weights")
    channel.publish(0, load_model(str(tiny_model_dir), "float32", "cpu").named_parameters())
    return channel


def test_b49_real_process_survives_bad_calls_and_its_death_is_told(tiny_model_dir, published):
    async def check() -> None:
        engine = EmbeddedEngine(model_path=tiny_model_dir, channel=published.folder, seed=0)
        await engine.start()
        requests, sampling = ask(prompts_of_lengths(4)), Sampling(1.0, 4)
        os.kill(engine.pid, signal.SIGINT)  # Ctrl-C in a terminal reaches the child too
        tensors = published.read(0)
        published.publish(1, [(name, tensor * float("nan")) for name, tensor in tensors.items()])
        with pytest.raises(EngineError, match=r"not a finite number.*weights of version 1"):
            await engine.generate(requests, sampling, version=1)
        published.publish(2, [(f"x.{name}", tensor) for name, tensor in tensors.items()])
        unfit = r"version 2 does not fit the model (?s:.*)unknown \['x.(?s:.*)Traceback"
        with pytest.raises(EngineError, match=unfit):
            await engine.generate(requests, sampling, version=None)
        generation = await engine.generate(requests, sampling, version=0)
        assert generation.completions[0][0].versions[0] == 0

        async def kill() -> None:
            await asyncio.sleep(0.3)
            os.kill(engine.pid, signal.SIGKILL)

        errors = await errors_of_calls(engine, 3, kill)
        assert len(set(errors)) == 1
        assert f"engine process {engine.pid} was killed by SIGKILL" in errors[0]
        await engine.close()
        await engine.close()

    asyncio.run(check())


PARENT = """
import asyncio, sys
from sidestep.engines.embedded import EmbeddedEngine
from sidestep.engines.protocol import GenerationRequest, Sampling

async def main():
    engine = EmbeddedEngine(model_path=sys.argv[1], channel=sys.argv[2], seed=0)
    await engine.start()
    call = engine.generate([GenerationRequest(0, (5, 6), 2048)], Sampling(1.0, 120), version=None)
    task = asyncio.create_task(call)
    await asyncio.sleep(0.3)
    print(engine.pid, flush=True)
    await task
    await task

asyncio.run(main())
"""


def test_it_ends_when_its_parent_is_killed_while_it_generates(tiny_model_dir, published):
    command = [sys.executable, "-c", PARENT, str(tiny_model_dir), str(published.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
    wait_until_gone(pid, PROMPT_S)


def test_it_ends_with_its_parent_even_if_a_forked_child_holds_the_pipe(tiny_model_dir, published):
    forking = PARENT.replace(
        "    await task\n    await task\n",
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(60)\n"
        "        os._exit(0)\n"
        "    print(child, flush=True)\n"
        "    await task\n"
        "    await asyncio.sleep(60)\n",
    ).replace("import asyncio, sys", "import asyncio, os, sys, time")
    command = [sys.executable, "-c", forking, str(tiny_model_dir), str(published.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, child = int(parent.stdout.readline()), int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            assert is_running(child)  # and with it the other end of the engine's stdin
            wait_until_gone(pid, PROMPT_S)
            assert is_running(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_threads_are_the_users_unless_a_number_is_given_and_wait_passively():
    assert child_environment({}, None)["OMP_NUM_THREADS"] == "1"
    assert child_environment({}, None)["OMP_WAIT_POLICY"] == "passive"
    user = {"OMP_NUM_THREADS": "6", "OMP_WAIT_POLICY": "active", "PYTHONPATH": "here"}
    assert child_environment(user, None) | user == child_environment(user, None)
    assert child_environment(user, 2)["OMP_NUM_THREADS"] == "2"


def test_starting_an_engine_needs_no_torch():
    modules = "sidestep.engines.embedded, sidestep.engines.worker, sidestep.engines.channel"
    code = f"import {modules}, sys; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert output.stdout.strip() == "False"
