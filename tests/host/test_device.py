"""The device: tensors, programs, matmul's edge cases, errors."""

import gc
import itertools
import json
from dataclasses import replace

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import naive
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_reference, plan_blocking
from makalu.firmware.program import ProgramError
from makalu.host import devices
from makalu.host.allocator import ALIGNMENT, Allocator
from makalu.host.device import Device, Tensor
from makalu.host.errors import (
    ClosedError,
    Deadlock,
    DeviceError,
    DeviceFaulted,
    DtypeError,
    HbmOutOfMemory,
    MakaluError,
    ShapeError,
    TensorError,
    ToolMissing,
)
from makalu.host.lower import to_format
from makalu.host.report import RunReport
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN, HbmConfig
from makalu.rtl.arch.isa import (
    AccessPattern,
    DescriptorSide,
    Engine,
    ErrorCode,
    EventSemaphore,
    LoadStationary,
    Memset,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)


@pytest.fixture(params=["compiled", "by_hand"])
def both_ways(request, monkeypatch):
    """Matrix products as the compiler makes them, and as programs assembled by hand.

    The latter know neither kernel nor compiler. Where both fail, the device is at fault; where one
    does, its programs are.
    """

    def compile_(self, a_shape, b_shape, fmts, out_fmt):
        return self.load(naive.matmul_program(self.config, a_shape, b_shape, fmts, out_fmt))

    if request.param == "by_hand":
        monkeypatch.setattr(Device, "_compile", compile_)


def formula(a, b, fmt, rows=16):
    """The design's formula for ``a @ b``, one product at a time, vectorised over nothing but n."""
    a, b = np.asarray(a), np.asarray(b)
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for i in range(a.shape[0]):
            total = None
            for k0 in range(0, a.shape[1], rows):
                k1 = min(k0 + rows, a.shape[1])
                for acc in _tile(a[i, k0:k1], b[k0:k1], fmt):
                    total = acc if total is None else total + acc
            out[i] = total
    out.view(np.uint32)[np.isnan(out)] = 0x7FC00000
    return out


def _halves(x):
    x = np.asarray(x, np.float32)
    hi = (x.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)
    hi = np.where(np.isnan(x), x, hi)
    lo = x.astype(np.float64) - hi
    return [np.where(np.isfinite(lo) & (lo != 0), lo, np.nan), hi.astype(np.float64)]


def _tile(s, m, fmt):
    """Sums of one K tile: one, or the four passes of binary32 (a NaN in a low half is void)."""
    if fmt is not formats.FP32:
        passes = [(s.astype(np.float64), m.astype(np.float64), False, False)]
    else:
        parts = list(itertools.product(range(2), range(2)))
        passes = [(_halves(s)[i], _halves(m)[j], i == 0, j == 0) for i, j in parts]
    for left, right, left_low, right_low in passes:
        acc = np.zeros(m.shape[1], np.float32)
        for k in range(len(left)):
            if left_low and np.isnan(left[k]):
                continue
            term = (acc.astype(np.float64) + left[k] * right[k]).astype(np.float32)
            acc = np.where(np.isnan(right[k]), acc, term) if right_low else term
        yield acc


# Opening ------------------------------------------------------------------------------------------


def test_open_says_what_it_took_and_why(dev):
    assert dev.backend == "golden"
    assert dev.backend_reason == "asked for"
    assert "SMALL on golden" in repr(dev)


def test_a_device_tensor_as_an_operand_is_named(dev):
    tensor = Tensor.from_numpy(dev, np.ones((2, 2), np.float32))
    with pytest.raises(DtypeError, match=r"b is a tensor on the device.*b\.read\(\)"):
        dev.matmul(tensor.read(), tensor)


def test_auto_takes_the_first_that_can_be_built(monkeypatch):
    def only(*names):
        monkeypatch.setattr(
            devices, "missing", lambda name, config: None if name in names else f"no {name} here"
        )

    only("golden", "pysim", "verilator", "native")
    for config in (TINY, SMALL, TRN):
        assert devices.choose("auto", config)[0] == "native"
    only("golden", "pysim", "verilator")
    assert devices.choose("auto", SMALL)[0] == "verilator"
    name, reason = devices.choose("auto", TRN)
    assert name == "golden"
    assert "takes hours to compile for a 128 x 128 array" in reason
    only("golden", "pysim")
    name, reason = devices.choose("auto", SMALL)
    assert name == "golden"
    assert "no verilator here" in reason
    assert "too slow" in reason
    assert devices.choose("auto", TINY)[0] == "pysim"
    with pytest.raises(ToolMissing, match="no verilator here"):
        devices.choose("verilator", SMALL)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("HUGE",), ValueError, "TINY, SMALL, TRN"),
        ((3,), TypeError, "CoreConfig"),
        (("SMALL", "cuda"), MakaluError, "native, verilator, pysim, golden"),
    ],
)
def test_open_refuses_what_does_not_exist(arguments, error, match):
    with pytest.raises(error, match=match):
        makalu.open(*arguments)


def test_the_size_of_hbm_can_be_given():
    for hbm in (1 << 16, HbmConfig(size_bytes=1 << 16)):
        with makalu.open(TINY, "golden", hbm=hbm) as dev:
            assert dev.hbm.size_bytes == dev.free_bytes == 1 << 16
    with pytest.raises(TypeError, match="HbmConfig"):
        makalu.open(TINY, "golden", hbm="big")


