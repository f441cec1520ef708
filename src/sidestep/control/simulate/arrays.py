"""What the parts of the simulation share. Shapes: _N cells that still run, _D dimensions, _T steps,
_H slots of the history.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def dots(a_ND: FloatArray, b_ND: FloatArray) -> FloatArray:
    """Inner product of each row of a with the same row of b, shape N.

    numpy hands every one of these 1 x D by D x 1 products to the routine that computes `a @ b` of
    two vectors, so a cell gets the bits it would get alone, whatever runs beside it.
    """
    products_N: FloatArray = np.matmul(a_ND[:, None, :], b_ND[:, :, None])[:, 0, 0]
    return products_N


class Shrinking:
    """Base of dataclasses whose array fields all have one row for each running cell."""

    def keep(self, kept_N: BoolArray) -> None:
        """Drop the rows of cells that have diverged."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                setattr(self, field.name, value[kept_N])
