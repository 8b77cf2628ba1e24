"""The vector and scalar engines in kernels: results to the bit, dependences, and what is refused.

Expected bits come from the golden model's own arithmetic (``sim.elementwise``, ``sim.activation``)
on numpy arrays, so that what is tested is which elements meet, not how they are added.
"""

import re
from pathlib import Path

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.nki import operations
from makalu.firmware.nki.trace import Op
from makalu.nki import KernelError, TensorSpec
from makalu.rtl.arch import formats, isa
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import BITWISE_OPS, AluOp, Engine, Function, ReduceOp
from makalu.sim.activation import evaluate
from makalu.sim.arithmetic import fma32
from makalu.sim.elementwise import operate, reduce_rows
from makalu.sim.golden import cast_in, cast_out

from .refusal import check_refused


@pytest.fixture(scope="module")
def dev():
    with makalu.open("TINY", "golden", hbm=1 << 20) as device:
        yield device


def bits(x, fmt=None):
    """An array as the engines see it: bits of binary32."""
    return cast_in(x, formats.format_of(x.dtype) if fmt is None else fmt)


def stored(found, dtype):
    """Bits of binary32 as numbers of a format."""
    return cast_out(found, formats.format_of(dtype), False)


def same(got, want):
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8)
    )


SPECIAL = np.array([0.0, -0.0, 1.5, -2.25, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-45], np.float32)