def test_everything_says_when_it_is_used_after_close():
    dev = makalu.open("SMALL", "golden")
    x = dev.from_numpy(np.ones(4, np.float32))
    loaded = dev.load(naive.copy_program(SMALL, 4))
    dev.close()
    dev.close()
    for use in (
        lambda: dev.allocate(4, "fp32"), x.read, lambda: x.write(np.ones(4, np.float32)), dev.reset,
        lambda: dev.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)), dev.sbuf,
        lambda: loaded.execute({"x": np.ones(4, np.float32)}), lambda: dev.load(loaded.program),
        dev.__enter__,
    ):  # fmt: skip
        with pytest.raises(ClosedError, match="closed"):
            use()
    x.free()
    loaded.unload()
    assert "closed" in repr(dev)


# Tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", formats.FORMATS, ids=lambda f: f.name)
def test_tensors_keep_every_bit(any_dev, rng, fmt):
    bits = rng.integers(0, 1 << fmt.bits, (5, 7), dtype=np.uint64).astype(f"u{fmt.bytes}")
    tensor = any_dev.allocate((5, 7), fmt, name="t")
    tensor.write(bits.view(fmt.dtype))
    assert tensor.read().dtype == fmt.dtype
    assert tensor.numpy().tobytes() == bits.tobytes()
    assert tensor.nbytes == 35 * fmt.bytes


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 63])
def test_host_arrays_may_lie_anywhere(dev, offset):
    raw = np.zeros(4096, np.uint8)
    raw[offset : offset + 400] = np.arange(400) % 251
    array = np.frombuffer(raw, "<f4", count=100, offset=offset).reshape(10, 10)
    for view in (array, array.T, array[::-1, ::2], array[:, 3], array.astype(">f4")):
        plain = np.ascontiguousarray(view, "<f4")
        assert dev.from_numpy(view).read().tobytes() == plain.tobytes()
        assert dev.matmul(view.T, view).tobytes() == dev.matmul(plain.T, plain).tobytes()


def test_a_tensor_takes_only_its_own_kind(dev):
    tensor = dev.allocate((2, 3), "bf16", name="weights")
    with pytest.raises(ShapeError, match=r"weights has shape \(2, 3\)"):
        tensor.write(np.zeros((3, 2), ml_dtypes.bfloat16))
    with pytest.raises(DtypeError, match="weights is bfloat16"):
        tensor.write(np.zeros((2, 3), np.float32))
    with pytest.raises(DtypeError, match="not a number format"):
        dev.allocate((2, 3), np.float64)
    for shape in ((-1,), (2.5,), (True,)):
        with pytest.raises(ShapeError, match="whole numbers"):
            dev.allocate(shape, "fp32")


def test_a_tensor_may_be_empty_or_a_scalar(dev):
    assert dev.from_numpy(np.zeros((0, 3), np.float32)).read().shape == (0, 3)
    assert dev.from_numpy(np.float32(7)).read() == 7
    assert dev.allocate(5, "fp32").shape == (5,)


def test_a_tensor_does_not_follow_the_array_it_was_made_from(dev):
    """nki-samples 78: x = [1]; y = copy(x); x = x + x leaves y at [1]."""
    array = np.ones(3, np.float32)
    made, written = dev.from_numpy(array), dev.allocate(3, "fp32")
    written.write(array)
    array += array
    np.testing.assert_array_equal(made.read(), np.ones(3))
    np.testing.assert_array_equal(written.read(), np.ones(3))


def test_reading_gives_a_copy(dev):
    tensor = dev.from_numpy(np.ones(3, np.float32))
    first = tensor.read()
    first[:] = 9
    np.testing.assert_array_equal(tensor.read(), np.ones(3))


def test_freed_memory_is_used_again(dev):
    free = dev.free_bytes
    tensors = [dev.allocate(1000, "fp32") for _ in range(5)]
    for i in (1, 3, 0, 4, 2):
        tensors[i].free()
    assert dev.free_bytes == dev._memory.largest_bytes == free
    with pytest.raises(ClosedError, match="freed"):
        tensors[0].read()
    with pytest.raises(ClosedError, match="freed already"):
        tensors[0].free()


def test_a_tensor_nobody_holds_is_freed(dev):
    free = dev.free_bytes
    tensor = dev.allocate(1000, "fp32")
    assert dev.free_bytes < free
    del tensor
    gc.collect()
    assert dev.free_bytes == free


def test_out_of_memory_names_what_is_needed_and_free():
    with makalu.open("SMALL", "golden", hbm=1 << 16) as dev:
        keep = dev.allocate(10_000, "fp32", name="first")
        with pytest.raises(HbmOutOfMemory, match=r"tensor second \[10000\] float32") as caught:
            dev.allocate(10_000, "fp32", name="second")
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.needed >= 40_000
        assert error.free == error.largest == dev.free_bytes
        assert f"{error.free:,}" in str(error)
        keep.free()
        dev.allocate(10_000, "fp32", name="second")


