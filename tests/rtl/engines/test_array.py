"""A processing element and a quad by themselves: values, swaps, lanes, reset.

The elements of a whole array are tested in ``test_tensor.py``, the arithmetic in ``../arith/``.
"""

from dataclasses import replace

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator
from makalu.rtl.arch.config import TINY
from makalu.rtl.engines.array import ArrayRow, Pe, Quad

from ..arith.exact import INF, NAN, VOID, exact_fma, pack_operand

ONE, ZERO = (0x800, 0), (0, 0)
VOID_WORD = int(pack_operand(0, 0, 0, VOID))


def word(sig, exp, sign=0, kind=0):
    return int(pack_operand(sig, exp, sign, kind))


def simulate(dut, body):
    """Run ``body(ctx, reset)`` on a component that the test can reset."""
    reset = Signal()
    simulator = Simulator(ResetInserter(reset)(dut))
    simulator.add_clock(1e-6)

    async def testbench(ctx):
        await body(ctx, reset)

    simulator.add_testbench(testbench)
    simulator.run()


class Element:
    """A processing element, a step at a time."""

    def __init__(self, ctx, dut):
        self.ctx, self.dut = ctx, dut

    async def load(self, weight, *, swap=True):
        ctx, dut = self.ctx, self.dut
        ctx.set(dut.weight.as_value(), weight)
        ctx.set(dut.capture, 1)
        await ctx.tick()
        ctx.set(dut.capture, 0)
        ctx.set(dut.weight.as_value(), word(0xFFF, 3))
        ctx.set(dut.swap, int(swap))
        await ctx.tick()
        ctx.set(dut.swap, 0)

    async def multiply(self, moving, acc):
        """Result bits of one product."""
        ctx, dut = self.ctx, self.dut
        ctx.set(dut.moving.as_value(), moving)
        await ctx.tick()
        ctx.set(dut.moving.as_value(), VOID_WORD)
        ctx.set(dut.psum_in, acc)
        await ctx.tick().repeat(2)
        return ctx.get(dut.psum_out)


DIRECTED = [  # moving, weight, sum
    (VOID_WORD, word(*ONE), 0x3F800000), (word(0x800, 0, 0, INF), word(*ZERO), 0x3F800000),
    (word(0, 0, 0, NAN), word(0x800, 0, 0, INF), 0), (word(*ONE), word(*ONE), 0x7FC00000),
    (word(0x800, 0, 0, INF), word(*ONE), 0xFF800000), (word(*ONE), word(*ONE), 0xFF812345),
    (word(*ZERO), word(*ONE), 0x80000000), (word(0, 99), word(0xFFF, 20), 0x3F800001),
    (VOID_WORD, word(0x800, 0, 0, INF), 0x80000000),
    (word(0xFFF, 127), word(0xFFF, 127), 0), (word(0xFFF, 127), word(0xFFF, 0), 0x7F7FFFFF),
    (word(0xFFF, 127, 1), word(0xFFF, 127), 0x7F800000),
    # Half of the last place, and a little more, of an even and of an odd sum
    (word(*ONE), word(0x800, -24), 0x3F800000), (word(*ONE), word(0x800, -24), 0x3F800001),
    (word(0x801, 0), word(0x801, -24), 0x3F800000), (word(*ONE), word(0x801, -25), 0x3F800000),
    (word(0x801, 0), word(0x801, -60), 0x3F800000),
    (word(0x800, 0, 1), word(0x800, -40), 0x3F800000),
    # Subnormal sums
    (word(0x800, -75), word(0x801, -75), 0), (word(0x800, -60), word(0x800, -80), 3),
    (word(0x800, -70), word(0x800, -77, 1), 0x00800000), (word(0x800, -74), word(0x800, -75), 1),
    (word(0x800, -63), word(0x800, -63), 0x807FFFFF),
    # Cancellation
    (word(0x800, 0, 1), word(*ONE), 0x3F800000), (word(0x800, 0, 1), word(0x800, 0, 1), 0xBF800000),
    (word(0x801, 0, 1), word(*ONE), 0x3F800000), (word(0xFFF, 0, 1), word(0xFFF, 0), 0x407FF001),
]  # fmt: skip


def random_vectors(rng, count):
    for _ in range(count):
        x, w = (
            word(int(rng.integers(0x800, 0x1000)), int(rng.integers(-6, 7)), int(rng.integers(2)))
            for _ in range(2)
        )
        yield x, w, int((rng.standard_normal(1) * 8).astype(np.float32).view(np.uint32)[0])


def test_an_element_multiplies_and_adds_exactly(rng):
    vectors = [*DIRECTED, *random_vectors(rng, 60)]
    x, w, acc = (np.array(column, np.uint32) for column in zip(*vectors, strict=True))
    wanted = exact_fma(x, w, acc)
    dut = Pe()

    async def body(ctx, reset):
        element = Element(ctx, dut)
        for (x, w, acc), want in zip(vectors, wanted, strict=True):
            await element.load(w)
            got = await element.multiply(x, acc)
            assert got == int(want), f"{x:#x} * {w:#x} + {acc:#x}: {got:#x}, not {want:#x}"

    simulate(dut, body)


