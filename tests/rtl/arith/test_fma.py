"""Fused multiply-add and addition against exact arithmetic, SoftFloat and the machine's own FPU."""

import itertools

import numpy as np
import pytest
import softfloatpy as softfloat
from amaranth.sim import Simulator
from makalu.rtl.arch.formats import BF16, FP8_E3M4, FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP16, TF32
from makalu.rtl.arch.isa import Half
from makalu.rtl.arith.fma import ADD_CYCLES, FMA32_CYCLES, FMA_CYCLES, Add, Fma, Fma32
from makalu.rtl.arith.operand import OPERAND_CYCLES, Kind, Operand, OperandConverter

from .exact import (
    CANONICAL_NAN,
    INF,
    NAN,
    NUMBER,
    VOID,
    canonical,
    exact_add,
    exact_fma,
    float_fraction,
    operand_value,
    pack_operand,
    round_fraction,
    unpack_operand,
)
from .support import assert_equal_bits, run_vectors

FP8 = (FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP8_E3M4)
NARROW = (TF32, BF16, FP16, *FP8)


def run_fma(x, w, acc):
    return run_vectors(Fma(), latency=FMA_CYCLES, delays={"acc": 1}, x=x, w=w, acc=acc)["result"]


def run_add(a, b):
    return run_vectors(Add(), latency=ADD_CYCLES, a=a, b=b)["result"]


def convert(raw, fmt_code, half=Half.WHOLE):
    return run_vectors(
        OperandConverter(), latency=OPERAND_CYCLES, raw=raw, dtype=fmt_code, half=half, valid=1
    )["operand"]


def float_bits(value):
    return int(np.float32(value).view(np.uint32))


# Directed random vectors ------------------------------------------------------------------------


def significands(rng, n, bits):
    """Numbers below 2**bits: random, few ones, few zeros, the ends."""
    top = (1 << bits) - 1
    one, other = np.int64(1) << rng.integers(0, bits, (2, n)).astype(np.int64)
    run = (np.int64(1) << rng.integers(0, bits + 1, n)) - 1
    choices = [rng.integers(0, top + 1, n), one, one | other, top ^ one, run, top ^ run, one + run]
    return np.choose(rng.integers(0, len(choices), n), choices) & top


def directed(rng, n):
    """Operands and sums, weighted so that everything which can happen in the adder does."""
    # The product's exponent: anywhere, around the subnormals, around overflow.
    where = rng.integers(0, 4, n)
    exp = np.choose(
        where,
        [
            rng.integers(-298, 255, n),
            rng.integers(-180, -110, n),
            rng.integers(120, 132, n),
            rng.integers(-60, 60, n),
        ],
    )
    x_exp = np.clip(rng.integers(-149, 128, n), exp - 127, exp + 149)
    x_exp = np.clip(x_exp, -149, 127)
    w_exp = np.clip(exp - x_exp, -149, 127)
    x_sig, w_sig = (significands(rng, n, 11) | 0x800 for _ in range(2))
    plain = rng.random(n) < 0.15  # powers of two: ties
    x_sig, w_sig = np.where(plain, 0x800, x_sig), np.where(plain, 0x800, w_sig)
    rare = np.where(rng.random(n) < 0.08, 0.6, 0.02)  # specials come together
    kinds = [
        np.where(rng.random(n) < rare, rng.choice([NUMBER, INF, NAN, VOID], n), NUMBER)
        for _ in range(2)
    ]
    zeros = [rng.random(n) < rare for _ in range(2)]
    signs = rng.integers(0, 2, (3, n))
    operands = []
    for sig, e, sign, kind, zero in zip(
        (x_sig, w_sig), (x_exp, w_exp), signs, kinds, zeros, strict=False
    ):
        special = (kind == INF) | (kind == NAN)
        sig = np.where(special, 0x800, np.where(zero & (kind == NUMBER), 0, sig))
        operands.append(pack_operand(sig, e, sign, kind))

    # The sum so far: near the product, or anywhere.
    distance = np.where(rng.random(n) < 0.8, rng.integers(-30, 31, n), rng.integers(-60, 61, n))
    field = np.clip(x_exp + w_exp + 127 + distance, 0, 254)
    acc = signs[2] << 31 | field << 23 | significands(rng, n, 23)
    # Cancellation: the product itself, rounded, a few last places off, with the opposite sign.
    with np.errstate(all="ignore"):
        product = operand_value(operands[0])[0] * operand_value(operands[1])[0]
        near = np.float32(-product).view(np.uint32).astype(np.int64)
    off = np.where(rng.random(n) < 0.5, 0, rng.integers(-3, 4, n))
    near = np.where((near & 0x7FFFFFFF) < 0x7F000000, np.maximum(near + off, 0), near)
    acc = np.where(rng.random(n) < 0.12, near, acc)
    # Specials.
    special = rng.choice(
        [0, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF], n
    )
    acc = np.where(rng.random(n) < rare, special | signs[2] << 31, acc)
    return operands[0], operands[1], acc.astype(np.uint32)


