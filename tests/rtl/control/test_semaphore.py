"""Semaphores: no update is lost, overflow is reported, the sweep clears."""

import random
from collections import deque
from dataclasses import replace

import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.isa import HEADER, Engine, ErrorCode, UpdateMode
from makalu.rtl.control.semaphore import SOURCE_DMA, Semaphores

NONE, ADD, SET = UpdateMode.NONE, UpdateMode.ADD, UpdateMode.SET
CONFIGS = [replace(TINY, semaphores=8), replace(SMALL, semaphores=16), TRN]


def sources_of(dut):
    """``(name, error source, port)`` of every source of updates."""
    return [
        *((f"queue {engine.name}", int(engine), dut.queues[engine]) for engine in Engine),
        ("pe", int(Engine.PE), dut.pe),
        ("act", int(Engine.ACT), dut.act),
        ("dve", int(Engine.DVE), dut.dve),
        ("pool", int(Engine.POOL), dut.pool),
        *((f"dma {i}", SOURCE_DMA + i, port) for i, port in enumerate(dut.dma)),
        ("host", 0, dut.host),
    ]


class Driver:
    """Offers the updates of ``plans`` (source index to a list), each until it is taken."""

    def __init__(self, dut, rng, pauses=0.0):
        self.dut, self.rng, self.pauses = dut, rng, pauses
        self.ports = [port for _, _, port in sources_of(dut)]
        self.plans = [deque() for _ in self.ports]
        self.taken = []  # (cycle, source index, update)
        self.errors = []  # (cycle, source, semaphore, code, field, pc)
        self.cycle = 0

    async def run(self, ctx):
        dut = self.dut
        offering = [None] * len(self.ports)
        looks = [port.ready for port in self.ports]
        error = dut.error
        looks += [error.valid, dut.error_source, error.address, error.code, error.field, error.pc]
        async for values in ctx.tick().sample(*looks):
            values = values[2:]
            if values[-6]:
                self.errors.append((self.cycle, *values[-5:]))
            self.cycle += 1
            for i, port in enumerate(self.ports):
                if offering[i] is not None and values[i]:
                    self.taken.append((self.cycle - 1, i, offering[i]))
                    offering[i] = None
                if offering[i] is None and self.plans[i] and self.rng.random() >= self.pauses:
                    offering[i] = self.plans[i].popleft()
                    semaphore, mode, value = offering[i]
                    ctx.set(port.p.semaphore, semaphore)
                    ctx.set(port.p.mode, mode)
                    ctx.set(port.p.value, value)
                ctx.set(port.valid, offering[i] is not None)

    async def drain(self, ctx):
        while any(self.plans) or not ctx.get(self.dut.idle):
            await ctx.tick()
        await ctx.tick()


def simulate(dut, driver, test):
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(driver.run, background=True)
    simulator.add_testbench(test)
    simulator.run()


async def swept(ctx, dut):
    await ctx.tick().until(~dut.sweeping)


async def values_of(ctx, dut):
    out = []
    for i in range(dut.config.semaphores):
        ctx.set(dut.read_index[-1], i)
        out.append(ctx.get(dut.read_value[-1]))
    return out


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_adds_of_all_sources_in_the_same_cycle_are_all_made(config, seed):
    dut = Semaphores(config=config)
    driver = Driver(dut, random.Random(seed))
    n = len(driver.ports)

    async def test(ctx):
        await swept(ctx, dut)
        for i, plan in enumerate(driver.plans):
            plan.extend([(3, ADD, 1 << i)] * 4)
        begin = driver.cycle
        await driver.drain(ctx)
        assert await values_of(ctx, dut) == [
            4 * ((1 << n) - 1) if i == 3 else 0 for i in range(config.semaphores)
        ]
        assert driver.cycle - begin <= 4 * n + 4, "one update per cycle"

    simulate(dut, driver, test)
    # Sources take turns: in the first n cycles each had one.
    assert {i for _, i, _ in driver.taken[:n]} == set(range(n))


@pytest.mark.parametrize("pauses", [0.0, 0.5, 0.9])
def test_random_updates_agree_with_a_list(pauses, seed):
    config = CONFIGS[1]
    rng = random.Random(seed)
    dut = Semaphores(config=config)
    driver = Driver(dut, rng, pauses)

    async def test(ctx):
        await swept(ctx, dut)
        for plan in driver.plans:
            for _ in range(30):
                mode = rng.choice([NONE, ADD, ADD, SET])
                plan.append((rng.randrange(16), mode, rng.randrange(1 << 24)))
        await driver.drain(ctx)
        model = [0] * 16
        for _, _, (semaphore, mode, value) in driver.taken:
            if mode == ADD:
                model[semaphore] += value
            elif mode == SET:
                model[semaphore] = value
        assert await values_of(ctx, dut) == model

    simulate(dut, driver, test)
    assert len(driver.taken) == 30 * len(driver.plans)
    assert len({cycle for cycle, _, _ in driver.taken}) == len(driver.taken)
    assert not driver.errors


def test_a_start_gives_the_first_turn_to_the_first_source(seed):
    dut = Semaphores(config=CONFIGS[1])
    driver = Driver(dut, random.Random(seed))
    n = len(driver.ports)

    async def test(ctx):
        await swept(ctx, dut)
        for before in range(n):
            driver.plans[before].append((1, ADD, 1))
            await driver.drain(ctx)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            driver.taken.clear()
            for plan in driver.plans:
                plan.append((2, ADD, 1))
            await driver.drain(ctx)
            assert [i for _, i, _ in driver.taken] == list(range(n))

    simulate(dut, driver, test)