def test_pieces_never_overlap(rng):
    memory = Allocator(1 << 16)
    held = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            address = list(held)[rng.integers(len(held))]
            memory.free(address)
            del held[address]
        else:
            size = int(rng.integers(0, 3000))
            if -(-max(size, 1) // ALIGNMENT) * ALIGNMENT > memory.largest_bytes:
                with pytest.raises(HbmOutOfMemory):
                    memory.allocate(size, "it")
                continue
            address = memory.allocate(size, "it")
            assert address % ALIGNMENT == 0
            held[address] = max(size, 1)
        spans = sorted((a, a + s) for a, s in held.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= 1 << 16
    for address in held:
        memory.free(address)
    assert memory.largest_bytes == 1 << 16


# Programs -----------------------------------------------------------------------------------------


def test_a_program_runs_on_arrays_and_on_tensors(any_dev, rng):
    loaded = any_dev.load(naive.copy_program(SMALL, 20, formats.FP32, formats.BF16))
    assert loaded.inputs == ["x"]
    assert loaded.outputs == ["y"]
    x = rng.standard_normal(20).astype(np.float32)
    expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(loaded.execute({"x": x})["y"], expected)
    tensor, out = any_dev.from_numpy(-x), any_dev.allocate(20, "bf16")
    result = loaded.execute({"x": tensor}, {"y": out})
    assert result["y"] is out
    np.testing.assert_array_equal(out.read(), -expected)
    np.testing.assert_array_equal(tensor.read(), -x)
    assert any_dev.last_run.instructions == 3
    assert any_dev.last_run.hbm_bytes_written == 40


def test_programs_take_turns_without_disturbing_each_other(any_dev, rng):
    one, two = (any_dev.load(naive.copy_program(SMALL, n)) for n in (8, 30))
    x, y = rng.standard_normal(8).astype(np.float32), rng.standard_normal(30).astype(np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(one.execute({"x": x})["y"], x)
        np.testing.assert_array_equal(two.execute({"x": y})["y"], y)


def test_programs_of_one_name_keep_their_own_results(rng):
    """Equal names, other shapes, formats and machines; loaded by turns, some where others were."""
    with makalu.open("SMALL", "golden") as small, makalu.open("TINY", "golden") as tiny:
        loaded, made = [], []
        for device, n, fmt in itertools.product(
            (small, tiny), (5, 8), (formats.BF16, formats.FP16)
        ):
            program = naive.copy_program(device.config, n, formats.FP32, fmt)
            dropped = device.load(naive.copy_program(device.config, n + 1, formats.FP32, fmt))
            dropped.execute({"x": np.zeros(n + 1, np.float32)})
            dropped.unload()
            loaded.append((device.load(program), n, fmt))
            made.append(program)
        assert len({program.kernel for program in made}) == 1
        for _ in range(2):
            for i in rng.permutation(len(loaded)):
                program, n, fmt = loaded[i]
                x = rng.standard_normal(n).astype(np.float32)
                assert program.execute({"x": x})["y"].tobytes() == x.astype(fmt.dtype).tobytes()


def test_execute_leaves_no_memory_behind(dev):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    x = np.ones(8, np.float32)
    loaded.execute({"x": x})
    free = dev.free_bytes
    for _ in range(5):
        loaded.execute({"x": x})
    with pytest.raises(ShapeError):
        loaded.execute({"x": x[:4]})
    assert dev.free_bytes == free
    loaded.unload()
    assert dev.free_bytes == dev.hbm.size_bytes
    with pytest.raises(ClosedError, match="unloaded"):
        loaded.execute({"x": x})
    with pytest.raises(ClosedError, match="already"):
        dev.unload(loaded)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "match"),
    [
        ({}, {}, TensorError, "copy needs input x"),
        ({"x": np.ones(8, np.float32), "z": 1}, {}, TensorError, "no input z; its inputs are x"),
        ({"x": np.ones(8, np.float32)}, {"q": 1}, TensorError, "no output q; its outputs are y"),
        ({"x": np.ones(8, np.float32)}, {"y": np.ones(8)}, TensorError, "must be a Tensor"),
        ({"x": np.ones(9, np.float32)}, {}, ShapeError, r"input x of copy has shape \(8,\)"),
        ({"x": np.ones(8)}, {}, DtypeError, "input x of copy is float32, the array float64"),
    ],
)
def test_execute_refuses_wrong_tensors_before_it_runs(dev, inputs, outputs, error, match):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    with pytest.raises(error, match=match):
        loaded.execute(inputs, outputs)
    assert dev.last_run is None


def test_execute_refuses_tensors_of_other_devices_and_freed_ones(dev):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    with makalu.open("SMALL", "golden") as other:
        foreign = other.from_numpy(np.ones(8, np.float32))
        with pytest.raises(TensorError, match="another device"):
            loaded.execute({"x": foreign})
    mine = dev.from_numpy(np.ones(8, np.float32))
    mine.free()
    with pytest.raises(ClosedError, match="freed"):
        loaded.execute({"x": mine})


def test_a_program_for_another_machine_is_refused(dev):
    with pytest.raises(ProgramError):
        dev.load(naive.copy_program(TINY, 8))


def test_a_file_that_is_no_program_is_refused(dev, tmp_path):
    path = tmp_path / "x.mkl"
    path.write_bytes(b"not a program" * 10)
    with pytest.raises(ProgramError, match="not a program file"):
        dev.load(path)
    with pytest.raises(FileNotFoundError):
        dev.load(tmp_path / "none.mkl")


# Copies -------------------------------------------------------------------------------------------


@nki.jit
def in_parts(x, parts, view):
    """Copy to SBUF and back; each copy in ``parts`` parts along the first axis of the view."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    source, result = view(x), view(out)
    tile = nl.ndarray(source.shape, x.dtype, buffer=nl.sbuf)
    step = -(-source.shape[0] // parts)
    for first in range(0, source.shape[0], step):
        part = slice(first, min(first + step, source.shape[0]))
        nisa.dma_copy(tile[part], source[part])
    for first in range(0, source.shape[0], step):
        part = slice(first, min(first + step, source.shape[0]))
        nisa.dma_copy(result[part], tile[part])
    return out


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.permute(1, 0),
    "interleaved": lambda x: x.reshape((8, 2, x.shape[1])),
    "interleaved columns": lambda x: x.reshape((8, 2, x.shape[1])).permute(2, 0, 1),
    "halves apart": lambda x: x.reshape((2, 8, x.shape[1])).permute(1, 0, 2),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda name: name.replace(" ", "_"))
def test_copies_in_parts_equal_one_copy(dev, rng, layout, size):
    """tilelang-ascend 1155: two half copies into an interleaved buffer differ from a full one."""
    x = rng.integers(0, 1 << 8 * size, (16, 12)).astype(f"u{size}")
    whole = None
    for parts in (1, 2, 3, 16):
        dev._runner.core.sbuf[:] = 0x5A
        assert dev.run(in_parts, x, parts, LAYOUTS[layout]).tobytes() == x.tobytes()
        sbuf = dev.sbuf()
        whole = sbuf if whole is None else whole
        assert (sbuf == whole).all()
    assert (whole != 0x5A).sum() <= x.nbytes


# Errors of the core -------------------------------------------------------------------------------


def program_of(*steps, config=SMALL):
    program = naive.NaiveProgram(config, [], "broken")
    for step in steps:
        program.add(step)
    return program


def pattern(partitions=1, n=4, offset=0, start=0):
    return AccessPattern(formats.FP32, start, partitions, offset, ((1, n),))


def test_an_illegal_instruction_is_named(any_dev):
    bad = Memset(dst=pattern(offset=1 << 14), value=0)
    loaded = any_dev.load(program_of(EventSemaphore(engine=Engine.DVE), bad))
    with pytest.raises(DeviceError) as caught:
        loaded.execute()
    error = caught.value
    assert (error.code, error.engine, error.index) == (ErrorCode.OUT_OF_RANGE, Engine.DVE, 1)
    assert error.field == "dst.offset"
    assert error.instruction.startswith("DVE  memset dst=sbuf.float32[0:1]+0x4000")
    assert error.source == "naive.py:101"
    for part in ("OUT_OF_RANGE", "dst.offset", "memset", "naive.py:101", "instruction 1"):
        assert part in str(error)


def test_a_bad_descriptor_is_named(any_dev):
    program = naive.NaiveProgram(SMALL, [], "broken")
    nowhere = DescriptorSide(7 << 40, ((4, 4),))
    program.dma(2, lambda t: nowhere, lambda t: DescriptorSide(0, ((4, 4),)))
    with pytest.raises(DeviceError, match="DMA engine 0") as caught:
        any_dev.load(program).execute()
    error = caught.value
    assert (error.code, error.engine, error.dma_engine) == (ErrorCode.BAD_DESCRIPTOR, None, 0)
    assert error.field == "src_address"


def test_a_bus_error_tells_the_address(any_dev):
    size = any_dev.hbm.size_bytes
    program = naive.NaiveProgram(SMALL, [], "broken")
    program.dma(
        2,
        lambda t: DescriptorSide(size - 8, ((4, 4),)),
        lambda t: DescriptorSide(SMALL.sbuf_address(0, 0), ((4, 4),)),
    )
    with pytest.raises(DeviceError, match="bus address") as caught:
        any_dev.load(program).execute()
    assert caught.value.code == ErrorCode.BUS_READ
    assert caught.value.address == size


def test_a_deadlock_names_every_queue_that_waits(any_dev):
    program = program_of()
    program.add(EventSemaphore(engine=Engine.PE))
    image = [
        EventSemaphore(engine=Engine.PE, waits=[Wait(5, WaitMode.GE, 3)]),
        EventSemaphore(engine=Engine.ACT, update=Update(5, UpdateMode.ADD, 2)),
        EventSemaphore(engine=Engine.DVE, waits=[Wait(6, WaitMode.EQ, 1)]),
    ]

    def link(base, addresses):
        words = [i.encode() for i in image]
        starts = {i.engine: (base + 128 * n, 1) for n, i in enumerate(image)}
        return b"".join(words), starts

    program.link = link
    with pytest.raises(Deadlock) as caught:
        any_dev.load(program).execute()
    error = caught.value
    waiting = {s.engine: s for s in error.queues if s.state != "done"}
    assert set(waiting) == {Engine.PE, Engine.DVE}
    pe = waiting[Engine.PE]
    assert (pe.semaphore, pe.mode, pe.wanted, pe.seen) == (5, WaitMode.GE, 3, 2)
    assert "PE: 0 of 1 instructions issued, waits for semaphore 5 >= 3, which is 2" in str(error)
    assert "DVE: 0 of 1 instructions issued, waits for semaphore 6 == 1" in str(error)
    assert "eventsemaphore" in str(error)


def test_the_device_works_again_after_a_reset(any_dev):
    good = any_dev.load(naive.copy_program(SMALL, 8))
    x = np.arange(8, dtype=np.float32)
    keep = any_dev.from_numpy(x)
    with pytest.raises(DeviceError):
        any_dev.load(program_of(LoadStationary(src=pattern(n=17)))).execute()
    with pytest.raises(DeviceFaulted, match="reset") as caught:
        good.execute({"x": x})
    assert "SIZE_MISMATCH" in str(caught.value)
    with pytest.raises(DeviceFaulted):
        any_dev.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    any_dev.reset()
    np.testing.assert_array_equal(good.execute({"x": keep})["y"], x)


def test_an_interrupted_run_asks_for_a_reset(dev, monkeypatch):
    loaded = dev.load(naive.copy_program(SMALL, 8))
    x = np.ones(8, np.float32)

    def interrupted(queues, progress=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dev._runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loaded.execute({"x": x})
    with pytest.raises(DeviceFaulted, match="KeyboardInterrupt"):
        loaded.execute({"x": x})
    dev.reset()
    np.testing.assert_array_equal(loaded.execute({"x": x})["y"], x)


# Matrix products ----------------------------------------------------------------------------------

OWN = [f for f in formats.MATMUL_FORMATS if f is not formats.TF32]


@pytest.mark.parametrize("fmt", OWN, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "mkn",
    [(1, 1, 1), (5, 1, 6), (16, 16, 128), (15, 17, 127), (17, 15, 129), (3, 40, 2)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_matmul_follows_the_formula(dev, both_ways, rng, fmt, mkn):
    m, k, n = mkn
    a = rng.standard_normal((m, k)).astype(np.float32).astype(fmt.dtype)
    b = rng.standard_normal((k, n)).astype(np.float32).astype(fmt.dtype)
    c = dev.matmul(a, b)
    assert c.dtype == np.float32
    np.testing.assert_array_equal(c.view(np.uint32), formula(a, b, fmt).view(np.uint32))
    assert dev.last_run.macs == m * k * n


@pytest.mark.parametrize(
    "fmt", [formats.BF16, formats.FP32, formats.FP8_E5M2], ids=lambda f: f.name
)
@pytest.mark.parametrize(
    "mkn",
    [
        (1, 1, 1),
        (9, 1, 5),
        (15, 15, 127),
        (17, 17, 129),
        (300, 3, 777),
        (2, 300, 3),
        (40, 33, 300),
    ],
    ids=lambda s: "x".join(map(str, s)),
)
def test_compiled_products_follow_the_formula(dev, rng, fmt, mkn):
    m, k, n = mkn
    a = rng.standard_normal((m, k)).astype(np.float32).astype(fmt.dtype)
    b = rng.standard_normal((k, n)).astype(np.float32).astype(fmt.dtype)
    # Words that are not part of the operands or of the result stay as they are.
    guard = dev.allocate(4096, "uint8", name="guard")
    guard.write(np.full(4096, 0xA5, np.uint8))
    c = dev.matmul(a, b)
    np.testing.assert_array_equal(c.view(np.uint32), formula(a, b, fmt).view(np.uint32))
    assert (guard.read() == 0xA5).all()


@pytest.mark.parametrize("config", ["TINY", "SMALL", "TRN"])
def test_compiled_and_hand_assembled_programs_agree(config, rng):
    a, b = rng.standard_normal((19, 37)), rng.standard_normal((37, 45))
    with makalu.open(config, "golden") as dev:
        for dtype, out in (("bf16", "fp32"), ("fp32", "fp32"), ("fp16", "fp8_e4m3")):
            compiled = dev.matmul(a, b, dtype=dtype, out_dtype=out)
            fmt, out_fmt = formats.format_of(dtype), formats.format_of(out)
            program = naive.matmul_program(dev.config, a.shape, b.shape, (fmt, fmt), out_fmt)
            inputs = {"a": fmt.encode(a), "b": fmt.encode(b)}
            assert dev.load(program).execute(inputs)["c"].tobytes() == compiled.tobytes()


@pytest.mark.parametrize("rows", [4, 8, 16, 32, 64, 128])
def test_an_array_of_any_size_writes_its_result_and_nothing_else(rng, rows):
    """gem5-aladdin 43: a store wider than the columns hangs, or writes beyond its buffer."""
    config = replace(SMALL, name="other", rows=rows)
    a, b = rng.standard_normal((rows + 1, 2 * rows - 1)), rng.standard_normal((2 * rows - 1, 7))
    for out in (formats.FP8_E5M2, formats.BF16, formats.FP32):
        with makalu.open(config, "golden", hbm=1 << 20) as dev:
            hbm, given, allocate = dev._runner.core.hbm, [], dev._memory.allocate
            hbm[:] = 0xA5

            def noted(size, what, given=given, allocate=allocate):
                given.append((allocate(size, what), size))
                return given[-1][0]

            dev._memory.allocate = noted
            c = dev.matmul(a, b, dtype="bf16", out_dtype=out)
            a_, b_ = (to_format(x, formats.BF16) for x in (a, b))
            assert c.tobytes() == matmul_reference(a_, b_, rows, out_dtype=out).tobytes()
            allowed = np.zeros(len(hbm), bool)
            for address, size in given:
                allowed[address : address + size] = True
            assert len(given) == 4  # operands, result, image
            assert (hbm[~allowed] == 0xA5).all()


@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda f: f.name)
def test_every_format_is_as_accurate_as_its_significand(dev, rng, fmt):
    """A product that is all zero, NaN or silently of another format would show."""
    unit = 2.0 ** -(fmt.man + 1)
    for k in (1, 33):
        a, b = (
            rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape) for shape in ((20, k), (k, 17))
        )
        error = np.abs(dev.matmul(a, b, dtype=fmt) - a @ b) / (np.abs(a) @ np.abs(b))
        assert error.max() <= 2 * unit + unit**2 + 4 * k * 2.0**-24
        if k == 1:  # and not better: nothing was computed in a wider format
            assert error.max() > unit / 2


def test_memory_that_was_used_before_does_not_show(dev, rng):
    """NaN everywhere, on the chip and in HBM: nothing stale may reach a result."""
    dev._runner.core.hbm[:] = 0xFF
    dev._runner.core.sbuf[:] = 0xFF
    dev._runner.core.psum[:] = 0xFF
    for m, k, n in ((1, 1, 1), (3, 5, 7), (17, 33, 130)):
        a = rng.standard_normal((m, k)).astype(np.float32)
        b = rng.standard_normal((k, n)).astype(np.float32)
        np.testing.assert_allclose(dev.matmul(a, b), a @ b, rtol=1e-4, atol=1e-5)


def test_a_program_may_lie_at_the_very_end_of_memory(rng):
    a = rng.standard_normal((5, 6)).astype(np.float32)
    with makalu.open("SMALL", "golden", hbm=1 << 17) as dev:
        expected = dev.matmul(a, a.T)
        dev._matmuls.clear()
        gc.collect()
        low = dev.allocate(dev.free_bytes - (1 << 14), "uint8")
        np.testing.assert_array_equal(dev.matmul(a, a.T), expected)
        low.free()


FP8 = [f for f in formats.MATMUL_FORMATS if f.bits == 8]
MIXED = list(itertools.permutations(FP8, 2))


@pytest.mark.parametrize("fmts", MIXED, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_fp8_operands_keep_their_own_formats(dev, rng, fmts):
    """Every code of both formats, among them infinities and NaN, and a check of finite values."""
    a, b = (rng.permutation(256).astype(np.uint8).view(f.dtype) for f in fmts)
    a, b = a.reshape(8, 32), b.reshape(32, 8)
    assert dev.matmul(a, b).tobytes() == formula(a, b, fmts[0]).tobytes()
    a, b = (f.encode(rng.standard_normal((3, 40))) for f in fmts)
    c = dev.matmul(a, b.T, check=True)
    assert (
        c.tobytes()
        == matmul_reference(a, b.T, SMALL.rows).tobytes()
        == formula(a, b.T, fmts[0]).tobytes()
    )
    assert dev.last_run.dtype == f"{fmts[0].name} x {fmts[1].name}"
    assert dev.last_run.max_abs_error < 1e-3
    # The other way round is another program, and a format that is asked for takes both.
    assert dev.matmul(b, a.T).tobytes() == formula(b, a.T, fmts[1]).tobytes()
    rounded = (to_format(x, formats.BF16) for x in (a, b.T))
    assert dev.matmul(a, b.T, dtype="bf16").tobytes() == dev.matmul(*rounded).tobytes()


STREAMED = "none of B stays"
SOME, ALL = "some strips of B stay", "all of B stays"


@pytest.mark.parametrize(
    ("config", "fmt", "mkn", "large", "regime"),
    [
        (TINY, "fp32", (46, 45, 46), "ab", SOME),
        (TINY, "fp8_e4m3", (33, 280, 33), "ab", SOME),
        (TINY, "bf16", (3, 1500, 17), "ab", STREAMED),
        (TINY, "bf16", (1100, 4, 17), "a", ALL),
        (TINY, "bf16", (17, 4, 1100), "b", SOME),
        (SMALL, "bf16", (130, 1020, 130), "ab", SOME),
        (SMALL, "bf16", (20, 7000, 20), "ab", STREAMED),
    ],
    ids=lambda v: getattr(v, "name", "x".join(map(str, v)) if isinstance(v, tuple) else None),
)
def test_operands_larger_than_sbuf(rng, config, fmt, mkn, large, regime):
    """Every way of cutting such a product, from memories full of NaN, is numpy's, exactly."""
    (m, k, n), fmt = mkn, formats.format_of(fmt)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((m, k), (k, n)))
    a_, b_ = (to_format(x, fmt) for x in (a, b))
    sbuf = config.partitions * config.sbuf_bytes
    assert [x.nbytes > sbuf for x in (a_, b_)] == [name in large for name in "ab"]
    blocking = plan_blocking(
        m, k, n, fmt.bytes, fmt.bytes, 4, rows=config.rows, bank_words=config.psum_bank_words,
        banks=config.psum_banks, sbuf_bytes=config.sbuf_bytes,
    )  # fmt: skip
    strips = -(-n // config.psum_bank_words)
    assert regime == (
        STREAMED if blocking.strips == 0 else SOME if blocking.strips < strips else ALL
    )
    with makalu.open(config, "golden") as dev:
        for memory in (dev._runner.core.hbm, dev._runner.core.sbuf, dev._runner.core.psum):
            memory[:] = 0xFF
        c = dev.matmul(a_, b_)
        # Integers this small have exact sums in any order.
        np.testing.assert_array_equal(c, a @ b)
        assert dev.last_run.macs == m * k * n
        assert dev.last_run.hbm_bytes_read >= a_.nbytes + b_.nbytes


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 4), (4, 3)), ((2, 4), (4, 0)), ((2, 0), (0, 3)), ((0,), (0,)), ((0, 3, 4), (4, 2)),
        ((2, 0, 4), (2, 4, 3)), ((3, 0), (0,)),
    ],
)  # fmt: skip
def test_an_empty_product_is_numpys_and_runs_nothing(dev, a, b):
    x, y = np.ones(a, np.float32), np.ones(b, np.float32)
    c = dev.matmul(x, y)
    np.testing.assert_array_equal(c, x @ y)
    assert np.shape(c) == np.shape(x @ y)
    assert c.dtype == np.float32
    assert dev.last_run.runs == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4,), (4,)), ((4,), (4, 3)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)),
        ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 2)), ((2, 3, 4), (4,)), ((4,), (2, 4, 3)),
    ],
)  # fmt: skip
def test_vectors_and_batches_follow_numpy(dev, rng, a, b):
    x = rng.integers(-9, 9, a).astype(np.float16)
    y = rng.integers(-9, 9, b).astype(np.float16)
    c = dev.matmul(x, y)
    expected = x.astype(np.float32) @ y.astype(np.float32)
    np.testing.assert_array_equal(c, expected)
    assert type(c) is type(expected)


