"""What was never written is not read: refused with its elements, or zero where zeros were asked."""

import re

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import numpy as np
import pytest
from makalu.firmware.compiler import compile_trace, schedule
from makalu.firmware.compiler.contents import check_contents
from makalu.firmware.nki import KernelError, NkiTensor, TensorSpec
from makalu.firmware.nki.tensor import Storage
from makalu.firmware.nki.trace import ZERO
from makalu.firmware.nki.written import Written
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, HbmConfig
from makalu.rtl.arch.isa import Memset

A = TensorSpec((4, 16), "fp32")


def hbm(shape, name="out"):
    return nl.ndarray(shape, nl.float32, buffer=nl.shared_hbm, name=name)


def sbuf(shape, dtype=nl.float32, **more):
    return nl.ndarray(shape, dtype, buffer=nl.sbuf, **more)


def psum(shape, **more):
    return nl.ndarray(shape, nl.float32, buffer=nl.psum, **more)


def zeros(shape, **more):
    return nl.zeros(shape, nl.float32, buffer=nl.psum, **more)


def ones(shape, dtype=nl.bfloat16):
    tile = sbuf(shape, dtype)
    nisa.memset(tile, 1)
    return tile


def store_all(tile):
    """An output with the contents of a tile in SBUF or PSUM."""
    out = hbm(tile.shape)
    nisa.dma_copy(out, nl.copy(tile) if tile.buffer == "psum" else tile)
    return out


# Refused ------------------------------------------------------------------------------------------


def refused(body, config=TINY):
    """The message with which a kernel does not compile; its last line is one of this file."""

    @nki.jit
    def kernel(a):
        return body(a)

    with pytest.raises(KernelError) as caught:
        kernel.compile(config, A)
    text = str(caught.value)
    assert re.search(rf"\n  at {re.escape(__file__)}:\d+$", text)
    return text


def test_a_tile_that_nothing_is_written_to():
    text = refused(lambda a: store_all(sbuf((4, 4), name="t")))
    assert "t [4, 4] float32 in sbuf is read before anything was written there" in text
    assert "16 of 16 elements, the first at t[0, 0:4] (bytes 0:16 of partition 0)" in text
    assert "nisa.dma_copy, nisa.tensor_copy or nisa.memset" in text


def written_in_part(a):
    tile = sbuf((4, 8), name="t")
    nisa.memset(tile[:2], 1)
    nisa.memset(tile[:, 0:6:2], 1)
    return tile


def test_the_first_unwritten_elements_are_named():
    text = refused(lambda a: store_all(written_in_part(a)))
    assert "10 of 32 elements, the first at t[2, 1] (bytes 4:8 of partition 2)" in text
    text = refused(lambda a: store_all(written_in_part(a)[:, 4:]))
    assert "6 of 16 elements, the first at t[2, 5:8] (bytes 20:32 of partition 2)" in text


def test_parts_that_were_written_may_be_read():
    @nki.jit
    def kernel(a):
        tile = written_in_part(a)
        first, second = hbm((2, 8)), hbm((4, 3), "other")
        nisa.dma_copy(first, tile[:2])
        nisa.dma_copy(second, tile[:, 0:6:2])
        return first, second

    kernel.compile(TINY, A)


def test_what_is_written_later_does_not_count():
    def body(a):
        tile = sbuf((4, 16), name="t")
        out = store_all(tile)
        nisa.dma_copy(tile, a)
        return out

    assert "64 of 64 elements" in refused(body)


def test_a_tile_of_a_loop_does_not_inherit_from_the_one_before():
    def body(a):
        out = hbm((4, 16))
        for i in range(2):
            tile = sbuf((4, 16), name="t")
            if i == 0:
                nisa.dma_copy(tile, a)
            nisa.dma_copy(out, tile)
        return out

    assert "t [4, 16]" in refused(body)


