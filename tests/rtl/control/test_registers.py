"""The register window: reset values, every bit, every address, every way to be refused."""

import random
from dataclasses import replace

import pytest
from amaranth.lib.data import Layout
from amaranth.sim import Simulator
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.events import COUNTERS
from makalu.rtl.arch.isa import Engine
from makalu.rtl.arch.registers import (
    ADDRESS_BITS,
    COUNTER_BASE,
    ID_VALUE,
    REGISTERS,
    SEMAPHORE_BASE,
    VERSION_VALUE,
    address_of,
    queue_register,
)
from makalu.rtl.control.queue import QueueStatus
from makalu.rtl.control.registers import WATCHDOG_RESET, HostRegisters

CONFIG = replace(TINY, semaphores=8)
OKAY, SLVERR = 0, 2
STORED = [register for register in REGISTERS if register.access == "rw"]


class Window:
    """Register window with plain models of semaphores and counters behind it."""

    def __init__(self, host, rng):
        self.dut = HostRegisters(config=CONFIG)
        self.host = host(self.dut)
        self.semaphores = [rng.getrandbits(32) for _ in range(CONFIG.semaphores)]
        self.counters = [rng.getrandbits(64) for _ in COUNTERS]
        self.strobes = []

    async def _behind(self, ctx):
        dut = self.dut
        ctx.set(dut.semaphore.ready, 1)
        looks = [
            dut.start, dut.reset, dut.clear, dut.semaphore.valid, dut.semaphore.p.semaphore,
            dut.semaphore.p.value, dut.counter_read, dut.counter_select,
        ]  # fmt: skip
        due = None
        async for *_, start, reset, clear, valid, index, value, read, select in ctx.tick().sample(
            *looks
        ):
            for name, strobe in (("start", start), ("reset", reset), ("clear", clear)):
                if strobe:
                    self.strobes.append(name)
            if valid:
                self.semaphores[index] = value
            if due is not None:
                ctx.set(dut.counter_value, self.counters[due])
            due = select if read else None

    async def _semaphore_read(self, ctx):
        async for (index,) in ctx.changed(self.dut.semaphore_index):
            if index < len(self.semaphores):
                ctx.set(self.dut.semaphore_value, self.semaphores[index])

    def run(self, test):
        simulator = Simulator(self.dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(self._behind, background=True)
        simulator.add_testbench(self._semaphore_read, background=True)
        simulator.add_testbench(test)
        simulator.run()


@pytest.fixture
def window(host, seed):
    return Window(host, random.Random(seed))


def allowed():
    """Address to access (``"r"``, ``"w"`` or ``"rw"``) of everything that is mapped."""
    table = {register.address: register.access for register in REGISTERS}
    table |= {SEMAPHORE_BASE + 4 * i: "rw" for i in range(CONFIG.semaphores)}
    table |= {COUNTER_BASE + 4 * i: "r" for i in range(2 * len(COUNTERS))}
    return table


def test_reset_values(window):
    expected = {
        "id": ID_VALUE,
        "version": VERSION_VALUE,
        "fingerprint": CONFIG.fingerprint,
        "rows": CONFIG.rows,
        "watchdog": WATCHDOG_RESET,
    }

    async def test(ctx):
        for register in REGISTERS:
            if "r" in register.access:
                got = await window.host.read(ctx, register.address)
                assert got == expected.get(register.name, 0), register.name

    window.run(test)


@pytest.mark.parametrize("pauses", [0.0, 0.5])
def test_stored_registers_keep_every_bit_and_do_not_alias(window, pauses, seed):
    window.host.pauses = pauses
    rng = random.Random(seed)

    async def test(ctx):
        host = window.host
        model = {register.address: None for register in STORED}
        for pattern in (0xFFFFFFFF, 0, 0x55555555, 0xAAAAAAAA, None):
            for register in rng.sample(STORED, len(STORED)):
                value = rng.getrandbits(32) if pattern is None else pattern
                await host.write(ctx, register.address, value)
                model[register.address] = value
                assert await host.read(ctx, register.address) == value
        for address, value in model.items():
            assert await host.read(ctx, address) == value

    window.run(test)


def test_only_mapped_addresses_are_readable(window):
    table = allowed()

    async def test(ctx):
        for address in range(0, 1 << ADDRESS_BITS, 4):
            good = "r" in table.get(address, "")
            value = await window.host.read(ctx, address, expect=OKAY if good else SLVERR)
            assert good or value == 0
            if not address % 64:
                for low in (1, 2, 3):
                    assert await window.host.read(ctx, address + low, expect=SLVERR) == 0

    window.run(test)


def test_refused_writes_change_nothing(window, seed):
    table = allowed()
    rng = random.Random(seed)

    async def test(ctx):
        host, stored = window.host, {}
        for register in STORED:
            stored[register.address] = rng.getrandbits(32)
            await host.write(ctx, register.address, stored[register.address])
        semaphores = list(window.semaphores)
        for address in range(0, 1 << ADDRESS_BITS, 4):
            if "w" not in table.get(address, ""):
                await host.write(ctx, address, rng.getrandbits(32), expect=SLVERR)
        for address in [a for a, access in table.items() if "w" in access]:
            for low in (1, 2, 3):
                await host.write(ctx, address + low, 0xFFFFFFFF, expect=SLVERR)
            for strobe in (0, 1, 7, 8, 14):
                value = rng.getrandbits(32)
                await host.write(ctx, address, value, strobe=strobe, expect=SLVERR)
        for address, value in stored.items():
            assert await host.read(ctx, address) == value
        assert window.semaphores == semaphores
        assert window.strobes == []

    window.run(test)


def test_control_and_clear_are_strobes_and_reset_wins(window):
    async def test(ctx):
        host, dut = window.host, window.dut
        for value, strobe in ((0, None), (1, "start"), (2, "reset"), (3, "reset"), (0xFFFFFFFC, 0)):
            await host.write(ctx, "control", value)
            assert window.strobes == ([strobe] if strobe else [])
            window.strobes.clear()
        await host.write(ctx, "clear", 0)
        await host.write(ctx, "clear", 1)
        assert window.strobes == ["clear"]
        ctx.set(dut.busy, 1)
        await host.write(ctx, "clear", 1, expect=SLVERR)
        await host.write(ctx, "clear", 0)
        assert window.strobes == ["clear"]

    window.run(test)


def test_a_response_that_is_not_taken_keeps_the_next_write_waiting(window):
    async def test(ctx):
        host, dut = window.dut.host, window.dut
        watchdog, read_only = address_of("watchdog"), address_of("id")
        responses = []

        async def offer(address, value):
            ctx.set(host.awaddr, address)
            ctx.set(host.wdata, value)
            ctx.set(host.wstrb, 15)
            ctx.set(host.awvalid, 1)
            ctx.set(host.wvalid, 1)
            await ctx.tick().until(host.awready & host.wready)
            ctx.set(host.awvalid, 0)
            ctx.set(host.wvalid, 0)

        await offer(watchdog, 123)
        await ctx.tick().until(host.bvalid)
        await offer(watchdog, 456)
        for _ in range(5):
            assert ctx.get(dut.watchdog) == 123, "a write before the response to the one before"
            await ctx.tick()
        for address in (read_only, watchdog, None):
            ctx.set(host.bready, 1)
            responses.append((await ctx.tick().sample(host.bresp).until(host.bvalid))[-1])
            ctx.set(host.bready, 0)
            if address is not None:
                await offer(address, 789)
                for _ in range(5):
                    await ctx.tick()
        ctx.set(host.bready, 1)
        responses.append((await ctx.tick().sample(host.bresp).until(host.bvalid))[-1])
        assert responses == [OKAY, OKAY, SLVERR, OKAY]
        assert ctx.get(dut.watchdog) == 789

    window.run(test)


def test_read_data_that_are_not_taken_stay(window):
    async def test(ctx):
        host = window.dut.host
        ctx.set(host.araddr, address_of("id"))
        ctx.set(host.arvalid, 1)
        await ctx.tick().until(host.arready)
        ctx.set(host.araddr, address_of("watchdog"))
        for _ in range(8):
            await ctx.tick()
        for ready in (0, 0, 0, 1):
            ctx.set(host.rready, ready)
            assert ctx.get(host.rvalid)
            assert ctx.get(host.rdata) == ID_VALUE
            await ctx.tick()
        for _ in range(8):
            await ctx.tick()
        assert ctx.get(host.rdata) == WATCHDOG_RESET

    window.run(test)


def test_semaphores_are_read_and_written_unless_busy_or_sweeping(window, seed):
    rng = random.Random(seed)

    async def test(ctx):
        host, dut = window.host, window.dut
        for _ in range(20):
            i, value = rng.randrange(8), rng.getrandbits(32)
            await host.write(ctx, SEMAPHORE_BASE + 4 * i, value)
            assert window.semaphores[i] == value
            i = rng.randrange(8)
            assert await host.read(ctx, SEMAPHORE_BASE + 4 * i) == window.semaphores[i]
        before = list(window.semaphores)
        ctx.set(dut.busy, 1)
        await host.write(ctx, SEMAPHORE_BASE, 1, expect=SLVERR)
        assert window.semaphores == before
        assert await host.read(ctx, SEMAPHORE_BASE + 4) == before[1]
        ctx.set(dut.busy, 0)
        # A read waits for the end of the sweep.
        ctx.set(dut.sweeping, 1)
        ctx.set(dut.host.araddr, SEMAPHORE_BASE)
        ctx.set(dut.host.arvalid, 1)
        await ctx.tick().until(dut.host.arready)
        ctx.set(dut.host.arvalid, 0)
        for _ in range(20):
            await ctx.tick()
            assert not ctx.get(dut.host.rvalid)
        ctx.set(dut.sweeping, 0)
        await ctx.tick().until(dut.host.rvalid)

    window.run(test)


def test_the_low_word_of_a_counter_latches_the_high_word(window):
    async def test(ctx):
        host = window.host
        for i in range(len(COUNTERS)):
            address = COUNTER_BASE + 8 * i
            value = window.counters[i]
            assert await host.read(ctx, address) == value & 0xFFFFFFFF
            window.counters[i] ^= (1 << 64) - 1
            await host.read(ctx, "status")
            assert await host.read(ctx, address + 4) == value >> 32
            assert await host.read(ctx, address) == window.counters[i] & 0xFFFFFFFF
            # Not read before: the high word as it is now.
            other = (i + 1) % len(COUNTERS)
            address = COUNTER_BASE + 8 * other
            assert await host.read(ctx, address + 4) == window.counters[other] >> 32

    window.run(test)


def test_a_latched_high_word_is_given_once(window):
    flip = (1 << 64) - 1

    async def test(ctx):
        host, counters = window.host, window.counters
        for i in (0, len(COUNTERS) - 1):
            address = COUNTER_BASE + 8 * i
            latched = counters[i] >> 32
            await host.read(ctx, address)
            counters[i] ^= flip
            assert await host.read(ctx, address + 4) == latched
            assert await host.read(ctx, address + 4) == counters[i] >> 32
            # A high word that was read without the low one latches nothing.
            for _ in range(2):
                counters[i] ^= flip
                assert await host.read(ctx, address + 4) == counters[i] >> 32

    window.run(test)


def test_another_counter_read_between_the_words_ends_the_latch(window):
    async def test(ctx):
        host = window.host
        for between in (COUNTER_BASE + 8, COUNTER_BASE + 12):
            await host.read(ctx, COUNTER_BASE)
            window.counters[0] ^= (1 << 64) - 1
            await host.read(ctx, between)
            assert await host.read(ctx, COUNTER_BASE + 4) == window.counters[0] >> 32

    window.run(test)


def test_fields_are_where_the_contract_says(window, seed):
    rng = random.Random(seed)
    fields = {r.name: {n: (b, w) for n, b, w in r.fields} for r in REGISTERS}

    async def test(ctx):
        host, dut = window.host, window.dut
        inputs = {
            "status": {
                "busy": dut.busy, "done": dut.done, "error": dut.failed, "resetting": dut.resetting
            },
            "error": {
                "code": dut.error_code, "source": dut.error_source, "field": dut.error_field
            },
        }  # fmt: skip
        for register, signals in inputs.items():
            for _ in range(8):
                want = 0
                for name, signal in signals.items():
                    bit, width = fields[register][name]
                    value = rng.getrandbits(width)
                    ctx.set(signal, value)
                    want |= value << bit
                assert await host.read(ctx, register) == want
        for name, width in (("pc", 40), ("address", 48)):
            value = rng.getrandbits(width)
            ctx.set(getattr(dut, f"error_{name}"), value)
            low, high = f"error_{name}_lo", f"error_{name}_hi"
            assert await host.read(ctx, low) == value & 0xFFFFFFFF
            assert await host.read(ctx, high) == value >> 32
        for engine in Engine:
            values = {
                name: rng.getrandbits(field.width) for name, field in Layout.cast(QueueStatus)
            }
            ctx.set(dut.queues[engine], values)
            state = await host.read(ctx, queue_register(engine, "state"))
            for name, (bit, width) in fields[f"queue_{engine.name.lower()}_state"].items():
                assert state >> bit & (1 << width) - 1 == values[name]
            for name in ("wanted", "seen", "issued"):
                assert await host.read(ctx, queue_register(engine, name)) == values[name]
            assert await host.read(ctx, queue_register(engine, "pc_lo")) == values["pc"] % (1 << 32)
            assert await host.read(ctx, queue_register(engine, "pc_hi")) == values["pc"] >> 32
        for engine in Engine:
            value = rng.getrandbits(64)
            await host.write(ctx, queue_register(engine, "base_lo"), value % (1 << 32))
            await host.write(ctx, queue_register(engine, "base_hi"), value >> 32)
            assert ctx.get(dut.base[engine]) == value
        await host.write(ctx, address_of("watchdog"), 77)
        assert ctx.get(dut.watchdog) == 77

    window.run(test)