def test_an_overflow_is_reported_and_changes_nothing(seed):
    config = CONFIGS[1]
    dut = Semaphores(config=config)
    driver = Driver(dut, random.Random(seed))
    top = (1 << 32) - 1

    async def test(ctx):
        await swept(ctx, dut)
        for engine in Engine:
            ctx.set(dut.queue_pc[engine], 0x1000 + engine)
        for i in range(len(driver.plans)):
            driver.plans[i].extend([(5, SET, top - 1), (5, ADD, 1), (5, ADD, 1), (5, ADD, top)])
            await driver.drain(ctx)
            assert (await values_of(ctx, dut))[5] == top

    simulate(dut, driver, test)
    field = next(bit for name, bit, _ in HEADER if name == "update_semaphore")
    assert [error[1:] for error in driver.errors] == [
        (source, 5, ErrorCode.SEMAPHORE_OVERFLOW, field,
         0x1000 + source if name.startswith("queue") else 0)
        for name, source, _ in sources_of(dut)
        for _ in range(2)
    ]  # fmt: skip


def test_a_sweep_clears_everything_and_holds_updates_back(seed):
    config = CONFIGS[0]
    dut = Semaphores(config=config)
    driver = Driver(dut, random.Random(seed))

    async def test(ctx):
        await swept(ctx, dut)
        for _ in range(3):
            driver.plans[0].extend((i, SET, 100 + i) for i in range(8))
            await driver.drain(ctx)
            assert await values_of(ctx, dut) == [100 + i for i in range(8)]
            for plan in driver.plans:
                plan.extend([(7, ADD, 1)] * 2)
            ctx.set(dut.sweep, 1)
            await ctx.tick()
            ctx.set(dut.sweep, 0)
            begin = driver.cycle
            await swept(ctx, dut)
            assert driver.cycle - begin == config.semaphores + 1
            await driver.drain(ctx)
            assert await values_of(ctx, dut) == [0] * 7 + [2 * len(driver.plans)]

    simulate(dut, driver, test)


def test_a_new_value_can_be_read_two_cycles_after_the_update_was_taken(seed):
    dut = Semaphores(config=CONFIGS[0])
    driver = Driver(dut, random.Random(seed))

    async def test(ctx):
        await swept(ctx, dut)
        ctx.set(dut.read_index[0], 2)
        driver.plans[0].append((2, ADD, 9))
        seen = []
        for _ in range(8):
            seen.append((driver.cycle, ctx.get(dut.read_value[0])))
            await ctx.tick()
        taken = driver.taken[0][0]
        assert seen == [(cycle, 9 if cycle >= taken + 2 else 0) for cycle, _ in seen]

    simulate(dut, driver, test)


async def offer(ctx, port, update):
    """Offer an update until it is taken; return in the cycle after."""
    ctx.set(port.p.semaphore, update[0])
    ctx.set(port.p.mode, update[1])
    ctx.set(port.p.value, update[2])
    ctx.set(port.valid, 1)
    await ctx.tick().until(port.ready)
    ctx.set(port.valid, 0)


TOP = (1 << 32) - 1


@pytest.mark.parametrize(
    "update", [(5, ADD, 1), (5, SET, 9), (3, ADD, 7)], ids=["overflow", "set", "add"]
)
def test_clear_drops_the_update_that_has_been_taken_but_not_made(update, seed):
    dut = Semaphores(config=CONFIGS[1])
    driver = Driver(dut, random.Random(seed))

    async def test(ctx):
        await swept(ctx, dut)
        driver.plans[0].append((5, SET, TOP))
        await driver.drain(ctx)
        before = await values_of(ctx, dut)
        await offer(ctx, dut.host, update)
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.clear, 0)
        for _ in range(4):
            assert ctx.get(dut.idle)
            await ctx.tick()
        assert await values_of(ctx, dut) == before
        assert driver.errors == [], "an update that was dropped is reported"
        await offer(ctx, dut.host, (3, ADD, 1))  # later ones are made
        await ctx.tick()
        assert (await values_of(ctx, dut))[3] == 1

    simulate(dut, driver, test)


def test_an_update_taken_as_a_sweep_begins_is_made_after_it(seed):
    dut = Semaphores(config=CONFIGS[1])
    driver = Driver(dut, random.Random(seed))

    async def test(ctx):
        await swept(ctx, dut)
        for semaphore in (0, 5, 15):
            driver.plans[0].append((semaphore, SET, TOP))
            await driver.drain(ctx)
            ctx.set(dut.sweep, 1)
            await offer(ctx, dut.host, (semaphore, ADD, 9))  # too much before, but not after
            ctx.set(dut.sweep, 0)
            assert ctx.get(dut.sweeping)
            await swept(ctx, dut)
            await driver.drain(ctx)
            assert await values_of(ctx, dut) == [9 if i == semaphore else 0 for i in range(16)]
        assert driver.errors == []

    simulate(dut, driver, test)


def test_idle_is_low_until_the_update_is_made(seed):
    dut = Semaphores(config=CONFIGS[0])
    driver = Driver(dut, random.Random(seed))

    async def test(ctx):
        await swept(ctx, dut)
        assert ctx.get(dut.idle)
        for port in (dut.pe, dut.host):
            await offer(ctx, port, (2, ADD, 1))
            assert not ctx.get(dut.idle), "taken but not made"
            await ctx.tick()
            assert ctx.get(dut.idle)

    simulate(dut, driver, test)
