"""Inner products of this step's gradient g and the reference p, each over all parameters.

The only place where ranks talk. A product over all ranks is the sum of the ranks' products, every
element counted once, so that

    cosine = gp / sqrt(gg pp)

is the same line, and the same number, on one rank and on many.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sidestep.control.agreement import (
    FIRST_CAPACITY,
    Agreement,
    Report,
    agree,
    make_report,
    outside,
    suspicions,
    why_not,
)
from sidestep.control.sharding import Held, Holdings
from sidestep.control.sums import (
    COLUMNS,
    UNMEASURED,
    Pair,
    Products,
    products_from,
    row_of_sums,
    total,
)

__all__ = [
    "UNMEASURED",
    "Measured",
    "Pair",
    "Products",
    "Ranks",
    "products",
    "products_of",
    "total",
    "unmeasurable",
]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ROUNDINGS = tuple(torch.finfo(dtype).eps for dtype in _DTYPES)
# How many numbers of its own a measurement can take with it.
_MAX_SUMS = 8

_log = logging.getLogger(__name__)


def products(pairs: Iterable[Pair]) -> Products:
    """The inner products of two vectors that are given parameter by parameter, on this rank alone.

    Any number of elements, any split, values from 1e-25 to 1e20 and far beyond, float16 sums past
    65504. Reads every tensor once. `pairs` may be iterated twice, so no generator.
    """
    return products_of([pairs])[0]


def products_of(lists: Sequence[Iterable[Pair]]) -> list[Products]:
    """The inner products of several lists of pairs, in order, on this rank alone."""
    return [products_from(row_of_sums(pairs, _every).tolist()) for pairs in lists]


def unmeasurable(grad: Tensor) -> str | None:
    """Why a gradient of this rank cannot be measured, with the fix; None if it can."""
    if grad.layout not in (torch.strided, torch.sparse_coo):
        return f"has layout {grad.layout}: it must be dense or sparse COO"
    if grad.dtype not in _DTYPES:
        return f"has dtype {grad.dtype}: it must be float16, bfloat16, float32 or float64"
    return None


@dataclass(frozen=True, slots=True)
class Measured:
    """What all ranks know after `Ranks.measure`: the same on all of them, to the bit.

    products: one per list.
    sums: the given numbers, summed over ranks.
    num_ranks: to make means of them.
    rounding: the largest one of the ranks.
    """

    products: list[Products]
    sums: tuple[float, ...]
    num_ranks: int
    rounding: float


class Ranks:
    """The ranks that measure and decide together, and what they have agreed on.

    process_group: None: all ranks of torch.distributed if it is initialised, else this process.

    Every rank of the group calls `measure` or `fail` once for one measurement, with or without
    parameters or gradients of its own. Each is one all-reduce of a few float64 sums, on a kind of
    device the group takes; nothing else moves. Where parameters are new or something is wrong on
    any rank, the ranks exchange reports and go on, or raise the same ValueError, together.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._given = process_group
        self._group: dist.ProcessGroup | None = None
        self._agreed: Agreement | None = None
        self._said: set[str] = set()

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        return Ranks(self._given)  # groups cannot be copied, and the copy is to talk to the same

    def on(self, process_group: dist.ProcessGroup | None) -> Ranks:
        """These ranks if they are on that group, else new ones."""
        return self if process_group is self._given else Ranks(process_group)

    def measure(
        self,
        lists: Sequence[Iterable[Pair]],
        holdings: Holdings,
        *,
        same: str = "",
        sums: Sequence[float] = (),
        rounding: float = 0.0,
    ) -> Measured:
        """The inner products of each list, over all ranks.

        Lists are independent: scopes that are decided apart, or another pair of vectors. Their
        number and meaning must be the same on all ranks. They may be iterated twice, so no
        generators; their pairs are taken one by one and not kept.

        same: has to be the same on all ranks (settings, step); they stop if it is not.
        sums: up to 8 more numbers to sum over ranks, equally many on all of them.
        rounding: relative rounding unit of the coarsest dtype of g on this rank, 0 without g.

        Raises ValueError, on every rank alike: more than 8 sums; what iterating raised on any of
        them; a mesh that reaches beyond the group; copies of different shapes; a difference in
        `same`.
        """
        if len(sums) > _MAX_SUMS:
            raise ValueError(f"sums: {len(sums)} numbers, there is place for {_MAX_SUMS}")
        group = self._talks_to()
        known = self._agreed if self._agreed and self._agreed.covers(holdings, len(lists)) else None
        problem = None
        if known is None and self._group is not None:
            problem = outside(holdings, dist.get_process_group_ranks(self._group))
        error = None if problem is None else ValueError(problem)
        if group is None:
            if error is not None:
                raise error
            return Measured(products_of(lists), tuple(sums), 1, rounding)
        message = _Message(group, lists, holdings, same, sums, rounding, error)
        reply = message.reduce(known, self._capacity)
        if reply.settled:
            return reply.measured
        reports = message.exchange_reports()
        self._agreed = agree(reports, dist.get_rank(), holdings, self._capacity)
        self._tell(suspicions(reports))
        reply = message.reduce(self._agreed, self._capacity)
        if reply.has_problem:  # met on the way: with a known agreement it would have been before
            message.exchange_reports()
        return reply.measured

    def fail(self, error: ValueError) -> NoReturn:
        """Take part in a measurement with an error: every rank raises it."""
        group = self._talks_to()
        if group is not None:
            message = _Message(group, (), Holdings({}, ()), "", (), 0.0, error)
            message.reduce(None, self._capacity)
            message.exchange_reports()
        raise error

    @property
    def alone(self) -> bool:
        """Whether this process decides by itself."""
        return self._talks_to() is None

    @property
    def _capacity(self) -> int:
        return FIRST_CAPACITY if self._agreed is None else self._agreed.capacity

    def _talks_to(self) -> dist.ProcessGroup | None:
        """The group; None if this process is alone."""
        group = self._given
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not self._group:
            self._group, self._agreed = group, None
        if group is None:
            return None
        size = dist.get_world_size(group)
        if size < 1:
            raise ValueError("process_group: this rank is not a member of it")
        return group if size > 1 else None

    def _tell(self, notices: Sequence[str]) -> None:
        """Say once, on the first rank, what looks like a mistake."""
        for notice in notices:
            if notice not in self._said and dist.get_rank(self._group) == 0:
                _log.warning("%s", notice)
            self._said.add(notice)


