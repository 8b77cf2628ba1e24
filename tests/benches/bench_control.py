"""The control block behind cocotbext-axi, with engines in Python: queues, semaphores, counters."""

from collections import deque

import cocotb
from cocotb.triggers import ClockCycles, FallingEdge, with_timeout
from cocotbext.axi import AxiLiteBus, AxiLiteMaster, AxiRamRead, AxiReadBus, AxiResp
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.arch.isa import (
    AccessPattern,
    Activation,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    Function,
    Iota,
    LoadStationary,
    Memset,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)
from makalu.rtl.arch.registers import SEMAPHORE_BASE, address_of, counter_address, queue_register
from makalu.rtl.interfaces import DmaJob
from makalu.rtl.interfaces import Update as UpdatePayload
from pins import begin, generator, pack, pauses, unpack

SPACING = 0x2000
UPDATE_FIELDS = {"semaphore": (128, 8), "mode": (136, 8), "value": (144, 32)}
SBUF = AccessPattern(formats.BF16, 0, CONFIG.partitions, 0, ((1, 4),))


def load(**keywords):
    return LoadStationary(src=SBUF, **keywords)


def memset(value=0, **keywords):
    return Memset(dst=SBUF, value=value, **keywords)


def activate(bias=0, **keywords):
    return Activation(dst=SBUF, src=SBUF, function=Function.TANH, bias=bias, **keywords)


def iota(offset=0, **keywords):
    return Iota(dst=SBUF, offset=offset, **keywords)


def event(engine, **keywords):
    return EventSemaphore(engine=engine, **keywords)


def add(semaphore, value=1):
    return Update(semaphore, UpdateMode.ADD, value)