OPERANDS = {
    "stationary": lambda t: nisa.nc_matmul(psum((4, 8)), t[:, :4], ones((4, 8), nl.float32)),
    "moving": lambda t: nisa.nc_matmul(psum((4, 8)), ones((4, 4), nl.float32), t),
    "copy": lambda t: nisa.tensor_copy(sbuf((4, 8)), t),
    "conversion": lambda t: nisa.dma_copy(sbuf((4, 8), nl.bfloat16), t),
    "transfer": lambda t: nisa.dma_copy(sbuf((4, 8)), t),
    "other format": lambda t: nisa.tensor_copy(sbuf((4, 32), nl.int8), t.view(nl.int8)),
}


@pytest.mark.parametrize("use", OPERANDS.values(), ids=OPERANDS)
def test_every_operand_is_looked_at(use):
    def body(a):
        tile = sbuf((4, 8), name="t")
        nisa.memset(tile[:3], 1)
        use(tile)
        out = hbm((4, 16))
        nisa.dma_copy(out, a)
        return out

    assert "the first at t[3, 0:" in refused(body)


def test_psum_that_no_matmul_has_written():
    text = refused(lambda a: store_all(psum((4, 8), name="sums")))
    assert "sums [4, 8] float32 in psum is read before anything was written there" in text
    assert "nisa.nc_matmul, or allocate it with nl.zeros" in text

    def half(a):
        sums = psum((4, 8), name="sums")
        nisa.nc_matmul(sums[:3, :5], ones((4, 3)), ones((4, 5)))
        return store_all(sums)

    text = refused(half)
    assert "17 of 32 elements, the first at sums[0, 5:8] (bytes 20:32 of partition 0)" in text


def test_scratch_in_hbm_that_was_not_written():
    def body(a):
        spare = nl.ndarray((4, 4, 4), nl.float32, buffer=nl.hbm, name="spare")
        nisa.dma_copy(spare[:, 1], a[:, :4])
        out = hbm((4, 4, 4))
        nisa.dma_copy(out, spare)
        return out

    text = refused(body)
    assert "48 of 64 elements, the first at spare[0, 0, 0:4] (bytes 0:16)" in text
    assert "store there first, with nisa.dma_copy" in text


def test_an_output_that_is_read_before_it_is_written():
    def body(a):
        out = hbm((4, 16))
        tile = sbuf((4, 16))
        nisa.dma_copy(tile, out)
        nisa.dma_copy(out, a)
        return out

    assert "out [4, 16] float32 in hbm is read before anything" in refused(body)


def test_an_output_that_is_never_written():
    def body(a):
        out, other = hbm((4, 16)), hbm((3,), "other")
        nisa.dma_copy(out, a)
        return out, other

    text = refused(body)
    assert "kernel returns other [3] float32 in hbm, but nothing writes it" in text
    assert "store every element of an output with nisa.dma_copy" in text


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (lambda t: t[:3], "16 of 64 elements is missing, the first at out[3, 0:16] (bytes 192:256"),
        (lambda t: t[:, 1:], "4 of 64 elements is missing, the first at out[0, 0] (bytes 0:4)"),
        (lambda t: t[:, ::2], "32 of 64 elements is missing, the first at out[0, 1] (bytes 4:8)"),
        (lambda t: t[0:0], "64 of 64 elements"),
    ],
    ids=["rows", "columns", "every second", "nothing"],
)
def test_an_output_that_is_written_in_part(part, expected):
    def body(a):
        out = hbm((4, 16))
        nisa.dma_copy(part(out), part(a))
        return out

    text = refused(body)
    assert "not all of it is written" in text
    assert expected.replace(" is missing", "") in text