def test_views_of_every_kind(dev, rng):
    base = rng.integers(-9, 9, (12, 18)).astype(np.float32)
    base.flags.writeable = False
    views = [
        base, base[::2, ::3], base[::-1], base.T, base[:, ::-1], np.asfortranarray(base),
        np.broadcast_to(base[0], (4, 18)), base[3:4], base.astype(">f4"),
    ]  # fmt: skip
    for view in views:
        np.testing.assert_array_equal(dev.matmul(view, view.T), view @ view.T)
        np.testing.assert_array_equal(dev.matmul(view.T, view), view.T @ view)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert dev.matmul(x.T, x).tolist() == [[9, 12, 15], [12, 17, 22], [15, 22, 29]]
    ones = np.ones((3, 3), np.float32)
    np.testing.assert_array_equal(dev.matmul(ones, ones), np.full((3, 3), 3))


def test_special_values(dev, both_ways):
    nan = np.full((3, 5), np.nan, np.float32)
    c = dev.matmul(nan, nan.T)
    assert (c.view(np.uint32) == 0x7FC00000).all()
    ones = np.ones((4, 4), np.float16)
    np.testing.assert_array_equal(dev.matmul(ones, ones * np.inf), np.full((4, 4), np.inf))
    row = np.array([[np.inf, 0]], ml_dtypes.bfloat16)
    assert np.isnan(dev.matmul(row, row[:, ::-1].T))[0, 0]
    mixed = np.array([[np.inf, 1.0, np.nan], [-np.inf, 1e-45, 3e38]], np.float32)
    got = dev.matmul(mixed, mixed.T)
    np.testing.assert_array_equal(
        got.view(np.uint32), formula(mixed, mixed.T, formats.FP32).view(np.uint32)
    )


