"""The callback in a real Lightning Trainer on the CPU."""

import json
import logging
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="needs sidestep[lightning]")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from sidestep.control import Alarm, GradientControl
from sidestep.integrations.lightning import SidestepCallback

ALL = {"low": -1.0, "high": 1.0}  # every pair of gradients is projected


class Regression(pl.LightningModule):
    """y = x w over random data; the mean of y drifts, so that gradients are alike and not equal."""

    def __init__(self, kind="AdamW", lr=0.05, num_optimizers=1, manual=False, none_at=()):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.kind, self.lr, self.num_optimizers = kind, lr, num_optimizers
        self.automatic_optimization = not manual
        self.none_at = none_at
        self.seen = []  # gradients as the optimizer gets them: flat, one a step
        self.callback = None

    def loss(self, batch):
        inputs, targets = batch
        return (self.layer(inputs) - targets).square().mean()

    def training_step(self, batch, batch_idx):
        if self.callback is not None:
            self.callback.note(lag=float(batch_idx), batch=batch_idx // 2)
        if batch_idx in self.none_at:
            return None
        if self.automatic_optimization:
            return self.loss(batch)
        optimizers = self.optimizers()
        first = optimizers[0] if isinstance(optimizers, list) else optimizers
        for _ in range(2):
            first.zero_grad()
            self.manual_backward(self.loss(batch))
            first.step()
        return None

    def configure_optimizers(self):
        made = []
        for _ in range(self.num_optimizers):
            optimizer = getattr(torch.optim, self.kind)(self.parameters(), lr=self.lr)
            made.append(optimizer)
        return made

    def on_fit_start(self):
        def keep(optimizer, args, kwargs):
            if self.layer.weight.grad is not None:
                self.seen.append(flat(p.grad for p in self.parameters()))

        # After the control's hook, in the post-hook: what step() got.
        self.trainer.optimizers[0].register_step_post_hook(keep)


def flat(tensors):
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


def data(num=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 3, generator=generator)
    targets = torch.randn(num, 2, generator=generator) + 4.0
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


def fit(folder, module=None, callbacks=(), batches=None, ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Regression() if module is None else module
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    options = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "strategy": "auto",
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few workers, of small logging intervals
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, data() if batches is None else batches, ckpt_path=ckpt_path)
    return trainer, module


def weights(module):
    return flat(module.parameters())


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_clip_val": 0.3}, {"accumulate_grad_batches": 3}]
)
def test_observe_is_bitwise_equal_to_no_callback(tmp_path, options):
    records = []
    callback = SidestepCallback(GradientControl(mode="observe"), on_record=records.append)
    _, without = fit(tmp_path, **options)
    trainer, observed = fit(tmp_path, callbacks=[callback], **options)
    assert torch.equal(weights(without), weights(observed))
    assert all(torch.equal(a, b) for a, b in zip(without.seen, observed.seen, strict=True))
    assert {"project", "skip"} & {record.decision for record in records}
    # One record an optimizer step: 8, or 3 of 8 batches accumulated by 3.
    assert [record.step for record in records] == [*range(trainer.global_step)]
    assert len(records) == (3 if "accumulate_grad_batches" in options else 8)
    assert callback.handle is None
    assert callback.last is records[-1]


