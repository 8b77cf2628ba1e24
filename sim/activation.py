"""The scalar engine's functions in numpy, operation by operation as the hardware computes them.

What happens to an argument is described in :mod:`..rtl.arch.functions`.
"""

import numpy as np

from ..rtl.arch.functions import (
    ANGLE_DIRECT,
    LN2,
    PI_FACTOR,
    PLANS,
    WINDOW_BITS,
    WINDOW_FIRST,
    Outcome,
    Reduction,
    Symmetry,
    inverse_pi_window,
    load_tables,
)
from ..rtl.arch.isa import Function
from .arithmetic import fma32

__all__ = ["evaluate", "polynomial", "reduce_angle"]

_SIGN = np.uint32(1 << 31)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = 0x7F800000
_FRACTION = 0x7FFFFF
_ONE = np.uint32(0x3F800000)
_NO_ADDEND = np.uint32(1 << 31)  # -0: added to anything it changes nothing


def evaluate(function, x, alpha: float | np.uint32 = 0.0, *, table=None):
    """A function of binary32 arguments.

    Parameters
    ----------
    function : :class:`~..rtl.arch.isa.Function`
    x : float32 array, or uint32 array of codes
    alpha : float, or uint32 code
        Slope of PRELU.
    table : :class:`~..rtl.arch.functions.Table`, optional
        Instead of the function's own.

    Returns
    -------
    float32 array
        Every NaN is the canonical one.
    """
    function = Function(function)
    plan = PLANS[function]
    table = load_tables()[function] if table is None else table
    x = _codes(x)
    sign = x >> 31
    magnitude = x & _MAGNITUDE
    u = x if plan.symmetry == Symmetry.NONE else magnitude
    negate = sign if plan.symmetry == Symmetry.ODD else np.zeros_like(sign)

    # Outcomes
    beyond = magnitude >= table.bounds[sign]
    outcome = np.where(sign, np.uint32(plan.negative), np.uint32(plan.positive))
    if plan.zero is not None:
        beyond |= magnitude == 0
        outcome[magnitude == 0] = plan.zero
    nan = magnitude > _INFINITY
    beyond |= nan
    outcome[nan] = Outcome.NAN
    codes = np.array([choice.bits for choice in Outcome], np.uint32)
    special = np.where(outcome == Outcome.ARGUMENT, u, codes[outcome])

    # The finish: fma(a, b, c)
    a, b, c = special, np.full(x.shape, _ONE), np.full(x.shape, _NO_ADDEND)
    if plan.has_table:
        r, n, parity = _reduce(plan.reduction, u)
        value = polynomial(table, np.where(beyond, np.uint32(0), r)).view(np.uint32)
        negate = negate ^ parity
        if plan.reduction == Reduction.LOG:
            a = np.where(beyond, a, n.astype(np.float32).view(np.uint32))
            b = np.where(beyond, b, np.uint32(LN2))
            c = np.where(beyond, c, value)
        else:
            a = np.where(beyond, a, value)
            b = np.where(beyond, b, _power_of_two(n))
    b = b | negate << np.uint32(31)
    if plan.square:
        b = u
    if plan.slope:
        b = np.where((sign == 1) & (magnitude != 0), _codes(alpha), b)
    return fma32(a.view(np.float32), b.view(np.float32), c.view(np.float32))


