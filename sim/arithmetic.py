"""Binary32 operations of the engines in numpy, exact to the bit."""

import numpy as np

from ..rtl.arch.formats import CANONICAL_NAN

__all__ = ["canonical_bits", "fma32"]

_ONE = np.int64(1)


def canonical_bits(values):
    """Bits (uint32) of binary32 values, every NaN as the canonical one."""
    values = np.asarray(values, np.float32)
    return np.where(np.isnan(values), np.uint32(CANONICAL_NAN), values.view(np.uint32))


def fma32(a, b, c):
    """``RNE(a * b + c)`` of binary32 values, rounded once; every NaN is the canonical one.

    The product of two binary32 numbers is exact in binary64. Its sum with ``c`` is rounded to odd:
    TwoSum gives the error of the sum, and where that is not 0 and the last bit is even, the exact
    sum lies between this number and its neighbour, whose last bit is odd. Rounding that once more,
    to at most 24 of its 53 bits, is as good as rounding the exact sum.

    Parameters
    ----------
    a, b, c : float32 arrays

    Returns
    -------
    float32 array
    """
    with np.errstate(all="ignore"):
        a, b, c = (np.asarray(v, np.float32).astype(np.float64) for v in (a, b, c))
        product = a * b
        total = np.asarray(product + c)
        # TwoSum
        part = total - product
        error = (product - (total - part)) + (c - part)
        bits = total.view(np.int64)
        inexact = np.isfinite(error) & (error != 0) & (bits & _ONE == 0)
        away = (error > 0) == (total > 0)
        bits = bits + np.where(inexact, np.where(away, _ONE, -_ONE), 0)
        result = np.asarray(bits).view(np.float64).astype(np.float32)
    return canonical_bits(result).view(np.float32)
