"""DMA lowering: descriptors move exactly the elements that numpy's index arithmetic says."""

import math

import makalu.nki as nki
import makalu.nki.language as nl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makalu.firmware.compiler.transfer import MAX_COUNT, lower
from makalu.firmware.nki import TensorSpec
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.isa import DescriptorSide


def tensors(config, hbm_shape, tile_shape, dtype, tile_address=0):
    """(HBM tensor, SBUF tile, index arrays of both), the latter in addresses."""

    @nki.jit
    def kernel(a):
        seen.append(a)
        seen.append(nl.ndarray(tile_shape, dtype, buffer=nl.sbuf))
        return nl.ndarray((1,), nl.int8, buffer=nl.hbm)

    seen = []
    kernel.trace(config, TensorSpec(hbm_shape, dtype))
    a, tile = seen
    tile.storage.address = tile_address
    size = a.dtype.bytes
    hbm = np.arange(np.prod(hbm_shape)).reshape(hbm_shape) * size
    free = np.arange(np.prod(tile_shape[1:])) * size + tile_address
    part = np.arange(tile_shape[0]) * config.sbuf_partition_stride
    return a, tile, hbm, (part[:, None] + free).reshape(tile_shape)


def moved(plan, which):
    """Byte addresses in the order of transfer, ``which`` is ``"src"`` or ``"dst"``."""
    found = []
    for engine in plan.engines:
        for piece in engine:
            dims = getattr(piece, f"{which}_dims")
            assert len(dims) <= 4
            assert all(0 <= count <= MAX_COUNT for _, count in dims)
            size = 1 << piece.size_log2
            at = DescriptorSide(getattr(piece, which), dims).addresses(size)
            found.append((at[:, None] + np.arange(size)).reshape(-1))
    return np.concatenate(found)


def check(config, dst, src, dst_index, src_index):
    size = dst.dtype.bytes
    plan = lower(config, dst, src, 0)
    assert plan.first + len(plan.engines) <= config.dma_engines
    assert len({len(engine) for engine in plan.engines}) == 1
    got_src, got_dst = moved(plan, "src"), moved(plan, "dst")
    lanes = np.arange(size)
    want_src = (src_index.reshape(-1)[:, None] + lanes).reshape(-1)
    want_dst = (dst_index.reshape(-1)[:, None] + lanes).reshape(-1)
    order, wanted = np.argsort(got_dst, kind="stable"), np.argsort(want_dst, kind="stable")
    np.testing.assert_array_equal(got_dst[order], want_dst[wanted])
    np.testing.assert_array_equal(got_src[order], want_src[wanted])
    for side, view in ((plan.src, src), (plan.dst, dst)):
        if view.buffer == "sbuf":
            _check_sbuf(config, plan, "src" if side is plan.src else "dst")
    return plan


def _check_sbuf(config, plan, which):
    """What the hardware asks of the SBUF side of a descriptor."""
    stride = config.sbuf_partition_stride
    for engine in plan.engines:
        for piece in engine:
            size = 1 << piece.size_log2
            dims = getattr(piece, f"{which}_dims")
            offset = getattr(piece, which) % stride
            assert offset % size == 0
            for step, count in dims:
                if count > 1:
                    assert step % size == 0
                    assert abs(step) < stride or step % stride == 0
            low = offset + sum(min(0, s * (n - 1)) for s, n in dims if n and abs(s) < stride)
            high = offset + sum(max(0, s * (n - 1)) for s, n in dims if n and abs(s) < stride)
            assert low >= 0
            assert high + size <= config.sbuf_bytes


CONFIGS = {"TINY": TINY, "SMALL": SMALL, "TRN": TRN}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16", "fp32"])
def test_loads_of_a_matmul(config, dtype):
    rows, k_tiles, m, n = config.rows, 3, 2 * config.rows + 3, 29
    a, tile, ai, ti = tensors(config, (m + 2, 4 * rows), (rows, k_tiles + 1, m), dtype)
    view = lambda x: x[1 : m + 1, rows:].reshape(m, k_tiles, rows)  # noqa: E731
    plan = check(
        config, tile[:, 1:], view(a).permute(2, 1, 0), ti[:, 1:], view(ai).transpose(2, 1, 0)
    )
    # HBM is read in rows: one run of all K tiles for each row of A.
    assert plan.engines[0][0].src_dims[0][1] == k_tiles * rows
    b, tile, bi, ti = tensors(config, (k_tiles * rows, n + 3), (rows, k_tiles, n), dtype)
    view = lambda x: x[:, 2 : n + 2].reshape(k_tiles, rows, n)  # noqa: E731
    check(config, tile, view(b).permute(1, 0, 2), ti, view(bi).transpose(1, 0, 2))


