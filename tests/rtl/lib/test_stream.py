"""The queue against a list, and the connection of two streams."""

from collections import deque

import pytest
from amaranth.hdl import Fragment, Module
from amaranth.lib import data, stream
from amaranth.sim import Simulator
from makalu.rtl.lib.stream import Queue, connect_streams
from makalu.sim.harness import simulate

PAIR = data.StructLayout({"a": 3, "b": 5})


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("drain", [0.2, 0.9])
def test_a_queue_keeps_everything_in_order_until_it_is_taken(depth, drain, rng):
    dut = Queue(shape=PAIR, depth=depth)
    levels = set()

    async def testbench(ctx):
        inside, offered, number = deque(), None, 0
        for _ in range(300):
            if offered is None and rng.random() < 0.6:
                offered, number = number % 256, number + 1
            ctx.set(dut.i.valid, offered is not None)
            if offered is not None:
                ctx.set(dut.i.p, PAIR.from_bits(offered))
            ready = rng.random() < drain
            ctx.set(dut.o.ready, int(ready))
            assert ctx.get(dut.level) == len(inside)
            levels.add(len(inside))
            if not inside or len(inside) == depth:
                assert ctx.get(dut.i.ready) == (not inside)
            if ctx.get(dut.o.valid):
                assert ctx.get(dut.o.p.as_value()) == inside[0]
            takes, gives = ctx.get(dut.i.ready) and offered is not None, ctx.get(dut.o.valid)
            await ctx.tick()
            if gives and ready:
                inside.popleft()
            if takes:
                inside.append(offered)
                offered = None
        # What is left comes out as well.
        ctx.set(dut.i.valid, 0)
        ctx.set(dut.o.ready, 1)
        for _ in range(depth + 2):
            if ctx.get(dut.o.valid):
                assert ctx.get(dut.o.p.as_value()) == inside.popleft()
            await ctx.tick()
        assert not inside

    simulate(dut, testbench)
    assert max(levels) == depth or drain > 0.5


def test_a_connection_passes_everything_and_waits(rng):
    source, sink = (stream.Signature(PAIR).create() for _ in range(2))
    m = Module()
    connect_streams(m, source, sink)

    async def testbench(ctx):
        for _ in range(20):
            valid, bits, ready = (int(rng.integers(top)) for top in (2, 256, 2))
            ctx.set(source.valid, valid)
            ctx.set(source.p.as_value(), bits)
            ctx.set(sink.ready, ready)
            assert ctx.get(sink.valid) == valid
            assert ctx.get(sink.p.as_value()) == bits
            assert ctx.get(source.ready) == ready

    sim = Simulator(m)
    sim.add_testbench(testbench)
    sim.run()


def test_streams_of_equal_width_but_different_payload_are_not_connected():
    source, sink = (stream.Signature(shape).create() for shape in (PAIR, 8))
    m = Module()
    with pytest.raises(TypeError, match="different payloads"):
        connect_streams(m, source, sink)
    Fragment.get(m, None)  # an unused module is a warning
