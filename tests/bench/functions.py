"""The tables of the scalar engine's functions, and how far their values are from the right ones.

    python tests/bench/functions.py                  # measure, print the errors: two minutes
    python tests/bench/functions.py --write          # measure more, ten minutes; write the page
    python tests/bench/functions.py --fit --write    # first make the tables anew, three minutes
    python tests/bench/functions.py --fit TANH ERF   # some functions, on trial

The tables are ``rtl/arch/functions.npz``, the page is ``rtl/arch/functions.md``. An error is the
distance to the exact value in units in the last place (ULP) of that value's binade, subnormal
numbers included; ``tests/sim/test_activation.py`` holds the page to a smaller sample.

How a table comes about. Every binade is cut into as few segments as fit a polynomial within one of
``TOLERANCES``. The polynomial is a least-squares fit of relative errors at Chebyshev points, of
values that mpmath computes, and its coefficients are rounded one after the other, each time fitting
those that are left again. Before that, of the binary32 numbers around the middle of the segment the
one is chosen as ``x0`` whose value and slope are closest to binary32 numbers. Where the function
goes through zero, the zero is ``x0``, in the segments beside it too.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import mpmath as mp
import numpy as np
from makalu.rtl.arch import functions
from makalu.rtl.arch.functions import (
    BINADES,
    FIRST_EXPONENT,
    PLANS,
    SEGMENTS,
    TABLES,
    Outcome,
    Reduction,
    Symmetry,
    Table,
)
from makalu.rtl.arch.isa import Function
from makalu.sim.activation import evaluate
from makalu.sim.arithmetic import fma32
from numpy.polynomial import chebyshev

PAGE = TABLES.with_suffix(".md")
TOLERANCES = (0.06, 0.12, 0.2, 0.3)
"""Error of a polynomial before rounding, ULP: the first with which the segments are enough."""

NODES = 25
CANDIDATES = 4096
_SIGN = np.uint32(1 << 31)
_TOP = 0x7F800000
mp.mp.prec = 120


# The exact functions ------------------------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + mp.exp(-x))


def _gelu_angle(x):
    """Twice the argument of the tanh, and its derivative."""
    c = 2 * mp.sqrt(2 / mp.pi)
    a = mp.mpf(44715) / 1000000
    return c * (x + a * x**3), c * (1 + 3 * a * x**2)


def _gelu_tanh_dx(x):
    angle, slope = _gelu_angle(x)
    s = _sigmoid(angle)
    return s * (1 + x * slope / (1 + mp.exp(angle)))


def _mish(x):
    e = mp.exp(x)
    return x * e * (e + 2) / (e * (e + 2) + 2)


EXACT = {
    Function.COPY: lambda x: x,
    Function.SQUARE: lambda x: x * x,
    Function.ABS: abs,
    Function.SIGN: lambda x: mp.sign(x),
    Function.RELU: lambda x: max(x, mp.mpf(0)),
    Function.PRELU: lambda x: x,
    Function.EXP: mp.exp,
    Function.LOG: mp.log,
    Function.SQRT: mp.sqrt,
    Function.RSQRT: lambda x: 1 / mp.sqrt(x),
    Function.RECIPROCAL: lambda x: 1 / x,
    Function.TANH: mp.tanh,
    Function.SIGMOID: _sigmoid,
    Function.GELU: lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    Function.GELU_DX: lambda x: (
        mp.erfc(-x / mp.sqrt(2)) / 2 + x * mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)
    ),
    Function.GELU_TANH: lambda x: x * _sigmoid(_gelu_angle(x)[0]),
    Function.GELU_TANH_DX: _gelu_tanh_dx,
    Function.GELU_SIGMOID: lambda x: x * _sigmoid(x * mp.mpf(1702) / 1000),
    Function.SILU: lambda x: x * _sigmoid(x),
    Function.SILU_DX: lambda x: _sigmoid(x) * (1 + x / (1 + mp.exp(x))),
    Function.SOFTPLUS: lambda x: mp.log1p(mp.exp(x)),
    Function.MISH: _mish,
    Function.ERF: mp.erf,
    Function.ERF_DX: lambda x: 2 / mp.sqrt(mp.pi) * mp.exp(-x * x),
    Function.SIN: mp.sin,
    Function.ARCTAN: mp.atan,
}
"""In mpmath, of an ``mpf``."""

ROOTS = {
    Function.GELU_DX: -0.75,
    Function.GELU_TANH_DX: -0.75,
    Function.SILU_DX: -1.28,
}
"""Zeros, other than 0 and 1, where a function changes its sign; about."""


def _each(function, x):
    return np.fromiter(map(function, x.tolist()), np.float64, len(x))


def _sigmoid64(x):
    return 1 / (1 + np.exp(-x))


def _gelu64(x):
    return x * _each(math.erfc, -x / math.sqrt(2)) / 2


def _gelu_angle64(x):
    c = 2 * math.sqrt(2 / math.pi)
    return c * (x + 0.044715 * x**3), c * (1 + 3 * 0.044715 * x**2)


def _gelu_tanh_dx64(x):
    angle, slope = _gelu_angle64(x)
    return _sigmoid64(angle) * (1 + x * slope / (1 + np.exp(angle)))


def _mish64(x):
    e = np.exp(np.minimum(x, 100))
    return x * (e * (e + 2) / (e * (e + 2) + 2))


BINARY64 = {
    Function.COPY: lambda x: x,
    Function.SQUARE: lambda x: x * x,
    Function.ABS: np.abs,
    Function.SIGN: np.sign,
    Function.RELU: lambda x: np.maximum(x, 0),
    Function.PRELU: lambda x: np.where(x < 0, x * 0.25, x),
    Function.EXP: np.exp,
    Function.LOG: np.log,
    Function.SQRT: np.sqrt,
    Function.RSQRT: lambda x: 1 / np.sqrt(x),
    Function.RECIPROCAL: lambda x: 1 / x,
    Function.TANH: np.tanh,
    Function.SIGMOID: _sigmoid64,
    Function.GELU: _gelu64,
    Function.GELU_DX: lambda x: (
        _each(math.erfc, -x / math.sqrt(2)) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    ),
    Function.GELU_TANH: lambda x: x * _sigmoid64(_gelu_angle64(x)[0]),
    Function.GELU_TANH_DX: _gelu_tanh_dx64,
    Function.GELU_SIGMOID: lambda x: x * _sigmoid64(1.702 * x),
    Function.SILU: lambda x: x * _sigmoid64(x),
    Function.SILU_DX: lambda x: _sigmoid64(x) * (1 + x / (1 + np.exp(x))),
    Function.SOFTPLUS: lambda x: np.where(x > 0, x, 0) + np.log1p(np.exp(-np.abs(x))),
    Function.MISH: _mish64,
    Function.ERF: lambda x: _each(math.erf, x),
    Function.ERF_DX: lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
    Function.SIN: lambda x: _each(math.sin, x),
    Function.ARCTAN: np.arctan,
}
"""In binary64, of an array: right to far less than a ULP of binary32."""


def number(code):
    """The value of a code, as an ``mpf``."""
    return mp.mpf(float(np.uint32(code).view(np.float32)))


def rounded(value):
    """The binary32 number next to an ``mpf``."""
    if value == 0:
        return np.float32(0)
    quantum = mp.ldexp(1, max(mp.frexp(value)[1] - 24, -149))
    with np.errstate(over="ignore"):
        return np.float32(float(mp.nint(value / quantum) * quantum))


def ulp(values):
    """Unit in the last place of binary32 in the binade of binary64 values."""
    _, exponent = np.frexp(values)
    return np.ldexp(1.0, np.maximum(exponent - 24, -149))


# Fitting ------------------------------------------------------------------------------------------


class Fitter:
    """Makes the table of one function."""

    def __init__(self, function):
        self.plan = PLANS[function]
        exact = EXACT[function]
        # What the table holds is not always the function.
        self.f = (lambda x: 2 / x) if function is Function.RECIPROCAL else exact
        self.function = function
        self.cache = {}
        self.roots = []
        if function in ROOTS:
            self.roots.append(rounded(mp.findroot(self.f, ROOTS[function])))
        if function is Function.LOG:
            self.roots.append(np.float32(1))
        self.points = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)

    def bounds(self):
        """First magnitudes of either sign whose value is the outcome for good."""
        plan = self.plan
        if plan.reduction != Reduction.NONE:
            signed = plan.reduction in (Reduction.ANGLE, Reduction.RECIPROCAL)
            return np.array([_TOP, _TOP if signed else 0], np.uint32)
        found = []
        for sign, outcome in ((0, plan.positive), (1, plan.negative)):
            low, high = FIRST_EXPONENT << 23, FIRST_EXPONENT + BINADES << 23
            while high - low > 1:
                middle = (low + high) // 2
                code = middle | sign << 31
                want = number(code) if outcome == Outcome.ARGUMENT else None
                if plan.symmetry != Symmetry.NONE:
                    code = middle
                value = rounded(self.f(number(code)))
                if want is None:
                    want = float(np.uint32(outcome.bits).view(np.float32))
                if value == want:
                    high = middle
                else:
                    low = middle
            found.append(high)
        return np.array(found, np.uint32)

    def domain(self, bounds):
        """For each sign of ``r``: codes of its least and greatest magnitude."""
        ranges = {
            Reduction.ANGLE: (0, 0x3FC90FDB),
            Reduction.LOG: (0x3F400000, 0x3FBFFFFF),
            Reduction.SQRT: (0x3F800000, 0x407FFFFF),
            Reduction.RSQRT: (0x3F800000, 0x407FFFFF),
            Reduction.RECIPROCAL: (0x3F800000, 0x3FFFFFFF),
        }
        if self.plan.reduction in ranges:
            return [ranges[self.plan.reduction]]
        return [(0, int(bound) - 1) for bound in bounds[: 2 if self.plan.is_signed else 1]]

    def table(self):
        """Fit with as little error as the number of segments allows."""
        bounds = self.bounds()
        for tolerance in TOLERANCES:
            pieces, binades = self.pieces(self.domain(bounds), tolerance)
            if len(pieces) <= SEGMENTS:
                rows = np.array([self.best(*piece) for piece in pieces], np.float32)
                return Table(rows.view(np.uint32), binades, bounds)
        raise SystemExit(f"{self.function.name} needs {len(pieces)} segments")

    def pieces(self, domain, tolerance):
        """Ends of the segments, and the binades' entries."""
        pieces = []
        binades = np.zeros(2 * BINADES, np.uint16)
        if domain[0][0] == 0:
            edge = float(np.float32(2.0) ** (FIRST_EXPONENT + 1 - 127))
            pieces.append((-edge if self.plan.is_signed else 0.0, edge))
        for sign, (first, last) in enumerate(domain):
            for binade in range(1, BINADES):
                start = FIRST_EXPONENT + binade << 23
                low, high = max(first, start), min(last, start + (1 << 23) - 1)
                if low > high or len(pieces) > SEGMENTS:
                    continue
                shift, ends = self.cut(sign, start, low, high, tolerance)
                base = (len(pieces) - (low - start >> 23 - shift)) % SEGMENTS
                binades[sign * BINADES + binade] = base | shift << 9
                pieces += ends
        return pieces, binades

    def cut(self, sign, start, low, high, tolerance):
        """Cut the codes ``low .. high`` of a binade: how many leading bits, and the ends."""
        for shift in range(10):
            size = 1 << 23 - shift
            ends = [
                self.ends(sign, max(low, first), min(high, first + size - 1))
                for first in range(start, high + 1, size)
                if first + size > low
            ]
            # The worst fit is most often at one of the ends.
            order = dict.fromkeys([0, len(ends) - 1, *range(1, len(ends) - 1)])
            if all(self.error(*ends[k]) < tolerance for k in order):
                return shift, ends
        raise SystemExit(f"{self.function.name}: no fit from {low:#x} to {high:#x}")

    def ends(self, sign, first, last):
        a, b = (float(np.uint32(code).view(np.float32)) for code in (first, last))
        return (-b, -a) if sign else (a, b)

    def values(self, low, high):
        if (low, high) not in self.cache:
            self.cache[low, high] = self.sample(low, high)
        return self.cache[low, high]

    def sample(self, low, high):
        x = (low + high) / 2 + (high - low) / 2 * self.points
        x = np.append(x, [low, high])
        return x, [self.f(mp.mpf(float(v))) for v in x]

    def root_near(self, low, high):
        """A zero in a segment or in one of its neighbours."""
        width = high - low
        for root in self.roots:
            if low - width <= root <= high + width:
                return root
        return None

    def error(self, low, high):
        """Greatest error of the best polynomial, ULP."""
        root = self.root_near(low, high)
        x0 = (low + high) / 2 if root is None else float(root)
        x, exact = self.values(low, high)
        at = self.f(mp.mpf(x0))
        rest = np.array([float(v - at) for v in exact])
        y = np.array([float(v) for v in exact])
        c = self.solve(x - x0, rest, y, 1)
        return np.max(np.abs(_horner(c, x - x0) - rest) / ulp(y))

    def solve(self, t, rest, y, first):
        """Coefficients ``first .. 5`` of the polynomial in ``t`` closest to ``rest``, relatively
        to ``y``; those below are 0."""
        scale = np.max(np.abs(t))
        weight = 1 / np.maximum(np.abs(y), 2.0**-126)
        powers = np.arange(first, 6)
        a = (t[:, None] / scale) ** powers * weight[:, None]
        c, *_ = np.linalg.lstsq(a, rest * weight, rcond=None)
        return np.concatenate([np.zeros(first), c / scale**powers])

    def best(self, low, high):
        """The row of a segment; where zeros are near, that with the least error."""
        if low <= 0 <= high:
            return self.fit(low, high, np.float32(0))
        middle = self.fit(low, high, self.middle(low, high))
        root = self.root_near(low, high)
        if root is None:
            return middle
        rows = middle, self.fit(low, high, root)
        return min(rows, key=lambda row: self.measured(row, low, high))

    def middle(self, low, high):
        """A number near the middle whose value and slope are nearly binary32 numbers."""
        x, exact = self.values(low, high)
        x, y = x[:NODES], np.array([float(v) for v in exact[:NODES]])
        center, half = (low + high) / 2, (high - low) / 2
        series = chebyshev.chebfit((x - center) / half, y, NODES - 1)
        spacing = float(np.spacing(np.float32(max(abs(low), abs(high)))))
        reach = min(CANDIDATES // 2, int(half / 8 / spacing))
        near = np.float32(center) + np.arange(-reach, reach + 1) * spacing
        near = near.astype(np.float32).astype(np.float64)
        u = (near - center) / half
        c0 = chebyshev.chebval(u, series)
        c1 = chebyshev.chebval(u, chebyshev.chebder(series)) / half
        least = np.min(ulp(y))
        cost = np.abs(c0.astype(np.float32) - c0) + np.abs(c1.astype(np.float32) - c1) * half
        return np.float32(near[np.argmin(cost / least)])

    def fit(self, low, high, x0):
        """The row of a segment with a given ``x0``."""
        x, exact = self.values(low, high)
        t = x - float(x0)
        at = self.f(mp.mpf(float(x0)))
        c0 = rounded(at)
        if at == 0 and self.function is not Function.LOG:
            c0 = np.float32(-0.0)  # keeps the sign of a zero
        y = np.array([float(v) for v in exact])
        base = mp.mpf(float(c0))
        rest = np.array([float(v - base) for v in exact])
        # A zero is not a point to fit.
        keep = y != 0
        t, rest, y = t[keep], rest[keep], y[keep]
        row = [np.float32(-x0), c0]
        for k in range(1, 6):
            c = np.float32(self.solve(t, rest, y, k)[k])
            row.insert(1, c)
            rest = rest - float(c) * t**k
        return row

    def measured(self, row, low, high):
        """Greatest error of a row as the hardware computes with it, ULP."""
        x = np.linspace(low, high, 400).astype(np.float32)
        x = np.clip(x, np.float32(low), np.float32(high))
        t = x + row[0]
        value = row[1]
        for c in row[2:]:
            value = fma32(t, value, c)
        y = np.array([float(self.f(mp.mpf(float(v)))) for v in x])
        return np.max(np.abs(value.astype(np.float64) - y) / ulp(y))


def _horner(c, t):
    value = np.zeros_like(t)
    for k in reversed(range(len(c))):
        value = value * t + c[k]
    return value


def make(names):
    """Tables of the functions, by name of their arrays."""
    arrays = {}
    for function in names:
        begin = time.time()
        table = Fitter(function).table()
        for part in Table.__annotations__:
            arrays[f"{function.name}_{part}"] = getattr(table, part)
        bounds = [f"{float(b.view(np.float32)):.7g}" for b in table.bounds]
        print(
            f"{function.name:14} {len(table.segments):4} segments, bounds {bounds}, "
            f"{time.time() - begin:.0f} s",
            flush=True,
        )
    return arrays


# Measuring ----------------------------------------------------------------------------------------


def borders(table):
    """Codes around every border of segments in ``r``, both signs."""
    starts = []
    for binade in range(1, BINADES):
        for sign in range(2):
            shift = int(table.binades[sign * BINADES + binade]) >> 9
            first = FIRST_EXPONENT + binade << 23
            starts.append(first + (np.arange((1 << shift) + 1) << 23 - shift))
    starts = np.unique(np.concatenate([*starts, *table.bounds[:, None]]))
    near = np.unique((starts[:, None] + np.arange(-2, 3)).clip(0, _TOP))
    return np.concatenate([near, near | 1 << 31]).astype(np.uint32)


SPECIALS = np.array(
    [
        sign | code
        for sign in (0, 1 << 31)
        for code in (
            0, 1, 2, 3, 0x400000, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x3F800001,
            0x40000000, 0x40490FDB, 0x3FC90FDB, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000,
            0x7FFFFFFF,
        )
    ],
    np.uint32,
)  # fmt: skip


def points(function, count, rng):
    """Codes to measure at: half of all codes, half where the table is at work."""
    table = functions.load_tables()[function]
    codes = [SPECIALS, borders(table)]
    codes.append(rng.integers(0, 1 << 32, count // 2, np.uint32))
    if PLANS[function].reduction == Reduction.NONE and PLANS[function].has_table:
        for sign in range(2):
            first = FIRST_EXPONENT - 2 << 23
            part = rng.integers(first, int(table.bounds[sign]) + 1000, count // 4)
            codes.append(part.astype(np.uint32) | np.uint32(sign << 31))
    else:
        # Near 1, where logarithms are small, and angles of a few turns.
        part = rng.integers(124 << 23, 144 << 23, count // 2).astype(np.uint32)
        codes.append(part | rng.integers(0, 2, count // 2, np.uint32) << np.uint32(31))
    for root in [np.float32(ROOTS.get(function, 1.0)), np.float32(-1), np.float32(math.pi)]:
        near = int(root.view(np.uint32)) + rng.integers(-(1 << 20), 1 << 20, count // 64)
        codes.append(near.astype(np.uint32))
    return np.concatenate(codes)


def errors(function, codes):
    """Errors at codes, ULP; NaN where the exact value is none but the result is, or vice versa."""
    with np.errstate(all="ignore"):
        x = codes.view(np.float32).astype(np.float64)
        exact = np.asarray(BINARY64[function](np.where(np.isinf(x), np.nan, x)))
        got = evaluate(function, codes, 0.25).astype(np.float64)
        overflow = 2.0**128
        exact, near = (np.clip(v, -overflow, overflow) for v in (exact, got))
        error = np.abs(near - exact) / ulp(exact)
    error[np.isnan(exact) & np.isnan(got)] = 0
    error[~np.isfinite(x)] = 0  # specials have tests of their own
    zero = x == 0
    error[zero & ~np.isfinite(exact)] = 0
    return error


CLOSE = (Function.ERF, Function.MISH)
"""Functions whose error comes close to 2 ULP, near zero, because their slope there has an error."""


def near_zero(function):
    """All arguments of some binades below the second segment; the others have the same digits."""
    for sign in (0,) if PLANS[function].symmetry == Symmetry.ODD else (0, 1):
        for first in range(FIRST_EXPONENT - 8 << 23, FIRST_EXPONENT + 1 << 23, 1 << 20):
            yield np.arange(first, first + (1 << 20), dtype=np.uint32) | np.uint32(sign << 31)


def worst(function, count, rng, *, thorough=False):
    """Greatest error found, its code, and how many points were looked at."""
    batches = [points(function, 1 << 20, rng) for _ in range(-(-count >> 20))]
    best, code, seen = -1.0, 0, 0
    for codes in itertools.chain(
        batches, near_zero(function) if thorough and function in CLOSE else ()
    ):
        found = errors(function, codes)
        if np.isnan(found).any():
            bad = codes[np.isnan(found)][0]
            raise SystemExit(f"{function.name}({bad:#x}): a number and no number")
        k = int(np.argmax(found))
        if found[k] > best:
            best, code = float(found[k]), int(codes[k])
        seen += len(codes)
    return best, code, seen


def measure(names, count, *, thorough=False):
    """Greatest error and its code by function."""
    found = {}
    for function in names:
        rng = np.random.default_rng(function)
        error, code, seen = worst(function, count, rng, thorough=thorough)
        found[function] = error, code
        x = float(np.uint32(code).view(np.float32))
        print(f"{function.name:14} {error:.3f} ULP at {x:.9g} ({code:#010x}), {seen} points")
    return found


def render(found, count):
    """The page of errors."""
    lines = [
        "# The functions of the scalar engine",
        "",
        "Written by `python tests/bench/functions.py --write`. Do not edit.",
        "",
        "How they are computed is described in `functions.py`. The error is the greatest one found",
        f"at {count:,} or more arguments of all of binary32, in units in the last place of the",
        "exact result, subnormal results included; beside it stand the argument where it was",
        "found and its code. Beyond the bounds the result is the one given, which is the exact",
        "value rounded. NaN gives the canonical NaN. A table is loaded in as many cycles as it has",
        f"segments, at least {2 * BINADES}.",
        "",
        f"{' and '.join(f'`{f.name}`' for f in CLOSE)} were measured at every argument near zero.",
        "",
        "| function | value | segments | from the table | beyond | error | at | code |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for function, (error, code) in found.items():
        plan, table = PLANS[function], functions.load_tables()[function]
        argument = float(np.uint32(code).view(np.float32))
        cells = [
            f"`{function.name}`",
            f"`{plan.formula}`",
            len(table.segments) or "",
            _range(plan, table),
            _beyond(plan),
            f"{error:.3f}",
            f"{argument:.9g}",
            f"`{code:#010x}`",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _range(plan, table):
    if not plan.has_table:
        return ""
    high, low = (float(b.view(np.float32)) for b in table.bounds)
    if low == high == math.inf:
        return "finite" if plan.zero is None else "finite but 0"
    if low == 0:
        return "> 0, finite"
    return f"-{low:.9g} < x < {high:.9g}"


def _beyond(plan):
    names = {
        Outcome.ARGUMENT: "x", Outcome.ZERO: "0", Outcome.MINUS_ZERO: "-0", Outcome.ONE: "1",
        Outcome.INFINITY: "inf", Outcome.MINUS_INFINITY: "-inf", Outcome.NAN: "NaN",
        Outcome.HALF_PI: "pi/2",
    }  # fmt: skip
    if not plan.has_table:
        return ""
    minus = plan.symmetry == Symmetry.ODD
    high, low = names[plan.positive], names[plan.negative]
    if minus and plan.negative != Outcome.NAN:
        low = f"-{low}"
    parts = [f"{low}; {high}"]
    if plan.zero is not None:
        zero = names[plan.zero]
        parts.append(f"at 0: {'±' if minus else ''}{zero}")
    return ", ".join(parts)


def read_page():
    """Errors and codes that the page states, by function."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.split("|")]
        if len(cells) == 10 and cells[1] in Function.__members__:
            found[Function[cells[1]]] = float(cells[6]), int(cells[8], 16)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="functions; all by default")
    parser.add_argument("--fit", action="store_true", help="make the tables anew")
    parser.add_argument("--write", action="store_true", help="write the page, and new tables")
    parser.add_argument("--points", type=int, default=1 << 22, help="per function")
    options = parser.parse_args()
    names = [Function[name] for name in options.names] or list(Function)
    if options.fit:
        arrays = make([function for function in names if PLANS[function].has_table])
        if TABLES.exists():
            with np.load(TABLES) as file:
                arrays = {name: file[name] for name in file.files} | arrays
        path = TABLES if options.write else Path("functions.npz")
        np.savez_compressed(path, **dict(sorted(arrays.items())))
        functions.TABLES = path
        functions.load_tables.cache_clear()
    found = measure(names, options.points, thorough=options.write)
    if options.write and not options.names:
        PAGE.write_text(render(found, options.points))


if __name__ == "__main__":
    main()