def test_a_loop_that_forgets_the_ragged_end():
    def body(a):
        out = hbm((10, 16))
        for i in range(10 // 4):
            nisa.dma_copy(out[4 * i : 4 * i + 4], a)
        return out

    assert "32 of 160 elements, the first at out[8, 0:16] (bytes 512:576)" in refused(body)


def test_parts_add_up():
    @nki.jit
    def kernel(a):
        out = hbm((4, 16))
        for i in range(4):
            nisa.dma_copy(out[:, i::4].permute(1, 0), a[:, i::4].permute(1, 0))
        return out

    kernel.compile(TINY, A)


# The mask -----------------------------------------------------------------------------------------


def random_view(rng, tensor, array):
    """The same random view of a tensor under trace and of a numpy array over its bytes."""
    for _ in range(int(rng.integers(0, 4))):
        kind, axis = int(rng.integers(5)), int(rng.integers(array.ndim))
        if kind == 0:
            n = array.shape[axis]
            first = int(rng.integers(0, n + 1))
            index = [slice(None)] * array.ndim
            index[axis] = slice(first, int(rng.integers(first, n + 1)), int(rng.integers(1, 4)))
            tensor, array = tensor[tuple(index)], array[tuple(index)]
        elif kind == 1 and array.ndim > 2 and array.shape[axis]:
            index = [slice(None)] * array.ndim
            index[axis] = int(rng.integers(array.shape[axis]))
            tensor, array = tensor[tuple(index)], array[tuple(index)]
        elif kind == 2:
            order = [int(i) for i in rng.permutation(array.ndim)]
            tensor, array = tensor.permute(*order), array.transpose(order)
        elif kind == 3 and array.shape[0] and array.shape[-1] == 8:
            shape = (*array.shape[:-1], 2, 4)
            tensor, array = tensor.reshape(*shape), array.reshape(shape)
        elif (
            kind == 4 and array.ndim > 1 and tensor.steps[-1] == array.strides[-1] == array.itemsize
        ):
            size = int(rng.choice([1, 2, 4]))
            if array.shape[-1] * array.itemsize % size == 0:
                fmt = {1: formats.INT8, 2: formats.BF16, 4: formats.FP32}[size]
                tensor, array = tensor.view(fmt), array.view(f"u{size}")
    return tensor, array


@pytest.mark.parametrize("buffer", ["hbm", "sbuf"])
def test_the_mask_is_that_of_numpys_views(rng, buffer):
    looked_at = 0
    for _ in range(150):
        fmt = [formats.INT8, formats.FP16, formats.FP32][int(rng.integers(3))]
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 5, 8], int(rng.integers(2, 4))))
        storage = Storage(
            index=0, name="t", shape=shape, dtype=fmt, buffer=buffer, kind="", location=0
        )
        written, array = Written(storage), np.zeros(shape, f"u{fmt.bytes}")
        for _ in range(6):
            view, part = random_view(rng, NkiTensor.whole(storage), array)
            cells = written.cells(view)
            marked = np.ascontiguousarray(part).view("u1") != 0 if part.size else part
            assert cells.all() == marked.all()
            assert cells.any() == marked.any()
            looked_at += cells.any() and not cells.all()
            if rng.random() < 0.7:
                cells[...] = True
                part[...] = ~part.dtype.type(0)
            full = array.reshape(-1).view("u1") != 0
            assert written.all() == full.all()
            if not full.all():
                per_element = full.reshape(-1, fmt.bytes).all(axis=1)
                first = np.unravel_index(int(np.argmin(per_element)), shape)
                text = written.missing()
                assert text.startswith(
                    f"{np.count_nonzero(~per_element)} of {array.size} elements, the first at "
                )
                found = re.search(r"t\[(.*?)\]", text)[1].split(", ")
                assert tuple(int(i.split(":")[0]) for i in found) == tuple(map(int, first))
    assert looked_at > 20


def test_accesses_select_what_their_views_select(rng):
    """Engines walk merged dimensions, with other steps, of the same elements."""
    for _ in range(100):
        storage = Storage(
            index=0, name="t", shape=(4, 6, 8), dtype=formats.FP16, buffer="sbuf", kind="",
            location=0,
        )  # fmt: skip
        view = NkiTensor.whole(storage)
        first = int(rng.integers(4))
        view = view[first : int(rng.integers(first + 1, 5)), :: int(rng.integers(1, 4))]
        view = view[:, :, int(rng.integers(8)) :].view(formats.INT8)
        one, other = Written(storage), Written(storage)
        one.cells(view)[...] = True
        other.cells(view.access())[...] = True
        whole = NkiTensor.whole(storage).view(formats.INT8)
        assert (one.cells(whole) == other.cells(whole)).all()
        assert one.cells(view).all()
        assert not one.all()


# Zeros --------------------------------------------------------------------------------------------


