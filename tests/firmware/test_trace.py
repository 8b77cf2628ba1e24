"""Tracing: views, and errors that name tensors, limits and the kernel's line."""

import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import numpy as np
import pytest
from makalu.firmware.nki import KernelError, TensorSpec
from makalu.firmware.nki.tensor import PARTITION, byte_runs
from makalu.firmware.nki.trace import DMA
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.isa import TensorCopy

A = TensorSpec((4, 16), "fp32")


def trace(body, *args, config=TINY):
    """Trace ``body`` as a kernel that returns an output which it also stores something into."""

    @nki.jit
    def kernel(*tensors):
        out = nl.ndarray((4, 16), nl.float32, buffer=nl.shared_hbm)
        body(*tensors)
        return out

    return kernel.trace(config, *args)


def message(body, *args, config=TINY):
    with pytest.raises(KernelError) as caught:
        trace(body, *args, config=config)
    return str(caught.value)


def sbuf(shape, dtype=nl.float32, **more):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf, **more)


def psum(shape, dtype=nl.float32, **more):
    return nl.ndarray(shape, dtype, buffer=nl.psum, **more)


def test_too_many_partitions_names_tile_and_limit():
    def body():
        wide = nl.ndarray((5, 8), nl.float32, buffer=nl.sbuf)
        return wide

    text = message(body)
    assert "wide [5, 8] float32 in sbuf" in text
    assert "TINY has 4" in text
    assert f"{__file__}:" in text


def test_named_tensor_keeps_its_name():
    assert "weights [9, 8]" in message(lambda: sbuf((9, 8), name="weights"))


def test_psum_tile_wider_than_a_bank():
    text = message(lambda: psum((4, 17)))
    assert "68 bytes" in text
    assert "64 (16 float32" in text


def test_sbuf_tile_larger_than_sbuf():
    assert "2048" in message(lambda: sbuf((4, 513)))


def test_psum_holds_float32_only():
    assert "PSUM holds float32" in message(lambda: psum((4, 8), nl.bfloat16))


def test_tile_needs_a_free_axis():
    assert "free axis" in message(lambda: sbuf((4,)))


def test_unknown_dtype_lists_the_formats():
    assert "bf16" in message(lambda: sbuf((4, 4), "float7"))


def test_matmul_operand_in_hbm():
    text = message(lambda a: nisa.nc_matmul(psum((4, 4)), sbuf((4, 4)), a), A)
    assert "nc_matmul moving = arg0" in text or "nc_matmul moving = tensors0" in text
    assert "must be in sbuf" in text
    assert "nisa.dma_copy" in text


def test_matmul_dst_in_sbuf():
    text = message(lambda: nisa.nc_matmul(sbuf((4, 4)), sbuf((4, 4)), sbuf((4, 4))))
    assert "must be in psum" in text
    assert "buffer=nl.psum" in text


def test_matmul_mixes_float32_with_narrow():
    text = message(lambda: nisa.nc_matmul(psum((4, 4)), sbuf((4, 4)), sbuf((4, 4), nl.bfloat16)))
    assert "only with each other" in text


@pytest.mark.parametrize(
    ("dst", "stationary", "moving", "expected"),
    [
        ((4, 8), (4, 5), (4, 8), "has 5 columns"),
        ((4, 16), (4, 4), (4, 17), "at most 16 fit"),
        ((3, 8), (4, 4), (4, 8), "[M, N] = [4, 8]"),
        ((4, 7), (4, 4), (4, 8), "[M, N] = [4, 8]"),
        ((4, 8), (3, 4), (4, 8), "same partitions (K)"),
    ],
    ids=["stationary", "moving", "rows", "columns", "depth"],
)
def test_matmul_shapes(dst, stationary, moving, expected):
    assert expected in message(lambda: nisa.nc_matmul(psum(dst), sbuf(stationary), sbuf(moving)))


def test_matmul_on_different_partitions():
    def body():
        nisa.nc_matmul(psum((4, 4)), sbuf((4, 4))[0:1], sbuf((4, 4))[1:2])

    assert "same partitions" in message(body)


