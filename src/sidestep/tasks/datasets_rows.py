"""Rows of Hugging Face datasets: a folder or a hub name, columns mapped as the recipe says."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sidestep.errors import UsageError
from sidestep.tasks.calls import told
from sidestep.tasks.rows import example_of_row, fault, lacks
from sidestep.tasks.split import Split, split_rows
from sidestep.types import Example

DEFAULT_SPLIT = "train"

# Files that a folder may hold instead of what save_to_disk writes, and the loaders that read them.
LOADERS = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "csv", "arrow": "arrow"}

# What save_to_disk leaves: of one data set, of several splits.
ONE, SEVERAL = "state.json", "dataset_dict.json"

A_FOLDER = "give a folder: on a machine with network, load_dataset(name).save_to_disk(folder)"


def load_dataset_split(
    path: str | None,
    eval_path: str | None,
    eval_size: int | None,
    *,
    splits: tuple[str | None, str | None],
    subset: str | None,
    columns: Mapping[str, str] | None,
    needs_answer: bool,
) -> Split:
    """Rows of `task.path`. Held out is `eval_path`, or the second of `splits`, or a random choice.

    Raises UsageError for a path that is not there, a hub name that cannot be reached, a split or a
    column that is missing (with the nearest one), and for faulty rows by their numbers.
    """
    if path is None:
        raise UsageError("task.path is not set: give a folder or hub name of a data set")
    split, eval_split = splits[0] or DEFAULT_SPLIT, splits[1]
    form = columns or {}
    rows = _rows("task.path", path, split, subset, form, needs_answer)
    if eval_path is None and eval_split is None:
        return split_rows(rows, eval_size, f"{path}[{split}]")
    if eval_path is None and eval_split == split:
        raise UsageError(
            f"task.eval_split {eval_split!r}: the split that is trained on; leave it out, and "
            "task.eval_size rows are held out"
        )
    key = "task.path" if eval_path is None else "task.eval_path"
    held_out = _rows(key, eval_path or path, eval_split or split, subset, form, needs_answer)
    return Split(rows, held_out)


def _rows(
    key: str,
    path: str,
    split: str,
    subset: str | None,
    columns: Mapping[str, str],
    needs_answer: bool,
) -> tuple[Example, ...]:
    data = _load(key, path, split, subset)
    for name, column in columns.items():
        if column not in data.column_names:
            near = difflib.get_close_matches(column, data.column_names, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "name one of them"
            raise UsageError(
                f"task.columns.{name} = {column!r}: {path}[{split}] has no such column (it has "
                f"{', '.join(data.column_names)}); {fix}"
            )
    mapped = {column: name for name, column in columns.items()}
    rows = tuple(
        _example((key, f"{path}[{split}] row {number}"), row, mapped, needs_answer)
        for number, row in enumerate(data)
    )
    if not rows:
        raise UsageError(f"{key} {path!r}: the split {split!r} has no rows; name another one")
    return rows


def _example(
    where: tuple[str, str], row: Mapping[str, Any], mapped: Mapping[str, str], needs_answer: bool
) -> Example:
    # A column that the recipe takes for another one's name gives way to it.
    taken = set(mapped.values())
    named = {
        mapped.get(column, column): value
        for column, value in row.items()
        if column in mapped or column not in taken
    }
    if needs_answer and "answer" not in named:
        raise lacks(where, named, ("answer",), fix="name its column in task.columns.answer")
    if not {"prompt", "messages"} & set(named):
        raise lacks(where, named, ("prompt", "messages"), fix="name it in task.columns.prompt")
    if needs_answer and isinstance(named["answer"], float):
        raise fault(
            where,
            f"`answer` is the number {named['answer']}",
            "store it as text, or score it by task.function",
        )
    return example_of_row(where, named, needs_answer=needs_answer)


def _load(key: str, path: str, split: str, subset: str | None) -> Any:
    """A `datasets.Dataset`."""
    try:
        import datasets
    except ImportError as error:
        raise UsageError("datasets is needed here: pip install 'sidestep[datasets]'") from error
    folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            return _load_folder(datasets, key, folder, split)
        if folder.exists():
            raise UsageError(f"{key} {path!r}: is a file; give its folder, or task.kind = 'jsonl'")
        return _load_hub(datasets, key, path, split, subset)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, PermissionError) or folder.is_dir():
            raise UsageError(f"{key} {path!r}: cannot be read ({told(error)}); mend it") from error
        raise UsageError(
            f"{key} {path!r}: no such folder, and the Hugging Face hub did not give it "
            f"({told(error)}); {A_FOLDER}"
        ) from error


def _load_folder(datasets: Any, key: str, folder: Path, split: str) -> Any:
    if (folder / SEVERAL).is_file() or (folder / ONE).is_file():
        found = datasets.load_from_disk(str(folder))
        return _chosen(key, folder, found, split) if (folder / SEVERAL).is_file() else found
    for ending, loader in LOADERS.items():
        files = sorted(folder.rglob(f"*.{ending}"))
        if files:
            names = _by_split(files, folder)
            if split not in names:
                raise _no_split(key, str(folder), split, names)
            chosen = [str(file) for file in names[split]]
            # keep_in_memory and no cache: a file that changed is read again
            return datasets.load_dataset(loader, data_files=chosen, split="train")
    raise UsageError(
        f"{key} {str(folder)!r}: the folder holds no data set; give one written by save_to_disk, "
        f"or with files of {', '.join(sorted(LOADERS))}"
    )


def _by_split(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Files by the split in their names, `train-00000-of-00001.parquet`, as on the hub.

    Files whose names tell nothing are all of the default split.
    """
    known = ("train", "test", "validation")
    found: dict[str, list[Path]] = {}
    for file in files:
        words = file.relative_to(folder).as_posix().lower().replace("/", "-").replace("_", "-")
        parts = words.replace(".", "-").split("-")
        split = next((name for name in known if name in parts), DEFAULT_SPLIT)
        found.setdefault(split, []).append(file)
    return found


def _load_hub(datasets: Any, key: str, path: str, split: str, subset: str | None) -> Any:
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UsageError(f"{key} {path!r}: no such folder; {A_FOLDER}")
    found = datasets.load_dataset(path, subset)
    return _chosen(key, path, found, split)


def _chosen(key: str, where: Path | str, found: Any, split: str) -> Any:
    if split not in found:
        raise _no_split(key, str(where), split, found)
    return found[split]


def _no_split(key: str, where: str, split: str, offered: Any) -> UsageError:
    near = difflib.get_close_matches(split, list(offered), n=1)
    fix = f"did you mean {near[0]!r}?" if near else "set task.split to one of them"
    return UsageError(
        f"{key} {where!r}: has no split {split!r} (it has {', '.join(offered)}); {fix}"
    )
