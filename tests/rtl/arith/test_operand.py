"""The converter at the edge of the array against ml_dtypes, numpy and bit-level rounding."""

import gfloat
import gfloat.formats
import numpy as np
import pytest
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
    MATMUL_FORMATS,
    TF32,
)
from makalu.rtl.arch.isa import Half
from makalu.rtl.arith.operand import OPERAND_CYCLES, Kind, OperandConverter, void

from .exact import INF, NAN, NUMBER, VOID, operand_value, pack_operand, unpack_operand
from .support import assert_equal_bits, run_vectors

NARROW = (BF16, FP16, FP8_E4M3, FP8_E4M3FN, FP8_E5M2, FP8_E3M4)


def convert(raw, dtype, half=Half.WHOLE, valid=1):
    return run_vectors(
        OperandConverter(), latency=OPERAND_CYCLES, raw=raw, dtype=dtype, half=half, valid=valid
    )["operand"]


def assert_values(words, values, **context):
    """Operand words hold exactly ``values`` (float64), in the canonical form."""
    got, is_void = operand_value(words)
    sig, exp, sign, kind, pad = unpack_operand(words)
    assert not is_void.any()
    same = (got == values) & (np.signbit(got) == np.signbit(values)) | np.isnan(got) & np.isnan(
        values
    )
    assert_equal_bits(same, np.ones_like(same), word=words, **context)
    assert (sig[(kind != NUMBER) | (sig != 0)] >= 0x800).all(), "not normalised"
    assert (sig[kind != NUMBER] == 0x800).all()
    assert (exp[(kind != NUMBER) | (sig == 0)] == 0).all()
    assert (sign[kind == NAN] == 0).all()
    assert (pad == 0).all()


def tf32_by_bits(bits):
    """Ties-to-even rounding of binary32 ``bits`` to 10 fraction bits, NaN aside."""
    bits = np.asarray(bits, np.int64)
    rest, units = bits & 0x1FFF, bits >> 13
    units += (rest > 0x1000) | ((rest == 0x1000) & (units & 1 == 1))
    return (units << 13).astype(np.uint32)


def words32(rng, n):
    """Every exponent with edge significands, then random codes."""
    edges = {0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FE000, 0x7FEFFF, 0x7FF000, 0x7FF001}
    edges |= {(1 << k) + 1 for k in range(12)}
    edges |= {1 << k for k in range(23)} | {(1 << k) - 1 for k in range(24)}
    edges |= {0x7FFFFF ^ (1 << k) for k in range(23)}
    fractions = np.array(sorted(edges))
    grid = (np.arange(256)[:, None] << 23 | fractions).ravel()
    grid = np.concatenate([grid, grid | 0x80000000]).astype(np.uint32)
    return np.concatenate([grid, rng.integers(0, 1 << 32, n, dtype=np.uint32)])


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_every_code_of_the_narrow_formats_is_exact(fmt, rng):
    codes = np.arange(1 << fmt.bits, dtype=np.uint32)
    above = rng.integers(0, 1 << 32, codes.size, dtype=np.uint32) >> fmt.bits << fmt.bits
    with np.errstate(all="ignore"):
        values = codes.astype(f"u{fmt.bytes}").view(fmt.dtype).astype(np.float64)
    assert_values(convert(codes | above, fmt.code), values, code=codes)
    # Nothing lies below the high half.
    assert_values(convert(codes | above, fmt.code, Half.HI), values, code=codes)
    assert (convert(codes | above, fmt.code, Half.LO) == void().as_bits()).all()


@pytest.mark.verilator
@pytest.mark.parametrize(
    ("fmt", "info"),
    [
        (FP16, gfloat.formats.format_info_binary16),
        (BF16, gfloat.formats.format_info_bfloat16),
        (FP8_E4M3FN, gfloat.formats.format_info_ocp_e4m3),
        (FP8_E5M2, gfloat.formats.format_info_ocp_e5m2),
    ],
    ids=lambda item: getattr(item, "name", ""),
)
def test_codes_agree_with_gfloat(fmt, info):
    codes = np.arange(0, 1 << fmt.bits, 1 if fmt.bits == 8 else 37, dtype=np.uint32)
    values = np.array([gfloat.decode_float(info, int(code)).fval for code in codes])
    assert_values(convert(codes, fmt.code), values, code=codes)


