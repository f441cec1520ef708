"""A run that cannot go on ends at once, with the first error and nothing left behind."""

import asyncio
import json
import time

import pytest
from local_run import LocalEngine, VowelTask, run_locally, small_config

from sidestep.errors import EngineError, Interrupted, RewardError, StalledError
from sidestep.trainer.checkpoint import complete_checkpoints, read_checkpoint


class FailingTask(VowelTask):
    def __init__(self, fail_on_call):
        super().__init__()
        self.calls, self.fail_on_call = 0, fail_on_call

    def score(self, examples, completions):
        self.calls += 1
        if self.calls == self.fail_on_call:
            raise RewardError("reward function raised ValueError for the prompt 'say 1'")
        return super().score(examples, completions)


@pytest.mark.parametrize("call", [1, 3])
def test_a_reward_error_ends_the_run_with_itself(tiny_model_dir, tmp_path, call):
    config = small_config(tiny_model_dir, rollout={"max_lag": 2}, train={"steps": 30})
    with pytest.raises(RewardError, match="say 1"):
        run_locally(config, tmp_path / "run", task=FailingTask(call))


@pytest.mark.parametrize("call", [1, 3])
def test_b49_an_engine_error_ends_the_run_with_itself(tiny_model_dir, tmp_path, monkeypatch, call):
    generate, calls = LocalEngine.generate, []

    async def failing(self, requests, sampling, *, version):
        calls.append(requests)
        if len(calls) == call:
            raise EngineError("engine process 7 was killed by SIGKILL")
        return await generate(self, requests, sampling, version=version)

    monkeypatch.setattr(LocalEngine, "generate", failing)
    config = small_config(tiny_model_dir, rollout={"max_lag": 2}, train={"steps": 30})
    started = time.monotonic()
    with pytest.raises(EngineError, match="SIGKILL"):
        run_locally(config, tmp_path / "run")
    assert time.monotonic() - started < 30


def test_a_silent_engine_ends_the_run_by_its_deadline_and_is_named(
    tiny_model_dir, tmp_path, monkeypatch
):
    async def silent(self, requests, sampling, *, version):
        await asyncio.sleep(3600)

    monkeypatch.setattr(LocalEngine, "generate", silent)
    config = small_config(tiny_model_dir, rollout={"timeout_s": 0.5, "max_lag": 1})
    with pytest.raises(
        StalledError, match=r"waited for (the engine: groups 0 to|groups: 3 in flight)"
    ):
        run_locally(config, tmp_path / "run")


def test_an_evaluation_that_is_slow_delays_no_weights_at_lag_0(
    tiny_model_dir, tmp_path, monkeypatch
):
    """Weight loading never waits for an evaluation: training goes on while one is under way."""
    generate, order = LocalEngine.generate, []

    async def slow_evaluation(self, requests, sampling, *, version):
        if requests[0].stream == "evaluation":
            order.append("evaluation asked")
            await asyncio.sleep(1.5)
            order.append("evaluation done")
        else:
            order.append(f"rollout {requests[0].index}")
        return await generate(self, requests, sampling, version=version)

    monkeypatch.setattr(LocalEngine, "generate", slow_evaluation)
    config = small_config(tiny_model_dir, train={"steps": 4, "eval_every": 2})
    run_locally(config, tmp_path / "run")
    first = order.index("evaluation asked")
    assert "rollout 6" in order[first : order.index("evaluation done")]
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        evaluated = [json.loads(line)["accuracy/eval"] is not None for line in file]
    assert evaluated == [False, True, False, True]


def test_max_steps_1_and_2_with_lag_2_end_cleanly(tiny_model_dir, tmp_path):
    """B52: nobody waits for the other when there are fewer steps than lag."""
    for steps in (1, 2):
        config = small_config(tiny_model_dir, rollout={"max_lag": 2}, train={"steps": steps})
        run_locally(config, tmp_path / str(steps))
        rows = (tmp_path / str(steps) / "metrics.jsonl").read_text().splitlines()
        assert len(rows) == steps


