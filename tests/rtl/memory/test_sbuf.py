"""State buffer against a byte array: every port, random traffic, waiting bounds, conflicts."""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from amaranth.back import rtlil
from amaranth.hdl import ResetInserter, Signal, Value
from amaranth.lib.wiring import In
from amaranth.sim import Simulator
from makalu.rtl.arch.config import TINY
from makalu.rtl.interfaces import (
    DMA_READ_CYCLES,
    SBUF_READ_CYCLES,
    VECTOR_READ_PORTS,
    VECTOR_WRITE_PORTS,
)
from makalu.rtl.lib.replicate import Library
from makalu.rtl.memory.sbuf import DMA_PATIENCE_CYCLES, Sbuf

ONE_SMALL_GROUP = replace(TINY, sbuf_bytes=192)  # 4 partitions, 6 rows per bank: no power of two
ONE_GROUP = replace(TINY, rows=8, sbuf_bytes=256)
TWO_GROUPS = replace(TINY, rows=16, sbuf_bytes=128)
FOUR_GROUPS = replace(TINY, rows=32, sbuf_bytes=64)
CONFIGS = pytest.mark.parametrize(
    "config",
    [ONE_SMALL_GROUP, ONE_GROUP, TWO_GROUPS],
    ids=["4-partitions", "8-partitions", "16-partitions"],
)

VECTOR_READS = tuple(f"vector_read{i}" for i in range(VECTOR_READ_PORTS))
READERS = ("moving", "weights", *VECTOR_READS)
"""In the order in which they take a bank."""

WRITERS = tuple(f"vector_write{i}" for i in range(VECTOR_WRITE_PORTS))
ALL = (*READERS, *WRITERS, "dma_read", "dma_write")

PATTERNS = {
    "never-paused": lambda rng, cycle: True,
    "random": lambda rng, cycle: rng.random() < 0.5,
    "bursts": lambda rng, cycle: cycle // 7 % 2 == 0,
    "rare": lambda rng, cycle: rng.random() < 0.1,
}


def interface(dut, port):
    """The reader or writer of that name."""
    array, i = port[:-1], port[-1]
    return getattr(dut, array)[int(i)] if i.isdigit() else getattr(dut, port)


