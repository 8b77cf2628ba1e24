"""The golden model against plain numpy, exact fractions and the contract."""

import itertools
from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.isa import (
    BODY_BIT,
    HEADER,
    INSTRUCTIONS,
    AccessPattern,
    Activation,
    AffineSelect,
    AluOp,
    Descriptor,
    DescriptorSide,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    Half,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    LoadStationary,
    MatmulMoving,
    Memset,
    ReduceOp,
    Rng,
    ScalarTensorTensor,
    Space,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)
from makalu.sim import activation, arithmetic, elementwise, golden
from makalu.sim.golden import GoldenCore, GoldenDeadlock, GoldenError, fused_sums

HBM_BYTES = 1 << 16
CODE = 0x8000


def run(core, *instructions, base=CODE):
    """Run instructions (or raw words with their engine) on the core's queues."""
    by_engine = {}
    for item in instructions:
        engine, word = item if isinstance(item, tuple) else (item.engine, item.encode())
        by_engine.setdefault(Engine(engine), []).append(word)
    queues = {}
    for engine, words in by_engine.items():
        raw = np.frombuffer(b"".join(words), np.uint8)
        core.hbm[base : base + len(raw)] = raw
        queues[engine] = (base, len(words))
        base += len(raw)
    return core.run(queues)


def sbuf(fmt, partitions, dims, *, offset=0, start=0):
    return AccessPattern(fmt, start, partitions, offset, tuple(dims))


def psum(partitions, n, *, offset=0, start=0, fmt=formats.FP32, dims=None):
    dims = ((1, n),) if dims is None else dims
    return AccessPattern(fmt, start, partitions, offset, dims, Space.PSUM)


def put(core, array, *, offset=0, start=0, space="sbuf"):
    """Store ``[partitions, elements]`` from ``start`` on at byte ``offset``."""
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    getattr(core, space)[start : start + len(raw), offset : offset + raw.shape[1]] = raw


def get(core, partitions, n, dtype, *, offset=0, start=0, space="sbuf"):
    size = np.dtype(dtype).itemsize * n
    rows = getattr(core, space)[start : start + partitions, offset : offset + size]
    return np.ascontiguousarray(rows).view(dtype)


# The arithmetic of the array ----------------------------------------------------------------------


def exact(x):
    """A finite float as a fraction."""
    return Fraction(float(x))


def round_binary32(value):
    """A fraction rounded to nearest even binary32, from the definition: the nearest of all."""
    if value == 0:
        return 0.0
    sign, value = (-1.0, -value) if value < 0 else (1.0, value)
    exponent = -149
    while value >= Fraction(2) ** (exponent + 24):
        exponent += 1
    quotient = value / Fraction(2) ** exponent
    whole = quotient.numerator // quotient.denominator
    rest = quotient - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    if Fraction(whole) * Fraction(2) ** exponent >= Fraction(2) ** 128:
        return sign * np.inf
    return sign * float(Fraction(whole) * Fraction(2) ** exponent)


def fma_chain(weights, moving):
    """One sum by fractions; operands are finite."""
    total = 0.0
    for w, x in zip(weights, moving, strict=True):
        if np.isinf(total):
            return total
        value = exact(total) + exact(w) * exact(x)
        total = round_binary32(value)
    return total


def random_operands(rng, shape, kind):
    """Values of at most 12 significand bits over a range that makes trouble."""
    significand = rng.integers(-4095, 4096, shape).astype(np.float64)
    exponent = {
        "near": rng.integers(-4, 5, shape),
        "far": rng.integers(-70, 58, shape),
        "tiny": rng.integers(-90, -62, shape),
        "huge": rng.integers(45, 57, shape),
        "integers": np.zeros(shape, int),
    }[kind]
    return np.ldexp(significand, exponent)


@pytest.mark.parametrize("kind", ["near", "far", "tiny", "huge", "integers"])
def test_sums_are_fused_multiply_adds_rounded_once(rng, kind):
    s, m = random_operands(rng, (9, 7), kind), random_operands(rng, (9, 11), kind)
    got = fused_sums(s, m)
    for i, j in itertools.product(range(7), range(11)):
        assert float(got[i, j]) == fma_chain(s[:, i], m[:, j]), (i, j)


def test_sums_are_right_where_rounding_twice_would_show():
    # openlibm #160: binary32 x binary32 + binary32 through a double rounds twice. With operands of
    # 12 bits the double is enough; these sums sit beside midpoints of binary32.
    for top, small in itertools.product((1.0, 1.5, 4095.0, -3.0), (1, -1, 4095, -2047)):
        for gap in range(20, 80, 3):
            s = np.array([[top], [float(small)]])
            m = np.array([[2.0**24], [2.0**-gap]])
            half_ulp = np.array([[2.0**24, 1.0, 2.0**-gap]]).T
            assert float(fused_sums(s, m)[0, 0]) == fma_chain(s[:, 0], m[:, 0])
            s3 = np.array([[top], [0.5], [float(small)]])
            assert float(fused_sums(s3, half_ulp)[0, 0]) == fma_chain(s3[:, 0], half_ulp[:, 0])


def test_special_values_follow_the_standard():
    inf, nan = np.inf, np.nan
    cases = [
        ([inf], [1.0], inf), ([inf], [0.0], nan), ([nan], [0.0], nan), ([inf], [-inf], -inf),
        ([inf, 1.0], [1.0, -inf], nan), ([2.0**100], [2.0**100], inf),
        ([-(2.0**100)], [2.0**100], -inf), ([2.0**-100], [2.0**-100], 0.0),
        ([0.0], [-5.0], 0.0), ([1.0, 1.0], [3.0, -3.0], 0.0),
    ]  # fmt: skip
    for s, m, expected in cases:
        got = fused_sums(np.array([s]).T, np.array([m]).T)
        assert got.view(np.uint32)[0, 0] == (
            0x7FC00000 if np.isnan(expected) else np.float32(expected).view(np.uint32)
        ), (s, m)
    tiny = fused_sums(np.array([[-(2.0**-100)]]), np.array([[2.0**-100]]))
    assert tiny.view(np.uint32)[0, 0] == 0x80000000  # rounds to zero from below


def test_void_elements_leave_even_a_negative_zero():
    s, m = np.array([[-(2.0**-100)], [0.0]]), np.array([[2.0**-100], [np.inf]])
    void = np.array([[False], [True]])
    assert fused_sums(s, m, void).view(np.uint32)[0, 0] == 0x80000000
    assert fused_sums(s, m, None, void).view(np.uint32)[0, 0] == 0x80000000
    assert fused_sums(s, m).view(np.uint32)[0, 0] == 0x7FC00000