class Bench:
    """Host, instruction memory and engines."""

    def __init__(self, dut, name, pause=0.0):
        self.dut, self.name, self.pause = dut, name, pause
        self.rng = generator(name)
        self.memory = bytearray(1 << 16)
        self.programs = {}
        self.issued = {"pe": [], "act": [], "dve": [], "pool": [], "dma": []}

    async def start(self):
        dut = self.dut
        zero = {
            name: 0
            for name in (
                "pe__ready", "act__ready", "dve__ready", "pool__ready", "dma_jobs__0__ready",
                "pe_update__valid", "pe_update__payload", "act_update__valid",
                "act_update__payload", "dve_update__valid", "dve_update__payload",
                "pool_update__valid", "pool_update__payload", "dma_update__0__valid",
                "dma_update__0__payload", "dma_error__0", "pe_busy", "act_busy", "dve_busy",
                "pool_busy", "dma_busy", "pe_events", "act_events", "dve_events", "pool_events",
                "sbuf_events", "dma_events",
            )
        }  # fmt: skip
        await begin(dut, dma_drained=1, **zero)
        self.host = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "host_"), dut.clk, dut.rst)
        self.fetch = AxiRamRead(
            AxiReadBus.from_prefix(dut, "fetch_"), dut.clk, dut.rst, size=1 << 16
        )
        host, fetch = self.host, self.fetch
        if self.pause:
            for i, channel in enumerate(
                (fetch.ar_channel, fetch.r_channel, host.read_if.ar_channel,
                 host.read_if.r_channel, host.write_if.aw_channel, host.write_if.w_channel,
                 host.write_if.b_channel)
            ):  # fmt: skip
                channel.set_pause_generator(pauses(f"{self.name} {i}", self.pause))
        self.engines = [
            *(
                cocotb.start_soon(self._engine(name, name, f"{name}_update", f"{name}_busy"))
                for name in ("pe", "act", "dve", "pool")
            ),
            cocotb.start_soon(self._engine("dma", "dma_jobs__0", "dma_update__0", "dma_busy")),
        ]
        for _ in range(200):  # the semaphores are swept after a reset
            await FallingEdge(dut.clk)

    async def _engine(self, name, port, update_port, busy):
        """Takes work, works for a while, offers the updates in order."""
        dut, rng = self.dut, self.rng

        def of(prefix, member):
            return getattr(dut, f"{prefix}__{member}")

        working, offering, cycle, offered = deque(), None, 0, None
        while True:
            await FallingEdge(dut.clk)
            cycle += 1
            if offering is None and working and working[0][0] <= cycle:
                offering = working.popleft()[1]
                offering = offering if offering["mode"] else None
            of(update_port, "valid").value = int(offering is not None)
            if offering:
                of(update_port, "payload").value = pack(UpdatePayload, offering)
            ready = len(working) < 3 and rng.random() >= self.pause
            of(port, "ready").value = int(ready)
            getattr(dut, busy).value = int(bool(working or offering))
            valid = int(of(port, "valid").value)
            bits = int(of(port, "payload").value) if valid else None
            assert offered in (None, bits), f"{name}: an offer changed"
            offered = None if ready else bits
            if valid and ready:
                if name == "dma":
                    job = unpack(DmaJob, bits)
                    update = unpack(UpdatePayload, job["update"])
                    self.issued[name].append((job["table"], job["count"]))
                else:
                    word, pc = bits & (1 << 1024) - 1, bits >> 1024
                    update = {
                        key: word >> first & (1 << width) - 1
                        for key, (first, width) in UPDATE_FIELDS.items()
                    }
                    self.issued[name].append((pc, word))
                working.append((cycle + int(rng.integers(1, 12)), update))
            await cocotb.triggers.Timer(1, "ns")
            if offering and int(of(update_port, "ready").value):
                offering = None

    def base(self, engine):
        return SPACING * (1 + int(engine))

    def program(self, engine, instructions):
        self.programs[engine] = len(instructions)
        raw = b"".join(i if isinstance(i, bytes) else i.encode() for i in instructions)
        self.fetch.write(self.base(engine), raw)

    async def read(self, address):
        address = address_of(address) if isinstance(address, str) else address
        answer = await with_timeout(self.host.read(address, 4), 100, "us")
        assert answer.resp == AxiResp.OKAY, hex(address)
        return int.from_bytes(answer.data, "little")

    async def write(self, address, value):
        address = address_of(address) if isinstance(address, str) else address
        answer = await with_timeout(
            self.host.write(address, value.to_bytes(4, "little")), 100, "us"
        )
        assert answer.resp == AxiResp.OKAY, hex(address)

    async def execute(self):
        for engine in Engine:
            await self.write(queue_register(engine, "base_lo"), self.base(engine))
            await self.write(queue_register(engine, "base_hi"), 0)
            await self.write(queue_register(engine, "count"), self.programs.get(engine, 0))
        await self.write("control", 1)
        for _ in range(400):
            status = await self.read("status")
            if not status & 1:
                break
            await ClockCycles(self.dut.clk, 20)
        else:
            raise AssertionError("the queues do not finish")
        assert not any(engine.done() for engine in self.engines), "an engine stopped"
        return status

    async def reset(self):
        await self.write("control", 2)
        for _ in range(200):
            if not await self.read("status") & 8:
                return
        raise AssertionError("the reset does not end")

    async def semaphores(self, count=8):
        return [await self.read(SEMAPHORE_BASE + 4 * i) for i in range(count)]


async def every_queue(dut, pause):
    bench = Bench(dut, f"order {pause}", pause)
    await bench.start()
    pe = [load(update=add(1)) for _ in range(18)]
    dve = [memset(i, update=add(2, i)) for i in range(18)]
    sp = [
        DmaStart(engine=Engine.SP, table=128 * i, engines_used=1, count=i, update=add(3))
        for i in range(9)
    ]
    act = []
    for i in range(9):
        waits = [Wait(1, WaitMode.GE, 2 * i)]
        act.append(event(Engine.ACT, waits=waits, update=add(4)))
        act.append(activate(i, update=add(6, 3)))
    pool = []
    for i in range(9):
        pool.append(event(Engine.POOL, update=add(5, 7)))
        pool.append(iota(i, update=add(7, 2)))
    for engine, program in zip(
        (Engine.PE, Engine.DVE, Engine.SP, Engine.ACT, Engine.POOL),
        (pe, dve, sp, act, pool), strict=True,
    ):  # fmt: skip
        bench.program(engine, program)
    assert await bench.execute() == 2
    for name, engine, program in (
        ("pe", Engine.PE, pe), ("act", Engine.ACT, act), ("dve", Engine.DVE, dve),
        ("pool", Engine.POOL, pool),
    ):  # fmt: skip
        want = [
            (bench.base(engine) + 128 * i, int.from_bytes(word.encode(), "little"))
            for i, word in enumerate(program)
            if not isinstance(word, EventSemaphore)
        ]
        assert bench.issued[name] == want
    assert bench.issued["dma"] == [(128 * i, i) for i in range(9)]
    assert await bench.semaphores() == [0, 18, sum(range(18)), 9, 9, 63, 27, 18]
    assert await bench.read(counter_address("queue_pe_issued")) == 18


