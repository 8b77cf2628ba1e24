"""Casts against ml_dtypes, numpy, SoftFloat and gfloat: every narrow code, every midpoint."""

import gfloat
import gfloat.formats
import numpy as np
import pytest
import softfloatpy as softfloat
from amaranth.sim import Simulator
from makalu.rtl.arch.formats import (
    BF16,
    FORMATS,
    FP8_E3M4,
    FP8_E4M3,
    FP8_E4M3FN,
    FP8_E5M2,
    FP16,
    FP32,
    INT8,
    INT16,
    INT32,
    TF32,
    UINT8,
    UINT16,
    UINT32,
)
from makalu.rtl.arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES, CastIn, CastOut

from .support import assert_equal_bits, run_vectors
from .test_operand import tf32_by_bits, words32

SMALL_FLOATS = (BF16, FP16, FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP8_E3M4)
FLOATS = (FP32, TF32, *SMALL_FLOATS)
INTEGERS = (INT8, UINT8, INT16, UINT16, INT32, UINT32)
NANS = {
    FP32: 0x7FC00000, TF32: 0x7FC00000, BF16: 0x7FC0, FP16: 0x7E00, FP8_E4M3: 0x7C,
    FP8_E4M3FN: 0x7F, FP8_E5M2: 0x7E, FP8_E3M4: 0x78,
}  # fmt: skip
LARGEST = {
    FP32: 0x7F7FFFFF, TF32: 0x7F7FE000, BF16: 0x7F7F, FP16: 0x7BFF, FP8_E4M3: 0x77,
    FP8_E4M3FN: 0x7E, FP8_E5M2: 0x7B, FP8_E3M4: 0x6F,
}  # fmt: skip


def cast_in(raw, dtype):
    return run_vectors(CastIn(), latency=CAST_IN_CYCLES, raw=raw, dtype=dtype)["value"]


def cast_out(value, dtype, saturate=0):
    return run_vectors(
        CastOut(), latency=CAST_OUT_CYCLES, value=value, dtype=dtype, saturate=saturate
    )["raw"]