def test_binary32_is_exact_where_it_can_be(dev, both_ways):
    # pytorch/xla 7077: 1 + 2**-20 times 1 is exact in fp32 and 1 in bf16, and the report says
    # which it was.
    a = np.array([[1 + 2**-20]], np.float32)
    one = np.ones((1, 1), np.float32)
    assert dev.matmul(a, one)[0, 0] == a[0, 0]
    assert dev.last_run.dtype == "float32"
    assert dev.matmul(a, one, dtype="bf16")[0, 0] == 1
    assert dev.last_run.dtype == "bfloat16"
    assert "bfloat16 operands" in str(dev.last_run)
    # gemmini 401: four products of bf16 0x3F99
    x = np.full((4, 4), 0x3F99, np.uint16).view(ml_dtypes.bfloat16)
    assert dev.matmul(x, x)[0, 0] == np.float32(5.715087890625)
    assert dev.matmul(x, x, out_dtype="bf16").view(np.uint16)[0, 0] == 0x40B7


def test_operands_are_rounded_once_before_they_are_multiplied(dev):
    # ml_dtypes 401
    one = np.ones((1, 1))
    a = np.array([[1 + 2**-8 + 2**-40]])
    assert dev.matmul(a, one, dtype="bf16")[0, 0] == np.float32(1.0078125)
    assert dev.matmul(np.array([[-431.99999999999994]]), one, dtype="fp8_e4m3fn")[0, 0] == -416
    big = np.array([[16973823]])
    assert dev.matmul(big, np.ones((1, 1), int), dtype="bf16")[0, 0] == 16908288
    assert dev.matmul(np.array([[True]]), np.array([[2]]), dtype="fp16")[0, 0] == 2


