"""Own reward functions in TRL's form: f(prompts, completions, **columns), sync or async."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from sidestep.config.task_rules import reward_name
from sidestep.errors import RewardError, UsageError
from sidestep.tasks.calls import Raised, TimedOut, call
from sidestep.tasks.rewards import Scores
from sidestep.tasks.rows import shorten
from sidestep.types import Example

RESERVED = ("prompts", "completions")

# TRL leaves a column of this name out, because it is not the completion that is scored.
NOT_PASSED = ("completion",)

TRL_ONLY = ("completion_ids", "completions_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that TRL's trainer passes too, and this task does not."""

MAX_TIMEOUTS = 10
"""Calls in a row over the time limit after which the run ends: it would train on nothing."""


class FunctionReward:
    """A function that is called with keyword arguments only:

    prompts: list of texts, or of message lists for chat rows.
    completions: list of texts, or `[{"role": "assistant", "content": text}]` for chat rows.
    one list per column of the rows, None where a row lacks it.

    It returns one finite number per completion. An `async def` function runs in an event loop of
    its own. Calls never overlap, whatever the threads: a reward function need not be thread-safe.
    A call that is over `limit_s` seconds scores 0.0 for all its completions, each with the problem
    "NAME: timed out"; a plain function that hangs then runs on beside later calls, because nothing
    can stop it.

    key: of the config, and path: its value, for messages. rows: all of the task, whose columns are
    passed. Raises UsageError for a function that cannot be called with the columns there are.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Sequence[Example],
        limit_s: float | None = None,
        *,
        key: str,
        path: str,
    ) -> None:
        self.name = reward_name(path)
        self._function, self._limit_s = function, limit_s
        self._key, self._path = key, path
        names = dict.fromkeys(name for row in rows for name in row.columns)
        self._columns = tuple(name for name in names if name not in NOT_PASSED)
        self._check_columns(rows)
        _check_signature(key, path, function, self._columns)
        self._lock = threading.Lock()
        self._num_timeouts = 0  # in a row

    def score(self, examples: Sequence[Example], completions: Sequence[str]) -> Scores:
        """Raises RewardError if the function raises, or does not return one finite number each."""
        if not examples:
            return Scores((), ())
        arguments: dict[str, Any] = {
            "prompts": [_own_copy(example.prompt) for example in examples],
            "completions": [
                _as_asked(example, completion)
                for example, completion in zip(examples, completions, strict=True)
            ],
        }
        for name in self._columns:
            arguments[name] = [_own_copy(example.columns.get(name)) for example in examples]
        with self._lock:
            try:
                returned = call(self._function, arguments, self._limit_s)
            except TimedOut:
                self._count_timeout(examples[0])
                return Scores((0.0,) * len(examples), (f"{self.name}: timed out",) * len(examples))
            except Raised as error:  # whatever it raised: name the prompt, keep the cause
                raise self._fault(
                    f"raised {error}", examples[0], of_many="in a call that began with"
                ) from error.cause
            self._num_timeouts = 0
        return Scores(tuple(self._checked(returned, examples)), ("",) * len(examples))

    def close(self) -> None:
        pass

    def _count_timeout(self, first: Example) -> None:
        self._num_timeouts += 1
        if self._num_timeouts == MAX_TIMEOUTS:
            raise self._fault(
                f"took longer than task.reward_timeout_s = {self._limit_s:g} s in {MAX_TIMEOUTS} "
                f"calls in a row (raise it, or make the function faster)",
                first,
                of_many="the last in a call that began with",
            )

    def _checked(self, returned: Any, examples: Sequence[Example]) -> list[float]:
        wanted = f"a list of {len(examples)} numbers"
        if isinstance(returned, str | bytes | dict) or not hasattr(returned, "__len__"):
            told = f"returned {shorten(str(returned))} ({type(returned).__name__}), not {wanted}"
            raise self._fault(told, examples[0], of_many="in a call that began with")
        if len(returned) != len(examples):
            told = f"returned {len(returned)} rewards, not {len(examples)}"
            raise self._fault(told, examples[0], of_many="in a call that began with")
        return [
            self._finite(value, example) for value, example in zip(returned, examples, strict=True)
        ]

    def _finite(self, value: Any, example: Example) -> float:
        if isinstance(value, str | bytes):
            raise self._fault(f"returned the text {shorten(str(value))}, not a number", example)
        try:
            reward = float(value)
        except OverflowError as error:  # an int beyond float64
            raise self._fault("returned a number too large for a float", example) from error
        except (TypeError, ValueError) as error:
            told = f"returned {shorten(str(value))} ({type(value).__name__}), not a number"
            raise self._fault(told, example) from error
        if not math.isfinite(reward):
            raise self._fault(f"returned {reward}, not a finite number", example)
        return reward

    def _fault(self, problem: str, example: Example, of_many: str = "for") -> RewardError:
        prompt = (
            example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
        )
        return RewardError(
            f"{self._key} {self._path!r} {problem}, {of_many} the prompt at {example.source}: "
            f"{shorten(prompt)}"
        )

    def _check_columns(self, rows: Sequence[Example]) -> None:
        for name in RESERVED:
            if name in self._columns:
                source = next(row.source for row in rows if name in row.columns)
                raise UsageError(
                    f"task.path: {source}: the column `{name}` has the name of an argument that "
                    "every reward function gets; rename it"
                )


def _check_signature(
    key: str, path: str, function: Callable[..., Any], columns: Sequence[str]
) -> None:
    """Raises UsageError if `function` could not be called with these columns: better now than
    after the first batch has been sampled."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # builtins and the like tell nothing about their arguments
    try:
        signature.bind(**dict.fromkeys((*RESERVED, *columns)))
    except TypeError as error:
        passed = ", ".join((*RESERVED, *columns))
        fix = "take what you need and **kwargs for the rest"
        missing = [name for name in TRL_ONLY if _is_required(signature, name)]
        if missing:
            fix = f"{missing[0]} is passed by TRL only, give it a default"
        raise UsageError(
            f"{key} {path!r}: cannot be called with ({passed}): {error}; {fix}"
        ) from error


def _is_required(signature: inspect.Signature, name: str) -> bool:
    parameter = signature.parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def _as_asked(example: Example, completion: str) -> str | list[dict[str, str]]:
    """Text for a text prompt, a message for a chat prompt."""
    if isinstance(example.prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _own_copy(value: Any) -> Any:
    """A copy that the function may change: the row itself is asked again in the next epoch."""
    return copy.deepcopy(value)