def numbers(shape, seed=0, dtype=np.float32):
    """Random numbers, zeros, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 0.2] = 0
    x.reshape(-1)[: len(SPECIAL)] = rng.permutation(SPECIAL)
    return x.astype(dtype)


def integers(shape, seed=0, dtype=np.int32):
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max, shape, dtype, endpoint=True)


ARITHMETIC = [op for op in operations.ALU if op not in BITWISE_OPS]


@nki.jit
def pair(a, b, op, dtype):
    out = nl.ndarray(a.shape, dtype, buffer=nl.shared_hbm)
    x, y = nl.load(a), nl.load(b)
    result = nl.ndarray(a.shape, dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(result, x, y, op)
    nisa.dma_copy(out, result)
    return out


@pytest.mark.parametrize("code", ARITHMETIC, ids=lambda op: op.name.lower())
def test_tensor_tensor_arithmetic(dev, code):
    a, b = numbers((4, 12), 1), numbers((4, 12), 2, ml_dtypes.bfloat16)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.int8):
        got = dev.run(pair, a, b, operations.ALU[code], formats.format_of(dtype))
        same(got, stored(operate(code, bits(a), bits(b)), dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int8])
@pytest.mark.parametrize("code", BITWISE_OPS, ids=lambda op: op.name.lower())
def test_tensor_tensor_bits(dev, code, dtype):
    a, b = integers((4, 12), 1, dtype), integers((4, 12), 2, dtype)
    if code in (AluOp.LEFT_SHIFT, AluOp.RIGHT_SHIFT):
        b = (b & 15).astype(dtype)
    unsigned = np.dtype(f"u{a.itemsize}")
    want = operate(code, a.view(unsigned), b.view(unsigned)).astype(unsigned)
    same(dev.run(pair, a, b, operations.ALU[code], formats.format_of(dtype)), want)


@nki.jit
def with_scalars(a, s, op0, op1, reverse0, reverse1, first, second):
    """Operands of tensor_scalar: column numbers of ``s``, or numbers."""
    out = nl.ndarray(a.shape, nl.float32, buffer=nl.shared_hbm)
    x, columns = nl.load(a), nl.load(s)
    operand0, operand1 = (
        columns[:, v : v + 1] if isinstance(v, int) else v for v in (first, second)
    )
    result = nl.ndarray(a.shape, nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(result, x, op0, operand0, reverse0, op1, operand1, reverse1)
    nisa.dma_copy(out, result)
    return out


@pytest.mark.parametrize("second", [2, -1.5, None])
@pytest.mark.parametrize("first", [1, 0.75])
@pytest.mark.parametrize("reverse", [(False, True), (True, False)])
def test_tensor_scalar(dev, reverse, first, second):
    a, s = numbers((4, 9), 3), numbers((4, 4), 4)
    op1 = None if second is None else nl.multiply
    want = bits(a)
    steps = ((AluOp.SUBTRACT, first, reverse[0]), (AluOp.MULTIPLY, second, reverse[1]))
    for code, v, swap in steps:
        if v is None:
            continue
        scalar = bits(s[:, v : v + 1]) if isinstance(v, int) else bits(np.float32([v]))
        want = operate(code, *((scalar, want) if swap else (want, scalar)))
    same(dev.run(with_scalars, a, s, nl.subtract, op1, *reverse, first, second), want)


def test_tensor_scalar_bits(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray(a.shape, nl.uint32, buffer=nl.shared_hbm)
        x = nl.load(a).view(nl.uint32)
        shifts = nl.full((4, 1), 9, nl.int32)
        nisa.tensor_scalar(x, x, nl.left_shift, shifts, op1=nl.bitwise_xor, operand1=-1)
        nisa.dma_copy(out, x)
        return out

    a = numbers((4, 8))
    same(dev.run(kernel, a), ~(a.view(np.uint32) << 9))


def test_scalar_tensor_tensor(dev):
    @nki.jit
    def kernel(a, b, s):
        out = nl.ndarray(a.shape, nl.float32, buffer=nl.shared_hbm)
        x, y, t = nl.load(a), nl.load(b), nl.load(s)
        nisa.scalar_tensor_tensor(x, x, nl.multiply, t[:, 1:2], nl.subtract, y, reverse1=True)
        nisa.scalar_tensor_tensor(x, x, nl.add, 2.0, nl.maximum, y)
        nisa.dma_copy(out, x)
        return out

    a, b, s = numbers((4, 9), 1), numbers((4, 9), 2), numbers((4, 3), 3)
    x = operate(AluOp.MULTIPLY, bits(a), bits(s[:, 1:2]))
    x = operate(AluOp.SUBTRACT, bits(b), x)
    x = operate(AluOp.ADD, x, bits(np.float32([2])))
    same(dev.run(kernel, a, b, s), operate(AluOp.MAX, x, bits(b)))


def test_sources_may_be_sums_in_psum(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        x = nl.load(a)
        sums = nl.ndarray((4, 4), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(sums, x, x)
        result = nl.ndarray((4, 4), nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(result, sums, x, nl.add)
        nisa.scalar_tensor_tensor(result, result, nl.multiply, 2.0, nl.add, sums)
        nisa.dma_copy(out, result)
        return out

    a = np.random.default_rng(0).integers(-3, 4, (4, 4)).astype(np.float16)
    product = a.T.astype(np.float32) @ a
    np.testing.assert_array_equal(dev.run(kernel, a), 3 * product + 2 * a)


@nki.jit
def reduced(a, op, axis, negate, keepdims):
    x = nl.load(a)
    axes = (axis,) if isinstance(axis, int) else axis
    kept = a.shape[: a.ndim - len(axes)]
    shape = (*kept, *(1 for _ in axes)) if keepdims or len(kept) == 1 else kept
    out = nl.ndarray(shape, a.dtype, buffer=nl.shared_hbm)
    result = nl.ndarray(shape, a.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(result, op, x, axis, negate=negate, keepdims=keepdims)
    nisa.dma_copy(out, result)
    return out


@pytest.mark.parametrize("axis", [-1, (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("code", operations.REDUCTIONS, ids=lambda op: op.name.lower())
def test_tensor_reduce(dev, code, axis):
    bitwise = AluOp(code) in BITWISE_OPS
    a = integers((4, 2, 3, 5)) if bitwise else numbers((4, 2, 3, 5))
    axes = 1 if axis == -1 else len(axis)
    rows = (a.view(np.uint32) if bitwise else bits(a)).reshape(*a.shape[: 4 - axes], -1)
    want = reduce_rows(code, rows)
    got = dev.run(reduced, a, operations.REDUCTIONS[code], axis, False, axis == -1)
    same(got.reshape(want.shape), want)
    if not bitwise:
        got = dev.run(reduced, a, operations.REDUCTIONS[code], axis, True, True)
        same(got.reshape(want.shape), want ^ np.uint32(1 << 31))


def test_tensor_reduce_walks_a_view_in_its_own_order(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 3, 2), nl.float32, buffer=nl.shared_hbm)
        windows = nl.load(a).reshape(4, 3, 2, 2, 3).permute(0, 1, 3, 2, 4)
        result = nl.ndarray((4, 3, 2), nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(result, nl.maximum, windows, axis=(3, 4))
        nisa.dma_copy(out, result)
        return out

    a = np.random.default_rng(0).standard_normal((4, 36)).astype(np.float32)
    want = a.reshape(4, 3, 2, 2, 3).transpose(0, 1, 3, 2, 4).max(axis=(3, 4))
    np.testing.assert_array_equal(dev.run(kernel, a), want)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_nc_transpose_is_exact(dev, dtype):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 3), a.dtype, buffer=nl.shared_hbm)
        sums = nl.ndarray((4, 2), nl.float32, buffer=nl.psum)
        x = nl.load(a)
        result = nl.ndarray((4, 3), a.dtype, buffer=nl.sbuf)
        nisa.nc_transpose(result, x)  # through PSUM
        nisa.nc_transpose(sums, x[:2])
        nisa.tensor_copy(result[:, :2], sums)
        nisa.dma_copy(out, result)
        return out

    a = np.random.default_rng(0).uniform(1, 2, (3, 4)) * [1, -30, 0.25, -0.02]
    a = formats.format_of(dtype).encode(a)
    same(dev.run(kernel, a), a.T)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8_e5m2", "int32", "uint16", "int8"])
def test_nc_transpose_copies_all_bits_if_asked(rng, dtype):
    """Payloads of NaN, infinities, -0; from and to partitions that are not the first."""
    fmt = formats.format_of(dtype)

    @nki.jit
    def kernel(a):
        tile = nl.ndarray((16, 11), a.dtype, buffer=nl.sbuf)
        turned = nl.ndarray((16, 7), a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile[8:15], a)
        nisa.nc_transpose(turned[:11], tile[8:15], bits=True)
        out = nl.ndarray((11, 7), a.dtype, buffer=nl.shared_hbm)
        nl.store(out, turned[:11])
        return out

    codes = rng.integers(0, 256, (7, 11 * fmt.bytes)).astype(np.uint8)
    codes[0] = 0xFF
    codes[1, -fmt.bytes :] = [0] * (fmt.bytes - 1) + [0x80]
    a = codes.view(fmt.dtype)
    with makalu.open("SMALL", "golden", hbm=1 << 20) as dev:
        assert dev.run(kernel, a).tobytes() == np.ascontiguousarray(a.T).tobytes()


@pytest.mark.parametrize("shape", [(4, 4, 1), (2, 2, 2), (3, 1, 4)])
def test_nc_transpose_copies_bits_of_tiles_with_more_axes(dev, rng, shape):
    @nki.jit
    def kernel(a):
        turned = nl.ndarray((shape[1] * shape[2], shape[0]), a.dtype, buffer=nl.sbuf)
        nisa.nc_transpose(turned, nl.load(a), bits=True)
        out = nl.ndarray(turned.shape, a.dtype, buffer=nl.shared_hbm)
        nl.store(out, turned)
        return out

    a = rng.integers(-(1 << 15), 1 << 15, shape).astype(np.int16)
    same(dev.run(kernel, a), a.reshape(shape[0], -1).T)


def test_dma_transpose_copies_bits(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((3, 4), a.dtype, buffer=nl.shared_hbm)
        t = nl.ndarray((3, 4), a.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(t, nl.load(a))
        nisa.dma_copy(out, t)
        return out

    for a in (numbers((4, 3)), integers((4, 3), dtype=np.int16), integers((4, 3), dtype=np.uint8)):
        same(dev.run(kernel, a), a.T)


def test_identity_matrix(dev):
    @nki.jit
    def kernel():
        out = nl.ndarray((2, 3, 3), nl.bfloat16, buffer=nl.shared_hbm)
        for i in range(2):
            nl.store(out[i], nl.shared_identity_matrix(3, nl.bfloat16))
        return out

    program = kernel.compile(TINY)
    # Made once
    assert (program.stats["instructions"]["DVE"], program.stats["instructions"]["POOL"]) == (1, 1)
    np.testing.assert_array_equal(dev.run(kernel), np.stack([np.eye(3)] * 2))


# The scalar engine --------------------------------------------------------------------------------


@nki.jit
def activated(a, s, op, scale, bias, dtype):
    out = nl.ndarray(a.shape, dtype, buffer=nl.shared_hbm)
    x, columns = nl.load(a), nl.load(s)
    scale, bias = (columns[:, v : v + 1] if isinstance(v, int) else v for v in (scale, bias))
    result = nl.ndarray(a.shape, dtype, buffer=nl.sbuf)
    nisa.activation(result, op, x, bias=bias, scale=scale)
    nisa.dma_copy(out, result)
    return out


@pytest.mark.parametrize("scale", [1.0, 0.5, 1])
@pytest.mark.parametrize("bias", [None, 0.25, 2])
def test_activation_scales_and_shifts(dev, scale, bias):
    rng = np.random.default_rng(0)
    a, s = (rng.integers(-9, 9, shape).astype(np.float32) for shape in ((4, 7), (4, 4)))

    def column(v):
        return s[:, v : v + 1] if isinstance(v, int) else np.float32(0 if v is None else v)

    want = a * column(scale) + column(bias)
    for op, reference in ((nl.copy, np.copy), (nl.square, np.square), (nl.abs, np.abs)):
        got = dev.run(activated, a, s, op, scale, bias, nl.float32)
        np.testing.assert_array_equal(got, reference(want))


def test_copies_on_the_scalar_engine_keep_signs_of_zero(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray(a.shape, nl.bfloat16, buffer=nl.shared_hbm)
        t = nl.ndarray(a.shape, nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(t, nl.load(a), engine=nisa.engine.scalar)
        nisa.dma_copy(out, t)
        return out

    a = numbers((4, 8))
    same(dev.run(kernel, a), stored(bits(a), ml_dtypes.bfloat16))


@pytest.mark.parametrize("code", Function, ids=lambda f: f.name.lower())
def test_functions(dev, code):
    @nki.jit
    def kernel(a, s):
        out = nl.ndarray(a.shape, nl.float32, buffer=nl.shared_hbm)
        x, columns = nl.load(a), nl.load(s)
        bias, scale = columns[:, 1:2], columns[:, 2:3]
        alpha = 0.25 if code == Function.PRELU else None
        nisa.activation(x, operations.FUNCTIONS[code], x, bias=bias, scale=scale, alpha=alpha)
        nisa.dma_copy(out, x)
        return out

    a, s = numbers((4, 12), 1), np.random.default_rng(2).standard_normal((4, 3), np.float32)
    argument = fma32(a, s[:, 2:3], s[:, 1:2])
    same(dev.run(kernel, a, s), evaluate(code, argument, 0.25 if code == Function.PRELU else 0.0))


def test_reciprocal_and_activation_reduce(dev):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 9), nl.float32, buffer=nl.shared_hbm)
        x, sums = nl.load(a), nl.ndarray((4, 1), nl.float32, buffer=nl.sbuf)
        y = nl.ndarray((4, 2, 4), nl.float32, buffer=nl.sbuf)
        nisa.activation_reduce(y, nl.exp, x.reshape(4, 2, 4), nl.add, sums, bias=1.0)
        nisa.reciprocal(x, x)
        nisa.dma_copy(out[:, :8], x)
        nisa.dma_copy(out[:, 8:], sums)
        return out

    a = numbers((4, 8))
    got = dev.run(kernel, a)
    one, minus_zero = np.float32(1), np.float32(-0.0)
    same(got[:, :8], evaluate(Function.RECIPROCAL, fma32(a, one, minus_zero)))
    powers = evaluate(Function.EXP, fma32(a, one, one))
    same(got[:, 8], reduce_rows(ReduceOp.ADD, powers.view(np.uint32)))


def test_tables_are_complete():
    assert set(operations.ALU) == set(AluOp) - {AluOp.BYPASS}
    assert set(operations.REDUCTIONS) == set(ReduceOp)
    assert set(operations.FUNCTIONS) == set(Function)
    for name in operations.__all__:
        assert getattr(nl, name) is getattr(operations, name)
        assert getattr(nl, name).__doc__
    for op in [*operations.ALU.values(), *operations.FUNCTIONS.values()]:
        assert getattr(nl, op.__name__) is op


def test_the_readme_lists_the_functions():
    text = (Path(__file__).parents[2] / "firmware" / "README.md").read_text()
    section = text.partition("### Elementwise functions")[2].partition("Tiles have the operators")[
        0
    ]
    named = set(re.findall(r"`(\w+)`", section))
    assert named >= set(operations.__all__) - {"divide"}


# Compilation --------------------------------------------------------------------------------------


def instructions(kernel, *args):
    program = kernel.compile(TINY, *args)
    return {
        e: [program.instruction(e, row) for row in range(len(program.queues[e]))] for e in Engine
    }


def test_scalars_are_waited_for_and_point_to_their_tile():
    @nki.jit
    def kernel(a, s):
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        x = nl.zeros((4, 8), nl.float32)
        spare = nl.load(a)
        columns = nl.load(s)
        nisa.tensor_scalar(x, x, nl.add, columns[:, 2:3])
        nisa.activation(spare, nl.exp, spare, bias=columns[:, 1:2], scale=columns[:, 3:4])
        nisa.dma_copy(out, x)
        return out

    queues = instructions(kernel, TensorSpec((4, 8), "fp32"), TensorSpec((4, 4), "fp32"))
    _, scale = queues[Engine.DVE]
    first, last = (i.update.semaphore for i in queues[Engine.SP])
    assert [w.semaphore for w in scale.waits] == [2, last]  # of what it reads: memset, columns
    assert scale.scalar0_pointer
    assert not scale.scalar1_pointer
    act, store = queues[Engine.ACT]
    assert [w.semaphore for w in act.waits] == [first, last]
    assert act.bias_pointer
    assert act.scale_pointer
    base = scale.scalar0 - 8
    assert (act.bias, act.scale) == (base + 4, base + 12)
    assert act.update.semaphore == 0  # nobody waits
    assert [w.semaphore for w in store.waits] == [2]
    program = kernel.compile(TINY, TensorSpec((4, 8), "fp32"), TensorSpec((4, 4), "fp32"))
    assert program.stats["instructions"] == {"SP": 2, "DVE": 2, "ACT": 2}


def test_others_wait_for_the_scalar_engine_by_its_semaphore():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        x, y = nl.load(a), nl.ndarray((4, 8), nl.float32, buffer=nl.sbuf)
        nisa.activation(y, nl.exp, x)
        nisa.tensor_tensor(y, y, x, nl.add)
        nisa.dma_copy(out, y)
        return out

    queues = instructions(kernel, TensorSpec((4, 8), "fp32"))
    act, store = queues[Engine.ACT]
    (vector,) = queues[Engine.DVE]
    assert (act.update.semaphore, act.update.value) == (3, 1)
    assert [(w.semaphore, w.value) for w in vector.waits] == [(3, 1)]
    assert [(w.semaphore, w.value) for w in store.waits] == [(2, 1)]


def test_a_scalar_tile_that_was_never_written_is_refused():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 8), nl.float32, buffer=nl.shared_hbm)
        x, s = nl.load(a), nl.ndarray((4, 2), nl.float32, buffer=nl.sbuf, name="s")
        nisa.memset(s[:, :1], 0)
        nisa.tensor_scalar(x, x, nl.add, s[:, 1:2])
        nisa.dma_copy(out, x)
        return out

    with pytest.raises(KernelError, match=r"s \[4, 2\] float32 in sbuf is read before anything"):
        kernel.compile(TINY, TensorSpec((4, 8), "fp32"))


def test_a_scalar_may_be_what_is_overwritten(dev):
    @nki.jit
    def kernel(s):
        out = nl.ndarray((4, 1), nl.float32, buffer=nl.shared_hbm)
        x = nl.load(s)
        nisa.tensor_scalar(x, x, nl.add, x)
        nisa.dma_copy(out, x)
        return out

    s = np.float32([[1], [2], [3], [4]])
    np.testing.assert_array_equal(dev.run(kernel, s), 2 * s)


def test_every_instruction_of_the_language_is_encoded_by_its_declaration():
    """The compiler knows no instruction but those of matmuls and transfers by name."""
    seen = set()

    @nki.jit
    def kernel(a):
        out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        x = nl.load(a)
        nl.store(out, nl.add(nl.exp(x) * 2.0, nl.max(x, 1)))
        return out

    trace = kernel.trace(TINY, TensorSpec((4, 8), "fp32"))
    for op in trace.ops:
        assert isinstance(op, Op)
        seen.add(op.kind)
    assert seen == {
        "dma", isa.Activation, isa.TensorScalar, isa.TensorReduce, isa.TensorTensor,
    }  # fmt: skip


# nki.language -------------------------------------------------------------------------------------


@nki.jit
def language(a, b, s):
    """A bit of everything that makes its own tile."""
    out = nl.ndarray((7, *a.shape), nl.float32, buffer=nl.shared_hbm)
    x, y, column = nl.load(a), nl.load(b), nl.load(s)
    nl.store(out[0], x + y)
    nl.store(out[1], 2.0 - x)
    nl.store(out[2], (x - column) * 0.5)
    nl.store(out[3], -nl.maximum(x, y))
    nl.store(out[4], x > column)
    nl.store(out[5], nl.subtract(nl.max(x, axis=1, keepdims=True), y, dtype=nl.float32))
    nl.store(out[6], nl.minimum(nl.mean(x, axis=1), np.float32(3) * y))
    return out


def test_language_functions_and_operators(dev):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, (4, 8)).astype(np.float32) for _ in range(2))
    s = rng.integers(-8, 8, (4, 1)).astype(np.float32)
    got = dev.run(language, a, b, s)
    want = [
        a + b, 2 - a, (a - s) / 2, -np.maximum(a, b), a > s, a.max(1, keepdims=True) - b,
        np.minimum(a.mean(1, keepdims=True), 3 * b),
    ]  # fmt: skip
    np.testing.assert_array_equal(got, want)


def test_formats_of_results():
    def tile(dtype):
        return nl.zeros((4, 2), dtype)

    @nki.jit
    def kernel():
        found.append((tile(nl.bfloat16) + tile(nl.float32)).dtype)
        found.append((tile(nl.bfloat16) + tile(nl.float16)).dtype)
        found.append((tile(nl.int32) + tile(nl.float16)).dtype)
        found.append((tile(nl.int32) * 2).dtype)
        found.append((tile(nl.int32) * 2.5).dtype)
        found.append(nl.exp(tile(nl.bfloat16)).dtype)
        found.append(nl.sum(tile(nl.bfloat16), 1, dtype=nl.float32).dtype)
        out = nl.ndarray((4, 2), nl.int8, buffer=nl.shared_hbm)
        nl.store(out, tile(nl.int8))
        return out

    found = []
    kernel.trace(TINY)
    assert found == [
        nl.float32, nl.float32, nl.float16, nl.int32, nl.float32, nl.bfloat16, nl.float32,
    ]  # fmt: skip


# What is refused ----------------------------------------------------------------------------------


def tile(shape=(4, 8), dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray(shape, dtype, buffer=buffer, name="t")


def half(start):
    return tile((4, 8))[start : start + 2]


def shifted(t):
    nisa.tensor_scalar(t[:, 1:], t[:, :-1], nl.add, 1)


REFUSED = {
    "both in psum": (
        lambda: nisa.tensor_tensor(tile(), *(tile(buffer=nl.psum) for _ in "ab"), nl.add),
        r"both in psum.*tensor_copy first",
    ),
    "result in psum": (
        lambda: nisa.tensor_tensor(tile(buffer=nl.psum), tile(), tile(), nl.add),
        "must be in sbuf; allocate it with buffer=nl.sbuf",
    ),
    "in hbm": (
        lambda: nl.exp(tile(buffer=nl.hbm)), "must be in sbuf or psum; load it into SBUF",
    ),
    "shapes": (
        lambda: nisa.tensor_tensor(tile(), tile(), tile((4, 7)), nl.add),
        r"dst t \[4, 8\] float32 in sbuf and data2 t \[4, 7\].*same partitions and elements",
    ),
    "no operation": (
        lambda: nisa.tensor_tensor(tile(), tile(), tile(), nl.exp),
        r"tensor_tensor op: nl\.exp is not an operation of it; there are nl\.abs_max.*nl\.add,",
    ),
    "no function": (
        lambda: nisa.activation(tile(), nl.add, tile()),
        r"activation op: nl\.add is not an operation of it; there are nl\.abs,.*nl\.exp,",
    ),
    "no reduction": (
        lambda: nisa.tensor_reduce(tile((4, 1)), nl.subtract, tile(), 1), r"nl\.subtract is not",
    ),
    "a function of numpy": (
        lambda: nisa.tensor_tensor(tile(), tile(), tile(), np.add), "is not an operation of it",
    ),
    "mixed kinds": (
        lambda: nisa.tensor_scalar(
            *(tile(dtype=nl.int32) for _ in "ab"), nl.bitwise_and, 1, op1=nl.add, operand1=1
        ),
        r"nl\.bitwise_and, nl\.add must be all bitwise or all arithmetic",
    ),
    "bits of floats": (
        lambda: nisa.tensor_tensor(*(tile() for _ in "abc"), nl.bitwise_or),
        r"must be integers of one width; \.view\(nl\.uint32\)",
    ),
    "bits of two widths": (
        lambda: nisa.tensor_tensor(
            tile(dtype=nl.int8), tile(dtype=nl.int32), tile(dtype=nl.int32), nl.bitwise_or
        ),
        "integers of one width",
    ),
    "format of a scalar": (
        lambda: nisa.tensor_scalar(tile(), tile(), nl.add, tile((4, 1), nl.bfloat16)),
        "operand0 = .* must be float32: scalars in SBUF are not converted",
    ),
    "format of a scalar of bits": (
        lambda: nisa.tensor_scalar(
            *(tile(dtype=nl.int32) for _ in "ab"), nl.bitwise_or, tile((4, 1))
        ),
        "must be int32 or uint32",
    ),
    "scalars too many": (
        lambda: nisa.tensor_scalar(tile(), tile(), nl.add, tile((4, 2))),
        "one element for each partition, not 2",
    ),
    "partitions of a scalar": (
        lambda: nisa.tensor_scalar(half(0), half(2), nl.add, half(0)[:, :1]),
        r"lies on partitions 0:2, but must lie on those of the data, 2:4",
    ),
    "scalar in psum": (
        lambda: nisa.activation(tile(), nl.exp, tile(), bias=tile((4, 1), buffer=nl.psum)),
        "activation bias = .* must be in sbuf; copy it to SBUF",
    ),
    "scalar of words": (
        lambda: nisa.tensor_scalar(tile(), tile(), nl.add, "1"), "must be a number or a tile",
    ),
    "scalar of broken bits": (
        lambda: nisa.tensor_scalar(*(tile(dtype=nl.int32) for _ in "ab"), nl.bitwise_or, 0.5),
        "an integer of 32 bits",
    ),
    "operand without operation": (
        lambda: nisa.tensor_scalar(tile(), tile(), nl.add, 1, operand1=2), "operand1 = 2 needs op1",
    ),
    "axis of partitions": (
        lambda: nisa.tensor_reduce(tile((4, 1)), nl.add, tile(), (0, 1)),
        r"must be its last axes, without gaps: \(1,\); no engine reduces over partitions",
    ),
    "axis with a gap": (
        lambda: nisa.tensor_reduce(tile((4, 2)), nl.add, tile((4, 2, 2, 2)), (1, 3)),
        r"without gaps: \(3,\), \(2, 3\), \(1, 2, 3\)",
    ),
    "shape of a reduction": (
        lambda: nisa.tensor_reduce(tile((4, 2)), nl.add, tile((4, 8)), 1),
        r"must have shape \[4, 1\]",
    ),
    "negated bits": (
        lambda: nisa.tensor_reduce(
            tile((4, 1), nl.int32), nl.bitwise_or, tile(dtype=nl.int32), 1, negate=True
        ),
        "negate goes with arithmetic",
    ),
    "accumulators": (
        lambda: nisa.activation(tile(), nl.exp, tile(), reduce_cmd=nisa.reduce_cmd.reset_reduce),
        "no accumulators here; use nisa.activation_reduce",
    ),
    "slope": (lambda: nisa.activation(tile(), nl.prelu, tile()), "alpha is the slope"),
    "engine": (
        lambda: nisa.memset(tile(), 0, engine=nisa.gpsimd_engine),
        r"runs on engine\.vector here, not on engine\.gpsimd; leave engine out",
    ),
    "division": (
        lambda: tile() / tile(), r"no engine divides.*multiply by nl\.reciprocal\(y\)",
    ),
    "partitions to broadcast": (
        lambda: tile() + tile((1, 8)), r"DMA does: load with.*broadcast_to",
    ),
    "shapes to broadcast": (lambda: tile() + tile((4, 3)), "do not broadcast to each other"),
    "no tile": (lambda: nl.add(1, 2), r"nl\.add needs a tile"),
    "halves in psum": (
        lambda: nl.exp(tile(buffer=nl.psum).view(nl.bfloat16)), "numbers of 4 bytes",
    ),
    "transposed integers": (
        lambda: nisa.nc_transpose(tile((4, 4), buffer=nl.psum), tile((4, 4), nl.int8)),
        "bits=True copies any",
    ),
    "transposed bits of another format": (
        lambda: nisa.nc_transpose(tile((4, 4)), tile((4, 4), nl.int32), bits=True),
        "must have the format of data",
    ),
    "transposed bits in psum": (
        lambda: nisa.nc_transpose(tile((4, 4), buffer=nl.psum), tile((4, 4)), bits=True),
        "must be in sbuf",
    ),
    "transposed bits of every other element": (
        lambda: nisa.nc_transpose(tile((4, 4)), tile((4, 8))[:, ::2], bits=True),
        "cannot be read as uint8",
    ),
    "shape of a transpose": (
        lambda: nisa.nc_transpose(tile((4, 4), buffer=nl.psum), tile((3, 4))),
        r"must have shape \[4, 3\]",
    ),
    "shifted in place": (
        lambda: shifted(nl.zeros((4, 8), nl.float32)),
        "source and destination overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message_that_helps(name):
    check_refused(*REFUSED[name], __file__)