def reference_matmul(s, m, rows, start=None):
    """``design``: K tiles in ascending order, each from +0, added in binary32; scalar loop."""
    k_count, m_count = s.shape
    n_count = m.shape[1]
    out = np.zeros((m_count, n_count), np.float32)
    with np.errstate(all="ignore"):
        for i, j in itertools.product(range(m_count), range(n_count)):
            total = None if start is None else start[i, j]
            for k0 in range(0, k_count, rows):
                acc = np.float32(0)
                for k in range(k0, min(k0 + rows, k_count)):
                    acc = np.float32(float(acc) + float(s[k, i]) * float(m[k, j]))
                total = acc if total is None else np.float32(total + acc)
            out[i, j] = total
    return out


MATMUL_FORMATS = [f for f in formats.MATMUL_FORMATS if f is not formats.FP32]


@pytest.mark.parametrize("config", [TINY, SMALL], ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", MATMUL_FORMATS, ids=lambda f: f.name)
def test_matmul_in_every_format(rng, config, fmt):
    k, m, n = config.rows, config.cols - 1, config.psum_bank_words
    core = GoldenCore(config, HBM_BYTES)
    s = (rng.standard_normal((k, m)) * 2).astype(np.float32).astype(fmt.dtype)
    x = (rng.standard_normal((k, n)) * 2).astype(np.float32).astype(fmt.dtype)
    put(core, s)
    put(core, x, offset=512)
    run(
        core,
        LoadStationary(src=sbuf(fmt, k, [(1, m)])),
        MatmulMoving(dst=psum(m, n), src=sbuf(fmt, k, [(1, n)], offset=512)),
    )
    wide = [a.astype(np.float64) for a in (s, x)]
    if fmt is formats.TF32:  # low 13 bits rounded away on use
        wide = [np.float64(round_tf32(a)) for a in (s, x)]
    expected = reference_matmul(*wide, config.rows)
    np.testing.assert_array_equal(get(core, m, n, np.float32, space="psum"), expected)


def round_tf32(a):
    bits = a.view(np.uint32).astype(np.uint64)
    bits = bits + 0xFFF + (bits >> np.uint64(13) & np.uint64(1))
    return (bits & np.uint64(0xFFFFE000)).astype(np.uint32).view(np.float32)


def test_accumulate_adds_once_in_binary32(rng):
    core = GoldenCore(TINY, HBM_BYTES)
    s = rng.standard_normal((8, 4)).astype(ml_dtypes.bfloat16)
    x = (rng.standard_normal((8, 16)) * 100).astype(ml_dtypes.bfloat16)
    put(core, s[:4])
    put(core, s[4:], offset=64)
    put(core, x[:4], offset=128)
    put(core, x[4:], offset=192)
    bf16 = formats.BF16
    program = []
    for tile in range(2):
        program += [
            LoadStationary(src=sbuf(bf16, 4, [(1, 4)], offset=64 * tile)),
            MatmulMoving(
                dst=psum(4, 16),
                src=sbuf(bf16, 4, [(1, 16)], offset=128 + 64 * tile),
                accumulate=tile,
            ),
        ]
    run(core, *program)
    expected = reference_matmul(s.astype(float), x.astype(float), 4)
    np.testing.assert_array_equal(get(core, 4, 16, np.float32, space="psum"), expected)


def test_four_passes_multiply_binary32(rng):
    """hi and lo halves from their definition, by integer arithmetic on the encodings."""
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-45, -1e-40, 3.4e38], np.float32)
    config, n, m = TINY, 16, 4
    s = rng.standard_normal((4, m)).astype(np.float32)
    x = rng.standard_normal((4, n)).astype(np.float32)
    x[0, :8], s[1, :2], x[2, :4] = special, [1e-42, 7e-45], [1e38, -1e38, 2e-38, 3.0]
    core = GoldenCore(config, HBM_BYTES)
    put(core, s)
    put(core, x, offset=256)
    program = []
    order = [(Half.LO, Half.LO), (Half.LO, Half.HI), (Half.HI, Half.LO), (Half.HI, Half.HI)]
    for i, (left, right) in enumerate(order):
        program += [
            LoadStationary(src=sbuf(formats.FP32, 4, [(1, m)]), half=left),
            MatmulMoving(
                dst=psum(m, n),
                src=sbuf(formats.FP32, 4, [(1, n)], offset=256),
                half=right,
                accumulate=i > 0,
            ),
        ]
    run(core, *program)

    def halves(value):
        bits = int(np.float32(value).view(np.uint32))
        hi = np.uint32(bits & 0xFFFFF000).view(np.float32)
        lo = float(value) - float(hi)
        return float(value) if np.isnan(value) else float(hi), lo

    expected = np.zeros((m, n), np.float32)
    with np.errstate(all="ignore"):
        for i, j in itertools.product(range(m), range(n)):
            total = None
            for left, right in order:
                acc = np.float32(0)
                for k in range(4):
                    w, v = halves(s[k, i])[left == Half.LO], halves(x[k, j])[right == Half.LO]
                    void = [
                        half == Half.LO and (part == 0 or not np.isfinite(whole))
                        for half, part, whole in ((left, w, s[k, i]), (right, v, x[k, j]))
                    ]
                    if not any(void):
                        acc = np.float32(float(acc) + w * v)
                total = acc if total is None else np.float32(total + acc)
            expected[i, j] = total
    got = get(core, m, n, np.float32, space="psum")
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got[:, 2]).all()
    assert set(got.view(np.uint32)[np.isnan(got)]) <= {0x7FC00000}


@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda f: f.name)
def test_halves_of_every_format(rng, fmt):
    codes = rng.integers(0, 1 << fmt.bits, 2000, dtype=np.uint64).astype(f"u{fmt.bytes}")
    codes = codes.view(fmt.dtype)
    whole, none = golden.operand_values(codes, fmt, Half.WHOLE)
    high, none_too = golden.operand_values(codes, fmt, Half.HI)
    low, void = golden.operand_values(codes, fmt, Half.LO)
    assert none is None
    assert none_too is None
    with np.errstate(invalid="ignore"):
        wide = codes.astype(np.float32).astype(np.float64)
    special = ~np.isfinite(wide)
    if fmt.bits == 32:  # a binary32 as a whole is rounded as TF32
        np.testing.assert_array_equal(whole[~special], round_tf32(codes)[~special])
    else:
        np.testing.assert_array_equal(whole, wide)
        assert void.all()
        np.testing.assert_array_equal(high, wide)
    if fmt is formats.FP32:
        np.testing.assert_array_equal(high[~special] + low[~special], wide[~special])
        np.testing.assert_array_equal(np.isnan(high), np.isnan(wide))
        assert void[special].all()
        for part in (high[~special], low[~special]):  # 12 significand bits are enough
            fraction, _ = np.frexp(part)
            assert (np.ldexp(fraction, 12) == np.rint(np.ldexp(fraction, 12))).all()


