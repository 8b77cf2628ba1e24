"""What cuts the runs of a DMA engine into bursts and beats, by itself."""

import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.engines.dma_walk import BeatSplitter, BurstSplitter
from makalu.sim.harness import simulate

SIZE = TINY.dma_burst_bytes


@pytest.mark.parametrize("ready", [1.0, 0.5])
def test_bursts_cover_a_run_and_end_at_their_boundaries(ready, rng):
    dut = BurstSplitter(config=TINY)
    runs = [(4096 - 5, 300), (SIZE, SIZE), (2 * SIZE + 1, SIZE - 1), (8, 1), (4095, 2)]
    runs += [(int(rng.integers(1 << 20)), int(rng.integers(1, 900))) for _ in range(20)]

    async def testbench(ctx):
        for number, (address, count) in enumerate(runs):
            final = number % 2
            ctx.set(dut.i.payload, {"address": address, "bytes": count, "last": final})
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)
            at, left = address, count
            while left:
                take = min(left, SIZE - at % SIZE)
                taken = rng.random() < ready
                ctx.set(dut.o.ready, int(taken))
                assert ctx.get(dut.o.valid), f"{left} bytes are missing"
                got = ctx.get(dut.o.p.address), ctx.get(dut.o.p.bytes), ctx.get(dut.o.p.last)
                want = at, take, int(final and take == left)
                assert got == want, f"{count} bytes at {address:#x}"
                await ctx.tick()
                if taken:
                    at, left = at + take, left - take
            assert not ctx.get(dut.o.valid), "a burst too many"
            ctx.set(dut.o.ready, 0)

    simulate(dut, testbench, max_cycles=20_000)


@pytest.mark.parametrize("across", [False, True])
def test_beats_cover_a_run_and_are_aligned(across, rng):
    dut = BeatSplitter(config=TINY)
    bits = TINY.sbuf_addr_bits

    def beats(partition, offset, count, size_log2):
        """Partition, offset, first byte and bytes of each beat."""
        if not across:
            while count:
                take = min(count, 8 - offset % 8)
                yield partition, offset & ~7, offset % 8, take
                offset, count = offset + take, count - take
            return
        group = 8 >> size_log2
        while count:
            phase = partition % group << size_log2
            take = min(count, 8 - phase)
            yield partition // group * group, offset, phase, take
            partition, count = (partition // group + 1) * group, count - take

    async def testbench(ctx):
        for number in range(60):
            size_log2 = number % 3
            if across:
                partition = int(rng.integers(TINY.partitions))
                offset = int(rng.integers(64)) << size_log2
                count = int(rng.integers(1, TINY.partitions - partition + 1)) << size_log2
            else:
                partition = int(rng.integers(TINY.partitions))
                offset, count = int(rng.integers(1000)), int(rng.integers(1, 60))
            final = number % 2
            ctx.set(dut.i.p.address, partition << bits | offset)
            ctx.set(dut.i.p.bytes, count)
            ctx.set(dut.i.p.last, final)
            ctx.set(dut.i.p.about.across, int(across))
            ctx.set(dut.i.p.about.size_log2, size_log2)
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)
            wanted = list(beats(partition, offset, count, size_log2))
            while wanted:
                taken = rng.random() < 0.6
                ctx.set(dut.o.ready, int(taken))
                assert ctx.get(dut.o.valid)
                o = ctx.get(dut.o.p)
                assert (o.partition, o.offset, o.phase, o.count) == wanted[0]
                assert o.last == int(final and len(wanted) == 1)
                await ctx.tick()
                if taken:
                    wanted.pop(0)
            assert not ctx.get(dut.o.valid), "a beat too many"
            ctx.set(dut.o.ready, 0)

    simulate(dut, testbench, max_cycles=20_000)