class Model:
    """What the ports mean: bytes per partition, the words under construction, the words held."""

    def __init__(self, config):
        self.config = config
        self.bytes = np.zeros((config.partitions, config.sbuf_bytes), np.uint8)
        shape = (config.partitions, 16)
        self.word = {port: np.zeros(shape, np.uint8) for port in WRITERS}
        self.strobe = {port: np.zeros(shape, bool) for port in WRITERS}
        self.held = {}

    def read(self, port, new, word, offset, size):
        if new:
            self.held[port] = self.bytes[:, 16 * word : 16 * word + 16].copy()
        return self.held[port][:, offset : offset + size]

    def vector_write(self, port, *, commit, word, offset, size_log2, mask, data):
        size = 1 << size_log2
        gathered, strobe = self.word[port], self.strobe[port]
        for p in range(self.config.partitions):
            if mask >> p & 1:
                raw = int(data[p]).to_bytes(4, "little")[:size]
                gathered[p, offset : offset + size] = list(raw)
                strobe[p, offset : offset + size] = True
        if commit:
            window = self.bytes[:, 16 * word : 16 * word + 16]
            window[strobe] = gathered[strobe]
            strobe[:] = False

    def cells(self, beat):
        """(partition, byte offset, index in the beat) of every byte of a DMA beat."""
        if not beat["across"]:
            return [(beat["partition"], beat["offset"] + i, i) for i in range(8)]
        size = 1 << beat["size_log2"]
        return [
            (beat["partition"] + i, beat["offset"] + k, i * size + k)
            for i in range(8 // size)
            for k in range(size)
            if beat["partition"] + i < self.config.partitions
        ]

    def dma_write(self, beat):
        for p, offset, i in self.cells(beat):
            if beat["strobe"] >> i & 1:
                self.bytes[p, offset] = beat["data"] >> 8 * i & 0xFF

    def dma_read(self, beat):
        return [(i, int(self.bytes[p, offset])) for p, offset, i in self.cells(beat)]


def along(beat, **changes):
    """``beat`` turned along the free axis."""
    return beat | {"across": 0, "offset": beat["offset"] & ~7} | changes


class Bench:
    """Drives all ports for some cycles and checks every answer in the cycle it is due."""

    def __init__(self, config, rng, patterns):
        self.config = config
        self.rng = rng
        self.patterns = patterns  # by port; missing: idle
        self.model = Model(config)
        self.due = {}  # cycle: list of checks
        self.pending = {}  # refused commands and beats, kept until taken
        self.sizes = {}
        self.first = {}
        self.counts = {
            "conflict_weights": 0,
            "conflict_vector_read": 0,
            "conflict_dma_read": 0,
            "conflict_dma_write": 0,
        }
        self.seen = dict.fromkeys(self.counts, 0)
        self.waits = {"dma_read": [], "dma_write": []}
        self.moving_word = None  # a constant word instead of random ones
        self.engine = 0  # that asks for a beat
        self.taken = dict.fromkeys((*READERS, "dma_read", "dma_write"), 0)

    def active(self, port, cycle):
        pattern = self.patterns.get(port)
        return pattern is not None and PATTERNS[pattern](self.rng, cycle)

    def read_command(self, port):
        rng, config = self.rng, self.config
        size_log2 = int(rng.integers(3))
        command = {
            "new": port not in self.model.held or bool(rng.random() < 0.5),
            "word": int(rng.integers(config.sbuf_words)),
            "size": 1 << size_log2,
        }
        if port in self.first and self.moving_word is not None and port == "moving":
            command |= {"new": True, "word": self.moving_word}
        self.first[port] = True
        lanes = 4 if port == "weights" else 1
        command["offsets"] = [
            int(v) << size_log2 for v in rng.integers(16 >> size_log2, size=lanes)
        ]
        return command

    def beat(self, *, write):
        rng, config = self.rng, self.config
        across = int(rng.integers(2))
        size_log2 = int(rng.integers(3))
        span = 8 >> size_log2
        if across:
            partition = int(rng.integers(max(1, config.partitions // span))) * span
            offset = int(rng.integers(config.sbuf_bytes >> size_log2)) << size_log2
        else:
            partition = int(rng.integers(config.partitions))
            offset = int(rng.integers(config.sbuf_bytes // 8)) * 8
        beat = {
            "across": across,
            "size_log2": size_log2,
            "partition": partition,
            "offset": offset,
        }
        if write:
            strobe = int(rng.integers(256)) if rng.random() < 0.5 else 255
            if across:
                strobe &= (1 << min(8, config.partitions << size_log2)) - 1
            beat |= {"data": int(rng.integers(1 << 63)) * 2 + 1, "strobe": strobe}
        return beat

    def vector_put(self, others):
        """An element for a write port, which does not commit to the bank of another port."""
        rng, config = self.rng, self.config
        size_log2 = int(rng.integers(3))
        put = {
            "commit": int(rng.random() < 0.4),
            "word": int(rng.integers(config.sbuf_words)),
            "offset": int(rng.integers(16 >> size_log2)) << size_log2,
            "size_log2": size_log2,
            "mask": int(rng.integers(1 << config.partitions)),
            "data": [int(v) for v in rng.integers(1 << 32, size=config.partitions)],
        }
        for other in others:
            if put["commit"] and other["commit"]:
                put["word"] = put["word"] & ~1 | ~other["word"] & 1
        return put

    def check_data(self, cycle, port, value_of, expected):
        def check(ctx):
            got = value_of(ctx)
            assert got == expected, f"{port} at cycle {cycle}: got {got}, expected {expected}"

        self.due.setdefault(cycle, []).append(check)

    async def cycle(self, ctx, dut, n):
        """Drive, check and model one cycle, without its clock edge."""
        config, model = self.config, self.model

        for port in READERS:
            intf = interface(dut, port)
            if port not in self.pending and self.active(port, n):
                self.pending[port] = self.read_command(port)
            command = self.pending.get(port)
            ctx.set(intf.valid, command is not None)
            if command:
                ctx.set(intf.new, command["new"])
                ctx.set(intf.word, command["word"])
                if port == "weights":
                    for i, offset in enumerate(command["offsets"]):
                        ctx.set(intf.offsets[i], offset)
                else:
                    ctx.set(intf.offset, command["offsets"][0])

        puts = {}
        for port in WRITERS:
            intf = interface(dut, port)
            if self.active(port, n):
                puts[port] = self.vector_put(puts.values())
                for name, value in puts[port].items():
                    if name == "data":
                        for p, v in enumerate(value):
                            ctx.set(intf.data[p], v)
                    else:
                        ctx.set(getattr(intf, name), value)
            ctx.set(intf.valid, port in puts)

        for kind in ("dma_read", "dma_write"):
            for e, stream in enumerate(getattr(dut, kind)):
                key = (kind, e)
                if key not in self.pending and self.active(kind, n):
                    self.engine = e
                    self.pending[key] = (self.beat(write=kind == "dma_write"), n)
                ctx.set(stream.valid, key in self.pending)
                if key in self.pending:
                    ctx.set(stream.payload, self.pending[key][0])

        # What is due now.
        valid_due = set()
        for check in self.due.pop(n, []):
            if isinstance(check, tuple):
                valid_due.add(check[1])
            else:
                check(ctx)
        for e, answer in enumerate(dut.dma_read_data):
            assert ctx.get(answer.valid) == (e in valid_due), f"engine {e}, cycle {n}"
        for name in self.seen:
            self.seen[name] += ctx.get(dut.events[name])

        # What is taken now: first all reads, then all writes.
        for port in READERS:
            intf = interface(dut, port)
            command = self.pending.get(port)
            if command is None:
                continue
            if port != "moving" and not ctx.get(intf.ready):
                self.counts["conflict_" + port.rstrip("0123456789")] += 1
                continue
            del self.pending[port]
            self.taken[port] += 1
            size = command["size"]
            for i, offset in enumerate(command["offsets"]):
                want = model.read(port, command["new"] and i == 0, command["word"], offset, size)
                want = [int.from_bytes(bytes(row), "little") for row in want]

                def lanes(ctx, intf=intf, i=i, size=size):
                    mask = (1 << 8 * size) - 1
                    return [ctx.get(value) >> 32 * i & mask for value in intf.data]

                self.check_data(n + SBUF_READ_CYCLES, port, lanes, want)
        writes = []
        for kind in ("dma_read", "dma_write"):
            delayed = set()
            for e, stream in enumerate(getattr(dut, kind)):
                key = (kind, e)
                if key not in self.pending:
                    continue
                beat, since = self.pending[key]
                if not ctx.get(stream.ready):
                    delayed.add(beat["partition"] // config.group)
                    continue
                del self.pending[key]
                self.taken[kind] += 1
                self.waits[kind].append(n - since)
                if kind == "dma_write":
                    writes.append(beat)
                    continue
                want = model.dma_read(beat)
                answer = dut.dma_read_data[e]

                def known(ctx, answer=answer, want=want):
                    value = ctx.get(answer.data)
                    return [(i, value >> 8 * i & 0xFF) for i, _ in want]

                self.check_data(n + DMA_READ_CYCLES, f"dma {e} {beat}", known, want)
                self.due[n + DMA_READ_CYCLES].append(("valid", e))
            self.counts["conflict_" + kind] += len(delayed)
        for beat in writes:
            model.dma_write(beat)
        for port, put in puts.items():
            model.vector_write(port, **put)

    def memory(self, ctx, dut):
        """The bytes in the banks."""
        config = self.config
        out = np.zeros((config.partitions, config.sbuf_bytes), np.uint8)
        for p, part in enumerate(dut.slices):
            for word in range(config.sbuf_words):
                raw = ctx.get(part.banks[word % 2][word // 2]).to_bytes(16, "little")
                out[p, 16 * word : 16 * word + 16] = list(raw)
        return out

    async def run(self, ctx, dut, cycles, start=0):
        for n in range(start, start + cycles):
            await self.cycle(ctx, dut, n)
            await ctx.tick()
        self.patterns = {}
        # Whatever waits is taken and answered.
        end = start + cycles
        for n in range(end, end + 2 * DMA_PATIENCE_CYCLES + 8):
            await self.cycle(ctx, dut, n)
            await ctx.tick()
        assert not self.pending
        assert not self.due
        got = self.memory(ctx, dut)
        wrong = np.argwhere(got != self.model.bytes)
        assert not len(wrong), f"{len(wrong)} bytes differ, first [partition, offset] {wrong[0]}"
        assert self.seen == self.counts


class Machine:
    """A state buffer and its simulation, which one test after the other uses: compiling it takes
    longer than most of them."""

    cache: ClassVar = {}

    def __init__(self, config):
        self.dut = dut = Sbuf(config=config)
        self.reset = Signal()
        self.body = None
        self.inputs = [
            Value.cast(value)
            for _, member, value in dut.signature.flatten(dut)
            if member.flow == In
        ]
        self.sim = Simulator(ResetInserter(self.reset)(dut))
        self.sim.add_clock(1e-6)
        self.sim.add_testbench(self.testbench)

    async def testbench(self, ctx):
        while True:
            for signal in self.inputs:
                ctx.set(signal, 0)
            for part in self.dut.slices:
                for bank in part.banks:
                    for row in range(bank.depth):
                        ctx.set(bank[row], 0)
            await self.pulse_reset(ctx)
            await self.body(ctx, self.dut)
            self.body = None
            await ctx.tick()

    async def pulse_reset(self, ctx):
        ctx.set(self.reset, 1)
        await ctx.tick()
        ctx.set(self.reset, 0)


def simulate(config, body):
    """Run ``body(ctx, dut)`` on a clean state buffer."""
    machine = Machine.cache.pop(config, None) or Machine(config)  # a failure leaves none behind
    machine.body = body
    while machine.body is not None:
        machine.sim.advance()
    Machine.cache[config] = machine


@CONFIGS
@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_traffic_matches_a_byte_array(config, pattern, rng):
    cycles = {4: 250, 8: 150, 16: 80}[config.rows]
    bench = Bench(config, rng, dict.fromkeys(ALL, pattern))
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, cycles))


def test_mixed_patterns_match_a_byte_array(rng):
    for _ in range(3):
        patterns = {port: str(rng.choice(list(PATTERNS))) for port in ALL}
        print(patterns)
        bench = Bench(ONE_SMALL_GROUP, rng, patterns)
        simulate(ONE_SMALL_GROUP, lambda ctx, dut, bench=bench: bench.run(ctx, dut, 150))


def test_vector_ports_alone_match_a_byte_array(rng):
    """All of them at once; commits to both banks in the same cycle among them."""
    config = ONE_SMALL_GROUP
    bench = Bench(config, rng, dict.fromkeys((*VECTOR_READS, *WRITERS), "never-paused"))
    put, both = bench.vector_put, []

    def watched(others):
        new = put(others)
        both.extend(new["commit"] and other["commit"] for other in others)
        return new

    bench.vector_put = watched
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, 150))
    assert sum(both) >= 10
    assert bench.counts["conflict_vector_read"] > 20


def test_a_commit_writes_what_its_own_port_gathered(rng):
    """One port gathers in every cycle and commits late, the other commits in every cycle."""
    config = ONE_SMALL_GROUP
    for late in WRITERS:
        bench = Bench(config, rng, dict.fromkeys(WRITERS, "never-paused"))
        put, turn = bench.vector_put, iter(range(1000))

        def one(others, put=put, turn=turn, late=late):
            n = next(turn)  # the ports come in turn
            if WRITERS[n % VECTOR_WRITE_PORTS] == late:
                return put(others) | {"commit": int(n // VECTOR_WRITE_PORTS % 12 == 11), "word": 3}
            return put(()) | {"commit": 1, "word": 2 * (n % 5), "size_log2": 0}

        bench.vector_put = one
        simulate(config, lambda ctx, dut, bench=bench: bench.run(ctx, dut, 60))


@pytest.mark.parametrize("port", READERS)
def test_a_reader_alone_is_never_refused(port, rng):
    bench = Bench(ONE_SMALL_GROUP, rng, {port: "never-paused"})
    simulate(ONE_SMALL_GROUP, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert bench.taken[port] == 60


@pytest.mark.parametrize("first", range(len(READERS)))
def test_readers_take_a_bank_in_their_order(first):
    """Those from ``first`` on want bank 1: one is served; who reads no bank, or bank 0, is too."""

    async def body(ctx, dut):
        ports = [interface(dut, port) for port in READERS]

        def ready(want):
            """``want`` gives by port the bank, ``None`` for a word that is held, or nothing."""
            for i, port in enumerate(ports):
                ctx.set(port.valid, i in want)
                ctx.set(port.new, want.get(i) is not None)
                ctx.set(port.word, 2 * i % 8 + (want.get(i) or 0))
            return [i for i in want if i == 0 or ctx.get(ports[i].ready)]

        wanted = range(first, len(ports))
        assert ready(dict.fromkeys(wanted, 1)) == [first]
        for other in wanted[1:]:
            want = dict.fromkeys(wanted, 1)
            assert ready(want | {other: None}) == [first, other]
            assert ready(want | {other: 0}) == [first, other]
            assert ready({other: 1}) == [other]
            # Who is not valid takes nothing, whatever else its command says.
            ctx.set(ports[first].new, 1)
            ctx.set(ports[first].word, 1)
            assert ctx.get(ports[other].ready)

    simulate(ONE_SMALL_GROUP, body)


@pytest.mark.parametrize("port", READERS)
def test_a_word_that_is_held_leaves_its_bank_to_dma(port, rng):
    bench = Bench(ONE_SMALL_GROUP, rng, {port: "never-paused", "dma_read": "never-paused"})
    command, beat = bench.read_command, bench.beat
    bench.read_command = lambda port: (
        command(port) | {"new": port not in bench.model.held, "word": 2}
    )
    bench.beat = lambda *, write: along(beat(write=write), offset=64)
    simulate(ONE_SMALL_GROUP, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert bench.taken[port] == 60
    assert bench.taken["dma_read"] >= 59


@pytest.mark.parametrize("kind", ["dma_read", "dma_write"])
def test_dma_alone_moves_a_beat_every_cycle(kind, rng):
    bench = Bench(ONE_SMALL_GROUP, rng, {kind: "never-paused"})
    simulate(ONE_SMALL_GROUP, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert bench.taken[kind] == 60


def test_two_engines_share_a_group_fairly(rng):
    bench = Bench(TWO_GROUPS, rng, dict.fromkeys(("dma_read", "dma_write"), "never-paused"))
    beat = bench.beat
    # All beats go to the second group.
    bench.beat = lambda *, write: along(beat(write=write), partition=11)
    simulate(TWO_GROUPS, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert max(bench.waits["dma_read"]) == 1
    assert max(bench.waits["dma_write"]) == 1
    assert bench.counts["conflict_dma_read"] >= 59


@pytest.mark.parametrize("kind", ["dma_read", "dma_write"])
@pytest.mark.parametrize("size_log2", [0, 1, 2])
def test_engines_that_go_across_together_get_out_of_each_others_way(kind, size_log2, rng):
    """All begin at partition 0, as the engines of one transfer do; the loss is where they begin."""
    config, cycles = FOUR_GROUPS, 100
    bench = Bench(config, rng, {kind: "never-paused"})
    beat, span = bench.beat, 8 >> size_log2
    at = [0] * config.dma_engines

    def across(*, write):
        place = at[bench.engine] * span % config.partitions
        at[bench.engine] += 1
        changes = {"across": 1, "size_log2": size_log2, "partition": place, "offset": 16}
        return beat(write=write) | changes | ({"strobe": 255} if write else {})

    bench.beat = across
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, cycles))
    beats_of_group = config.group // span
    lost = sum(range(config.dma_engines)) * beats_of_group
    assert bench.taken[kind] >= config.dma_engines * cycles - lost


@pytest.mark.parametrize("kind", ["dma_read", "dma_write"])
def test_nobody_holds_on_to_a_group(kind, rng):
    """Beats across that never come to the end of the group."""
    bench = Bench(TWO_GROUPS, rng, {kind: "never-paused"})
    beat = bench.beat
    changes = {"across": 1, "size_log2": 1, "partition": 8, "offset": 16}
    bench.beat = lambda *, write: beat(write=write) | changes
    simulate(TWO_GROUPS, lambda ctx, dut: bench.run(ctx, dut, 80))
    assert max(bench.waits[kind]) == TWO_GROUPS.group // 2


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_group_that_nobody_wanted_serves_the_first_engine_first(kind, across):
    """Whatever came before: a beat along a partition, or across some of a group."""
    served = []

    async def test(ctx, dut):
        ports = getattr(dut, f"dma_{kind}")
        for before in (0, 1, 0, 0, 1, 1):
            for wanted in ([before], [0, 1]):
                for e in wanted:
                    ctx.set(ports[e].p.across, across)
                    ctx.set(ports[e].p.size_log2, 2)
                    ctx.set(ports[e].p.partition, 10)
                    ctx.set(ports[e].valid, 1)
                first = [e for e in wanted if ctx.get(ports[e].ready)]
                for _ in wanted:
                    ready = [e for e in wanted if ctx.get(ports[e].ready)]
                    await ctx.tick()
                    for e in ready:
                        ctx.set(ports[e].valid, 0)
                await ctx.tick()
            served.append(first)

    simulate(TWO_GROUPS, test)
    assert served == [[0]] * 6


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_group_is_held_equally_long_whatever_came_before(kind):
    """Beats across some of a group, then a pause; then both engines go through all of it."""
    orders = []

    async def test(ctx, dut):
        ports = getattr(dut, f"dma_{kind}")
        for port in ports:
            ctx.set(port.p.across, 1)
            ctx.set(port.p.size_log2, 2)
        for before in range(4):
            ctx.set(ports[0].p.partition, 8)
            ctx.set(ports[0].valid, before > 0)
            for _ in range(before):
                await ctx.tick()
            ctx.set(ports[0].valid, 0)
            await ctx.tick()
            at, order = [0, 0], []
            while min(at) < 4:
                for e, port in enumerate(ports):
                    ctx.set(port.valid, at[e] < 4)
                    ctx.set(port.p.partition, 8 + 2 * min(at[e], 3))
                taken = [e for e, port in enumerate(ports) if at[e] < 4 and ctx.get(port.ready)]
                for e in taken:
                    at[e] += 1
                order += taken
                await ctx.tick()
            for port in ports:
                ctx.set(port.valid, 0)
            await ctx.tick()
            orders.append(order)

    simulate(TWO_GROUPS, test)
    assert orders == [[0, 0, 0, 0, 1, 1, 1, 1]] * 4


def test_engines_with_different_groups_do_not_meet(rng):
    bench = Bench(TWO_GROUPS, rng, dict.fromkeys(("dma_read", "dma_write"), "never-paused"))
    beat = bench.beat
    turn = {False: 0, True: 0}

    def apart(*, write):
        turn[write] += 1
        return along(beat(write=write), partition=8 * (turn[write] % 2))

    bench.beat = apart
    simulate(TWO_GROUPS, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert max(bench.waits["dma_read"]) == 0
    assert max(bench.waits["dma_write"]) == 0
    assert bench.counts["conflict_dma_read"] == bench.counts["conflict_dma_write"] == 0


@pytest.mark.parametrize("config", [ONE_SMALL_GROUP, TWO_GROUPS], ids=["1-engine", "2-engines"])
@pytest.mark.parametrize("readers", [(1, 2), (2, 3), (3, 4), (4, 1)], ids=str)
def test_dma_reads_wait_a_bounded_time_for_weights_and_vector(config, readers, rng):
    first, second = (READERS[i] for i in readers)
    bench = Bench(config, rng, dict.fromkeys((first, second, "dma_read"), "never-paused"))
    command = bench.read_command
    # The one takes bank 0 in every cycle, the other bank 1.
    bench.read_command = lambda port: command(port) | {"new": True, "word": int(port != first)}
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, 150))
    assert DMA_PATIENCE_CYCLES <= max(bench.waits["dma_read"])
    others = (config.dma_engines - 1) * config.group // 2
    assert max(bench.waits["dma_read"]) <= DMA_PATIENCE_CYCLES + 1 + others
    # They yield no more than they must.
    assert bench.taken[first] > 120
    assert bench.taken[second] > 120


def test_dma_reads_wait_a_bounded_time_for_all_readers_of_their_bank(rng):
    config = ONE_SMALL_GROUP
    patterns = dict.fromkeys((*READERS[1:], "dma_read"), "never-paused")
    bench = Bench(config, rng, patterns)
    command, beat = bench.read_command, bench.beat
    bench.read_command = lambda port: command(port) | {"new": True, "word": 3}
    bench.beat = lambda *, write: along(beat(write=write), offset=16)
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, 150))
    assert max(bench.waits["dma_read"]) == DMA_PATIENCE_CYCLES + 1


@pytest.mark.parametrize("writers", [(0,), (1,), (0, 1)], ids=["first", "second", "in-turn"])
def test_dma_writes_raise_starving_until_they_are_taken(writers):
    """Whoever commits to their bank, in every cycle."""
    config = ONE_SMALL_GROUP

    async def body(ctx, dut):
        beat = {"across": 0, "size_log2": 0, "partition": 1, "offset": 24, "data": 7, "strobe": 255}
        ctx.set(dut.dma_write[0].payload, beat)
        ctx.set(dut.dma_write[0].valid, 1)
        for port in dut.vector_write:
            ctx.set(port.commit, 1)
            ctx.set(port.word, 3)  # bank 1, as the beat
        for n in range(DMA_PATIENCE_CYCLES + 6):
            for i, port in enumerate(dut.vector_write):
                ctx.set(port.valid, i == writers[n % len(writers)])
            assert not ctx.get(dut.dma_write[0].ready)
            assert ctx.get(dut.starving) == (0b10 if n > DMA_PATIENCE_CYCLES else 0)
            await ctx.tick()
        for port in dut.vector_write:
            ctx.set(port.valid, 0)  # the gap
        assert ctx.get(dut.dma_write[0].ready)
        await ctx.tick()
        ctx.set(dut.dma_write[0].valid, 0)
        await ctx.tick()
        assert ctx.get(dut.starving) == 0
        await ctx.tick()
        assert ctx.get(dut.slices[1].banks[1][0]) == 7 << 64

    simulate(config, body)


def test_moving_is_not_disturbed_by_starving_dma(rng):
    patterns = dict.fromkeys(("moving", "dma_read"), "never-paused")
    bench = Bench(ONE_SMALL_GROUP, rng, patterns)
    command = bench.read_command
    bench.read_command = lambda port: command(port) | {"new": True, "word": 2}
    beat = bench.beat
    bench.beat = lambda *, write: along(beat(write=write), offset=32)
    simulate(ONE_SMALL_GROUP, lambda ctx, dut: bench.run(ctx, dut, 60))
    assert bench.taken["moving"] == 60
    assert bench.taken["dma_read"] == 1  # after the last moving element


def test_reset_in_mid_work_keeps_memory_and_drops_the_rest(rng):
    """After a reset nothing comes out, nothing half-gathered is written, all ports work."""
    config = ONE_SMALL_GROUP
    machine = Machine(config)

    async def body(ctx, dut):
        bench = Bench(config, rng, dict.fromkeys(ALL, "random"))
        for n in range(60):
            await bench.cycle(ctx, dut, n)
            await ctx.tick()
        for signal in machine.inputs:
            ctx.set(signal, 0)
        await machine.pulse_reset(ctx)
        again = Bench(config, rng, {})
        again.model.bytes[:] = again.memory(ctx, dut)
        for n in range(6):  # nothing of the past comes out: the bench checks every valid
            await again.cycle(ctx, dut, n)
            await ctx.tick()
        # The first commit after the reset carries nothing gathered before it.
        for i, port in enumerate(dut.vector_write):
            ctx.set(port.valid, 1)
            ctx.set(port.commit, 1)
            ctx.set(port.word, i)
            ctx.set(port.mask, 0)
        await ctx.tick()
        for port in dut.vector_write:
            ctx.set(port.valid, 0)
        again.patterns = dict.fromkeys(ALL, "random")
        await again.run(ctx, dut, 60, start=7)

    machine.body = body
    while machine.body is not None:
        machine.sim.advance()


def test_queues_of_dma_beats_keep_their_order(rng):
    """Two writes to the same bytes end with the later one, whatever else happens."""
    config = ONE_SMALL_GROUP
    bench = Bench(config, rng, dict.fromkeys(ALL, "never-paused"))
    beat = bench.beat
    bench.beat = lambda *, write: along(beat(write=write), partition=2, offset=40)
    simulate(config, lambda ctx, dut: bench.run(ctx, dut, 150))


def test_an_engine_whose_bank_is_rarely_free_gets_its_turn(rng):
    """Others use the group in every cycle, in step with the cycles in which the bank is free."""
    config = FOUR_GROUPS
    waits = []

    async def body(ctx, dut):
        for e, stream in enumerate(dut.dma_read):
            offset = 16 * (e != 0)  # engine 0 wants bank 0
            beat = {"across": 0, "size_log2": 0, "partition": 17, "offset": offset}
            ctx.set(stream.payload, beat)
            ctx.set(stream.valid, 1)
        ctx.set(dut.moving.new, 1)
        waited = 0
        for n in range(140):
            ctx.set(dut.moving.valid, n % 6 != 0)
            if ctx.get(dut.dma_read[0].ready):
                waits.append(waited)
                waited = 0
            else:
                waited += 1
            await ctx.tick()

    simulate(config, body)
    assert len(waits) > 3
    assert max(waits) <= 6 * (DMA_PATIENCE_CYCLES // 5 + 2)


def test_an_export_has_one_definition_of_group_and_slice():
    library = Library()
    text = rtlil.convert(Sbuf(config=FOUR_GROUPS), platform=library, name="sbuf")
    assert text.count("cell \\sbuf_group ") == 4
    text = rtlil.convert(library.components["sbuf_group"], platform=library, name="sbuf_group")
    assert text.count("cell \\sbuf_slice ") == 8
    text = rtlil.convert(library.components["sbuf_slice"], platform=library, name="sbuf_slice")
    assert text.count("memory width 128 ") == 2
    assert list(library.components) == ["sbuf_group", "sbuf_slice"]
