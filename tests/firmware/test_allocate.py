"""Allocation: tiles that live together never overlap; reuse rotates; errors name the tiles."""

import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import numpy as np
import pytest
from makalu.firmware.compiler import schedule
from makalu.firmware.compiler.allocate import allocate_psum, allocate_sbuf
from makalu.firmware.nki import KernelError, TensorSpec
from makalu.rtl.arch.config import SMALL, TINY


def allocated(kernel, *args, config=TINY):
    trace = kernel.trace(config, *args)
    schedule.lifetimes(trace)
    allocate_sbuf(trace)
    allocate_psum(trace)
    return trace


def check(trace):
    """No two tiles that live at the same time share a byte; everything lies in its memory."""
    config = trace.config
    for space, limit in (("sbuf", config.sbuf_bytes), ("psum", config.psum_bytes)):
        tiles = [s for s in trace.storages if s.buffer == space and s.span]
        for s in tiles:
            assert 0 <= s.address
            assert s.address + s.partition_bytes <= limit
            if space == "sbuf":
                assert s.address % 16 == 0
            else:
                bank = config.psum_bank_bytes
                assert s.address // bank == (s.address + s.partition_bytes - 1) // bank
        for i, s in enumerate(tiles):
            for other in tiles[i + 1 :]:
                together = s.span[0] <= other.span[1] and other.span[0] <= s.span[1]
                apart = (
                    s.address + s.partition_bytes <= other.address
                    or other.address + other.partition_bytes <= s.address
                )
                assert apart or not together, f"{s} and {other}"


@pytest.mark.parametrize("seed", range(30))
def test_tiles_that_live_together_never_overlap(seed):
    rng = np.random.default_rng(seed)
    total = int(rng.integers(2, 40))
    sizes = rng.integers(1, 120, total) * 4
    keep = int(rng.integers(1, 5))

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.int8, buffer=nl.shared_hbm)
        live = []

        def one(size):
            tile = nl.ndarray((4, size), nl.int8, buffer=nl.sbuf)
            nisa.memset(tile, 1)
            return tile

        def other(size):
            tile = nl.ndarray((4, size), nl.int8, buffer=nl.sbuf)
            nisa.memset(tile, 2)
            return tile

        for size in sizes:
            live.append((one, other)[int(rng.integers(2))](int(size)))
            if len(live) > keep:
                nisa.dma_copy(out[:, :1], live.pop(int(rng.integers(keep)))[:, :1])
        return out

    try:
        check(allocated(kernel, TensorSpec((4, 4), "int8")))
    except KernelError as error:
        assert "SBUF of TINY" in str(error)  # noqa: PT017


def test_a_loop_rotates_through_all_of_memory():
    """Double buffering falls out: reuse comes as late as memory allows."""

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 12 * 128), nl.int8, buffer=nl.shared_hbm)
        for i in range(12):
            tile = nl.ndarray((4, 128), nl.int8, buffer=nl.sbuf)
            nisa.dma_copy(tile, a[:, 128 * i : 128 * i + 128])
            nisa.dma_copy(out[:, 128 * i : 128 * i + 128], tile)
        return out

    trace = allocated(kernel, TensorSpec((4, 12 * 128), "int8"))
    check(trace)
    tiles = [s.address for s in trace.storages if s.buffer == "sbuf"]
    assert len(set(tiles)) == 12  # all fit

    @nki.jit
    def longer(a):
        out = nl.ndarray((4, 128), nl.int8, buffer=nl.shared_hbm)
        for _ in range(30):
            tile = nl.ndarray((4, 128), nl.int8, buffer=nl.sbuf)
            nisa.dma_copy(tile, a)
            nisa.dma_copy(out, tile)
        return out

    trace = allocated(longer, TensorSpec((4, 128), "int8"))
    tiles = [s.address for s in trace.storages if s.buffer == "sbuf"]
    slots = TINY.sbuf_bytes // 128
    assert len(set(tiles)) == slots
    assert tiles[slots:] == tiles[:-slots]  # least recently freed first


def test_pools_that_do_not_fit_share_memory():
    """Tiles of two phases, each most of SBUF, reuse each other's memory."""

    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.int8, buffer=nl.shared_hbm)
        first = nl.ndarray((4, 1500), nl.int8, buffer=nl.sbuf)
        nisa.memset(first, 1)
        nisa.dma_copy(out, first[:, :4])
        second = nl.ndarray((4, 1500), nl.int8, buffer=nl.sbuf)
        nisa.memset(second, 1)
        nisa.dma_copy(out, second[:, :4])
        return out

    check(allocated(kernel, TensorSpec((4, 4), "int8")))


def test_sbuf_overflow_names_tiles_need_and_limit():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.int8, buffer=nl.shared_hbm)
        weights = nl.ndarray((4, 1500), nl.int8, buffer=nl.sbuf)
        cache = nl.ndarray((4, 700), nl.int8, buffer=nl.sbuf)
        nisa.memset(weights, 1)
        nisa.memset(cache, 1)
        nisa.dma_copy(out, weights[:, :4])
        nisa.dma_copy(out, cache[:, :4])
        return out

    with pytest.raises(KernelError) as caught:
        allocated(kernel, TensorSpec((4, 4), "int8"))
    text = str(caught.value)
    assert "holds 2048 bytes per partition" in text
    assert "need 2208" in text
    assert "weights [4, 1500] int8 in sbuf: 1500 bytes" in text
    assert "cache [4, 700] int8 in sbuf: 700 bytes" in text
    assert f"{__file__}:" in text


def use(sums, s, m):
    nisa.nc_matmul(sums, s, m)


def psum_kernel(count, width):
    @nki.jit
    def kernel(a):
        out = nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)
        t = nl.ndarray((4, 16), nl.bfloat16, buffer=nl.sbuf)
        nisa.memset(t, 1)
        live = []
        for _ in range(count):
            sums = nl.ndarray((4, width), nl.float32, buffer=nl.psum)
            use(sums, t[:, :4], t[:, :width])
            live.append(sums)
        for sums in live:
            result = nl.ndarray((4, width), nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(result, sums)
            nisa.dma_copy(out[:, :4], result[:, :4])
        return out

    return kernel


def test_psum_tiles_take_banks_in_turn():
    trace = allocated(psum_kernel(8, 16), TensorSpec((4, 4), "int8"))
    check(trace)
    banks = [s.address // 64 for s in trace.storages if s.buffer == "psum"]
    assert sorted(banks) == list(range(8))


def test_psum_tiles_share_banks_when_they_must():
    trace = allocated(psum_kernel(16, 8), TensorSpec((4, 4), "int8"))
    check(trace)
    addresses = {s.address for s in trace.storages if s.buffer == "psum"}
    assert len(addresses) == 16


def test_psum_overflow_names_tiles():
    with pytest.raises(KernelError) as caught:
        allocated(psum_kernel(9, 16), TensorSpec((4, 4), "int8"))
    text = str(caught.value)
    assert "8 banks of 64 bytes" in text
    assert "sums [4, 16] float32 in psum" in text


def test_unused_tiles_take_no_memory():
    @nki.jit
    def kernel(a):
        out = nl.ndarray((16, 16), nl.int8, buffer=nl.shared_hbm)
        for _ in range(100):
            nl.ndarray((16, 16384), nl.int8, buffer=nl.sbuf)
        nisa.dma_copy(out, a)
        return out

    allocated(kernel, TensorSpec((16, 16), "int8"), config=SMALL)