def single(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def bits_of(values):
    return np.asarray(values, np.float32).view(np.uint32)


def ids(fmt):
    return fmt.name


def expected_float(bits, fmt, saturate):
    """Codes by ml_dtypes (numpy for FP16, bits for TF32); NaN and clamping by the contract."""
    value = single(bits)
    sign = (bits >> 31).astype(np.uint32) << (fmt.bits - 1)
    with np.errstate(all="ignore"):
        if fmt is FP32:
            codes = bits
        elif fmt is TF32:
            codes = tf32_by_bits(bits)
        else:
            codes = value.astype(fmt.dtype).view(f"u{fmt.bytes}").astype(np.uint32)
    nan = np.isnan(value)
    if fmt in (FP32, TF32, FP16):  # numpy keeps payloads
        codes = np.where(nan, NANS[fmt] | sign, codes)
    elif nan.any():  # ml_dtypes' own NaN is what the table above says
        assert_equal_bits(codes[nan], (NANS[fmt] | sign)[nan])
    if saturate:
        beyond = ~nan & (codes - sign > LARGEST[fmt])
        codes = np.where(beyond, LARGEST[fmt] | sign, codes)
    return codes.astype(np.uint32)


def midpoints(fmt):
    """Binary32 codes halfway between neighbours of a float format, and one to either side."""
    top = LARGEST[fmt] >> (13 if fmt is TF32 else 0)
    codes = np.arange(0, top + 1, dtype=np.uint32)
    if fmt is TF32:
        values = single(codes << 13).astype(np.float64)
        beyond = 2.0**128
    else:
        with np.errstate(all="ignore"):
            values = codes.astype(f"u{fmt.bytes}").view(fmt.dtype).astype(np.float64)
        beyond = 2 * values[-1] - values[-2]
    middle = (values + np.append(values[1:], beyond)) / 2
    bits = bits_of(middle)
    assert (single(bits) == middle).all(), "a midpoint is not a binary32 number"
    bits = np.concatenate([bits - 1, bits, bits + 1, bits_of(values)])
    return np.concatenate([bits, bits | 0x80000000])


# Casts in ---------------------------------------------------------------------------------------


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", [*SMALL_FLOATS, INT8, UINT8, INT16, UINT16], ids=ids)
def test_every_narrow_code_widens_exactly(fmt, rng):
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    above = rng.integers(0, 1 << 32, codes.size, dtype=np.uint32) >> fmt.bits << fmt.bits
    with np.errstate(all="ignore"):
        values = codes.astype(f"u{fmt.bytes}").view(fmt.dtype).astype(np.float32)
    expected = np.where(
        np.isnan(values), 0x7FC00000 | codes >> (fmt.bits - 1) << 31, values.view(np.uint32)
    )
    value = cast_in(codes | above, fmt.code)
    assert_equal_bits(value, expected, code=codes)
    # And back: nothing is lost but NaN payloads.
    nan = np.isnan(values)
    assert_equal_bits(cast_out(value, fmt.code)[~nan], codes[~nan])


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", [INT32, UINT32], ids=ids)
def test_wide_integers_round_to_nearest_even(fmt, rng):
    powers = (1 << np.arange(32))[:, None] + np.arange(-300, 301)
    ties = (1 << np.arange(24, 32))[:, None] + (1 << np.arange(0, 8))[None, :]
    codes = np.concatenate(
        [powers.ravel(), -powers.ravel(), ties.ravel(), rng.integers(0, 1 << 32, 2_000_000)]
    )
    codes = (codes & 0xFFFFFFFF).astype(np.uint32)
    expected = bits_of(codes.view(fmt.dtype).astype(np.float32))
    assert_equal_bits(cast_in(codes, fmt.code), expected, code=codes)

    judge = softfloat.i32_to_f32 if fmt.signed else softfloat.ui32_to_f32
    number = softfloat.Int32 if fmt.signed else softfloat.UInt32
    softfloat.set_rounding_mode(softfloat.RoundingMode.NEAR_EVEN)
    some = codes[::100]
    softly = [
        int.from_bytes(judge(number.from_bytes(int(c).to_bytes(4, "big"))).to_bytes(), "big")
        for c in some
    ]
    assert_equal_bits(cast_in(some, fmt.code), softly, code=some)


@pytest.mark.verilator
def test_binary32_passes_and_tf32_rounds(rng):
    codes = words32(rng, 2_000_000)
    for fmt in (FP32, TF32):
        assert_equal_bits(cast_in(codes, fmt.code), expected_float(codes, fmt, False), code=codes)


# Casts out --------------------------------------------------------------------------------------


@pytest.mark.verilator
@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
@pytest.mark.parametrize("fmt", FLOATS, ids=ids)
def test_rounds_once_to_every_float_format(fmt, saturate, rng):
    """All midpoints and their neighbours, every exponent with edge significands, random codes."""
    n = 2_000_000
    near = np.clip(rng.integers(-30 - fmt.bias, fmt.bias + 4, n // 2) + 127, 0, 255) << 23
    random = rng.integers(0, 1 << 32, n // 2) & 0x807FFFFF | near
    vectors = [words32(rng, n // 2), random.astype(np.uint32)]
    if fmt is not FP32:
        vectors.append(midpoints(fmt))
    bits = np.concatenate(vectors)
    expected = expected_float(bits, fmt, saturate)
    assert_equal_bits(cast_out(bits, fmt.code, saturate), expected, value=bits)


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", INTEGERS, ids=ids)
def test_rounds_to_integers_and_saturates(fmt, rng):
    n = 1_000_000
    near = rng.integers(120, 162, n) << 23
    random = (rng.integers(0, 1 << 32, n) & 0x807FFFFF | near).astype(np.uint32)
    halves = bits_of(np.arange(-70_000, 70_001) / 2)
    bits = np.concatenate([words32(rng, n), random, halves, halves + 1, halves - 1])
    with np.errstate(all="ignore"):
        rounded = np.rint(single(bits).astype(np.float64))
    clipped = np.where(np.isnan(rounded), 0, np.clip(rounded, fmt.min, fmt.max)).astype(np.int64)
    expected = (clipped & ((1 << fmt.bits) - 1)).astype(np.uint32)
    for saturate in (0, 1):
        assert_equal_bits(cast_out(bits, fmt.code, saturate), expected, value=bits)


@pytest.mark.verilator
def test_rounding_agrees_with_softfloat(rng):
    bits = np.concatenate(
        [rng.choice(midpoints(FP16), 40_000), rng.choice(midpoints(BF16), 40_000)]
    )
    bits = bits[~np.isnan(single(bits))]
    softfloat.set_rounding_mode(softfloat.RoundingMode.NEAR_EVEN)
    for fmt, judge in ((FP16, softfloat.f32_to_f16), (BF16, softfloat.f32_to_bf16)):
        expected = [
            int.from_bytes(
                judge(softfloat.Float32.from_bytes(int(b).to_bytes(4, "big"))).to_bytes(), "big"
            )
            for b in bits
        ]
        assert_equal_bits(cast_out(bits, fmt.code), expected, value=bits)


@pytest.mark.verilator
@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
@pytest.mark.parametrize(
    ("fmt", "info"),
    [
        (FP8_E4M3FN, gfloat.formats.format_info_ocp_e4m3),
        (FP8_E5M2, gfloat.formats.format_info_ocp_e5m2),
    ],
    ids=lambda item: getattr(item, "name", ""),
)
def test_rounding_agrees_with_gfloat(fmt, info, saturate):
    bits = midpoints(fmt)
    expected = []
    for value in single(bits):
        rounded = gfloat.round_float(info, float(value), sat=bool(saturate))
        expected.append(gfloat.encode_float(info, rounded))
    nan = np.isnan(single(cast_in(np.uint32(expected), fmt.code)))
    got = cast_out(bits, fmt.code, saturate)
    assert_equal_bits(got[~nan], np.uint32(expected)[~nan], value=bits[~nan])
    assert np.isnan(single(cast_in(got, fmt.code)))[nan].all()


@pytest.mark.verilator
def test_format_and_mode_may_change_with_every_value(rng):
    """cvfpu 137: each value is cast by the mode that came with it."""
    n = 400_000
    bits = rng.integers(0, 1 << 32, n, dtype=np.uint32)
    bits[::2] = bits[::2] & 0x807FFFFF | rng.integers(100, 160, n // 2).astype(np.uint32) << 23
    dtype = rng.choice([fmt.code for fmt in FORMATS], n)
    saturate = rng.integers(0, 2, n)
    mixed_out, mixed_in = cast_out(bits, dtype, saturate), cast_in(bits, dtype)
    for fmt in FORMATS:
        mine = dtype == fmt.code
        assert_equal_bits(mixed_in[mine], cast_in(bits[mine], fmt.code), code=bits[mine])
        for mode in (0, 1):
            these = mine & (saturate == mode)
            assert_equal_bits(
                mixed_out[these], cast_out(bits[these], fmt.code, mode), value=bits[these]
            )


@pytest.mark.verilator
def test_code_of_no_format_gives_zero(rng):
    bits = rng.integers(0, 1 << 32, 1_000, dtype=np.uint32)
    for code in {*range(16)} - {fmt.code for fmt in FORMATS}:
        assert not cast_out(bits, code).any()
        assert not cast_in(bits, code).any()


# Reports from elsewhere -------------------------------------------------------------------------

REPORTS = {
    "464 is the tie that goes down to 448 in e4m3fn": (FP8_E4M3FN, 0, [
        (448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7F), (1000.0, 0x7F), (-1000.0, 0xFF),
        (np.inf, 0x7F), (-np.inf, 0xFF),
    ]),
    "e4m3fn saturates on demand": (FP8_E4M3FN, 1, [
        (448.0, 0x7E), (464.0, 0x7E), (465.0, 0x7E), (1000.0, 0x7E), (-1000.0, 0xFE),
        (np.inf, 0x7E), (-np.inf, 0xFE), (466.0, 0x7E),
    ]),
    "carry out of the fraction is kept": (FP8_E4M3FN, 0, [
        (126.24, 0x70), (7.9999, 0x50), (1.96875, 0x40),
    ]),
    "no detour through fp16": (FP8_E4M3FN, 0, [(single([0x3F880001])[0], 0x39)]),
    "tie to even in e5m2": (FP8_E5M2, 0, [(1.125, 0x3C)]),
    "nan with payload in dropped bits stays nan": (BF16, 0, [
        (0x7F800001, 0x7FC0), (0xFF800001, 0xFFC0), (0x7FFFFFFF, 0x7FC0), (0xFFFFFFFF, 0xFFC0),
    ]),
    "the largest binary32 is infinite in bf16": (BF16, 0, [(0x7F7FFFFF, 0x7F80)]),
    "the largest binary32 saturates in bf16": (BF16, 1, [(0x7F7FFFFF, 0x7F7F)]),
    "fp16 subnormals round to even": (FP16, 0, [
        (0x33000000, 0x0000), (0x33000001, 0x0001), (0x34200000, 0x0002), (0x34200001, 0x0003),
        (0x34600000, 0x0004), (0x40001000, 0x4000), (0xB3000000, 0x8000),
    ]),
    "fp16 subnormals are not flushed": (FP16, 0, [
        (2.0**-15, 0x0200), (2.0**-24, 0x0001), (3 * 2.0**-25, 0x0002),
    ]),
    "just below a power of two": (FP16, 0, [
        (0.4999999902343750, 0x3800), (1.9999999902343750, 0x4000),
    ]),
    "integers by nearest even": (INT32, 0, [
        (0.5, 0), (-0.5, 0), (0.49999997, 0), (-0.49999997, 0), (1.5, 2), (2.5, 2),
        (2147483520.0, 2147483520), (2147483648.0, 0x7FFFFFFF), (-2147483648.0, 0x80000000),
        (np.inf, 0x7FFFFFFF), (-np.inf, 0x80000000), (0x7FC00000, 0), (0xFFC00000, 0),
    ]),
    "negative to unsigned is zero": (UINT8, 0, [
        (-0.4, 0), (-1.0, 0), (-np.inf, 0), (255.5, 255), (254.5, 254), (256.0, 255),
    ]),
}  # fmt: skip


@pytest.mark.verilator
@pytest.mark.parametrize("name", REPORTS)
def test_reported_elsewhere(name):
    """Integers stand for binary32 codes, floats for values."""
    fmt, saturate, cases = REPORTS[name]
    bits = np.array(
        [v if isinstance(v, int) else int(bits_of([v])[0]) for v, _ in cases], np.uint32
    )
    expected = np.array([code for _, code in cases], np.uint32)
    assert_equal_bits(cast_out(bits, fmt.code, saturate), expected, value=bits)


@pytest.mark.verilator
def test_sum_of_two_bf16_rounds_after_accumulation():
    """oneDNN 756: 1 + 2**-8 + 2**-8 is 1.0078125 in bf16 when it is rounded at the end."""
    total = np.float32(1 + 2.0**-8) + np.float32(2.0**-8)
    assert_equal_bits(cast_out(bits_of([total]), BF16.code), [0x3F81])


# Timing -----------------------------------------------------------------------------------------


def test_latency_and_throughput():
    for dut, ports, cases, cycles in (
        (CastIn(), ("raw", "dtype", "value"), [(0xFF, 9, 0xBF800000), (0x3C00, 4, 0x3F800000),
                                               (0x7F, 10, 0x42FE0000)], CAST_IN_CYCLES),
        (CastOut(), ("value", "dtype", "raw"), [(0xBF800000, 9, 0xFF), (0x3F800000, 4, 0x3C00),
                                                (0x42FE0000, 10, 0x7F)], CAST_OUT_CYCLES),
    ):  # fmt: skip
        source, dtype, result = (getattr(dut, port) for port in ports)
        seen = []

        async def bench(ctx, cases=cases, source=source, dtype=dtype, result=result, seen=seen):
            for cycle in range(len(cases) + 2):
                word, code, _ = cases[min(cycle, len(cases) - 1)]
                ctx.set(source, word)
                ctx.set(dtype, code)
                seen.append(ctx.get(result))
                await ctx.tick()

        sim = Simulator(dut)
        sim.add_clock(1e-6)
        sim.add_testbench(bench)
        sim.run()
        assert seen[cycles:] == [expected for _, _, expected in cases]