@nki.jit
def in_a_corner(a):
    """A product in one corner of a PSUM tile of zeros, and the whole tile read."""
    sums = zeros((4, 16))
    nisa.nc_matmul(sums[:2, 3:7], ones((4, 2)), ones((4, 4)))
    return store_all(sums)


@nki.jit
def across_a_border(a):
    """The second product adds to the first one and, beside it, to zero."""
    sums = zeros((4, 16))
    nisa.nc_matmul(sums[:, :8], ones((4, 4)), ones((4, 8)))
    nisa.nc_matmul(sums[:3, 4:12], ones((4, 3)), ones((4, 8)))
    nisa.nc_matmul(sums[:3, 4:12], ones((4, 3)), ones((4, 8)), accumulate=True)
    return store_all(sums)


@nki.jit
def untouched(a):
    """Nothing but zeros, in several tiles, of which one is multiplied into after it was read."""
    out = hbm((3, 4, 16))
    for i in range(3):
        sums = zeros((4, 16))
        result = sbuf((4, 16))
        nisa.tensor_copy(result, sums)
        nisa.dma_copy(out[i], result)
    nisa.nc_matmul(sums, ones((4, 4)), ones((4, 16)))
    nisa.tensor_copy(result, sums)
    nisa.dma_copy(out[1], result)
    return out


@nki.jit
def in_sbuf(a):
    """Zeros in SBUF, of which a part is overwritten."""
    tile = nl.zeros((4, 16), nl.float32)
    nisa.dma_copy(tile[1:3, 2:5], a[1:3, 2:5])
    return store_all(tile)


def corner():
    want = np.zeros((4, 16), np.float32)
    want[:2, 3:7] = 4
    return want


def border():
    want = np.zeros((4, 16), np.float32)
    want[:, :8] += 4
    want[:3, 4:12] += 8
    return want


def rest():
    want = np.zeros((3, 4, 16), np.float32)
    want[1] = 4
    return want


def part():
    want = np.zeros((4, 16), np.float32)
    want[1:3, 2:5] = 1
    return want


ZEROS = {
    "corner": (in_a_corner, corner()), "border": (across_a_border, border()),
    "untouched": (untouched, rest()), "sbuf": (in_sbuf, part()),
}  # fmt: skip


@nki.jit
def dirty(a, banks):
    """Leave NaN in the first banks of PSUM and at the start of SBUF."""
    out = hbm((4, 16))
    junk = sbuf((4, 16))
    nisa.memset(junk, float("nan"))
    tiles = [psum((4, 16)) for _ in range(banks)]
    for tile in tiles:
        nisa.nc_matmul(tile, junk[:, :4], junk)
    for tile in tiles:
        nisa.dma_copy(out, nl.copy(tile))
    return out


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_zero_whatever_was_there(machine, name):
    kernel, want = ZEROS[name]
    a = np.ones((4, 16), np.float32)
    program = kernel.compile(TINY, a)
    for seed in range(8):  # memories of this machine are full of NaN
        got = machine(TINY, seed=seed).run(program, {"a": a})["out"]
        assert got.tobytes() == want.tobytes()


def test_zeros_are_zero_on_a_device_that_was_used_before():
    a = np.ones((4, 16), np.float32)
    with makalu.open("TINY", "golden", hbm=1 << 16) as device:
        for kernel, want in ZEROS.values():
            device.run(dirty, a, TINY.psum_banks)
            assert np.isnan(device.psum().view(np.float32)).all()
            assert device.run(kernel, a).tobytes() == want.tobytes()


@pytest.mark.slow
def test_zeros_are_zero_on_the_hardware():
    a = np.ones((4, 16), np.float32)
    hbm = HbmConfig(size_bytes=1 << 16, latency_cycles=10)
    with makalu.open("TINY", "pysim", hbm=hbm) as device:
        device.run(dirty, a, 1)
        assert np.isnan(device.psum().view(np.float32)[:, :16]).all()
        kernel, want = ZEROS["border"]
        assert device.run(kernel, a).tobytes() == want.tobytes()


