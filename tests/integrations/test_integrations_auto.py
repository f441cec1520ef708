"""The generic way in: which optimizer it takes, how it is told, what it writes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn import Parameter

import sidestep
from sidestep.control import GradientControl
from sidestep.integrations import auto
from sidestep.integrations.auto_settings import parse


@pytest.fixture(autouse=True)
def disabled_afterwards(monkeypatch):
    monkeypatch.delenv("SIDESTEP_MODE", raising=False)
    monkeypatch.delenv("SIDESTEP_LOG", raising=False)
    yield
    if auto.enabled() is not None:
        auto.enabled().disable()


def optimizer_of(*shapes, kind=torch.optim.SGD, names=None, **options):
    parameters = [Parameter(torch.ones(shape)) for shape in shapes]
    given = zip(names, parameters, strict=True) if names else parameters
    return kind(given, lr=0.1, **options)


def step(optimizer, value=1.0):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, value)
    optimizer.step()


def test_the_first_optimizer_that_steps_is_taken_in_that_step_others_are_told_of(capsys):
    first, second = optimizer_of((3, 2)), optimizer_of((3, 2), kind=torch.optim.AdamW)
    on = auto.enable(GradientControl())
    step(first)
    assert on.handle.last.step == 0
    step(second)
    step(second)
    assert on.handle.last.step == 0
    told = capsys.readouterr().err
    assert "control attached to torch.optim.sgd.SGD, 6 parameters" in told
    assert told.count("AdamW is left alone: the control is attached to another") == 1
    step(first)
    assert on.handle.last.regime == "skip"


@pytest.mark.parametrize(
    ("critic", "reason"),
    [
        (lambda: optimizer_of((4, 4), (1, 4)), "a head with one row"),
        (lambda: optimizer_of((4, 4), names=["critic.layer"]), "critic.layer"),
        (lambda: torch.optim.LBFGS([Parameter(torch.ones(2))]), "many gradients a step"),
    ],
)
def test_value_models_and_lbfgs_are_left_alone(critic, reason, capsys):
    on = auto.enable(GradientControl())
    critic = critic()
    if isinstance(critic, torch.optim.LBFGS):
        weight = critic.param_groups[0]["params"][0]
        weight.grad = torch.ones(2)
        critic.step(lambda: weight.sum())
    else:
        step(critic)
    assert on.handle is None
    told = capsys.readouterr().err
    assert reason in told
    step(optimizer_of((3, 2)))
    assert on.handle.last.step == 0


def test_lora_of_rank_1_is_not_taken_for_a_value_head():
    on = auto.enable(GradientControl())
    step(optimizer_of((1, 4), (4, 1), (1, 4), (4, 1)))
    assert on.handle.last.step == 0


def test_optimizers_that_step_inside_backward_are_left_alone(capsys):
    on = auto.enable(GradientControl())
    weight = Parameter(torch.ones(3))
    layer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda p: layer.step())
    weight.sum().backward()
    assert weight.detach().tolist() == pytest.approx([0.9] * 3)
    assert on.handle is None
    told = capsys.readouterr().err
    assert "per-layer" in told


@pytest.mark.parametrize("host", ["deepspeed", "megatron"])
def test_a_step_inside_deepspeed_or_megatron_is_left_to_their_adapters(host, capsys):
    on = auto.enable(GradientControl())
    inside = {"__name__": f"{host}.core.optimizer", "step": step}
    exec("def go(optimizer):\n    step(optimizer)", inside)
    inside["go"](optimizer_of((3, 2)))
    assert on.handle is None
    told = capsys.readouterr().err
    assert f"use sidestep.integrations.{host}" in told


def test_nth_and_select_choose_and_an_attached_one_is_left_alone():
    attached = optimizer_of((2, 2))
    handle = sidestep.attach(attached, GradientControl())
    on = auto.enable(
        GradientControl(), nth=2, select=lambda one: isinstance(one, torch.optim.AdamW)
    )
    small, first, second = (
        optimizer_of((2, 2)),
        optimizer_of((3, 3), kind=torch.optim.AdamW),
        optimizer_of((4, 4), kind=torch.optim.AdamW),
    )
    for optimizer in (attached, small, first):
        step(optimizer)
    assert on.handle is None
    assert handle.last.step == 0
    step(second)
    assert on.handle.last.norm_raw == pytest.approx(4.0)


def test_records_are_one_line_a_step_and_disable_leaves_nothing(tmp_path):
    path = tmp_path / "logs" / "records.jsonl"
    optimizer = optimizer_of((3, 2))
    before = set(vars(optimizer))
    on = auto.enable(GradientControl(above="project"), log=path)
    for value in (1.0, 1.0, -1.0):
        step(optimizer, value)
    on.disable()
    step(optimizer)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["regime"] for row in rows] == ["undefined", "project", "pass"]
    assert rows[1]["cosine"] == pytest.approx(1.0)
    assert {row["alarm"] for row in rows} == {"ok"}
    assert set(vars(optimizer)) == before
    with pytest.raises(ValueError, match="nth=0"):
        auto.enable(nth=0)


def test_the_alarm_is_one_warning(caplog):
    optimizer = optimizer_of((3, 2))
    auto.enable(GradientControl(mode="observe"))
    for _ in range(61):
        step(optimizer)
    assert sum("likely to collapse" in one.message for one in caplog.records) == 1


def test_the_line_of_settings_is_read_and_a_wrong_one_refused_with_a_hint():
    found = parse("low=0.2; high=calibrate, max_norm=1; above=none;nth=2")
    assert found.control == {"low": 0.2, "high": "calibrate", "above": None}
    assert found.own == {"max_norm": 1, "nth": 2}
    assert parse("off") is parse("") is None
    assert parse("on").control == {}
    with pytest.raises(ValueError, match=r"unknown key 'max_nrom' \(did you mean 'max_norm'"):
        parse("max_nrom=1")
    with pytest.raises(ValueError, match="not key=value"):
        parse("low")


SCRIPT = """
import sys, torch
weight = torch.nn.Parameter(torch.zeros(2, 2))
optimizer = torch.optim.SGD([weight], lr=1.0)
for _ in range(2):
    weight.grad = torch.ones(2, 2)
    optimizer.step()
