"""reasoning-gym: questions made on the fly, scored by the library itself.

https://github.com/open-thought/reasoning-gym, Apache-2.0. One data set by name, or several mixed
with weights; levels of difficulty are settings of the data set (`task.options`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from sidestep.errors import UsageError
from sidestep.tasks.calls import Raised, TimedOut, call, told
from sidestep.tasks.rewards import AnswerFinder, Scores
from sidestep.tasks.split import DEFAULT_EVAL_SIZE, Split
from sidestep.types import Example

DEFAULT_TRAIN_SIZE = 2000

# Question number i of a data set comes from the random seed (seed of the data set) + i, so two
# data sets with neighbouring seeds are the same questions but one. Each split gets a million of
# seeds for itself: the first is for rows held out, task.seed counts the others.
SEEDS = 1_000_000

ENTRY_FIELDS = ("question", "answer", "metadata")


def load_gym() -> Any:
    """The library. Raises UsageError, with what to install, if it is not there."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise UsageError(
            "reasoning-gym is needed here: pip install 'sidestep[reasoning]'"
        ) from error
    return reasoning_gym


class Gym:
    """The data sets of one task.

    names: to weights. options: to settings. key: of the config, for messages. Raises UsageError for
    a name that is not offered (with the nearest), or settings that the data set refuses.
    """

    def __init__(
        self,
        names: Mapping[str, float],
        options: Mapping[str, Mapping[str, Any]],
        key: str = "task.dataset",
    ) -> None:
        self._library = load_gym()
        from reasoning_gym.factory import DATASETS

        for name in names:
            if name not in DATASETS:
                raise _not_offered(key, name, DATASETS)
        for name in options:
            if name not in names:
                raise UsageError(
                    f"task.options.{name}: not one of the task's data sets "
                    f"({', '.join(names)}); leave it out"
                )
            _check_settings(name, options[name], DATASETS[name][1])
        self._names, self._options = names, options
        self._scorer = self._make(seed=0, size=1)

    def examples(self, *, split: int, size: int) -> list[Example]:
        """`size` questions; those of different `split` numbers come from different seeds."""
        if size == 0:
            return []
        data = self._make(seed=split * SEEDS, size=size)
        return [_example(data[i], split, i) for i in range(size)]

    def score(self, answer: str | None, example: Example) -> float:
        """The library's own score, from 0 to 1; None: the completion has no answer."""
        entry = {field: example.columns[field] for field in ENTRY_FIELDS}
        return float(self._scorer.score_answer(answer, entry))

    def _make(self, *, seed: int, size: int) -> Any:
        from reasoning_gym.composite import DatasetSpec

        specs = [
            DatasetSpec(name=name, weight=weight, config=dict(self._options.get(name, {})))
            for name, weight in self._names.items()
        ]
        try:
            # of one data set too: every entry then says by metadata.source_dataset who made it
            return self._library.create_dataset("composite", seed=seed, size=size, datasets=specs)
        except (AssertionError, ValueError, TypeError) as error:
            raise UsageError(
                f"task.options: reasoning-gym refuses them ({told(error)}); change them"
            ) from error


def gym_split(gym: Gym, train_size: int | None, eval_size: int | None, seed: int | None) -> Split:
    """Questions to train on and, of other seeds, those held out, which `seed` does not change.

    A question to train on that is also held out is left out and noticed: small data sets repeat
    themselves. Raises UsageError if none is left.
    """
    eval_size = DEFAULT_EVAL_SIZE if eval_size is None else eval_size
    held_out = gym.examples(split=0, size=eval_size)
    known = {example.prompt for example in held_out}
    made = gym.examples(split=1 + (seed or 0), size=train_size or DEFAULT_TRAIN_SIZE)
    train = [example for example in made if example.prompt not in known]
    if not train:
        raise UsageError(
            f"task.train_size {len(made)}: every question is also held out; lower task.eval_size "
            f"({eval_size}), or widen the data set by task.options"
        )
    num_both = len(made) - len(train)
    notice = f"{num_both} of {len(made)} questions made to train on are held out too: left out"
    return Split(tuple(train), tuple(held_out), (notice,) if num_both else ())


class GymReward:
    """The score of reasoning-gym for the answer that is found in a completion.

    Where none is found the library scores None (0, for most of its data sets). A scorer that raises
    over what a model wrote, or is over the time limit, scores 0.0 with a problem.
    """

    name = "reasoning_gym"

    def __init__(self, gym: Gym, answer_of: AnswerFinder, limit_s: float | None) -> None:
        self._gym, self._answer_of, self._limit_s = gym, answer_of, limit_s

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        pairs = [
            self._score(example, self._answer_of(completion))
            for example, completion in zip(examples, completions, strict=True)
        ]
        return Scores(tuple(value for value, _ in pairs), tuple(problem for _, problem in pairs))

    def close(self) -> None:
        pass

    def _score(self, example: Example, answer: str | None) -> tuple[float, str]:
        try:
            arguments = {"answer": answer, "example": example}
            return call(self._gym.score, arguments, self._limit_s), ""
        except TimedOut:
            return 0.0, f"{self.name}: timed out"
        # Some of its scorers parse what they are given and raise whatever the parser does: the
        # text of a model must not end a run.
        except Raised as error:
            return 0.0, f"{self.name}: its scoring raised {type(error.cause).__name__}"


def _example(entry: Mapping[str, Any], split: int, index: int) -> Example:
    name = entry["metadata"]["source_dataset"]
    columns = {field: entry[field] for field in ENTRY_FIELDS}
    which = "held out" if split == 0 else "to train on"
    return Example(entry["question"], columns, f"{name} ({which}, number {index})")


def _check_settings(name: str, settings: Any, config_class: Any) -> None:
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"task.options.{name} = {settings!r}: not a table of settings of {name}; with task.mix "
            f"write [task.options.{name}]"
        )
    fields = config_class.__dataclass_fields__
    for setting in settings:
        if setting in ("seed", "size"):
            fix = "use task.seed" if setting == "seed" else "use task.train_size"
            raise UsageError(f"task.options: {setting} is set for each split; {fix}")
        if setting not in fields:
            near = difflib.get_close_matches(setting, fields, n=1)
            offered = ", ".join(field for field in fields if field not in ("seed", "size"))
            fix = f"did you mean {near[0]!r}?" if near else f"it has {offered}"
            raise UsageError(f"task.options: {name} has no setting {setting!r}; {fix}")


def _not_offered(key: str, name: str, offered: Mapping[str, Any]) -> UsageError:
    near = difflib.get_close_matches(name, offered, n=3, cutoff=0.5)
    fix = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else ("see reasoning_gym.factory.DATASETS for the names")
    )
    return UsageError(
        f"{key} {name!r}: reasoning-gym offers {len(offered)} data sets and none of that "
        f"name; {fix}"
    )
