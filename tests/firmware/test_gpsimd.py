"""The GpSimd engine in kernels: iota, affine_select, integers; results, and what is refused."""

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.nki import operations
from makalu.nki import TensorSpec
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import BITWISE_OPS, AluOp, Compare, Engine

from .refusal import check_refused

GPSIMD = nisa.engine.gpsimd
SHIFTS = (AluOp.LEFT_SHIFT, AluOp.RIGHT_SHIFT)


@pytest.fixture(scope="module")
def dev():
    with makalu.open("TINY", "golden", hbm=1 << 20) as device:
        yield device


def integers(shape, seed=0, dtype=np.int32):
    """Any integers of a format, and its extremes."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng(seed)
    x = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    special = np.array([0, 1, info.min, info.max, info.max - 1], dtype)
    return np.where(rng.random(shape) < 0.4, special[rng.integers(5, size=shape)], x)


# Functions of the place ---------------------------------------------------------------------------


@nki.jit
def numbered(shape, pattern, offset, multiplier, dtype):
    out = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(shape, dtype, buffer=nl.sbuf)
    nisa.iota(t, pattern, offset, multiplier)
    nisa.dma_copy(out, t)
    return out


def places(partitions, pattern, offset, multiplier):
    """The function by numpy's index arrays, ``[partitions, elements]`` in int64."""
    index = np.indices([n for _, n in pattern])
    free = sum(step * i for (step, _), i in zip(pattern, index, strict=True))
    return offset + multiplier * np.arange(partitions)[:, None] + free.reshape(-1)


