"""What every adapter promises, on a host of the same shape (hosts_fakes.py).

A further adapter is one more entry in HOSTS there.
"""

import math
import sys

import pytest
import torch
from hosts_fakes import HOSTS, RATE, SHAPES, forget_packages, make_packages
from hosts_ranks import found_on

from sidestep.control import GradientControl


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory):
    """Fake verl, torchtitan and deepspeed, in front of real ones."""
    folder = tmp_path_factory.mktemp("packages")
    make_packages(folder)
    forget_packages()
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))
    forget_packages()


@pytest.fixture(params=HOSTS)
def host_class(request, monkeypatch):
    """Closes what a test has built."""
    monkeypatch.delenv("SIDESTEP_MODE", raising=False)
    built = []

    def build(*arguments, **options):
        built.append(kind(*arguments, **options))
        return built[-1]

    kind = HOSTS[request.param]
    build.kind = kind
    yield build
    for host in built:
        host.close()


def gradients(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


def close(host):
    host.close()
    return host


PROJECT = {"above": "project", "low": 0.05, "high": 0.9}


@pytest.mark.parametrize("clip", [math.inf, 0.7])
def test_observing_is_bitwise_the_host_alone(host_class, clip):
    batches = [[gradients(0), gradients(1 + step)] for step in range(5)]
    bare = host_class(clip=clip)
    for batch in batches:
        bare.step(batch)
    watched = host_class(GradientControl(mode="observe", low=0.0, high=0.0), clip=clip)
    for batch in batches:
        watched.step(batch)
    assert watched.handle.last.step == 4
    assert watched.handle.last.decision != "pass"
    assert watched.handle.last.regime == "pass"
    for name, weight in bare.weights().items():
        assert torch.equal(weight, watched.weights()[name])


def test_b19_one_record_for_each_optimizer_step_on_the_accumulated_gradient(host_class):
    host = host_class(GradientControl(mode="observe"))
    for step in range(3):
        batches = [gradients(100 * step + micro, scale=1 / 3) for micro in range(3)]
        host.step(batches)
        total = sum(flat(one) for one in batches)
        assert host.handle.last.step == step
        assert host.handle.last.norm_raw == pytest.approx(total.norm().item(), rel=1e-6)


def test_b16_the_step_is_made_with_the_promised_product_and_weights_move_so(host_class):
    host = host_class(GradientControl(**PROJECT))
    first, second = gradients(0), gradients(0, scale=10.0)
    second["b"] = second["b"] + gradients(1)["b"]
    host.step([first])
    before = host.weights()
    host.step([second])
    record, p = host.handle.last, flat(first)
    assert record.regime == "project"
    stepped = flat(host.stepped)
    promised = record.cosine_applied * record.norm_applied * p.norm().item()
    assert abs((stepped @ p).item() - promised) <= 1e-6 * flat(second).norm() * p.norm()
    assert stepped.norm().item() == pytest.approx(record.norm_applied, rel=1e-5)
    moved = flat(host.weights()) - flat(before)
    assert torch.allclose(moved, -RATE * stepped, atol=1e-5)


def test_a_skip_leaves_weights_alone_and_the_next_step_is_made(host_class):
    host = host_class(GradientControl(low=0.1, high=0.5))
    host.step([gradients(0)])
    before = host.weights()
    host.step([gradients(0)])
    assert host.handle.last.regime == "skip"
    assert all(torch.equal(weight, before[name]) for name, weight in host.weights().items())
    opposite = gradients(0, scale=-1.0)
    host.step([opposite])
    assert host.handle.last.regime == "pass"
    assert host.handle.last.step == 2
    moved = flat(host.weights()) - flat(before)
    assert torch.allclose(moved, -RATE * flat(opposite), atol=1e-6)


def test_b10_a_gradient_of_none_stays_none_and_its_weight_where_it_was(host_class):
    host = host_class(GradientControl(**PROJECT))
    host.step([gradients(0)])
    before = host.weights()
    partly = gradients(0) | {"b": None}
    host.step([partly])
    record = host.handle.last
    with_none = partly | {"b": torch.zeros(2, 2)}
    assert record.norm_raw == pytest.approx(flat(with_none).norm().item(), rel=1e-6)
    if host_class.kind.has_none:
        assert host.stepped["b"] is None
        assert torch.equal(host.weights()["b"], before["b"])
    host.step([gradients(0)])
    assert host.handle.last.step == 2
    assert host.handle.last.regime == "project"


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_b34_a_gradient_that_is_not_finite_moves_nothing_and_is_not_remembered(host_class, broken):
    host = host_class(GradientControl(), clip=5.0)
    host.step([gradients(0)])
    before = host.weights()
    bad = gradients(1)
    bad["a"][1] = broken
    host.step([bad])
    assert all(torch.equal(weight, before[name]) for name, weight in host.weights().items())
    snapshot = host.handle.state_dict()["snapshot"]
    assert all(torch.isfinite(tensor).all() for tensor in snapshot.values())
    host.step([gradients(2)])
    assert host.handle.last.cosine is not None
    assert all(torch.isfinite(weight).all() for weight in host.weights().values())
    assert not torch.equal(host.weights()["a"], before["a"])


def test_who_clips_first_and_what_is_measured_then(host_class):
    long = gradients(0, scale=100.0)
    host = host_class(GradientControl(mode="observe"), clip=1.0)
    host.step([long])
    wanted = 1.0 if host_class.kind.clips_first else flat(long).norm().item()
    assert host.handle.last.norm_raw == pytest.approx(wanted, rel=1e-4)
    assert flat(host.stepped).norm().item() == pytest.approx(1.0, rel=1e-4)


def test_max_norm_clips_here_after_control(host_class):
    host = host_class(GradientControl(**PROJECT), 0.5)
    host.step([gradients(0, scale=100.0)])
    record = host.handle.last
    assert record.clip_factor < 0.01
    assert flat(host.stepped).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_two_clippings_are_refused_where_the_adapter_can_see_both(host_class):
    if not host_class.kind.refuses_two_clippings:
        pytest.skip("this host's clipping cannot be seen from its optimizer")
    with pytest.raises(ValueError, match="both would clip"):
        host_class(GradientControl(), 0.5, clip=1.0).step([gradients(0)])


def test_b38_a_run_that_goes_on_from_a_state_is_the_unbroken_one(host_class):
    settings = {"low": 0.1, "high": 0.5, "above": "skip", "max_skips": 2}
    batches = [gradients(seed) for seed in (0, 0, 0, 1, 1, 2)]
    whole = host_class(GradientControl(**settings))
    records = []
    for step, batch in enumerate(batches):
        whole.step([batch])
        records.append(whole.handle.last)
        if step == 2:
            state, weights = whole.handle.state_dict(), whole.weights()
    unbroken = whole.weights()
    close(whole)
    control = GradientControl(**settings)
    control.load_state_dict(state)
    resumed = host_class(control)
    resumed.load_weights(weights)
    for step, batch in enumerate(batches[3:], start=3):
        resumed.step([batch])
        assert resumed.handle.last == records[step]
    for name, weight in resumed.weights().items():
        assert torch.equal(weight, unbroken[name])
    assert "skip" in [record.regime for record in records[3:]]


def test_a_host_that_was_let_go_is_as_if_it_had_never_been_attached(host_class):
    host = host_class(GradientControl(low=0.1, high=0.5))
    host.step([gradients(0)])
    handle = host.handle
    handle.detach()
    before = host.weights()
    host.optimizer.given = None
    host.step([gradients(0)])  # would be skipped
    assert not torch.equal(host.weights()["a"], before["a"])


@pytest.mark.parametrize("name", [name for name in HOSTS if name != "deepspeed"])
def test_nan_on_one_rank_of_two_skips_on_both_and_both_go_on(name):
    first, second = found_on(2, "hosts_contract_ranks:nan_on_one_rank", name)
    assert first["records"] == second["records"]
    records = first["records"]
    if HOSTS[name].skips_non_finite:
        assert "1" not in records
    else:
        assert (records["1"]["regime"], records["1"]["reason"]) == ("skip", "non-finite")
    assert records["2"]["regime"] != "skip"
    assert records["2"]["cosine"] is not None
    for found in (first, second):
        assert found["same"]
        assert found["moved"]
