"""The whole core behind public AXI models: load a linked program, run it, compare HBM.

``MAKALU_BENCH`` names an ``.npz`` with ``before`` and ``after`` (HBM bytes), ``base`` and ``count``
per queue. The models' own random pauses are on for every channel.
"""

import itertools
import os
import random

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, with_timeout
from cocotbext.axi import (
    AxiBus,
    AxiLiteBus,
    AxiLiteMaster,
    AxiRam,
    AxiRamRead,
    AxiReadBus,
    AxiResp,
)
from cocotbext.axi.sparse_memory import SparseMemory
from makalu.rtl.arch import registers
from makalu.rtl.arch.isa import Engine, ErrorCode
from makalu.rtl.arch.registers import address_of, queue_register

CASE = np.load(os.environ["MAKALU_BENCH"]) if "MAKALU_BENCH" in os.environ else None


def pauses(chance):
    """Endless random pauses; the generator has its own seed, so that runs repeat."""
    rng = random.Random(random.random())
    return (rng.random() < chance for _ in itertools.count())


class Bench:
    """The core, its host and its memory."""

    def __init__(self, dut, *, pause=0.0):
        self.dut = dut
        cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
        self.memory = SparseMemory(1 << 40)
        engines = sum(1 for name in dir(dut) if name.startswith("dma") and name.endswith("awvalid"))
        self.host = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "host_"), dut.clk, dut.rst)
        self.fetch = AxiRamRead(
            AxiReadBus.from_prefix(dut, "fetch_"), dut.clk, dut.rst, size=1 << 40, mem=self.memory
        )
        self.rams = [
            AxiRam(
                AxiBus.from_prefix(dut, f"dma{i}_"), dut.clk, dut.rst, size=1 << 40, mem=self.memory
            )
            for i in range(engines)
        ]
        assert engines >= 1
        self.channels = [self.fetch.ar_channel, self.fetch.r_channel]
        for ram in self.rams:
            read, write = ram.read_if, ram.write_if
            self.channels += [read.ar_channel, read.r_channel]
            self.channels += [write.aw_channel, write.w_channel, write.b_channel]
        if pause:
            for channel in self.channels:
                channel.set_pause_generator(pauses(pause))
            for channel in (
                self.host.read_if.ar_channel, self.host.read_if.r_channel,
                self.host.write_if.aw_channel, self.host.write_if.w_channel,
                self.host.write_if.b_channel,
            ):  # fmt: skip
                channel.set_pause_generator(pauses(pause))

    async def reset(self):
        self.dut.rst.value = 1
        await ClockCycles(self.dut.clk, 4)
        self.dut.rst.value = 0
        await ClockCycles(self.dut.clk, 4)

    async def read(self, name_or_address):
        address = name_or_address
        if isinstance(address, str):
            address = address_of(address)
        answer = await self.host.read(address, 4)
        assert answer.resp == AxiResp.OKAY, (name_or_address, answer.resp)
        return int.from_bytes(answer.data, "little")

    async def write(self, name_or_address, value):
        address = name_or_address
        if isinstance(address, str):
            address = address_of(address)
        answer = await self.host.write(address, value.to_bytes(4, "little"))
        assert answer.resp == AxiResp.OKAY, (name_or_address, answer.resp)

    async def start(self, base, count):
        for engine in Engine:
            await self.write(queue_register(engine, "base_lo"), int(base[engine]) & 0xFFFFFFFF)
            await self.write(queue_register(engine, "base_hi"), int(base[engine]) >> 32)
            await self.write(queue_register(engine, "count"), int(count[engine]))
        await self.write("clear", 1)
        await self.write("control", 1)
        assert await self.read("status") & 0b101, "busy (or over) right after the start"

    async def finish(self, polls=4000):
        for _ in range(polls):
            status = await self.read("status")
            if not status & 1:
                return status
            await ClockCycles(self.dut.clk, 50)
        raise AssertionError("the core does not finish")

    async def run_case(self):
        before, after = CASE["before"].tobytes(), CASE["after"].tobytes()
        self.memory.write(0, before)
        await self.start(CASE["base"], CASE["count"])
        status = await self.finish()
        assert status & 0b110 == 0b010, (status, await self.read("error"))
        got = np.frombuffer(bytes(self.memory.read(0, len(after))), np.uint8)
        wrong = np.nonzero(got != CASE["after"])[0]
        assert not len(wrong), f"{len(wrong)} of {len(got)} bytes differ, first at {wrong[0]:#x}"
        assert (CASE["after"] != CASE["before"]).any(), "the case compares nothing"


@cocotb.test()
async def test_identifies_itself(dut):
    bench = Bench(dut)
    await bench.reset()
    assert await bench.read("id") == registers.ID_VALUE
    assert await bench.read("version") == registers.VERSION_VALUE
    assert await bench.read("status") == 0


@cocotb.test()
async def test_runs_a_program_without_pauses(dut):
    bench = Bench(dut)
    await bench.reset()
    await with_timeout(bench.run_case(), 5, "ms")


@cocotb.test()
async def test_runs_it_twice_with_random_pauses_on_every_channel(dut):
    bench = Bench(dut, pause=0.4)
    await bench.reset()
    await with_timeout(bench.run_case(), 20, "ms")
    await with_timeout(bench.run_case(), 20, "ms")


@cocotb.test()
async def test_reset_in_mid_run_then_the_same_program(dut):
    bench = Bench(dut, pause=0.2)
    await bench.reset()
    for cycles in (37, 400, 900):
        bench.memory.write(0, CASE["before"].tobytes())
        await bench.start(CASE["base"], CASE["count"])
        await ClockCycles(dut.clk, cycles)
        await bench.write("control", 2)
        while await bench.read("status") & 8:
            pass
        assert await bench.read("status") == 0
        await with_timeout(bench.run_case(), 20, "ms")


@cocotb.test()
async def test_a_wrong_opcode_stops_with_its_address(dut):
    bench = Bench(dut)
    await bench.reset()
    bench.memory.write(0x1000, b"\xee" + bytes(127))
    base, count = [0x1000] * 5, [0, 0, 1, 0, 0]
    await bench.start(base, count)
    status = await bench.finish()
    assert status & 0b111 == 0b100
    error = await bench.read("error")
    assert (error & 0xFF, error >> 8 & 0xFF) == (ErrorCode.ILLEGAL_OPCODE, Engine.DVE)
    assert await bench.read("error_pc_lo") == 0x1000
    await bench.write("control", 2)
    while await bench.read("status") & 8:
        pass
    await with_timeout(bench.run_case(), 20, "ms")


@cocotb.test()
async def test_bad_register_accesses_are_refused_and_change_nothing(dut):
    bench = Bench(dut)
    await bench.reset()
    await bench.write("watchdog", 0x1234)
    for address in (0x3FC, 0x024):
        answer = await bench.host.write(address, b"\xff\xff\xff\xff")
        assert answer.resp == AxiResp.SLVERR, hex(address)
    answer = await bench.host.read(0x3FC, 4)
    assert answer.resp == AxiResp.SLVERR
    answer = await bench.host.write(address_of("watchdog"), b"\xff\xff")  # partial strobe
    assert answer.resp == AxiResp.SLVERR
    assert await bench.read("watchdog") == 0x1234
