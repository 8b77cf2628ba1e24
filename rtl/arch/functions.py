"""The functions of the scalar engine: how each is computed, and its coefficients.

A :class:`Plan` per :class:`~.isa.Function` says what the hardware (``engines/activation.py``) and
the golden model (``sim/activation.py``) do with an argument ``x``:

1. *Symmetry.* ``u`` is ``x``, or ``|x|`` for functions with a symmetry; the result of an odd one
   gets the sign of ``x``.
2. *Outcome.* NaN, a zero where the plan names an outcome for it, and arguments at or beyond the
   bound of their sign have an :class:`Outcome` instead of a value from the table.
3. *Reduction* to ``r``: none, by multiples of pi, or to a significand (:class:`Reduction`).
4. *Segment.* The binade of ``r`` gives the first segment and how many leading bits of the fraction
   number the segments from there (:meth:`Table.segment`).
5. *Polynomial.* Of a segment the table holds ``-x0`` and six coefficients, all binary32.
   ``t = r - x0`` is exact; ``fma(t, fma(t, fma(t, fma(t, fma(t, c5, c4), c3), c2), c1), c0)``.
6. *Finish*, one more fused multiply-add: the sign, a power of two, or ``n * ln 2``.

The tables are in ``functions.npz``, made by ``tests/bench/functions.py``, which also measures them
(``functions.md``). ``x0`` is not the middle of its segment but a number near it whose value and
slope happen to be close to binary32 numbers, so that rounding ``c0`` and ``c1`` costs next to
nothing.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import numpy as np

from .isa import Function

__all__ = [
    "ANGLE_DIRECT", "BINADES", "COLUMNS", "FIRST_EXPONENT", "LN2", "OUTCOME_BITS", "PI_FACTOR",
    "PI_FACTOR_BITS", "PLANS", "SEGMENTS", "TABLES", "WINDOW_BITS", "WINDOW_FIRST", "Outcome",
    "Plan", "Reduction", "Symmetry", "Table", "inverse_pi_window", "load_tables",
]  # fmt: skip

SEGMENTS = 512
"""Segments of a function, at most."""

BINADES = 32
"""Binades per sign: the first takes everything below ``2**-5`` (and has one segment), the last is
``2**25 .. 2**26``."""

FIRST_EXPONENT = 121
"""Biased exponent of ``r`` of the first binade: it and all below."""

COLUMNS = ("negative_x0", "c5", "c4", "c3", "c2", "c1", "c0")
"""What a segment consists of, in the order in which it is used."""

TABLES = Path(__file__).with_name("functions.npz")


class Symmetry(IntEnum):
    """What a function does to the sign of its argument."""

    NONE = 0
    """The table has segments for both signs."""
    EVEN = 1
    """``f(-x) = f(x)``."""
    ODD = 2
    """``f(-x) = -f(x)``."""


class Reduction(IntEnum):
    """How an argument becomes the ``r`` of the table."""

    NONE = 0
    """It is ``r``."""
    ANGLE = 1
    """``r`` is the distance of ``|x|`` to the nearest multiple of pi; the result is negated where
    ``floor(|x| / pi)`` is odd."""
    LOG = 2
    """``x = r * 2**n`` with ``r`` in [0.75, 1.5); the finish adds ``n * ln 2``."""
    SQRT = 3
    """``x = r * 4**n`` with ``r`` in [1, 4); the finish multiplies by ``2**n``."""
    RSQRT = 4
    """As SQRT; the finish multiplies by ``2**-n``."""
    RECIPROCAL = 5
    """``|x| = r * 2**n`` with ``r`` in [1, 2), the table holds ``2 / r``; the finish multiplies by
    ``2**(-1 - n)``."""


class Outcome(IntEnum):
    """Results that do not come from the table."""

    ARGUMENT = 0
    """``u``, the argument without its sign if the function has a symmetry."""
    ZERO = 1
    MINUS_ZERO = 2
    ONE = 3
    INFINITY = 4
    MINUS_INFINITY = 5
    NAN = 6
    HALF_PI = 7

    @property
    def bits(self):
        """The binary32 code; 0 for :attr:`ARGUMENT`."""
        return (
            0, 0, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3FC90FDB
        )[self]  # fmt: skip


OUTCOME_BITS = 3


@dataclass(frozen=True)
class Plan:
    """How a function is computed.

    Parameters
    ----------
    formula : :class:`str`
        For the page of errors.
    positive, negative : :class:`Outcome`
        At or beyond the bound of the sign. A function without a table has bounds of 0: all its
        results are outcomes. ``negative`` is that of negative arguments under any symmetry.
    zero : :class:`Outcome` or ``None``
        Of both zeros, unless they are ordinary arguments.
    symmetry : :class:`Symmetry`
    reduction : :class:`Reduction`
    slope : :class:`bool`
        The outcome of a negative argument (not of -0) is multiplied by ``alpha``.
    square : :class:`bool`
        The outcome is multiplied by ``u``.
    has_table : :class:`bool`
    """

    formula: str
    positive: Outcome
    negative: Outcome
    zero: Outcome | None = None
    symmetry: Symmetry = Symmetry.NONE
    reduction: Reduction = Reduction.NONE
    slope: bool = False
    square: bool = False
    has_table: bool = True

    @property
    def is_signed(self):
        """Whether ``r`` can be negative."""
        return self.symmetry == Symmetry.NONE and self.reduction == Reduction.NONE


def _plain(formula, positive, negative, **more):
    return Plan(formula, positive, negative, has_table=False, **more)


_O = Outcome
_ODD = Symmetry.ODD

PLANS = {
    Function.COPY: _plain("x", _O.ARGUMENT, _O.ARGUMENT),
    Function.SQUARE: _plain("x * x", _O.ARGUMENT, _O.ARGUMENT, square=True),
    Function.ABS: _plain("abs(x)", _O.ARGUMENT, _O.ARGUMENT, symmetry=Symmetry.EVEN),
    Function.SIGN: _plain(
        "-1, x if it is a zero, or 1", _O.ONE, _O.ONE, zero=_O.ARGUMENT, symmetry=_ODD
    ),
    Function.RELU: _plain("x if x > 0, else +0", _O.ARGUMENT, _O.ZERO),
    Function.PRELU: _plain("x, or alpha * x if x < 0", _O.ARGUMENT, _O.ARGUMENT, slope=True),
    Function.EXP: Plan("exp(x)", _O.INFINITY, _O.ZERO),
    Function.LOG: Plan(
        "log(x)", _O.INFINITY, _O.NAN, zero=_O.MINUS_INFINITY, reduction=Reduction.LOG
    ),
    Function.SQRT: Plan("sqrt(x)", _O.INFINITY, _O.NAN, zero=_O.ARGUMENT, reduction=Reduction.SQRT),
    Function.RSQRT: Plan(
        "1 / sqrt(x)", _O.ZERO, _O.NAN, zero=_O.INFINITY, symmetry=_ODD, reduction=Reduction.RSQRT
    ),
    Function.RECIPROCAL: Plan(
        "1 / x",
        _O.ZERO,
        _O.ZERO,
        zero=_O.INFINITY,
        symmetry=_ODD,
        reduction=Reduction.RECIPROCAL,
    ),
    Function.TANH: Plan("tanh(x)", _O.ONE, _O.ONE, symmetry=_ODD),
    Function.SIGMOID: Plan("1 / (1 + exp(-x))", _O.ONE, _O.ZERO),
    Function.GELU: Plan("x * (1 + erf(x / sqrt(2))) / 2", _O.ARGUMENT, _O.MINUS_ZERO),
    Function.GELU_DX: Plan(
        "(1 + erf(x / sqrt(2))) / 2 + x * exp(-x**2 / 2) / sqrt(2 pi)", _O.ONE, _O.MINUS_ZERO
    ),
    Function.GELU_TANH: Plan(
        "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x**3))) / 2", _O.ARGUMENT, _O.MINUS_ZERO
    ),
    Function.GELU_TANH_DX: Plan("the derivative of GELU_TANH", _O.ONE, _O.MINUS_ZERO),
    Function.GELU_SIGMOID: Plan("x / (1 + exp(-1.702 x))", _O.ARGUMENT, _O.MINUS_ZERO),
    Function.SILU: Plan("x / (1 + exp(-x))", _O.ARGUMENT, _O.MINUS_ZERO),
    Function.SILU_DX: Plan("s * (1 + x * (1 - s)), s = SIGMOID", _O.ONE, _O.MINUS_ZERO),
    Function.SOFTPLUS: Plan("log(1 + exp(x))", _O.ARGUMENT, _O.ZERO),
    Function.MISH: Plan("x * tanh(SOFTPLUS)", _O.ARGUMENT, _O.MINUS_ZERO),
    Function.ERF: Plan("erf(x)", _O.ONE, _O.ONE, symmetry=_ODD),
    Function.ERF_DX: Plan("2 / sqrt(pi) * exp(-x**2)", _O.ZERO, _O.ZERO, symmetry=Symmetry.EVEN),
    Function.SIN: Plan("sin(x)", _O.NAN, _O.NAN, symmetry=_ODD, reduction=Reduction.ANGLE),
    Function.ARCTAN: Plan("arctan(x)", _O.HALF_PI, _O.HALF_PI, symmetry=_ODD),
}
"""Every function's plan."""


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """What a function's plan takes from the file.

    Parameters
    ----------
    segments : uint32 array ``[segments, 7]``
        Rows of :data:`COLUMNS`.
    binades : uint16 array ``[2 * BINADES]``
        For each sign and binade: first segment, modulo :data:`SEGMENTS`, in bits 0..8; how many
        leading bits of the fraction are added to it in bits 9..12.
    bounds : uint32 array ``[2]``
        Of positive and of negative arguments: magnitudes (31 bits).
    """

    segments: np.ndarray
    binades: np.ndarray
    bounds: np.ndarray

    def segment(self, r):
        """Segment numbers of codes ``r`` (uint32 array)."""
        r = np.asarray(r, np.uint32)
        exponent = (r >> 23 & 0xFF).astype(np.int64)
        binade = np.clip(exponent - FIRST_EXPONENT, 0, BINADES - 1) + BINADES * (r >> 31)
        entry = self.binades[binade].astype(np.int64)
        leading = (r & 0x7FFFFF) >> (23 - (entry >> 9)).astype(np.uint32)
        return (entry + leading) % SEGMENTS


