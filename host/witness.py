"""Compare a matrix product with the binary64 product of the same operands, infinities included."""

from dataclasses import dataclass

import numpy as np

from ..rtl.arch.formats import FP32

__all__ = ["Comparison", "compare"]

LEAST_HIGH_HALF = 2.0**-137
"""A binary32 number below it has a high half of zero, which infinity turns into NaN."""


@dataclass(frozen=True)
class Comparison:
    """How a product differs from the binary64 product.

    Attributes
    ----------
    max_abs_error : :class:`float`
        Where both are finite.
    mismatches : :class:`int`
        Elements that are NaN, infinite or finite where they must be something else of these, or
        further from the binary64 product than rounding can bring them.
    first : list of :class:`int` or ``None``
        Index of the first such element in the product, empty for a scalar.
    """

    max_abs_error: float
    mismatches: int
    first: list | None = None


def compare(a, b, fmts, result, out_fmt):
    """Compare ``result`` with ``a @ b``.

    No product of two operands and no sum of such products overflows in binary64, so there an
    element is NaN or infinite for no reason but NaN and infinities among the operands. The core
    must agree, and finite elements must be as near as the roundings of their sums and of the result
    allow, except that

    - it sums in binary32, rounds to the format of the result, and may overflow wherever the
      magnitudes of the finite terms add up to more than one of both holds: the result may then be
      infinite, or NaN where infinities of both signs meet or the format has no infinity;
    - a format without infinities has NaN instead; an integer 0 for NaN and its largest or smallest
      number for infinity;
    - with binary32 operands infinity times a number below 2**-137 may be NaN.

    Parameters
    ----------
    a, b : array
        Codes of the operands, of any shape that :func:`numpy.matmul` takes.
    fmts : pair of formats
        Of ``a`` and ``b``.
    result : array
        Codes.
    out_fmt : format
        Of the result.

    Returns
    -------
    :class:`Comparison`
    """
    x, y = fmts[0].decode(a), fmts[1].decode(b)
    found = np.asarray(out_fmt.decode(result))
    with np.errstate(all="ignore"):
        expected = np.asarray(np.matmul(x, y))
        difference = np.abs(expected - found)
        finite = np.isfinite(difference)
        worst = float(difference[finite].max()) if finite.any() else 0.0
        if out_fmt.is_float:
            agree = np.isfinite(expected) & np.isfinite(found) | (expected == found)
            agree |= np.isnan(expected) & np.isnan(found)
        else:
            agree = np.isfinite(expected) | (found == out_fmt.decode(out_fmt.encode(expected)))
        sums = np.asarray(np.matmul(*(np.where(np.isfinite(v), np.abs(v), 0.0) for v in (x, y))))
        if not agree.all():
            agree |= _excused(x, y, fmts, sums, expected, found, out_fmt)
        both = np.isfinite(expected) & np.isfinite(found)
        agree &= ~both | _near(x.shape[-1], fmts, sums, expected, found, out_fmt)
    if agree.all():
        return Comparison(worst, 0)
    first = [int(i) for i in np.unravel_index(np.argmin(agree), agree.shape)]
    return Comparison(worst, int(np.count_nonzero(~agree)), first)


def _near(k, fmts, sums, expected, found, out_fmt):
    """Where rounding explains how far finite elements are from those of the binary64 product.

    A term of a sum is rounded at most once with each product and once with each tile of K, of
    which there are at most K, in each pass; ``sums`` are of the magnitudes of the terms.
    """
    passes = 4 if fmts[0] is fmts[1] is FP32 else 1
    roundings = (1 + passes) * k + 1  # one for those of binary64
    spread = np.expm1(roundings * 2.0**-24) * sums + roundings * FP32.min_subnormal
    if out_fmt.is_float:
        last = 2.0 ** -(out_fmt.man + 1) * (np.abs(expected) + spread) + out_fmt.min_subnormal
    else:
        last, expected = 0.5, np.clip(expected, out_fmt.min, out_fmt.max)
    overflows = sums + spread >= FP32.max
    return (np.abs(expected - found) <= spread + last) | overflows


def _excused(x, y, fmts, sums, expected, found, out_fmt):
    """Where a disagreement is one of those that :func:`compare` lists."""
    sums = sums * (1 + (x.shape[-1] + 4) * 2.0**-23)  # what rounding may add to them
    if out_fmt.is_float:
        became_nan = np.isnan(found)
        overflows = sums * (1 + 2.0 ** -(out_fmt.man + 1)) >= min(FP32.max, out_fmt.max)
        excused = overflows & np.isfinite(expected) & ~np.isfinite(found)
        excused |= (overflows | out_fmt.finite) & np.isinf(expected) & became_nan
    else:
        became_nan = found == 0
        excused = (sums >= FP32.max) & np.isinf(expected)
    if fmts[0] is FP32:
        x_infinite, y_infinite = (np.isinf(v).astype(np.float64) for v in (x, y))
        x_small, y_small = ((np.abs(v) < LEAST_HIGH_HALF).astype(np.float64) for v in (x, y))
        meet = np.matmul(x_infinite, y_small) + np.matmul(x_small, y_infinite)
        excused |= (meet > 0) & became_nan
    return excused