def test_rows_outside_either_tile_contribute_nothing(rng):
    core = GoldenCore(TINY, HBM_BYTES, fill=0xFF)  # stale memory is NaN
    s = rng.standard_normal((2, 3)).astype(ml_dtypes.bfloat16)
    x = rng.standard_normal((1, 5)).astype(ml_dtypes.bfloat16)
    put(core, s, start=2)
    put(core, x, start=3, offset=64)
    run(
        core,
        LoadStationary(src=sbuf(formats.BF16, 2, [(1, 3)], start=2)),
        MatmulMoving(
            dst=psum(3, 5, offset=64), src=sbuf(formats.BF16, 1, [(1, 5)], offset=64, start=3)
        ),
    )
    expected = np.outer(s[1].astype(np.float32), x[0].astype(np.float32))
    np.testing.assert_array_equal(get(core, 3, 5, np.float32, offset=64, space="psum"), expected)
    untouched = np.ones(core.psum.shape, bool)
    untouched[:3, 64 : 64 + 20] = False
    assert (core.psum[untouched] == 0xFF).all()


def test_weights_change_with_the_next_matmul(rng):
    core = GoldenCore(TINY, HBM_BYTES)
    one, two = np.eye(4, dtype=np.float16), 2 * np.eye(4, dtype=np.float16)
    put(core, one)
    put(core, two, offset=32)
    put(core, np.arange(16, dtype=np.float16).reshape(4, 4), offset=64)
    fp16 = formats.FP16
    moving = sbuf(fp16, 4, [(1, 4)], offset=64)
    run(
        core,
        LoadStationary(src=sbuf(fp16, 4, [(1, 4)], offset=32)),
        LoadStationary(src=sbuf(fp16, 4, [(1, 4)])),
        MatmulMoving(dst=psum(4, 4), src=moving),
        MatmulMoving(dst=psum(4, 4, offset=64), src=moving),
        LoadStationary(src=sbuf(fp16, 4, [(1, 4)], offset=32)),
        MatmulMoving(dst=psum(4, 4, offset=128), src=moving),
    )
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    for offset, factor in ((0, 1), (64, 1), (128, 2)):
        got = get(core, 4, 4, np.float32, offset=offset, space="psum")
        np.testing.assert_array_equal(got, factor * x)


def test_strided_tiles(rng):
    core = GoldenCore(SMALL, HBM_BYTES)
    data = rng.integers(-8, 8, (16, 200)).astype(np.float16)
    put(core, data)
    # Four dimensions, a negative step, a zero step (broadcast).
    moving = sbuf(formats.FP16, 16, [(-1, 4), (0, 2), (20, 3), (7, 2)], offset=2 * 10)
    run(
        core,
        LoadStationary(src=sbuf(formats.FP16, 16, [(3, 16)], offset=100)),
        MatmulMoving(dst=psum(16, 48, dims=((1, 24), (32, 2))), src=moving),
    )
    index = [
        10 - a + 20 * c + 7 * d
        for d, c, _, a in itertools.product(range(2), range(3), range(2), range(4))
    ]
    weights, x = data[:, 50:98:3].astype(float), data[:, index].astype(float)
    expected = reference_matmul(weights, x, 16)
    out = get(core, 16, 56, np.float32, space="psum")
    np.testing.assert_array_equal(np.hstack([out[:, :24], out[:, 32:56]]), expected)
    assert (out[:, 24:32] == 0).all()


# Vector engine ------------------------------------------------------------------------------------

FORMATS = {fmt.name: fmt for fmt in formats.FORMATS}


def reference_copy(codes, src, dst, saturate):
    """TensorCopy by scalar definition: every code of ``dst`` is tried for 8-bit formats."""
    out = np.zeros(codes.shape, dst.dtype)
    for i, code in np.ndenumerate(codes):
        with np.errstate(all="ignore"):
            if src is formats.TF32:
                value = float(round_tf32(np.array([code], np.float32))[0])
                if np.isnan(code):
                    value = float(code)
            else:
                value = float(np.float32(float(code)))
            if not dst.is_float:
                if np.isnan(value):
                    out[i] = 0
                elif np.isinf(value):
                    out[i] = dst.max if value > 0 else dst.min
                else:
                    whole = round(Fraction(value))  # Python rounds fractions to even
                    out[i] = min(max(whole, dst.min), dst.max)
            elif saturate and abs(value) > dst.max:
                out[i] = np.copysign(dst.max, value)
            elif dst is formats.TF32:
                out[i] = round_tf32(np.array([value], np.float32))[0]
            else:
                out[i] = np.float32(value).astype(dst.dtype)
    return out


@pytest.mark.parametrize("saturate", [0, 1], ids=["overflow", "saturate"])
@pytest.mark.parametrize(("src", "dst"), list(itertools.product(FORMATS, FORMATS)))
def test_copy_converts_between_all_formats(rng, src, dst, saturate):
    src, dst = FORMATS[src], FORMATS[dst]
    n = 40
    codes = rng.integers(0, 1 << src.bits, (4, n), dtype=np.uint64).astype(f"u{src.bytes}")
    if src.is_float and src.bits > 8:  # half of them of ordinary size
        codes[:2] = (rng.standard_normal((2, n)) * 300).astype(src.dtype).view(codes.dtype)
    codes = codes.view(src.dtype)
    core = GoldenCore(TINY, HBM_BYTES)
    put(core, codes)
    run(
        core,
        TensorCopy(
            dst=sbuf(dst, 4, [(1, n)], offset=1024), src=sbuf(src, 4, [(1, n)]), saturate=saturate
        ),
    )
    got = get(core, 4, n, dst.dtype, offset=1024)
    if src is dst:
        assert got.tobytes() == codes.tobytes()
        return
    expected = reference_copy(codes, src, dst, saturate)
    same = got.view(f"u{dst.bytes}") == expected.view(f"u{dst.bytes}")
    if dst.is_float:
        nan = np.isnan(expected.astype(np.float32))
        same |= nan & np.isnan(got.astype(np.float32))
    assert same.all(), (codes[~same][:4], got[~same][:4], expected[~same][:4])


@pytest.mark.parametrize("dst", [f for f in formats.FORMATS if f.is_float], ids=lambda f: f.name)
def test_copy_makes_nans_canonical_and_keeps_their_sign(dst):
    src = formats.BF16 if dst is formats.FP32 else formats.FP32
    codes = np.array([[0x7FC12345, 0xFFA00001, 0x7F800001, 0xFFFFFFFF]], np.uint32)
    if src is formats.BF16:
        codes = np.array([[0x7FC1, 0xFFA1, 0x7F81, 0xFFFF]], np.uint16)
    core = GoldenCore(TINY, HBM_BYTES)
    put(core, codes)
    run(
        core,
        TensorCopy(dst=sbuf(dst, 1, [(1, 4)], offset=512), src=sbuf(src, 1, [(1, 4)])),
    )
    got = get(core, 1, 4, f"u{dst.bytes}", offset=512)[0]
    canonical = {
        "float32": 0x7FC00000, "tf32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00,
        "float8_e4m3": 0x7C, "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E, "float8_e3m4": 0x78,
    }[dst.name]  # fmt: skip
    sign = 1 << dst.bits - 1
    assert list(got) == [canonical, canonical | sign, canonical, canonical | sign]


