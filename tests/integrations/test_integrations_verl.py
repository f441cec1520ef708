"""The adapter for verl: its real FSDP2 engine on two gloo ranks, and what is refused."""

import sys
from types import SimpleNamespace

import pytest
import torch
from hosts_fakes import Recording, forget_packages, make_packages
from hosts_ranks import found_on
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.integrations import verl


@pytest.mark.hosts
def test_observing_the_real_engine_is_bitwise_the_engine_alone():
    both = found_on(2, "hosts_verl:observed")
    assert both[0]["last"] == both[1]["last"]
    for found in both:
        assert found["equal"]
        assert found["norms"][0] == found["norms"][1]
        assert found["last"]["step"] == 3
        assert found["last"]["norm_raw"] <= 1.0 + 1e-4  # verl clips first
        assert found["lines"] == 4  # rank 0 writes, one line a step


@pytest.mark.hosts
def test_b24_the_real_engine_steps_with_the_promised_product_over_both_ranks():
    both = found_on(2, "hosts_verl:projected")
    assert both[0] == both[1]
    found = both[0]
    assert found["regime"] == "project"
    assert abs(found["dot"] - found["promised"]) <= 1e-6 * found["scale"]
    assert found["norm_raw"] == pytest.approx(found["true_norm"], rel=1e-6)
    assert "model" in found["names"][0]


@pytest.mark.hosts
def test_a_skip_of_the_real_engine_leaves_its_weights_and_two_clippings_are_refused():
    for found in found_on(2, "hosts_verl:skipped"):
        assert found["regime"] == "skip"
        assert found["same"]
        assert "both would clip" in found["refusal"]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Installs a fake verl of a version and hands out its module."""

    def make(version="0.9.1", change=None):
        make_packages(tmp_path, {"verl": version})
        path = tmp_path / "verl/workers/engine/fsdp/transformer_impl.py"
        if change:
            path.write_text(path.read_text().replace(*change))
        from verl.workers.engine.fsdp import transformer_impl

        return transformer_impl

    forget_packages()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield make
    forget_packages()


def engine_of(kind, clip=1.0):
    module = torch.nn.Module()
    module.weight = Parameter(torch.ones(3))
    module.weight.grad = torch.ones(3)
    return kind(module, Recording([module.weight], lr=0.1), clip)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def optimizer_step", "def step_optimizer"), "optimizer_step: there is no such function"),
        (("optimizer_step(self)", "optimizer_step(engine)"), "it takes ['engine']"),
        (("self.optimizer.step()", "pass"), "it does not use 'step' any more"),
        (("class FSDPEngineWithValueHead", "class ValueHead"), "FSDPEngineWithValueHead"),
    ],
)
def test_a_place_that_has_moved_is_refused_by_name(fake, change, message):
    fake(change=change)
    with pytest.raises(ValueError, match="has moved") as raised:
        verl.install(GradientControl())
    assert message in str(raised.value)


def test_an_older_version_is_refused_a_newer_one_is_told_of(fake, caplog):
    fake("0.10.0")
    verl.install(GradientControl()).uninstall()
    assert "verl 0.10.0 is newer than 0.9.1" in caplog.text


def test_a_version_that_is_too_old_is_refused(fake):
    fake("0.8.2")
    with pytest.raises(ValueError, match=r"verl 0\.8\.2 is older than 0\.9\.1"):
        verl.install(GradientControl())


def test_critics_are_left_alone_and_a_second_policy_or_control_is_refused(fake, caplog):
    module = fake()
    caplog.set_level("INFO")
    installed = verl.install(GradientControl())
    with pytest.raises(ValueError, match="uninstall"):
        verl.install(GradientControl())
    engine_of(module.FSDPEngineWithValueHead).optimizer_step()
    assert installed.handle is None
    assert "FSDPEngineWithValueHead trains a value model and is left alone" in caplog.text
    engine_of(module.FSDPEngineWithLMHead).optimizer_step()
    assert installed.handle.last.step == 0
    with pytest.raises(ValueError, match="second policy engine"):
        engine_of(module.FSDPEngineWithLMHead).optimizer_step()
    installed.uninstall()
    assert module.FSDPEngine.optimizer_step.__module__ == module.__name__


def test_flat_shards_of_fsdp1_are_taken_as_each_ranks_own(fake):
    """Fake: torch refuses FSDP1 on a CPU."""
    module = fake()
    engine = engine_of(module.FSDPEngineWithLMHead)
    engine.module.weight._fsdp_flattened = True
    engine.device_mesh = SimpleNamespace(ndim=3)
    installed = verl.install(GradientControl())
    with pytest.raises(ValueError, match="3 dimensions"):
        engine.optimizer_step()
    installed.uninstall()
