"""Binary32 operations in numpy against exact fractions."""

import math
from fractions import Fraction

import numpy as np
from makalu.rtl.arch.formats import CANONICAL_NAN
from makalu.sim.arithmetic import fma32


def round_binary32(value):
    """The binary32 number next to a fraction, ties to even, as a float."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    units = round(size / quantum)  # Python rounds halves to even
    if units * quantum >= 2**128:
        return math.copysign(math.inf, value)
    return math.copysign(float(units * quantum), value)


def exact_fma(a, b, c):
    """Of finite floats; a sum of zero is +0 unless both terms are -0."""
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if total == 0:
        product_sign = math.copysign(1, a) * math.copysign(1, b)
        both = (a == 0 or b == 0) and c == 0 and product_sign < 0 and math.copysign(1, c) < 0
        return -0.0 if both else 0.0
    return round_binary32(total)


def check(a, b, c):
    got = fma32(a, b, c)
    want = np.array([exact_fma(*map(float, v)) for v in zip(a, b, c, strict=True)], np.float32)
    wrong = np.flatnonzero(got.view(np.uint32) != want.view(np.uint32))
    for i in wrong[:1]:
        raise AssertionError(
            f"{wrong.size} differ; {a[i]!r} * {b[i]!r} + {c[i]!r}: got {got[i]!r}, want {want[i]!r}"
        )


def numbers(rng, n, low, high):
    """Numbers with biased exponents ``low .. high - 1``, some with few significant bits."""
    fraction = rng.integers(0, 1 << 23, n)
    short = rng.random(n) < 0.3
    fraction[short] &= 0x7FF000
    code = rng.integers(0, 2, n) << 31 | rng.integers(low, high, n) << 23 | fraction
    return code.astype(np.uint32).view(np.float32)


def test_random_numbers_round_once(rng):
    a, b = numbers(rng, 4000, 60, 190), numbers(rng, 4000, 60, 190)
    near = a.astype(np.float64) * b * np.exp2(rng.integers(-30, 30, 4000))
    near = np.clip(near, -1e38, 1e38).astype(np.float32)
    check(a, b, np.where(rng.random(4000) < 0.8, near, numbers(rng, 4000, 0, 255)))


def test_cancellation_is_exact(rng):
    a, b = numbers(rng, 2000, 100, 150), numbers(rng, 2000, 100, 150)
    check(a, b, -(a * b))


def test_subnormal_results_round_once(rng):
    a = numbers(rng, 3000, 0, 60)
    scale = rng.integers(-30, 10, 3000) - 126 - np.frexp(a)[1]
    b = np.ldexp(numbers(rng, 3000, 126, 128), np.clip(scale, -120, 120)).astype(np.float32)
    check(a, b, numbers(rng, 3000, 0, 12))


def test_a_tie_that_a_distant_term_breaks():
    """Rounding to binary64 first would hide the term, and the tie would fall to the even side."""
    one, half = np.float32(1), np.float32(2.0**-24)
    tiny = np.float32(2.0**-100)
    a = np.array([one + half * 2, one + half * 2, one], np.float32)
    b = np.array([one + half * 2 * 2**11, one, half], np.float32)
    c = np.array([tiny, -tiny, one], np.float32)
    check(a, b, c)
    # 2**-24 + 1, exactly between two numbers, and a little more or less than that.
    sign = np.array([1, -1, 1, -1], np.float32)
    a = np.float32(2.0**-12) * (1 + np.float32(2.0**-23) * np.array([0, 0, 1, 1], np.float32))
    check(a, np.full(4, 2.0**-12, np.float32), sign)


def test_overflow_begins_half_a_place_beyond_the_greatest_number():
    top = np.float32(np.finfo(np.float32).max)
    half = np.float32(2.0**103)
    less = np.nextafter(half, np.float32(0))
    got = fma32(np.float32([1, 1, -1, -1]), top, np.float32([half, less, -half, -less]))
    assert got.tolist() == [math.inf, float(top), -math.inf, -float(top)]


def test_specials():
    inf, nan = np.float32(math.inf), np.uint32([0xFFC00001, 0x7F800001]).view(np.float32)
    cases = [
        (inf, 0, 1), (0, -inf, 1), (inf, 1, -inf), (nan[0], 1, 1), (1, nan[1], 1), (1, 1, nan[0]),
    ]  # fmt: skip
    for case in cases:
        assert fma32(*map(np.float32, case)).view(np.uint32) == CANONICAL_NAN, case
    assert fma32(inf, np.float32(-2), np.float32(5)) == -inf
    zero = np.float32(0)
    a, c = np.float32([zero, zero, -zero, -zero]), np.float32([zero, -zero, zero, -zero])
    assert np.signbit(fma32(a, np.float32(1), c)).tolist() == [False, False, False, True]