_NOTHING = Table(
    np.zeros((0, len(COLUMNS)), np.uint32), np.zeros(2 * BINADES, np.uint16), np.zeros(2, np.uint32)
)


@cache
def load_tables():
    """A :class:`Table` for every :class:`~.isa.Function`."""
    with np.load(TABLES) as file:
        stored = {name: file[name] for name in file.files}
    return {
        function: Table(*(stored[f"{function.name}_{part}"] for part in Table.__annotations__))
        if plan.has_table
        else _NOTHING
        for function, plan in PLANS.items()
    }


# Constants of the reductions ----------------------------------------------------------------------

LN2 = 0x3F317218
"""ln 2; its error is 1/30 of its last place."""

ANGLE_DIRECT = 0x3FC90FDA
"""Greatest magnitude below pi / 2: up to it an angle is not reduced."""

WINDOW_BITS = 88
"""Bits of 1 / pi that a significand is multiplied by: one for the parity of ``floor(|x| / pi)``,
87 below. No binary32 number but 0 comes closer to a multiple of pi than 2**-34, so at least 28 bits
of the distance are right, and 50 in all but a few."""

WINDOW_FIRST = 127
"""Biased exponent to which the first window belongs; greater ones begin as many bits later."""

PI_FACTOR_BITS = 32
PI_FACTOR = 0xC90FDAA2
"""pi times ``2**30``, rounded."""

_INVERSE_PI = 0x517CC1B727220A94FE13ABE8FA9A6EE06DB14ACC9E21C820FF28B1D5EF5DE2B0DB92371D2126E970
"""1 / pi times ``2**320``."""
_INVERSE_PI_BITS = 320


def inverse_pi_window(exponent, *, bits=WINDOW_BITS):
    """The bits of 1 / pi that matter modulo 2 to a significand with this biased exponent.

    ``significand * 2**(exponent - 150) / pi`` is ``significand * window * 2**(1 - WINDOW_BITS)``
    modulo 2, but for what the truncated window lacks. More ``bits`` are those above the window.
    """
    first = exponent - 150  # its weight is 2**-first
    return _INVERSE_PI >> (_INVERSE_PI_BITS - first - WINDOW_BITS + 1) & (1 << bits) - 1
