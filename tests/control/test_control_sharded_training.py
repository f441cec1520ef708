"""Training a tiny model on 2 and 4 ranks under DDP, FSDP2, HSDP, FSDP2 with tensor parallelism and
FSDP1: all ranks decide alike, and as one rank does.
"""

import math

import pytest
import ranks_training
from ranks_run import found_on

RUNS = [
    (2, "ddp"),
    (2, "fsdp2"),
    (4, "ddp"),
    (4, "fsdp2"),
    (4, "hsdp"),
    (4, "fsdp2_and_tensor_parallel"),
]


@pytest.fixture(scope="module", params=[2, 4])
def found(request):
    return found_on(request.param)


@pytest.fixture(scope="module")
def one_rank():
    return ranks_training.family("one", 0, 1)


def on_all(found, name):
    """What all ranks found, which must be the same to the bit."""
    by_rank = found[name]
    assert "error" not in by_rank[0], by_rank[0]["error"]
    assert all(one == by_rank[0] for one in by_rank), by_rank
    return by_rank[0]


def assert_close(record, wanted):
    """Records agree: words and counts exactly, numbers to 1e-6."""
    assert record.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, float):
            assert record[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
        elif isinstance(value, dict):
            assert_close(record[key], value)
        else:
            assert record[key] == value, key


@pytest.mark.parametrize("settings", ranks_training.FAMILY)
@pytest.mark.parametrize(("num_ranks", "parallelism"), RUNS)
def test_ranks_decide_alike_and_as_one_rank_does(one_rank, num_ranks, parallelism, settings):
    trained, wanted = on_all(found_on(num_ranks), parallelism)[settings], one_rank[settings]
    for record, other in zip(trained["records"], wanted["records"], strict=True):
        assert_close(record, other)
    for name, weights in wanted["weights"].items():
        assert trained["weights"][name] == pytest.approx(weights, rel=1e-6, abs=1e-6)


def test_the_training_above_passes_projects_skips_and_damps(one_rank):
    regimes = {
        settings: {record["regime"] for record in trained["records"]}
        for settings, trained in one_rank.items()
    }
    assert regimes["previous"] == {"undefined", "pass", "project", "skip"}
    assert "damp" in regimes["damp"]
    assert {"pass", "project"} <= regimes["project"] & regimes["update"] & regimes["displacement"]
    assert any(record["clip_factor"] < 1.0 for record in one_rank["previous"]["records"])


def test_adamw_steps_are_decided_alike_on_all_ranks(found):
    for records in on_all(found, "adamw_identical").values():
        assert "project" in {record["regime"] for record in records}


def test_fsdp1_full_shard_works_with_all_parameters_named_and_is_refused_without(found, one_rank):
    trained, wanted = on_all(found, "fsdp1")["previous"], one_rank["previous"]
    for record, other in zip(trained["records"], wanted["records"], strict=True):
        assert_close(record, other)
    assert "flat shard of FullyShardedDataParallel" in on_all(found, "fsdp1_unnamed")


def test_b24_without_gradient_sync_every_rank_refuses_and_the_next_step_works(found):
    text, measured = on_all(found, "b24_sync_off")
    assert text.startswith("every gradient is None")
    assert measured


def test_b34_what_is_not_finite_on_one_rank_stops_the_step_on_all_and_poisons_none(found):
    spoiled = on_all(found, "b34_spoiled_on_one_rank")
    for kind in ("ddp", "fsdp2"):
        assert spoiled[kind]["reasons"][1] == "non-finite"
        assert spoiled[kind]["moved"] == [True, False, True, True]
        assert spoiled[kind]["finite"]
    regimes, reasons, cosines, norms = zip(*spoiled["expert"], strict=True)
    assert regimes == ("undefined", "skip", "project", "project")
    assert reasons[1] == "non-finite"
    assert norms[1] is None
    assert cosines[2] == pytest.approx(1.0)


def test_ranks_without_gradients_or_parameters_decide_with_the_others(found):
    num_ranks = len(found["odd_ranks"])
    all_here, first_empty, second_empty, again, *alone = on_all(found, "odd_ranks")
    assert all_here[3] == again[3] == pytest.approx(5 * math.sqrt(num_ranks))
    assert first_empty[3] == second_empty[3] == pytest.approx(5 * math.sqrt(num_ranks - 1))
    assert first_empty[2] == pytest.approx(math.sqrt((num_ranks - 1) / num_ranks))
    assert second_empty[2] == pytest.approx((num_ranks - 2) / (num_ranks - 1))
    assert alone == [["undefined", "first step", None, 5.0], ["skip", "above high", 1.0, 5.0]]


def test_what_one_rank_says_wrongly_stops_all_and_modes_must_agree(found):
    drift, fine, modes, max_norms = on_all(found, "said_differently")
    assert drift == "drift=-1.0 must be at least 0 (on rank 1; all ranks stop with it)"
    assert fine is None
    assert modes == (
        "the ranks must have the same settings and steps: rank 0 has mode='observe', "
        "rank 1 mode='control'"
    )
    assert "rank 0 has" in max_norms and "max_norm=1.0" in max_norms and "max_norm=2.0" in max_norms


def test_ranks_with_gradients_of_different_dtypes_have_one_record(found):
    *_, last = on_all(found, "mixed_rounding")
    assert last["regime"] == "project"
    assert last["cosine_applied"] is None  # what is left is bfloat16's rounding, on one rank


def test_b32_a_step_makes_one_all_reduce_and_keeps_one_snapshot_of_the_shards(found):
    memory = on_all(found, "b32_memory")
    for regime, collectives, largest in memory["steps"][1:]:
        assert regime == "project"
        assert collectives == ["allreduce_.default"]
        assert largest <= 1.0
    assert memory["kept"] == 1.0


def test_b38_a_training_resumed_through_dcp_is_bitwise_the_unbroken_one(found):
    runs = on_all(found, "resumed")
    assert len(runs) == 2 * len(ranks_training.RESUMED)
    for unbroken, gone_on in runs.values():
        assert unbroken["last"]["cosine"] is not None
        assert gone_on == unbroken


def test_a_snapshot_saved_under_fsdp2_is_taken_up_under_hsdp():
    before, after = on_all(found_on(4), "resharded")
    assert before["cosine"] is not None
    assert_close(after, before)


def test_a_copied_control_decides_with_the_same_ranks(found):
    original, twin = on_all(found, "one_group_twice")
    assert original == twin
