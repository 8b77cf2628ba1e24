"""Programs that are wrong, on the hardware through the driver: stopped, explained, survived.

After each of them a reset alone makes the device good for an exact matrix product.
"""

from collections import Counter

import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.host.devices import Fault
from makalu.host.errors import Deadlock, DeviceError, DeviceFaulted
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import (
    AccessPattern,
    Descriptor,
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
    decode,
)
from makalu.sim.golden import GoldenCore, GoldenError, check_word
from programs import DATA, HBM_BYTES, WATCHDOG_CYCLES, contents, random_program

pytestmark = [pytest.mark.verilator, pytest.mark.xdist_group("tiny_devices")]

WORD = 128


class Raw:
    """Words and descriptors with the interface of a compiled program."""

    kernel, tensors, inputs, outputs = "raw", (), (), ()
    stats: dict = {}  # noqa: RUF012

    def __init__(self, words, tables=()):
        self.words, self.tables = words, tables
        self.image_bytes = WORD * (sum(map(len, words.values())) + len(tables))
        self.base = None

    def check_config(self, config):
        """Any."""

    def where(self, engine, index):
        """As a kernel's line."""
        return f"raw.py:{10 * engine + index}"

    def link(self, base, addresses):
        """``tables`` are the descriptors; table addresses in the words count from them."""
        del addresses
        self.base, image, queues = base, b"", {}
        self.table = base + self.image_bytes - WORD * len(self.tables)
        for engine, words in self.words.items():
            queues[engine] = base + len(image), len(words)
            for word in words:
                if isinstance(word, DmaStart):
                    word = word.replace(table=word.table + self.table)
                image += word if isinstance(word, bytes) else word.encode()
        return image + b"".join(self.tables), queues


def pattern(fmt=formats.FP32, partitions=2, n=4, offset=0, start=0, space=Space.SBUF):
    return AccessPattern(fmt, start, partitions, offset, ((1, n),), space)


def with_bits(word, bit, width, value):
    """A word with another value in a field."""
    number = int.from_bytes(word.encode(), "little")
    number &= ~(((1 << width) - 1) << bit)
    return (number | value << bit).to_bytes(WORD, "little")


def stopped(device, program):
    """The error that a program ends in."""
    loaded = device.load(program)
    try:
        with pytest.raises(DeviceError) as caught:
            loaded.execute()
        with pytest.raises(DeviceFaulted):
            loaded.execute()
    finally:
        device.reset()
        loaded.unload()
    return caught.value


def works(device, rng):
    """One exact product, more than one tile each way, compiled and placed anew."""
    while device._matmuls:
        device._matmuls.popitem()[1].unload()
    a = rng.standard_normal((5, 6)).astype(formats.BF16.dtype)
    b = rng.standard_normal((6, 17)).astype(formats.BF16.dtype)
    expected = matmul_reference(a, b, TINY.rows)
    return device.matmul(a, b).tobytes() == expected.tobytes()


@pytest.fixture
def guarded(tiny, rng):
    """The device with random memories, of which a stopped program must change nothing."""
    machine = tiny._runner.machine
    sbuf = contents(rng, TINY.partitions * TINY.sbuf_bytes).reshape(TINY.partitions, -1)
    psum = contents(rng, TINY.partitions * TINY.psum_bytes).reshape(TINY.partitions, -1)
    machine.sbuf_write(sbuf)
    machine.psum_write(psum)
    hbm = contents(rng, HBM_BYTES - DATA).tobytes()
    machine.hbm_write(DATA, hbm)
    yield tiny
    assert np.array_equal(machine.sbuf_read(), sbuf)
    assert np.array_equal(machine.psum_read(), psum)
    assert machine.hbm_read(DATA, len(hbm)) == hbm
    assert works(tiny, rng)


