"""Sinks. The services are fakes of the shape that ours use; where their packages are installed, the
same tests run on the real ones, offline (docs/compare.md says how).
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sidestep.config.loading import load_config
from sidestep.diagnostics.recorder import Recorder
from sidestep.diagnostics.sinks import close_on_exit, open_sinks
from sidestep.errors import UsageError

NAMES = ["wandb", "trackio", "mlflow"]
CONFIG = {"seed": 3, "train": {"steps": 4, "max_norm": None}}


class Service:
    """Fakes of wandb, trackio and mlflow. `error`: what their start raises."""

    def __init__(self):
        self.logged, self.starts, self.ends, self.error = [], [], [], None

    def start(self, **arguments):
        if self.error is not None:
            raise self.error
        self.starts.append(arguments)

    def wandb(self):
        module = ModuleType("wandb")
        module.errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
        module.Settings = lambda **keys: keys
        service = self

        class Run:
            def __init__(self, name):
                self.id = name

            def define_metric(self, name, step_metric=None):
                pass

            def log(self, values):
                service.logged.append((values.pop("step"), values))

            def finish(self, exit_code):
                if self.id is not None:
                    service.ends.append(exit_code)
                self.id = None

        def init(**arguments):
            service.start(**arguments)
            return Run(arguments["id"] or "w1")

        module.init = init
        return module

    def trackio(self):
        module = ModuleType("trackio")
        module.init = self.start
        module.log = lambda values, step: self.logged.append((step, values))
        module.finish = lambda: self.ends.append(None)
        return module

    def mlflow(self):
        module = ModuleType("mlflow")
        module.exceptions = SimpleNamespace(MlflowException=type("Mlflow", (Exception,), {}))
        module.set_experiment = lambda name: None

        def start_run(**arguments):
            self.start(**arguments)
            return SimpleNamespace(info=SimpleNamespace(run_id=arguments["run_id"] or "m1"))

        module.start_run = start_run
        module.log_params = lambda values: self.starts[-1].update(params=values)
        module.log_metrics = lambda values, step, run_id: self.logged.append((step, values))
        module.end_run = self.ends.append
        return module


@pytest.fixture
def service(monkeypatch):
    fake = Service()
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, getattr(fake, name)())
    return fake


def record(folder, names, steps, resume_step=None):
    sinks = open_sinks(names, folder, project="p", config=CONFIG, resume_step=resume_step)
    with Recorder(folder, resume_step, sinks) as recorder:
        for step in steps:
            recorder.step({"step": step, "loss": step / 2, "align/regime": "pass"})


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_gets_the_numbers_of_every_step_and_no_texts(service, tmp_path, name):
    record(tmp_path, [name], range(3))
    assert service.logged == [(step, {"loss": step / 2}) for step in range(3)]
    assert len(service.starts) == len(service.ends) == 1
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_with_the_run_that_the_service_knows(service, tmp_path, name):
    record(tmp_path, [name], range(3))
    record(tmp_path, [name], range(2, 4), resume_step=2)
    first, second = service.starts
    identity = json.loads((tmp_path / "sinks.json").read_text())[name]
    key = {"wandb": "id", "trackio": "name", "mlflow": "run_id"}[name]
    assert second[key] == identity
    assert first[key] != second[key] or name == "trackio"
    if name != "mlflow":
        assert (first["resume"], second["resume"])[1] == "allow"
    assert [step for step, _ in service.logged] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(("name", "ends"), [("wandb", [1]), ("trackio", [None])])
def test_a_run_that_fails_ends_the_run_of_its_sink_as_failed(service, tmp_path, name, ends):
    [sink] = open_sinks([name], tmp_path, project="p", config=CONFIG)
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path, None, [sink]):
        _ = 1 / 0
    close_on_exit(sink)(None, None, None)  # a second end says nothing more
    assert service.ends == ends


def test_an_mlflow_run_that_fails_is_marked_failed(service, tmp_path):
    [sink] = open_sinks(["mlflow"], tmp_path, project="p", config=CONFIG)
    close_on_exit(sink)(ValueError, None, None)
    sink.close()
    assert service.ends == ["FAILED"]
    assert service.starts[0]["params"] == {"seed": 3, "train.steps": 4, "train.max_norm": None}


@pytest.mark.parametrize(
    ("name", "shown"), [("wandb", "W&B"), ("trackio", "trackio"), ("mlflow", "MLflow")]
)
def test_a_missing_package_names_its_extra(monkeypatch, tmp_path, name, shown):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    message = rf"{shown} is needed here \(log.sinks\): pip install 'sidestep\[{name}\]'"
    with pytest.raises(UsageError, match=message):
        open_sinks([name], tmp_path, project="p", config=CONFIG)


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_that_does_not_start_says_why_and_closes_those_that_did(service, tmp_path, name):
    first = "trackio" if name != "trackio" else "wandb"
    kinds = {
        "wandb": sys.modules["wandb"].errors.Error,
        "trackio": OSError,
        "mlflow": sys.modules["mlflow"].exceptions.MlflowException,
    }
    started = Service.start

    def refuse_second(self, **arguments):
        if self.starts:
            raise kinds[name]("no way\nin")
        started(self, **arguments)

    service.start = refuse_second.__get__(service)
    if name == "trackio":
        sys.modules["trackio"].init = service.start
    with pytest.raises(UsageError, match=rf"log.sinks: {name} did not start: no way in: .*, or"):
        open_sinks([first, name], tmp_path, project="p", config=CONFIG)
    assert len(service.ends) == 1


def test_sinks_are_chosen_in_the_recipe_and_tensorboard_is_the_default(tmp_path):
    assert load_config().log.sink_names == ("tensorboard",)
    recipe = tmp_path / "r.toml"
    recipe.write_text('[log]\nsinks = ["tensorboard", "wandb", "wandb"]\n')
    assert load_config(recipe).log.sink_names == ("tensorboard", "wandb")
    assert load_config(recipe, ["log.sinks=mlflow"]).log.sink_names == ("mlflow",)
    assert load_config(recipe, ["log.sinks=[]"]).log.sink_names == ()
    with pytest.raises(UsageError, match='"tensorboard", "wandb", "trackio" or "mlflow"'):
        load_config(recipe, ["log.sinks=wandbb"])


def test_no_sinks_leaves_metrics_jsonl_alone(tmp_path):
    record(tmp_path, [], range(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["groups.jsonl", "metrics.jsonl"]


# ---- the real packages, offline, where they are installed ----


def needs(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def record_with_nan(folder, name):
    for resume_step in (None, 2):
        sinks = open_sinks([name], folder, project="p", config=CONFIG, resume_step=resume_step)
        with Recorder(folder, resume_step, sinks) as recorder:
            for step in range(resume_step or 0, 3):
                loss = math.nan if step == 1 else step / 2
                recorder.step({"step": step, "loss": loss})
    return json.loads((folder / "sinks.json").read_text())[name]


@needs("wandb")
def test_wandb_offline_writes_a_run_that_a_resume_continues(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    identity = record_with_nan(tmp_path, "wandb")
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{identity}"))) == 2


@needs("trackio")
def test_trackio_keeps_all_steps_in_one_run(tmp_path, monkeypatch):
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "store", raising=False)
    identity = record_with_nan(tmp_path, "trackio")
    [database] = (tmp_path / "store").glob("p.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step from metrics order by id").fetchall()
    assert {name for name, _ in rows} == {identity}
    assert [step for _, step in rows] == [0, 1, 2, 2]


@needs("mlflow")
def test_mlflow_keeps_all_steps_in_one_run(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path / 'store'}")
    identity = record_with_nan(tmp_path, "mlflow")
    history = mlflow.MlflowClient().get_metric_history(identity, "loss")
    assert [metric.step for metric in history] == [0, 1, 2, 2]
    assert mlflow.MlflowClient().get_run(identity).data.params["train.steps"] == "4"