def test_b51_fewer_prompts_than_a_step_needs_go_on_in_epochs(tiny_model_dir, tmp_path):
    config = small_config(tiny_model_dir, train={"steps": 10}, rollout={"groups_per_step": 2})
    run_locally(config, tmp_path / "run", task=VowelTask(num_prompts=3))
    with open(tmp_path / "run" / "groups.jsonl") as file:
        asked = [json.loads(line)["prompt_index"] for line in file]
    assert len(asked) == 20
    assert all(sorted(asked[i : i + 3]) == [0, 1, 2] for i in range(0, 18, 3))


def test_equal_reward_groups_are_dropped_and_each_refilled_by_one(tiny_model_dir, tmp_path):
    class OftenEqual(VowelTask):
        def score(self, examples, completions):
            rewards = super().score(examples, completions)
            equal = [example.source in ("row 1", "row 3") for example in examples]
            return [0.5 if e else r for e, r in zip(equal, rewards, strict=True)]

    config = small_config(
        tiny_model_dir,
        rollout={"max_lag": 2, "drop_equal_rewards": True},
        train={"steps": 5},
    )
    run_locally(config, tmp_path / "run", task=OftenEqual())
    with open(tmp_path / "run" / "groups.jsonl") as file:
        rows = [json.loads(line) for line in file]
    trained = [row for row in rows if row["dropped"] is None]
    dropped = [row for row in rows if row["dropped"]]
    assert len(trained) == 15
    assert all(len(set(row["rewards"])) > 1 for row in trained)
    assert {row["dropped"] for row in dropped} == {"equal rewards"}
    indices = sorted(row["index"] for row in rows)
    assert indices[:15] == list(range(15)), "nothing was lost between admission and the records"


def test_the_newest_complete_checkpoint_is_taken_and_old_ones_are_removed(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir, train={"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 2}
    )
    run_locally(config, tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    assert [path.name for path in complete_checkpoints(root)] == ["step-00000005", "step-00000006"]
    (root / "step-00000006" / "state.json").unlink()  # as a half-written one
    assert complete_checkpoints(root)[-1].name == "step-00000005"
    assert read_checkpoint(complete_checkpoints(root)[-1]).step == 5


def test_interrupting_twice_keeps_the_work(tiny_model_dir, tmp_path):
    config = small_config(tiny_model_dir, rollout={"max_lag": 2}, train={"steps": 9})

    def stop_after(step_to_stop):
        def watch(run):
            after = run._after_step

            async def interrupting(step, *rest):
                await after(step, *rest)
                if step == step_to_stop:
                    run.interrupt()

            run._after_step = interrupting

        return watch

    with pytest.raises(Interrupted):
        run_locally(config, tmp_path / "run", watch=stop_after(1))
    with pytest.raises(Interrupted, match="after 5 of 9"):
        run_locally(config, tmp_path / "run", watch=stop_after(4), resume=True)
    run_locally(config, tmp_path / "run", resume=True)
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [row["step"] for row in rows] == list(range(9))
    assert max(row["lag/max"] for row in rows) <= 2
    with open(tmp_path / "run" / "groups.jsonl") as file:
        indices = [json.loads(line)["index"] for line in file]
    assert sorted(indices) == list(range(27))  # each group trained on exactly once


def test_a_run_that_drops_every_group_ends_by_its_deadline(tiny_model_dir, tmp_path):
    class Constant(VowelTask):
        def score(self, examples, completions):
            return [1.0] * len(completions)

    rollout = {"drop_equal_rewards": True, "timeout_s": 1.5}
    config = small_config(tiny_model_dir, rollout=rollout)
    with pytest.raises(StalledError, match=r"train waited for groups.*\d+ were dropped"):
        run_locally(config, tmp_path / "run", task=Constant())