def test_a_format_is_never_chosen_silently(dev):
    f64, i8 = np.ones((2, 2)), np.ones((2, 2), np.int8)
    f32, f16 = np.ones((2, 2), np.float32), np.ones((2, 2), np.float16)
    f8 = np.ones((2, 2), ml_dtypes.float8_e4m3)
    for a, b in ((f64, f64), (i8, i8), (f32, f16), (f32, f64), (f32 > 0, f32 > 0), (f8, f16)):
        with pytest.raises(TypeError, match="dtype="):
            dev.matmul(a, b)
    with pytest.raises(DtypeError, match="out_dtype"):
        dev.matmul(f32, f32, out_dtype="fp64")
    with pytest.raises(ShapeError, match="inner dimensions"):
        dev.matmul(f32, np.ones((3, 2), np.float32))
    assert dev.last_run is None


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "fp32"])
def test_the_result_is_rounded_once_to_its_format(dev, both_ways, rng, out):
    a = (rng.standard_normal((6, 20)) * 30).astype(np.float16)
    b = (rng.standard_normal((20, 9)) * 30).astype(np.float16)
    fmt = formats.format_of(out)
    c = dev.matmul(a, b, out_dtype=out)
    assert c.dtype == fmt.dtype
    with np.errstate(all="ignore"):
        expected = formula(a, b, formats.FP16).astype(fmt.dtype)
    assert c.tobytes() == expected.tobytes()


