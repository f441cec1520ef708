"""Stands for `sidestep.study.worker`: answers at once, with a run of constant reward.

STUDY_FAULT=die ends it in the middle of the second cell, =refuse answers with a usage error.
"""

import json
import os
import sys
from pathlib import Path

from sidestep.config import RunConfig
from sidestep.config.writing import to_toml
from sidestep.diagnostics.recorder import Recorder
from sidestep.study.outcome import Outcome, write_outcome

FAULT = os.environ.get("STUDY_FAULT")

for number, line in enumerate(sys.stdin):
    call = json.loads(line)
    config = RunConfig.model_validate(call["config"])
    folder = Path(call["folder"])
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "env.json").write_text("{}")
    if FAULT == "die" and number == 1:
        print("out of memory", file=sys.stderr)
        sys.exit(9)
    if FAULT == "refuse":
        print(json.dumps({"usage_error": "task.path: no such file"}), flush=True)
        continue
    with Recorder(folder, sinks=[]) as recorder:
        for step in range(config.train.steps):
            skipped = config.control.mode == "control" and step % 4 == 0
            regime = "skip" if skipped else "pass"
            row = {"reward/mean": 0.5, "align/regime": regime, "lag/mean": config.rollout.max_lag}
            recorder.step({"step": step, **row, "time/elapsed_s": float(step)})
    with (folder.parents[3] / "order.txt").open("a") as order:
        order.write(f"{folder.parent.name}/{folder.name}\n")
    write_outcome(folder, Outcome(None, config.train.learning_rate))
    print("{}", flush=True)