def test_copy_from_psum_to_other_partitions_with_strides(rng):
    core = GoldenCore(SMALL, HBM_BYTES)
    sums = rng.standard_normal((16, 1024)).astype(np.float32)
    put(core, sums, space="psum")
    run(
        core,
        TensorCopy(
            dst=sbuf(formats.BF16, 4, [(2, 300)], offset=64, start=12),
            src=psum(4, 300, start=4, dims=((3, 300),), offset=4 * 7),
        ),
    )
    got = get(core, 4, 600, ml_dtypes.bfloat16, offset=64, start=12)
    expected = sums[4:8, 7 : 7 + 900 : 3].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got[:, ::2], expected)
    assert (got[:, 1::2] == 0).all()


def test_memset_fills_the_pattern_and_nothing_else():
    core = GoldenCore(TINY, HBM_BYTES)
    run(core, Memset(dst=sbuf(formats.UINT16, 2, [(2, 5)], offset=6, start=2), value=0xABCD))
    expected = np.zeros((4, 2048), np.uint8)
    for i in range(5):
        expected[2:4, 6 + 4 * i : 8 + 4 * i] = [0xCD, 0xAB]
    np.testing.assert_array_equal(core.sbuf, expected)


def test_the_last_of_several_writes_to_one_place_stays():
    core = GoldenCore(TINY, HBM_BYTES)
    put(core, np.arange(8, dtype=np.uint8)[None])
    run(
        core,
        TensorCopy(
            dst=sbuf(formats.UINT8, 1, [(0, 4), (1, 2)], offset=100),
            src=sbuf(formats.UINT8, 1, [(1, 8)]),
        ),
    )
    assert list(core.sbuf[0, 99:103]) == [0, 3, 7, 0]


# DMA ----------------------------------------------------------------------------------------------


def dma(core, *descriptors, engine=Engine.SP, table=0x100, **fields):
    raw = b"".join(d if isinstance(d, bytes) else d.encode() for d in descriptors)
    core.hbm[table : table + len(raw)] = np.frombuffer(raw, np.uint8)
    fields = {"first": 0, "engines_used": 1, "queue": 0, "count": len(descriptors), **fields}
    return DmaStart(engine=engine, table=table, **fields)


