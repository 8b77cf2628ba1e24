"""The greatest elements of rows, and where they are."""

import numpy as np

from .. import nki
from ..nki import isa as nisa
from ..nki import language as nl
from .tiles import spans

__all__ = ["topk", "topk_reference"]

EIGHT = 8


@nki.jit
def topk(x, k=EIGHT):
    """The ``k`` greatest elements of every row in descending order, and their indices.

    Of equal elements the first ones count, in their order. +0 comes before -0, a positive NaN
    before all numbers, a negative one behind all.

    Parameters
    ----------
    x : HBM tensor ``[rows, columns]``
        Floating-point, or integers of at most 24 bits; 8 to 16384 columns.
    k : :class:`int`
        At most as many as columns.

    Returns
    -------
    values : HBM tensor ``[rows, k]`` like x
    indices : HBM tensor ``[rows, k]`` uint32
    """
    rows, columns = x.shape
    if not 1 <= k <= columns:
        raise nki.KernelError(f"topk: k = {k} must be 1 to {columns}, the number of columns")
    values = nl.ndarray((rows, k), x.dtype, buffer=nl.shared_hbm)
    indices = nl.ndarray((rows, k), nl.uint32, buffer=nl.shared_hbm)
    for r0, r1 in spans(rows, nl.tile_size.pmax):
        left = nl.load(x[r0:r1])
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
                rest = nl.ndarray(left.shape, nl.float32, buffer=nl.sbuf)
                nisa.nc_match_replace8(rest, left, eight, float("-nan"))
                left = rest
    return values, indices


def topk_reference(x, k=EIGHT):
    """Values in float64 and indices; of equal ones the first come first."""
    x = np.asarray(x, np.float64)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(x, order, axis=1), order