def bins_of(x, w, acc, details):
    """Functional coverage: name to mask."""
    d = details
    plain = d["plain"]
    both = plain & (d["term"] > 0) & (d["acc"] > 0)
    bins = {
        f"term {shift:+} places from the sum": both & (d["gap"] == shift)
        for shift in range(-40, 41)
    }
    bins["term far above"] = both & (d["gap"] > 60)
    bins["term far below, sticky only"] = both & (d["gap"] < -60)
    for bits in range(1, 25):
        bins[f"{bits} bits cancelled"] = (
            both & d["opposite"] & ~d["zero"] & (d["cancelled"] == bits)
        )
    bins["exact cancellation"] = both & d["zero"]
    for odd, guard, sticky, sign in itertools.product((0, 1), repeat=4):
        bins[f"odd {odd} guard {guard} sticky {sticky} term sign {sign}"] = (
            both & (d["odd"] == odd) & (d["guard"] == guard) & (d["sticky"] == sticky)
            & ((unpack_operand(x)[2] ^ unpack_operand(w)[2]) == sign)
        )  # fmt: skip
    for name in ("carry", "subnormal", "into_normal", "overflow", "into_infinity"):
        bins[name] = both & d[name]
    bins["subnormal by rounding a product"] = plain & (d["acc"] == 0) & d["subnormal"] & d["up"]
    bins["product below half of the smallest"] = (
        plain & (d["acc"] == 0) & (d["term"] > 0) & (d["gap"] < -26)
    )

    def classes(word):
        sig, _, _, kind, _ = unpack_operand(word)
        return {
            "zero": (kind == NUMBER) & (sig == 0),
            "number": (kind == NUMBER) & (sig > 0),
            "inf": kind == INF,
            "nan": kind == NAN,
            "void": kind == VOID,
        }

    size = np.asarray(acc, np.int64) & 0x7FFFFFFF
    sums = {
        "zero": size == 0,
        "subnormal": (size > 0) & (size < 0x800000),
        "normal": (size >= 0x800000) & (size < 0x7F800000),
        "inf": size == 0x7F800000,
        "nan": size > 0x7F800000,
    }
    for (a, in_a), (b, in_b), (c, in_c) in itertools.product(
        classes(x).items(), classes(w).items(), sums.items()
    ):
        bins[f"{a} times {b} plus {c}"] = in_a & in_b & in_c
    return bins


@pytest.mark.verilator
def test_fused_sum_is_the_exact_one_rounded_once(rng):
    """1.6 million vectors, and proof that they reach every corner."""
    hits = {}
    for _ in range(4):
        x, w, acc = directed(rng, 400_000)
        details = {}
        expected = exact_fma(x, w, acc, details=details)
        assert_equal_bits(run_fma(x, w, acc), expected, x=x, w=w, acc=acc)
        for name, mask in bins_of(x, w, acc, details).items():
            hits[name] = hits.get(name, 0) + int(np.count_nonzero(mask))
    missed = [name for name, count in hits.items() if count == 0]
    assert not missed, f"never happened: {missed}"


