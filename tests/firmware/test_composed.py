"""Calls that take several instructions here: statistics, reductions over and exchanges of rows."""

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.nki import KernelError, TensorSpec

F = np.float32


@pytest.fixture(scope="module")
def dev():
    with makalu.open("TINY", "golden", hbm=1 << 20) as device:
        yield device


def calls(call, shape, dtype=None, first=0, **options):
    """A kernel of one call from one tile to another; both begin at partition ``first``."""

    @nki.jit
    def kernel(x):
        rows = first + x.shape[0]
        tile = nl.ndarray((rows, *x.shape[1:]), x.dtype, buffer=nl.sbuf)[first:]
        nisa.dma_copy(tile, x)
        dst = nl.ndarray((first + shape[0], *shape[1:]), dtype or x.dtype, buffer=nl.sbuf)[first:]
        nisa.memset(dst, 0)
        call(dst, tile, **options)
        out = nl.ndarray(shape, dst.dtype, buffer=nl.shared_hbm)
        nl.store(out, dst)
        return out

    return kernel


def statistics(x):
    """What ``bn_stats`` gives, in float64."""
    out = []
    for half in (x[:, ::2], x[:, 1::2]):
        half = half.astype(np.float64)
        n = half.shape[1]
        mean = half.mean(axis=1) if n else np.zeros(len(x))
        spread = ((half - mean[:, None]) ** 2).sum(axis=1)
        out += [np.full(len(x), n), mean, spread]
    return np.stack(out, axis=1)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("dtype", [F, ml_dtypes.bfloat16])
@pytest.mark.parametrize("columns", [1, 2, 7, 64])
def test_statistics_are_those_of_float64(dev, rng, columns, dtype, first):
    """Of numbers far from zero, of which the squares would cancel."""
    x = (100 + rng.standard_normal((2, columns))).astype(dtype)
    got = dev.run(calls(nisa.bn_stats, (2, 6), F, first), x)
    want = statistics(x)
    assert (got[:, ::3] == want[:, ::3]).all()
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=1e-6)


def test_statistics_may_go_where_the_elements_were(dev, rng):
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        nisa.bn_stats(tile[:, :6], tile)
        nisa.bn_aggr(tile[:, 1:3], tile[:, :6])
        out = nl.ndarray((x.shape[0], 2), x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile[:, 1:3])
        return out

    x = rng.standard_normal((2, 12)).astype(F)
    want = np.stack([x.mean(axis=1, dtype=np.float64), x.var(axis=1, dtype=np.float64)], axis=1)
    np.testing.assert_allclose(dev.run(kernel, x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [0, 2])
def test_groups_become_mean_and_variance(dev, rng, first):
    """Groups of different sizes, as they come from the pieces of a row."""
    x = (5 + rng.standard_normal((2, 90))).astype(F)
    pieces = [statistics(x[:, a:b]) for a, b in ((0, 40), (40, 41), (41, 90))]
    groups = np.concatenate(pieces, axis=1).astype(F)
    got = dev.run(calls(nisa.bn_aggr, (2, 2), F, first), groups)
    want = np.stack([x.mean(axis=1, dtype=np.float64), x.var(axis=1, dtype=np.float64)], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("shape", [(4, 5), (3, 9), (1, 1)])
@pytest.mark.parametrize(
    ("op", "dtype", "want"),
    [
        (nl.add, F, np.sum), (nl.maximum, F, np.max), (nl.minimum, np.int16, np.min),
        (nl.bitwise_or, np.uint32, np.bitwise_or.reduce),
        (nl.bitwise_and, np.uint8, np.bitwise_and.reduce),
    ],
)  # fmt: skip
def test_reductions_over_partitions(dev, rng, op, dtype, want, shape):
    """More elements than partitions, so that the tile is turned in pieces."""
    x = rng.integers(0, 250, shape).astype(dtype)
    kernel = calls(lambda dst, x: nisa.tensor_partition_reduce(dst, op, x), (1, shape[1]))
    assert (dev.run(kernel, x) == want(x, axis=0)).all()


def test_the_reduction_may_go_where_a_row_was(dev, rng):
    """In pieces, of which each is read before its row is written."""

    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        nisa.tensor_partition_reduce(tile[:1], nl.maximum, tile)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    x = rng.standard_normal((4, 9)).astype(F)
    want = x.copy()
    want[0] = x.max(axis=0)
    assert (dev.run(kernel, x) == want).all()


SHUFFLES = ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0], [2, 2, 2, 2], [255, 0, 255, 1], [255] * 4)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mask", SHUFFLES, ids=str)
def test_partitions_are_exchanged_inside_a_quarter(rng, mask, in_place):
    """Quarters of four partitions; the last one holds two, of which the mask reads no others."""

    @nki.jit
    def kernel(x, y):
        tile, dst = nl.load(x), nl.load(y)
        nisa.nc_stream_shuffle(tile if in_place else dst, tile, mask)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile if in_place else dst)
        return out

    x, y = rng.integers(0, 1 << 32, (2, 16, 9), np.uint32).view(F)
    want = (x if in_place else y).copy()
    for first in range(0, 16, 4):
        for i, entry in enumerate(mask):
            if entry != 255:
                want[first + i] = x[first + entry]
    with makalu.open("SMALL", "golden", hbm=1 << 20) as dev:
        assert dev.run(kernel, x, y).tobytes() == want.tobytes()