PATTERNS = {
    "one": [[1, 24]],
    "down": [[-3, 24]],
    "one element apart": [[0, 1], [5, 24]],
    "two": [[100, 4], [1, 6]],
    "outer steps": [[-100, 2], [7, 12]],
    "three": [[50, 2], [-7, 3], [2, 4]],
    "four": [[1000, 2], [-100, 3], [10, 2], [-1, 2]],
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("shape", [(4, 24), (3, 4, 6), (2, 2, 3, 4)])
def test_iota(dev, shape, name):
    pattern = PATTERNS[name]
    got = dev.run(numbered, shape, pattern, -5, 33, nl.int32)
    np.testing.assert_array_equal(got.reshape(shape[0], -1), places(shape[0], pattern, -5, 33))


@pytest.mark.parametrize("dtype", ["int8", "uint16", "fp16", "bf16", "fp32", "fp8_e5m2"])
def test_iota_is_converted_as_a_copy_of_int32_is(dev, dtype):
    fmt = formats.format_of(dtype)
    got = dev.run(numbered, (4, 24), [[77, 24]], -900, 1000, fmt)
    want = fmt.encode(places(4, [[77, 24]], -900, 1000).astype(np.float32))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_iota_wraps_around(dev):
    got = dev.run(numbered, (4, 24), [[1 << 30, 24]], (1 << 31) - 1, -(1 << 31), nl.int32)
    want = places(4, [[1 << 30, 24]], (1 << 31) - 1, -(1 << 31))
    np.testing.assert_array_equal(got, want.astype(np.int32))
    got = dev.run(numbered, (4, 24), [[-1, 24]], 3, 0, nl.uint32)
    np.testing.assert_array_equal(got, places(4, [[-1, 24]], 3, 0).astype(np.uint32))


def test_iota_fills_a_view_with_steps(dev):
    @nki.jit
    def kernel():
        out = nl.ndarray((4, 4, 6), nl.int16, buffer=nl.shared_hbm)
        t = nl.zeros((4, 4, 6), nl.int16)
        nisa.iota(t[:, 1:3, ::2], [[10, 2], [1, 3]], 1, 100)
        nisa.dma_copy(out, t)
        return out

    want = np.zeros((4, 4, 6), np.int16)
    want[:, 1:3, ::2] = places(4, [[10, 2], [1, 3]], 1, 100).reshape(4, 2, 3)
    np.testing.assert_array_equal(dev.run(kernel), want)


@nki.jit
def selected(a, pattern, offset, multiplier, value, op, dtype, saturate=False):
    out = nl.ndarray(a.shape, dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(a.shape, dtype, buffer=nl.sbuf)
    nisa.affine_select(t, pattern, offset, multiplier, nl.load(a), value, op, saturate=saturate)
    nisa.dma_copy(out, t)
    return out


COMPARISONS = {
    nl.equal: np.equal, nl.not_equal: np.not_equal, nl.greater_equal: np.greater_equal,
    nl.greater: np.greater, nl.less_equal: np.less_equal, nl.less: np.less,
}  # fmt: skip


@pytest.mark.parametrize("op", COMPARISONS, ids=lambda op: op.__name__)
def test_affine_select(dev, op):
    a = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    for pattern in ([[-1, 24]], [[2, 4], [-3, 6]]):
        got = dev.run(selected, a, pattern, 3, 2, -1e30, op, nl.float32)
        holds = COMPARISONS[op](places(4, pattern, 3, 2), 0)
        np.testing.assert_array_equal(got, np.where(holds, a, np.float32(-1e30)))


def test_affine_select_compares_equal_by_default(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        t = nl.load(a)
        nisa.affine_select(t, [[-1, 4]], 0, 1, t, 0)
        nisa.dma_copy(out, t)
        return out

    a = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
    np.testing.assert_array_equal(dev.run(kernel, a), a * np.eye(4))


def test_affine_select_casts_what_it_keeps_and_the_number(dev):
    a = np.array([[1e6, -1e6, 0.3, np.nan]] * 4, np.float32)
    for saturate in (False, True):
        args = ([[1, 4]], -1, 0, 1e9, nl.greater_equal, formats.FP16, saturate)
        got = dev.run(selected, a, *args)
        want = np.where([False, True, True, True], a, np.float32(1e9))
        want = formats.FP16.encode(want, saturate=saturate)
        np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    got = dev.run(selected, a, [[1, 4]], -1, 0, -2.5, nl.equal, nl.int8)
    assert got.tolist() == [[-2, -128, -2, -2]] * 4


def test_a_view_in_another_order_is_selected_by_its_own(dev):
    """The pattern follows the dimensions of dst as the kernel sees them."""

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 6, 4), nl.float32, buffer=nl.shared_hbm)
        t = nl.ndarray((4, 6, 4), nl.float32, buffer=nl.sbuf)
        turned = nl.load(a).reshape(4, 4, 6).permute(0, 2, 1)
        nisa.affine_select(t, [[10, 6], [-1, 4]], -20, 0, turned, 7, nl.less)
        nisa.dma_copy(out, t)
        return out

    a = np.arange(96, dtype=np.float32).reshape(4, 24)
    holds = places(4, [[10, 6], [-1, 4]], -20, 0).reshape(4, 6, 4) < 0
    want = np.where(holds, a.reshape(4, 4, 6).transpose(0, 2, 1), 7)
    np.testing.assert_array_equal(dev.run(kernel, a), want)


# Integers -----------------------------------------------------------------------------------------


def exact(code, x, y, signed):
    """One operation on two Python integers."""
    mask = 0xFFFFFFFF

    def number(v):
        v &= mask
        return v - (v >> 31 << 32) if signed else v

    a, b = number(x), number(y)
    table = {
        AluOp.ADD: lambda: a + b, AluOp.SUBTRACT: lambda: a - b, AluOp.MULTIPLY: lambda: a * b,
        AluOp.MAX: lambda: max(a, b), AluOp.MIN: lambda: min(a, b),
        AluOp.ABS_MAX: lambda: max(abs(a), abs(b)), AluOp.ABS_MIN: lambda: min(abs(a), abs(b)),
        AluOp.EQUAL: lambda: a == b, AluOp.NOT_EQUAL: lambda: a != b, AluOp.LESS: lambda: a < b,
        AluOp.GREATER_EQUAL: lambda: a >= b, AluOp.GREATER: lambda: a > b,
        AluOp.LESS_EQUAL: lambda: a <= b, AluOp.LOGICAL_AND: lambda: bool(a) and bool(b),
        AluOp.LOGICAL_OR: lambda: bool(a) or bool(b), AluOp.LOGICAL_XOR: lambda: bool(a) ^ bool(b),
        AluOp.BITWISE_AND: lambda: a & b, AluOp.BITWISE_OR: lambda: a | b,
        AluOp.BITWISE_XOR: lambda: a ^ b, AluOp.BITWISE_NOT: lambda: ~a,
        AluOp.LEFT_SHIFT: lambda: a << min(y & mask, 32),
        AluOp.RIGHT_SHIFT: lambda: a >> min(y & mask, 32),
    }  # fmt: skip
    return int(table[code]()) & mask


def stored(values, shape, dtype):
    mask = (1 << 8 * np.dtype(dtype).itemsize) - 1
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return (
        np.array([v & mask for v in values], np.uint64).astype(unsigned).view(dtype).reshape(shape)
    )


@nki.jit
def pair(a, b, op, dtype):
    out = nl.ndarray(a.shape, dtype, buffer=nl.shared_hbm)
    t = nl.ndarray(a.shape, dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(t, nl.load(a), nl.load(b), op, GPSIMD)
    nisa.dma_copy(out, t)
    return out


@pytest.mark.parametrize("code", operations.ALU, ids=lambda op: op.name.lower())
def test_tensor_tensor_of_integers_is_exact(dev, code):
    kinds = [
        (np.int32, np.int32, np.int32), (np.uint32, np.uint32, np.uint32),
        (np.int8, np.uint16, np.int32), (np.uint8, np.int16, np.int16),
    ]  # fmt: skip
    for first, second, dtype in kinds:
        a, b = integers((4, 20), 1, first), integers((4, 20), 2, second)
        if code in SHIFTS:
            b = (b % 40).astype(second)
        got = dev.run(pair, a, b, operations.ALU[code], formats.format_of(dtype))
        pairs = zip(a.reshape(-1).tolist(), b.reshape(-1).tolist(), strict=True)
        signed = np.issubdtype(first, np.signedinteger)
        want = stored([exact(code, x, y, signed) for x, y in pairs], a.shape, dtype)
        np.testing.assert_array_equal(got, want)


def test_sums_beyond_24_bits_are_exact_on_this_engine_only(dev):
    a = np.full((4, 2), (1 << 24) + 1, np.int32)
    one = np.ones((4, 2), np.int32)
    got = dev.run(pair, a, one, nl.add, nl.int32)
    np.testing.assert_array_equal(got, a + 1)

    @nki.jit
    def rounded(a, b):
        out = nl.ndarray(a.shape, nl.int32, buffer=nl.shared_hbm)
        nl.store(out, nl.add(nl.load(a), nl.load(b)))
        return out

    assert (dev.run(rounded, a, one) != got).any()


@nki.jit
def with_scalars(a, s, op0, op1, reverse0, reverse1, first, second):
    """Operands: ``"s"`` and a column of ``s``, or numbers."""
    out = nl.ndarray(a.shape, nl.int32, buffer=nl.shared_hbm)
    columns = nl.load(s)
    operands = [columns[:, v[1] : v[1] + 1] if isinstance(v, tuple) else v for v in (first, second)]
    t = nl.ndarray(a.shape, nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        t, nl.load(a), op0, operands[0], reverse0, op1, operands[1], reverse1, GPSIMD
    )
    nisa.dma_copy(out, t)
    return out


@pytest.mark.parametrize("second", [("s", 2), -7, None])
@pytest.mark.parametrize("first", [("s", 1), 0xFFFFFFFF])
@pytest.mark.parametrize("reverse", [(False, True), (True, False)])
def test_tensor_scalar_of_integers(dev, reverse, first, second):
    """Arithmetic and bitwise operations in one instruction."""
    a, s = integers((4, 9), 3), integers((4, 4), 4)
    op1 = None if second is None else nl.bitwise_xor
    got = dev.run(with_scalars, a, s, nl.subtract, op1, *reverse, first, second)
    for p in range(4):
        for x, result in zip(a[p].tolist(), got[p].tolist(), strict=True):
            for code, v, swap in (
                (AluOp.SUBTRACT, first, reverse[0]), (AluOp.BITWISE_XOR, second, reverse[1])
            ):  # fmt: skip
                if v is None:
                    continue
                other = int(s[p, v[1]]) if isinstance(v, tuple) else v
                x = exact(code, *((other, x) if swap else (x, other)), True)
            assert result & 0xFFFFFFFF == x & 0xFFFFFFFF


# Compilation --------------------------------------------------------------------------------------


def test_instructions_of_the_gpsimd_engine_wait_and_are_waited_for():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        x = nl.load(a)
        nisa.affine_select(x, [[1, 8]], 0, 0, x, 0, nl.less)
        nisa.tensor_tensor(x, x, x, nl.add)
        nisa.dma_copy(out, x)
        return out

    program = kernel.compile(TINY, TensorSpec((4, 8), "fp32"))
    (select,) = (
        program.instruction(Engine.POOL, row) for row in range(len(program.queues[Engine.POOL]))
    )
    (total,) = (
        program.instruction(Engine.DVE, row) for row in range(len(program.queues[Engine.DVE]))
    )
    assert len(select.waits) == 1  # for the load
    assert (select.compare, select.step0) == (Compare.LESS, 1)
    assert select.update.semaphore in [wait.semaphore for wait in total.waits]
    assert program.stats["instructions"] == {"SP": 1, "POOL": 1, "DVE": 1, "ACT": 1}


def test_the_identity_matrix_is_made_where_it_is(dev):
    """No DMA: ones, of which those off the diagonal are replaced."""

    @nki.jit
    def kernel():
        out = nl.ndarray((3, 3), nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, nl.shared_identity_matrix(3, nl.bfloat16))
        return out

    program = kernel.compile(TINY)
    assert program.stats["instructions"]["POOL"] == 1
    assert sum(program.stats["instructions"].values()) == 3
    got = dev.run(kernel)
    np.testing.assert_array_equal(got, np.eye(3, dtype=ml_dtypes.bfloat16))


# What is refused ----------------------------------------------------------------------------------


def tile(shape=(4, 8), dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray(shape, dtype, buffer=buffer, name="t")


def whole():
    return tile(dtype=nl.int32)


def select(pattern=((1, 8),), offset=0, multiplier=0, source=None, value=0, op=nl.less):
    dst = tile()
    source = tile() if source is None else source
    nisa.affine_select(dst, pattern, offset, multiplier, source, value, op)


REFUSED = {
    "iota in psum": (
        lambda: nisa.iota(tile(buffer=nl.psum), [[1, 8]]),
        "iota dst .*must be in sbuf; allocate it with buffer=nl.sbuf",
    ),
    "a pattern that is none": (
        lambda: nisa.iota(tile(), 8), r"pattern must be a list of \[step, count\].*not 8",
    ),
    "no dimension": (lambda: nisa.iota(tile(), []), r"pattern \[\] must have 1 to 4 dimensions"),
    "five dimensions": (
        lambda: nisa.iota(tile(), [[1, 1]] * 4 + [[1, 8]]), "must have 1 to 4 dimensions",
    ),
    "elements": (
        lambda: nisa.iota(tile(), [[1, 3], [1, 3]]),
        r"pattern .* has 9 elements, but dst t \[4, 8\].* has 8",
    ),
    "dimensions that do not fit": (
        lambda: nisa.iota(tile((4, 4, 6))[:, :, 1:4], [[1, 3], [1, 4]]),
        "dimensions of pattern .* do not fit those of dst.*use a tile of its own",
    ),
    "too many dimensions together": (
        lambda: nisa.iota(
            tile((4, 4, 3, 3, 3))[:, :, ::2, ::2, ::2], [[1, 2], [1, 2], [1, 8]]
        ),
        "together need 5 dimensions; 4 fit",
    ),
    "step": (
        lambda: nisa.iota(tile(), [[1 << 31, 8]]), "iota step = 2147483648 must be an integer of",
    ),
    "broken step": (lambda: nisa.iota(tile(), [[0.5, 8]]), r"iota step = 0\.5 must be an integer"),
    "offset": (lambda: nisa.iota(tile(), [[1, 8]], 0.5), r"iota offset = 0\.5 must be an integer"),
    "multiplier": (
        lambda: nisa.iota(tile(), [[1, 8]], 0, -(1 << 31) - 1),
        "iota channel_multiplier = -2147483649 must be",
    ),
    "broadcast": (
        lambda: nisa.iota(tile((4, 1)).broadcast_to((4, 8)), [[1, 8]]), "can only be read",
    ),
    "comparison": (
        lambda: select(op=nl.add),
        r"affine_select cmp_op: nl\.add is not .*; there are nl\.equal, nl\.greater,",
    ),
    "shape of a source": (
        lambda: select(source=tile((4, 7))), "on_true_tile .* must have the same partitions",
    ),
    "source in psum": (
        lambda: select(source=tile(buffer=nl.psum)),
        "affine_select on_true_tile = .* must be in sbuf; copy it to SBUF",
    ),
    "a tile as number": (
        lambda: select(value=tile((4, 1))), "on_false_value = .* must be a number",
    ),
    "words as number": (lambda: select(value="0"), "on_false_value must be a number"),
    "floats": (
        lambda: nisa.tensor_tensor(tile(), whole(), whole(), nl.add, GPSIMD),
        "computes with integers, so t .*float32.* must be one; leave engine out",
    ),
    "a float as operand": (
        lambda: nisa.tensor_scalar(whole(), whole(), nl.add, 0.5, engine=GPSIMD),
        "an integer of 32 bits",
    ),
    "a tile of floats as operand": (
        lambda: nisa.tensor_scalar(whole(), whole(), nl.add, tile((4, 1)), engine=GPSIMD),
        "must be int32 or uint32",
    ),
    "integers in psum": (
        lambda: nisa.tensor_tensor(
            whole(), tile(buffer=nl.psum).view(nl.int32), whole(), nl.add, GPSIMD
        ),
        "does not reach PSUM, where t .* is; copy it to SBUF",
    ),
    "saturated integers": (
        lambda: nisa.tensor_tensor(*(whole() for _ in "abc"), nl.add, GPSIMD, saturate=True),
        "wrap around, saturate=False",
    ),
    "shapes of integers": (
        lambda: nisa.tensor_tensor(whole(), whole(), whole()[:, :7], nl.add, GPSIMD),
        "same partitions and elements",
    ),
    "another engine": (
        lambda: nisa.tensor_tensor(*(whole() for _ in "abc"), nl.add, nisa.engine.scalar),
        r"runs on engine\.vector or engine\.gpsimd here, not on engine\.scalar",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message_that_helps(name):
    check_refused(*REFUSED[name], __file__)


def test_every_comparison_has_a_function():
    assert {operations.ALU[AluOp(code)] for code in Compare} == {
        operations.ALU[op] for op in operations.ALU if operations.ALU[op] in COMPARISONS
    }
    assert len(COMPARISONS) == len(Compare)
    assert not set(map(AluOp, Compare)) & set(BITWISE_OPS)
