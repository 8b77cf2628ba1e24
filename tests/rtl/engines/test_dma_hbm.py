"""The HBM side of a DMA engine by itself: bursts written, and what follows a bus error."""

import random
from collections import deque

import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.engines.dma_hbm import HbmReader, HbmWriter
from makalu.sim.harness import simulate

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
        simulate(self.dut, self.plan, background=[self.bus], max_cycles=4000)
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


def test_the_first_of_two_bus_errors_is_the_one_that_is_kept(seed):
    burst = TINY.dma_burst_bytes
    run = Reads(0x1000, 2 * burst, {1: SLVERR, 45: DECERR}, seed=seed).run()
    assert run.beats > 45
    assert set(run.errors) == {(2, 3, 0x1000)}


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


@pytest.mark.parametrize("count", [40, 500], ids=["one-burst", "more-bursts"])
def test_descriptors_go_before_data_and_are_no_data(count, seed):
    dut = HbmReader(config=TINY)
    rng = random.Random(seed)
    words, put, counted = [], [], {"read": 0, "descriptor": 0}

    async def testbench(ctx):
        axi = dut.axi
        ctx.set(dut.space, SPACE)
        ctx.set(dut.i.p.address, 0x2004)
        ctx.set(dut.i.p.bytes, count)
        ctx.set(dut.i.valid, 1)
        await ctx.tick().until(dut.i.ready)
        ctx.set(dut.i.valid, 0)
        await ctx.tick().repeat(6)  # the data's burst waits for its address to be taken
        ctx.set(dut.fetch.p.address, 0x8000)
        ctx.set(dut.fetch.p.tag.queue, 1)
        ctx.set(dut.fetch.valid, 1)
        owed, addresses = deque(), []
        for _ in range(300):
            ready, offers = rng.random() < 0.5, bool(owed) and rng.random() < 0.7
            ctx.set(axi.arready, int(ready))
            ctx.set(axi.rvalid, int(offers))
            ctx.set(axi.rdata, owed[0] if offers else 0xBAD)
            if ctx.get(dut.put.valid):
                put.append(ctx.get(dut.put.data))
            if ctx.get(dut.word.valid):
                word = ctx.get(dut.word)
                words.append((word.tag.queue, word.index, word.data, word.error))
            counted["read"] += ctx.get(dut.read_bytes)
            counted["descriptor"] += ctx.get(dut.descriptor_bytes)
            if ready and ctx.get(axi.arvalid):
                address = ctx.get(axi.araddr)
                addresses.append(address)
                owed.extend(address + 8 * i for i in range(ctx.get(axi.arlen) + 1))
            taken = offers and ctx.get(axi.rready)
            fetches = ctx.get(dut.fetch.ready)
            await ctx.tick()
            if fetches:
                ctx.set(dut.fetch.valid, 0)
            if taken:
                owed.popleft()
        later = range(0x2100, 0x2004 + count, TINY.dma_burst_bytes)
        assert addresses == [0x2000, 0x8000, *later], "but for the burst that is offered already"
        assert ctx.get(dut.idle)

    simulate(dut, testbench)
    assert words == [(1, i, 0x8000 + 8 * i, 0) for i in range(16)]
    assert put == list(range(0x2000, 0x2004 + count, 8))
    assert counted == {"read": count, "descriptor": 128}


def test_no_read_burst_is_begun_after_a_stop_or_without_room():
    dut = HbmReader(config=TINY)
    size = TINY.dma_burst_bytes

    async def testbench(ctx):
        begun, reserved = 0, 0

        async def go(cycles):
            nonlocal begun, reserved
            for _ in range(cycles):
                begun += ctx.get(dut.axi.arvalid)
                reserved += ctx.get(dut.reserve)
                await ctx.tick()
            return begun

        ctx.set(dut.axi.arready, 1)
        ctx.set(dut.space, size - 1)
        ctx.set(dut.i.p.bytes, 4 * size)
        ctx.set(dut.i.valid, 1)
        await ctx.tick().until(dut.i.ready)
        ctx.set(dut.i.valid, 0)
        assert await go(20) == 0, "a burst for which there is no room"
        ctx.set(dut.space, size)
        await go(1)
        ctx.set(dut.space, 0)
        assert await go(20) == 1
        assert reserved == size
        ctx.set(dut.stop, 1)
        ctx.set(dut.space, SPACE)
        assert await go(20) == 1, "a burst after a stop"
        ctx.set(dut.stop, 0)
        assert await go(20) == 4

    simulate(dut, testbench)


# Writes -------------------------------------------------------------------------------------------


