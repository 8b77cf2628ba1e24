"""The same programs on every backend: same bits, same errors, a cycle count that repeats.

One device per backend serves all tests of this file, and each test leaves it usable.
"""

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import naive
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.host import devices
from makalu.host.errors import Deadlock, DeviceError
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.isa import (
    AccessPattern,
    DescriptorSide,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    LoadStationary,
    MatmulMoving,
    Memset,
    Space,
    TensorCopy,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)

pytestmark = pytest.mark.xdist_group("tiny_devices")

HBM_BYTES = 1 << 17
NEAR_CYCLES = 10
"""Latency of the HBM in Amaranth's simulator: most of a small product is waiting for it."""
WATCHDOG_CYCLES = 3000


@pytest.fixture(
    scope="module",
    params=[
        "native",
        pytest.param("verilator", marks=pytest.mark.verilator),
        pytest.param("pysim", marks=pytest.mark.slow),
    ],
)
def rtl(request):
    """TINY in a simulation of the hardware."""
    reason = devices.missing(request.param, TINY)
    if reason is not None:
        pytest.skip(reason)
    slow = request.param == "pysim"
    hbm = HbmConfig(size_bytes=HBM_BYTES, latency_cycles=NEAR_CYCLES if slow else 200)
    with makalu.open(TINY, request.param, hbm=hbm) as device:
        device._runner._write("watchdog", WATCHDOG_CYCLES // 4 if slow else WATCHDOG_CYCLES)
        yield device


@pytest.fixture
def model():
    """TINY on the golden model."""
    with makalu.open(TINY, "golden", hbm=HBM_BYTES) as device:
        yield device


@pytest.mark.parametrize(
    ("dtype", "mkn"),
    [
        ("fp32", (5, 6, 7)), ("bf16", (4, 4, 16)), ("fp16", (1, 1, 1)), ("tf32", (3, 9, 17)),
        ("fp8_e4m3", (9, 5, 3)), ("fp8_e4m3fn", (4, 8, 4)), ("fp8_e5m2", (2, 3, 33)),
        ("fp8_e3m4", (5, 4, 5)),
    ],
)  # fmt: skip
def test_products_have_the_same_bits(rtl, model, rng, dtype, mkn):
    m, k, n = mkn
    a, b = rng.standard_normal((m, k)) * 3, rng.standard_normal((k, n)) * 3
    a[0, 0] = np.inf
    c = rtl.matmul(a, b, dtype=dtype)
    assert c.tobytes() == model.matmul(a, b, dtype=dtype).tobytes()
    report, expected = rtl.last_run, model.last_run
    assert report.cycles > 0
    assert 0 < report.pe_utilization < 1
    for name, value in expected.counters.items():
        assert report.counters[name] == value, name


def test_products_of_two_fp8_formats_have_the_same_bits(rtl, model, rng):
    pairs = (formats.FP8_E4M3, formats.FP8_E5M2), (formats.FP8_E3M4, formats.FP8_E4M3FN)
    for left, right in pairs:
        a, b = left.encode(rng.standard_normal((3, 5))), right.encode(rng.standard_normal((5, 6)))
        a[0, 0] = np.nan
        expected = matmul_reference(a, b, TINY.rows).tobytes()
        assert rtl.matmul(a, b).tobytes() == model.matmul(a, b).tobytes() == expected


def test_cycles_repeat(rtl, rng):
    a = rng.standard_normal((4, 4)).astype(np.float16)
    counts = []
    for _ in range(2):
        rtl.matmul(a, a)
        counts.append(rtl.last_run.counters)
    assert counts[0] == counts[1]


def test_watching_does_not_change_the_count(rtl, rng):
    a = rng.standard_normal((4, 4)).astype(np.float16)
    rtl.matmul(a, a)
    plain, seen = rtl.last_run.counters, []
    rtl.progress = lambda *args: seen.append(args)
    try:
        rtl.matmul(a, a)
    finally:
        rtl.progress = None
    assert rtl.last_run.counters == plain
    issued, total, cycles = seen[-1]
    assert issued == total == rtl.last_run.instructions
    assert cycles == rtl.last_run.cycles


def test_memories_can_be_looked_at(rtl, model, rng):
    x = rng.standard_normal(12).astype(np.float32)
    for device in (rtl, model):
        loaded = device.load(naive.copy_program(TINY, 12, formats.FP32, formats.BF16))
        loaded.execute({"x": x})
        loaded.unload()
    for memory in (rtl.sbuf(), model.sbuf()):
        assert memory.shape == (4, 2048)
        assert memory[0, :48].tobytes() == x.tobytes()
    assert rtl.sbuf()[0, 512:536].tobytes() == model.sbuf()[0, 512:536].tobytes()
    assert rtl.psum().shape == model.psum().shape == (4, 512)


@nki.jit
def copies(x):
    """Through SBUF along and across partitions, and through the vector engine."""
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.sbuf)
    same = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.sbuf)
    turned = nl.ndarray(x.shape, x.dtype, buffer=nl.sbuf)
    between = nl.ndarray(x.shape[::-1], x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(tile, x.permute(1, 0))
    nisa.tensor_copy(same, tile)
    nisa.dma_copy(between, same)
    nisa.dma_copy(turned, between.permute(1, 0))
    nisa.dma_copy(out, turned)
    return out


@pytest.mark.parametrize("fmt", [formats.BF16, formats.FP32], ids=lambda f: f.name)
def test_nan_of_every_kind_passes_copies_bit_for_bit(rtl, model, rng, fmt):
    """dotnet 130583: a NaN whose payload lies in few bits turns into infinity."""
    payloads = rng.integers(1, 1 << fmt.man, 16)
    payloads[: fmt.man] = 1 << np.arange(min(fmt.man, 16))
    infinity = (1 << fmt.exp) - 1 << fmt.man
    codes = infinity | payloads | rng.integers(0, 2, 16) << fmt.bits - 1
    x = codes.astype(f"u{fmt.bytes}").view(fmt.dtype).reshape(4, 4)
    assert np.isnan(x.astype(np.float32)).all()
    for device in (rtl, model):
        assert device.run(copies, x).tobytes() == x.tobytes()


# Errors -------------------------------------------------------------------------------------------


def pattern(fmt=formats.FP32, partitions=2, n=4, offset=0, start=0, space=Space.SBUF):
    return AccessPattern(fmt, start, partitions, offset, ((1, n),), space)


def program_of(*steps):
    program = naive.NaiveProgram(TINY, [], "broken")
    for step in steps:
        program.add(step)
    return program


BAD = {
    "offset": Memset(dst=pattern(offset=2048), value=0),
    "misaligned": TensorCopy(dst=pattern(), src=pattern(offset=2)),
    "partition": Memset(dst=pattern(partitions=3, start=2), value=0),
    "dtype": TensorCopy(dst=pattern(), src=pattern(formats.BF16, space=Space.PSUM)),
    "too_wide": LoadStationary(src=pattern(n=5)),
    "two_banks": MatmulMoving(dst=pattern(n=4, offset=56, space=Space.PSUM), src=pattern()),
    "differ": TensorCopy(dst=pattern(n=3), src=pattern()),
    "engines": DmaStart(table=0, first=0, engines_used=2, queue=0, count=0),
    "overflow": EventSemaphore(engine=Engine.SP, update=Update(9, UpdateMode.ADD, 1)),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_the_same(rtl, model, case):
    full = EventSemaphore(engine=Engine.POOL, update=Update(9, UpdateMode.SET, 0xFFFFFFFF))
    program = program_of(full, BAD[case])
    if case == "overflow":
        # The step that sets the semaphore and the one that adds to it, in one queue.
        words = [full.replace(engine=Engine.SP).encode(), BAD[case].encode()]
        program.link = lambda base, _: (b"".join(words), {Engine.SP: (base, 2)})
    found = []
    for device in (rtl, model):
        loaded = device.load(program)
        with pytest.raises(DeviceError) as caught:
            loaded.execute()
        device.reset()
        loaded.unload()
        error = caught.value
        found.append(
            (error.code, error.engine, error.index, error.field, error.instruction, error.source)
        )
    assert found[0] == found[1]


BAD_SIDES = {
    "window": (DescriptorSide(7 << 40, ((4, 4),)), DescriptorSide(0, ((4, 4),))),
    "partition": (
        DescriptorSide(0, ((4, 4),)), DescriptorSide(TINY.sbuf_address(3, 0), ((2048, 4),)),
    ),
    "counts": (DescriptorSide(0, ((4, 4),)), DescriptorSide(0x100, ((4, 4),))),
    "step": (DescriptorSide(0, ((4, 4),)), DescriptorSide(TINY.sbuf_address(0, 0), ((6, 4),))),
}  # fmt: skip


def uneven(link):
    """Link a program of one descriptor, with another count than the encoder would write."""

    def link_uneven(base, addresses):
        image, queues = link(base, addresses)
        at = image.rindex((4).to_bytes(2, "little"))
        return image[:at] + b"\x03" + image[at + 1 :], queues

    return link_uneven


@pytest.mark.parametrize("case", BAD_SIDES)
def test_bad_descriptors_are_the_same(rtl, model, case):
    src, dst = BAD_SIDES[case]
    found = []
    for device in (rtl, model):
        program = naive.NaiveProgram(TINY, [], "broken")
        program.dma(2, lambda t: src, lambda t: dst)
        if case == "counts":
            program.link = uneven(program.link)
        loaded = device.load(program)
        base = loaded._image_address = device._allocate(1 << 14, "a place of its own")
        with pytest.raises(DeviceError) as caught:
            loaded.execute()
        device.reset()
        loaded.unload()
        error = caught.value
        place = (error.pc - base, error.address - base)
        found.append((error.code, error.dma_engine, error.field, *place))
    assert found[0] == found[1]
    assert found[0][0] == ErrorCode.BAD_DESCRIPTOR


@pytest.mark.parametrize("code", [ErrorCode.BUS_READ, ErrorCode.BUS_WRITE])
def test_accesses_outside_hbm_are_bus_errors(rtl, model, code):
    outside = DescriptorSide(HBM_BYTES - 8, ((4, 8),))
    inside = DescriptorSide(TINY.sbuf_address(0, 0), ((4, 8),))
    sides = (outside, inside) if code == ErrorCode.BUS_READ else (inside, outside)
    for device in (rtl, model):
        program = naive.NaiveProgram(TINY, [], "broken")
        program.dma(2, lambda t: sides[0], lambda t: sides[1])
        loaded = device.load(program)
        with pytest.raises(DeviceError) as caught:
            loaded.execute()
        device.reset()
        loaded.unload()
        assert caught.value.code == code
        assert HBM_BYTES - 256 <= caught.value.address <= HBM_BYTES


def test_a_fetch_outside_hbm_is_a_bus_error(rtl, model):
    for device in (rtl, model):
        loaded = device.load(program_of(EventSemaphore(engine=Engine.SP)))
        loaded.program.link = lambda base, _: (bytes(128), {Engine.SP: (HBM_BYTES, 1)})
        with pytest.raises(DeviceError, match="BUS_FETCH") as caught:
            loaded.execute()
        device.reset()
        loaded.unload()
        assert caught.value.address == caught.value.pc == HBM_BYTES


def test_a_deadlock_is_explained(rtl, model):
    image = [
        EventSemaphore(engine=Engine.PE, waits=[Wait(5, WaitMode.GE, 3)]),
        EventSemaphore(engine=Engine.ACT, update=Update(5, UpdateMode.ADD, 2)),
        EventSemaphore(engine=Engine.DVE, waits=[Wait(5, WaitMode.GE, 1), Wait(6, WaitMode.EQ, 1)]),
    ]

    def link(base, addresses):
        words = [i.encode() for i in image]
        return b"".join(words), {i.engine: (base + 128 * n, 1) for n, i in enumerate(image)}

    found = []
    for device in (rtl, model):
        program = program_of(*image)
        program.link = link
        loaded = device.load(program)
        with pytest.raises(Deadlock) as caught:
            loaded.execute()
        device.reset()
        loaded.unload()
        waiting = [q for q in caught.value.queues if q.state != "done"]
        found.append(
            [(q.engine, q.wait, q.semaphore, q.mode, q.wanted, q.seen, q.issued) for q in waiting]
        )
        assert "semaphore 5 >= 3, which is 2" in str(caught.value)
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_a_reset_in_mid_flight_leaves_a_clean_machine(rtl, model, rng):
    """PR 31170 of opentitan and its like: what was under way must not show in the next run.

    Compiled machines stop all along the product; Amaranth's simulator, which they equal in every
    byte and cycle, while operands are loaded and while the array is at work.
    """
    compiled = rtl.backend != "pysim"
    a = rng.standard_normal((5, 9) if compiled else (3, 5)).astype(np.float32)
    expected = model.matmul(a, a.T).tobytes()
    rtl.reset()  # so that all runs start from a reset, their programs in the same place
    assert rtl.matmul(a, a.T).tobytes() == expected
    counters = rtl.last_run.counters
    machine = rtl._runner.machine
    run = machine.run
    for cycles in (1, *range(40, rtl.last_run.cycles, 65)) if compiled else (1, 40, 200, 400, 600):

        def only_a_little(max_cycles=None, progress=None, cycles=cycles):
            run(max_cycles=cycles)
            raise KeyboardInterrupt

        machine.run = only_a_little
        try:
            with pytest.raises(KeyboardInterrupt):
                rtl.matmul(a, a.T)
        finally:
            machine.run = run
        rtl.reset()
        assert rtl.matmul(a, a.T).tobytes() == expected, cycles
        assert rtl.last_run.counters == counters, cycles
