"""Shared by the benches of single components: clock, reset, packed ports, a cycle at a time.

Inputs change on the falling edge and outputs are looked at just before the next one, so nothing
depends on a simulator's order of events at the rising edge.
"""

import os
import random

import cocotb
import numpy as np
from amaranth.lib import data
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, FallingEdge, Timer
from makalu.rtl.arch.formats import CANONICAL_NAN

SEED = int(os.environ.get("MAKALU_SEED", "1"))


def pack(layout, value):
    """Bits of a struct port."""
    return data.Layout.cast(layout).const(value).as_bits()


def unpack(layout, bits):
    """Members of a struct port as integers."""
    return {
        name: bits >> field.offset & (1 << field.width) - 1
        for name, field in data.Layout.cast(layout)
    }


def generator(name):
    """Random numbers of one test."""
    return np.random.default_rng([SEED, *name.encode()])


def pauses(name, chance):
    """Endless random pauses for a model of cocotbext-axi."""
    rng = random.Random(f"{SEED} {name}")
    while True:
        yield rng.random() < chance


async def begin(dut, *, clock=True, **inputs):
    """Start the clock, give every input a value, reset; return at a falling edge."""
    if clock:
        cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    for name, value in inputs.items():
        getattr(dut, name).value = value
    dut.rst.value = 1
    await ClockCycles(dut.clk, 3)
    await FallingEdge(dut.clk)
    dut.rst.value = 0


async def cycle(dut):
    """To the next falling edge."""
    await FallingEdge(dut.clk)


async def settle():
    """Let combinational outputs follow."""
    await Timer(1, "ns")


def random_sums(rng, shape):
    """Canonical binary32 bits: every exponent, some near each other, some special."""
    special = [0, 1 << 31, 1, (1 << 31) + 1, 0x7F800000, 0xFF800000, CANONICAL_NAN, 0x7F7FFFFF]
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    near = (rng.standard_normal(shape) * 8).astype(np.float32).view(np.uint32)
    bits = np.where(rng.random(shape) < 0.6, near, bits)
    bits = np.where(rng.random(shape) < 0.1, rng.choice(np.array(special, np.uint32), shape), bits)
    return canonical(bits)


def canonical(bits):
    """Every NaN as the hardware writes it."""
    bits = np.asarray(bits, np.uint32)
    return np.where(np.isnan(bits.view(np.float32)), CANONICAL_NAN, bits).astype(np.uint32)


def add(a, b):
    """Binary32 sum."""
    with np.errstate(all="ignore"):
        total = a.view(np.float32) + b.view(np.float32)
    return canonical(total.view(np.uint32))


def fused(acc, x, w, present=True):
    """``acc + x * w`` rounded once; ``x`` and ``w`` float64 with few bits, where ``present``.

    In float64 the product is exact; the sum is corrected to odd, so that the second rounding to
    binary32 is the only one.
    """
    with np.errstate(all="ignore"):
        wide = np.asarray(acc, np.uint32).view(np.float32).astype(np.float64)
        term = x * w
        total = wide + term
        back = total - wide
        rest = (wide - (total - back)) + (term - back)
        inexact = np.isfinite(total) & np.isfinite(rest) & (rest != 0)
        bits = total.view(np.int64) if total.ndim else np.array([total]).view(np.int64)[0]
        odd = bits & 1
        outward = (rest > 0) == (total > 0)
        fixed = np.where(inexact & (odd == 0), np.where(outward, bits + 1, bits - 1), bits)
        result = np.asarray(fixed, np.int64).view(np.float64).astype(np.float32)
    return np.where(present, canonical(result.view(np.uint32)), acc).astype(np.uint32)