def test_programs_are_compiled_once(dev, monkeypatch):
    made = []
    compile_ = Device._compile

    def counted(self, *args):
        made.append(args)
        return compile_(self, *args)

    monkeypatch.setattr(Device, "_compile", counted)
    a, b = np.ones((4, 5), np.float32), np.ones((5, 6), np.float32)
    for _ in range(3):
        dev.matmul(a, b)
    dev.matmul(np.ones((7, 4, 5), np.float32), np.ones((7, 5, 6), np.float32))
    assert len(made) == 1
    dev.matmul(a, b, dtype="bf16")
    dev.matmul(a, b, out_dtype="bf16")
    assert len(made) == 3


def test_compiled_programs_make_room(rng):
    with makalu.open("SMALL", "golden", hbm=1 << 16) as dev:
        images = 0
        for n in range(1, 40, 3):
            a = rng.integers(-4, 4, (40, n)).astype(np.float32)
            np.testing.assert_array_equal(dev.matmul(a, a.T), a @ a.T)
            images += next(reversed(dev._matmuls.values())).program.image_bytes
        assert images > dev.hbm.size_bytes  # they were never there together
        with pytest.raises(HbmOutOfMemory):  # a row alone is larger than HBM
            dev.matmul(np.ones((1, 20_000), np.float32), np.ones((20_000, 1), np.float32))
        np.testing.assert_array_equal(dev.matmul(a, a.T), a @ a.T)