print(sys.argv[1:], weight.sum().item(), __name__)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_the_launcher_runs_a_script_that_knows_nothing_of_it(tmp_path, as_module):
    (tmp_path / "train.py").write_text(SCRIPT)
    log = tmp_path / "records.jsonl"
    environment = os.environ | {"SIDESTEP_AUTO": "low=0.1;high=0.5", "SIDESTEP_LOG": str(log)}
    target = ["-m", "train"] if as_module else ["train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "sidestep.integrations.auto", *target, "--a", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--a', '1'] -4.0 __main__\n"  # the second step was skipped
    regimes = [json.loads(line)["regime"] for line in log.read_text().splitlines()]
    assert regimes == ["undefined", "skip"]


def test_a_run_in_which_nothing_was_controlled_says_so_at_its_end(tmp_path):
    script = tmp_path / "critic.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
    )
    done = launched(script)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("sidestep: ")]
    assert "is left alone: it trains a value or reward model" in lines[0]
    assert lines[-1].startswith("sidestep: no step was controlled")


@pytest.mark.parametrize(
    ("variables", "script", "message"),
    [
        ({"SIDESTEP_AUTO": "lo=0.1"}, "x.py", "SIDESTEP_AUTO: unknown key 'lo'"),
        ({}, "no-such-script.py", "no-such-script.py: no such script"),
        ({"SIDESTEP_LOG": "/proc/x.jsonl"}, "x.py", "log='/proc/x.jsonl': cannot be written"),
    ],
)
def test_wrong_use_of_the_launcher_is_one_line(variables, script, message):
    done = launched(script, **variables)
    assert done.returncode == 1
    assert done.stderr.startswith(message) and len(done.stderr.splitlines()) == 1


def launched(script, **variables):
    command = [sys.executable, "-m", "sidestep.integrations.auto", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_a_disk_that_fills_up_ends_the_records_and_not_the_training(caplog):
    auto.enable(GradientControl(), log="/dev/full")  # opens, and takes no byte
    optimizer = optimizer_of((3, 2))
    step(optimizer)
    step(optimizer)
    assert auto.enabled().handle.last.step == 1
    assert sum("no more records, /dev/full" in one.getMessage() for one in caplog.records) == 1


def test_an_empty_name_of_a_log_is_none(monkeypatch):
    monkeypatch.setenv("SIDESTEP_LOG", "")
    auto.enable(GradientControl())
    step(optimizer_of((3, 2)))
    assert auto.enabled().handle.last.step == 0


def test_a_select_that_cannot_be_imported_or_a_control_that_is_none_is_named():
    with pytest.raises(ValueError, match="select='no_such_module:f': No module"):
        auto.enable(select="no_such_module:f")
    with pytest.raises(ValueError, match="give a sidestep\\.GradientControl"):
        auto.enable("observe")