def test_start_partition_rule():
    def body(start, count):
        nisa.memset(sbuf((16, 4), nl.int8)[start : start + count], 0)

    assert "may start at 0, 8" in message(lambda: body(4, 5), config=SMALL)
    assert "may start at 0, not" in message(lambda: body(4, 9), config=SMALL)
    assert "may start at 0, 4, 8, 12" in message(lambda: body(2, 1), config=SMALL)
    trace(lambda: body(8, 8), config=SMALL)
    trace(lambda: body(12, 4), config=SMALL)


@pytest.mark.parametrize("accumulate", [None, True])
def test_partly_written_psum_region_needs_a_word(accumulate):
    def body():
        sums, s, m = psum((4, 8), name="psum_1"), sbuf((4, 4)), sbuf((4, 8))
        nisa.nc_matmul(sums[:, :4], s, m[:, :4])
        nisa.nc_matmul(sums, s, m, accumulate=accumulate)

    text = message(body)
    assert "accumulate=False" in text
    assert "16 of 32 elements, the first at psum_1[0, 4:8] (bytes 16:32 of partition 0)" in text


def test_accumulate_none_overwrites_first_and_adds_after():
    def body():
        sums, s, m = psum((4, 8)), sbuf((4, 4)), sbuf((4, 8))
        nisa.nc_matmul(sums[:, :4], s, m[:, :4])
        nisa.nc_matmul(sums[:, 4:], s, m[:, 4:])
        nisa.nc_matmul(sums[:, 4:], s, m[:, :4])
        nisa.nc_matmul(sums[:, 1:3], s, m[:, 1:3])

    found = [op.fields["accumulate"] for op in trace(body).ops]
    assert found == [False, False, True, True]


def test_accumulating_onto_nothing_is_explained():
    def body(make):
        sums, s, m = make((4, 8), nl.float32, buffer=nl.psum), sbuf((4, 4)), sbuf((4, 8))
        nisa.nc_matmul(sums, s, m, accumulate=True)
        nisa.nc_matmul(sums, s, m, accumulate=True)

    assert "no matmul has written dst" in message(lambda: body(nl.ndarray))
    assert [op.fields["accumulate"] for op in trace(lambda: body(nl.zeros)).ops] == [False, True]


def test_dma_shapes_must_agree():
    text = message(lambda a: nisa.dma_copy(sbuf((4, 15)), a), A)
    assert "same shape" in text
    assert "[4, 15]" in text
    assert "[4, 16]" in text


def test_dma_between_hbm_tensors_does_not_convert():
    def body(a):
        nisa.dma_copy(nl.ndarray((4, 16), nl.bfloat16, buffer=nl.hbm), a)

    assert "same number format" in message(body, A)


def test_dma_that_converts_goes_through_the_vector_engine():
    def body(a):
        tile = sbuf((4, 16), nl.bfloat16)
        nisa.dma_copy(tile, a)
        nisa.dma_copy(nl.ndarray((4, 16), nl.float32, buffer=nl.hbm), tile)

    ops = trace(body, A).ops
    assert [op.kind for op in ops] == [DMA, TensorCopy, TensorCopy, DMA]
    assert ops[0].dst.dtype is nl.float32
    assert ops[3].sources[0].dtype is nl.float32


def test_dma_does_not_reach_psum():
    assert "does not reach PSUM" in message(lambda a: nisa.dma_copy(psum((4, 16)), a), A)


def test_arguments_are_read_only():
    assert "argument of the kernel" in message(lambda a: nisa.dma_copy(a, sbuf((4, 16))), A)


def test_broadcast_view_cannot_be_written():
    text = message(lambda: nisa.memset(sbuf((4, 1)).broadcast_to(4, 8), 0))
    assert "broadcast view" in text

    def body():
        nisa.nc_matmul(psum((4, 1)).broadcast_to(4, 8), sbuf((4, 4)), sbuf((4, 8)))

    assert "broadcast view" in message(body)