def test_the_same_product_gives_the_same_bits_every_time(dev, rng):
    a = rng.standard_normal((33, 20)).astype(np.float32)
    b = rng.standard_normal((20, 50)).astype(np.float32)
    assert len({dev.matmul(a, b).tobytes() for _ in range(5)}) == 1
    np.testing.assert_array_equal(a, a.copy())


# Reports ------------------------------------------------------------------------------------------


def test_a_report_counts_and_prints(any_dev, both_ways, rng):
    a = rng.standard_normal((20, 30))
    any_dev.matmul(a, a.T, dtype="fp32", check=True)
    report = any_dev.last_run
    assert report.macs == 20 * 20 * 30
    assert report.passes == 4 * report.macs
    assert 0 < report.max_abs_error < 1e-4
    assert report.config == "SMALL"
    assert report.runs == 1
    values = json.loads(report.to_json())
    for key in (
        "config", "backend", "cycles", "macs", "pe_utilization", "mac_utilization",
        "hbm_bytes_read", "hbm_bytes_written", "engines", "stalls", "wall_s", "build_s",
        "max_abs_error",
    ):  # fmt: skip
        assert key in values
    assert RunReport.from_dict(values) == report
    text = str(report)
    assert "12,000" in text
    if report.cycles is None:
        assert "not counted" in text
    else:
        assert report.cycles == (1 << 32) + 7
        assert report.pe_utilization == report.passes / (report.cycles * 256)
        assert report.engines["pe"] == 12
        assert report.engines["dma"] == 20  # the mean of two engines
        assert "PE utilization" in text


def test_reports_of_several_runs_add_up(any_dev):
    a, b = np.ones((3, 4, 5), np.float32), np.ones((3, 5, 6), np.float32)
    any_dev.matmul(a[0], b[0])
    one = any_dev.last_run
    any_dev.matmul(a, b)
    three = any_dev.last_run
    assert three.runs == 3
    assert three.macs == 3 * one.macs
    assert three.counters["pe_passes"] == 3 * one.counters["pe_passes"]
    assert three.cycles == (None if one.cycles is None else 3 * one.cycles)


def test_progress_is_reported():
    seen = []
    with makalu.open("SMALL", "golden", progress=lambda *args: seen.append(args)) as dev:
        dev.matmul(np.ones((40, 40), np.float32), np.ones((40, 40), np.float32))
    assert seen[-1][0] == seen[-1][1] == dev.last_run.instructions


def test_every_wait_has_a_label():
    from makalu.host.report import _LABELS, group_counters, label
    from makalu.rtl.arch.events import COUNTERS

    _, stalls = group_counters({event.full_name: 1 for event in COUNTERS}, SMALL)
    for name in stalls:
        assert name in _LABELS or name.startswith("queue_")
        assert label(name)
    assert label("queue_act_wait_fetch") == "ACT queue waits for instructions"


# The register driver ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["id", "version", "fingerprint", "rows"])
def test_the_driver_checks_whom_it_talks_to(name):
    from fake_machine import FakeMachine
    from makalu.host.devices.registers import RegisterRunner

    with pytest.raises(MakaluError, match=name):
        RegisterRunner(FakeMachine(SMALL, HbmConfig(), {name: 1234}))
