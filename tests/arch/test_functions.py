"""Plans and tables of the scalar engine's functions; their constants against mpmath."""

import mpmath as mp
import numpy as np
import pytest
from makalu.rtl.arch import functions
from makalu.rtl.arch.functions import (
    BINADES,
    COLUMNS,
    FIRST_EXPONENT,
    PLANS,
    SEGMENTS,
    Outcome,
    Reduction,
    inverse_pi_window,
    load_tables,
)
from makalu.rtl.arch.isa import Function

TABULATED = [function for function in Function if PLANS[function].has_table]
tabulated = pytest.mark.parametrize("function", TABULATED, ids=lambda f: f.name.lower())


def test_every_function_has_a_plan():
    assert set(PLANS) == set(Function) == set(load_tables())


def test_outcomes_are_what_their_names_say():
    values = [np.uint32(outcome.bits).view(np.float32) for outcome in Outcome]
    expected = [0, 0, -0.0, 1, np.inf, -np.inf, np.nan, np.float32(np.pi / 2)]
    assert np.array_equal(np.signbit(values), np.signbit(np.float32(expected)))
    assert np.array_equal(values, np.float32(expected), equal_nan=True)


def test_constants_are_those_numbers_rounded():
    with mp.workprec(400):
        assert functions.LN2 == np.float32(float(mp.ln2)).view(np.uint32)
        assert int(mp.nint(mp.pi * 2**30)) == functions.PI_FACTOR
        assert functions.PI_FACTOR.bit_length() == functions.PI_FACTOR_BITS
        direct = [float(np.uint32(functions.ANGLE_DIRECT + k).view(np.float32)) for k in (0, 1)]
        assert direct[0] < mp.pi / 2 < direct[1]
        for exponent in range(127, 255):
            bits = int(mp.floor(mp.ldexp(1 / mp.pi, exponent - 150 + functions.WINDOW_BITS - 1)))
            assert inverse_pi_window(exponent) == bits % (1 << functions.WINDOW_BITS)


@tabulated
def test_tables_fit_the_memory(function):
    table = load_tables()[function]
    assert table.segments.shape[1] == len(COLUMNS)
    assert 0 < len(table.segments) <= SEGMENTS
    assert (table.binades >> 9 <= 9).all()
    assert np.isfinite(table.segments.view(np.float32)).all()
    if PLANS[function].reduction == Reduction.NONE:
        assert (table.bounds <= FIRST_EXPONENT + BINADES << 23).all(), "nothing beyond the binades"
    # The first binade has numbers of many exponents in it: no leading bits can tell them apart.
    assert table.binades[0] >> 9 == table.binades[BINADES] >> 9 == 0


def least_and_greatest(plan, table):
    """Codes of ``r``: the ends for each sign."""
    ranges = {
        Reduction.ANGLE: (0, 0x3FC90FDB),
        Reduction.LOG: (0x3F400000, 0x3FBFFFFF),
        Reduction.SQRT: (0x3F800000, 0x407FFFFF),
        Reduction.RSQRT: (0x3F800000, 0x407FFFFF),
        Reduction.RECIPROCAL: (0x3F800000, 0x3FFFFFFF),
    }
    if plan.reduction in ranges:
        yield 0, *ranges[plan.reduction]
    else:
        for sign in range(2 if plan.is_signed else 1):
            yield sign, 0, int(table.bounds[sign]) - 1


@tabulated
def test_every_argument_lies_in_a_segment_whose_x0_is_exactly_subtracted(function):
    plan, table = PLANS[function], load_tables()[function]
    used = set()
    for sign, low, high in least_and_greatest(plan, table):
        codes = np.unique(np.linspace(low, high, 20_001).astype(np.uint32))
        steps = np.arange(FIRST_EXPONENT << 23, (FIRST_EXPONENT + BINADES) << 23, 1 << 14)
        codes = np.unique(np.concatenate([codes, steps, steps - 1]).clip(low, high))
        codes = codes.astype(np.uint32) | np.uint32(sign << 31)
        number = table.segment(codes)
        assert number.max() < len(table.segments)
        used |= set(number.tolist())
        r = codes.view(np.float32)
        x0 = -table.segments[number, 0].view(np.float32)
        with np.errstate(under="ignore"):
            t = r - x0
        assert np.array_equal(t.astype(np.float64), r.astype(np.float64) - x0)
    assert used == set(range(len(table.segments))), "a segment that no argument reaches"
