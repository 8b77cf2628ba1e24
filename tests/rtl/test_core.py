"""The core as it is wired, in Amaranth's simulator: a product, and a reset in the middle of it."""

import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_program
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.arch.isa import Engine
from makalu.rtl.arch.registers import address_of, counter_address, queue_register
from makalu.sim.backends.pysim import PysimMachine
from makalu.sim.golden import GoldenCore

HBM = HbmConfig(size_bytes=16 << 10, latency_cycles=6)
MKN = 3, 5, 4


@pytest.fixture(scope="module")
def machine():
    with PysimMachine(TINY, HBM) as machine:
        yield machine


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
    for _ in range(20):
        if not machine.reg_read(address_of("status")) & 8:
            return
        machine.step(20)
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
