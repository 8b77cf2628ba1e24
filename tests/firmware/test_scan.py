"""Scans, predicated copies and choices in kernels: results to the bit, and what is refused."""

import re

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels import scan
from makalu.nki import KernelError, TensorSpec
from makalu.rtl.arch.isa import CopyPredicated, Engine, TensorTensorScan

from .test_elementwise import instructions


@pytest.fixture(scope="module")
def dev():
    with makalu.open("TINY", "golden", hbm=1 << 20) as device:
        yield device


def scanned(op0, op1, initial=0.0, dtype=None, **options):
    @nki.jit
    def kernel(x, y, first):
        dst = nl.ndarray(x.shape, dtype or x.dtype, buffer=nl.sbuf)
        start = nl.load(first) if initial is None else initial
        nisa.tensor_tensor_scan(dst, nl.load(x), nl.load(y), start, op0, op1, **options)
        out = nl.ndarray(x.shape, dst.dtype, buffer=nl.shared_hbm)
        nl.store(out, dst)
        return out

    return kernel


F = np.float32
OPS = {"multiply": np.multiply, "add": np.add, "subtract": np.subtract, "maximum": np.maximum}


@pytest.mark.parametrize("second", OPS)
@pytest.mark.parametrize("first", OPS)
def test_a_scan_is_the_loop_over_its_elements(dev, rng, first, second):
    """Every operation rounds to float32; with both orders of the operands."""
    x, y = rng.standard_normal((2, 3, 17)).astype(F)
    start = rng.standard_normal((3, 1)).astype(F)
    for reverse0 in (False, True):
        for reverse1 in (False, True):
            last, want = start[:, 0], np.empty_like(x)
            for i in range(x.shape[1]):
                a = (last, x[:, i]) if reverse0 else (x[:, i], last)
                last = OPS[first](*a)
                b = (y[:, i], last) if reverse1 else (last, y[:, i])
                want[:, i] = last = OPS[second](*b)
            kernel = scanned(
                getattr(nl, first), getattr(nl, second), None, reverse0=reverse0, reverse1=reverse1
            )
            np.testing.assert_array_equal(dev.run(kernel, x, y, start), want)


def test_what_goes_on_is_not_rounded_to_the_format_of_dst(dev):
    x = np.ones((1, 8), F)
    y = np.array([[1] + [2.0**-9] * 7], F)
    got = dev.run(scanned(nl.multiply, nl.add, 0.0, nl.bfloat16), x, y, np.zeros((1, 1), F))
    want = np.cumsum(y.astype(np.float64), axis=1).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(got, want)
    rounded = np.zeros(1, ml_dtypes.bfloat16)
    for _ in range(8):
        rounded = (rounded.astype(F) + y[0, 0]).astype(ml_dtypes.bfloat16)
    assert rounded[0] != want[0, -1]


def test_a_scan_waits_for_its_initial_number():
    x = TensorSpec((4, 8), F)
    program = instructions(scanned(nl.multiply, nl.add, None), x, x, TensorSpec((4, 1), F))
    x_load, y_load, first_load = program[Engine.SP]
    (word,) = (w for w in program[Engine.DVE] if isinstance(w, TensorTensorScan))
    assert word.initial_pointer
    waited = {wait.semaphore for w in program[Engine.DVE] for wait in w.waits}
    assert {w.update.semaphore for w in (x_load, y_load, first_load)} <= waited


def copied(reverse=False, number=None):
    @nki.jit
    def kernel(x, y, p):
        dst = nl.load(y)
        src = nl.load(x) if number is None else number
        nisa.tensor_copy_predicated(dst, src, nl.load(p), reverse_pred=reverse)
        out = nl.ndarray(dst.shape, dst.dtype, buffer=nl.shared_hbm)
        nl.store(out, dst)
        return out

    return kernel


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int32, np.uint32])
@pytest.mark.parametrize("fmt", [F, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.int16])
def test_a_predicated_copy_leaves_the_others(dev, rng, fmt, kind):
    """Bytes of one word from both; a predicate with its only bit at the top counts."""
    shape = 4, 37
    x, y = (rng.integers(-9, 9, shape).astype(fmt) for _ in range(2))
    top = np.iinfo(kind).min or np.array(1 << 8 * np.dtype(kind).itemsize - 1, kind)
    p = rng.choice(np.array([0, 1, top], kind), shape)
    for reverse in (False, True):
        np.testing.assert_array_equal(
            dev.run(copied(reverse), x, y, p), np.where((p != 0) ^ reverse, x, y)
        )
        np.testing.assert_array_equal(
            dev.run(copied(reverse, 3), x, y, p), np.where((p != 0) ^ reverse, np.array(3, fmt), y)
        )