def test_memset_of_psum_says_how_to_get_zeros():
    assert "nl.zeros(..., buffer=nl.psum)" in message(lambda: nisa.memset(psum((4, 8)), 0))


def test_tensor_copy_sizes_must_agree():
    assert "same partitions and elements" in message(
        lambda: nisa.tensor_copy(sbuf((4, 8)), sbuf((4, 4)))
    )


def test_lost_partition_axis_is_explained():
    assert "t[0:1" in message(lambda: nisa.memset(sbuf((4, 8))[0], 0))


def test_kernel_must_return_its_outputs():
    @nki.jit
    def silent(a):
        nisa.dma_copy(sbuf((4, 16)), a)

    with pytest.raises(KernelError, match="returns nothing"):
        silent.trace(TINY, A)

    @nki.jit
    def argument(a):
        return a

    with pytest.raises(KernelError, match="an output is a tensor of its own"):
        argument.trace(TINY, A)

    @nki.jit
    def part(a):
        return nl.ndarray((4, 4), nl.float32, buffer=nl.shared_hbm)[:2]

    with pytest.raises(KernelError, match="return all of it"):
        part.trace(TINY, A)


def test_calls_outside_a_kernel_are_explained():
    with pytest.raises(KernelError, match=r"@nki\.jit"):
        sbuf((4, 4))


def test_calling_a_kernel_without_a_device_is_explained(monkeypatch):
    from makalu.firmware.nki import trace as trace_module

    monkeypatch.setattr(trace_module, "_runner", None)

    @nki.jit
    def kernel(a):
        return a

    with pytest.raises(KernelError, match="no device is open"):
        kernel(np.zeros((4, 4), np.float32))


def test_arguments_of_a_kernel_may_have_any_names():
    @nki.jit
    def named(self, config, kernel):
        assert (config, kernel) == (1, 2)
        return nl.ndarray(self.shape, self.dtype, buffer=nl.shared_hbm)

    assert len(named.trace(TINY, self=A, config=1, kernel=2).storages) == 2


def test_tile_sizes_scale_with_the_machine():
    seen = {}

    def body():
        seen.update(
            pmax=nl.tile_size.pmax, psum=nl.tile_size.psum_fmax,
            stationary=nl.tile_size.gemm_stationary_fmax, moving=nl.tile_size.gemm_moving_fmax,
        )  # fmt: skip

    trace(body)
    assert seen == {"pmax": 4, "psum": 16, "stationary": 4, "moving": 16}
    trace(body, config=SMALL)
    assert seen == {"pmax": 16, "psum": 128, "stationary": 16, "moving": 128}
    assert nl.tile_size.pmax == 128


# Views --------------------------------------------------------------------------------------------


def flat(view):
    """Element numbers of an HBM view, from its steps."""
    index = np.full((1,) * view.ndim, view.offset)
    for axis, (n, step) in enumerate(zip(view.shape, view.steps, strict=True)):
        shape = [1] * view.ndim
        shape[axis] = n
        index = index + (np.arange(n) * step).reshape(shape)
    return index // view.dtype.bytes


