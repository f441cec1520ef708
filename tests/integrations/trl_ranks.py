"""One of two ranks (gloo): trains with the callback and says what it found, as JSON.

RANK=0 WORLD_SIZE=2 ... python trl_ranks.py MODEL_DIR FOLDER
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from trl_hosts import Records, async_trainer, grpo_trainer, text_trainer, train, weights

from sidestep import GradientControl
from sidestep.integrations.trl import SidestepCallback

ACTING = {"low": 0.0, "high": 0.6, "max_skips": 2}
GLOO = {"ddp_backend": "gloo"}
SAVING = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}


def digest(trainer):
    parts = hashlib.sha256()
    for tensor in weights(trainer).values():
        parts.update(tensor.numpy().tobytes())
    return parts.hexdigest()


def said(trainer, records):
    return {
        "weights": digest(trainer),
        "records": [record.as_dict() for record in records.found],
        "lags": [line.get("lag/mean") for line in trainer.state.log_history if "loss" in line],
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def plain(model_dir, folder):
    callback = SidestepCallback(GradientControl(**ACTING))
    records = Records(callback)
    settings = GLOO | SAVING
    trainer = text_trainer(model_dir, folder / "plain", [callback, records], **settings)
    return said(train(trainer), records)


def resumed(model_dir, folder):
    callback = SidestepCallback(GradientControl(**ACTING))
    records = Records(callback)
    settings = GLOO | SAVING
    trainer = text_trainer(model_dir, folder / "resumed", [callback, records], **settings)
    train(trainer, resume_from_checkpoint=str(folder / "plain" / "checkpoint-4"))
    return said(trainer, records)


def grpo(model_dir, folder):
    callback = SidestepCallback(GradientControl(**ACTING))
    records = Records(callback)
    settings = GLOO | {"max_steps": 6, "num_iterations": 2, "gradient_accumulation_steps": 2}
    trainer = grpo_trainer(model_dir, folder / "grpo", [callback, records], **settings)
    return said(train(trainer), records)


def asynchronous(model_dir, folder):
    callback = SidestepCallback(GradientControl(**ACTING))
    records = Records(callback)
    settings = GLOO | {"max_steps": 6, "weight_sync_steps": 3, "per_device_train_batch_size": 8}
    trainer = async_trainer(model_dir, folder / "async", [callback, records], **settings)
    return said(train(trainer), records)


if __name__ == "__main__":
    model_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = {run.__name__: run(model_dir, folder) for run in (plain, resumed, grpo, asynchronous)}
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
