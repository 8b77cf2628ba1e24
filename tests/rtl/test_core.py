"""The core as it is wired, in Amaranth's simulator.

A product, a reset in the middle of it, and what the parts tell each other.
"""

import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_program
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.isa import (
    AccessPattern,
    Activation,
    AluOp,
    Descriptor,
    DescriptorSide,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    Function,
    IntegerTensorScalar,
    Iota,
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
from makalu.rtl.arch.registers import address_of, counter_address, queue_register
from makalu.sim.backends.pysim import PysimMachine
from makalu.sim.golden import GoldenCore

HBM = HbmConfig(size_bytes=16 << 10, latency_cycles=6)
MKN = 3, 5, 4


@pytest.fixture(scope="module")
def built():
    with PysimMachine(TINY, HBM) as machine:
        yield machine


@pytest.fixture
def machine(built):
    yield built
    reset(built)


@pytest.fixture(scope="module")
def product():
    """HBM before and after a product by the golden model, and the queues of its program."""
    rng = np.random.default_rng(3)
    m, k, n = MKN
    program = matmul_program(TINY, (m, k), (k, n), formats.BF16)
    before = rng.integers(0, 256, HBM.size_bytes, dtype=np.uint8)
    addresses, free = {}, HBM.size_bytes // 2
    for tensor in program.tensors:
        addresses[tensor.name] = free
        if tensor.kind == "input":
            values = rng.standard_normal(tensor.shape).astype(ml_dtypes.bfloat16)
            before[free : free + tensor.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
        free += -(-tensor.nbytes // 64) * 64
    image, queues = program.link(0, addresses)
    before[: len(image)] = np.frombuffer(image, np.uint8)
    golden = GoldenCore(TINY, HBM.size_bytes)
    golden.hbm[:] = before
    golden.run(queues)
    return before, np.array(golden.hbm), queues


def reset(machine):
    machine.reg_write(address_of("control"), 2)
    for _ in range(40):
        if not machine.reg_read(address_of("status")) & 8:
            return
        machine.step(40)
    raise AssertionError("the reset does not end")


def start(machine, before, queues):
    machine.hbm_write(0, before)
    for engine in Engine:
        base, count = queues.get(engine, (0, 0))
        machine.reg_write(queue_register(engine, "base_lo"), base)
        machine.reg_write(queue_register(engine, "base_hi"), 0)
        machine.reg_write(queue_register(engine, "count"), count)
    machine.reg_write(address_of("watchdog"), 600)
    machine.reg_write(address_of("control"), 1)


def finish(machine, after):
    """Run to the end; compare HBM; return the counters."""
    machine.run(max_cycles=8000)
    assert machine.reg_read(address_of("status")) == 2, "not done"
    got = np.frombuffer(machine.hbm_read(0, HBM.size_bytes), np.uint8)
    assert np.array_equal(got, after), f"first at {np.flatnonzero(got != after)[:4]}"
    names = ("core_cycles", "pe_columns", "dve_elements", "dma_read_bytes", "dma_write_bytes")
    return {name: machine.reg_read(counter_address(name)) for name in names}


def test_a_product_from_hbm_to_hbm_and_again_after_a_reset_in_it(machine, product):
    before, after, queues = product
    m, k, n = MKN
    start(machine, before, queues)
    counts = finish(machine, after)
    assert counts["dma_read_bytes"] == 2 * (m * k + k * n)
    assert counts["dma_write_bytes"] == 4 * m * n
    assert counts["pe_columns"] > 0
    assert counts["dve_elements"] > 0
    reset(machine)
    start(machine, before, queues)
    machine.run(max_cycles=counts["core_cycles"] // 2)
    assert machine.reg_read(address_of("status")) == 1, "the reset is to come within the run"
    reset(machine)
    start(machine, before, queues)
    assert finish(machine, after) == counts, "something is left of the runs before"


# What the parts tell each other -------------------------------------------------------------------

TABLE, BUSY, DONE, ERROR = 0x3000, 1, 2, 4
N = TINY.partitions
ONE = 0x3F800000


def execute(machine, programs, descriptors=(), at_most=200):
    """Start programs (engine to instructions) over random bytes; return HBM as it was then.

    The status is looked at ``at_most`` times before the work must have ended.
    """
    rng = np.random.default_rng(4)
    before = rng.integers(0, 256, HBM.size_bytes, dtype=np.uint8)
    tables = b"".join(d if isinstance(d, bytes) else d.encode() for d in descriptors)
    before[TABLE : TABLE + len(tables)] = np.frombuffer(tables, np.uint8)
    queues, base = {}, 0
    for engine, program in programs.items():
        words = b"".join(instruction.encode() for instruction in program)
        before[base : base + len(words)] = np.frombuffer(words, np.uint8)
        queues[engine] = base, len(program)
        base += len(words)
    assert base <= 0x1000
    bytes_of_sbuf = (N, TINY.sbuf_bytes)
    machine.sbuf_write(rng.integers(0, 64, bytes_of_sbuf, dtype=np.uint8))
    golden = GoldenCore(TINY, HBM.size_bytes)
    golden.hbm[:], golden.sbuf[:], golden.psum[:] = before, machine.sbuf_read(), machine.psum_read()
    start(machine, before, queues)
    for _ in range(at_most):
        if not machine.reg_read(address_of("status")) & BUSY:
            break
    return golden, queues


def count(machine, name):
    return machine.reg_read(counter_address(name))


def memset(n, *dims):
    return Memset(dst=AccessPattern(formats.INT8, 0, N, 0, dims or ((1, n),)), value=7)


def iota(n, *dims):
    return Iota(dst=AccessPattern(formats.INT8, 0, N, 0, dims or ((1, n),)), offset=5, step0=3)


def matmul(n, bank=0):
    dst = AccessPattern(formats.FP32, 0, N, 64 * bank, ((1, n),), Space.PSUM)
    return MatmulMoving(dst=dst, src=AccessPattern(formats.BF16, 0, N, 0, ((1, n),)))


def load():
    return LoadStationary(src=AccessPattern(formats.BF16, 0, N, 1024, ((1, N),)))


def copy_from_psum(n, *dims):
    src = AccessPattern(formats.FP32, 0, N, 0, dims or ((1, n),), Space.PSUM)
    return TensorCopy(dst=AccessPattern(formats.FP32, 0, N, 512, ((1, n),)), src=src)


def dma(count=1):
    return DmaStart(engine=Engine.SP, table=TABLE, engines_used=1, count=count)


def linear(src, dst, nbytes):
    return Descriptor(0, DescriptorSide(src, ((1, nbytes),)), DescriptorSide(dst, ((1, nbytes),)))


WORK = {
    "tensor": ({Engine.PE: [load(), *(matmul(16, bank) for bank in range(8))]}, []),
    "vector": ({Engine.DVE: [memset(600)]}, []),
    "gpsimd": ({Engine.POOL: [iota(600)]}, []),
    "dma": ({Engine.SP: [dma()]}, [linear(0x1000, 0x2001, 600)]),
}


@pytest.mark.parametrize("part", WORK)
def test_done_means_that_work_which_updates_nothing_is_complete(machine, part):
    golden, queues = execute(machine, *WORK[part])
    seen = np.frombuffer(machine.hbm_read(0, HBM.size_bytes), np.uint8)
    seen = [seen, machine.sbuf_read(), machine.psum_read()]
    assert machine.reg_read(address_of("status")) == DONE
    golden.run(queues)
    for got, want in zip(seen, (golden.hbm, golden.sbuf, golden.psum), strict=True):
        assert np.array_equal(got, want)


def test_a_bad_descriptor_stops_the_core(machine):
    execute(machine, {Engine.SP: [dma()]}, [bytes(128)])
    assert machine.reg_read(address_of("status")) == ERROR
    assert machine.reg_read(address_of("error")) & 0xFFFF == ErrorCode.BAD_DESCRIPTOR | 16 << 8


def test_a_reset_does_not_wait_until_a_transfer_is_complete(machine):
    copies = [linear(0x1000, 0x2001, 0xF00)] * 4
    execute(machine, {Engine.SP: [dma(len(copies))]}, copies, at_most=60)
    assert machine.reg_read(address_of("status")) == BUSY
    written = count(machine, "dma_write_bytes")
    assert written > 0
    reset(machine)
    # What is in flight, or has been read, is not more than the buffers hold.
    assert count(machine, "dma_write_bytes") < 0x3000


def test_the_engines_wait_for_each_others_psum_bank(machine):
    copies = [copy_from_psum(64, (1, 16), (0, 4)) for _ in range(4)]
    program = [load(), *(matmul(16) for _ in range(6))]
    execute(machine, {Engine.PE: program, Engine.DVE: copies})
    assert machine.reg_read(address_of("status")) == DONE
    assert count(machine, "pe_wait_psum") > 0
    assert count(machine, "dve_wait_psum") > 0


@pytest.mark.parametrize("engine", [Engine.DVE, Engine.POOL], ids=lambda engine: engine.name)
def test_an_engine_leaves_gaps_for_a_load_into_its_bank(engine, machine):
    """A word of bank 0 in every cycle."""
    work = {Engine.DVE: memset, Engine.POOL: iota}[engine](0, (32, 64), (0, 8))
    into = linear(0x1000, TINY.sbuf_address(0, 16 * 32), 256)
    execute(machine, {engine: [work], Engine.SP: [dma()]}, [into])
    assert machine.reg_read(address_of("status")) == DONE
    assert count(machine, f"{engine.name.lower()}_wait_sbuf") > 0


def test_three_engines_write_the_state_buffer_at_once(machine):
    """The vector and GpSimd engines share ports, and give way to the scalar engine's writes."""
    n = 56  # so long that both engines always have an instruction that waits

    def line(offset, fmt=formats.FP32):
        return AccessPattern(fmt, 0, N, offset, ((1, n),))

    add = Update(3, UpdateMode.ADD, 1)
    number = {"op0": AluOp.MULTIPLY, "scalar0": 77, "op1": AluOp.ADD, "scalar1": 5}
    programs = {
        Engine.DVE: [TensorCopy(dst=line(1024 + 4 * i), src=line(4 * i)) for i in range(8)],
        Engine.ACT: [
            Activation(dst=line(1280 + 4 * i), src=line(4 * i), function=Function.COPY, scale=ONE)
            for i in range(8)
        ],
        Engine.POOL: [
            IntegerTensorScalar(
                dst=line(1536 + 4 * i, formats.INT32),
                src=line(4 * i, formats.INT32),
                update=add,
                **number,
            )
            for i in range(8)
        ],
        # It waits for the updates of one of them.
        Engine.SP: [
            EventSemaphore(engine=Engine.SP, waits=[Wait(3, WaitMode.GE, 8)]),
            dma(),
        ],
    }
    out = Descriptor(
        0, DescriptorSide(TINY.sbuf_address(0, 1536), ((1, 128),)),
        DescriptorSide(0x3800, ((1, 128),)),
    )  # fmt: skip
    golden, queues = execute(machine, programs, [out], at_most=600)
    assert machine.reg_read(address_of("status")) == DONE
    golden.run(queues)
    assert np.array_equal(machine.sbuf_read(), golden.sbuf)
    assert np.array_equal(np.frombuffer(machine.hbm_read(0, HBM.size_bytes), np.uint8), golden.hbm)
    assert count(machine, "pool_elements") == count(machine, "dve_elements") == 8 * n
