"""A bench around the control block: host, instruction memory and engines in Python."""

import random
from collections import deque
from dataclasses import replace
from typing import ClassVar

import pytest
from amaranth.hdl import Fragment
from amaranth.lib import data
from amaranth.lib.data import Layout
from amaranth.sim import Simulator
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.arch.isa import Engine, ErrorCode
from makalu.rtl.arch.registers import (
    QUEUE_STATE,
    SEMAPHORE_BASE,
    address_of,
    counter_address,
    queue_register,
)
from makalu.rtl.control.control import Control
from makalu.rtl.interfaces import DmaJob

STATE_NAMES = {value: name for name, value in QUEUE_STATE.items()}


class Host:
    """An AXI4-Lite manager for ``dut.host``; ``pauses`` as :class:`Bench`."""

    def __init__(self, dut, rng):
        self.dut, self.rng, self.pauses = dut, rng, 0.0

    def _paused(self):
        return self.pauses and self.rng.random() < self.pauses

    async def write(self, ctx, address, value, *, strobe=15, expect=0):
        """Write a register; check the response."""
        host = self.dut.host
        if isinstance(address, str):
            address = address_of(address)
        ctx.set(host.awaddr, address)
        ctx.set(host.wdata, value)
        ctx.set(host.wstrb, strobe)
        done = [False, False]
        valids = host.awvalid, host.wvalid
        takes = host.awvalid & host.awready, host.wvalid & host.wready
        while not all(done):
            for i in range(2):
                if not done[i] and not self._paused():
                    ctx.set(valids[i], 1)
            _, _, *taken = await ctx.tick().sample(*takes)
            for i in range(2):
                if taken[i]:
                    done[i] = True
                    ctx.set(valids[i], 0)
        while self._paused():
            await ctx.tick()
        ctx.set(host.bready, 1)
        *_, resp = await ctx.tick().sample(host.bresp).until(host.bvalid)
        ctx.set(host.bready, 0)
        if expect is not None:
            assert resp == expect, f"write of {address:#x}: response {resp}"
        return resp

    async def read(self, ctx, address, *, expect=0):
        """Read a register; check the response."""
        host = self.dut.host
        if isinstance(address, str):
            address = address_of(address)
        ctx.set(host.araddr, address)
        ctx.set(host.arvalid, 1)
        await ctx.tick().until(host.arready)
        ctx.set(host.arvalid, 0)
        while self._paused():
            await ctx.tick()
        ctx.set(host.rready, 1)
        *_, data, resp = await ctx.tick().sample(host.rdata, host.rresp).until(host.rvalid)
        ctx.set(host.rready, 0)
        if expect is not None:
            assert resp == expect, f"read of {address:#x}: response {resp}"
        return data


class _Simulation:
    """A control block and its simulator, used by one bench after another: building takes longer
    than most runs."""

    cache: ClassVar[dict] = {}

    def __init__(self, config):
        self.dut = Control(config=config)
        self.models = self.test = None
        self.used = False
        self.simulator = Simulator(Fragment.get(self.dut, None))
        self.simulator.add_clock(1e-6)

        async def models(ctx):
            await self.models(ctx)

        async def test(ctx):
            await self.test(ctx)

        self.simulator.add_testbench(models, background=True)
        self.simulator.add_testbench(test)

    @classmethod
    def of(cls, config):
        """The simulation of ``config``."""
        if config not in cls.cache:
            cls.cache[config] = cls(config)
        return cls.cache[config]

    def run(self, models, test):
        """Reset everything and run. After a failure the simulator is not used again."""
        config = self.dut.config
        assert self.cache.pop(config, None) is self
        self.models, self.test = models, test
        if self.used:
            self.simulator.reset()
        self.used = True
        self.simulator.run()
        self.cache[config] = self


