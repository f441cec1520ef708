"""A control that is saved and restored goes on bitwise; one that lost its snapshot says so."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from sidestep.control import GradientControl
from sidestep.control.attach import attach


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
    [
        ({"format": 1}, "format=1"),
        ({"step": -1}, "step=-1"),
        ({"scopes": {"model": {"skips_in_a_row": None}}}, "skips_in_a_row=None"),
    ],
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


FAMILY = [
    {"reference": "ema", "low": 0.1, "high": 0.5, "max_skips": 2},
    {"reference": "ema", "snapshot_dtype": "bfloat16", "snapshot": "applied", "high": 1.0},
    {"reference": "displacement", "low": 0.0, "high": 0.5},
    {"reference": "displacement", "low": 0.0, "high": 1.0, "strength": "drift"},
    {"reference": "displacement", "strength": "secant"},
    {"reference": "displacement", "strength": "secant", "snapshot_dtype": "bfloat16"},
    {"space": "update", "low": 0.0, "high": 1.0},
    {"space": "update", "low": 0.0, "high": 0.2, "above": "damp"},
    {"space": "update", "reference": "ema", "snapshot": "raw"},
    {"space": "update", "reference": "displacement", "low": 0.0, "high": 1.0},
    {"low": "calibrate", "high": "calibrate", "calibrate_steps": 5},
    {"low": 0.0, "high": "calibrate", "calibrate_steps": 9},
    {"scope": "group", "high": 0.3, "max_skips": 1},
    {"scope": "block", "reference": "displacement", "strength": "secant"},
    {"scope": "block", "space": "update", "low": "calibrate", "high": 0.9, "calibrate_steps": 4},
    {"residual": 0.05, "high": 1.0},
]


class Host:
    """A stale training loop with everything a host can note, saved and restored as a run is."""

    def __init__(self, settings, gives_weights):
        torch.manual_seed(0)
        blocks = [torch.nn.Linear(4, 4) for _ in range(2)]
        self.model = torch.nn.Sequential()
        self.model.layers = torch.nn.ModuleList(blocks)
        self.model.head = torch.nn.Linear(4, 1)
        groups = [
            {"params": self.model.layers.parameters()},
            {"params": self.model.head.parameters()},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02)
        self.control = GradientControl(**settings)
        named = self.model.named_parameters()
        self.handle = attach(self.optimizer, self.control, 0.5, named_parameters=named)
        self.gives_weights = gives_weights or settings.get("strength") == "secant"
        self.past = [self.weights()] * 3

    def weights(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def train(self, steps):
        records = []
        for t in steps:
            generator = torch.Generator().manual_seed(t)
            x = torch.randn(16, 4, generator=generator)
            self.optimizer.zero_grad()
            hidden = x
            for block in self.model.layers:
                hidden = torch.tanh(block(hidden))
            loss = (self.model.head(hidden) - 1.0).square().mean()
            loss.backward()
            self.handle.note(batch=t // 2 if t > 8 else t, lag=2.0, drift=0.07, expected=0.2)
            if self.gives_weights:
                self.handle.note(behaviour=self.past[-3])
            self.optimizer.step()
            self.past.append(self.weights())
            records.append(self.handle.last)
        return records

    def restore(self, other, control_state):
        self.model.load_state_dict(other["model"])
        self.optimizer.load_state_dict(other["optimizer"])
        self.past = other["past"]
        self.handle.load_state_dict(control_state)


@pytest.mark.parametrize(
    ("settings", "gives_weights"),
    [(settings, False) for settings in FAMILY]
    + [(settings, True) for settings in FAMILY if settings.get("reference") == "displacement"],
    ids=str,
)
@pytest.mark.parametrize("broken_after", [1, 7])
def test_b40_every_member_of_the_family_resumes_bitwise(
    tmp_path, settings, gives_weights, broken_after
):
    unbroken, resumed = Host(settings, gives_weights), Host(settings, gives_weights)
    unbroken.train(range(broken_after))
    saved = {
        "model": copy.deepcopy(unbroken.model.state_dict()),
        "optimizer": copy.deepcopy(unbroken.optimizer.state_dict()),
        "past": list(unbroken.past),
    }
    control_state = through_files(unbroken.handle.state_dict(), tmp_path)
    wanted = unbroken.train(range(broken_after, broken_after + 10))
    resumed.train(range(100, 103))  # a control that was used is overwritten whole
    resumed.restore(saved, control_state)
    assert resumed.train(range(broken_after, broken_after + 10)) == wanted
    for name, tensor in unbroken.weights().items():
        assert torch.equal(tensor, resumed.weights()[name])
    acted = {record.regime for record in wanted} - {"undefined", "pass"}
    assert acted or settings.get("scope") == "block" or "calibrate" in settings.values()


def test_a_state_of_another_reference_or_space_is_taken_without_its_snapshot(caplog):
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    control = GradientControl()
    control.apply([("w", weight)])
    for settings, message in (
        ({"reference": "ema"}, "is of reference='previous', not 'ema'"),
        ({"space": "update"}, "is of space='gradient', not 'update'"),
        ({"reference": "displacement"}, "is of reference='previous'"),
    ):
        caplog.clear()
        other = GradientControl(**settings)
        other.load_state_dict(control.state_dict())
        assert message in caplog.text
        assert "no reference for the next step" in caplog.text
        assert other.state_dict()["snapshot"] == {}
        assert other.state_dict()["step"] == 1


def test_a_strength_changed_at_a_restart_leaves_the_other_ones_tensors_behind():
    weight = torch.nn.Parameter(torch.zeros(2))
    facts = {"behaviour": {"w": torch.ones(2)}, "lag": 2.0}
    secant = GradientControl(reference="displacement", strength="secant")
    plain = GradientControl(reference="displacement")
    estimated = GradientControl(reference="displacement")
    for control in (secant, plain, estimated):
        weight.grad = torch.ones(2)
        given = {"lag": 2.0} if control is estimated else facts
        control.apply([("w", weight)], **given)
    for state, wanted in ((secant.state_dict(), set()), (estimated.state_dict(), {"w"})):
        fresh = GradientControl(reference="displacement")
        fresh.load_state_dict(state)
        assert fresh.state_dict()["snapshot"].keys() == wanted
        other = GradientControl(reference="displacement", strength="secant")
        other.load_state_dict(state)
        assert ("behaviour:w" in other.state_dict()["snapshot"]) == (not wanted)
    again = GradientControl(reference="displacement", strength="secant")
    again.load_state_dict(secant.state_dict())
    weight.grad = torch.ones(2)
    again.apply([("w", weight)], **facts)
    assert again.state_dict()["snapshot"].keys() == {"w", "behaviour:w"}


def test_b40_a_lost_snapshot_is_told_where_one_is_needed(caplog):
    weight = torch.nn.Parameter(torch.zeros(2))
    behaviour = {"w": torch.ones(2)}
    cases = [
        ({"reference": "ema"}, {"lag": 2}, True),
        ({"reference": "displacement"}, {"lag": 2}, True),
        ({"reference": "displacement"}, {"behaviour": behaviour}, False),  # the host's to give
        ({"reference": "displacement", "strength": "secant"}, {"behaviour": behaviour}, True),
    ]
    for settings, facts, is_lost in cases:
        control = GradientControl(**settings)
        weight.grad = torch.ones(2)
        control.apply([("w", weight)], **facts)
        state = control.state_dict()
        state["snapshot"] = {}
        caplog.clear()
        fresh = GradientControl(**settings)
        fresh.load_state_dict(state)
        assert ("holds no snapshot" in caplog.text) == is_lost
        weight.grad = torch.tensor([1.0, 0.0])
        record = fresh.apply([("w", weight)], **facts)
        if is_lost and "strength" not in settings:
            assert (record.regime, record.reason) == ("undefined", "no reference")


@given(
    reference=st.sampled_from(["previous", "ema", "displacement"]),
    space=st.sampled_from(["gradient", "update"]),
    scope=st.sampled_from(["model", "group", "block"]),
    mode=st.sampled_from(["control", "observe", "off"]),
    above=st.sampled_from([None, "damp", "project"]),
    snapshot=st.sampled_from([None, "raw", "applied"]),
)
@hypothesis_settings(max_examples=40, deadline=None)
def test_every_combination_runs_and_its_state_is_json_and_tensors(**settings):
    host = Host(settings, gives_weights=False)
    records = host.train(range(4))
    assert all(torch.isfinite(tensor).all() for tensor in host.weights().values())
    for record in records:
        json.dumps(record.as_dict(), allow_nan=False)
    state = host.handle.state_dict()
    assert all(isinstance(t, torch.Tensor) for t in state.pop("snapshot").values())
    json.dumps(state, allow_nan=False)
    assert state["step"] == 4