@pytest.mark.verilator
@pytest.mark.parametrize("fmt", [TF32, FP32], ids=lambda fmt: fmt.name)
def test_tf32_rounds_to_nearest_even(fmt, rng):
    """Every exponent with edge significands and 2**24 codes; a whole FP32 is used as TF32."""
    for _ in range(8):
        raw = words32(rng, 1 << 21)
        with np.errstate(all="ignore"):
            stored = raw.view(np.float32)
            values = tf32_by_bits(raw).view(np.float32).astype(np.float64)
            values = np.where(np.isnan(stored), np.nan, values)
            assert_values(convert(raw, fmt.code), values, raw=raw)
            assert_values(convert(raw[:50_000], fmt.code, 3), values[:50_000], raw=raw[:50_000])


@pytest.mark.verilator
def test_tf32_rounding_has_no_bias(rng):
    """triton 4574, cutlass 1289: truncation, or ties away, would show in the mean error."""
    cases = {0x3F801000: 0x3F800000, 0x3F803000: 0x3F804000, 0x3F801001: 0x3F802000}
    words = convert(np.uint32(list(cases)), TF32.code)
    expected = np.uint32(list(cases.values())).view(np.float32).astype(np.float64)
    assert_values(words, expected)

    n = 100_000
    raw = (rng.integers(0, 1 << 23, n) | 0x3F800000).astype(np.uint32)
    raw[: n // 4] = raw[: n // 4] & ~np.uint32(0x1FFF) | 0x1000  # ties
    error = operand_value(convert(raw, TF32.code))[0] - raw.view(np.float32)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(n)


@pytest.mark.verilator
def test_tf32_may_carry_into_infinity():
    raw = np.uint32([0x7F7FEFFF, 0x7F7FF000, 0x7F7FFFFF, 0xFF7FFFFF])
    top = float(np.uint32(0x7F7FE000).view(np.float32))
    assert_values(convert(raw, TF32.code), np.array([top, np.inf, np.inf, -np.inf]))


@pytest.mark.verilator
def test_halves_of_binary32_add_up_exactly(rng):
    """Every exponent with edge significands and 2**24 codes."""
    for _ in range(8):
        raw = words32(rng, 1 << 21)
        high, low = convert(raw, FP32.code, Half.HI), convert(raw, FP32.code, Half.LO)
        with np.errstate(all="ignore"):
            x = raw.view(np.float32).astype(np.float64)
            cleared = (raw & np.uint32(0xFFFFF000)).view(np.float32).astype(np.float64)
        cleared = np.where(np.isnan(x), np.nan, cleared)
        assert_values(high, cleared, raw=raw)

        _, is_void = operand_value(low)
        finite = np.isfinite(x)
        with np.errstate(all="ignore"):
            rest = np.where(finite, x - cleared, 0.0)
        assert_equal_bits(is_void, rest == 0, raw=raw, word=low)
        assert (low[is_void] == void().as_bits()).all()
        assert_values(low[~is_void], rest[~is_void])


@pytest.mark.verilator
def test_nan_with_payload_in_dropped_bits_stays_nan():
    """dotnet 130583: a truncated NaN must not turn into infinity."""
    raw = np.uint32([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800FFF])
    for fmt, half in ((FP32, Half.HI), (TF32, Half.WHOLE), (FP32, Half.WHOLE)):
        assert (unpack_operand(convert(raw, fmt.code, half))[3] == NAN).all()
    assert (unpack_operand(convert(raw, FP32.code, Half.LO))[3] == VOID).all()
    inf = np.uint32([0x7F800000, 0xFF800000])
    assert (unpack_operand(convert(inf, FP32.code, Half.HI))[3] == INF).all()
    assert (unpack_operand(convert(inf, FP32.code, Half.LO))[3] == VOID).all()


@pytest.mark.verilator
def test_without_valid_or_format_the_operand_is_void(rng):
    raw = rng.integers(0, 1 << 32, 4_000, dtype=np.uint32)
    empty = void().as_bits()
    for fmt in MATMUL_FORMATS:
        for half in Half:
            assert (convert(raw, fmt.code, half, valid=0) == empty).all()
    others = {*range(16)} - {fmt.code for fmt in MATMUL_FORMATS}
    assert {fmt.code for fmt in FORMATS if not fmt.is_float} < others
    for code in others:
        assert (convert(raw, code) == empty).all()


def test_latency_and_state_after_reset():
    dut = OperandConverter()
    seen = []

    async def bench(ctx):
        assert ctx.get(dut.operand.kind) == Kind.VOID
        ctx.set(dut.dtype, BF16.code)
        for cycle in range(5):
            ctx.set(dut.raw, 0x3F80 + (cycle << 7))
            ctx.set(dut.valid, cycle != 3)
            seen.append((ctx.get(dut.operand.kind), ctx.get(dut.operand.exp)))
            await ctx.tick()

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert seen[0] == (Kind.VOID, 0)
    number = [(Kind.NUMBER, cycle) for cycle in range(3)]
    assert seen[OPERAND_CYCLES:] == [*number, (Kind.VOID, 0)]


WHOLE, HI, LO = Half.WHOLE, Half.HI, Half.LO
A_FEW = [  # format, half, raw, then significand, exponent, sign, kind
    (BF16, WHOLE, 0x3F80, 0x800, 0, 0, NUMBER), (BF16, WHOLE, 0x8000, 0, 0, 1, NUMBER),
    (BF16, WHOLE, 0x0001, 0x800, -133, 0, NUMBER), (FP16, WHOLE, 1, 0x800, -24, 0, NUMBER),
    (FP16, WHOLE, 0x03FF, 0xFFC, -15, 0, NUMBER), (FP16, WHOLE, 0xBC01, 0x802, 0, 1, NUMBER),
    (FP16, WHOLE, 0xFC00, 0x800, 0, 1, INF), (FP16, WHOLE, 0xFC01, 0x800, 0, 0, NAN),
    (FP8_E4M3FN, WHOLE, 0x7E, 0xE00, 8, 0, NUMBER), (FP8_E4M3FN, WHOLE, 0x7F, 0x800, 0, 0, NAN),
    (TF32, WHOLE, 0x3F801000, 0x800, 0, 0, NUMBER), (TF32, WHOLE, 0x3F803000, 0x804, 0, 0, NUMBER),
    (TF32, WHOLE, 0x3F801001, 0x802, 0, 0, NUMBER), (TF32, WHOLE, 0x7F7FFFFF, 0x800, 0, 0, INF),
    (FP32, WHOLE, 0x3F803000, 0x804, 0, 0, NUMBER), (TF32, WHOLE, 0x7F800001, 0x800, 0, 0, NAN),
    (FP32, HI, 0x3F800FFF, 0x800, 0, 0, NUMBER), (FP32, LO, 0x3F800001, 0x800, -23, 0, NUMBER),
    (FP32, LO, 0x3F800FFF, 0xFFF, -12, 0, NUMBER), (FP32, LO, 0xBF800C00, 0xC00, -12, 1, NUMBER),
    (FP32, LO, 0x3F801000, 0, 0, 0, VOID), (FP32, LO, 0x7F800001, 0, 0, 0, VOID),
    (FP32, LO, 0x00000001, 0x800, -149, 0, NUMBER), (BF16, LO, 0x3F81, 0, 0, 0, VOID),
    (INT8, WHOLE, 1, 0, 0, 0, VOID),
]  # fmt: skip


def test_a_few_elements_of_every_kind():
    """In Amaranth's simulator; the other tests compile the converter."""
    dut = OperandConverter()

    async def bench(ctx):
        for fmt, half, raw, *fields in A_FEW:
            for valid in (0, 1):
                ctx.set(dut.raw, raw)
                ctx.set(dut.dtype, fmt.code)
                ctx.set(dut.half, half)
                ctx.set(dut.valid, valid)
                await ctx.tick().repeat(OPERAND_CYCLES)
                want = pack_operand(*(fields if valid else (0, 0, 0, VOID)))
                got = ctx.get(dut.operand.as_value())
                assert got == int(want), f"{fmt.name} {half!r} {raw:#x}: {got:#x}, not {want:#x}"

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
