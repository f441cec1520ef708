"""Lightning: one callback.

    python examples/lightning.py

Seconds on a CPU.
"""

import sys
import tempfile

sys.path.pop(0)  # this folder, where this file would hide the package of the same name

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import sidestep
from sidestep.integrations.lightning import SidestepCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = (self.model(inputs) - targets).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(0)
    inputs = torch.randn(256, 8)
    batches = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)

    # The one line. Its numbers go into the module's own log (align/cosine, align/skipped, ...),
    # its state into the trainer's checkpoints.
    control = SidestepCallback(
        sidestep.GradientControl(low=0.1, high=0.9),
        on_record=lambda record: print(record.step, record.regime, record.cosine),
    )

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            callbacks=[control],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(Regression(), batches)
        print({name: round(float(x), 4) for name, x in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