def test_rows_may_begin_at_any_partition(rng):
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        nisa.nc_stream_shuffle(tile[3:5], tile[3:5], [1, 0, 255, 255])
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    x = rng.standard_normal((8, 5)).astype(F)
    with makalu.open("SMALL", "golden", hbm=1 << 20) as dev:
        assert (dev.run(kernel, x) == x[[0, 1, 2, 4, 3, 5, 6, 7]]).all()


def refused(call, *shapes, dtypes=(F, F)):
    @nki.jit
    def kernel(*tensors):
        tiles = [nl.load(tensor) for tensor in tensors]
        call(*tiles)
        out = nl.ndarray(tiles[0].shape, tiles[0].dtype, buffer=nl.shared_hbm)
        nl.store(out, tiles[0])
        return out

    specs = [TensorSpec(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    with pytest.raises(KernelError) as caught:
        kernel.compile(makalu.SMALL, *specs)
    return str(caught.value)


def test_what_is_refused():
    assert "1 to 512" in refused(nisa.bn_stats, (4, 6), (4, 513))
    assert "[4, 6] float32" in refused(nisa.bn_stats, (4, 5), (4, 8))
    assert "[4, 6] float32" in refused(nisa.bn_stats, (4, 6), (4, 8), dtypes=(np.int32, F))
    assert "[2, 6] float32" in refused(nisa.bn_stats, (4, 6), (2, 8))
    assert "two axes" in refused(nisa.bn_stats, (4, 6), (4, 2, 3))
    assert "multiple of 3" in refused(nisa.bn_aggr, (4, 2), (4, 8))
    assert "[4, 2] float32" in refused(nisa.bn_aggr, (4, 3), (4, 6))
    for call, columns in ((nisa.bn_stats, 6), (nisa.bn_aggr, 2)):
        for side in (0, 1):

            def in_psum(dst, src, call=call, columns=columns, side=side):
                shape = (4, (columns, 6)[side])
                tiles = [dst, src]
                tiles[side] = nl.ndarray(shape, F, buffer=nl.psum)
                call(*tiles)

            if call is nisa.bn_aggr or side == 0:
                message = refused(in_psum, (4, columns), (4, 6))
                assert f"{call.__name__} {('dst', 'data')[side]}" in message
                assert "must be in sbuf" in message

    def reduce(dst, x):
        nisa.tensor_partition_reduce(dst, nl.add, x)

    assert "[1, 8]" in refused(reduce, (1, 7), (4, 8))

    def shuffle(mask):
        return lambda dst, src: nisa.nc_stream_shuffle(dst, src, mask)

    for mask in ([0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 0.9], ["0"] * 4, None, [-1, 0, 1, 2]):
        assert "4 integers of 0 to 3, or 255" in refused(shuffle(mask), (4, 8), (4, 8))
    assert "same shape and format" in refused(shuffle([0] * 4), (4, 8), (4, 9))
    assert "names row 5" in refused(shuffle([1, 0, 2, 3]), (5, 8), (5, 8))
