"""The greatest elements of rows, and where they are."""

import math
import numbers

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import spans

__all__ = ["topk", "topk_reference"]

EIGHT = 8

TAKEN = -math.nan
"""Less than every other element."""


@nki.jit
def topk(x, k=EIGHT):
    """The ``k`` greatest elements of every row in descending order, and their indices.

    Of equal elements the first ones count, in their order. NaN comes before all numbers, +0 before
    -0.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``
        Floating-point, or integers of at most 24 bits; at most 16384 columns, of which SBUF must
        hold x's and their float32.
    k : :class:`int`
        At most as many as columns.

    Returns
    -------
    values : HBM tensor ``[rows, k]`` like x
    indices : HBM tensor ``[rows, k]`` uint32
    """
    if len(x.shape) != 2:
        raise nki.KernelError(f"topk: x {x} must have two axes, rows and columns")
    rows, columns = x.shape
    if not isinstance(k, numbers.Integral) or not 1 <= k <= columns:
        raise nki.KernelError(
            f"topk: k = {k!r} must be an integer from 1 to {columns}, the number of columns"
        )
    values = nl.ndarray((rows, k), x.dtype, buffer=nl.shared_hbm)
    indices = nl.ndarray((rows, k), nl.uint32, buffer=nl.shared_hbm)
    for r0, r1 in spans(rows, nl.tile_size.pmax):
        # Every NaN becomes the positive one: a negative one marks what has been taken.
        left = nl.ndarray((r1 - r0, max(columns, EIGHT)), nl.float32, buffer=nl.sbuf)
        if columns < EIGHT:
            nisa.memset(left, TAKEN)
        nisa.tensor_scalar(left[:, :columns], nl.load(x[r0:r1]), nl.multiply, 1.0)
        for k0, k1 in spans(k, EIGHT):
            eight, where = (
                nl.ndarray((r1 - r0, EIGHT), dtype, buffer=nl.sbuf)
                for dtype in (x.dtype, nl.uint32)
            )
            nisa.max8(eight, left)
            nisa.nc_find_index8(where, left, eight)
            nl.store(values[r0:r1, k0:k1], eight[:, : k1 - k0])
            nl.store(indices[r0:r1, k0:k1], where[:, : k1 - k0])
            if k1 < k:
                nisa.nc_match_replace8(left, left, eight, TAKEN)
    return values, indices


def topk_reference(x, k=EIGHT):
    """Values in float64 and indices; of equal ones the first come first."""
    x = np.asarray(x, np.float64)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(x, order, axis=1), order