class Bench(Host):
    """Control block of ``config`` with models on all its ports.

    Attributes that tests set before :meth:`run`: ``memory`` (address of a word to its bytes),
    ``latency`` (cycles of the memory), ``pauses`` (chance that an interface waits in a cycle),
    ``bad_addresses`` (bus errors), ``delays`` (cycles an engine works on an instruction),
    ``hung`` (names of engines that never finish), ``lag`` (cycles by which ``busy`` comes late),
    ``drain_cycles`` (how long a DMA engine takes to halt), ``job_pauses`` (``pauses`` of the
    streams of jobs).
    Attributes that the models fill: ``issued`` (cycle, engine, pc, word), ``updated`` (cycle,
    engine, semaphore), ``jobs`` (cycle, engine, fields), ``bursts`` (cycle, address).
    """

    QUEUE_SPACING = 1 << 16

    def __init__(self, *, config=None, seed=1, latency=20, pauses=0.0, delays=(1, 4)):
        self.config = config or replace(TINY, semaphores=8)
        self.simulation = _Simulation.of(self.config)
        super().__init__(self.simulation.dut, random.Random(seed))
        self.latency, self.pauses, self.delays = latency, pauses, delays
        self.memory, self.bad_addresses, self.hung = {}, set(), set()
        self.programs = {}
        self.issued, self.updated, self.jobs, self.bursts = [], [], [], []
        self.cycle = 0
        self.extra = []  # functions that make further models, see below
        self.descriptor_cycles = 5
        self.job_pauses = 0.0
        self.lag, self.drain_cycles = 0, None
        self.active = {}  # engine to whether it has work or is being offered some
        self.outstanding = False

    # Programs -------------------------------------------------------------------------------------

    def base_of(self, engine):
        return self.QUEUE_SPACING * (1 + int(engine))

    def program(self, engine, words):
        """Put ``words`` (instructions, bytes or integers) in memory as the program of a queue."""
        engine = Engine(engine)
        self.programs[engine] = len(words)
        for i, word in enumerate(words):
            if isinstance(word, int):
                word = word.to_bytes(128, "little")
            elif not isinstance(word, bytes):
                word = word.encode()
            self.memory[self.base_of(engine) + 128 * i] = word

    # Models ---------------------------------------------------------------------------------------
    # A model is a pair: the signals it looks at, and a generator that is sent their values at each
    # clock edge and yields after it has driven its outputs. All models share one simulator process.

    def _drive(self, signal, value):
        if self._driven.get(id(signal)) != value:
            self._driven[id(signal)] = value
            self._pending.append((signal, value))

    def _memory_model(self):
        bus, drive = self.dut.fetch, self._drive
        looks = [bus.arvalid, bus.araddr, bus.rready]

        def model():
            answers = deque()  # (cycle, beat data, resp, last)
            offered = None
            valid = False
            while True:
                ready = not self._paused()
                drive(bus.arready, ready)
                if not valid and answers and answers[0][0] <= self.cycle and not self._paused():
                    valid = True
                    _, beat, resp, last = answers[0]
                    drive(bus.rdata, beat)
                    drive(bus.rresp, resp)
                    drive(bus.rlast, last)
                drive(bus.rvalid, valid)
                arvalid, araddr, rready = yield
                if offered is not None:
                    assert arvalid, "arvalid fell before arready"
                    assert araddr == offered, "araddr changed before arready"
                offered = None
                if arvalid:
                    shape = [self.ctx.get(s) for s in (bus.arlen, bus.arsize, bus.arburst)]
                    assert shape == [15, 3, 1]
                    assert araddr % 128 == 0
                    if ready:
                        self.bursts.append((self.cycle, araddr))
                        word = self.memory.get(araddr, b"\xff" * 128)
                        for i in range(16):
                            bad = araddr in self.bad_addresses and i == 7
                            data = int.from_bytes(word[8 * i : 8 * i + 8], "little")
                            answers.append((self.cycle + self.latency, data, 2 * bad, i == 15))
                    else:
                        offered = araddr
                if valid and rready:
                    answers.popleft()
                    valid = False
                self.outstanding = bool(answers) or offered is not None

        return looks, model()

    def _engine_model(self, name):
        """A fake engine: takes instructions, works, offers their updates in order."""
        dut, drive = self.dut, self._drive
        port, update = getattr(dut, name), getattr(dut, f"{name}_update")
        busy = getattr(dut, f"{name}_busy")
        payload = {key: update.p[key] for key in ("semaphore", "mode", "value")}
        looks = [port.valid, port.payload.as_value(), update.ready, dut.engine_reset]

        def model():
            working = deque()  # (cycle when finished, update)
            recent = deque([False] * 8, maxlen=8)
            offering = None
            offered = None
            while True:
                if offering is None and working and working[0][0] <= self.cycle:
                    if name not in self.hung:
                        _, offering = working.popleft()
                        offering = offering if offering["mode"] else None
                if offering:
                    for key, value in offering.items():
                        drive(payload[key], value)
                drive(update.valid, offering is not None)
                ready = not self._paused() and len(working) < 4
                drive(port.ready, ready)
                recent.append(bool(working or offering))
                drive(busy, recent[-1 - self.lag])
                valid, word, taken, reset = yield
                self.active[name] = bool(valid or working or offering)
                word, pc = word & (1 << 1024) - 1, word >> 1024
                if reset:
                    working.clear()
                    offering = offered = None
                    continue
                if offered is not None:
                    assert valid, f"{name}.valid fell before ready"
                    assert (word, pc) == offered, f"{name}.payload changed before ready"
                offered = (word, pc) if valid and not ready else None
                if offering and taken:
                    self.updated.append((self.cycle, name, offering["semaphore"]))
                    offering = None
                if valid and ready:
                    self.issued.append((self.cycle, name, pc, word))
                    fields = {
                        "semaphore": word >> 128 & 0xFF,
                        "mode": word >> 136 & 0xFF,
                        "value": word >> 144 & 0xFFFFFFFF,
                    }
                    start = working[-1][0] if working else self.cycle
                    working.append((start + self.rng.randint(*self.delays), fields))

        return looks, model()

    def _dma_model(self, e):
        """A fake DMA engine: as :meth:`_engine_model`, for jobs."""
        dut, drive = self.dut, self._drive
        port, update = dut.dma_jobs[e], dut.dma_update[e]
        payload = {key: update.p[key] for key in ("semaphore", "mode", "value")}
        looks = [
            port.valid, port.payload.as_value(), update.ready, dut.engine_reset, dut.dma_halt,
        ]  # fmt: skip

        def model():
            working = deque()
            offering = None
            offered = None
            halted = 0
            recent = deque([False] * 8, maxlen=8)
            while True:
                if offering is None and working and working[0][0] <= self.cycle:
                    if f"dma{e}" not in self.hung:
                        _, offering = working.popleft()
                        offering = offering if offering["mode"] else None
                if offering:
                    for key, value in offering.items():
                        drive(payload[key], value)
                drive(update.valid, offering is not None)
                ready = self.rng.random() >= (self.job_pauses or self.pauses) and len(working) < 2
                drive(port.ready, ready)
                recent.append(bool(working or offering))
                drive(self._dma_busy[e], recent[-1 - self.lag])
                wait = self.rng.randrange(8) if self.drain_cycles is None else self.drain_cycles
                drive(self._dma_drained[e], halted > wait)
                valid, bits, taken, reset, halt = yield
                halted = halted + 1 if halt else 0
                self.active[f"dma{e}"] = bool(valid or working or offering)
                if reset:
                    working.clear()
                    offering = offered = None
                    continue
                if offered is not None:
                    assert valid, "a job vanished"
                    assert bits == offered, "a job changed"
                offered = bits if valid and not ready else None
                if offering and taken:
                    self.updated.append((self.cycle, f"dma{e}", offering["semaphore"]))
                    offering = None
                if valid and ready:
                    job = data.Const(Layout.cast(DmaJob), bits)
                    queue, table, count = job.queue, job.table, job.count
                    changes = {key: job.update[key] for key in payload}
                    self.jobs.append((self.cycle, e, queue, table, count, changes))
                    start = working[-1][0] if working else self.cycle
                    working.append((start + 1 + count * self.descriptor_cycles, changes))

        return looks, model()

    def _watch_done(self):
        """Fails if the core says it is done while an engine has work."""

        def model():
            while True:
                (done,) = yield
                busy = [name for name, active in self.active.items() if active]
                assert not (done and busy), f"done while {busy} work"

        return [self.dut.registers.done], model()

    async def _models(self, ctx):
        engines = self.config.dma_engines
        self._dma_busy = [self.dut.dma_busy[e] for e in range(engines)]
        self._dma_drained = [self.dut.dma_drained[e] for e in range(engines)]
        self._driven, self._pending, self.ctx = {}, [], ctx
        models = [
            self._memory_model(),
            *(self._engine_model(name) for name in ("pe", "act", "dve", "pool")),
            *(self._dma_model(e) for e in range(engines)),
            self._watch_done(),
            *(make() for make in self.extra),
        ]
        signals, slices = [], []
        for looks, generator in models:
            slices.append((generator, 2 + len(signals), 2 + len(signals) + len(looks)))
            signals += looks
            next(generator)

        def drive():
            for signal, value in self._pending:
                ctx.set(signal, value)
            self._pending.clear()

        drive()
        async for values in ctx.tick().sample(*signals):
            self.cycle += 1
            for generator, first, last in slices:
                generator.send(values[first:last])
            drive()

    # Host -----------------------------------------------------------------------------------------

    async def read64(self, ctx, address):
        return await self.read(ctx, address) | await self.read(ctx, address + 4) << 32

    async def counter(self, ctx, name):
        return await self.read64(ctx, counter_address(name))

    async def counters(self, ctx):
        return {event.full_name: await self.counter(ctx, event.full_name) for event in COUNTERS}

    async def semaphore(self, ctx, index):
        return await self.read(ctx, SEMAPHORE_BASE + 4 * index)

    def semaphores(self, ctx):
        """All semaphores at once, past the bus."""
        memory = self.dut.semaphores.memory
        return [ctx.get(memory.data[i]) for i in range(self.config.semaphores)]

    async def set_semaphore(self, ctx, index, value, expect=0):
        await self.write(ctx, SEMAPHORE_BASE + 4 * index, value, expect=expect)

    async def load(self, ctx, engines=tuple(Engine)):
        """Set bases and counts of the queues for the programs in memory."""
        for engine in engines:
            count = self.programs.get(engine, 0)
            await self.write(ctx, queue_register(engine, "base_lo"), self.base_of(engine))
            await self.write(ctx, queue_register(engine, "count"), count)

    async def start(self, ctx):
        await self.write(ctx, "control", 1)

    async def status(self, ctx):
        value = await self.read(ctx, "status")
        return {
            name: value >> bit & 1
            for bit, name in enumerate(("busy", "done", "error", "resetting"))
        }

    async def finish(self, ctx, limit=20000):
        """Wait until the core is not busy; return its status."""
        begin = self.cycle
        while True:
            status = await self.status(ctx)
            if not status["busy"]:
                return status
            assert self.cycle - begin < limit, await self.describe(ctx)

    async def execute(self, ctx, limit=20000):
        await self.load(ctx)
        await self.start(ctx)
        return await self.finish(ctx, limit)

    async def reset(self, ctx, limit=2000):
        await self.write(ctx, "control", 2)
        begin = self.cycle
        while (await self.status(ctx))["resetting"]:
            assert self.cycle - begin < limit, "reset does not end"

    async def error(self, ctx):
        """The error registers as a dictionary."""
        word = await self.read(ctx, "error")
        return {
            "code": ErrorCode(word & 0xFF),
            "source": word >> 8 & 0xFF,
            "field": word >> 16,
            "pc": await self.read64(ctx, address_of("error_pc_lo")),
            "address": await self.read64(ctx, address_of("error_address_lo")),
        }

    async def queue(self, ctx, engine):
        """The status registers of a queue as a dictionary."""
        state = await self.read(ctx, queue_register(engine, "state"))
        return {
            "state": STATE_NAMES[state & 15],
            "wait": state >> 4 & 1,
            "mode": state >> 8 & 0xFF,
            "semaphore": state >> 16 & 0xFF,
            "wanted": await self.read(ctx, queue_register(engine, "wanted")),
            "seen": await self.read(ctx, queue_register(engine, "seen")),
            "pc": await self.read64(ctx, queue_register(engine, "pc_lo")),
            "issued": await self.read(ctx, queue_register(engine, "issued")),
        }

    async def describe(self, ctx):
        return {engine.name: await self.queue(ctx, engine) for engine in Engine}

    # Simulation -----------------------------------------------------------------------------------

    def run(self, test):
        """Simulate until ``test`` (an async function of the context) returns."""
        self.simulation.run(self._models, test)

    def pcs(self, name):
        """Addresses of the instructions that an engine got, in order."""
        return [pc for _, engine, pc, _ in self.issued if engine == name]

    def cycles(self, name):
        """Cycles in which an engine got an instruction."""
        return [cycle for cycle, engine, _, _ in self.issued if engine == name]


@pytest.fixture
def bench(seed):
    """Make a :class:`Bench`; keywords as there."""

    def make(**keywords):
        return Bench(**{"seed": seed, **keywords})

    return make


@pytest.fixture
def host(seed):
    """Make a :class:`Host` for a component that has a port ``host``."""
    return lambda dut: Host(dut, random.Random(seed))