def polynomial(table, r):
    """The polynomial of the segment in which each code ``r`` lies."""
    rows = table.segments.view(np.float32)[table.segment(r)]
    r = np.asarray(r, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        t = r + rows[..., 0]
    value = rows[..., 1]
    for column in range(2, rows.shape[-1]):
        value = fma32(t, value, rows[..., column])
    return value


def _codes(values):
    values = np.asarray(values)
    if values.dtype == np.uint32:
        return values
    return np.asarray(values, np.float32).view(np.uint32)


def _reduce(reduction, u):
    """``r`` (uint32 codes), ``n`` (int32) and whether to negate, of codes ``u``."""
    nothing = np.zeros(u.shape, np.int32), np.zeros(u.shape, np.uint32)
    if reduction == Reduction.NONE:
        return u, *nothing
    if reduction == Reduction.ANGLE:
        r, parity = reduce_angle(u)
        return r, nothing[0], parity
    exponent, fraction = _normalised(u)
    one = np.uint32(127)
    if reduction == Reduction.LOG:
        upper = fraction >> 22
        return (one - upper) << 23 | fraction, exponent + upper.astype(np.int32), nothing[1]
    if reduction == Reduction.RECIPROCAL:
        return one << 23 | fraction, -1 - exponent, nothing[1]
    odd = exponent & 1
    half = exponent >> 1
    n = half if reduction == Reduction.SQRT else -half
    return (one + odd.astype(np.uint32)) << 23 | fraction, n, nothing[1]


def _normalised(u):
    """Exponent and fraction of positive numbers, as if there were no subnormal ones."""
    field = (u >> 23 & 0xFF).astype(np.int32)
    fraction = u & np.uint32(_FRACTION)
    _, width = np.frexp(fraction.astype(np.float64))  # bits of a subnormal's significand
    zeros = np.where(field == 0, 24 - width, 0)
    exponent = np.where(field == 0, 1, field) - 127 - zeros
    fraction = fraction << np.clip(zeros, 0, 24).astype(np.uint32) & np.uint32(_FRACTION)
    return exponent.astype(np.int32), fraction


def _power_of_two(n):
    """Codes of ``2**n``; infinity above the range, and two subnormal ones below it."""
    field = np.asarray(n) + 127
    code = np.clip(field, 0, 255).astype(np.uint32) << 23
    return np.where(field > 0, code, np.uint32(1 << 22) >> np.clip(-field, 0, 1).astype(np.uint32))


_LIMB = WINDOW_BITS // 4
_LIMB_MASK = np.uint64((1 << _LIMB) - 1)
_WINDOWS = np.array(
    [
        [
            inverse_pi_window(exponent) >> _LIMB * limb & (1 << _LIMB) - 1
            for limb in range(WINDOW_BITS // _LIMB)
        ]
        for exponent in range(WINDOW_FIRST, 256)
    ],
    np.uint64,
)


def reduce_angle(u):
    """Distance of angles to the nearest multiple of pi, and the parity of ``floor(u / pi)``.

    Parameters
    ----------
    u : uint32 array
        Codes of positive finite numbers.

    Returns
    -------
    r, parity : uint32 arrays
        Codes from 0 to pi / 2; 0 or 1.
    """
    u = np.asarray(u, np.uint32)
    field = (u >> 23).astype(np.int64)
    significand = ((u & np.uint32(_FRACTION)) | np.uint32(1 << 23)).astype(np.uint64)
    windows = _WINDOWS[np.clip(field - WINDOW_FIRST, 0, len(_WINDOWS) - 1)]

    # The low 88 bits of the product, in limbs of 22.
    limbs = []
    carry = np.zeros(u.shape, np.uint64)
    for i in range(windows.shape[-1]):
        carry = carry + significand * windows[..., i]
        limbs.append(carry & _LIMB_MASK)
        carry = carry >> np.uint64(_LIMB)
    parity = (limbs[3] >> np.uint64(_LIMB - 1)).astype(np.uint32)

    # Below it are 87 bits of a fraction, folded at one half. The lowest 22 are not needed: they
    # are less than what the window lacks.
    fold = (limbs[3] >> np.uint64(_LIMB - 2)) & np.uint64(1) == 1
    limbs = [np.where(fold, ~limb & _LIMB_MASK, limb) for limb in limbs]
    rest = (limbs[3] << np.uint64(2 * _LIMB)) | (limbs[2] << np.uint64(_LIMB)) | limbs[1]
    zeros = np.zeros(u.shape, np.uint32)
    for step in (32, 16, 8, 4, 2, 1):
        empty = rest >> np.uint64(64 - step) == 0
        rest = np.where(empty, rest << np.uint64(step), rest)
        zeros += np.where(empty, np.uint32(step), np.uint32(0))

    # Times pi: product * 2**(-63 - zeros), with at most one leading zero.
    product = (rest >> np.uint64(32)) * np.uint64(PI_FACTOR)
    upper = product >> np.uint64(63)
    kept = product >> (np.uint64(38) + upper)
    rounded = ((kept + np.uint64(1)) >> np.uint64(1)).astype(np.uint32)
    r = (np.uint32(125) - zeros + upper.astype(np.uint32) << 23) + rounded
    direct = u <= np.uint32(ANGLE_DIRECT)
    return np.where(direct, u, r), np.where(direct, np.uint32(0), parity)