@pytest.mark.parametrize("size_log2", [0, 1, 2])
def test_dma_moves_strided_elements(rng, size_log2):
    config, size = SMALL, 1 << size_log2
    core = GoldenCore(config, HBM_BYTES)
    core.hbm[0x1000:0x4000] = rng.integers(0, 256, 0x3000, dtype=np.uint8)
    before = core.hbm.copy()
    # Any HBM address, a transposing destination in SBUF.
    src = DescriptorSide(0x1003, ((5, 3), (-31, 4), (200, 2)))
    dst = DescriptorSide(
        config.sbuf_address(7, 40), ((config.sbuf_partition_stride, 3), (2 * size, 8))
    )
    run(core, dma(core, Descriptor(size_log2, DescriptorSide(src.address + 100, src.dims), dst)))
    expected = np.zeros_like(core.sbuf)
    order = itertools.product(range(2), range(4), range(3))
    for i, (c, b, a) in enumerate(order):
        address = 0x1003 + 100 + 5 * a - 31 * b + 200 * c
        offset = 40 + 2 * size * (i // 3)
        expected[7 + i % 3, offset : offset + size] = before[address : address + size]
    np.testing.assert_array_equal(core.sbuf, expected)
    assert core.counters["dma_read_bytes"] == 24 * size


def test_dma_writes_hbm_at_any_address(rng):
    core = GoldenCore(TINY, HBM_BYTES)
    core.sbuf[:] = rng.integers(0, 256, core.sbuf.shape, dtype=np.uint8)
    src = DescriptorSide(TINY.sbuf_address(1, 4), ((4, 10),))
    run(core, dma(core, Descriptor(2, src, DescriptorSide(0x2001, ((7, 10),)))))
    expected = np.zeros(0x100, np.uint8)
    for i in range(10):
        expected[1 + 7 * i : 5 + 7 * i] = core.sbuf[1, 4 + 4 * i : 8 + 4 * i]
    np.testing.assert_array_equal(core.hbm[0x2000:0x2100], expected)
    assert core.counters["dma_write_bytes"] == 40


def test_every_dma_engine_applies_the_update():
    core = GoldenCore(SMALL, HBM_BYTES)
    core.hbm[0x1000:0x1040] = np.arange(64)
    descriptors = [
        Descriptor(
            0,
            DescriptorSide(0x1000 + 16 * i, ((1, 16),)),
            DescriptorSide(SMALL.sbuf_address(i, 0), ((1, 16),)),
        )
        for i in range(4)
    ]
    start = dma(core, *descriptors, engines_used=2, count=2)
    start = start.replace(update=Update(3, UpdateMode.ADD, 1))
    run(core, start, EventSemaphore(engine=Engine.PE, waits=[Wait(3, WaitMode.EQ, 2)]))
    assert core.semaphores[3] == 2
    np.testing.assert_array_equal(core.sbuf[:4, :16].reshape(-1), np.arange(64))


def test_dma_with_nothing_to_move_completes():
    core = GoldenCore(TINY, HBM_BYTES)
    update = Update(1, UpdateMode.ADD, 1)
    empty = Descriptor(0, DescriptorSide(0, ((1, 0),)), DescriptorSide(0x2000, ((1, 7), (0, 0))))
    run(
        core,
        dma(core, count=0).replace(update=update),
        dma(core, empty).replace(update=update),
    )
    assert core.semaphores[1] == 2
    assert core.counters.get("dma_read_bytes", 0) == 0


# Queues -------------------------------------------------------------------------------------------


def event(engine, waits=(), update=None):
    return EventSemaphore(engine=engine, waits=waits, update=update)


@pytest.mark.parametrize("shuffle", [None, 0, 1, 2], ids=lambda s: f"shuffle_{s}")
def test_queues_wait_for_each_other(shuffle):
    core = GoldenCore(TINY, HBM_BYTES, shuffle=shuffle)
    program = []
    # A value passes through a chain of copies, each in a queue's turn; 50 rounds.
    core.sbuf[0, 0] = 1
    for i in range(50):
        program.append(event(Engine.ACT, [Wait(0, WaitMode.GE, i)], Update(1, UpdateMode.SET, i)))
        program.append(
            TensorCopy(
                dst=sbuf(formats.UINT8, 1, [(1, 1)], offset=i + 1),
                src=sbuf(formats.UINT8, 1, [(1, 1)], offset=i),
                waits=[Wait(1, WaitMode.EQ, i)],
                update=Update(0, UpdateMode.ADD, 1),
            )
        )
    run(core, *program)
    assert (core.sbuf[0, :51] == 1).all()
    assert core.semaphores[:2] == [50, 49]


def test_a_missing_semaphore_shows_in_some_order():
    results = set()
    for shuffle in range(12):
        core = GoldenCore(TINY, HBM_BYTES, shuffle=shuffle)
        core.hbm[0x1000] = 7
        one = DescriptorSide(TINY.sbuf_address(0, 0), ((1, 1),))
        copy = TensorCopy(
            dst=sbuf(formats.UINT8, 1, [(1, 1)], offset=1), src=sbuf(formats.UINT8, 1, [(1, 1)])
        )
        run(core, dma(core, Descriptor(0, DescriptorSide(0x1000, ((1, 1),)), one)), copy)
        results.add(int(core.sbuf[0, 1]))
    assert results == {0, 7}


def test_a_deadlock_names_who_waits_for_what():
    core = GoldenCore(TINY, HBM_BYTES)
    with pytest.raises(GoldenDeadlock) as caught:
        run(
            core,
            event(Engine.PE, [Wait(5, WaitMode.GE, 2)], Update(6, UpdateMode.ADD, 1)),
            event(Engine.DVE, [], Update(5, UpdateMode.ADD, 1)),
            event(Engine.DVE, [Wait(5, WaitMode.GE, 1), Wait(6, WaitMode.EQ, 9)]),
        )
    blocked = caught.value.blocked
    assert [(b.engine, b.wait, b.semaphore, b.wanted, b.seen, b.issued) for b in blocked] == [
        (Engine.PE, 0, 5, 2, 1, 0),
        (Engine.DVE, 1, 6, 9, 0, 1),
    ]
    assert caught.value.code == ErrorCode.WATCHDOG
    assert "PE waits" in str(caught.value)
    assert "semaphore 6 == 9" in str(caught.value)


def test_a_semaphore_overflow_is_an_error():
    core = GoldenCore(TINY, HBM_BYTES)
    top = Update(2, UpdateMode.SET, (1 << 32) - 1)
    run(core, event(Engine.SP, [], top))
    assert core.semaphores[2] == (1 << 32) - 1
    with pytest.raises(GoldenError) as caught:
        run(core, event(Engine.SP, [], top), event(Engine.SP, [], Update(2, UpdateMode.ADD, 1)))
    error = caught.value
    assert error.code == ErrorCode.SEMAPHORE_OVERFLOW
    assert (error.source, error.field) == (Engine.SP, HEADER_BITS["update_semaphore"][0])
    assert (error.pc, error.address) == (CODE + 128, 2)
    assert core.semaphores[2] == (1 << 32) - 1


# Errors -------------------------------------------------------------------------------------------


def set_bits(word, bit, width, value):
    number = int.from_bytes(word, "little")
    number &= ~((1 << width) - 1 << bit)
    return (number | value << bit).to_bytes(128, "little")


HEADER_BITS = {name: (bit, width) for name, bit, width in HEADER}
COPY = TensorCopy(
    dst=sbuf(formats.BF16, 2, [(1, 4)], offset=64), src=sbuf(formats.FP32, 2, [(1, 4)])
)
MATMUL = MatmulMoving(dst=psum(4, 8), src=sbuf(formats.BF16, 4, [(1, 8)]))
LOAD = LoadStationary(src=sbuf(formats.BF16, 4, [(1, 4)]))
LOAD32 = LoadStationary(src=sbuf(formats.FP32, 4, [(1, 4)]))
START = DmaStart(table=0x100, first=0, engines_used=1, queue=0, count=0)
DST, SRC = BODY_BIT, BODY_BIT + 224
SRC1 = SRC + 224
FLAT, FLAT_PSUM = sbuf(formats.FP32, 2, [(1, 4)]), psum(2, 4)
TENSORS = TensorTensor(dst=FLAT, src0=FLAT_PSUM, src1=FLAT, op=AluOp.ADD)
POINTERS = {"scalar0": 64, "scalar0_pointer": 1, "scalar1": 0x3F800001}
SCALARS = TensorScalar(dst=FLAT, src=FLAT, op0=AluOp.ADD, op1=AluOp.MAX, **POINTERS)
REDUCE = TensorReduce(
    dst=FLAT, src=sbuf(formats.BF16, 2, [(1, 3), (3, 5), (15, 4)]), op=ReduceOp.MAX, inner=1
)
THREE = ScalarTensorTensor(dst=FLAT, src0=FLAT, src1=FLAT_PSUM, op0=AluOp.ADD, op1=AluOp.LESS)
PLACE = Iota(dst=FLAT, offset=0xFFFFFFFE, step0=1)
SELECT = AffineSelect(dst=FLAT, src=FLAT, compare=AluOp.LESS, step0=1, value=0x3F800000)
FLAT_INTEGERS = sbuf(formats.INT32, 2, [(1, 4)])
RANDOM = Rng(dst=FLAT_INTEGERS, seed=64, seed_pointer=1)
WHOLES = IntegerTensorTensor(
    dst=FLAT_INTEGERS, src0=FLAT_INTEGERS, src1=FLAT_INTEGERS, op=AluOp.ADD
)
WHOLE = IntegerTensorScalar(dst=FLAT_INTEGERS, src=FLAT_INTEGERS, op0=AluOp.ADD, **POINTERS)


def scalar_field(cls, name):
    return next((bit, item.width) for n, item, bit in cls.scalars if n == name)


SCALAR0, SCALAR1 = (scalar_field(TensorScalar, f"scalar{i}") for i in range(2))


def ap_field(base, name):
    bit, width = next((b, w) for n, b, w in AccessPattern.LAYOUT if n == name)
    return base + bit, width


BAD_WORDS = {
    "unknown opcode": (COPY, HEADER_BITS["opcode"], 0xEE, ErrorCode.ILLEGAL_OPCODE, 0),
    "opcode of another engine": (COPY, HEADER_BITS["opcode"], 0x10, ErrorCode.ILLEGAL_OPCODE, 0),
    "wrong engine field": (COPY, HEADER_BITS["engine"], 0, ErrorCode.ILLEGAL_OPCODE, 0),
    "reserved header bit": (COPY, (200, 1), 1, ErrorCode.RESERVED_BITS, 0),
    "reserved pattern bit": (COPY, ap_field(SRC, "_reserved"), 1, ErrorCode.RESERVED_BITS, 0),
    "reserved tail bit": (COPY, (1023, 1), 1, ErrorCode.RESERVED_BITS, 0),
    "wait mode": (COPY, HEADER_BITS["wait1_mode"], 3, ErrorCode.BAD_FIELD, 88),
    "update mode": (COPY, HEADER_BITS["update_mode"], 3, ErrorCode.BAD_FIELD, 136),
    "dtype code": (COPY, ap_field(DST, "dtype"), 99, ErrorCode.BAD_FIELD, DST),
    "dtype zero": (COPY, ap_field(SRC, "dtype"), 0, ErrorCode.BAD_FIELD, SRC),
    "dtype not multiplied": (LOAD, ap_field(DST, "dtype"), 13, ErrorCode.BAD_FIELD, DST),
    "space not allowed": (LOAD32, ap_field(DST, "space"), 1, ErrorCode.BAD_FIELD, DST + 8),
    "space without meaning": (COPY, ap_field(SRC, "space"), 2, ErrorCode.BAD_FIELD, SRC + 8),
    "narrow psum": (
        COPY.replace(src=psum(2, 4)), ap_field(SRC, "dtype"), formats.BF16.code,
        ErrorCode.BAD_FIELD, SRC,
    ),
    "half": (LOAD, (BODY_BIT + 224, 2), 3, ErrorCode.BAD_FIELD, BODY_BIT + 224),
    "partition": (COPY, ap_field(SRC, "start_partition"), 3, ErrorCode.BAD_PARTITION, SRC + 16),
    "partition count": (
        COPY, ap_field(DST, "num_partitions"), 5, ErrorCode.BAD_PARTITION, DST + 16,
    ),
    "dst partition not 0": (
        MATMUL.replace(dst=psum(1, 8)), ap_field(DST, "start_partition"), 1,
        ErrorCode.BAD_PARTITION, DST + 16,
    ),
    "offset beyond memory": (COPY, ap_field(SRC, "offset"), 2048, ErrorCode.OUT_OF_RANGE, SRC + 64),
    "offset huge": (COPY, ap_field(SRC, "offset"), 0xFFFFFFFC, ErrorCode.OUT_OF_RANGE, SRC + 64),
    "misaligned": (COPY, ap_field(SRC, "offset"), 2, ErrorCode.OUT_OF_RANGE, SRC + 64),
    "step below memory": (COPY, ap_field(SRC, "step0"), 0xFFFF, ErrorCode.OUT_OF_RANGE, SRC + 64),
    "count beyond memory": (
        COPY, ap_field(SRC, "count0"), 513, ErrorCode.OUT_OF_RANGE, SRC + 64,
    ),
    "two psum banks": (MATMUL, ap_field(DST, "offset"), 36, ErrorCode.OUT_OF_RANGE, DST + 64),
    "elements differ": (COPY, ap_field(SRC, "count0"), 5, ErrorCode.SIZE_MISMATCH, None),
    "partitions differ": (COPY, ap_field(SRC, "num_partitions"), 1, ErrorCode.SIZE_MISMATCH, None),
    "too many columns": (LOAD, ap_field(DST, "count0"), 5, ErrorCode.SIZE_MISMATCH, None),
    "moving too long": (MATMUL, ap_field(SRC, "count0"), 17, ErrorCode.SIZE_MISMATCH, None),
    "table misaligned": (START, (BODY_BIT, 40), 64, ErrorCode.BAD_FIELD, BODY_BIT),
    "first dma engine": (START, (BODY_BIT + 40, 8), 1, ErrorCode.BAD_FIELD, BODY_BIT + 40),
    "no dma engine": (START, (BODY_BIT + 48, 8), 0, ErrorCode.BAD_FIELD, BODY_BIT + 48),
    "too many dma engines": (START, (BODY_BIT + 48, 8), 2, ErrorCode.BAD_FIELD, BODY_BIT + 48),
    "two sources in psum": (
        TENSORS, ap_field(SRC1, "space"), 1, ErrorCode.BAD_FIELD, SRC1 + 8,
    ),
    "first source in psum too": (
        THREE, ap_field(SRC, "space"), 1, ErrorCode.BAD_FIELD, SRC1 + 8,
    ),
    "operation": (TENSORS, scalar_field(TensorTensor, "op"), 23, ErrorCode.BAD_FIELD, 928),
    "no reduction": (REDUCE, (704, 5), AluOp.MULTIPLY, ErrorCode.BAD_FIELD, 704),
    "pointer misaligned": (SCALARS, SCALAR0, 66, ErrorCode.BAD_FIELD, SCALAR0[0]),
    "pointer beyond sbuf": (SCALARS, SCALAR0, 2048, ErrorCode.BAD_FIELD, SCALAR0[0]),
    "number as pointer": (
        SCALARS, scalar_field(TensorScalar, "scalar1_pointer"), 1, ErrorCode.BAD_FIELD,
        SCALAR1[0],
    ),
    "rows differ": (REDUCE, ap_field(SRC, "count2"), 3, ErrorCode.SIZE_MISMATCH, DST + 112),
    "fewer dimensions reduced": (
        REDUCE, scalar_field(TensorReduce, "inner"), 0, ErrorCode.SIZE_MISMATCH, DST + 112,
    ),
    "second source differs": (
        TENSORS, ap_field(SRC1, "count1"), 2, ErrorCode.SIZE_MISMATCH, DST + 112,
    ),
    "partitions of the second source differ": (
        THREE, ap_field(SRC1, "num_partitions"), 1, ErrorCode.SIZE_MISMATCH, DST + 32,
    ),
    "iota into psum": (PLACE, ap_field(DST, "space"), 1, ErrorCode.BAD_FIELD, DST + 8),
    "random numbers into psum": (RANDOM, ap_field(DST, "space"), 1, ErrorCode.BAD_FIELD, DST + 8),
    "random numbers that would round": (
        RANDOM, ap_field(DST, "dtype"), formats.BF16.code, ErrorCode.BAD_FIELD, DST,
    ),
    "seed misaligned": (
        RANDOM, scalar_field(Rng, "seed"), 66, ErrorCode.BAD_FIELD, scalar_field(Rng, "seed")[0],
    ),
    "seed beyond sbuf": (
        RANDOM, scalar_field(Rng, "seed"), 2048, ErrorCode.BAD_FIELD, scalar_field(Rng, "seed")[0],
    ),
    "reserved bit behind the seed": (RANDOM, (705, 1), 1, ErrorCode.RESERVED_BITS, 0),
    "no comparison": (
        SELECT, scalar_field(AffineSelect, "compare"), AluOp.ADD, ErrorCode.BAD_FIELD,
        scalar_field(AffineSelect, "compare")[0],
    ),
    "fewer elements to select": (
        SELECT, ap_field(SRC, "count0"), 3, ErrorCode.SIZE_MISMATCH, DST + 112,
    ),
    "integers of a float": (
        WHOLES, ap_field(SRC1, "dtype"), formats.FP32.code, ErrorCode.BAD_FIELD, SRC1,
    ),
    "integers in psum": (WHOLES, ap_field(SRC, "space"), 1, ErrorCode.BAD_FIELD, SRC + 8),
    "pointer of integers": (
        WHOLE, scalar_field(IntegerTensorScalar, "scalar0"), 66, ErrorCode.BAD_FIELD,
        scalar_field(IntegerTensorScalar, "scalar0")[0],
    ),
    "dma queue": (START, (BODY_BIT + 56, 4), 4, ErrorCode.BAD_FIELD, BODY_BIT + 56),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WORDS, ids=lambda c: c.replace(" ", "_"))
def test_a_bad_word_stops_the_engine_before_anything_is_written(case):
    instruction, (bit, width), value, code, field = BAD_WORDS[case]
    core = GoldenCore(TINY, HBM_BYTES, fill=0x5A)
    bad = set_bits(instruction.encode(), bit, width, value)
    with pytest.raises(GoldenError) as caught:
        run(core, event(instruction.engine), (instruction.engine, bad))
    error = caught.value
    assert error.code == code
    assert field is None or error.field == field
    assert error.pc == CODE + 128
    assert error.source == instruction.engine
    assert (core.sbuf == 0x5A).all()
    assert (core.psum == 0x5A).all()


def test_bad_words_and_good_words_differ_only_in_the_named_field():
    for instruction, *_ in BAD_WORDS.values():
        core = GoldenCore(TINY, HBM_BYTES)
        run(core, instruction)


@pytest.mark.parametrize("config", [TINY, SMALL, TRN], ids=lambda c: c.name)
def test_start_partitions_follow_the_quadrant_rule(config):
    q = config.quadrant
    for count in {1, q, q + 1, 2 * q, 2 * q + 1, 4 * q} - {0}:
        legal = {0} if count > 2 * q else {0, 2 * q} if count > q else {0, q, 2 * q, 3 * q}
        for start in {0, 1, q, q + 1, 2 * q, 3 * q, 4 * q}:
            word = Memset(dst=sbuf(formats.UINT8, count, [(1, 1)], start=start)).encode()
            if start in legal and start + count <= config.partitions:
                golden.check_word(word, Engine.DVE, config)
            else:
                with pytest.raises(golden._Illegal) as caught:
                    golden.check_word(word, Engine.DVE, config)
                assert caught.value.code == ErrorCode.BAD_PARTITION


def test_functions_and_their_scalars_are_checked():
    activation = Activation(dst=FLAT, src=FLAT, bias=8, bias_pointer=1, scale=7, alpha=5)
    check = golden.check_word
    check(activation.encode(), Engine.ACT, TINY)
    for changes, name in (
        ({"function": 6}, "function"), ({"function": 28}, "function"),
        ({"bias": 7}, "bias"), ({"scale_pointer": 1}, "scale"), ({"bias": 1 << 31}, "bias"),
    ):  # fmt: skip
        with pytest.raises(golden._Illegal) as caught:
            check(activation.replace(**changes).encode(), Engine.ACT, TINY)
        where = scalar_field(Activation, name)[0]
        assert (caught.value.code, caught.value.field) == (ErrorCode.BAD_FIELD, where)


NO_OPS = [
    COPY, MATMUL, LOAD, TENSORS, SCALARS, THREE, PLACE, SELECT, WHOLES, WHOLE,
]  # fmt: skip


@pytest.mark.parametrize("instruction", NO_OPS, ids=lambda i: i.mnemonic)
def test_a_count_of_zero_is_a_no_op_that_completes(instruction):
    for name in ("count0", "count3", "num_partitions"):
        word = instruction.encode()
        for i, _ in enumerate(instruction.operands):
            word = set_bits(word, *ap_field(BODY_BIT + 224 * i, name), 0)
        word = set_bits(word, 128, 8, 7)
        word = set_bits(word, 136, 8, UpdateMode.ADD)
        word = set_bits(word, 144, 32, 1)
        core = GoldenCore(TINY, HBM_BYTES, fill=0x5A)
        run(core, (instruction.engine, word))
        assert core.semaphores[7] == 1
        assert (core.psum == 0x5A).all()
        assert (core.sbuf == 0x5A).all()


def test_empty_loads_and_matmuls_leave_the_weights_where_they_are(rng):
    core = GoldenCore(TINY, HBM_BYTES)
    old, new = sbuf(formats.BF16, 4, [(1, 4)]), sbuf(formats.BF16, 4, [(1, 4)], offset=16)
    x = sbuf(formats.BF16, 4, [(1, 8)], offset=32)
    for pattern in (old, new, x):
        values = rng.integers(-3, 4, (4, pattern.elements)).astype(formats.BF16.dtype)
        core.memory(Space.SBUF).write(pattern, values)
    none = sbuf(formats.BF16, 0, [(1, 4)])
    run(
        core,
        LoadStationary(src=old),
        MatmulMoving(dst=psum(4, 8), src=x),
        LoadStationary(src=none),
        MatmulMoving(dst=psum(4, 8, offset=64), src=x),  # the old weights
        LoadStationary(src=new),
        LoadStationary(src=none),
        MatmulMoving(dst=psum(0, 8), src=x),
        MatmulMoving(dst=psum(4, 8), src=replace(x, num_partitions=0)),
        MatmulMoving(dst=psum(4, 8, offset=128), src=x),  # the new ones
    )
    first, second, third = (core.psum[:, at : at + 32].copy() for at in (0, 64, 128))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, third)


