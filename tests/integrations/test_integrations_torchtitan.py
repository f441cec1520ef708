"""The adapter for TorchTitan: its real OptimizersContainer on a CPU, and what is refused."""

import sys

import pytest
import torch
from hosts_fakes import Recording, forget_packages, make_packages
from torch.nn import Parameter

from sidestep.control import GradientControl
from sidestep.integrations import torchtitan


def real_container(parts, groups=("AdamW",)):
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    patterns = [r".*weight", r".*"] if len(groups) == 2 else [r".*"]
    configs = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 0.1})
        for pattern, name in zip(patterns, groups, strict=True)
    ]
    config = OptimizersContainer.Config(param_groups=configs, implementation="for-loop")
    return OptimizersContainer(config, model_parts=parts)


def train(container, parts, steps=3):
    for step in range(steps):
        container.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step % 2))
        sum(part(x).square().mean() for part in parts).backward()
        container.step()


def new_parts():
    torch.manual_seed(0)
    return [torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))]


@pytest.mark.hosts
@pytest.mark.parametrize("groups", [("AdamW",), ("AdamW", "Adam")])
def test_observing_the_real_container_is_bitwise_the_container_alone(groups):
    bare, watched = new_parts(), new_parts()
    alone = real_container(bare, groups)
    alone.state_dict()
    train(alone, bare)
    installed = torchtitan.install(GradientControl(mode="observe"))
    container = real_container(watched, groups)
    assert len(container.optimizers) == 2 * len(groups)
    container.state_dict()  # makes a step of its own inside, which is none of ours
    assert installed.handle.last is None
    train(container, watched)
    assert installed.handle.last.step == 2
    grads = [p.grad for part in watched for p in part.parameters()]
    norm = torch.cat([g.flatten() for g in grads]).norm().item()
    assert installed.handle.last.norm_raw == pytest.approx(norm, rel=1e-6)
    installed.uninstall()
    for left, right in zip(bare, watched, strict=True):
        for a, b in zip(left.parameters(), right.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.hosts
def test_a_skip_of_the_real_container_moves_no_weight_of_any_optimizer():
    parts = new_parts()
    installed = torchtitan.install(GradientControl(low=0.1, high=0.2))
    container = real_container(parts, ("AdamW", "Adam"))
    weights = []
    for _ in range(2):
        for part in parts:
            for p in part.parameters():
                p.grad = torch.ones_like(p)
        container.step()
        weights.append([p.detach().clone() for part in parts for p in part.parameters()])
    assert installed.handle.last.regime == "skip"
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    installed.uninstall()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    def make(change=None):
        make_packages(tmp_path)
        path = tmp_path / "torchtitan/components/optimizer.py"
        if change:
            path.write_text(path.read_text().replace(*change))
        from torchtitan.components import optimizer

        return optimizer.OptimizersContainer

    forget_packages()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield make
    forget_packages()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("optimizer.step()", "pass"), "it does not use 'step'"),
        (("(Optimizer)", ""), "no OptimizersContainer that is a torch optimizer"),
        (("def step", "def advance"), "does not use 'optimizers'"),
    ],
)
def test_a_place_that_has_moved_is_refused_by_name(fake, change, message):
    if change[0] == "def step":  # then it is the step of torch.optim.Optimizer
        message = "has moved"
    fake(change)
    with pytest.raises(ValueError, match="has moved") as raised:
        torchtitan.install(GradientControl())
    assert message in str(raised.value)


def test_what_needs_a_learning_rate_and_steps_inside_backward_is_refused(fake):
    kind = fake()
    for settings in ({"above": "damp"}, {"space": "update"}):
        with pytest.raises(ValueError, match="no learning rate or decay of its own"):
            torchtitan.install(GradientControl(**settings))
    installed = torchtitan.install(GradientControl())
    with pytest.raises(ValueError, match="uninstall"):
        torchtitan.install(GradientControl())
    module = torch.nn.Module()
    module.weight = Parameter(torch.ones(2))
    in_backward = type("OptimizersInBackwardContainer", (kind,), {})
    with pytest.raises(ValueError, match="inside backward"):
        in_backward([module], [Recording([module.weight], lr=0.1)])
    kind([module], [Recording([module.weight], lr=0.1)])
    with pytest.raises(ValueError, match="second OptimizersContainer"):
        kind([module], [Recording([module.weight], lr=0.1)])
    installed.uninstall()