def test_the_optimizer_gets_the_promised_gradient_and_moves_by_it(tmp_path):
    records, snapshots = [], []
    callback = SidestepCallback(GradientControl(**ALL), on_record=records.append)

    class Snapshots(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            snapshot = callback.control.state_dict()["snapshot"]
            snapshots.append(flat(snapshot.values()) if snapshot else None)

    module = Regression(kind="SGD", lr=0.1)
    moved = []

    class Moves(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = weights(pl_module)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            moved.append(weights(pl_module) - self.before)

    fit(tmp_path, module, [callback, Snapshots(), Moves()])
    assert [record.regime for record in records] == ["undefined"] + ["project"] * 7
    for record, snapshot, grad, move in zip(
        records[1:], snapshots[1:], module.seen[1:], moved[1:], strict=True
    ):
        assert abs(grad @ snapshot) <= 1e-6 * record.norm_raw * snapshot.norm()
        assert grad.norm().item() == pytest.approx(record.norm_applied, rel=1e-5)
        torch.testing.assert_close(move, -0.1 * grad, rtol=1e-5, atol=1e-7)


def test_a_skipped_step_leaves_weights_and_moments_and_the_next_one_goes_on(tmp_path):
    inputs, targets = data().dataset[:2]
    repeated = TensorDataset(inputs.repeat(4, 1), targets.repeat(4, 1))
    records = []
    callback = SidestepCallback(GradientControl(max_skips=9), on_record=records.append)
    module = Regression(lr=1e-9)  # the gradient stays the same
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            state = trainer.optimizers[0].state[pl_module.layer.weight]
            seen.append((weights(pl_module), state["exp_avg"].clone()))

    fit(tmp_path, module, [callback, Watch()], batches=DataLoader(repeated, batch_size=2))
    assert [record.regime for record in records] == ["undefined", "skip", "skip", "skip"]
    for position, moment in seen[1:]:
        assert torch.equal(position, seen[0][0])
        assert torch.equal(moment, seen[0][1])


def test_max_norm_clips_after_control_and_both_clippings_are_refused(tmp_path):
    records = []
    callback = SidestepCallback(GradientControl(**ALL), 0.1, on_record=records.append)
    _, module = fit(tmp_path, callbacks=[callback])
    for record, grad in zip(records, module.seen, strict=True):
        assert record.clip_factor < 1.0
        assert grad.norm().item() == pytest.approx(0.1, rel=1e-4)
    with pytest.raises(ValueError, match=r"max_norm=0.1\) with gradient_clip_val=1.0.*clip twice"):
        fit(tmp_path, callbacks=[SidestepCallback(max_norm=0.1)], gradient_clip_val=1.0)
    fit(tmp_path, callbacks=[SidestepCallback(max_norm=0.1)], gradient_clip_val=0)


def test_a_resumed_run_is_bitwise_the_unbroken_one(tmp_path):
    def run(folder, epochs, ckpt_path=None):
        records = []
        callback = SidestepCallback(
            GradientControl(low=0.2, high=0.8), 1.0, on_record=records.append
        )
        saver = ModelCheckpoint(folder, save_last=True, save_top_k=0)
        _, module = fit(
            folder,
            callbacks=[callback, saver],
            max_epochs=epochs,
            enable_checkpointing=True,
            ckpt_path=ckpt_path,
        )
        return [record.as_dict() for record in records], weights(module), callback

    whole, whole_weights, unbroken = run(tmp_path / "whole", 3)
    first, _, _ = run(tmp_path / "parts", 1)
    last = tmp_path / "parts" / "last.ckpt"
    # Tensors and plain values: nothing that only pickle could read.
    saved = torch.load(last, weights_only=True)["callbacks"]["SidestepCallback"]
    assert saved["control"]["step"] == 8
    rest, resumed_weights, resumed = run(tmp_path / "parts", 3, ckpt_path=last)
    assert first + rest == whole
    assert whole[8]["cosine"] is not None  # compared with a gradient from before the break
    assert torch.equal(whole_weights, resumed_weights)
    assert unbroken.state_dict()["alarm"] == resumed.state_dict()["alarm"]


def test_numbers_are_in_the_modules_log_and_its_loggers(tmp_path):
    callback = SidestepCallback(GradientControl(**ALL))
    logger = CSVLogger(tmp_path, name="log")
    trainer, _ = fit(tmp_path, callbacks=[callback], logger=logger, log_every_n_steps=1)
    assert trainer.callback_metrics["align/cosine"].item() == pytest.approx(callback.last.cosine)
    header, *rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = dict(
        zip(header.split(","), zip(*(row.split(",") for row in rows), strict=True), strict=True)
    )
    assert [float(x) for x in columns["align/projected"]] == [0.0] + [1.0] * 7
    assert float(columns["grad/norm_raw"][-1]) == pytest.approx(callback.last.norm_gradient)
    assert columns["align/cosine"][0] == ""  # there was none: not 0


def test_the_alarm_is_said_once(tmp_path, caplog):
    alarm = Alarm(window=2, patience=2, cosine_limit=-0.99)
    callback = SidestepCallback(GradientControl(mode="observe"), alarm=alarm)
    with caplog.at_level(logging.WARNING, "sidestep"):
        fit(tmp_path, callbacks=[callback])
    said = [r.getMessage() for r in caplog.records if "likely to collapse" in r.getMessage()]
    assert len(said) == 1


def test_notes_reach_the_step_whose_closure_said_them(tmp_path):
    records = []
    callback = SidestepCallback(GradientControl(mode="observe"), on_record=records.append)
    module = Regression()
    module.callback = callback
    fit(tmp_path, module, [callback])
    # batch = batch_idx // 2: every second step is on the batch of the step before.
    assert [record.reason == "same batch" for record in records] == [False, True] * 4
    with pytest.raises(ValueError, match="while fit"):
        callback.note(lag=1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_b23_a_grad_scaler_is_measured_unscaled_and_overflow_leaves_no_record(tmp_path, fused):
    class Scaled(Regression):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=fused, foreach=False)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (math.inf if batch_idx == 3 else 1.0)

    def run(scale, callbacks):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        # float32 under the scaler: autocast to float16 rounds losses apart.
        plugin = NoAutocast("16-mixed", "cpu", scaler)
        return fit(tmp_path, Scaled(), callbacks, plugins=[plugin])[1]

    class NoAutocast(MixedPrecision):
        def autocast_context_manager(self):
            return torch.autocast("cpu", enabled=False)

    runs = {}
    for scale in (1.0, 1024.0):
        records = []
        callback = SidestepCallback(GradientControl(**ALL), on_record=records.append)
        run(scale, [callback])
        runs[scale] = [(r.cosine, r.norm_raw) for r in records if r.reason != "non-finite"]
        # Not fused: GradScaler leaves step() out. Fused: the control says what it saw.
        assert len(records) == (8 if fused else 7)
    assert len(runs[1.0]) == 7
    for one, other in zip(runs[1.0], runs[1024.0], strict=True):
        assert one == (pytest.approx(other[0]), pytest.approx(other[1]))
    observed = run(1024.0, [SidestepCallback(GradientControl(mode="observe"))])
    assert torch.equal(weights(observed), weights(run(1024.0, [])))


def test_manual_optimization_has_a_record_for_every_step(tmp_path):
    records = []
    callback = SidestepCallback(
        GradientControl(mode="observe"), optimizer=0, on_record=records.append
    )
    module = Regression(manual=True, num_optimizers=2)
    fit(tmp_path, module, [callback])
    assert [record.step for record in records] == [*range(16)]
    _, without = fit(tmp_path, Regression(manual=True, num_optimizers=2))
    assert torch.equal(weights(module), weights(without))


def test_a_batch_without_a_loss_is_passed_over(tmp_path):
    records = []
    callback = SidestepCallback(GradientControl(**ALL), on_record=records.append)
    module = Regression(none_at=(2, 3))
    fit(tmp_path, module, [callback], log_every_n_steps=1)
    assert [record.step for record in records] == [*range(6)]
    assert records[2].regime == "project"


def test_what_cannot_be_controlled_is_refused_when_fit_begins(tmp_path):
    several = Regression(manual=True, num_optimizers=2)
    with pytest.raises(ValueError, match=r"has 2 optimizers \(AdamW, AdamW\): say which"):
        fit(tmp_path, several, [SidestepCallback()])
    with pytest.raises(ValueError, match=r"optimizer=1\): the module has 1 optimizers"):
        fit(tmp_path, callbacks=[SidestepCallback(optimizer=1)])
    with pytest.raises(ValueError, match="LBFGS"):
        fit(tmp_path, Regression(kind="LBFGS"), [SidestepCallback()])
    with pytest.raises(ValueError, match="max_norm=-1"):
        SidestepCallback(max_norm=-1)


def test_strategies_that_split_gradients_are_refused_by_name_with_the_alternative():
    from sidestep.integrations.lightning import _require_supported

    class Trainer:
        """A stand-in: those strategies want a GPU."""

        gradient_clip_val = None

        def __init__(self, kind):
            self.strategy = kind.__new__(kind)

    for kind, words in (
        (pl.strategies.FSDPStrategy, "use fully_shard"),
        (pl.strategies.DeepSpeedStrategy, "use the adapter for DeepSpeed"),
        (pl.strategies.ModelParallelStrategy, "examples/fsdp2.py"),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__}: .*{words}"):
            _require_supported(Trainer(kind), None)
    _require_supported(Trainer(pl.strategies.DDPStrategy), None)


def test_a_run_that_failed_leaves_the_control_free_for_the_next(tmp_path):
    class Fails(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise MemoryError
            return super().training_step(batch, batch_idx)

    callback = SidestepCallback(GradientControl(mode="observe"))
    with pytest.raises(MemoryError):
        fit(tmp_path, Fails(), [callback])
    assert callback.handle is None
    fit(tmp_path, callbacks=[callback])
    assert callback.last.step == 9  # 2 before the failure, then 8


TWO_RANKS = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
warnings.simplefilter("ignore")
from test_integrations_lightning import *
records = []
callback = SidestepCallback(GradientControl(low=0.2, high=0.7), on_record=records.append)
torch.manual_seed(0)
module = Regression()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, default_root_dir=sys.argv[2],
    callbacks=[callback], enable_progress_bar=False, enable_model_summary=False, logger=False,
    enable_checkpointing=False,
)
trainer.fit(module, data(32))
found = [[r.regime, r.cosine, r.norm_raw] for r in records], weights(module).tolist()
with open(f"{sys.argv[2]}/rank-{trainer.global_rank}.json", "w") as file:
    json.dump(found, file)
"""


def test_two_ranks_of_ddp_decide_and_move_alike(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert len(one[0]) == 8
    assert len({regime for regime, _, _ in one[0]}) > 1


def test_what_is_no_control_is_refused_when_the_callback_is_made():
    with pytest.raises(ValueError, match="give a sidestep\\.GradientControl"):
        SidestepCallback("observe")