def side(address, *dims):
    return DescriptorSide(address, dims or ((1, 4),))


GOOD = Descriptor(0, side(0x1000), side(TINY.sbuf_address(0, 0)))
BAD_DESCRIPTORS = {
    "kind": (set_bits(GOOD.encode(), 0, 8, 0), ErrorCode.BAD_DESCRIPTOR, 0, 0),
    "size": (set_bits(GOOD.encode(), 8, 8, 3), ErrorCode.BAD_DESCRIPTOR, 8, 0),
    "reserved": (set_bits(GOOD.encode(), 20, 1, 1), ErrorCode.BAD_DESCRIPTOR, 16, 0),
    "tail": (set_bits(GOOD.encode(), 1000, 1, 1), ErrorCode.BAD_DESCRIPTOR, 576, 0),
    "counts differ": (set_bits(GOOD.encode(), 320, 16, 3), ErrorCode.BAD_DESCRIPTOR, None, 0),
    "no window": (Descriptor(0, side(7 << 40), GOOD.dst), ErrorCode.BAD_DESCRIPTOR, 64, 0),
    "partition": (
        Descriptor(0, side(0x1000), side(TINY.sbuf_address(3, 2046))),
        ErrorCode.BAD_DESCRIPTOR, 128, 0,
    ),
    "split element": (
        Descriptor(2, side(0x1000, (4, 2)), side(TINY.sbuf_address(0, 2), (4, 2))),
        ErrorCode.BAD_DESCRIPTOR, 128, 0,
    ),
    "misaligned step": (
        Descriptor(1, side(0x1000, (2, 2)), side(TINY.sbuf_address(0, 2), (3, 2))),
        ErrorCode.BAD_DESCRIPTOR, 384, 0,
    ),
    "diagonal step": (
        Descriptor(0, side(0x1000, (1, 2)), side(TINY.sbuf_address(0, 0), (0, 1), (2049, 2))),
        ErrorCode.BAD_DESCRIPTOR, 416, 0,
    ),
    "below sbuf": (
        Descriptor(0, side(TINY.sbuf_address(1, 0), (-2048, 3)), side(0x1000, (1, 3))),
        ErrorCode.BAD_DESCRIPTOR, 64, 0,
    ),
    "into the next partition": (
        Descriptor(0, side(0x1000, (1, 4)), side(TINY.sbuf_address(1, 2046), (1, 4))),
        ErrorCode.BAD_DESCRIPTOR, 128, 0,
    ),
    "read outside": (
        Descriptor(0, side(HBM_BYTES - 2), GOOD.dst), ErrorCode.BUS_READ, 0, HBM_BYTES - 1 + 1,
    ),
    "write outside": (
        Descriptor(0, GOOD.dst, side(0x2000, (0x10000, 4))), ErrorCode.BUS_WRITE, 0, 0x12000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DESCRIPTORS, ids=lambda c: c.replace(" ", "_"))
def test_a_bad_descriptor_stops_its_engine(case):
    raw, code, field, address = BAD_DESCRIPTORS[case]
    core = GoldenCore(TINY, HBM_BYTES)
    core.hbm[0x1000:0x1010] = 9
    with pytest.raises(GoldenError) as caught:
        run(core, dma(core, GOOD, raw).replace(update=Update(1, UpdateMode.ADD, 1)))
    error = caught.value
    assert (error.code, error.source, error.pc) == (code, 16, 0x180)
    assert field is None or error.field == field
    assert error.address == (0x180 if code == ErrorCode.BAD_DESCRIPTOR else address)
    assert core.semaphores[1] == 0
    assert (core.sbuf[0, :4] == 9).all()  # the descriptor before it was executed
    assert core.sbuf.sum() == 36


@pytest.mark.parametrize(
    ("address", "dims", "expected"),
    [
        (HBM_BYTES - 2, ((1, 4),), HBM_BYTES),
        (HBM_BYTES + 13, ((1, 4),), HBM_BYTES + 8),
        (HBM_BYTES - 30, ((7, 9),), HBM_BYTES),  # the sixth, 5 bytes beyond
        (HBM_BYTES + 100, ((-50, 4),), HBM_BYTES + 96),
        (0x1000, ((1, 4), (0x20000, 3), (-8, 5)), 0x21000),
        (0x100, ((1, 4), (-8, 2), (0x20000, 3)), 0x20100),
        (0, ((65535, 65535), (65535, 65535), (1, 65535), (1, 65535)), 0x1FFFE & ~7),
    ],
)
def test_a_bus_error_names_the_burst_of_the_first_bad_byte(address, dims, expected):
    core = GoldenCore(TINY, HBM_BYTES)
    bad = DescriptorSide(address, dims)
    good = DescriptorSide(TINY.sbuf_address(0, 0), tuple((0, count) for _, count in dims))
    with pytest.raises(GoldenError) as caught:
        run(core, dma(core, Descriptor(0, bad, good)))
    assert (caught.value.code, caught.value.address) == (ErrorCode.BUS_READ, expected)


def test_a_hole_between_partitions_is_not_memory():
    # 192 KiB in steps of 256 KiB: the last 64 KiB of every step are not there.
    end = TRN.sbuf_bytes - 4
    ok = Descriptor(2, side(0), DescriptorSide(TRN.sbuf_address(1, end - 12), ((4, 4),)))
    golden.check_descriptor(ok.encode(), TRN)
    hole = Descriptor(2, side(0), DescriptorSide(TRN.sbuf_address(1, end), ((4, 4),)))
    with pytest.raises(golden._Illegal):
        golden.check_descriptor(hole.encode(), TRN)


def test_fetching_outside_hbm_is_a_bus_error():
    core = GoldenCore(TINY, HBM_BYTES)
    with pytest.raises(GoldenError) as caught:
        core.run({Engine.SP: (HBM_BYTES, 1)})
    assert caught.value.code == ErrorCode.BUS_FETCH
    assert caught.value.address == HBM_BYTES


def test_a_base_between_two_words_is_a_bus_error():
    core = GoldenCore(TINY, HBM_BYTES)
    with pytest.raises(GoldenError) as caught:
        core.run({Engine.SP: (CODE + 64, 1)})
    assert (caught.value.code, caught.value.pc) == (ErrorCode.BUS_FETCH, CODE + 64)


def test_the_core_works_again_after_an_error():
    core = GoldenCore(TINY, HBM_BYTES)
    with pytest.raises(GoldenError):
        run(core, (Engine.DVE, bytes(127) + b"\xff"))
    core.reset()
    run(core, Memset(dst=sbuf(formats.UINT8, 1, [(1, 4)]), value=3))
    assert (core.sbuf[0, :4] == 3).all()


# The contract -------------------------------------------------------------------------------------


def test_every_instruction_has_a_meaning():
    assert set(golden.EXECUTORS) == set(INSTRUCTIONS.values())


def test_the_model_imports_nothing_but_the_contract():
    import ast
    from pathlib import Path

    models = {"activation", "arithmetic", "elementwise"}
    for module in (golden, activation, arithmetic, elementwise):
        tree = ast.parse(Path(module.__file__).read_text())
        relative = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level}
        assert relative
        assert all(name.startswith("rtl.arch") for name in relative - models)


def test_counters_are_those_of_the_contract(rng):
    from makalu.rtl.arch.events import COUNTERS

    core = GoldenCore(TINY, HBM_BYTES)
    counters = run(core, LOAD, MATMUL, COPY, dma(core, GOOD))
    assert set(counters) <= {event.full_name for event in COUNTERS}
    assert counters["pe_passes"] == 4 * 4 * 8
    assert counters["pe_columns"] == 8
    assert counters["queue_pe_issued"] == 2
    assert counters["fetch_bytes"] == 4 * 128