def test_engines_take_the_partitions_next_to_them():
    a, tile, ai, ti = tensors(TRN, (128, 512), (128, 512), "fp32")
    plan = check(TRN, a, tile, ai, ti)
    assert plan.first == 0
    assert len(plan.engines) == 16
    for e, engine in enumerate(plan.engines):
        partitions = {piece.src // TRN.sbuf_partition_stride for piece in engine}
        assert partitions <= set(range(8 * e, 8 * e + 8))
    assert all(piece.size_log2 == 2 for engine in plan.engines for piece in engine)


def test_small_transfers_use_few_engines_in_turn():
    a, tile, _, _ = tensors(TRN, (4, 16), (4, 16), "bf16")
    assert [lower(TRN, tile, a, cursor).first for cursor in (0, 1, 17)] == [0, 1, 1]
    assert len(lower(TRN, tile, a, 0).engines) == 1


def test_contiguous_bytes_move_in_wide_elements():
    a, tile, ai, ti = tensors(SMALL, (16, 64), (16, 64), "fp8_e4m3")
    plan = check(SMALL, tile, a, ti, ai)
    assert plan.engines[0][0].size_log2 == 2
    plan = check(SMALL, tile[:, 1:7], a[:, 1:7], ti[:, 1:7], ai[:, 1:7])
    assert plan.engines[0][0].size_log2 == 0
    plan = check(SMALL, tile[:, 2:8], a[:, 3:9], ti[:, 2:8], ai[:, 3:9])
    assert plan.engines[0][0].size_log2 == 1


def test_a_full_partition_does_not_run_into_the_next():
    a, tile, ai, ti = tensors(TINY, (4, 512), (4, 512), "fp32")
    check(TINY, tile, a, ti, ai)
    check(TINY, a, tile, ai, ti)


def test_more_than_65535_elements():
    @nki.jit
    def kernel(a):
        seen.append(a)
        out = nl.ndarray((70001 * 4,), nl.int32, buffer=nl.hbm)
        seen.append(out)
        return out

    seen = []
    kernel.trace(TINY, TensorSpec((70001 * 4,), "int32"))
    index = np.arange(70001 * 4) * 4
    check(TINY, seen[1], seen[0], index, index)
    check(TINY, seen[1][::4], seen[0][::4], index[::4], index[::4])


def test_many_dimensions_become_several_descriptors():
    shape = (3, 3, 3, 3, 3, 3)
    a, tile, ai, ti = tensors(TINY, (5,) * 6, (3, 243 * 3), "fp16")
    view = lambda x: x[1:4, ::2, 1:4, ::2, 1:4, ::2]  # noqa: E731
    target = lambda x: x[:, ::3].reshape(shape)  # noqa: E731
    plan = check(TINY, target(tile), view(a), target(ti), view(ai))
    assert len(plan.engines[0]) > 1


@st.composite
def copies(draw):
    """A machine, shapes, and functions that slice and permute both sides alike."""
    config = draw(st.sampled_from([TINY, SMALL]))
    dtype = draw(st.sampled_from(["fp8_e5m2", "bf16", "fp32"]))
    partitions = draw(st.integers(1, config.partitions))
    shape = (partitions, *draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    order = draw(st.permutations(range(len(shape))))
    pads = [draw(st.integers(0, 2)) for _ in shape]
    steps = [draw(st.integers(1, 2)) for _ in shape]
    tile_pads = [0, *(draw(st.integers(0, 2)) for _ in shape[1:])]
    tile_bytes = math.prod(n + p for n, p in zip(shape[1:], tile_pads[1:], strict=True))
    tile_bytes *= {"fp8_e5m2": 1, "bf16": 2, "fp32": 4}[dtype]
    address = 16 * draw(st.integers(0, min(3, (config.sbuf_bytes - tile_bytes) // 16)))
    return config, dtype, shape, order, pads, steps, tile_pads, address


@settings(max_examples=150, deadline=None)
@given(copies(), st.booleans())
def test_any_views(case, store):
    config, dtype, shape, order, pads, steps, tile_pads, address = case
    hbm_shape = tuple(n * s + p for n, s, p in zip(shape, steps, pads, strict=True))
    hbm_shape = tuple(hbm_shape[i] for i in order)
    tile_shape = tuple(n + p for n, p in zip(shape, tile_pads, strict=True))
    a, tile, ai, ti = tensors(config, hbm_shape, tile_shape, dtype, address)
    cut = tuple(slice(pads[i], pads[i] + shape[i] * steps[i], steps[i]) for i in order)
    back = tuple(int(i) for i in np.argsort(order))
    view = lambda x: x[cut].transpose(*back)  # noqa: E731
    target = lambda x: x[tuple(slice(p, p + n) for n, p in zip(shape, tile_pads, strict=True))]  # noqa: E731
    if store:
        check(config, view(a), target(tile), view(ai), target(ti))
    else:
        check(config, target(tile), view(a), target(ti), view(ai))


def test_broadcast_source():
    a, tile, ai, ti = tensors(SMALL, (1, 40), (16, 40), "fp32")
    check(SMALL, tile, a.broadcast_to(16, 40), ti, np.broadcast_to(ai, (16, 40)))
