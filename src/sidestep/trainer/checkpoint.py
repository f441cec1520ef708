"""Checkpoints: what a run needs to go on exactly, written so that a half-written one is never taken
for a whole one.

    checkpoints/step-00000050/
      model/             a Hugging Face folder (config, weights, tokenizer), to use; not read again
      weights.safetensors  the model under its own names, which a Hugging Face folder may change
      state.safetensors  tensors of optimizer, control and random state, by dotted path
      weights/           exact mode only: the versions that rollouts under way still need
      groups.jsonl       groups that had arrived and were not trained on yet
      state.json         everything that is not a tensor, and where the tensors go

The folder is written under a dotted name and renamed when complete. Tensors are safetensors, the
rest JSON: no pickle.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sidestep.errors import CheckpointError
from sidestep.types import Completion, Example, Group, Prompt

FORMAT = 1
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State after `step` finished steps. Tensors are copies: training may go on while it is
    written.
    """

    step: int
    versions_after: dict[int, int]  # steps done -> version, as far back as exact mode can ask
    model: Tensors
    trainer: dict[str, Any]  # version, optimizer, control, random numbers
    ledger: dict[str, Any]
    waiting: tuple[Group, ...]
    weights: dict[int, Tensors]  # exact mode: version -> parameters
    elapsed_s: float


def write_checkpoint(
    checkpoint: Checkpoint, root: Path, hugging_face: Any, tokenizer: Any, keep: int
) -> Path:
    """Write, rename, then delete all but the newest `keep`; one of this step is left as it is.

    `hugging_face` is the model that knows its config.
    """
    final = root / f"step-{checkpoint.step:08d}"
    if final in complete_checkpoints(root):
        return final  # the same step has the same state
    for leftover in (*root.glob(".step-*"), *root.glob(".old-*"), *root.glob(final.name)):
        shutil.rmtree(leftover)  # of a run that was killed
    draft = root / f".{final.name}"
    draft.mkdir(parents=True)
    hugging_face.save_pretrained(draft / "model", state_dict=checkpoint.model)
    tokenizer.save_pretrained(draft / "model")
    tensors, trainer = split_tensors(checkpoint.trainer)
    save_file(tensors, draft / "state.safetensors")
    save_file(checkpoint.model, draft / "weights.safetensors")
    (draft / "weights").mkdir()
    for version, weights in checkpoint.weights.items():
        save_file(weights, draft / "weights" / f"{version:08d}.safetensors")
    with open(draft / "groups.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(group_to_json(group)) + "\n" for group in checkpoint.waiting)
    state = {
        "format": FORMAT,
        "step": checkpoint.step,
        "versions_after": checkpoint.versions_after,
        "trainer": trainer,
        "ledger": checkpoint.ledger,
        "elapsed_s": checkpoint.elapsed_s,
    }
    (draft / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    draft.rename(final)
    for old in complete_checkpoints(root)[:-keep]:
        # renamed first: half of it must not look like a whole one
        shutil.rmtree(old.rename(root / f".old-{old.name}"))
    return final


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first."""
    return sorted(path.parent for path in root.glob("step-*/state.json"))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder that `write_checkpoint` made. Raises CheckpointError naming the file that is
    missing or wrong.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{folder / 'state.json'}: format {state['format']}, this version reads {FORMAT}"
            )
        with open(folder / "groups.jsonl", encoding="utf-8") as file:
            waiting = tuple(group_from_json(json.loads(line)) for line in file)
        weights = sorted((folder / "weights").glob("*.safetensors"))
        return Checkpoint(
            step=state["step"],
            versions_after={int(k): v for k, v in state["versions_after"].items()},
            model=load_file(folder / "weights.safetensors"),
            trainer=join_tensors(load_file(folder / "state.safetensors"), state["trainer"]),
            ledger=state["ledger"],
            waiting=waiting,
            weights={int(path.stem): load_file(path) for path in weights},
            elapsed_s=state["elapsed_s"],
        )
    except (OSError, KeyError, ValueError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({error!r}): remove that folder to go on from the "
            f"one before"
        ) from error


def group_to_json(group: Group) -> dict[str, Any]:
    """A group that waits for its step. It is scored, so the columns of its row, which may hold what
    JSON does not have (dates, pictures), are not needed again.
    """
    example = replace(group.prompt.example, columns={})
    return asdict(replace(group, prompt=replace(group.prompt, example=example)))


def group_from_json(row: Mapping[str, Any]) -> Group:
    prompt = row["prompt"]
    return Group(
        index=row["index"],
        prompt=Prompt(
            index=prompt["index"],
            example=Example(**prompt["example"]),
            token_ids=tuple(prompt["token_ids"]),
        ),
        completions=tuple(
            Completion(
                token_ids=tuple(completion["token_ids"]),
                logprobs=tuple(completion["logprobs"]),
                versions=tuple(completion["versions"]),
                finish_reason=completion["finish_reason"],
                text=completion["text"],
            )
            for completion in row["completions"]
        ),
        rewards=tuple(row["rewards"]),
        generate_s=row["generate_s"],
        reward_parts={name: tuple(values) for name, values in row.get("reward_parts", {}).items()},
        problems=tuple(row.get("problems", ())),
    )


def split_tensors(state: Any, path: str = "") -> tuple[Tensors, Any]:
    """Nested state -> (tensors by dotted path, the same nesting with `{"tensor": path}` in their
    place).

    Keys become strings, as JSON wants them.
    """
    if isinstance(state, torch.Tensor):
        return {path: state.detach().cpu().contiguous()}, {"tensor": path}
    if isinstance(state, Mapping):
        items: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, list | tuple):
        items = enumerate(state)
    else:
        return {}, state
    tensors: Tensors = {}
    rest: dict[str, Any] = {}
    for key, value in items:
        inner, rest[str(key)] = split_tensors(value, f"{path}.{key}" if path else str(key))
        tensors.update(inner)
    return tensors, list(rest.values()) if isinstance(state, list | tuple) else rest


def join_tensors(tensors: Tensors, rest: Any) -> Any:
    """Inverse of `split_tensors`, but for JSON: keys are strings and tuples are lists."""
    if isinstance(rest, list):
        return [join_tensors(tensors, value) for value in rest]
    if not isinstance(rest, dict):
        return rest
    if rest.keys() == {"tensor"}:
        return tensors[rest["tensor"]]
    return {key: join_tensors(tensors, value) for key, value in rest.items()}
