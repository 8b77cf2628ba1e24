"""A bench that clocks the design a few times."""

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles


@cocotb.test()
async def test_counts(dut):
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    dut.rst.value = 1
    await ClockCycles(dut.clk, 2)
    dut.rst.value = 0
    await ClockCycles(dut.clk, 1)
    start = int(dut.count.value)
    await ClockCycles(dut.clk, 5)
    assert int(dut.count.value) == start + 5