def test_witness_agrees_with_rationals(rng):
    x, w, acc = directed(rng, 6_000)
    details = {}
    expected = exact_fma(x, w, acc, details=details)
    compared = 0
    for i in np.flatnonzero(details["plain"]):
        fields = [unpack_operand(word[i]) for word in (x, w)]
        term = float_fraction(0)
        term += int(fields[0][0] * fields[1][0])
        exponent = int(fields[0][1] + fields[1][1]) - 22
        term = term * (2**exponent) if exponent >= 0 else term / 2**-exponent
        if fields[0][2] ^ fields[1][2]:
            term = -term
        total = term + float_fraction(acc[i])
        if total != 0:
            assert round_fraction(total) == expected[i], (x[i], w[i], acc[i])
            compared += 1
    assert compared > 4_000


def soft(bits):
    return softfloat.Float32.from_bytes(int(bits).to_bytes(4, "big"))


@pytest.mark.verilator
def test_fused_sum_agrees_with_softfloat(rng):
    """Where both operands are binary32 numbers, SoftFloat is an independent judge."""
    x, w, acc = directed(rng, 120_000)
    factors = []
    usable = np.ones(x.shape, bool)
    for word in (x, w):
        value, void = operand_value(word)
        with np.errstate(all="ignore"):
            single = value.astype(np.float32)
        usable &= ~void & ((single == value) | np.isnan(value))
        factors.append(single.view(np.uint32))
    x, w, acc, a, b = (array[usable] for array in (x, w, acc, *factors))
    assert x.size > 60_000
    softfloat.set_rounding_mode(softfloat.RoundingMode.NEAR_EVEN)
    expected = np.array(
        [
            int.from_bytes(softfloat.f32_mul_add(soft(p), soft(q), soft(c)).to_bytes(), "big")
            for p, q, c in zip(a, b, acc, strict=True)
        ],
        np.uint32,
    )
    assert_equal_bits(run_fma(x, w, acc), expected, x=x, w=w, acc=acc)


# Binary32 times binary32 --------------------------------------------------------------------------


def run_fma32(a, b, c):
    return run_vectors(Fma32(), latency=FMA32_CYCLES, delays={"c": 2}, a=a, b=b, c=c)["result"]


def soft_fma(a, b, c):
    softfloat.set_rounding_mode(softfloat.RoundingMode.NEAR_EVEN)
    found = [
        int.from_bytes(softfloat.f32_mul_add(soft(p), soft(q), soft(r)).to_bytes(), "big")
        for p, q, r in zip(a, b, c, strict=True)
    ]
    return canonical(np.array(found, np.uint32).view(np.float32))


def directed32(rng, n):
    """Factors and addends: products anywhere, addends near them, and what cancels most of them."""
    exp = rng.choice([-170, -150, -130, -100, 0, 100, 126, 130], n) + rng.integers(-8, 9, n)
    a_exp = np.clip(rng.integers(-126, 128, n), exp - 127, exp + 126).clip(-126, 127)
    b_exp = (exp - a_exp).clip(-126, 127)
    sigs = [significands(rng, n, 23) for _ in range(3)]
    signs = rng.integers(0, 2, (3, n)) << 31
    tiny = rng.random((2, n)) < 0.06  # subnormals
    a, b = (
        (sign | np.where(small, 0, e + 127) << 23 | sig).astype(np.uint32)
        for sign, small, e, sig in zip(signs, tiny, (a_exp, b_exp), sigs, strict=False)
    )
    distance = np.where(rng.random(n) < 0.8, rng.integers(-52, 53, n), rng.integers(-99, 99, n))
    field = np.clip(a_exp + b_exp + 127 + distance, 0, 254)
    c = signs[2] | field << 23 | sigs[2]
    # All of the product but its low half, or all but what rounding adds.
    product = a.view(np.float32).astype(np.float64) * b.view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.float32(-product).view(np.uint32).astype(np.int64)
    near = near + np.where(rng.random(n) < 0.5, 0, rng.integers(-3, 4, n))
    c = np.where((rng.random(n) < 0.3) & ((near & 0x7FFFFFFF) < 0x7F000000), near, c)
    return a, b, (c & 0xFFFFFFFF).astype(np.uint32)


SPECIAL32 = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000,
             0x7F800001, 0x7FFFFFFF, 0x34000000, 0x00800001]  # fmt: skip


