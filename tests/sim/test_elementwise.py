"""Arithmetic of the engines against integers: every operation, cast, reduction, instruction.

The witness knows a finite number as an integer times a power of two, and rounds it by division.
"""

import itertools
import math
import struct

import numpy as np
import pytest
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.formats import FORMATS, FP32, TF32
from makalu.rtl.arch.isa import (
    AccessPattern,
    AffineSelect,
    AluOp,
    Compare,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    ReduceOp,
    Rng,
    ScalarTensorTensor,
    Space,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    Update,
    UpdateMode,
)
from makalu.sim.elementwise import compare_with_zero, operate, operate_integers, reduce_rows
from makalu.sim.golden import GoldenCore, cast_in, cast_out

INFINITY, SIGN, NAN = 0x7F800000, 0x80000000, 0x7FC00000
ONE, ZERO = 0x3F800000, 0
MAGNITUDES = [
    0, 1, 2, 0x7FFFFF, 0x800000, 0x800001, 0x0C000000, 0x33800000, 0x33800001, 0x3F000000,
    0x3F7FFFFF, ONE, 0x3F800001, 0x40000000, 0x40490FDB, 0x4B000001, 0x4B800000, 0x4F000000,
    0x7EFFFFFF, 0x7F000000, 0x7F7FFFFF, INFINITY, INFINITY + 1, 0x7FA00000, NAN, 0x7FFFFFFF,
]  # fmt: skip
"""Zero, subnormals, ties, ones, integers that are nearly too long, extremes, infinity, NaNs."""
SPECIALS = [bits | sign for bits in MAGNITUDES for sign in (0, SIGN)]
BITS = [*SPECIALS, 5, 31, 32, 33, 0x55555555, 0xFFFFFFE0]


# The witness --------------------------------------------------------------------------------------


def is_nan(bits):
    return bits & ~SIGN > INFINITY


def is_infinite(bits):
    return bits & ~SIGN == INFINITY


def fixed(bits):
    """A finite binary32 number in units of 2**-149."""
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    magnitude = fraction if exponent == 0 else (fraction | 1 << 23) << exponent - 1
    return -magnitude if bits & SIGN else magnitude


def rounded(magnitude, unit, exp, man):
    """Code of ``magnitude * 2**unit`` with unlimited exponents, ties to even."""
    least = 2 - (1 << exp - 1) - man  # log2 of the smallest subnormal
    drop = max(magnitude.bit_length() - man - 1, least - unit)
    if drop > 0:
        magnitude, rest = divmod(magnitude, 1 << drop)
        magnitude += 2 * rest > 1 << drop or (2 * rest == 1 << drop and magnitude & 1)
        unit += drop
    if magnitude == 0:
        return 0
    quantum = max(magnitude.bit_length() + unit - 1 - man, least)
    up = unit - quantum  # -1 if rounding made one more bit, which is 0
    return (quantum - least << man) + (magnitude << up if up >= 0 else magnitude >> -up)


def binary32(value, unit, zero):
    """Bits of ``value * 2**unit``; ``zero`` if it is exactly zero."""
    if value == 0:
        return zero
    return (SIGN if value < 0 else 0) | min(rounded(abs(value), unit, 8, 23), INFINITY)


def add(a, b):
    if is_infinite(a) or is_infinite(b):
        return NAN if is_infinite(a) and is_infinite(b) and a != b else a if is_infinite(a) else b
    # A sum of zero is negative only if both terms are.
    return binary32(fixed(a) + fixed(b), -149, a & b & SIGN if fixed(a) == 0 else 0)


def multiply(a, b):
    sign = (a ^ b) & SIGN
    if is_infinite(a) or is_infinite(b):
        return NAN if ZERO in (a & ~SIGN, b & ~SIGN) else sign | INFINITY
    return binary32(fixed(a) * fixed(b), -298, sign)


def order(bits):
    """Of numbers: that of sign and magnitude, -0 before +0."""
    return -1 - (bits & ~SIGN) if bits & SIGN else bits


