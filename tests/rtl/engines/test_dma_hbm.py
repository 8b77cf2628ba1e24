"""The HBM side of a DMA engine by itself: what comes and goes after a bus error."""

import random
from collections import deque

import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.engines.dma_hbm import HbmReader
from makalu.sim.harness import monitor, simulate

SPACE = TINY.dma_bursts * TINY.dma_burst_bytes
SLVERR, DECERR = 2, 3


class Reads:
    """A reader of one plan, a bus that answers ``codes`` by beat, and all that was put."""

    def __init__(self, address, count, codes=None, pauses=0.0, seed=0):
        self.dut = HbmReader(config=TINY)
        self.address, self.count, self.codes = address, count, codes or {}
        self.pauses, self.rng = pauses, random.Random(seed)
        self.put = []  # (beat, count)
        self.addresses, self.beats, self.errors = [], 0, []

    async def plan(self, ctx):
        dut = self.dut
        ctx.set(dut.space, SPACE)
        ctx.set(dut.i.p.address, self.address)
        ctx.set(dut.i.p.bytes, self.count)
        ctx.set(dut.i.p.about.tag.queue, 2)
        ctx.set(dut.i.p.about.tag.slot, 3)
        ctx.set(dut.i.valid, 1)
        await ctx.tick().until(dut.i.ready)
        ctx.set(dut.i.valid, 0)
        await ctx.tick().repeat(8)
        await ctx.tick().until(dut.idle)
        await ctx.tick().repeat(10)

    async def bus(self, ctx):
        dut, axi = self.dut, self.dut.axi
        owed = deque()
        while True:
            ready = self.rng.random() >= self.pauses
            offers = bool(owed) and self.rng.random() >= self.pauses
            ctx.set(axi.arready, ready)
            ctx.set(axi.rvalid, offers)
            if offers:
                ctx.set(axi.rdata, self.beats)
                ctx.set(axi.rresp, self.codes.get(self.beats, 0))
            if ctx.get(dut.put.valid):
                assert offers
                self.put.append((self.beats, ctx.get(dut.put.count)))
            if ctx.get(dut.error.valid):
                tag = ctx.get(dut.error.tag)
                self.errors.append((tag.queue, tag.slot, ctx.get(dut.error.address)))
            if ready and ctx.get(axi.arvalid):
                self.addresses.append((self.beats, ctx.get(axi.araddr)))
                owed.extend([None] * (ctx.get(axi.arlen) + 1))
            taken = offers and ctx.get(axi.rready)
            await ctx.tick()
            if taken:
                owed.popleft()
                self.beats += 1

    def run(self):
        simulate(self.dut, self.plan, background=[self.bus, monitor(self.dut.i, [])])
        return self


@pytest.mark.parametrize("pauses", [0.0, 0.6])
@pytest.mark.parametrize("code", [SLVERR, DECERR], ids=["slverr", "decerr"])
@pytest.mark.parametrize("bad", [0, 1, 31, 32, 45])
def test_nothing_is_put_from_a_bus_error_on(bad, code, pauses, seed):
    burst = TINY.dma_burst_bytes
    run = Reads(0x1000, 2 * burst, {bad: code}, pauses, seed).run()
    assert run.beats > bad, "the burst of the error is not received as a whole"
    assert run.put == [(beat, 8) for beat in range(bad)]
    assert set(run.errors) == {(2, 3, 0x1000 + bad * 8 // burst * burst)}


def test_no_burst_is_begun_after_a_bus_error(seed):
    burst = TINY.dma_burst_bytes
    run = Reads(0x1000, 40 * burst, {0: SLVERR}, 0.3, seed).run()
    assert run.addresses
    assert len(run.addresses) < 40
    assert max(beats for beats, _ in run.addresses) <= 2, "an address follows the error"


def test_without_an_error_all_bytes_are_put(seed):
    run = Reads(0x1003, 200, pauses=0.5, seed=seed).run()
    assert sum(count for _, count in run.put) == 200
    assert run.errors == []