@dataclass(frozen=True, slots=True)
class _Reply:
    """What an all-reduce brought. settled: no rank has news or a problem."""

    measured: Measured
    settled: bool
    has_problem: bool


class _Message:
    """What one rank has to say in one measurement, to be sent once or, with reports, twice."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        lists: Sequence[Iterable[Pair]],
        holdings: Holdings,
        same: str,
        sums: Sequence[float],
        rounding: float,
        error: ValueError | None,
    ) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._lists = lists
        self._holdings = holdings
        self._same = same
        self._sums = sums
        self._rounding = rounding
        self._error = error

    def reduce(self, agreed: Agreement | None, capacity: int) -> _Reply:
        """The all-reduce. A rank that does not know the agreement yet has no sums to give.

        capacity: rows there is place for. Agreed on before, so that a rank with an error and
        nothing to sum sends as much as the others.
        """
        rows = self._rows(agreed)
        unused = torch.zeros((capacity - len(rows)) * COLUMNS, dtype=torch.float64)
        numbers = torch.tensor(self._numbers(agreed), dtype=torch.float64)
        device = exchange_device(dist.get_backend_config(self._group))
        message = torch.cat([part.to(device) for part in (*rows, unused, numbers)])
        dist.all_reduce(message, group=self._group)
        return self._read(message.tolist(), capacity)

    def _numbers(self, agreed: Agreement | None) -> list[float]:
        """What goes with the rows: sums, roundings; whether this rank is new to the others, has an
        error, lacks gradients; and a code of what has to be the same, and its square.
        """
        code = zlib.crc32(f"{len(self._lists)} {self._same}".encode()) % 2**20
        return [
            *self._sums,
            *(0.0 for _ in range(_MAX_SUMS - len(self._sums))),
            *(float(self._rounding >= unit) for unit in _ROUNDINGS),
            float(agreed is None),
            float(self._error is not None),
            0.0 if agreed is None else agreed.presence(self._holdings),
            float(code),
            float(code * code),
        ]

    def _rows(self, agreed: Agreement | None) -> list[Tensor]:
        if agreed is None or self._error is not None:
            return []
        try:
            return [row_of_sums(pairs, agreed.counts) for pairs in self._lists]
        except ValueError as error:
            self._error = error
            return []

    def _read(self, numbers: Sequence[float], capacity: int) -> _Reply:
        num_rows = min(len(self._lists), capacity)
        rows = [numbers[i * COLUMNS : (i + 1) * COLUMNS] for i in range(num_rows)]
        sums, tail = _cut(numbers[capacity * COLUMNS :], _MAX_SUMS)
        at_least, tail = _cut(tail, len(_ROUNDINGS))
        news, problems, presence, code, squared_code = tail
        # By Cauchy-Schwarz equal only if all codes are; integers, so exact.
        same = int(code) ** 2 == self._size * int(squared_code)
        units = [unit for unit, count in zip(_ROUNDINGS, at_least, strict=True) if count > 0]
        return _Reply(
            Measured(
                [products_from(row) for row in rows],
                tuple(sums[: len(self._sums)]),
                self._size,
                max(units, default=0.0),
            ),
            settled=news == 0 and problems == 0 and presence == 0 and same,
            has_problem=problems > 0,
        )

    def exchange_reports(self) -> list[Report]:
        """The reports of all ranks, in order. Raises ValueError if they cannot go on together."""
        problem = "" if self._error is None else str(self._error)
        own = make_report(dist.get_rank(), self._holdings, len(self._lists), self._same, problem)
        reports = [Report.from_json(one) for one in _gather(own.as_json(), self._group)]
        reason = why_not(reports)
        if reason is not None:
            raise ValueError(reason) from self._error
        return reports


def exchange_device(backends: str) -> torch.device:
    """Where the ranks of a group exchange numbers, by its backends ("cpu:gloo,cuda:nccl").

    The same on all ranks, wherever their gradients are: a rank may have none, or have them
    offloaded to where the group takes nothing. The sums alone hop there.
    """
    kinds = [backend.split(":")[0] for backend in backends.split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _gather(message: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """The messages of all ranks. As JSON: torch's own exchange of objects unpickles them."""
    device = exchange_device(dist.get_backend_config(group))
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    length = torch.tensor([text.numel()], dtype=torch.int64, device=device)
    dist.all_reduce(length, op=dist.ReduceOp.MAX, group=group)
    padded = torch.full((int(length),), ord(" "), dtype=torch.uint8, device=device)
    padded[: text.numel()] = text.to(device)
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(bytes(one.cpu().numpy())) for one in gathered]


def _cut(numbers: Sequence[float], num: int) -> tuple[Sequence[float], Sequence[float]]:
    return numbers[:num], numbers[num:]


def _every(held: Held) -> bool:
    return True