VIEWS = {
    "slice": lambda t: t[1:3, :, 2:5],
    "step": lambda t: t[:, ::2, 1:6:2],
    "integer": lambda t: t[2, :, 3],
    "negative": lambda t: t[-1, -3:-1],
    "ellipsis": lambda t: t[..., 1],
    "permute": lambda t: t.transpose(2, 0, 1),
    "transposed": lambda t: t.T,
    "reshape": lambda t: t.reshape(2, 10, 6),
    "reshape-cut": lambda t: t[:, :, :4].reshape(4, 5, 2, 2),
    "reshape-joined": lambda t: t[1:3].reshape(-1, 3),
    "chain": lambda t: t[:, 1:4].transpose(1, 0, 2)[:, ::2].reshape(3, 2, 3, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_agree_with_numpy(name):
    @nki.jit
    def kernel(a):
        seen.append(a)
        return nl.ndarray((1,), nl.int8, buffer=nl.hbm)

    seen = []
    kernel.trace(TINY, TensorSpec((4, 5, 6), "fp16"))
    view = VIEWS[name](seen[0])
    np.testing.assert_array_equal(flat(view), VIEWS[name](np.arange(120).reshape(4, 5, 6)))


def test_view_errors():
    @nki.jit
    def kernel(a):
        seen.append(a)
        return nl.ndarray((1,), nl.int8, buffer=nl.hbm)

    seen = []
    kernel.trace(TINY, TensorSpec((4, 6), "fp16"))
    a = seen[0]
    with pytest.raises(IndexError, match=r"slice 2:7 on axis 1 is outside its 6 .*min\(stop, 6\)"):
        a[:, 2:7]
    with pytest.raises(IndexError, match="index 4 on axis 0"):
        a[4]
    with pytest.raises(IndexError, match="2 axes, not 3"):
        a[0, 0, 0]
    with pytest.raises(TypeError, match="an integer or a slice"):
        a[0.5]
    with pytest.raises(ValueError, match="would need a copy"):
        a.transpose(1, 0).reshape(24)
    with pytest.raises(ValueError, match="number of elements"):
        a.reshape(5, 5)
    with pytest.raises(ValueError, match="each of its 2 axes"):
        a.permute(0, 0)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        a.broadcast_to(4, 7)
    with pytest.raises(TypeError, match="no values"):
        list(a)
    with pytest.raises(IndexError, match="leaves the tensor"):
        a.ap([[6, 4], [1, 7]])


def test_view_errors_in_a_kernel_name_its_line():
    text = message(lambda a: a[:, 2:17], A)
    assert "slice 2:17 on axis 1 is outside its 16 elements" in text
    assert f"{__file__}:" in text
    with pytest.raises(ValueError, match="the kernel's own"):
        trace(lambda: (_ for _ in ()).throw(ValueError("the kernel's own")))


def test_broadcast_and_ap():
    @nki.jit
    def kernel(a):
        wide = a[:, 0:1].broadcast_to(4, 3)
        assert wide.shape == (4, 3)
        assert wide.steps[1] == 0
        picked = a.ap([[6, 2], [2, 3]], offset=7)
        np.testing.assert_array_equal(flat(picked), [[7, 9, 11], [13, 15, 17]])
        tile = nl.ndarray((4, 6), nl.float16, buffer=nl.sbuf)
        part = tile.ap([[6, 2], [2, 2]], offset=6 + 1)
        assert part.access().start == 1
        assert part.access().offset == 2
        assert part.access().dims == ((2, 2),)
        assert tile.view(nl.int32).shape == (4, 3)
        with pytest.raises(ValueError, match="its step must be 6"):
            tile.ap([[5, 2], [1, 2]])
        return nl.ndarray((1,), nl.int8, buffer=nl.hbm)

    kernel.trace(TINY, TensorSpec((4, 6), "fp16"))


def test_reshape_keeps_the_partition_axis():
    def body():
        tile = sbuf((4, 6))
        assert tile.reshape(4, 2, 3).access().dims == ((1, 6),)
        with pytest.raises(ValueError, match="partition axis"):
            tile.reshape(2, 12)

    trace(body)


def test_byte_runs():
    assert byte_runs(8, [(4, 3)], 4, 10) == [(8, 20)]
    assert byte_runs(0, [(8, 3)], 4, 10) == [(0, 4), (8, 12), (16, 20)]
    assert byte_runs(0, [(8, 3)], 4, 2) == [(0, 20)]
    assert byte_runs(20, [(-4, 3)], 4, 2) == [(12, 24)]
    assert byte_runs(0, [(0, 7), (16, 2), (4, 2)], 4, 9) == [(0, 8), (16, 24)]
    assert byte_runs(0, [(4, 0)], 4, 9) == []
    assert PARTITION > 1 << 32