@pytest.mark.verilator
def test_wide_fused_sum_agrees_with_softfloat(rng):
    a, b, c = directed32(rng, 150_000)
    expected = soft_fma(a, b, c)
    assert_equal_bits(run_fma32(a, b, c), expected, a=a, b=b, c=c)
    # What is special about them happens.
    size = expected & 0x7FFFFFFF
    exact = a.view(np.float32).astype(np.float64) * b.view(np.float32).astype(np.float64)
    left = np.abs(exact + c.view(np.float32)) < np.abs(exact) * 2.0**-22
    for mask in (size == 0, (size > 0) & (size < 0x800000), size == 0x7F800000, left & (size > 0)):
        assert np.count_nonzero(mask) > 500


@pytest.mark.verilator
def test_wide_fused_sum_of_specials_agrees_with_softfloat():
    values = np.array(SPECIAL32, np.uint32)
    values = np.concatenate([values, values | np.uint32(1 << 31)])
    a, b, c = (grid.ravel() for grid in np.meshgrid(values, values, values))
    assert_equal_bits(run_fma32(a, b, c), soft_fma(a, b, c), a=a, b=b, c=c)


@pytest.mark.verilator
def test_wide_products_and_sums_are_those_of_numpy(rng):
    """Times one, and plus zero: each operation by itself."""
    a, b, c = directed32(rng, 200_000)
    one, minus_zero = np.full_like(a, 0x3F800000), np.full_like(a, 0x80000000)
    x, y, z = (array.view(np.float32) for array in (a, b, c))
    with np.errstate(all="ignore"):
        assert_equal_bits(run_fma32(a, one, c), canonical(x + z), a=a, c=c)
        product = x * y
    # -0 is the identity of addition; in round to nearest -0 + +0 is +0, so zeros keep their sign.
    assert_equal_bits(run_fma32(a, b, minus_zero), canonical(product), a=a, b=b)


# Formats, through the converter -----------------------------------------------------------------


def decoded(fmt):
    """Every code of a narrow format, its float32 value and its operand word."""
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    with np.errstate(all="ignore"):
        values = codes.astype(f"u{fmt.bytes}").view(fmt.dtype).astype(np.float32)
    return codes, values, convert(codes, fmt.code)


def accumulators():
    """Sums for the exhaustive FP8 runs: specials, and exponents around every product."""
    special = [0.0, 1.0, np.inf, np.nan, 2.0**-149, 2.0**-126, 3.4028235e38]
    spread = [(1 + k * 2.0**-23) * 2.0**e for e, k in
              ((-40, 5), (-30, 8388607), (-20, 1), (-12, 4194304), (-8, 3), (-3, 6291455), (2, 0),
               (6, 8388607), (10, 1), (15, 2097153), (20, 8388606), (24, 1), (28, 7), (31, 4194305),
               (34, 8388607), (38, 3))]  # fmt: skip
    values = np.array([*special, *spread], np.float32)
    return np.concatenate([values, -values])


