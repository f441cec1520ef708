"""The control's other references, spaces and readings in a real run, and their resume."""

import json

import pytest
import torch
from local_run import equal_weights, run_locally, small_config, weights_of

from sidestep.errors import Interrupted
from sidestep.trainer.behaviour import BehaviourWeights

FORMS = {
    "ema": {"reference": "ema", "low": 0.0, "high": 0.9},
    "displacement": {"reference": "displacement", "low": 0.0, "high": 1.0},
    "displacement, update": {"reference": "displacement", "space": "update", "low": 0.0},
    "drift": {"reference": "displacement", "space": "update", "strength": "drift", "low": 0.0},
    "spring": {
        "reference": "displacement",
        "space": "update",
        "strength": "spring",
        "drift_scale": 1e-4,
    },
    "secant": {"reference": "displacement", "strength": "secant"},
    "previous, update": {"space": "update", "low": 0.0, "high": 0.3},
    "by block": {"scope": "block", "low": 0.0, "high": 0.3},
    "calibrate": {"low": "calibrate", "high": "calibrate", "calibrate_steps": 3},
}


def config_for(model_dir, form, **sections):
    settings = dict(FORMS[form])
    control = {"low": 0.1, "high": 0.6} | settings
    rollout = {"lag_mode": "exact", "max_lag": 2}
    return small_config(
        model_dir, rollout=rollout, train={"steps": 7} | sections.pop("train", {}), control=control
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_runs_and_resumes_bitwise(tiny_model_dir, tmp_path, form):
    config = config_for(tiny_model_dir, form)
    unbroken = weights_of(run_locally(config, tmp_path / "unbroken"))

    def stop_after_four(run):
        after = run._after_step

        async def interrupting(step, *rest):
            await after(step, *rest)
            if step == 3:
                run.interrupt()

        run._after_step = interrupting

    with pytest.raises(Interrupted):
        run_locally(config, tmp_path / "broken", watch=stop_after_four)
    resumed = weights_of(run_locally(config, tmp_path / "broken", resume=True))
    assert equal_weights(unbroken, resumed)


@pytest.mark.parametrize("space", ["gradient", "update"])
def test_displacement_leaves_a_synchronous_run_bitwise_alone(tiny_model_dir, tmp_path, space):
    def final(name, mode):
        control = {"mode": mode, "reference": "displacement", "space": space, "above": "project"}
        config = small_config(tiny_model_dir, train={"steps": 5}, control=control)
        return weights_of(run_locally(config, tmp_path / name))

    assert equal_weights(final("on", "control"), final("off", "off"))


def test_displacement_in_bounded_mode_finds_the_weights_of_every_version_it_trains_on(
    tiny_model_dir, tmp_path
):
    control = {"reference": "displacement", "low": 0.0, "high": 1.0}
    config = small_config(
        tiny_model_dir, rollout={"max_lag": 3}, train={"steps": 12}, control=control
    )
    run_locally(config, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    stale = [row for row in rows if row["lag/max"] > 0]
    # a batch of equal rewards has no gradient to compare; a mixed one may be of the live version
    silent = ("zero gradient", "zero displacement")
    for row in rows:
        assert row["align/cosine"] is not None or row["align/reason"] in silent
    assert all(row["align/reason"] != "zero displacement" for row in stale)


def test_the_expected_cosine_is_read_at_its_cadence_and_the_excess_is_the_difference(
    tiny_model_dir, tmp_path
):
    control = {"expected_every": 2, "low": 0.0, "high": 1.0}
    rollout = {"groups_per_step": 8}  # so that neither half has only groups of equal rewards
    config = small_config(tiny_model_dir, rollout=rollout, train={"steps": 6}, control=control)
    run_locally(config, tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [row["align/expected"] is not None for row in rows] == [True, False] * 3
    for row in rows[2::2]:
        assert row["align/excess"] == pytest.approx(row["align/cosine"] - row["align/expected"])


def test_behaviour_weights_are_the_token_weighted_mean_of_their_versions():
    versions = {3: {"w": torch.tensor([0.0, 4.0])}, 5: {"w": torch.tensor([8.0, 0.0])}}
    mixed = BehaviourWeights({3: 30, 5: 10}, versions.__getitem__)
    assert mixed("w").tolist() == [2.0, 3.0]
    alone = BehaviourWeights({5: 7}, versions.__getitem__)
    assert alone("w") is versions[5]["w"]
    with pytest.raises(KeyError):
        mixed("v")
