"""Delay line: every depth, and nothing from before a reset."""

import gc

import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.lib import data
from amaranth.sim import Simulator
from makalu.rtl.lib.delay import DELAY_LATENCY, DelayLine

PAIR = data.StructLayout({"a": 3, "b": 5})


def simulate(dut, depth, inputs, reset_at=None):
    """Outputs by cycle."""
    reset = Signal()
    outputs = []

    async def testbench(ctx):
        ctx.set(dut.depth, depth)
        for cycle, (word, pair) in enumerate(inputs):
            ctx.set(reset, cycle == reset_at)
            ctx.set(dut.i.word, word)
            ctx.set(dut.i.pair, pair)
            outputs.append((ctx.get(dut.o.word), ctx.get(dut.o.pair.as_value())))
            await ctx.tick()

    sim = Simulator(ResetInserter(reset)(dut))
    sim.add_clock(1e-6)
    sim.add_testbench(testbench)
    sim.run()
    return outputs


def inputs(rng, count):
    return [
        (int(rng.integers(1, 1 << 40)), {"a": int(rng.integers(8)), "b": int(rng.integers(1, 32))})
        for _ in range(count)
    ]


def packed(item):
    return item[0], item[1]["a"] | item[1]["b"] << 3


@pytest.mark.parametrize("max_depth", [0, 1, 5, 6, 14])
def test_every_depth(max_depth, rng):
    for depth in range(max_depth + 1):
        dut = DelayLine(members={"word": 40, "pair": PAIR}, max_depth=max_depth)
        given = inputs(rng, 4 * dut.words + 8)
        seen = simulate(dut, depth, given)
        delay = depth + DELAY_LATENCY
        assert seen[:delay] == [(0, 0)] * delay
        assert seen[delay:] == [packed(item) for item in given[: len(given) - delay]]


@pytest.mark.parametrize("reset_at", [0, 1, 9, 20, 27])
def test_what_was_taken_before_a_reset_never_comes_out(reset_at, rng):
    for depth in (0, 3, 6):
        dut = DelayLine(members={"word": 40, "pair": PAIR}, max_depth=6)
        given = inputs(rng, 60)
        seen = simulate(dut, depth, given, reset_at)
        delay = depth + DELAY_LATENCY
        for cycle in range(reset_at + 1, len(given)):
            taken = cycle - delay
            assert seen[cycle] == (packed(given[taken]) if taken > reset_at else (0, 0))


@pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")
def test_depth_must_not_be_negative():
    with pytest.raises(ValueError, match="not -1"):
        DelayLine(members={"word": 1}, max_depth=-1)
    gc.collect()  # the warning about the unused component comes when it goes