@pytest.mark.verilator
@pytest.mark.parametrize("w_fmt", FP8, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("x_fmt", FP8, ids=lambda fmt: fmt.name)
def test_every_fp8_product(x_fmt, w_fmt):
    """All 65,536 pairs of a pair of formats on each of 46 sums.

    The product of two FP8 numbers is a binary32 number, so the machine's own binary32 arithmetic
    is the witness.
    """
    _, x_values, x_words = decoded(x_fmt)
    _, w_values, w_words = decoded(w_fmt)
    x, w = (grid.ravel() for grid in np.meshgrid(x_words, w_words, indexing="ij"))
    with np.errstate(all="ignore"):
        products = np.multiply.outer(x_values, w_values).ravel()
    for acc in accumulators():
        with np.errstate(all="ignore"):
            expected = canonical(acc + products)
        got = run_fma(x, w, acc.view(np.uint32))
        assert_equal_bits(got, expected, x=x, w=w, acc=acc.view(np.uint32))


@pytest.mark.verilator
def test_formats_may_change_with_every_element(rng):
    n = 300_000
    formats = np.array([fmt.code for fmt in NARROW])
    words, values = [], []
    for _ in range(2):
        code = rng.choice(formats, n)
        raw = rng.integers(0, 1 << 32, n, dtype=np.uint32)
        word = convert(raw, code)
        words.append(word)
        for fmt in NARROW:  # one at a time
            alone = raw[code == fmt.code]
            assert_equal_bits(word[code == fmt.code], convert(alone, fmt.code), raw=alone)
        values.append(operand_value(word)[0])
    with np.errstate(all="ignore"):
        product = np.float32(values[0] * values[1]).view(np.uint32).astype(np.int64)
    near = np.clip((product >> 23 & 0xFF) + rng.integers(-30, 31, n), 0, 254) << 23
    acc = (rng.integers(0, 1 << 32, n) & 0x807FFFFF | near).astype(np.uint32)
    assert_equal_bits(run_fma(*words, acc), exact_fma(*words, acc), x=words[0], w=words[1], acc=acc)


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", [BF16, FP16, *FP8], ids=lambda fmt: fmt.name)
def test_sum_far_above_and_far_below_the_product(fmt):
    """cvfpu 86: a shift amount too narrow for the distance. Every distance is tried."""
    codes, values, words = decoded(fmt)
    numbers = np.isfinite(values) & (values != 0)
    picks = codes[numbers][:: max(1, np.count_nonzero(numbers) // 40)]
    picks = np.append(picks, [codes[numbers][np.abs(values[numbers]).argmax()],
                              codes[numbers][np.abs(values[numbers]).argmin()]])  # fmt: skip
    exponents = np.arange(1 << 8) << 23
    sums = np.concatenate([exponents | mantissa for mantissa in (0, 1, 0x400000, 0x7FFFFF)])
    sums = np.concatenate([sums, sums | 0x80000000]).astype(np.uint32)
    x, w, acc = (
        grid.ravel() for grid in np.meshgrid(words[picks], words[picks], sums, indexing="ij")
    )
    assert_equal_bits(run_fma(x, w, acc), exact_fma(x, w, acc), x=x, w=w, acc=acc)


# Sums of a few terms ----------------------------------------------------------------------------


def fma_of(a, b, acc, fmt=BF16):
    """One fused sum of numbers that the format holds."""
    raw = np.array([float_bits(v) >> (16 if fmt is BF16 else 0) for v in (a, b)], np.uint32)
    x, w = convert(raw, fmt.code)
    return int(run_fma(np.array([x]), np.array([w]), np.uint32(acc))[0])


@pytest.mark.verilator
def test_first_term_is_added_to_plus_zero():
    """rsd 92: 0 times a negative number is -0, but +0 plus it is +0; from -0 it stays -0."""
    assert fma_of(0.0, -1.5, 0x00000000) == 0x00000000
    assert fma_of(0.0, -1.5, 0x80000000) == 0x80000000
    assert fma_of(0.0, 2.0**-149, 0x00000000, TF32) == 0x00000000
    # cvfpu 54: the product of +0 and a positive number never turns negative.
    assert fma_of(0.0, 6.5e-4, 0x00000000) == 0x00000000


@pytest.mark.verilator
def test_sum_starts_from_the_accumulator():
    """pto-isa 280: from 2**24, adding 1 twice stays there; adding them first would not."""
    acc = float_bits(2.0**24)
    for _ in range(2):
        acc = fma_of(1.0, 1.0, acc)
    assert acc == float_bits(2.0**24)


@pytest.mark.verilator
@pytest.mark.parametrize(
    ("a", "b", "c", "result"),
    [(37, 11, -3, 404), (-37, 11, 3, -404), (37, 11, 3, 410), (-37, 11, -3, -410),
     (11, 3, -37, -4), (-11, 3, 37, 4), (11, 3, 37, 70), (-11, 3, -37, -70)],
)  # fmt: skip
def test_all_four_sign_forms(a, b, c, result):
    """PULP fpu 13."""
    assert fma_of(a, b, float_bits(c)) == float_bits(result)


@pytest.mark.verilator
def test_equal_products_of_a_column_add_up():
    """gemmini 401: four times 1.1953125 squared is 5.715087890625, not a bfloat16 remnant."""
    acc = 0
    for _ in range(4):
        acc = fma_of(1.1953125, 1.1953125, acc)
    assert acc == float_bits(5.715087890625)


@pytest.mark.verilator
def test_a_product_is_never_rounded_on_its_own():
    """openlibm 160, for operands of 12 bits, whose products round only where they underflow.

    1.5 units of the smallest subnormal, rounded first, would be 2 units.
    """
    x, w = pack_operand([0xC00], [-75], [0]), pack_operand([0x800], [-74], [0])
    for acc, result in ((1, 2), (2, 4), (3, 4), (0x80000001, 0), (0x80000002, 0x80000000)):
        assert int(run_fma(x, w, np.uint32(acc))[0]) == result, hex(acc)
    # Around a tie, the last bit of the product decides.
    one = pack_operand([0x800], [0], [0])
    for sig, exp, result in (
        (0xFFF, -25, 0x3F800001),
        (0x800, -24, 0x3F800002),
        (0x801, -24, 0x3F800002),
    ):
        term = pack_operand([sig], [exp], [0])
        assert int(run_fma(term, one, np.uint32(0x3F800001))[0]) == result, hex(sig)


@pytest.mark.verilator
def test_every_nan_is_the_canonical_one():
    """Flute 16, tt-metal 52141: payloads, signalling NaN, Inf - Inf, Inf times 0."""
    one = pack_operand([0x800], [0], [0])
    zero = pack_operand([0], [0], [0])
    inf = pack_operand([0x800], [0], [0], [INF])
    nan = pack_operand([0x800], [0], [1], [NAN])
    void = pack_operand([0], [0], [0], [VOID])
    for x, w, acc in (
        (one, one, 0x7FC12345), (one, one, 0x7FA00000), (one, one, 0xFFC00000),
        (zero, one, 0xFF800001), (inf, one, 0xFF800000), (inf, zero, 0), (zero, inf, 0),
        (nan, one, 0), (one, nan, 0x7F800000),
        (nan, inf, 0), (nan, zero, 0), (void, one, 0x7F800001), (one, void, 0xFFFFFFFF),
    ):  # fmt: skip
        assert int(run_fma(x, w, np.uint32(acc))[0]) == CANONICAL_NAN, (x, w, hex(acc))
    for a, b in (
        (0x7F800000, 0xFF800000),
        (0x7FC12345, 0),
        (0, 0x7FA00000),
        (0xFF800000, 0x7F800000),
    ):
        assert int(run_add(np.uint32([a]), np.uint32([b]))[0]) == CANONICAL_NAN


@pytest.mark.verilator
def test_void_contributes_nothing(rng):
    """Whatever else the words say, and whatever the other operand is: -0 stays -0."""
    n = 50_000
    x, w, acc = directed(rng, n)
    garbage = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    void = garbage | np.uint32(VOID << 22)
    acc[:4] = [0x80000000, 0, 0x80000001, 0xFF800000]
    nan = (acc & 0x7FFFFFFF) > 0x7F800000
    expected = np.where(nan, np.uint32(CANONICAL_NAN), acc)
    for first, second in ((void, w), (x, void), (void, void)):
        assert_equal_bits(run_fma(first, second, acc), expected, x=first, w=second, acc=acc)


@pytest.mark.verilator
def test_exponent_of_a_zero_does_not_matter(rng):
    n = 50_000
    zero = pack_operand(0, rng.integers(-256, 256, n), rng.integers(0, 2, n))
    w, _, acc = directed(rng, n)
    assert_equal_bits(run_fma(zero, w, acc), exact_fma(zero, w, acc), x=zero, w=w, acc=acc)


# Addition ---------------------------------------------------------------------------------------


def edge_values():
    """Binary32 codes: every boundary of the exponent with every boundary of the significand."""
    exponents = [
        0,
        1,
        2,
        23,
        24,
        25,
        103,
        104,
        125,
        126,
        127,
        128,
        150,
        151,
        152,
        230,
        252,
        253,
        254,
        255,
    ]
    fractions = [0, 1, 2, 3, 0x3FFFFF, 0x400000, 0x400001, 0x555555, 0x7FFFFD, 0x7FFFFE, 0x7FFFFF]
    codes = [e << 23 | f for e in exponents for f in fractions]
    return np.array([code | s << 31 for s in (0, 1) for code in codes], np.uint32)


@pytest.mark.verilator
def test_addition_is_that_of_the_host(rng):
    """193,600 crossed edges and a million random pairs, against the machine's own FPU."""
    edges = edge_values()
    a, b = (grid.ravel() for grid in np.meshgrid(edges, edges, indexing="ij"))
    n = 1_000_000
    ra = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    rb = rng.integers(0, 1 << 32, n).astype(np.int64)
    near = np.clip((ra >> 23 & 0xFF).astype(np.int64) + rng.integers(-27, 28, n), 0, 255) << 23
    rb = np.where(rng.random(n) < 0.8, rb & 0x807FFFFF | near, rb)
    rb = np.where(rng.random(n) < 0.1, (ra ^ 0x80000000) + rng.integers(0, 9, n), rb) & 0xFFFFFFFF
    a, b = np.concatenate([a, ra]), np.concatenate([b, rb.astype(np.uint32)])
    with np.errstate(all="ignore"):
        host = canonical(a.view(np.float32) + b.view(np.float32))
    got = run_add(a, b)
    assert_equal_bits(got, host, a=a, b=b)
    assert_equal_bits(got, exact_add(a, b), a=a, b=b)


@pytest.mark.verilator
def test_addition_agrees_with_softfloat(rng):
    edges = edge_values()
    a, b = rng.choice(edges, (2, 60_000))
    softfloat.set_rounding_mode(softfloat.RoundingMode.NEAR_EVEN)
    expected = np.array(
        [
            int.from_bytes(softfloat.f32_add(soft(p), soft(q)).to_bytes(), "big")
            for p, q in zip(a, b, strict=True)
        ],
        np.uint32,
    )
    assert_equal_bits(run_add(a, b), expected, a=a, b=b)


@pytest.mark.verilator
def test_subnormals_add_exactly():
    """snax_cluster 527: smallest plus smallest; largest subnormal plus smallest is normal."""
    a = np.uint32([0x00000001, 0x007FFFFF, 0x80000001, 0x007FFFFF])
    b = np.uint32([0x00000001, 0x00000001, 0x00000001, 0x807FFFFE])
    assert_equal_bits(run_add(a, b), [0x00000002, 0x00800000, 0x00000000, 0x00000001])
    # The same of the smallest formats, through the array: the fp16 subnormals 2**-24 and 1023/1024.
    smallest, largest = convert(np.uint32([0x0001, 0x03FF]), FP16.code)
    one = pack_operand([0x800, 0x800], [0, 0], [0, 0])
    got = run_fma(np.uint32([smallest, largest]), one, np.uint32(float_bits(2.0**-24)))
    assert_equal_bits(got, [float_bits(2.0**-23), float_bits(2.0**-14)])


# Timing -----------------------------------------------------------------------------------------


def test_latency_and_throughput():
    """Three and two cycles, one result per cycle, as the docstrings say."""
    one = {"sig": 0x800, "exp": 0, "sign": 0, "kind": Kind.NUMBER, "pad": 0}
    dut = Fma()
    seen = []

    async def bench(ctx):
        for cycle in range(7):
            ctx.set(dut.x, {**one, "exp": cycle})
            ctx.set(dut.w, one)
            ctx.set(dut.acc, float_bits(1.0) if cycle else 0)
            seen.append(ctx.get(dut.result))
            await ctx.tick()

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert seen[FMA_CYCLES:] == [float_bits(1.0 + 2.0**cycle) for cycle in range(4)]

    add = Add()
    sums = []

    async def bench_add(ctx):
        for cycle in range(6):
            ctx.set(add.a, float_bits(cycle))
            ctx.set(add.b, float_bits(0.5))
            sums.append(ctx.get(add.result))
            await ctx.tick()

    sim = Simulator(add)
    sim.add_clock(1e-6)
    sim.add_testbench(bench_add)
    sim.run()
    assert sums[ADD_CYCLES:] == [float_bits(cycle + 0.5) for cycle in range(4)]


def test_an_operand_is_one_word():
    assert Operand.as_shape().size == 32