def test_a_predicated_copy_reads_what_it_leaves():
    """A destination that nothing wrote is refused; one that DMA writes is waited for."""

    @nki.jit
    def unwritten(x, p):
        dst = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        nisa.tensor_copy_predicated(dst, nl.load(x), nl.load(p))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, dst)
        return out

    x, p = TensorSpec((4, 8), F), TensorSpec((4, 8), np.uint8)
    with pytest.raises(KernelError, match="dst"):
        unwritten.compile("TINY", x, p)
    program = instructions(copied(), x, x, p)
    (word,) = (w for w in program[Engine.DVE] if isinstance(w, CopyPredicated))
    waited = {wait.semaphore for w in program[Engine.DVE] for wait in w.waits}
    assert {w.update.semaphore for w in program[Engine.SP]} <= waited
    assert word.dst.elements == 8


def test_where(dev, rng):
    @nki.jit
    def kernel(c, x, y):
        c, x, y = nl.load(c), nl.load(x), nl.load(y)
        tiles = nl.where(c, x, y), nl.where(nl.greater(x, y), x, 0.0), nl.where(x, 7.0, y)
        out = [nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm) for _ in tiles]
        for o, tile in zip(out, tiles, strict=True):
            nl.store(o, tile)
        return tuple(out)

    c = rng.integers(0, 2, (4, 9)).astype(np.uint8)
    x, y = rng.integers(-2, 3, (2, 4, 9)).astype(F)
    got = dev.run(kernel, c, x, y)
    for a, b in zip(
        got, (np.where(c, x, y), np.where(x > y, x, 0), np.where(x != 0, 7, y)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_reduction_beside_the_result(dev, rng):
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        dst = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
        sums = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar_reduce(dst, tile, nl.multiply, 2.0, nl.maximum, sums)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        most = nl.ndarray((x.shape[0], 1), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, dst)
        nl.store(most, sums)
        return out, most

    x = rng.standard_normal((4, 10)).astype(F)
    out, most = dev.run(kernel, x)
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(most, 2 * x.max(axis=1, keepdims=True))


def test_what_is_refused():
    def fails(message, x, body):
        @nki.jit
        def kernel(*args):
            body(*(nl.load(a) for a in args))

        with pytest.raises(KernelError, match=re.escape(message)):
            kernel.compile("TINY", *x)

    f, i = TensorSpec((4, 8), F), TensorSpec((4, 8), np.int32)
    fails(
        "tensor_tensor_scan: dst", (f, TensorSpec((4, 7), F)),
        lambda x, y: nisa.tensor_tensor_scan(x, x, y, 0.0, nl.multiply, nl.add),
    )  # fmt: skip
    fails(
        "tensor_tensor_scan op1", (f, f),
        lambda x, y: nisa.tensor_tensor_scan(x, x, y, 0.0, nl.multiply, nl.exp),
    )  # fmt: skip
    fails(
        "must have one element for each partition", (f, f),
        lambda x, y: nisa.tensor_tensor_scan(x, x, y, y, nl.multiply, nl.add),
    )  # fmt: skip
    fails(
        "must be all bitwise or all arithmetic", (i, i),
        lambda x, y: nisa.tensor_tensor_scan(x, x, y, 0, nl.bitwise_and, nl.add),
    )  # fmt: skip
    fails(
        "predicate", (f, f), lambda x, y: nisa.tensor_copy_predicated(x, y, y),
    )  # fmt: skip
    fails(
        "src must be a tile or a number", (f, i),
        lambda x, p: nisa.tensor_copy_predicated(x, "one", p),
    )  # fmt: skip
    fails("condition must be a tile", (f,), lambda x: nl.where(1, x, x))
    fails("nl.where needs a tile", (f,), lambda x: nl.where(x, 1, 2))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (9, 70)])
def test_running_sums(dev, rng, shape, monkeypatch):
    """Rows longer than a tile go on where the tile before ended."""
    monkeypatch.setattr(scan, "COLUMNS", 32)
    x = rng.integers(-99, 99, shape).astype(F)
    np.testing.assert_array_equal(dev.run(scan.cumsum, x), np.cumsum(x, axis=1))
