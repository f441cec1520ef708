"""A control that is saved and restored goes on bitwise; one that lost its snapshot says so."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep.control import GradientControl


def model_and_optimizer(dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model.to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, control, steps, start=0):
    """Steps on drifting data; the regimes that came up."""
    regimes = []
    for t in range(start, start + steps):
        generator = torch.Generator().manual_seed(t)
        x = torch.randn(16, 4, generator=generator).to(model[0].weight.dtype)
        optimizer.zero_grad()
        (model(x) - 1.0).square().mean().backward()
        record = control.apply(model.named_parameters(), max_norm=0.5, batch=t)
        if record.regime != "skip":
            optimizer.step()
        regimes.append(record.regime)
    return regimes


def through_files(state, folder):
    """Safetensors for the tensors, JSON for the rest, as a checkpoint keeps them."""
    state = dict(state)
    save_file(state.pop("snapshot"), folder / "control.safetensors")
    (folder / "control.json").write_text(json.dumps(state))
    loaded = json.loads((folder / "control.json").read_text())
    return {**loaded, "snapshot": load_file(folder / "control.safetensors")}


@pytest.mark.parametrize("snapshot_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("snapshot", ["raw", "applied"])
def test_b38_b40_resumed_through_files_is_bitwise_unbroken(
    tmp_path, snapshot_dtype, model_dtype, snapshot
):
    settings = {
        "low": 0.1,
        "high": 0.5,
        "max_skips": 2,
        "snapshot": snapshot,
        "snapshot_dtype": snapshot_dtype,
    }
    model, optimizer = model_and_optimizer(model_dtype)
    control = GradientControl(**settings)
    train(model, optimizer, control, 7)
    saved = through_files(control.state_dict(), tmp_path)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = (
        json.loads(json.dumps(optimizer.state_dict()["param_groups"])),
        [
            {key: value.clone() for key, value in one.items()}
            for one in optimizer.state_dict()["state"].values()
        ],
    )
    unbroken = train(model, optimizer, control, 6, start=7)

    def restored(with_control):
        other, other_optimizer = model_and_optimizer(model_dtype)
        other.load_state_dict(weights)
        groups, states = moments
        other_optimizer.load_state_dict({"param_groups": groups, "state": dict(enumerate(states))})
        other_control = GradientControl(**settings)
        if with_control:
            other_control.load_state_dict(saved)
        return train(other, other_optimizer, other_control, 6, start=7), other, other_control

    regimes, resumed, resumed_control = restored(with_control=True)
    assert regimes == unbroken
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    left, right = control.state_dict(), resumed_control.state_dict()
    for name, tensor in left.pop("snapshot").items():
        assert torch.equal(tensor, right["snapshot"][name])
    right.pop("snapshot")
    assert left == right

    _, weights_only, _ = restored(with_control=False)
    pairs = zip(model.parameters(), weights_only.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_b38_the_snapshot_keeps_its_dtype_beside_bfloat16_parameters(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.001, 2.003, 3.0007])
    control = GradientControl()
    control.apply([("w", weight)])
    for _ in range(256):
        weight.grad = torch.tensor([1.001, 2.003, 3.0007])
        control.apply([("w", weight)], batch=1)
    again = GradientControl()
    again.load_state_dict(through_files(control.state_dict(), tmp_path))
    state = again.state_dict()
    assert torch.equal(state["snapshot"]["w"], torch.tensor([1.001, 2.003, 3.0007]))
    assert (state["step"], state["batch"]) == (257, 1)


def test_a_state_does_not_change_with_later_steps():
    weight = torch.nn.Parameter(torch.zeros(1))
    control = GradientControl()
    for value in (1.0, -2.0):
        weight.grad = torch.tensor([value])
        control.apply([("w", weight)])
        if value == 1.0:
            state = control.state_dict()
    assert state["snapshot"]["w"].item() == 1.0
    fresh = GradientControl()
    fresh.load_state_dict(state)
    weight.grad = torch.tensor([5.0])
    fresh.apply([("w", weight)])
    assert state["snapshot"]["w"].item() == 1.0


def test_b40_a_lost_snapshot_is_told_and_the_step_says_no_reference(caplog):
    weight = torch.nn.Parameter(torch.zeros(2))
    control = GradientControl()
    weight.grad = torch.tensor([1.0, 0.0])
    control.apply([("w", weight)])
    state = control.state_dict()
    del state["snapshot"]
    fresh = GradientControl()
    fresh.load_state_dict(state)
    assert "holds no snapshot" in caplog.text
    record = fresh.apply([("w", weight)])
    assert (record.regime, record.reason, record.step) == ("undefined", "no reference", 1)


def test_parts_without_gradient_survive_saving():
    named = [(name, torch.nn.Parameter(torch.zeros(1))) for name in "ab"]
    control = GradientControl()
    named[0][1].grad = torch.tensor([1.0])
    control.apply(named)
    fresh = GradientControl()
    fresh.load_state_dict(control.state_dict())
    named[0][1].grad, named[1][1].grad = torch.tensor([1.0]), torch.tensor([1.0])
    record = fresh.apply(named)
    assert record.cosine == pytest.approx(0.5**0.5)
    assert "changed" not in record.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [({"format": 2}, "format=2"), ({"step": -1}, "step=-1"), ({"skips_in_a_row": None}, "skips")],
)
def test_a_state_of_another_kind_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        GradientControl().load_state_dict({**GradientControl().state_dict(), **change})


def test_a_snapshot_of_another_model_is_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    control = GradientControl()
    state = {**control.state_dict(), "known": ["w"], "snapshot": {"w": torch.ones(3)}}
    control.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\), its snapshot \(3,\)"):
        control.apply([("w", weight)])