def test_a_load_takes_effect_with_the_swap():
    dut = Pe()

    async def body(ctx, reset):
        element = Element(ctx, dut)
        assert await element.multiply(word(*ONE), 0x40000000) == 0x40000000, "void before any load"
        await element.load(word(0x800, 0))
        await element.load(word(0x800, 1), swap=False)
        assert await element.multiply(word(*ONE), 0) == 0x3F800000, "a load without a swap"
        # A load together with a swap is for the swap after that one.
        ctx.set(dut.weight.as_value(), word(0x800, 2))
        ctx.set(dut.capture, 1)
        ctx.set(dut.swap, 1)
        await ctx.tick()
        ctx.set(dut.capture, 0)
        ctx.set(dut.swap, 0)
        assert await element.multiply(word(*ONE), 0) == 0x40000000
        ctx.set(dut.swap, 1)
        await ctx.tick()
        ctx.set(dut.swap, 0)
        assert await element.multiply(word(*ONE), 0) == 0x40800000

    simulate(dut, body)


def test_a_reset_makes_the_weights_void():
    dut = Pe()

    async def body(ctx, reset):
        element = Element(ctx, dut)
        await element.load(word(*ONE))
        await element.load(word(*ONE), swap=False)
        for swap in range(2):
            ctx.set(reset, 1 - swap)
            ctx.set(dut.swap, swap)
            await ctx.tick()
            ctx.set(reset, 0)
            ctx.set(dut.swap, 0)
            assert await element.multiply(word(*ONE), 0x80000000) == 0x80000000

    simulate(dut, body)


@pytest.mark.parametrize("index", [0, 1, 7])
def test_weights_go_to_their_lanes_of_their_quad(index):
    dut = Quad(config=replace(TINY, rows=32))

    async def body(ctx, reset):
        async def load(exponents, mask, quad):
            for lane, exp in enumerate(exponents):
                ctx.set(dut.i.lanes[lane].as_value(), word(0x800, exp))
            for name, value in (("load", 1), ("mask", mask), ("quad", quad)):
                ctx.set(getattr(dut.i, name), value)
            await ctx.tick()
            ctx.set(dut.i.load, 0)
            ctx.set(dut.i.swap, 1)
            await ctx.tick()
            ctx.set(dut.i.swap, 0)
            ctx.set(dut.i.moving.as_value(), word(*ONE))
            await ctx.tick()
            ctx.set(dut.i.moving.as_value(), VOID_WORD)
            await ctx.tick().repeat(3)
            bits = ctx.get(dut.psum_out)
            return [bits >> 32 * lane & 0xFFFFFFFF for lane in range(4)]

        def want(*exponents):
            return [127 + exp << 23 for exp in exponents]

        ctx.set(dut.index, index)
        assert await load((0, 1, 2, 3), 15, index) == want(0, 1, 2, 3)
        assert await load((4, 5, 6, 7), 0b0101, index) == want(4, 1, 6, 3)
        assert await load((8, 8, 8, 8), 15, index ^ 1) == want(4, 1, 6, 3)

    simulate(dut, body)


def test_a_quad_passes_everything_on_after_a_cycle(rng):
    dut = Quad(config=TINY)
    members = {
        "moving": dut.i.moving.as_value(), "swap": dut.i.swap, "load": dut.i.load,
        "quad": dut.i.quad, "mask": dut.i.mask, "lanes": dut.i.lanes.as_value(),
    }  # fmt: skip
    outputs = {
        name: getattr(dut.o, name).as_value() if name in ("moving", "lanes")
        else getattr(dut.o, name)
        for name in members
    }  # fmt: skip

    async def body(ctx, reset):
        for _ in range(20):
            values = {
                name: int.from_bytes(rng.bytes(16), "little") & (1 << len(signal)) - 1
                for name, signal in members.items()
            }
            for name, signal in members.items():
                ctx.set(signal, values[name])
            await ctx.tick()
            assert {name: ctx.get(signal) for name, signal in outputs.items()} == values

    simulate(dut, body)


def test_every_quad_of_a_row_takes_its_weights_in_its_cycle():
    config = replace(TINY, rows=8)
    dut = ArrayRow(config=config)
    weights = [(0, 1, 2, 3), (4, 5, 6, 7)]

    async def body(ctx, reset):
        for quad, exponents in enumerate(weights):
            for lane, exp in enumerate(exponents):
                ctx.set(dut.i.lanes[lane].as_value(), word(0x800, exp))
            ctx.set(dut.i.load, 1)
            ctx.set(dut.i.mask, 15)
            ctx.set(dut.i.quad, quad)
            await ctx.tick()
        ctx.set(dut.i.load, 0)
        ctx.set(dut.i.swap, 1)
        await ctx.tick()
        ctx.set(dut.i.swap, 0)
        ctx.set(dut.i.moving.as_value(), word(*ONE))
        await ctx.tick()
        ctx.set(dut.i.moving.as_value(), VOID_WORD)
        await ctx.tick().repeat(3)
        for quad, exponents in enumerate(weights):  # quad q is q cycles late
            bits = ctx.get(dut.psum_out) >> 128 * quad
            got = [bits >> 32 * lane & 0xFFFFFFFF for lane in range(4)]
            assert got == [127 + exp << 23 for exp in exponents], f"quad {quad}"
            await ctx.tick()

    simulate(dut, body)