def number(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


NUMERIC = {
    AluOp.ADD: add,
    AluOp.SUBTRACT: lambda a, b: add(a, b ^ SIGN),
    AluOp.MULTIPLY: multiply,
    AluOp.MAX: lambda a, b: max(a, b, key=order),
    AluOp.MIN: lambda a, b: min(a, b, key=order),
    AluOp.ABS_MAX: lambda a, b: max(a & ~SIGN, b & ~SIGN),
    AluOp.ABS_MIN: lambda a, b: min(a & ~SIGN, b & ~SIGN),
}
TRUTH = {
    AluOp.EQUAL: lambda a, b: number(a) == number(b),
    AluOp.NOT_EQUAL: lambda a, b: not number(a) == number(b),
    AluOp.GREATER_EQUAL: lambda a, b: number(a) >= number(b),
    AluOp.GREATER: lambda a, b: number(a) > number(b),
    AluOp.LESS_EQUAL: lambda a, b: number(a) <= number(b),
    AluOp.LESS: lambda a, b: number(a) < number(b),
    AluOp.LOGICAL_AND: lambda a, b: a & ~SIGN and b & ~SIGN,
    AluOp.LOGICAL_OR: lambda a, b: a & ~SIGN or b & ~SIGN,
    AluOp.LOGICAL_XOR: lambda a, b: bool(a & ~SIGN) != bool(b & ~SIGN),
}
ON_BITS = {
    AluOp.BITWISE_AND: lambda a, b: a & b,
    AluOp.BITWISE_OR: lambda a, b: a | b,
    AluOp.BITWISE_XOR: lambda a, b: a ^ b,
    AluOp.BITWISE_NOT: lambda a, b: 0xFFFFFFFF - a,
    AluOp.LEFT_SHIFT: lambda a, b: a * 2 ** min(b, 32) % (1 << 32),
    AluOp.RIGHT_SHIFT: lambda a, b: a // 2 ** min(b, 32),
}


def witness(op, a, b):
    """``a op b``, one element."""
    if op == AluOp.BYPASS:
        return a
    if op in ON_BITS:
        return ON_BITS[op](a, b)
    if op in TRUTH:
        return ONE if TRUTH[op](a, b) else ZERO
    return NAN if is_nan(a) or is_nan(b) else NUMERIC[op](a, b)


def witness_in(code, fmt):
    """One code of a format as binary32."""
    if not fmt.is_float:
        value = code - (1 << fmt.bits) if fmt.signed and code >> fmt.bits - 1 else code
        return binary32(value, 0, ZERO)
    exp, man = fmt.exp, fmt.man
    if fmt is TF32:  # stored as binary32, rounded on use
        if not is_nan(code):
            code = code + 0xFFF + (code >> 13 & 1) & ~0x1FFF
        exp, man = 8, 23
    sign = SIGN if code >> exp + man else 0
    magnitude = code & (1 << exp + man) - 1
    top = (1 << exp) - 1 << man
    if fmt.finite:
        if magnitude == (1 << exp + man) - 1:
            return sign | NAN
    elif magnitude >= top:
        return sign | (NAN if magnitude > top else INFINITY)
    exponent, fraction = magnitude >> man, magnitude & (1 << man) - 1
    if exponent:
        fraction, exponent = fraction | 1 << man, exponent - 1
    return sign | rounded(fraction, exponent + 2 - (1 << exp - 1) - man, 8, 23)


def witness_out(bits, fmt, saturate):
    """One binary32 as a code of a format."""
    negative, size = bits & SIGN, fmt.bits
    if not fmt.is_float:
        low, high = (-(1 << size - 1), (1 << size - 1) - 1) if fmt.signed else (0, (1 << size) - 1)
        if is_nan(bits):
            return 0
        if is_infinite(bits):
            return (low if negative else high) % (1 << size)
        whole, rest = divmod(abs(fixed(bits)), 1 << 149)
        whole += 2 * rest > 1 << 149 or (2 * rest == 1 << 149 and whole & 1)
        return min(max(-whole if negative else whole, low), high) % (1 << size)
    last = (1 << fmt.exp + fmt.man) - 2 if fmt.finite else ((1 << fmt.exp) - 1 << fmt.man) - 1
    if is_nan(bits):
        code = last + 1 if fmt.finite else last + 1 | 1 << fmt.man - 1
    else:
        code = 1 << 99 if is_infinite(bits) else (
            rounded(abs(fixed(bits)), -149, fmt.exp, fmt.man)
        )  # fmt: skip
        code = min(code, last if saturate else last + 1)
    code <<= 13 if fmt is TF32 else 0
    return code | (1 << size - 1 if negative else 0)


# Operations ---------------------------------------------------------------------------------------


def u32(values):
    return np.array(values, np.uint32)


def agree(op, pairs):
    a, b = u32(pairs).T
    got = operate(op, a, b)
    assert got.dtype == np.uint32
    wrong = [
        f"{x:#x} {op.name} {y:#x}: {g:#x}, not {w:#x}"
        for (x, y), g in zip(pairs, got.tolist(), strict=True)
        if g != (w := witness(op, x, y))
    ]
    assert not wrong, f"{len(wrong)} of {len(pairs)}: {wrong[:5]}"


@pytest.mark.parametrize("op", AluOp, ids=lambda op: op.name)
def test_every_operation_on_every_pair_of_specials(op):
    assert len(SPECIALS) >= 40
    agree(op, list(itertools.product(BITS, BITS)))


@pytest.mark.parametrize("op", AluOp, ids=lambda op: op.name)
def test_every_operation_on_random_bits(op, rng):
    a = rng.integers(0, 1 << 32, 2000)
    b = rng.integers(0, 1 << 32, 2000)
    b[:400] = a[:400] ^ rng.integers(0, 16, 400)  # nearly equal
    b[400:800] = a[400:800] ^ SIGN ^ rng.integers(0, 2, 400)
    b[800:1400] = (a[800:1400] & 0x7F800000) + rng.integers(-8 << 23, 8 << 23, 600) & 0xFFFFFFFF
    if op in (AluOp.LEFT_SHIFT, AluOp.RIGHT_SHIFT):
        b[:1000] %= 40
    agree(op, list(zip(a.tolist(), b.tolist(), strict=True)))


def test_the_documented_cases():
    cases = [
        (AluOp.MAX, SIGN, ZERO, ZERO), (AluOp.MAX, ZERO, SIGN, ZERO),
        (AluOp.MIN, SIGN, ZERO, SIGN), (AluOp.MIN, ZERO, SIGN, SIGN),
        (AluOp.MAX, 0xFFC00001, ONE, NAN), (AluOp.MIN, ONE, 0x7F800001, NAN),
        (AluOp.ABS_MAX, ONE | SIGN, ZERO, ONE), (AluOp.ABS_MIN, SIGN, ONE | SIGN, ZERO),
        (AluOp.EQUAL, SIGN, ZERO, ONE), (AluOp.NOT_EQUAL, NAN, NAN, ONE),
        (AluOp.GREATER, ZERO, SIGN, ZERO), (AluOp.LESS_EQUAL, NAN, NAN, ZERO),
        (AluOp.LOGICAL_AND, NAN, 1, ONE), (AluOp.LOGICAL_OR, SIGN, ZERO, ZERO),
        (AluOp.LOGICAL_XOR, NAN, SIGN, ONE), (AluOp.LEFT_SHIFT, 1, 31, SIGN),
        (AluOp.LEFT_SHIFT, 1, 32, 0), (AluOp.RIGHT_SHIFT, SIGN, 31, 1),
        (AluOp.RIGHT_SHIFT, SIGN, SIGN, 0), (AluOp.BYPASS, 0xFF800001, ONE, 0xFF800001),
        (AluOp.BITWISE_NOT, 0, 7, 0xFFFFFFFF), (AluOp.SUBTRACT, INFINITY, INFINITY, NAN),
        (AluOp.SUBTRACT, ONE, ONE, ZERO), (AluOp.ADD, SIGN, SIGN, SIGN),
        (AluOp.MULTIPLY, ZERO, INFINITY, NAN), (AluOp.MULTIPLY, 1 | SIGN, 0x3F000000, SIGN),
    ]  # fmt: skip
    for op, a, b, expected in cases:
        assert witness(op, a, b) == operate(op, a, b) == expected, (op, a, b)


# Integers -----------------------------------------------------------------------------------------


def int32(value):
    value %= 1 << 32
    return value - (1 << 32) if value >= SIGN else value


def integer_witness(op, a, b, signed):
    """``a op b`` in integers of 0 to 2**32 - 1, which are int32 if ``signed``."""
    op = AluOp(op)
    if op == AluOp.BYPASS:
        return a
    x, y = (int32(a), int32(b)) if signed else (a, b)
    if op in ON_BITS and op != AluOp.RIGHT_SHIFT:
        return ON_BITS[op](a, b)
    known = {
        AluOp.RIGHT_SHIFT: lambda: x // 2 ** min(b, 32),
        AluOp.ADD: lambda: x + y, AluOp.SUBTRACT: lambda: x - y, AluOp.MULTIPLY: lambda: x * y,
        AluOp.MAX: lambda: max(x, y), AluOp.MIN: lambda: min(x, y),
        AluOp.ABS_MAX: lambda: max(abs(x), abs(y)), AluOp.ABS_MIN: lambda: min(abs(x), abs(y)),
        AluOp.EQUAL: lambda: x == y, AluOp.NOT_EQUAL: lambda: x != y,
        AluOp.GREATER_EQUAL: lambda: x >= y, AluOp.GREATER: lambda: x > y,
        AluOp.LESS_EQUAL: lambda: x <= y, AluOp.LESS: lambda: x < y,
        AluOp.LOGICAL_AND: lambda: bool(x and y), AluOp.LOGICAL_OR: lambda: bool(x or y),
        AluOp.LOGICAL_XOR: lambda: bool(x) != bool(y),
    }  # fmt: skip
    return int(known[op]()) % (1 << 32)


WHOLE = [
    0, 1, 2, 5, 31, 32, 33, 63, 64, 127, 128, 255, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x10001,
    0x55555555, SIGN - 1, SIGN, SIGN + 1, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF,
]  # fmt: skip


@pytest.mark.parametrize("signed", [False, True], ids=["uint32", "int32"])
@pytest.mark.parametrize("op", AluOp, ids=lambda op: op.name)
def test_every_operation_on_integers_is_exact(op, signed, rng):
    pairs = list(itertools.product(WHOLE, WHOLE))
    pairs += rng.integers(0, 1 << 32, (1000, 2)).tolist()
    pairs += [(a, b % 40) for a, b in rng.integers(0, 1 << 32, (200, 2)).tolist()]
    a, b = u32(pairs).T
    got = operate_integers(op, a, b, signed=signed)
    assert got.dtype == np.uint32
    for (x, y), g in zip(pairs, got.tolist(), strict=True):
        assert g == integer_witness(op, x, y, signed), f"{x:#x} {op.name} {y:#x}"


def test_the_documented_cases_of_integers():
    cases = [
        (AluOp.ADD, 0xFFFFFFFF, 2, 1, 1), (AluOp.MULTIPLY, 0x10001, 0x10000, 0x10000, 0x10000),
        (AluOp.MAX, SIGN, 1, 1, SIGN), (AluOp.ABS_MAX, SIGN, 1, SIGN, SIGN),
        (AluOp.ABS_MIN, 0xFFFFFFFF, 2, 1, 2), (AluOp.RIGHT_SHIFT, SIGN, 31, 0xFFFFFFFF, 1),
        (AluOp.RIGHT_SHIFT, SIGN, 99, 0xFFFFFFFF, 0), (AluOp.LEFT_SHIFT, 1, 32, 0, 0),
        (AluOp.LESS, SIGN, 0, 1, 0), (AluOp.LOGICAL_AND, 2, 1, 1, 1),
        (AluOp.BITWISE_NOT, 0, 9, 0xFFFFFFFF, 0xFFFFFFFF),
    ]  # fmt: skip
    for op, a, b, of_signed, of_unsigned in cases:
        for signed, want in ((True, of_signed), (False, of_unsigned)):
            assert operate_integers(op, a, b, signed=signed) == want, (op, a, b, signed)
            assert integer_witness(op, a, b, signed) == want, (op, a, b, signed)


@pytest.mark.parametrize("compare", Compare, ids=lambda c: c.name)
def test_integers_are_compared_with_zero(compare):
    values = [-(1 << 31), -1, 0, 1, (1 << 31) - 1]
    want = [bool(integer_witness(AluOp(compare), v % (1 << 32), 0, True)) for v in values]
    assert compare_with_zero(compare, np.array(values, np.int32)).tolist() == want


# Reductions ---------------------------------------------------------------------------------------


def witness_reduce(op, row):
    even, odd = op.identity, op.identity
    for i, element in enumerate(row):
        if i % 2:
            odd = witness(op, odd, element)
        else:
            even = witness(op, even, element)
    return witness(op, even, odd) if len(row) > 1 else even


@pytest.mark.parametrize("op", [AluOp(op) for op in ReduceOp], ids=lambda op: op.name)
def test_an_identity_changes_nothing(op):
    identity = ReduceOp(op).identity
    for bits in BITS:
        once = witness(op, identity, bits)
        if op in ON_BITS or op in (AluOp.ADD, AluOp.MAX, AluOp.MIN):
            assert once == (NAN if is_nan(bits) and op not in ON_BITS else bits)
        assert witness(op, identity, once) == once


@pytest.mark.parametrize("op", ReduceOp, ids=lambda op: op.name)
def test_a_row_is_two_interleaved_chains(op, rng):
    for n in (1, 2, 3, 4, 5, 8, 33):
        rows = rng.integers(0, 1 << 32, (24, n))
        rows[:8] = rng.choice(SPECIALS, (8, n))
        near = np.ldexp(rng.standard_normal((8, n)), rng.integers(-3, 4, (8, n)))
        rows[8:16] = near.astype(np.float32).view(np.uint32)
        got = reduce_rows(op, rows.astype(np.uint32))
        assert got.tolist() == [witness_reduce(op, row) for row in rows.tolist()], n


def test_the_order_of_a_sum_shows():
    big, less = 0x4B800000, 0xCB800000  # 2**24 and its negative
    assert witness_reduce(ReduceOp.ADD, [big, ONE, less, ONE]) == 0x40000000
    assert reduce_rows(ReduceOp.ADD, u32([[big, ONE, less, ONE]])).tolist() == [0x40000000]
    assert reduce_rows(ReduceOp.ADD, u32([[big, less, ONE, ONE]])).tolist() == [ONE]


# Casts --------------------------------------------------------------------------------------------


def codes_of(fmt, rng, n):
    """Codes of a format: all if they are few, else specials and random ones."""
    if fmt.bits == 8:
        return np.arange(256, dtype=np.uint8)
    codes = rng.integers(0, 1 << fmt.bits, n, dtype=np.uint64)
    tops = u32(SPECIALS) >> 32 - fmt.bits
    if fmt.is_float and fmt.bits > 16:
        near = (rng.standard_normal(n // 2) * 300).astype(np.float32).view(np.uint32)
        codes[: n // 2] = near
    return np.concatenate([codes, tops]).astype(f"u{fmt.bytes}")


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_cast_in_is_exact_or_rounded_once(fmt, rng):
    codes = codes_of(fmt, rng, 3000)
    got = cast_in(codes.view(fmt.dtype), fmt).tolist()
    for code, bits in zip(codes.tolist(), got, strict=True):
        assert bits == witness_in(code, fmt), hex(code)


@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_a_cast_out_rounds_once(fmt, saturate, rng):
    bits = rng.integers(0, 1 << 32, 1500, dtype=np.uint64).astype(np.uint32)
    # Near the limits of the format, and halfway between two of its codes
    edges = np.array([fmt.max, fmt.min_subnormal if fmt.is_float else fmt.min], np.float64)
    edges = np.concatenate([edges, edges / 2, edges * 1.5])
    edges = np.abs(edges[np.abs(edges) < FP32.max]).astype(np.float32)
    near = (edges.view(np.uint32)[:, None] + np.arange(-3, 4)).astype(np.uint32).reshape(-1)
    halves = (rng.integers(-600, 600, 300) / 2).astype(np.float32).view(np.uint32)
    short = (rng.integers(0, 1 << 13, 1000) << 19 | rng.integers(0, 3, 1000)).astype(np.uint32)
    bits = np.concatenate([bits, near, near | np.uint32(SIGN), halves, short, u32(SPECIALS)])
    got = cast_out(bits, fmt, saturate).view(f"u{fmt.bytes}").tolist()
    for b, code in zip(bits.tolist(), got, strict=True):
        assert code == witness_out(b, fmt, saturate), hex(b)


# Instructions -------------------------------------------------------------------------------------

HBM_BYTES = 1 << 12


class Memories:
    """SBUF and PSUM as the witness has them."""

    def __init__(self, core):
        self.bytes = {Space.SBUF: core.sbuf.copy(), Space.PSUM: core.psum.copy()}

    def offsets(self, ap):
        dims = [(0, 1)] * (4 - len(ap.dims)) + list(reversed(ap.dims))
        indices = itertools.product(*(range(count) for _, count in dims))
        for index in indices:
            steps = sum(i * step for i, (step, _) in zip(index, dims, strict=True))
            yield ap.offset + steps * ap.dtype.bytes

    def read(self, ap, partition):
        row = self.bytes[ap.space][ap.start_partition + partition].tobytes()
        size = ap.dtype.bytes
        return [int.from_bytes(row[at : at + size], "little") for at in self.offsets(ap)]

    def write(self, ap, partition, codes):
        row = self.bytes[ap.space][ap.start_partition + partition]
        for at, code in zip(self.offsets(ap), codes, strict=True):
            row[at : at + ap.dtype.bytes] = list(code.to_bytes(ap.dtype.bytes, "little"))


def places(i, partition):
    """The affine function in a partition, element by element, as int32."""
    counts = [count for _, count in i.dst.dims]
    for outer_first in itertools.product(*(range(n) for n in reversed(counts))):
        value = int32(i.offset) + partition * int32(i.channel_multiplier)
        for k, index in enumerate(reversed(outer_first)):
            value += int32(i.values[f"step{k}"]) * index
        yield int32(value)


def hashed(place, seed):
    """The word of a place, in Python's integers."""

    def turn(x, shift, multiplier):
        return (x ^ x >> shift) * multiplier % (1 << 32)

    x = place ^ (seed << 13) % (1 << 32) ^ seed >> 19
    x = turn(x, 17, 0xED5AD4BB) ^ turn(seed, 17, 0xED5AD4BB)
    x = turn(turn(x, 11, 0xAC4C1B51), 15, 0x31848BAB)
    return x ^ x >> 14


def widened(code, fmt):
    """An integer's code as 32 bits, by its sign if it has one."""
    negative = fmt.signed and code >> fmt.bits - 1
    return code + (1 << 32) - (1 << fmt.bits) if negative else code


def execute_gpsimd(memories, i, scalar):
    """The same for the instructions of the GpSimd engine."""
    fmt = i.dst.dtype
    for p in range(i.dst.num_partitions):
        if isinstance(i, Iota):
            bits_kept = fmt in (formats.INT32, formats.UINT32)
            out = [
                value % (1 << 32) if bits_kept
                else witness_out(binary32(value, 0, ZERO), fmt, i.saturate)
                for value in places(i, p)
            ]  # fmt: skip
        elif isinstance(i, AffineSelect):
            out = [
                (code if i.src.dtype is fmt
                 else witness_out(witness_in(code, i.src.dtype), fmt, i.saturate))
                if integer_witness(AluOp(i.compare), value % (1 << 32), 0, True)
                else witness_out(i.value, fmt, i.saturate)
                for code, value in zip(memories.read(i.src, p), places(i, p), strict=True)
            ]  # fmt: skip
        elif isinstance(i, Rng):
            words = [hashed(value % (1 << 32), scalar("seed", p)) for value in places(i, p)]
            if fmt is FP32:
                out = [int(np.float32(word // 256 / 2**24).view(np.uint32)) for word in words]
            else:
                out = [word % (1 << fmt.bits) for word in words]
        else:
            first = i.values.get("src0", i.values.get("src"))
            signed = first.dtype.signed
            elements = [widened(code, first.dtype) for code in memories.read(first, p)]
            if isinstance(i, IntegerTensorTensor):
                second = [widened(code, i.src1.dtype) for code in memories.read(i.src1, p)]
                pairs = zip(elements, second, strict=True)
                elements = [integer_witness(i.op, a, b, signed) for a, b in pairs]
            else:
                for n in range(2):
                    other = scalar(f"scalar{n}", p)
                    pairs = [
                        (other, a) if i.values[f"reverse{n}"] else (a, other) for a in elements
                    ]
                    op = i.values[f"op{n}"]
                    elements = [integer_witness(op, a, b, signed) for a, b in pairs]
            out = [value % (1 << fmt.bits) for value in elements]
        memories.write(i.dst, p, out)


def execute(memories, i):
    """What an instruction does, element by element."""
    ops = [AluOp(i.values[name]) for name in ("op", "op0", "op1") if name in i.values]
    on_bits = any(op in ON_BITS for op in ops)
    first = i.values.get("src0", i.values.get("src", i.dst))

    def source(ap, p):
        codes = memories.read(ap, p)
        return codes if on_bits else [witness_in(code, ap.dtype) for code in codes]

    def scalar(name, p):
        value = i.values[name]
        if not i.values[f"{name}_pointer"]:
            return value
        row = memories.bytes[Space.SBUF][first.start_partition + p].tobytes()
        return int.from_bytes(row[value : value + 4], "little")

    if isinstance(i, Iota | AffineSelect | IntegerTensorTensor | IntegerTensorScalar | Rng):
        execute_gpsimd(memories, i, scalar)
        return

    def apply(op, left, right, reverse):
        if not isinstance(right, list):
            right = [right] * len(left)
        pairs = zip(right, left, strict=True) if reverse else zip(left, right, strict=True)
        return [witness(op, a, b) for a, b in pairs]

    for p in range(i.dst.num_partitions):
        elements = source(first, p)
        if isinstance(i, TensorTensor):
            elements = apply(ops[0], elements, source(i.src1, p), False)
        elif isinstance(i, TensorReduce):
            row = math.prod(count for _, count in first.dims[: i.inner + 1])
            rows = [elements[at : at + row] for at in range(0, len(elements), row)]
            flip = SIGN if i.negate else 0
            elements = [witness_reduce(ReduceOp(i.op), r) ^ flip for r in rows]
        else:
            second = scalar("scalar1", p) if isinstance(i, TensorScalar) else source(i.src1, p)
            elements = apply(ops[0], elements, scalar("scalar0", p), i.reverse0)
            elements = apply(ops[1], elements, second, i.reverse1)
        size = i.dst.dtype.bits
        out = [
            bits % (1 << size) if on_bits else witness_out(bits, i.dst.dtype, i.saturate)
            for bits in elements
        ]
        memories.write(i.dst, p, out)


def pattern(rng, fmt, space, partitions, counts, *, base, start=None):
    """A pattern in 512 bytes from ``base`` on, of steps of either sign."""
    dims, span = [], 1
    for count in counts:
        step = span if rng.random() < 0.7 else span + int(rng.integers(0, 2))
        dims.append((step, count))
        span = max(step * (count - 1) + span, 1)
    assert span * fmt.bytes <= 512
    offset, signed = base, []
    for step, count in dims:
        down = count > 0 and rng.random() < 0.3
        offset += fmt.bytes * step * (count - 1) if down else 0
        signed.append((-step if down else step, count))
    if start is None:
        start = int(rng.integers(0, 4))
    return AccessPattern(fmt, start, partitions, offset, tuple(signed), space)


def random_instruction(cls, rng):
    """An instruction for TINY: sources from 0 and 512, scalars from 1024, dst from 1536 on."""
    partitions = int(rng.choice([1, 1, 4]))
    start = 0 if partitions > 1 else None
    counts = [int(rng.integers(1, 5)) for _ in range(int(rng.integers(1, 4)))]
    values = {}
    for name, item, _ in cls.scalars:
        if item.values is not None:
            values[name] = int(rng.choice(list(item.values)))
        elif item.pointer is not None and values[item.pointer]:
            values[name] = 1024 + 4 * int(rng.integers(0, 128))
        elif item.width == 32:
            values[name] = int(rng.choice(BITS))
            if name.startswith(("offset", "channel", "step")) and rng.random() < 0.8:
                values[name] = int(rng.integers(-3, 4)) % (1 << 32)
        else:
            values[name] = int(rng.integers(0, 1 << item.width))
    result = counts
    if cls is TensorReduce:
        values["inner"] = int(rng.integers(0, len(counts)))
        result = counts[values["inner"] + 1 :]
    in_psum = int(rng.integers(0, 3))
    for number, name in enumerate(n for n, operand, _ in cls.operands if not operand.writes):
        operand = next(operand for found, operand, _ in cls.operands if found == name)
        in_psum = in_psum if Space.PSUM in operand.spaces else -1
        space = Space.PSUM if number == in_psum else Space.SBUF
        fmt = rng.choice([f for f in operand.formats if space == Space.SBUF or f.bytes == 4])
        shape = counts if rng.random() < 0.5 or cls is TensorReduce else counts[::-1]
        values[name] = pattern(
            rng, fmt, space, partitions, shape, start=start,
            base=512 * number if space == Space.SBUF else 0,
        )  # fmt: skip
    values["dst"] = pattern(
        rng,
        rng.choice(cls.operands[0][1].formats),
        Space.SBUF,
        partitions,
        result,
        base=1536,
        start=start,
    )
    return cls(**values)


def fill(core, rng):
    """Contents in which every format finds numbers of ordinary size, specials and anything."""
    for memory in (core.sbuf, core.psum):
        words = rng.integers(0, 1 << 32, (len(memory), memory.shape[1] // 4), dtype=np.uint64)
        words = words.astype(np.uint32)
        near = rng.standard_normal(words.shape).astype(np.float32).view(np.uint32)
        kind = rng.integers(0, 4, words.shape)
        words = np.where(kind == 0, near, words)
        words = np.where(kind == 1, rng.choice(u32(SPECIALS), words.shape), words)
        narrow = rng.standard_normal((*words.shape, 2)).astype(formats.BF16.dtype)
        words = np.where(kind == 2, narrow.view(np.uint32)[..., 0], words)
        memory[:] = words.view(np.uint8)


def run(core, instruction):
    core.hbm[:128] = np.frombuffer(instruction.encode(), np.uint8)
    return core.run({instruction.engine: (0, 1)})


CLASSES = [
    TensorTensor, TensorScalar, ScalarTensorTensor, TensorReduce, Iota, AffineSelect,
    IntegerTensorTensor, IntegerTensorScalar, Rng,
]  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.mnemonic)
def test_instructions_do_what_they_say(cls, rng):
    core = GoldenCore(TINY, HBM_BYTES)
    seen = set()
    for _ in range(250):
        instruction = random_instruction(cls, rng)
        fill(core, rng)
        memories = Memories(core)
        execute(memories, instruction)
        counters = run(core, instruction)
        for space, bytes_ in memories.bytes.items():
            got = core.sbuf if space == Space.SBUF else core.psum
            assert np.array_equal(got, bytes_), str(instruction)
        first = instruction.values[cls.operands[min(1, len(cls.operands) - 1)][0]]
        assert counters[f"{instruction.engine.name.lower()}_elements"] == first.elements
        seen.update((name, instruction.values[name]) for name, item, _ in cls.scalars
                    if item.width < 32)  # fmt: skip
        for name, _, _ in cls.operands:
            ap = instruction.values[name]
            seen |= {(name, ap.dtype.name), (name, ap.space)}
    for name, item, _ in cls.scalars:
        wanted = item.values or range(min(1 << item.width, 3) if item.width < 32 else 0)
        assert seen >= {(name, int(value)) for value in wanted}, name
    for name, operand, _ in cls.operands:
        assert seen >= {(name, fmt.name) for fmt in operand.formats}, name
        assert seen >= {(name, space) for space in operand.spaces}, name


def bf16(partitions, n, offset, **changes):
    values = {"start": 0, "space": Space.SBUF, "dims": ((1, n),), **changes}
    return AccessPattern(
        formats.BF16, values["start"], partitions, offset, values["dims"], values["space"]
    )


def fp32(start, offset, n=1, partitions=4, space=Space.SBUF):
    return AccessPattern(FP32, start, partitions, offset, ((1, n),), space)


def test_a_pointer_reads_the_partitions_of_the_first_source():
    core = GoldenCore(SMALL, HBM_BYTES)
    core.sbuf[:, 64:68] = (np.arange(16, dtype=np.float32) * 10)[:, None].view(np.uint8)
    core.sbuf[:, 128:132] = np.arange(16, dtype=np.float32)[:, None].view(np.uint8)
    core.psum[:, 0:4] = np.float32(1).reshape(1).view(np.uint8)
    run(core, TensorScalar(
        dst=fp32(4, 0), src=fp32(8, 0, space=Space.PSUM), op0=AluOp.ADD, op1=AluOp.MULTIPLY,
        scalar0=64, scalar0_pointer=1, scalar1=0x40000000,
    ))  # fmt: skip
    got = core.sbuf[4:8, 0:4].copy().view(np.float32)[:, 0]
    assert got.tolist() == [162, 182, 202, 222]
    run(core, ScalarTensorTensor(
        dst=fp32(0, 0), src0=fp32(12, 128), src1=fp32(8, 128), op0=AluOp.SUBTRACT,
        reverse0=1, op1=AluOp.ADD, scalar0=64, scalar0_pointer=1,
    ))  # fmt: skip
    got = core.sbuf[0:4, 0:4].copy().view(np.float32)[:, 0]
    assert got.tolist() == [10 * p - p + p - 4 for p in range(12, 16)]


def test_nan_and_minus_zero_of_a_source_that_is_passed_on():
    core = GoldenCore(TINY, HBM_BYTES)
    codes = u32([0xFF800001, 0x7FFFFFFF, SIGN, 1])
    core.sbuf[0, :16] = codes.view(np.uint8)

    def result(**changes):
        values = {"op": AluOp.BYPASS, **changes}
        run(core, TensorTensor(dst=fp32(0, 64, 4, 1), src0=fp32(0, 0, 4, 1),
                               src1=fp32(0, 0, 4, 1), **values))  # fmt: skip
        return core.sbuf[0, 64:80].copy().view(np.uint32).tolist()

    # Casts make a NaN canonical and keep its sign; an operation makes it positive, too.
    assert result() == [SIGN | NAN, NAN, SIGN, 1]
    assert result(op=AluOp.MAX) == [NAN, NAN, SIGN, 1]
    assert result(op=AluOp.BITWISE_OR) == codes.tolist()


def test_a_bitwise_operation_makes_everything_bits():
    core = GoldenCore(TINY, HBM_BYTES)
    core.sbuf[0, :4] = [0x80, 0x01, 0xFF, 0x7F]
    narrow = AccessPattern(formats.INT8, 0, 1, 0, ((1, 4),))
    wide = AccessPattern(formats.UINT32, 0, 1, 64, ((1, 4),))
    run(core, TensorScalar(dst=wide, src=narrow, op0=AluOp.LEFT_SHIFT, scalar0=4,
                           op1=AluOp.BITWISE_XOR, scalar1=0xABC00000))  # fmt: skip
    expected = [0xABC00800, 0xABC00010, 0xABC00FF0, 0xABC007F0]
    assert core.sbuf[0, 64:80].copy().view(np.uint32).tolist() == expected
    # The low bits of 0x40000000 + 0x40000000 as numbers: 0x40800000.
    core.sbuf[0, 64:80] = u32([0x40000000] * 4).view(np.uint8)
    half = AccessPattern(formats.UINT16, 0, 1, 128, ((1, 4),))
    run(core, TensorScalar(dst=half, src=wide, op0=AluOp.ADD, scalar0=0x40000000,
                           op1=AluOp.RIGHT_SHIFT, scalar1=16))  # fmt: skip
    assert core.sbuf[0, 128:136].copy().view(np.uint16).tolist() == [0x4080] * 4


@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
def test_saturate_clamps_what_a_sum_makes_too_large(saturate):
    core = GoldenCore(TINY, HBM_BYTES)
    core.sbuf[0, :8] = np.array([3.4e38, -3.4e38], np.float32).view(np.uint8)
    run(core, TensorTensor(
        dst=bf16(1, 2, 64), src0=fp32(0, 0, 2, 1), src1=fp32(0, 0, 2, 1), op=AluOp.ADD,
        saturate=saturate,
    ))  # fmt: skip
    top = 0x7F7F if saturate else 0x7F80
    assert core.sbuf[0, 64:68].copy().view(np.uint16).tolist() == [top, top | 0x8000]


@pytest.mark.parametrize("negate", [0, 1])
def test_a_reduction_negates_the_sign_bit(negate):
    core = GoldenCore(TINY, HBM_BYTES)
    core.sbuf[0, :8] = u32([NAN, ONE]).view(np.uint8)
    src = AccessPattern(FP32, 0, 1, 0, ((0, 3), (1, 2)))
    flip = SIGN if negate else 0
    run(core, TensorReduce(dst=fp32(0, 64, 2, 1), src=src, op=ReduceOp.ADD, negate=negate))
    assert core.sbuf[0, 64:72].copy().view(np.uint32).tolist() == [NAN ^ flip, 0x40400000 ^ flip]
    # Of bits it is bit 31, which a narrow format does not store.
    run(core, TensorReduce(dst=fp32(0, 64, 2, 1), src=src, op=ReduceOp.BITWISE_OR, negate=negate))
    assert core.sbuf[0, 64:72].copy().view(np.uint32).tolist() == [NAN ^ flip, ONE ^ flip]
    run(core, TensorReduce(dst=bf16(1, 2, 64), src=src, op=ReduceOp.BITWISE_OR, negate=negate))
    assert core.sbuf[0, 64:68].copy().view(np.uint16).tolist() == [0, 0]


def test_nothing_to_do_completes():
    update = Update(3, UpdateMode.ADD, 1)
    empty = ((1, 0),), ((1, 4), (2, 0))
    instructions = []
    for dims in empty:
        none = bf16(1, 0, 64, dims=dims)
        pair = {"src0": none, "src1": none}
        instructions += [
            TensorTensor(dst=none, **pair, op=AluOp.ADD, update=update),
            TensorScalar(dst=none, src=none, op0=AluOp.ADD, op1=AluOp.ADD, update=update),
            ScalarTensorTensor(dst=none, **pair, op0=AluOp.ADD, op1=AluOp.ADD, update=update),
        ]
    flat = bf16(0, 4, 64)
    empty_integers = AccessPattern(formats.INT16, 0, 4, 64, ((1, 3), (1, 0)))
    instructions += [
        TensorTensor(dst=flat, src0=flat, src1=flat, op=AluOp.ADD, update=update),
        # No elements in a row: results are not written, and need not be none.
        TensorReduce(dst=bf16(1, 4, 64), src=bf16(1, 0, 0, dims=((1, 0), (1, 4))),
                     op=ReduceOp.ADD, update=update),
        TensorReduce(dst=bf16(1, 1, 64), src=bf16(1, 0, 0, dims=((1, 3), (1, 0))),
                     op=ReduceOp.ADD, inner=1, update=update),
        TensorReduce(dst=bf16(1, 0, 64), src=bf16(1, 0, 0, dims=((1, 3), (1, 0))),
                     op=ReduceOp.ADD, update=update),
        Iota(dst=bf16(1, 0, 64), offset=3, step0=1, update=update),
        Iota(dst=bf16(0, 4, 64), offset=3, step0=1, update=update),
        AffineSelect(dst=bf16(1, 0, 64), src=bf16(1, 0, 0), value=ONE, compare=Compare.LESS,
                     update=update),
        Rng(dst=empty_integers, seed=1, update=update),
        IntegerTensorTensor(dst=empty_integers, src0=empty_integers, src1=empty_integers,
                            op=AluOp.BITWISE_NOT, update=update),
        IntegerTensorScalar(dst=empty_integers, src=empty_integers, op0=AluOp.BITWISE_NOT,
                            op1=AluOp.ADD, update=update),
    ]  # fmt: skip
    for instruction in instructions:
        core = GoldenCore(TINY, HBM_BYTES, fill=0x5A)
        counters = run(core, instruction)
        assert (core.sbuf == 0x5A).all(), str(instruction)
        assert core.semaphores[3] == 1
        assert not {"dve_elements", "pool_elements"} & set(counters)
