"""How high the cosine of two fresh batches would be by chance: what is expected without staleness.

Two independent batches with the same mean gradient have E[c] = SNR / (1 + SNR), SNR being the
squared length of the mean over that of the noise. One batch is enough to read it: with h the cosine
between the gradients of its two halves (of groups), a half has half the SNR, so that

    expected = 2 h / (1 + h),        excess = c - expected
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidestep.control.geometry import Pair, Products, Ranks, products
from sidestep.control.parameters import dense, gradients, trained_parameters
from sidestep.control.sharding import Holdings, holdings

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ExpectedCosine:
    """halves: the cosine h of two half batches. expected: that of two whole ones, 2 h / (1 + h).

    Noise can make h negative; `expected` stays a cosine, at least -1.
    """

    halves: float
    expected: float


def expected_cosine(
    first: Mapping[str, Tensor | None], second: Mapping[str, Tensor | None]
) -> ExpectedCosine | None:
    """From the gradients of two half batches, by name; None counts as zero.

    None if one of them is zero or not finite: then nothing is expected. For gradients in `p.grad`,
    and for several ranks, see `Halves`. Raises ValueError if the names differ.
    """
    if first.keys() != second.keys():
        odd = sorted(first.keys() ^ second.keys())
        raise ValueError(f"the halves differ in {odd[0]!r}: give both the same parameters")
    return _from_products(products([Pair(first[name], second[name]) for name in first]))


def excess(cosine: float | None, expected: float | None) -> float | None:
    """cosine - expected; None if one of them is."""
    return None if cosine is None or expected is None else cosine - expected


class Halves:
    """The expected cosine of a step whose gradient is accumulated in two halves.

        halves = Halves(model.named_parameters())
        loss_of_the_first_half.backward()
        halves.split()
        loss_of_the_second_half.backward()
        handle.note(expected=halves.expected())

    The halves share the loss's denominator, as in the step itself; each holds whole groups, about
    as many tokens as the other. Gradients must be reduced over ranks at both calls. Costs one copy
    of the gradient between them.

    local_parameters, process_group: as in `GradientControl.apply`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        local_parameters: Iterable[str] = (),
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._ranks = Ranks(process_group)
        self._parameters = trained_parameters(named_parameters, allow_none=not self._ranks.alone)
        self._local_parameters = (
            local_parameters if isinstance(local_parameters, str) else tuple(local_parameters)
        )
        self._first: dict[str, Tensor] | None = None

    @torch.no_grad()
    def split(self) -> None:
        """The gradient so far is that of the first half."""
        found = gradients(self._parameters)
        self._first = {name: dense(grad).clone() for name, grad in found.items()}

    @torch.no_grad()
    def expected(self) -> float | None:
        """The cosine that two fresh batches like this one would show; None if there is none.

        Raises ValueError if `split` was not called since the last time.
        """
        if self._first is None:
            raise ValueError("expected(): call split() between the two halves first")
        held = holdings(self._parameters, self._local_parameters)
        both = gradients(self._parameters)
        found = self._ranks.measure([_Parts(self._first, both, held)], held, same="halves")
        self._first = None
        halves = _from_products(found.products[0])
        return None if halves is None else halves.expected


class _Parts:
    """(second half, first half) of each parameter, made one at a time."""

    def __init__(
        self, first: Mapping[str, Tensor], both: Mapping[str, Tensor], held: Holdings
    ) -> None:
        self._first, self._both, self._held = first, both, held

    def __iter__(self) -> Iterator[Pair]:
        for name, grad in self._both.items():
            wide = dense(grad).to(torch.promote_types(grad.dtype, torch.float32))
            first = self._first.get(name)
            yield Pair(wide if first is None else wide - first, first, True, self._held[name])


def _from_products(found: Products) -> ExpectedCosine | None:
    halves = found.cosine if found.finite else None
    if halves is None:
        return None
    return ExpectedCosine(halves, 2.0 * halves / (1.0 + halves) if halves > -1 / 3 else -1.0)
