"""Hugging Face Accelerate: accumulation, clipping, one or several processes.

    python examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py

Seconds on a CPU.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import sidestep

ACCUMULATE, EPOCHS = 2, 4


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    torch.manual_seed(0)  # the same weights and data on every process
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    inputs = torch.randn(64, 8)
    batches = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    # After prepare(): it may give the optimizer other parameters. Accelerate's wrapper is fine.
    control = sidestep.GradientControl(low=0.1, high=0.9)
    named = accelerator.unwrap_model(model).named_parameters()
    handle = sidestep.attach(optimizer, control, named_parameters=named)
    accelerator.register_for_checkpointing(handle)  # in save_state(), with everything else

    for epoch in range(EPOCHS):
        for batch, targets in batches:
            with accelerator.accumulate(model):
                loss = (model(batch) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    # As before. Or give max_norm to attach() and clip there, after control.
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # between accumulated batches Accelerate leaves it out
                optimizer.zero_grad()
        record = handle.last
        accelerator.print(
            f"epoch {epoch}  loss {loss.item():.3f}  optimizer steps {record.step + 1}  "
            f"cosine {record.cosine:+.3f}  {record.regime}"
        )

    accelerator.end_training()


if __name__ == "__main__":
    main()
