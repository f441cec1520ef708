"""What a run asks for and what it writes down is what happened."""

import json
import time

import pytest
import torch
from local_run import LocalEngine, VowelTask, run_locally, small_config

from sidestep.engines.channel import WeightChannel
from sidestep.trainer.schedule import learning_rate_at
from sidestep.trainer.step import Trainer


def rows_of(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


@pytest.fixture
def calls(monkeypatch):
    """Every generate call: requests, sampling, the version asked for and the one that answered."""
    generate, seen = LocalEngine.generate, []

    async def recording(self, requests, sampling, *, version):
        generation = await generate(self, requests, sampling, version=version)
        answered = generation.completions[0][0].versions[0]
        seen.append((requests, sampling, version, answered))
        return generation

    monkeypatch.setattr(LocalEngine, "generate", recording)
    return seen


def test_evaluation_is_greedy_on_every_held_out_row_with_the_weights_after_its_step(
    tiny_model_dir, tmp_path, calls
):
    config = small_config(
        tiny_model_dir, rollout={"max_lag": 2}, train={"steps": 6, "eval_every": 2}
    )
    task = VowelTask()
    run_locally(config, tmp_path / "run", task=task)
    evaluations = [call for call in calls if call[0][0].stream == "evaluation"]
    versions = [version for _, _, version, _ in evaluations]
    assert [answered for *_, answered in evaluations] == versions
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert versions == [0] + [rows[step]["version"] for step in (1, 3, 5)]  # 0: untrained
    for requests, sampling, _, _ in evaluations:
        assert sampling.greedy
        assert [request.num_completions for request in requests] == [1] * len(task.held_out)
    for requests, sampling, version, _ in calls:
        if requests[0].stream == "rollout":
            assert (sampling.greedy, version) == (False, None)


def test_exact_mode_asks_for_the_weights_of_lag_steps_ago(tiny_model_dir, tmp_path, calls):
    config = small_config(
        tiny_model_dir, rollout={"lag_mode": "exact", "max_lag": 2}, train={"steps": 7}
    )
    run_locally(config, tmp_path / "run")
    rollouts = [call for call in calls if call[0][0].stream == "rollout"]
    asked = sorted((requests[0].index // 3, version) for requests, _, version, _ in rollouts)
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    after = [0] + [row["version"] for row in rows]  # version after so many steps
    assert asked == [(step, after[max(0, step - 2)]) for step in range(7)]
    assert [row["lag/max"] for row in rows] == [
        after[step] - after[max(0, step - 2)] for step in range(7)
    ]


def test_the_channel_keeps_what_can_still_be_asked_for_and_nothing_else(
    tiny_model_dir, tmp_path, monkeypatch
):
    retain, kept = WeightChannel.retain, []

    def recording(self, versions):
        discarded = retain(self, versions)
        kept.append(self.versions())
        return discarded

    monkeypatch.setattr(WeightChannel, "retain", recording)
    config = small_config(
        tiny_model_dir,
        rollout={"lag_mode": "exact", "max_lag": 2},
        train={"steps": 8, "eval_every": 3},
        control={"mode": "off"},
    )
    run_locally(config, tmp_path / "run")
    assert max(len(versions) for versions in kept) <= 3 + 2  # lag + 1, and evaluations under way
    assert set(range(6, 9)) <= set(kept[-1])
    assert not set(range(3)) & set(kept[-1])  # nothing stays pinned


def test_a_skipped_step_publishes_nothing_and_does_not_move_the_schedule(tiny_model_dir, tmp_path):
    """max_skips is large and every positive cosine is skipped."""
    config = small_config(
        tiny_model_dir,
        train={"steps": 12, "schedule": "linear", "learning_rate": 0.01},
        control={"low": -1.0, "high": 0.0, "above": "skip", "max_skips": 99},
    )
    run_locally(config, tmp_path / "run")
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    skipped = [row for row in rows if row["align/regime"] == "skip"]
    assert skipped, "the setting was meant to skip"
    before = [0] + [row["version"] for row in rows[:-1]]
    for version, row in zip(before, rows, strict=True):
        assert row["version"] == version + (row["align/regime"] != "skip")
        assert row["learning_rate"] == learning_rate_at(version, config.train)
        if row["align/regime"] == "skip":
            assert row["time/weight_sync_s"] == 0.0
            assert row["align/cosine"] > 0.0


def test_rows_say_what_the_groups_say(tiny_model_dir, tmp_path):
    config = small_config(tiny_model_dir, rollout={"max_lag": 1}, train={"steps": 5})
    run_locally(config, tmp_path / "run")
    groups = rows_of(tmp_path / "run" / "groups.jsonl")
    for row in rows_of(tmp_path / "run" / "metrics.jsonl"):
        own = [group for group in groups if group["step"] == row["step"]]
        rewards = torch.tensor([reward for group in own for reward in group["rewards"]]).double()
        lengths = [length for group in own for length in group["lengths"]]
        assert row["reward/mean"] == pytest.approx(rewards.mean().item())
        assert row["reward/std"] == pytest.approx(rewards.std(correction=0).item())
        assert row["completion/length_mean"] == pytest.approx(sum(lengths) / len(lengths))
        num_short = sum(n < 5 for n in lengths)  # those ended by themselves
        assert row["completion/truncated_fraction"] <= 1 - num_short / len(lengths)
        assert row["completion/truncated_fraction"] > 0
        assert row["tokens/trained"] == sum(lengths) == sum(row["lag/histogram"].values())
        assert row["tokens/generated"] == sum(lengths)
        lags = [row["version"] - 1 - group["oldest_version"] for group in own]
        assert row["align/regime"] == "skip" or row["lag/max"] == max(lags)
        assert row["time/generate_s"] > 0
        assert row["groups/trained"] == 3


def test_the_control_is_told_batch_lag_and_drift(tiny_model_dir, tmp_path):
    config = small_config(
        tiny_model_dir, rollout={"lag_mode": "exact", "max_lag": 2}, train={"steps": 5}
    )
    told = []

    def watch(run):
        note = run.trainer.handle.note

        def recording(**facts):
            told.append(facts)
            note(**facts)

        run.trainer.handle.note = recording

    run_locally(config, tmp_path / "run", watch=watch)
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert [facts["batch"] for facts in told] == list(range(5))
    assert [facts["lag"] for facts in told] == [row["lag/mean"] for row in rows]
    assert told[0]["drift"] == pytest.approx(0.0, abs=1e-4)
    assert told[4]["drift"] > 1e-4


def test_dropped_groups_are_counted_where_they_are_recorded(tiny_model_dir, tmp_path):
    class SomeEqual(VowelTask):
        def score(self, examples, completions):
            rewards = super().score(examples, completions)
            return [
                1.0 if example.source == "row 2" else reward
                for example, reward in zip(examples, rewards, strict=True)
            ]

    config = small_config(
        tiny_model_dir, rollout={"max_lag": 1, "drop_equal_rewards": True}, train={"steps": 6}
    )
    run_locally(config, tmp_path / "run", task=SomeEqual())
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    dropped = [g for g in rows_of(tmp_path / "run" / "groups.jsonl") if g["dropped"]]
    assert sum(row["groups/dropped"] for row in rows) == len(dropped) > 0
    generated = sum(sum(g["lengths"]) for g in rows_of(tmp_path / "run" / "groups.jsonl"))
    assert sum(row["tokens/generated"] for row in rows) == generated


def test_cpu_time_does_not_count_waiting_as_wall_clock_time_does(
    tiny_model_dir, tmp_path, monkeypatch
):
    """A step that waits a second, as it does when others have the machine, costs no more."""
    step = Trainer._optimizer_step

    def waiting(self, sample, number):
        time.sleep(1.0)
        return step(self, sample, number)

    monkeypatch.setattr(Trainer, "_optimizer_step", waiting)
    config = small_config(tiny_model_dir, rollout={"lag_mode": "exact"}, train={"steps": 3})
    run_locally(config, tmp_path / "run")
    for row in rows_of(tmp_path / "run" / "metrics.jsonl"):
        assert row["time/train_s"] > 1.0
        assert 0.0 < row["time/train_cpu_s"] < 1.0
        assert row["time/train_cpu_s"] <= row["time/cpu_s"]
    assert row["time/cpu_s"] < row["time/step_s"]