def bursts_of(address, count):
    """Address and length of the bursts, strobes and last of the beats."""
    size, addresses, beats = TINY.dma_burst_bytes, [], []
    at, end = address, address + count
    while at < end:
        stop = min(end, at // size * size + size)
        first = at & ~7
        addresses.append((first, (stop - first + 7) // 8 - 1))
        for word in range(first, stop, 8):
            strobe = sum(1 << i for i in range(8) if at <= word + i < stop)
            beats.append((strobe, int(word + 8 >= stop)))
        at = stop
    return addresses, beats


@pytest.mark.parametrize("pauses", [0.0, 0.5])
def test_write_bursts_have_their_addresses_strobes_and_answers(pauses, seed):
    dut = HbmWriter(config=TINY, capacities=(SPACE, SPACE))
    rng, size = random.Random(seed), TINY.dma_burst_bytes
    plans = [(0x1000, 8), (0x1003, 1), (0x2FFD, 6), (0x800, size + 8), (0x7F9, 40)]
    plans += [(rng.randrange(1 << 16), rng.randrange(1, 200)) for _ in range(10)]

    async def testbench(ctx):
        axi = dut.axi
        for b in range(2):
            ctx.set(dut.available[b], SPACE)
        for number, (address, count) in enumerate(plans):
            bad = number in (4, len(plans) - 1)
            ctx.set(dut.i.p.address, address)
            ctx.set(dut.i.p.bytes, count)
            ctx.set(dut.i.p.about.buffer, number % 2)
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)
            addresses, beats, claims = [], [], [0, 0]
            owed = dones = errors = 0
            offered = {}
            for _ in range(150):
                takes = {"aw": rng.random() >= pauses, "w": rng.random() >= pauses}
                ctx.set(axi.awready, int(takes["aw"]))
                ctx.set(axi.wready, int(takes["w"]))
                ctx.set(axi.bvalid, int(owed > 0))
                ctx.set(axi.bresp, SLVERR if bad else 0)
                now = {
                    "aw": (ctx.get(axi.awaddr), ctx.get(axi.awlen)),
                    "w": (ctx.get(axi.wstrb), ctx.get(axi.wlast)),
                }
                valid = {"aw": ctx.get(axi.awvalid), "w": ctx.get(axi.wvalid)}
                for channel, values in now.items():
                    if channel in offered:
                        assert valid[channel], f"{channel} was withdrawn"
                        assert values == offered.pop(channel), f"{channel} changed"
                    if valid[channel] and not takes[channel]:
                        offered[channel] = values
                if valid["aw"] and takes["aw"]:
                    addresses.append(now["aw"])
                if valid["w"] and takes["w"]:
                    beats.append(now["w"])
                for b in range(2):
                    claims[b] += ctx.get(dut.claim[b])
                dones += ctx.get(dut.done.valid)
                errors += ctx.get(dut.error.valid)
                owed -= ctx.get(axi.bvalid & axi.bready)
                owed += bool(valid["w"] and takes["w"] and now["w"][1])
                if ctx.get(dut.error.valid):
                    assert ctx.get(dut.error.address) in [first for first, _ in addresses]
                await ctx.tick()
            assert (addresses, beats) == bursts_of(address, count), f"{count} at {address:#x}"
            assert claims == ([count, 0], [0, count])[number % 2]
            assert (dones, errors) == ((0, len(addresses)) if bad else (1, 0))
            assert ctx.get(dut.idle)

    simulate(dut, testbench, max_cycles=20_000)


def test_no_write_burst_is_begun_after_a_stop_or_without_its_bytes(seed):
    dut = HbmWriter(config=TINY, capacities=(SPACE, SPACE))
    size = TINY.dma_burst_bytes

    async def testbench(ctx):
        axi = dut.axi
        begun = 0

        async def go(cycles):
            nonlocal begun
            for _ in range(cycles):
                begun += ctx.get(axi.awvalid)
                await ctx.tick()
            return begun

        ctx.set(axi.awready, 1)
        ctx.set(axi.wready, 1)
        ctx.set(dut.available[0], size - 1)
        ctx.set(dut.i.p.address, 0)
        ctx.set(dut.i.p.bytes, 3 * size)
        ctx.set(dut.i.valid, 1)
        await ctx.tick().until(dut.i.ready)
        ctx.set(dut.i.valid, 0)
        assert await go(20) == 0, "a burst before its bytes are there"
        ctx.set(dut.available[0], size)
        await ctx.tick()
        ctx.set(dut.available[0], size - 1)
        assert await go(20) == 1
        assert not ctx.get(dut.idle), "idle although a response is owed"
        ctx.set(dut.stop, 1)
        ctx.set(dut.available[0], SPACE)
        assert await go(20) == 1, "a burst after a stop"
        ctx.set(axi.bvalid, 1)
        await ctx.tick().until(axi.bready)
        ctx.set(axi.bvalid, 0)
        await ctx.tick().repeat(2)
        assert ctx.get(dut.idle)

    simulate(dut, testbench, max_cycles=20_000)