PSUM = Space.PSUM
FULL = pattern(partitions=4)
BAD_WORDS = {
    "unknown opcode": (with_bits(EventSemaphore(engine=Engine.DVE), 0, 8, 0x7E), 1, "opcode"),
    "opcode of another engine": (
        with_bits(LoadStationary(src=FULL), 8, 4, Engine.DVE), 1, "opcode",
    ),
    "wrong engine": (with_bits(Memset(dst=FULL), 8, 4, Engine.PE), 1, "opcode"),
    "reserved bit of the header": (with_bits(Memset(dst=FULL), 200, 1, 1), 2, ""),
    "reserved bit of an operand": (with_bits(Memset(dst=FULL), 256 + 50, 1, 1), 2, ""),
    "last bit": (with_bits(Memset(dst=FULL), 1023, 1, 1), 2, ""),
    "wait mode": (with_bits(Memset(dst=FULL), 40, 8, 3), 3, "wait0_mode"),
    "second wait mode": (with_bits(Memset(dst=FULL), 88, 8, 255), 3, "wait1_mode"),
    "update mode": (with_bits(Memset(dst=FULL), 136, 8, 3), 3, "update_mode"),
    "dtype 0": (with_bits(Memset(dst=FULL), 256, 8, 0), 3, "dst.dtype"),
    "dtype 15": (with_bits(Memset(dst=FULL), 256, 8, 15), 3, "dst.dtype"),
    "narrow PSUM": (
        TensorCopy(dst=FULL, src=pattern(formats.BF16, 4, space=PSUM)), 3, "src.dtype",
    ),
    "integers into the array": (LoadStationary(src=pattern(formats.INT8)), 3, "src.dtype"),
    "sums as bf16": (
        MatmulMoving(dst=pattern(formats.BF16, space=PSUM), src=FULL), 3, "dst.dtype",
    ),
    "memset in PSUM": (Memset(dst=pattern(space=PSUM)), 3, "dst.space"),
    "space 2": (with_bits(Memset(dst=FULL), 264, 8, 2), 3, "dst.space"),
    "half 3": (LoadStationary(src=FULL, half=3), 3, "half"),
    "engines": (DmaStart(table=0, first=1, engines_used=1, queue=0, count=1), 3, "first"),
    "no engine": (DmaStart(table=0, first=0, engines_used=0, queue=0, count=1), 3, "engines_used"),
    "two engines": (
        DmaStart(table=0, first=0, engines_used=2, queue=0, count=1), 3, "engines_used",
    ),
    "queue": (DmaStart(table=0, first=0, engines_used=1, queue=4, count=1), 3, "queue"),
    "table": (DmaStart(table=64, first=0, engines_used=1, queue=0, count=1), 3, "table"),
    "partition 4": (Memset(dst=pattern(partitions=1, start=4)), 4, "dst.start_partition"),
    "three from 1": (Memset(dst=pattern(partitions=3, start=1)), 4, "dst.start_partition"),
    "two from 1": (
        TensorCopy(dst=FULL, src=pattern(start=1)), 4, "src.start_partition",
    ),
    "five": (Memset(dst=pattern(partitions=5)), 4, "dst.start_partition"),
    "65535": (Memset(dst=pattern(partitions=65535)), 4, "dst.start_partition"),
    "sums from 2": (
        MatmulMoving(dst=pattern(start=2, space=PSUM), src=FULL), 4, "dst.start_partition",
    ),
    "one element too far": (Memset(dst=pattern(offset=2036)), 5, "dst.offset"),
    "far away": (Memset(dst=pattern(offset=0xFFFFFFFC)), 5, "dst.offset"),
    "before the start": (
        Memset(dst=AccessPattern(formats.INT8, 0, 1, 2, ((-1, 4),))), 5, "dst.offset",
    ),
    "misaligned": (TensorCopy(dst=FULL, src=pattern(partitions=4, offset=2)), 5, "src.offset"),
    "weights too far": (LoadStationary(src=pattern(offset=2040)), 5, "src.offset"),
    "moving too far": (
        MatmulMoving(dst=pattern(space=PSUM), src=pattern(offset=2040)), 5, "src.offset",
    ),
    "two banks": (
        MatmulMoving(dst=pattern(offset=56, space=PSUM), src=pattern()), 5, "dst.offset",
    ),
    "beyond PSUM": (
        MatmulMoving(dst=pattern(offset=512, space=PSUM), src=pattern()), 5, "dst.offset",
    ),
    "PSUM too far": (
        TensorCopy(dst=FULL, src=pattern(partitions=4, offset=500, space=PSUM)), 5, "src.offset",
    ),
    "weights too wide": (LoadStationary(src=pattern(n=5)), 6, "src.count0"),
    "moving too long": (
        MatmulMoving(
            dst=AccessPattern(formats.FP32, 0, 2, 0, ((0, 17),), PSUM), src=pattern(n=17)
        ), 6, "dst.count0",
    ),
    "sizes differ": (TensorCopy(dst=pattern(n=3), src=pattern()), 6, "dst.count0"),
    "sums differ": (
        MatmulMoving(dst=pattern(n=3, space=PSUM), src=pattern()), 6, "dst.count0",
    ),
    "partitions differ": (TensorCopy(dst=pattern(), src=FULL), 6, "dst.num_partitions"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WORDS)
def test_a_bad_word_stops_its_queue(guarded, case):
    word, code, field = BAD_WORDS[case]
    engine = getattr(word, "engine", Engine.DVE)
    good = EventSemaphore(engine=engine, update=Update(3, UpdateMode.ADD, 1))
    program = Raw({engine: [good, good, word, good]}, [bytes(WORD)])
    error = stopped(guarded, program)
    assert type(error) is DeviceError
    assert (error.code, error.engine, error.index) == (ErrorCode(code), engine, 2)
    assert error.field == field
    assert error.source == f"raw.py:{10 * engine + 2}"
    assert error.pc == program.base + 2 * WORD
    assert error.dma_engine is None
    assert ErrorCode(code).name in str(error)


IN, OUT = DescriptorSide(DATA, ((4, 4),)), DescriptorSide(TINY.sbuf_address(0, 0), ((4, 4),))


def side(address, *dims):
    return DescriptorSide(address, dims or ((4, 4),))


def sbuf(partition, offset, *dims):
    return side(TINY.sbuf_address(partition, offset), *dims)


BAD_DESCRIPTORS = {
    "kind": (with_bits(Descriptor(2, IN, OUT), 0, 8, 0xD0), "kind"),
    "nothing": (bytes(WORD), "kind"),
    "size": (with_bits(Descriptor(2, IN, OUT), 8, 8, 3), "size_log2"),
    "reserved": (with_bits(Descriptor(2, IN, OUT), 40, 1, 1), "_reserved"),
    "end": (with_bits(Descriptor(2, IN, OUT), 1023, 1, 1), "bit 576"),
    "counts": (with_bits(Descriptor(2, IN, OUT), 512, 16, 3), "dst_count0"),
    "window": (Descriptor(2, side(2 << 40), OUT).encode(), "src_address"),
    "end of the window": (Descriptor(2, side((1 << 40) - 8), OUT).encode(), "src_address"),
    "before HBM": (Descriptor(2, side(4, (-4, 4)), OUT).encode(), "src_address"),
    "misaligned": (Descriptor(2, IN, sbuf(0, 2)).encode(), "dst_address"),
    "partition": (Descriptor(2, IN, sbuf(4, 0)).encode(), "dst_address"),
    "partitions": (Descriptor(2, IN, sbuf(2, 0, (2048, 4))).encode(), "dst_address"),
    "beyond the partition": (Descriptor(2, IN, sbuf(1, 2040)).encode(), "dst_address"),
    "below the partition": (Descriptor(2, IN, sbuf(1, 0, (-4, 4))).encode(), "dst_address"),
    "step": (Descriptor(2, IN, sbuf(0, 0, (6, 4))).encode(), "dst_step0"),
    "askew": (Descriptor(2, IN, sbuf(0, 0, (2052, 4))).encode(), "dst_step0"),
}


@pytest.mark.parametrize("case", BAD_DESCRIPTORS)
def test_a_bad_descriptor_stops_its_engine(guarded, case):
    raw, field = BAD_DESCRIPTORS[case]
    start = DmaStart(table=0, first=0, engines_used=1, queue=2, count=2)
    harmless = Descriptor(0, side(0, (1, 0)), side(0, (1, 0))).encode()
    program = Raw({Engine.SP: [start]}, [harmless, raw])
    error = stopped(guarded, program)
    assert type(error) is DeviceError
    assert (error.code, error.dma_engine) == (ErrorCode.BAD_DESCRIPTOR, 0)
    assert error.engine is None
    assert error.field == field
    assert error.pc == error.address == program.table + WORD


@pytest.mark.parametrize("beyond", [0, 4096, (1 << 40) - HBM_BYTES - 64])
@pytest.mark.parametrize("code", [ErrorCode.BUS_READ, ErrorCode.BUS_WRITE])
def test_dma_outside_hbm_is_a_bus_error(guarded, code, beyond):
    outside, inside = side(HBM_BYTES + beyond), sbuf(1, 64)
    sides = (outside, inside) if code == ErrorCode.BUS_READ else (inside, outside)
    start = DmaStart(table=0, first=0, engines_used=1, queue=0, count=1)
    program = Raw({Engine.SP: [start]}, [Descriptor(2, *sides).encode()])
    machine, before = guarded._runner.machine, guarded.sbuf()
    error = stopped(guarded, program)
    assert type(error) is DeviceError
    assert (error.code, error.dma_engine, error.engine) == (code, 0, None)
    assert error.pc == program.table
    assert error.address == HBM_BYTES + beyond
    # What a refused read would have filled may be anything; nothing else may.
    after = machine.sbuf_read()
    after[1, 64:80] = before[1, 64:80]
    machine.sbuf_write(after)


def test_a_table_outside_hbm_is_a_bus_error(guarded):
    start = DmaStart(table=0, first=0, engines_used=1, queue=0, count=1)
    word = with_bits(start, 256, 40, HBM_BYTES)
    error = stopped(guarded, Raw({Engine.SP: [word]}))
    assert (error.code, error.dma_engine) == (ErrorCode.BUS_READ, 0)
    assert error.address == HBM_BYTES


def test_a_deadlock_names_who_waits_for_what(guarded):
    program = Raw(
        {
            Engine.PE: [
                EventSemaphore(engine=Engine.PE),
                EventSemaphore(
                    engine=Engine.PE, waits=[Wait(1, WaitMode.GE, 0), Wait(200, WaitMode.EQ, 9)]
                ),
            ],
            Engine.ACT: [EventSemaphore(engine=Engine.ACT, update=Update(200, UpdateMode.ADD, 8))],
            Engine.POOL: [
                EventSemaphore(engine=Engine.POOL, waits=[Wait(7, WaitMode.GE, 1 << 31)])
            ],
        }
    )
    error = stopped(guarded, program)
    assert type(error) is Deadlock
    assert error.code == ErrorCode.WATCHDOG
    waiting = {q.engine: q for q in error.queues if q.state != "done"}
    assert set(waiting) == {Engine.PE, Engine.POOL}
    pe, pool = waiting[Engine.PE], waiting[Engine.POOL]
    assert (pe.state, pe.wait, pe.mode) == ("waiting_semaphore", 1, WaitMode.EQ)
    assert (pe.semaphore, pe.wanted, pe.seen, pe.issued, pe.count) == (200, 9, 8, 1, 2)
    assert (pool.wait, pool.semaphore, pool.wanted, pool.seen) == (0, 7, 1 << 31, 0)
    text = str(error)
    assert "PE: 1 of 2 instructions issued, waits for semaphore 200 == 9, which is 8" in text
    assert "raw.py:1" in text
    assert "semaphore 7 >= 2147483648, which is 0" in text


@pytest.mark.parametrize("engine", Engine)
def test_a_semaphore_overflow_is_an_error(guarded, engine):
    full = EventSemaphore(engine=engine, update=Update(11, UpdateMode.SET, 0xFFFFFFFF))
    one = EventSemaphore(engine=engine, update=Update(11, UpdateMode.ADD, 1))
    program = Raw({engine: [full, one]})
    error = stopped(guarded, program)
    assert type(error) is DeviceError
    assert (error.code, error.engine) == (ErrorCode.SEMAPHORE_OVERFLOW, engine)
    assert error.field == "update_semaphore"
    assert error.address == 11


def test_an_engine_whose_update_overflows_is_named(tiny, rng):
    full = EventSemaphore(engine=Engine.DVE, update=Update(11, UpdateMode.SET, 0xFFFFFFFF))
    one = Memset(dst=pattern(), update=Update(11, UpdateMode.ADD, 1))
    error = stopped(tiny, Raw({Engine.DVE: [full, one]}))
    assert (error.code, error.engine) == (ErrorCode.SEMAPHORE_OVERFLOW, Engine.DVE)
    assert (error.address, error.field) == (11, "update_semaphore")
    # Which instruction it was is not known; none is blamed.
    assert (error.index, error.instruction, error.source) == (None, "", "")
    assert "semaphore 11, by work that ended" in str(error)
    start = DmaStart(
        table=0, first=0, engines_used=1, queue=1, count=0, update=Update(9, UpdateMode.ADD, 2)
    )
    full = EventSemaphore(engine=Engine.SP, update=Update(9, UpdateMode.SET, 0xFFFFFFFE))
    error = stopped(tiny, Raw({Engine.SP: [full, start]}))
    assert (error.code, error.dma_engine, error.address) == (ErrorCode.SEMAPHORE_OVERFLOW, 0, 9)
    assert works(tiny, rng)


# The same registers -------------------------------------------------------------------------------

TABLE = 0x4000


def add(semaphore, value=1):
    return Update(semaphore, UpdateMode.ADD, value)


def start(*, table=TABLE, count=1, queue=0, **keywords):
    return DmaStart(
        table=table, first=0, engines_used=1, queue=queue, count=count, **keywords
    )  # fmt: skip


def overflow(last):
    """Semaphore 11 is full; then ``last`` adds to it."""
    full = EventSemaphore(engine=last.engine, update=Update(11, UpdateMode.SET, 0xFFFFFFFF))
    return {last.engine: [full, last]}, []


def copy(src, dst, size_log2=2):
    return {Engine.SP: [start(queue=3)]}, [Descriptor(size_log2, src, dst)]


NONE = pattern(n=0)
OUTSIDE = {
    "at the end": (HBM_BYTES, (4, 4)),
    "over the end": (HBM_BYTES - 8, (4, 4)),
    "split by the end": (HBM_BYTES - 2, (4, 4)),
    "beyond, askew": (HBM_BYTES + 0x1235, (4, 4)),
    "far beyond": (HBM_BYTES + 0xABCDE1, (4, 40), (1000, 3)),
    "to the end of its window": ((1 << 40) - 16, (4, 4)),
    "apart": (HBM_BYTES - 30, (7, 9)),
    "downwards": (HBM_BYTES + 99, (-9, 30)),
    "one row of many": (DATA, (4, 4), (0x20003, 3), (-16, 5)),
}
WRONG = {
    **{
        f"overflow by {engine.name}": overflow(EventSemaphore(engine=engine, update=add(11)))
        for engine in Engine
    },
    "overflow by a load": overflow(LoadStationary(src=pattern(), update=add(11))),
    "overflow by a matmul": overflow(
        MatmulMoving(dst=pattern(space=PSUM), src=pattern(), update=add(11, 0xFFFFFFFF))
    ),
    "overflow by nothing": overflow(LoadStationary(src=NONE, update=add(11))),
    "overflow by a copy": overflow(TensorCopy(dst=FULL, src=FULL, update=add(11))),
    "overflow by an empty fill": overflow(Memset(dst=NONE, update=add(11))),
    "overflow by an empty job": overflow(start(count=0, update=add(11))),
    "overflow by a job": (
        overflow(start(update=add(11, 2)))[0], [Descriptor(2, IN, OUT)],
    ),
    **{
        f"{name}: read": copy(side(address, *dims), sbuf(0, 0, *((4 * (i == 0), n)
                              for i, (_, n) in enumerate(dims))))
        for name, (address, *dims) in OUTSIDE.items()
    },
    **{
        f"{name}: write": copy(sbuf(0, 0, *((4 * (i == 0), n) for i, (_, n) in enumerate(dims))),
                               side(address, *dims))
        for name, (address, *dims) in OUTSIDE.items()
    },
    "outside in bytes": copy(side(HBM_BYTES + 77, (1, 9)), sbuf(0, 0, (1, 9)), 0),
    "table beyond HBM": ({Engine.ACT: [start(table=HBM_BYTES + 0x80)]}, []),
    "table up to the end of the window": (
        {Engine.SP: [start(table=(1 << 40) - 2 * WORD, count=2)]}, [],
    ),
    "table beyond the window": (
        {Engine.SP: [start(table=(1 << 40) - 2 * WORD, count=3)]}, [],
    ),
    "bad descriptor": ({Engine.POOL: [start(count=2)]}, [Descriptor(2, IN, OUT), bytes(WORD)]),
    "bad word": ({Engine.DVE: [Memset(dst=FULL), Memset(dst=pattern(offset=2036))]}, []),
    "deadlock": (
        {
            Engine.ACT: [EventSemaphore(engine=Engine.ACT, update=add(3))],
            Engine.POOL: [
                EventSemaphore(engine=Engine.POOL, waits=[Wait(3, WaitMode.GE, 1)]),
                EventSemaphore(engine=Engine.POOL, waits=[Wait(3, WaitMode.EQ, 2)]),
            ],
        },
        [],
    ),
}  # fmt: skip


def report(error):
    return error.code, error.source, error.field, error.pc, error.address


def both_stop(tiny, image, queues):
    """The error registers, which hardware and model must agree about."""
    core = GoldenCore(TINY, HBM_BYTES)
    core.hbm[: len(image)] = np.frombuffer(image, np.uint8)
    tiny._runner.machine.hbm_write(0, image)
    with pytest.raises(GoldenError) as expected:
        core.run(queues)
    try:
        with pytest.raises(Fault) as found:
            tiny._runner.run(queues)
    finally:
        tiny.reset()
    assert report(found.value) == report(expected.value)
    return report(found.value)


@pytest.mark.parametrize("case", WRONG)
def test_error_registers_are_those_of_the_model(tiny, case):
    words, descriptors = WRONG[case]
    image, queues = bytearray(TABLE), {}
    for engine, instructions in words.items():
        at = 0x400 * (1 + engine)
        queues[engine] = at, len(instructions)
        raw = b"".join(i.encode() for i in instructions)
        image[at : at + len(raw)] = raw
    image += b"".join(d if isinstance(d, bytes) else d.encode() for d in descriptors)
    code, source, field, pc, address = both_stop(tiny, bytes(image), queues)
    if case.startswith("overflow"):
        (engine,) = words
        last = words[engine][-1]
        by_queue = isinstance(last, EventSemaphore)
        assert code == ErrorCode.SEMAPHORE_OVERFLOW
        assert source == (16 if isinstance(last, DmaStart) else engine)
        assert (field, address) == (128, 11)
        assert pc == (0x400 * (1 + engine) + WORD if by_queue else 0)
    if case == "table beyond the window":
        bit = next(bit for name, _, bit in DmaStart.scalars if name == "table")
        assert (code, source, field) == (ErrorCode.BAD_FIELD, Engine.SP, bit)
    if case.startswith("beyond, askew"):
        assert (pc, address) == (TABLE, HBM_BYTES + 0x1230)


@pytest.mark.parametrize("base", [HBM_BYTES, 0x440, (1 << 40) - WORD, (1 << 40) + 0x400], ids=hex)
def test_a_base_that_cannot_be_fetched_is_reported_like_the_model(tiny, base):
    image = bytes(0x400) + EventSemaphore(engine=Engine.SP).encode()
    code, source, _, pc, address = both_stop(tiny, image, {Engine.SP: (base, 1)})
    assert (code, source) == (ErrorCode.BUS_FETCH, Engine.SP)
    assert pc == address == base % (1 << 40)


# No error -----------------------------------------------------------------------------------------


def test_a_long_copy_inside_sbuf_is_no_deadlock(tiny):
    limit, times = 400, 2000  # fetching takes 200 cycles
    here, there = (sbuf(p, 0, (4, 16), (0, times)) for p in (0, 2))
    image = bytes(0x400) + start().encode()
    image += bytes(TABLE - len(image)) + Descriptor(2, here, there).encode()
    runner = tiny._runner
    runner.machine.hbm_write(0, image)
    runner._write("watchdog", limit)
    try:
        counters = runner.run({Engine.SP: (0x400, 1)})
    finally:
        runner._write("watchdog", WATCHDOG_CYCLES)
    assert counters["dma_sbuf_beats"] == 2 * 8 * times
    assert counters["core_cycles"] > 20 * limit
    memory = tiny.sbuf()
    assert np.array_equal(memory[0, :64], memory[2, :64])


# Mutations ----------------------------------------------------------------------------------------

MUTANTS_PER_BATCH = 30
BUDGET_CYCLES = 60_000
"""A good program takes a few thousand; what mutates to more work than this is cut short."""


def work(raw, queues, descriptors):
    """Elements that legal words move at most, whatever the order."""
    total = 0
    for base, count in queues.values():
        for at in range(base, base + count * WORD, WORD):
            try:
                instruction = decode(raw[at : at + WORD])
            except ValueError:
                continue
            total += sum(instruction.values[name].elements for name, _, _ in instruction.operands)
            if isinstance(instruction, DmaStart):
                total += 300 * instruction.count
    for at in descriptors:
        try:
            total += 20 * Descriptor.decode(raw[at : at + WORD]).src.elements
        except ValueError:
            continue
    return total


def illegal(raw, queues):
    """Whether a word of the queues is one that no core accepts."""
    for engine, (base, count) in queues.items():
        for at in range(base, base + count * WORD, WORD):
            try:
                check_word(raw[at : at + WORD], engine, TINY)
            except Exception:
                return True
    return False


def run_within(runner, queues, cycles):
    """Run; the kind of end, or ``None`` if it takes longer."""
    machine, run = runner.machine, runner.machine.run
    machine.run = lambda max_cycles=None, progress=None: run(max_cycles=cycles)
    try:
        runner.run(queues)
    except Exception as error:
        if "neither done nor in error" in str(error):
            return None
        if hasattr(error, "code"):
            return error.code.name
        raise
    finally:
        machine.run = run
    return "done"


@pytest.mark.parametrize("batch", range(10))
def test_flipped_bits_end_in_an_answer_or_an_error(tiny, seed, batch):
    runner, machine = tiny._runner, tiny._runner.machine
    ends = Counter()
    for number in range(MUTANTS_PER_BATCH):
        rng = np.random.default_rng([seed, batch, number])
        image = random_program(rng, TINY, 8)
        core = GoldenCore(TINY, HBM_BYTES)
        core.hbm[: len(image.raw)] = np.frombuffer(image.raw, np.uint8)
        core.hbm[DATA:] = contents(rng, HBM_BYTES - DATA)
        core.sbuf[:] = contents(rng, core.sbuf.size).reshape(core.sbuf.shape)
        core.psum[:] = contents(rng, core.psum.size).reshape(core.psum.shape)
        raw = bytearray(image.raw)
        for bit in rng.integers(0, 8 * len(raw), int(rng.integers(1, 5))):
            raw[bit // 8] ^= 1 << bit % 8
        first = WORD * len(image.instructions)
        machine.hbm_write(0, core.hbm.tobytes())
        machine.hbm_write(0, bytes(raw))
        machine.sbuf_write(core.sbuf)
        machine.psum_write(core.psum)
        long = work(raw, image.queues, range(first, len(raw), WORD)) > BUDGET_CYCLES // 2
        end = run_within(runner, image.queues, BUDGET_CYCLES)
        what = f"--seed {seed}, batch {batch}, mutant {number}"
        assert end is not None or long, f"{what} does not end"
        if illegal(bytes(raw), image.queues):
            assert end != "done", f"{what} ran an illegal word"
        if end == "done":
            core.run(image.queues)
            same = np.array_equal(machine.sbuf_read(), core.sbuf)
            same = same and np.array_equal(machine.psum_read(), core.psum)
            same = same and machine.hbm_read(DATA, HBM_BYTES - DATA) == core.hbm[DATA:].tobytes()
            end = "right" if same else "changed"
        ends[end or "long"] += 1
        if end != "right":
            tiny.reset()
    print(dict(ends))
    assert works(tiny, np.random.default_rng(seed))
    assert sum(ends.values()) == MUTANTS_PER_BATCH