def test_zeros_cost_nothing_where_matmuls_write_all_that_is_read():
    @nki.jit
    def kernel(a):
        out = hbm((4, 16))
        for i in range(2):
            sums = zeros((4, 16))
            for _ in range(2):
                nisa.nc_matmul(sums[:3, :8], ones((4, 3)), ones((4, 8)))
                nisa.nc_matmul(sums[:3, 8:], ones((4, 3)), ones((4, 8)), accumulate=True)
            result = sbuf((3, 16))
            nisa.tensor_copy(result, sums[:3])
            nisa.dma_copy(out[i : i + 3], result)
        return out

    trace = kernel.trace(TINY, A)
    before = len(trace.ops)
    compile_trace(trace)
    assert len(trace.ops) == before


def kinds(kernel):
    """Kinds of the operations that compilation adds to a kernel, and its statistics."""
    trace = kernel.trace(TINY, A)
    before = {id(op) for op in trace.ops}
    program = compile_trace(trace)
    return [op.kind for op in trace.ops if id(op) not in before], program.stats


def test_a_tile_is_cleared_once_before_its_first_use():
    assert kinds(across_a_border)[0] == [Memset, ZERO]
    assert kinds(untouched)[0] == [Memset, ZERO, ZERO, ZERO]
    assert kinds(in_sbuf)[0] == []
    # A product of zeros is work of the array, but not of the kernel.
    assert kinds(untouched)[1]["macs"] == 4 * 4 * 16
    assert kinds(untouched)[1]["passes"] == 4 * 4 * 16 + 3 * 4 * 16


def test_compiling_twice_clears_once():
    trace = in_a_corner.trace(TINY, A)
    first, second = compile_trace(trace), compile_trace(trace)
    for engine, words in first.queues.items():
        assert words.tobytes() == second.queues[engine].tobytes()


def random_sums(seed, config):
    """Random products into parts of a few PSUM tiles of zeros, and reads of parts of them.

    Returns the trace and its output, which is computed beside it on arrays of zeros.
    """
    rng = np.random.default_rng(seed)
    rows, bank = config.partitions, config.psum_bank_words
    want = []

    def span(limit):
        first = int(rng.integers(0, limit))
        return slice(first, int(rng.integers(first + 1, limit + 1)))

    @nki.jit
    def kernel(a):
        weights, moving = ones((rows, rows)), ones((rows, bank))
        tiles = []
        results = []
        for _ in range(30):
            if not tiles or rng.random() < 0.15:
                tiles = tiles[-2:]
                tiles.append((zeros((rows, bank)), np.zeros((rows, bank), np.float32)))
            tile, value = tiles[int(rng.integers(len(tiles)))]
            m, n = slice(0, int(rng.integers(1, rows + 1))), span(bank)
            if rng.random() < 0.7:
                k = int(rng.integers(1, rows + 1))
                accumulate = [None, True, False][int(rng.choice(3, p=[0.5, 0.4, 0.1]))]
                nisa.nc_matmul(tile[m, n], weights[:k, m], moving[:k, n], accumulate=accumulate)
                value[m, n] = k if accumulate is False else value[m, n] + k
            else:
                result = sbuf((m.stop, n.stop - n.start))
                nisa.tensor_copy(result, tile[m, n])
                results.append((result, m, n))
                want.append(np.zeros((rows, bank), np.float32))
                want[-1][m, n] = value[m, n]
        out = hbm((len(results), rows, bank))
        empty = nl.zeros((rows, bank), nl.float32)
        for i, (result, m, n) in enumerate(results):
            nisa.dma_copy(out[i], empty)
            nisa.dma_copy(out[i, m, n], result)
        return out

    return kernel.trace(config, A), want


@pytest.mark.parametrize("config", [TINY, SMALL], ids=lambda c: c.name)
def test_random_products_into_zeros(machine, config):
    cleared = untouched = 0
    for seed in range(12):
        trace, want = random_sums(seed, config)
        schedule.lifetimes(trace)
        tiles = check_contents(trace)
        cleared += len(tiles)
        untouched += sum(s.zeros and s.span is not None for s in trace.storages) - len(tiles)
        got = machine(config, seed=seed).run(compile_trace(trace), {"a": np.ones((4, 16), "f4")})
        assert got["out"].tobytes() == np.stack(want).tobytes()
    assert cleared > 10
    assert untouched > 3
