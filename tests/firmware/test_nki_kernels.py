"""Kernels as users write them: the staircase of matmuls, ragged edges, transposes, casts."""

import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.rtl.arch.config import SMALL, TINY


@nki.jit
def one_tile(lhsT, rhs):
    """One tile; K on partitions in both operands."""
    (K, M), (K_, N) = lhsT.shape, rhs.shape
    assert K == K_
    result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)
    lhs_tile = nl.ndarray(lhsT.shape, dtype=lhsT.dtype, buffer=nl.sbuf)
    rhs_tile = nl.ndarray(rhs.shape, dtype=rhs.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=lhs_tile, src=lhsT)
    nisa.dma_copy(dst=rhs_tile, src=rhs)
    result_psum = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(result_psum, lhs_tile, rhs_tile)
    result_sbuf = nl.ndarray(result_psum.shape, dtype=result.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result_sbuf, src=result_psum)
    nisa.dma_copy(dst=result, src=result_sbuf)
    return result


def tiled(hoist):
    """Tiles in loops; loads in the inner loop or hoisted; stores convert on the way."""

    @nki.jit
    def kernel(lhsT, rhs):
        (K, M), (_, N) = lhsT.shape, rhs.shape
        tile_m = nl.tile_size.gemm_stationary_fmax
        tile_k, tile_n = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
        result = nl.ndarray((M, N), dtype=lhsT.dtype, buffer=nl.shared_hbm)

        def load(source, k, first, size):
            tile = nl.ndarray((tile_k, size), dtype=source.dtype, buffer=nl.sbuf)
            rows = nl.ds(k * tile_k, tile_k)
            nisa.dma_copy(dst=tile, src=source[rows, first : first + size])
            return tile

        for m in nl.affine_range(M // tile_m):
            if hoist:
                lhs_tiles = [load(lhsT, k, m * tile_m, tile_m) for k in range(K // tile_k)]
            for n in nl.affine_range(N // tile_n):
                res_psum = nl.ndarray((tile_m, tile_n), nl.float32, buffer=nl.psum)
                for k in nl.sequential_range(K // tile_k):
                    lhs = lhs_tiles[k] if hoist else load(lhsT, k, m * tile_m, tile_m)
                    rhs_tile = load(rhs, k, n * tile_n, tile_n)
                    nisa.nc_matmul(dst=res_psum, stationary=lhs, moving=rhs_tile)
                res_sb = nl.ndarray(res_psum.shape, dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_copy(dst=res_sb, src=res_psum, engine=nisa.engine.vector)
                nisa.dma_copy(
                    dst=result[nl.ds(m * tile_m, tile_m), nl.ds(n * tile_n, tile_n)], src=res_sb
                )
        return result

    return kernel


@nki.jit
def blocked(lhsT, rhs, m_tiles=2, n_tiles=2):
    """Blocks of both free dimensions in 3-D tiles; one store for a block of columns."""
    (K, M), (_, N) = lhsT.shape, rhs.shape
    tile_m = nl.tile_size.gemm_stationary_fmax
    tile_k, tile_n = nl.tile_size.pmax, nl.tile_size.gemm_moving_fmax
    result = nl.ndarray((M, N), dtype=nl.float32, buffer=nl.shared_hbm)
    block_m, block_n, k_tiles = m_tiles * tile_m, n_tiles * tile_n, K // tile_k
    for n in nl.affine_range(N // block_n):
        rhs_tiles = nl.ndarray((tile_k, k_tiles, block_n), rhs.dtype, buffer=nl.sbuf)
        for k in nl.affine_range(k_tiles):
            nisa.dma_copy(
                dst=rhs_tiles[0:tile_k, k, 0:block_n],
                src=rhs[k * tile_k : (k + 1) * tile_k, n * block_n : (n + 1) * block_n],
            )
        for m in nl.affine_range(M // block_m):
            lhs_tiles = nl.ndarray((tile_k, k_tiles, block_m), lhsT.dtype, buffer=nl.sbuf)
            for k in nl.affine_range(k_tiles):
                nisa.dma_copy(
                    dst=lhs_tiles[:, k],
                    src=lhsT[k * tile_k : (k + 1) * tile_k, m * block_m : (m + 1) * block_m],
                )
            for i in nl.affine_range(m_tiles):
                row = nl.ndarray((tile_m, n_tiles, tile_n), nl.float32, buffer=nl.sbuf)
                for j in nl.affine_range(n_tiles):
                    res_psum = nl.zeros((tile_m, tile_n), nl.float32, buffer=nl.psum)
                    for k in nl.affine_range(k_tiles):
                        nisa.nc_matmul(
                            res_psum,
                            lhs_tiles[:, k, i * tile_m : (i + 1) * tile_m],
                            rhs_tiles[:, k, j * tile_n : (j + 1) * tile_n],
                        )
                    nisa.tensor_copy(row[:, j, :], res_psum)
                first = m * block_m + i * tile_m
                nisa.dma_copy(
                    dst=result[first : first + tile_m, n * block_n : (n + 1) * block_n],
                    src=row.reshape((tile_m, block_n)),
                )
    return result


STAIRCASE = {"in the loop": tiled(False), "hoisted": tiled(True), "blocked": blocked}


@pytest.mark.parametrize("config", [TINY, SMALL], ids=lambda c: c.name)
@pytest.mark.parametrize("kernel", STAIRCASE.values(), ids=STAIRCASE)
def test_the_matmul_staircase(machine, kernel, config):
    rng = np.random.default_rng(1)
    rows, width = config.partitions, config.psum_bank_words
    k, m, n = 2 * rows, 2 * rows, 2 * width
    lhsT, rhs = (
        rng.integers(-2, 3, shape).astype(np.float32).astype(ml_dtypes.bfloat16)
        for shape in ((k, m), (k, n))
    )
    program = kernel.compile(config, lhsT, rhs)
    got = machine(config, seed=2).run(program, {"lhsT": lhsT, "rhs": rhs})["result"]
    want = lhsT.astype(np.float32).T @ rhs.astype(np.float32)
    np.testing.assert_array_equal(got.astype(np.float32), want)


def test_one_tile(machine):
    rng = np.random.default_rng(1)
    lhsT, rhs = (rng.integers(-3, 4, s).astype(np.float16) for s in ((4, 3), (4, 16)))
    program = one_tile.compile(TINY, lhsT, rhs)
    got = machine(TINY).run(program, {"lhsT": lhsT, "rhs": rhs})["result"]
    np.testing.assert_array_equal(got, lhsT.T @ rhs)


@nki.jit
def transposed(a):
    """Transpose in SBUF tiles: across partitions on load, any length."""
    rows, cols = a.shape
    out = nl.ndarray((cols, rows), a.dtype, buffer=nl.shared_hbm)
    step = nl.tile_size.pmax
    for first in range(0, cols, step):
        last = min(first + step, cols)
        tile = nl.ndarray((step, rows), a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(tile[: last - first], a[:, first:last].permute(1, 0))
        nisa.dma_copy(out[first:last], tile[: last - first])
    return out


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 9), (17, 6)])
def test_transpose(machine, shape, dtype):
    a = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    program = transposed.compile(TINY, a)
    np.testing.assert_array_equal(machine(TINY, seed=1).run(program, {"a": a})["out"], a.T)


def test_casts_broadcast_and_fill(machine):
    @nki.jit
    def kernel(row):
        out = nl.ndarray((4, 8), nl.int32, buffer=nl.shared_hbm)
        halves = nl.ndarray((4, 8), nl.bfloat16, buffer=nl.sbuf)
        nisa.dma_copy(halves, row.broadcast_to(4, 8))  # float32 to bfloat16
        nisa.memset(halves[1:2, ::2], 7)
        nisa.dma_copy(out, halves)  # bfloat16 to int32
        return out

    row = np.arange(8, dtype=np.float32)[None] * 1.25
    want = np.broadcast_to(
        np.rint((row).astype(ml_dtypes.bfloat16).astype(np.float32)), (4, 8)
    ).copy()
    want[1, ::2] = 7
    got = machine(TINY, seed=5).run(kernel.compile(TINY, row), {"row": row})["out"]
    np.testing.assert_array_equal(got, want)


def test_load_copy_store(machine):
    @nki.jit
    def kernel(a):
        out = nl.ndarray(a.shape, nl.float16, buffer=nl.shared_hbm)
        nl.store(out, value=nl.copy(nl.load(a), dtype=nl.float16))
        return out

    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = machine(TINY).run(kernel.compile(TINY, a), {"a": a})["out"]
    np.testing.assert_array_equal(got, a)


def test_a_copy_does_not_follow_what_it_was_copied_from(machine):
    """nki-samples 78: x = [1]; y = copy(x); x = x + x gave [2] for y on the device."""

    @nki.jit
    def kernel(a, b):
        kept = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        later = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
        x = nl.load(a)
        y = nl.copy(x)
        nisa.dma_copy(x, b)
        z = nl.copy(x)
        nisa.memset(x, 9)
        nl.store(kept, y)
        nl.store(later, z)
        return kept, later

    a, b = np.ones((4, 8), np.float32), np.full((4, 8), 2, np.float32)
    program = kernel.compile(TINY, a, b)
    for seed in range(5):
        got = machine(TINY, seed=seed).run(program, {"a": a, "b": b})
        np.testing.assert_array_equal(got["kept"], a)
        np.testing.assert_array_equal(got["later"], b)


def test_several_outputs_and_scratch(machine):
    @nki.jit
    def kernel(a, b):
        total = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm, name="total")
        copy = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        between = nl.ndarray((4, 4), nl.float32, buffer=nl.private_hbm)
        nisa.dma_copy(between, a)
        nisa.dma_copy(copy, between)
        tile = nl.ndarray((4, 4), nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(tile, b)
        nisa.dma_copy(total, tile)
        return total, copy

    a, b = np.eye(4, dtype=np.float32), np.ones((4, 4), np.float32)
    program = kernel.compile(TINY, a, b)
    assert program.outputs == ("total", "copy")
    assert [t.kind for t in program.tensors] == ["input", "input", "output", "output", "scratch"]
    got = machine(TINY, seed=5).run(program, {"a": a, "b": b})
    np.testing.assert_array_equal(got["copy"], a)
    np.testing.assert_array_equal(got["total"], b)


def test_kernels_call_kernels(machine):
    @nki.jit
    def outer(lhsT, rhs):
        return one_tile(lhsT, rhs)

    one = np.ones((4, 4), np.float32)
    program = outer.compile(TINY, one, one)
    got = machine(TINY).run(program, {"lhsT": one, "rhs": one})["result"]
    np.testing.assert_array_equal(got, 4 * one)


def test_lists_of_tensors_are_arguments(machine):
    @nki.jit(platform_target="trn1")
    def kernel(parts):
        out = nl.ndarray((2, 4, 4), nl.float32, buffer=nl.shared_hbm)
        for i, part in enumerate(parts):
            nisa.dma_copy(out[i], part)
        return out

    parts = [np.full((4, 4), i, np.float32) for i in range(2)]
    program = kernel.compile(TINY, parts)
    assert program.inputs == ("parts0", "parts1")
    got = machine(TINY).run(program, {"parts0": parts[0], "parts1": parts[1]})["out"]
    np.testing.assert_array_equal(got, np.stack(parts))


def test_a_runner_receives_kernel_and_arguments(monkeypatch):
    from makalu.firmware.nki import trace

    calls = []
    monkeypatch.setattr(trace, "_runner", lambda *args: calls.append(args) or "ran")
    a = np.zeros((4, 4), np.float32)
    assert one_tile[1](a, rhs=a) == "ran"
    assert calls == [(one_tile, (a,), {"rhs": a})]
    assert [name for name, _ in one_tile.bind((a,), {"rhs": a})] == ["lhsT", "rhs"]