@cocotb.test()
async def test_every_queue_in_order_and_no_update_lost(dut):
    await every_queue(dut, 0.0)


@cocotb.test()
async def test_the_same_with_random_pauses(dut):
    await every_queue(dut, 0.4)


@cocotb.test()
async def test_waits_compare_unsigned_and_both_count(dut):
    bench = Bench(dut, "waits")
    await bench.start()
    big = 0xFFFFFFFF
    table = [
        (WaitMode.GE, 5, 5, True), (WaitMode.GE, 5, 4, False), (WaitMode.GE, 1, 1 << 31, True),
        (WaitMode.GE, big, big - 1, False), (WaitMode.EQ, 5, 5, True), (WaitMode.EQ, 5, 6, False),
        (WaitMode.EQ, 0, 0, True), (WaitMode.EQ, 1 << 31, 0, False),
    ]  # fmt: skip
    checked = 0
    for index in range(2):
        for mode, wanted, seen, passes in table:
            await bench.write("watchdog", 60)
            await bench.write(SEMAPHORE_BASE + 12, seen)
            waits = [Wait(), Wait()]
            waits[index] = Wait(3, mode, wanted)
            bench.program(Engine.ACT, [event(Engine.ACT, waits=waits, update=add(2))])
            status = await bench.execute()
            assert status == (2 if passes else 4), (index, mode, wanted, seen)
            if not passes:
                assert await bench.read("error") & 0xFF == ErrorCode.WATCHDOG
                assert await bench.read(queue_register(Engine.ACT, "seen")) == seen
                assert await bench.read(queue_register(Engine.ACT, "wanted")) == wanted
                await bench.reset()
            checked += 1
    assert checked == 16


@cocotb.test()
async def test_an_illegal_instruction_stops_the_queue_in_its_turn(dut):
    bench = Bench(dut, "illegal", pause=0.2)
    await bench.start()
    beyond = AccessPattern(formats.BF16, 0, CONFIG.partitions + 1, 0, ((1, 4),))
    edge = AccessPattern(formats.BF16, 0, CONFIG.partitions, CONFIG.sbuf_bytes - 8, ((1, 4),))
    over = AccessPattern(formats.BF16, 0, CONFIG.partitions, CONFIG.sbuf_bytes - 8, ((1, 5),))
    checked = 0
    for bad in (
        Memset(dst=beyond, value=0).encode(), Memset(dst=over, value=0).encode(),
        b"\xee" + bytes(127),
    ):  # fmt: skip
        bench.issued["dve"].clear()
        bench.program(Engine.DVE, [memset(1), Memset(dst=edge, value=2), bad, memset(3)])
        assert await bench.execute() == 4
        assert len(bench.issued["dve"]) == 2
        error = await bench.read("error")
        assert error & 0xFF not in (0, ErrorCode.WATCHDOG)
        assert error >> 8 & 0xFF == Engine.DVE
        assert await bench.read("error_pc_lo") == bench.base(Engine.DVE) + 256
        await bench.reset()
        checked += 1
    assert checked == 3


@cocotb.test()
async def test_semaphores_from_all_sides_at_once(dut):
    bench = Bench(dut, "storm", pause=0.3)
    await bench.start()
    rng = bench.rng
    total = [0] * 8

    def storm(make, n):
        out = []
        for _ in range(n):
            s, value = int(rng.integers(8)), int(rng.integers(1, 1000))
            total[s] += value
            out.append(make(add(s, value)))
        return out

    bench.program(Engine.PE, storm(lambda u: load(update=u), 20))
    bench.program(Engine.DVE, storm(lambda u: memset(update=u), 20))
    bench.program(Engine.ACT, storm(lambda u: activate(update=u), 20))
    bench.program(Engine.POOL, storm(lambda u: iota(update=u), 20))
    bench.program(
        Engine.SP,
        storm(lambda u: DmaStart(engine=Engine.SP, table=0, engines_used=1, count=1, update=u), 8),
    )
    assert await bench.execute() == 2
    assert await bench.semaphores() == total
    assert all(total)
    await bench.write("clear", 1)
    await ClockCycles(dut.clk, 400)
    assert await bench.semaphores() == [0] * 8
