"""Counters against plain sums."""

import random

from amaranth.sim import Simulator
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.control.counters import READ_CYCLES, Counters


class Run:
    """Counters with random increments and a model beside them."""

    def __init__(self, rng):
        self.rng = rng
        self.dut = Counters()
        self.sums = [0] * len(COUNTERS)
        self.wide = False

    async def tick(self, ctx, clear=False):
        """Drive increments for one cycle."""
        for event in COUNTERS:
            if self.rng.random() < 0.1 or self.wide:
                top = (1 << event.width) - 1
                value = top if self.wide else self.rng.choice([0, 1, top, self.rng.randint(0, top)])
                ctx.set(getattr(self.dut, event.source)[event.name], value)
        ctx.set(self.dut.clear, clear)
        for i, event in enumerate(COUNTERS):
            increment = ctx.get(getattr(self.dut, event.source)[event.name])
            if clear:
                self.sums[i] = increment if event.source == "core" else 0
            else:
                self.sums[i] += increment
        await ctx.tick()
        ctx.set(self.dut.clear, 0)

    async def read(self, ctx, i):
        """Read counter ``i``; check it against the sum of the cycles before."""
        ctx.set(self.dut.select, i)
        ctx.set(self.dut.read, 1)
        want = self.sums[i]
        await self.tick(ctx)
        ctx.set(self.dut.read, 0)
        for _ in range(READ_CYCLES - 1):
            await self.tick(ctx)
        assert ctx.get(self.dut.value) == want, COUNTERS[i].full_name

    def simulate(self, test):
        simulator = Simulator(self.dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(test)
        simulator.run()


def test_counts_agree_with_sums_at_any_time(seed):
    run = Run(random.Random(seed))

    async def test(ctx):
        for round_ in range(3):
            if round_:
                await run.tick(ctx, clear=True)
            for _ in range(60):
                for _ in range(run.rng.choice([0, 0, 1, 7])):
                    await run.tick(ctx)
                await run.read(ctx, run.rng.randrange(len(COUNTERS)))
            for i in range(len(COUNTERS)):
                await run.read(ctx, i)

    run.simulate(test)


def test_full_increments_with_reads_all_the_time_lose_nothing(seed):
    run = Run(random.Random(seed))
    run.wide = True

    async def test(ctx):
        for _ in range(2):
            for i in range(len(COUNTERS)):
                await run.read(ctx, i)

    run.simulate(test)


def test_a_value_that_was_read_holds_until_the_next_read(seed):
    run = Run(random.Random(seed))

    async def test(ctx):
        for i in (0, 3, len(COUNTERS) - 1):
            await run.read(ctx, i)
            value = ctx.get(run.dut.value)
            for _ in range(3 * len(COUNTERS)):
                await run.tick(ctx)
                assert ctx.get(run.dut.value) == value

    run.simulate(test)
