"""The adapter for DeepSpeed, on the real engine: ZeRO-1, 2 and 3 on two gloo ranks."""

import pytest
from hosts_ranks import found_on

pytestmark = pytest.mark.hosts

KINDS = [(stage, dtype) for stage in ("1", "2", "3") for dtype in ("fp32", "bf16")]
every_kind = pytest.mark.parametrize(("stage", "dtype"), KINDS)


@pytest.fixture(autouse=True)
def needs_deepspeed():
    pytest.importorskip("deepspeed")


@every_kind
def test_observing_is_bitwise_the_engine_alone_and_measures_its_full_gradient(stage, dtype):
    both = found_on(2, "hosts_deepspeed:observed", stage, dtype)
    assert both[0]["records"] == both[1]["records"]
    found = both[0]
    assert found["equal"]
    # bf16: safe_get_full_grad may hand out the rounded gradient
    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    measured = [record["norm_raw"] for record in found["records"]]
    assert measured == pytest.approx(found["norms"], rel=tolerance)
    cosines = [record["cosine"] for record in found["records"][1:]]
    assert cosines == pytest.approx(found["cosines"], abs=tolerance)


@every_kind
def test_b22_what_control_writes_is_what_deepspeed_steps_with_on_both_ranks(stage, dtype):
    both = found_on(2, "hosts_deepspeed:projected", stage, dtype)
    assert both[0] == both[1]
    found = both[0]
    assert found["regime"] == "project"
    tolerance = 1e-6 if dtype == "fp32" else 1e-2
    assert abs(found["dot"] - found["promised"]) <= tolerance * found["scale"]
    assert found["norm"] == pytest.approx(found["norm_applied"], rel=tolerance)


@every_kind
def test_a_skip_leaves_weights_alone_and_the_engine_counts_it(stage, dtype):
    for found in found_on(2, "hosts_deepspeed:skipped", stage, dtype):
        assert found == {
            "regime": "skip",
            "same": True,
            "skipped_steps": 1,
            "goes_on": True,
            "restored": True,
        }


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_b19_one_measurement_at_the_boundary_of_accumulation(stage):
    found = found_on(2, "hosts_deepspeed:accumulated", stage, "fp32")[0]
    assert found["counts"] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert found["norms"] == pytest.approx(found["true"], rel=1e-6)


def test_b21_what_cannot_be_measured_is_refused_by_name():
    messages = found_on(2, "hosts_deepspeed:refused")[0]
    assert "sidestep.attach(engine.optimizer" in messages["stage 0"]
    assert "both would clip" in messages["two clippings"]
    assert "space='gradient'" in messages["update"]
    assert "has a control" in messages["twice"]
    assert "no gradient of" in messages["no backward"]
