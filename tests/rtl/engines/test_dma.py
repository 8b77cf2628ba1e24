"""DMA engine against a byte model, with memories that pause, are slow, and fail on demand."""

from collections import deque
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

import numpy as np
import pytest
from amaranth.hdl import Cat, ResetInserter, Signal, Value
from amaranth.lib import data
from amaranth.lib.wiring import Out
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.events import events_of
from makalu.rtl.arch.isa import (
    DESCRIPTOR_BYTES,
    DESCRIPTOR_COPY,
    DESCRIPTOR_LAYOUT,
    Descriptor,
    DescriptorSide,
    ErrorCode,
    Update,
    UpdateMode,
)
from makalu.rtl.engines.dma import DmaEngine
from makalu.rtl.engines.dma_queues import DmaQueues
from makalu.rtl.interfaces import DMA_READ_CYCLES
from makalu.sim.golden import check_descriptor

HBM_BYTES = 1 << 16
TABLES = 0xC000
"""Descriptor tables are put here; the bytes below are for data."""


DIRECTIONS = ["load", "store", "hbm_to_hbm", "sbuf_to_sbuf"]


def addresses(side, size):
    """Window (0 or 1) and offset in it of every byte of a side, in order."""
    first = side.addresses(size)
    every = (first[:, None] + np.arange(size)).reshape(-1)
    return side.address >> 40, every & (1 << 40) - 1


class Bus:
    """AXI memory: latency, pauses, errors, and every rule that a manager can break.

    ``pause`` is the probability, per channel and cycle, that the memory is not ready or has
    nothing to say.
    """

    def __init__(self, bench, latency, pause, rng):
        self.bench, self.latency, self.pause, self.rng = bench, latency, pause, rng
        self.memory = np.zeros(HBM_BYTES, np.uint8)
        self.bad_reads, self.bad_writes = [], []  # (first, end) answered with SLVERR
        self.reads, self.writes, self.data, self.answers = deque(), deque(), deque(), deque()
        self.beat = 0
        self.seen = {"ar": [], "aw": []}
        self.stalled = {"ar": None, "aw": None, "w": None}
        self.offered = {"r": False, "b": False}
        self.most = self.most_bytes = 0

    def pauses(self):
        return bool(self.pause) and self.rng.random() < self.pause

    def failing(self, address, ranges):
        """Response code of a word."""
        if any(first <= address + 7 and address < end for first, end in ranges):
            return 2
        return 0 if address + 8 <= HBM_BYTES else 3

    def check_address(self, address, length, size, burst, ident):
        assert (size, burst, ident) == (3, 1, 0)
        assert address % 8 == 0
        last = address + 8 * length + 7
        assert last - address + 1 <= max(self.bench.config.dma_burst_bytes, DESCRIPTOR_BYTES)
        assert address >> 12 == last >> 12, f"{address:#x}..{last:#x} crosses 4 KiB"

    def taken(self, channel, payload):
        """Whether the beat that the manager offers is taken in this cycle."""
        before = self.stalled[channel]
        if before is not None:
            assert payload is not None, f"{channel}valid fell"
            assert payload == before, f"{channel} changed while stalled"
        ready = not self.pauses()
        self.stalled[channel] = None if ready else payload
        return ready, ready and payload is not None

    def cycle(self, now, get, valid):
        """One cycle: look at the manager's outputs, return the inputs it sees in the same cycle."""
        inputs = {}
        for channel, names in (
            ("ar", ("araddr", "arlen", "arsize", "arburst", "arid")),
            ("aw", ("awaddr", "awlen", "awsize", "awburst", "awid")),
            ("w", ("wdata", "wstrb", "wlast")),
        ):
            payload = tuple(get(name) for name in names) if valid[channel + "valid"] else None
            inputs[channel + "ready"], taken = self.taken(channel, payload)
            if taken and channel == "w":
                self.data.append(payload)
            elif taken:
                self.check_address(*payload)
                self.seen[channel].append((now, payload[0], payload[1] + 1))
                queue = self.reads if channel == "ar" else self.writes
                queue.append((now + self.latency, payload[0], payload[1] + 1))
        self.most = max(self.most, len(self.reads))
        self.most_bytes = max(self.most_bytes, 8 * sum(length for *_, length in self.reads))

        offered = self.offered
        if not offered["r"]:
            offered["r"] = bool(self.reads) and self.reads[0][0] <= now and not self.pauses()
        inputs["rvalid"] = offered["r"]
        if offered["r"]:
            _, address, length = self.reads[0]
            address += 8 * self.beat
            response = self.failing(address, self.bad_reads)
            word = b"\xee" * 8 if response else self.memory[address : address + 8].tobytes()
            inputs["rdata"] = int.from_bytes(word, "little")
            inputs["rresp"] = response
            inputs["rlast"] = self.beat == length - 1
            if valid["rready"]:
                offered["r"] = False
                self.beat += 1
                if self.beat == length:
                    self.beat = 0
                    self.reads.popleft()
        if not offered["b"]:
            offered["b"] = bool(self.answers) and self.answers[0][0] <= now and not self.pauses()
        inputs["bvalid"] = offered["b"]
        if offered["b"]:
            inputs["bresp"] = self.answers[0][1]
            if valid["bready"]:
                offered["b"] = False
                self.answers.popleft()
        self.write_bursts(now)
        return inputs

    def write_bursts(self, now):
        """Carry out write bursts whose data is complete."""
        while self.writes:
            _, address, length = self.writes[0]
            if len(self.data) < length:
                assert not any(last for *_, last in self.data), "WLAST too early"
                return
            self.writes.popleft()
            response = 0
            for i in range(length):
                word, strobe, last = self.data.popleft()
                assert last == (i == length - 1), "WLAST misplaced"
                assert strobe, "a beat without bytes"
                response = max(response, self.failing(address + 8 * i, self.bad_writes))
                if response:
                    continue
                for b in range(8):
                    if strobe >> b & 1:
                        self.memory[address + 8 * i + b] = word >> 8 * b & 0xFF
            self.answers.append((now + self.latency, response))

    @property
    def quiet(self):
        return not (self.reads or self.writes or self.data or self.answers)


class Sbuf:
    """SBUF that refuses at random; each request is checked against the rules of its beat."""

    def __init__(self, bench, pause, rng):
        config = bench.config
        self.config, self.pause, self.rng = config, pause, rng
        self.memory = np.zeros((config.partitions, config.sbuf_partition_stride), np.uint8)
        self.beats = {"write": 0, "read": 0}
        self.forget()

    def forget(self):
        """Nothing is under way."""
        self.pipe = deque([None] * DMA_READ_CYCLES)
        self.stalled = {"write": None, "read": None}

    def places(self, beat):
        """Memory index of each of the 8 bytes of a beat."""
        size = 1 << beat["size_log2"]
        partition, offset = beat["partition"], beat["offset"]
        if not beat["across"]:
            assert offset % 8 == 0
            return [(partition, offset + i) for i in range(8)]
        assert offset % size == 0
        assert partition % (8 // size) == 0
        return [(partition + i // size, offset + i % size) for i in range(8)]

    def cycle(self, beats):
        """One cycle: ``beats`` offered by direction; return the ready inputs and the read data."""
        answer, readies = None, {}
        for kind, beat in beats.items():
            before = self.stalled[kind]
            assert before is None or beat == before, f"SBUF {kind} changed while stalled"
            ready = not (self.pause and self.rng.random() < self.pause)
            readies[kind] = ready
            self.stalled[kind] = None if ready else beat
            if beat is None or not ready:
                continue
            self.beats[kind] += 1
            places = self.places(beat)
            if kind == "write":
                assert beat["strobe"]
                for i, (partition, offset) in enumerate(places):
                    if beat["strobe"] >> i & 1:
                        assert offset < self.config.sbuf_bytes
                        assert partition < self.config.partitions
                        self.memory[partition, offset] = beat["data"] >> 8 * i & 0xFF
            else:
                answer = 0
                for i, (partition, offset) in enumerate(places):
                    if partition < self.config.partitions and offset < self.config.sbuf_bytes:
                        answer |= int(self.memory[partition, offset]) << 8 * i
        self.pipe.append(answer)
        return readies, self.pipe.popleft()


def _unpack(layout, value):
    """Members of a packed value as integers."""
    return {
        name: value >> field.offset & (1 << field.width) - 1
        for name, field in data.Layout.cast(layout)
    }


class Bench:
    """One engine and its surroundings; simulated again from reset for every scenario.

    Outputs of the engine do not depend on its inputs of the same cycle, so each cycle looks at the
    outputs first and then chooses the inputs.
    """

    FLAGS = (
        *("axi.arvalid", "axi.awvalid", "axi.wvalid", "axi.rready", "axi.bready"),
        *("sbuf_write.valid", "sbuf_read.valid", "jobs.ready", "update.valid", "error.valid"),
        *("busy", "drained"),
    )

    def __init__(self, config):
        self.config = config
        self.dut = DmaEngine(config=config)
        self.reset = Signal()
        self.simulator = Simulator(ResetInserter(self.reset)(self.dut))
        self.simulator.add_clock(1e-8)
        self.simulator.add_testbench(self._main)
        self._first = True

    def start(self, *, latency=20, pause=0.0, seed=1, update_pause=None, noise=False):
        """A fresh engine (in simulation) with random memories and nothing to do.

        With ``noise`` everything that is not valid changes at random in every cycle.
        """
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.bus = Bus(self, latency, pause, rng)
        self.sbuf = Sbuf(self, pause, rng)
        self.bus.memory[:] = rng.integers(0, 256, HBM_BYTES)
        self.sbuf.memory[:] = rng.integers(0, 256, self.sbuf.memory.shape)
        self.update_pause = pause if update_pause is None else update_pause
        self.noise = noise
        self.forget()
        return self

    def idle(self, width):
        """What a signal of that width shows while it is not valid."""
        return int.from_bytes(self.rng.bytes(-(-width // 8))) >> -width % 8 if self.noise else 0

    def forget(self):
        """Start a new list of jobs."""
        self.table = TABLES
        self.jobs, self.updates, self.expected = deque(), [], []
        self.events = dict.fromkeys((event.name for event in events_of("dma")), 0)
        self.now = 0
        self.error = None

    def job(self, queue, descriptors, *, update=None):
        """Queue descriptors (:class:`Descriptor` or raw bytes); return the table's address."""
        table = self.table
        raw = b"".join(d if isinstance(d, bytes) else d.encode() for d in descriptors)
        self.bus.memory[table : table + len(raw)] = np.frombuffer(raw, np.uint8)
        self.table += len(raw)
        assert self.table <= HBM_BYTES
        if update is None:
            update = Update(len(self.jobs) % 8, UpdateMode.ADD, 1 + len(self.jobs))
        update = (update.semaphore, int(update.mode), update.value)
        self.jobs.append((queue, table, len(descriptors), update))
        self.expected.append((queue, list(descriptors), update))
        return table

    def model(self, upto=None):
        """Both memories after the expected jobs (or the first ``upto`` descriptors of them)."""
        hbm, sbuf = self.bus.memory.copy(), self.sbuf.memory.copy()
        flat = sbuf.reshape(-1)
        every = [d for _, descriptors, _ in self.expected for d in descriptors]
        for descriptor in every[:upto]:
            if not descriptor.src.elements:
                continue
            size = 1 << descriptor.size_log2
            memory, places = addresses(descriptor.src, size)
            values = (flat if memory else hbm)[places]
            memory, places = addresses(descriptor.dst, size)
            (flat if memory else hbm)[places] = values
        return hbm, sbuf

    def run(self, limit=20000, halt_at=None, after=None, probe=False):
        """Simulate until everything queued is complete, or the engine has stopped and drained.

        With ``halt_at`` the engine is halted in that cycle; once drained it is reset and goes on
        with the jobs that ``after`` queues, if any. With ``probe`` every cycle checks that the
        inputs did not change the outputs at once.
        """
        self.probe = probe
        self.limit, self.halt_at, self.after = limit, halt_at, after
        if not self._first:
            self.simulator.reset()
        self._first = False
        self.simulator.run()
        return self

    def check(self, limit=20000, **options):
        """Run what is queued; compare updates, and all of both memories, with the model."""
        wanted = self.model()
        self.run(limit, **options)
        assert self.error is None, self.error
        self.compare(wanted)
        self.check_updates()
        self.check_events()
        return self

    def check_events(self):
        """Bytes are counted once, and only the useful ones."""
        every = [d for _, descriptors, _ in self.expected for d in descriptors]
        moved = {"read_bytes": 0, "write_bytes": 0, "descriptor_bytes": 128 * len(every)}
        for descriptor in every:
            for name, side in (("read_bytes", descriptor.src), ("write_bytes", descriptor.dst)):
                if side.address < 1 << 40:
                    moved[name] += side.elements << descriptor.size_log2
        moved["sbuf_beats"] = sum(self.sbuf.beats.values())
        assert {name: self.events[name] for name in moved} == moved

    def check_updates(self):
        assert sorted(self.updates) == sorted(update for *_, update in self.expected)
        for queue in range(self.config.dma_queues):
            in_order = [update for q, _, update in self.expected if q == queue]
            assert [update for update in self.updates if update in in_order] == in_order

    def compare(self, wanted):
        """Compare both memories, guards included."""
        got = (self.bus.memory, self.sbuf.memory)
        for name, has, should in zip(("HBM", "SBUF"), got, wanted, strict=True):
            wrong = np.argwhere(has != should)
            assert len(wrong) == 0, (
                f"{name}: {len(wrong)} bytes differ, first at {wrong[0]}: "
                f"got {has[tuple(wrong[0])]:#x}, expected {should[tuple(wrong[0])]:#x}"
            )

    async def _main(self, ctx):
        """One pass per cycle."""
        dut, bus = self.dut, self.bus
        flags = Cat(attrgetter(name)(dut) for name in self.FLAGS)
        names = [name.split(".")[-1] if name.startswith("axi") else name for name in self.FLAGS]
        streams = {"write": dut.sbuf_write, "read": dut.sbuf_read}
        current = {}

        inputs = {
            **{f"axi.{name}": getattr(dut.axi, name) for name in dut.axi.signature.members},
            "sbuf_write.ready": dut.sbuf_write.ready,
            "sbuf_read.ready": dut.sbuf_read.ready,
            "read": dut.sbuf_read_data.as_value(),
            "update.ready": dut.update.ready,
            "jobs.valid": dut.jobs.valid,
            "halt": dut.halt,
            "reset": self.reset,
        }

        def put(name, value):
            if current.get(name) != value:
                current[name] = value
                ctx.set(inputs[name], int(value))

        def raw(signal):
            return _unpack(signal.shape(), ctx.get(signal.as_value()))

        outputs = Cat(
            Value.cast(value)
            for _, member, value in dut.signature.flatten(dut)
            if member.flow == Out
        )
        before = None
        offered, updating, drained_for = None, 0, 0
        quiet_for = 0
        while True:
            if self.probe:
                assert before is None or ctx.get(outputs) == before
            await ctx.tick()
            if self.probe:
                before = ctx.get(outputs)
            now = self.now
            self.now += 1
            bits = ctx.get(flags)
            flag = {name: bits >> i & 1 for i, name in enumerate(names)}

            answers = bus.cycle(now, lambda name: ctx.get(inputs[f"axi.{name}"]), flag)
            for name, value in answers.items():
                put(f"axi.{name}", value)
            beats = {
                kind: raw(stream.p) if flag[f"sbuf_{kind}.valid"] else None
                for kind, stream in streams.items()
            }
            if self.halt_at is not None and now > self.halt_at + 6 and not self.sbuf.pause:
                assert not any(beats.values()), "an SBUF beat after the halt"
                assert not flag["arvalid"], "a read after the halt"
                assert not flag["awvalid"], "a write after the halt"
            ready, answer = self.sbuf.cycle(beats)
            for kind in streams:
                put(f"sbuf_{kind}.ready", ready[kind])
            put("read", self.idle(64) << 1 if answer is None else answer << 1 | 1)
            if self.noise and not answers["rvalid"]:
                for name, width in (("rdata", 64), ("rresp", 2), ("rlast", 1)):
                    put(f"axi.{name}", self.idle(width))
            if self.noise and not answers["bvalid"]:
                put("axi.bresp", self.idle(2))
            ready = not (self.update_pause and self.rng.random() < self.update_pause)
            put("update.ready", ready)
            if flag["update.valid"]:
                assert flag["busy"], "not busy, although an update waits"
                if self.halt_at is not None and now > self.halt_at + 4:
                    assert updating, "an update after the halt"
            updating = flag["update.valid"]
            if flag["update.valid"] and ready:
                self.updates.append(tuple(raw(dut.update.p).values()))
            if ctx.get(dut.events.as_value()):
                for name, value in raw(dut.events).items():
                    self.events[name] += value

            if offered is None and self.jobs:
                offered = self.jobs.popleft()
                queue, table, count, (semaphore, mode, value) = offered
                update = {"semaphore": semaphore, "mode": mode, "value": value}
                ctx.set(
                    dut.jobs.p, {"queue": queue, "table": table, "count": count, "update": update}
                )
            elif self.noise and offered is None:
                jobs = dut.jobs.payload.as_value()
                ctx.set(jobs, self.idle(len(jobs)))
            put("jobs.valid", offered is not None)
            quiet = not self.jobs and offered is None and not flag["busy"] and bus.quiet
            if flag["jobs.ready"]:
                assert offered is not None
                offered = None

            if self.halt_at is not None and now >= self.halt_at:
                put("halt", 1)
                drained_for = drained_for + 1 if now > self.halt_at + 1 and flag["drained"] else 0
                assert bus.quiet or not drained_for, "drained, but the bus is not"
                if drained_for > 12:
                    self.halt_at = offered = None
                    if self.after is None:
                        return
                    self.forget()
                    self.sbuf.forget()
                    self.after()
                    put("jobs.valid", 0)
                    put("halt", 0)
                    put("reset", 1)
                    await ctx.tick()
                    put("reset", 0)
                    continue
            if flag["error.valid"]:
                if self.error is None:
                    self.error = raw(dut.error)
                    self.error_cycle = now
                assert raw(dut.error) == self.error
                if flag["drained"] and now > self.error_cycle + 20:
                    assert bus.quiet, "drained, but the bus is not"
                    return
            quiet_for = quiet_for + 1 if quiet else 0
            if quiet_for > 8:
                assert flag["drained"]
                return
            assert now < self.limit, "it hangs"


@pytest.fixture(scope="module")
def tiny():
    return Bench(TINY)


@pytest.fixture(scope="module")
def small():
    return Bench(SMALL)


def hbm(address, *dims):
    return DescriptorSide(address, dims)


def sbuf(config, partition, offset, *dims):
    return DescriptorSide(config.sbuf_address(partition, offset), dims)


# Random descriptors -------------------------------------------------------------------------------


def factors(rng, n):
    """``n`` as a product of one to four counts, some of them 1."""
    counts = [1] * int(rng.integers(1, 5))
    for prime in (2, 3, 5, 7, 11, 13, 17):
        while n and n % prime == 0:
            counts[rng.integers(len(counts))] *= prime
            n //= prime
    counts[0] *= n
    return counts


def reach(steps, counts):
    ways = [step * (count - 1) for step, count in zip(steps, counts, strict=True)]
    return sum(way for way in ways if way < 0), sum(way for way in ways if way > 0)


def random_steps(rng, counts, size, span, unit):
    """Steps that are multiples of ``unit``; in many cases each dimension continues the last."""
    packed, steps, dense = size, [], rng.random() < 0.6
    for count in counts:
        if dense and rng.random() < 0.8:
            steps.append(packed)
        else:
            most = max(1, span // max(1, count))
            steps.append(int(rng.integers(-most, most + 1)) // unit * unit)
        packed *= count
    return steps


def random_hbm(rng, n, size, first, end):
    for _ in range(100):
        counts = factors(rng, n)
        steps = random_steps(rng, counts, size, end - first, 1)
        low, high = reach(steps, counts)
        slack = end - first - size - (high - low)
        if slack >= 0:
            address = first - low + int(rng.integers(slack + 1))
            return hbm(address, *zip(steps, counts, strict=True))
    return hbm(first, (size, n))


def random_sbuf(rng, n, size, config, first, end):
    """Bytes ``first`` to ``end`` of every partition."""
    for _ in range(100):
        counts = factors(rng, n)
        in_partitions = rng.random(len(counts)) < 0.5
        across = [count if part else 1 for count, part in zip(counts, in_partitions, strict=True)]
        hops = [int(rng.choice((1, 1, 1, -1, 2, 0))) for _ in counts]
        low, high = reach(hops, across)
        spare = config.partitions - 1 - (high - low)
        within = [count // part for count, part in zip(counts, across, strict=True)]
        steps = random_steps(rng, within, size, end - first, size)
        left, right = reach(steps, within)
        slack = (end - first - size - (right - left)) // size
        if spare < 0 or slack < 0:
            continue
        partition = -low + int(rng.integers(spare + 1))
        offset = first - left + size * int(rng.integers(slack + 1))
        dims = [
            (hop * config.sbuf_partition_stride if part else step, count)
            for hop, part, step, count in zip(hops, in_partitions, steps, counts, strict=True)
        ]
        return sbuf(config, partition, offset, *dims)
    raise AssertionError("no pattern found")


def random_descriptor(rng, config, area, most=96):
    """A copy within the share ``area`` (0..3) of both memories, in any direction."""
    size_log2 = int(rng.integers(3))
    size = 1 << size_log2
    src_memory, dst_memory = rng.integers(2), rng.integers(2)
    n = int(rng.integers(1, most // size + 1))
    halves = [0, 1] if rng.random() < 0.5 else [1, 0]
    sides = []
    for memory, half in zip((src_memory, dst_memory), halves, strict=True):
        if memory:
            share = config.sbuf_bytes // 8
            first = (2 * area + half) * share
            sides.append(random_sbuf(rng, n, size, config, first, first + min(share, 512)))
        else:
            first = (2 * area + half) * 0x1800
            sides.append(random_hbm(rng, n, size, first, first + 0x400))
    return Descriptor(size_log2, *sides)


@pytest.mark.parametrize(
    ("latency", "pause"), [(20, 0.0), (3, 0.4), (200, 0.1)], ids=["calm", "rough", "slow"]
)
def test_random_descriptors_in_four_queues_copy_the_right_bytes(tiny, seed, latency, pause):
    rng = np.random.default_rng(seed)
    tiny.start(latency=latency, pause=pause, seed=seed)
    for _ in range(3):
        for queue in range(4):
            count = int(rng.integers(1, 4))
            tiny.job(queue, [random_descriptor(rng, TINY, queue) for _ in range(count)])
    tiny.check()


@pytest.mark.parametrize("pause", [0.0, 0.4], ids=["calm", "rough"])
def test_what_is_not_valid_does_not_matter(tiny, seed, pause):
    """gemmini 363: the payload of an entry that is not valid held up the others, now and then."""
    rng = np.random.default_rng(seed)
    tiny.start(latency=7, pause=pause, seed=seed, noise=True)
    for _ in range(3):
        for queue in range(4):
            tiny.job(queue, [random_descriptor(rng, TINY, queue) for _ in range(2)])
    tiny.check()


def test_random_descriptors_with_sixteen_partitions(small, seed):
    rng = np.random.default_rng(seed)
    small.start(latency=50, pause=0.1, seed=seed)
    for queue in range(4):
        small.job(queue, [random_descriptor(rng, SMALL, queue, most=160) for _ in range(4)])
    small.check()


# Alignment ----------------------------------------------------------------------------------------


def side_of(config, memory, base, *dims):
    """A side in HBM, or in SBUF from partition 0 (linear, so ``base`` may reach others)."""
    return DescriptorSide(base + (config.sbuf_address(0, 0) if memory else 0), dims)


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0), (0, 0), (1, 1)], ids=DIRECTIONS)
def test_every_offset_pair_and_length_up_to_17(tiny, src, dst):
    """Source offset j, destination offset k, for every length; later copies are shorter."""
    tiny.start(latency=10)
    for first in (17, 13, 9, 5):
        tiny.job(
            0,
            [
                Descriptor(
                    0,
                    side_of(TINY, src, 0x800 * (length % 2), (1, length), (33, 8), (256, 8)),
                    side_of(TINY, dst, 0x1000, (1, length), (256, 8), (33, 8)),
                )
                for length in range(first, max(first - 4, 0), -1)
            ],
        )
    tiny.check()


@pytest.mark.parametrize("size_log2", [0, 1, 2], ids=["bytes", "halves", "words"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_across_partitions_from_every_start_and_of_every_count(small, size_log2, load):
    small.start(latency=10)
    size, stride = 1 << size_log2, SMALL.sbuf_partition_stride
    descriptors, offset = [], 0
    for start in (0, 1, 3, 6, 13):
        for count in sorted({1, 2, 3, 7, 16 - start} & set(range(17 - start))):
            away = hbm(0x400 + 203 * len(descriptors), (size, count), (61, 3))
            here = sbuf(SMALL, start, 64 + offset, (stride, count), (size, 3))
            offset += 4 * size
            descriptors.append(Descriptor(size_log2, *((away, here) if load else (here, away))))
    for queue in range(4):
        small.job(queue, descriptors[queue::4])
    small.check()


@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_columns_across_partitions_are_not_one_run_although_their_step_is_its_length(tiny, load):
    tiny.start(latency=10)
    stride, count = TINY.sbuf_partition_stride, TINY.partitions
    for size_log2 in range(3):
        size = 1 << size_log2
        away = hbm(0x400 + 0x100 * size_log2, (size, 3 * count))
        here = sbuf(TINY, 0, 64 * (1 + size_log2), (stride, count), (count * size, 3))
        tiny.job(0, [Descriptor(size_log2, *((away, here) if load else (here, away)))])
    tiny.check()


@pytest.mark.parametrize("size_log2", [1, 2], ids=["halves", "words"])
def test_offsets_in_elements_move_by_their_size(tiny, size_log2):
    size = 1 << size_log2
    tiny.start(latency=5)
    tiny.job(
        0,
        [
            Descriptor(
                size_log2,
                hbm(0x200, (size, 5)),
                sbuf(TINY, shift % 4, 64 * (shift // 4) + shift * size, (size, 5)),
            )
            for shift in range(17)
        ],
    )
    tiny.check()


@pytest.mark.parametrize(
    ("address", "length"),
    [(0x0FF0, 0x20), (0x0FFF, 2), (0x0FF0, 0x1010), (0x0800, 0x1800)],
    ids=lambda value: f"{value:#x}",
)
def test_bursts_stay_within_4_kib(tiny, address, length):
    tiny.start(latency=10)
    tiny.job(0, [Descriptor(0, hbm(address, (1, length)), hbm(address + 0x4001, (1, length)))])
    tiny.check()


def test_whole_bursts_are_not_followed_by_another(tiny):
    burst = TINY.dma_burst_bytes
    for n in range(1, 5):
        tiny.start(latency=10)
        tiny.job(
            0,
            [
                Descriptor(0, hbm(0x1000, (1, n * burst)), sbuf(TINY, 0, 0, (1, n * burst))),
                Descriptor(0, sbuf(TINY, 0, 0, (1, n * burst)), hbm(0x2000, (1, n * burst))),
                Descriptor(0, sbuf(TINY, 1, 0, (1, n * burst)), hbm(0x3000, (1, n * burst))),
            ],
        )
        tiny.check()
        assert len(tiny.bus.seen["aw"]) == 2 * n
        assert len(tiny.bus.seen["ar"]) == n + 3


# Nothing to do ------------------------------------------------------------------------------------


def test_empty_copies_touch_nothing_and_complete(tiny):
    tiny.start()
    tiny.job(0, [Descriptor(0, hbm(0x1000, (1, 0)), hbm(0x2000, (1, 0)))])
    tiny.job(1, [Descriptor(2, hbm(0x1001, (4, 5), (3, 0)), sbuf(TINY, 3, 1, (7, 0)))])
    tiny.job(2, [])
    tiny.job(0, [Descriptor(0, hbm(0x1003, (1, 64)), sbuf(TINY, 2, 5, (1, 64)))])
    tiny.check()
    assert not tiny.bus.seen["aw"]
    assert len(tiny.bus.seen["ar"]) == 4
    assert tiny.events["read_bytes"] == 64


def test_every_job_updates_once_in_order_while_the_consumer_stalls(tiny, seed):
    tiny.start(update_pause=0.9, seed=seed)
    for i in range(24):
        length = (0, 64, 8)[i % 3]
        if i % 4 == 3:
            tiny.job(i % 2, [])
        else:
            tiny.job(
                i % 2, [Descriptor(0, hbm(i, (1, length)), sbuf(TINY, i % 4, i * 8, (1, length)))]
            )
    tiny.check()
    assert len(tiny.updates) == 24


# Chains and queues --------------------------------------------------------------------------------


def test_a_long_chain_wraps_the_slots(tiny, seed):
    tiny.start(latency=30, pause=0.2, seed=seed)
    chain = [
        Descriptor(0, hbm(37 * i, (1, 1 + i % 23)), sbuf(TINY, i % 4, 29 * i, (1, 1 + i % 23)))
        for i in range(30)
    ]
    tiny.job(3, chain[:20])
    tiny.job(3, chain[20:])
    tiny.check()


def test_a_queue_reads_what_the_descriptor_before_has_written(tiny):
    tiny.start(latency=40)
    hops = [hbm(0x1000, (1, 50)), sbuf(TINY, 0, 3, (1, 50)), sbuf(TINY, 2, 8, (1, 50))]
    hops += [hbm(0x2005, (1, 50)), hbm(0x2FF0, (1, 50)), sbuf(TINY, 0, 3, (1, 50))]
    tiny.job(0, [Descriptor(0, a, b) for a, b in pairwise(hops)])
    tiny.check()


PAIRS = [(a, b) for a in ("hh", "hs", "sh", "ss") for b in ("hh", "hs", "sh", "ss") if a[1] == b[0]]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_descriptor_reads_the_last_element_that_the_one_before_wrote(tiny, writer, reader):
    """A slow writer, element by element far apart, then a reader of its last element alone."""
    tiny.start(latency=40)

    def side(kind, at, step, count):
        dims = (step, count)
        return hbm(0x1000 + at, dims) if kind == "h" else sbuf(TINY, 1, at, dims)

    count, step = (128, 64) if writer[1] == "h" else (28, 16)
    last = 0x40 + step * (count - 1)
    source = 0x4000 if writer[0] == "h" else 0x200
    first = Descriptor(2, side(writer[0], source, 4, count), side(writer[1], 0x40, step, count))
    goal = 0x5000 if reader[1] == "h" else 0x3F0
    then = Descriptor(2, side(reader[0], last, 4, 1), side(reader[1], goal, 4, 1))
    tiny.job(0, [first, then])
    tiny.check()


def test_queues_take_turns(tiny):
    tiny.start(latency=10)
    for queue in range(4):
        tiny.job(
            queue,
            [
                Descriptor(
                    0,
                    hbm(0x1000 * queue + 0x100 * i, (1, 64)),
                    sbuf(TINY, queue, 64 * i, (1, 64)),
                )
                for i in range(5)
            ],
        )
    tiny.check()
    order = [address >> 12 for _, address, _ in tiny.bus.seen["ar"] if address < TABLES]
    assert len(order) == 20
    later = order[4:16]  # once all four have arrived
    assert all(set(later[i : i + 4]) == {0, 1, 2, 3} for i in range(0, 12, 4))


def test_a_full_queue_does_not_hold_up_the_others(small):
    """Ten long loads wait in queue 0; a store in queue 1 is done long before them."""
    small.start(latency=20)
    for i in range(10):
        small.job(0, [Descriptor(0, hbm(0x400 * i, (1, 512)), sbuf(SMALL, i, 0, (1, 512)))])
    small.job(1, [Descriptor(0, sbuf(SMALL, 15, 8, (1, 64)), hbm(0x8001, (1, 64)))])
    small.check()
    assert small.updates.index(small.expected[-1][-1]) < 5


def test_a_store_reads_no_more_than_there_is_room_for(tiny):
    """SBUF is fast, HBM is slow."""
    tiny.start(latency=20)
    tiny.bus.pause = 0.9
    length = 6 * TINY.dma_burst_bytes
    tiny.job(0, [Descriptor(0, sbuf(TINY, 1, 3, (1, length)), hbm(0x105, (1, length)))])
    tiny.check()


def test_plans_wait_for_the_unit_that_carries_them_out(tiny):
    """More loads at once than the reader and its buffer take."""
    tiny.start(latency=100)
    for i in range(8):
        source = hbm(0x800 * i + 3, (1, 2000))
        tiny.job(i % 4, [Descriptor(0, source, sbuf(TINY, i % 4, i, (1, 2000)))])
    tiny.check()


def test_jobs_wait_while_their_queue_is_full(tiny):
    """More than wait in a queue, its slots and its planner together."""
    tiny.start(latency=150)
    for i in range(24):
        tiny.job(1, [Descriptor(0, hbm(0x40 * i, (1, 8)), sbuf(TINY, i % 4, 8 * i, (1, 8)))])
    tiny.check()
    assert len(tiny.updates) == 24


# Errors -------------------------------------------------------------------------------------------


def patched(descriptor, name, value):
    """The descriptor with one field set to a raw value."""
    raw = int.from_bytes(descriptor.encode(), "little")
    _, bit, width = next(entry for entry in DESCRIPTOR_LAYOUT if entry[0] == name)
    raw &= ~((1 << width) - 1 << bit)
    return (raw | value << bit).to_bytes(DESCRIPTOR_BYTES, "little")


def field(name):
    return next(bit for entry, bit, _ in DESCRIPTOR_LAYOUT if entry == name)


GOOD = Descriptor(1, hbm(0x101, (2, 8), (40, 3)), sbuf(TINY, 1, 64, (2, 8), (64, 3)))
STORE = Descriptor(1, sbuf(TINY, 1, 64, (2, 8), (64, 3)), hbm(0x201, (2, 8), (40, 3)))
STRIDE = TINY.sbuf_partition_stride

BAD = {
    "kind": (patched(GOOD, "kind", 0xD0), "kind"),
    "size": (patched(GOOD, "size_log2", 3), "size_log2"),
    "size_high": (patched(GOOD, "size_log2", 0x81), "size_log2"),
    "reserved": (patched(GOOD, "_reserved", 1 << 47), "_reserved"),
    "elements": (patched(GOOD, "dst_count1", 2), "dst_count0"),
    "elements_none": (patched(GOOD, "src_count3", 0), "dst_count0"),
    "src_window": (patched(GOOD, "src_address", 2 << 40), "src_address"),
    "dst_window": (patched(GOOD, "dst_address", 0x101 << 40), "dst_address"),
    "dst_high_bits": (patched(GOOD, "dst_address", 1 << 48 | 1 << 40), "dst_address"),
    "dst_misaligned": (
        patched(GOOD, "dst_address", TINY.sbuf_address(1, 65)),
        "dst_address",
    ),
    "dst_step_misaligned": (patched(GOOD, "dst_step1", 63), "dst_step1"),
    "dst_step_mixed": (patched(GOOD, "dst_step1", STRIDE + 2), "dst_step1"),
    "dst_step_mixed_back": (patched(GOOD, "dst_step0", (1 << 32) - STRIDE - 2), "dst_step0"),
    "dst_beyond_partitions": (patched(GOOD, "dst_step1", 2 * STRIDE), "dst_address"),
    "dst_one_partition_too_many": (
        Descriptor(1, GOOD.src, sbuf(TINY, 2, 64, (2, 8), (STRIDE, 3))).encode(),
        "dst_address",
    ),
    "dst_before_partitions": (patched(GOOD, "dst_step1", (1 << 32) - STRIDE), "dst_address"),
    "dst_beyond_bytes": (patched(GOOD, "dst_step1", 1024), "dst_address"),
    "dst_before_bytes": (patched(GOOD, "dst_step1", (1 << 32) - 64), "dst_address"),
    "dst_far": (patched(GOOD, "dst_address", TINY.sbuf_address(4, 0)), "dst_address"),
    "src_before_hbm": (patched(GOOD, "src_step1", 1 << 31), "src_address"),
    "src_beyond_window": (patched(GOOD, "src_address", (1 << 40) - 90), "src_address"),
    "store_src_step": (patched(STORE, "src_step0", 3), "src_step0"),
    "store_src_range": (patched(STORE, "src_step1", 1100), "src_address"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_descriptor_moves_nothing_and_is_named(tiny, case):
    raw, name = BAD[case]
    tiny.start(latency=5)
    before = Descriptor(0, hbm(0x300, (1, 30)), sbuf(TINY, 3, 1, (1, 30)))
    tiny.job(1, [before])
    table = tiny.job(1, [before, raw, GOOD])
    tiny.expected = [(1, [before], None)]
    wanted = tiny.model()
    tiny.run()
    tiny.compare(wanted)
    bad = table + DESCRIPTOR_BYTES
    assert tiny.error == {
        "valid": 1,
        "code": ErrorCode.BAD_DESCRIPTOR,
        "field": field(name),
        "pc": bad,
        "address": bad,
    }
    assert len(tiny.updates) == 1


def test_a_bad_descriptor_is_reported_after_the_loads_before_it(tiny):
    """They overlap, so it has been looked at long before they are complete."""
    tiny.start(latency=60)
    loads = [Descriptor(0, hbm(0x800 * i, (1, 900)), sbuf(TINY, i, 1, (1, 900))) for i in range(2)]
    table = tiny.job(0, [*loads, patched(GOOD, "kind", 0xD0)])
    wanted = tiny.model(upto=2)
    tiny.run()
    tiny.compare(wanted)
    assert (tiny.error["code"], tiny.error["pc"]) == (
        ErrorCode.BAD_DESCRIPTOR,
        table + 2 * DESCRIPTOR_BYTES,
    )


def test_bits_beyond_the_last_field_are_refused(tiny):
    for bit in (576, 1023):
        raw = (int.from_bytes(GOOD.encode(), "little") | 1 << bit).to_bytes(128, "little")
        tiny.start(latency=5)
        table = tiny.job(0, [raw])
        wanted = tiny.bus.memory.copy(), tiny.sbuf.memory.copy()
        tiny.run()
        tiny.compare(wanted)
        assert tiny.error["code"] == ErrorCode.BAD_DESCRIPTOR
        assert (tiny.error["field"], tiny.error["pc"]) == (576, table)
        assert not tiny.updates


def nearly_legal(rng, config):
    """A descriptor that may or may not be legal: patterns that just fit, or just do not."""
    n = int(rng.integers(1, 13))
    size_log2 = int(rng.integers(3))
    raw = {"kind": DESCRIPTOR_COPY, "size_log2": size_log2}
    for side in ("src", "dst"):
        counts = factors(rng, n if rng.random() < 0.95 else int(rng.integers(0, 9)))
        counts += [1] * (4 - len(counts))
        in_sbuf = rng.random() < 0.7
        stride = config.sbuf_partition_stride
        edges = (0, 4, 8, 64, config.sbuf_bytes // 2, config.sbuf_bytes - 16)
        steps = []
        for _ in range(4):
            pool = (1 << size_log2, 4, -4, 64, stride, -stride, 2 * stride, config.sbuf_bytes // 4)
            step = int(rng.choice(pool))
            steps.append(step + (int(rng.integers(-2, 3)) if rng.random() < 0.1 else 0))
        if in_sbuf:
            address = config.sbuf_address(int(rng.integers(4)), int(rng.choice(edges)))
        else:
            address = int(rng.choice((0x100, 0x4321, 0x8000)))
        raw[f"{side}_address"] = address + (int(rng.integers(4)) if rng.random() < 0.1 else 0)
        for i in range(4):
            raw[f"{side}_step{i}"] = steps[i] & 0xFFFFFFFF
            raw[f"{side}_count{i}"] = counts[i]
    word = 0
    for name, bit, width in DESCRIPTOR_LAYOUT:
        word |= (raw.get(name, 0) & (1 << width) - 1) << bit
    if rng.random() < 0.05:
        word ^= 1 << int(rng.integers(1024))
    return word.to_bytes(DESCRIPTOR_BYTES, "little")


def judged(raw):
    """The golden model's verdict: the descriptor, or the field that is wrong."""
    try:
        return check_descriptor(raw, TINY), None
    except Exception as error:
        return None, error.field


@pytest.mark.parametrize("share", range(4))
def test_checks_agree_with_the_golden_model(tiny, seed, share):
    rng = np.random.default_rng([seed, share])
    refused = 0
    for _ in range(8):
        raw = nearly_legal(rng, TINY)
        descriptor, wrong = judged(raw)
        refused += wrong is not None
        tiny.start(latency=2)
        tiny.job(0, [raw])
        if wrong is None and unspecified(descriptor):
            continue
        tiny.expected = [] if wrong is not None else [(0, [descriptor], tiny.expected[0][-1])]
        wanted = tiny.model()
        tiny.run()
        tiny.compare(wanted)
        tiny.check_updates()
        got = None if tiny.error is None else (tiny.error["code"], tiny.error["field"])
        assert got == (None if wrong is None else (ErrorCode.BAD_DESCRIPTOR, wrong)), raw.hex()
    assert 0 < refused < 8


def unspecified(descriptor):
    """Whether source and destination share bytes, or are not in the data part of this HBM."""
    size = 1 << descriptor.size_log2
    (a, src), (b, dst) = (addresses(side, size) for side in (descriptor.src, descriptor.dst))
    beyond = any(not m and (p >= TABLES).any() for m, p in ((a, src), (b, dst)))
    return beyond or (a == b and bool(np.isin(src, dst).any()))


def test_sbuf_that_does_not_fill_its_window_is_checked_to_the_byte():
    """192 KiB of 256 KiB on the full machine; here 1536 bytes of 2 KiB, and the smallest bursts."""
    config = replace(
        TINY, name="ODD", sbuf_bytes=1536, dma_bursts=2, dma_burst_bytes=64, dma_queues=2
    )
    bench = Bench(config).start(latency=5)
    side = sbuf(config, 0, 0, (1, 1536), (config.sbuf_partition_stride, 4))
    bench.job(0, [Descriptor(0, hbm(0x7, (1, 6144)), side)])
    bench.job(1, [Descriptor(0, hbm(0x2003, (1, 777)), hbm(0x3004, (1, 777)))])
    bench.check()
    for offset, dims in (
        (0, ((1, 1537),)),
        (1535, ((1, 2),)),
        (1536, ((1, 1),)),
        (0, ((512, 2), (1025, 2))),
    ):
        bench.start(latency=5)
        n = DescriptorSide(0, dims).elements
        bench.job(0, [Descriptor(0, sbuf(config, 0, offset, *dims), hbm(0x1000, (1, n)))])
        wanted = bench.bus.memory.copy(), bench.sbuf.memory.copy()
        bench.run()
        bench.compare(wanted)
        assert bench.error["code"] == ErrorCode.BAD_DESCRIPTOR
        assert bench.error["field"] == field("src_address")


def test_extremes_of_sbuf_are_in_range(tiny):
    """First and last byte of everything, backwards too."""
    tiny.start(latency=5)
    last = TINY.sbuf_bytes - 4
    tiny.job(
        0,
        [
            Descriptor(2, hbm(0x100, (4, 8)), sbuf(TINY, 0, 0, (last, 2), (STRIDE, 4))),
            Descriptor(2, hbm(0x200, (4, 8)), sbuf(TINY, 3, last, (-4, 2), (-STRIDE, 4))),
            Descriptor(0, sbuf(TINY, 0, 0, (1, TINY.sbuf_bytes)), hbm(0x1001, (1, 2048))),
        ],
    )
    tiny.check()


@pytest.mark.parametrize("k", range(0, 16, 3))
def test_a_read_error_in_any_burst_stops_the_engine(small, k):
    """The bursts before it may have arrived; nothing after it has."""
    small.start(latency=60)
    burst, base, length = SMALL.dma_burst_bytes, 0x1010, 4096
    edge = (base // burst + k) * burst if k else base
    small.bus.bad_reads.append((edge + (104 if k % 2 else 0), edge + burst))
    before = Descriptor(0, hbm(0, (1, 40)), sbuf(SMALL, 9, 3, (1, 40)))
    load = Descriptor(0, hbm(base, (1, length)), sbuf(SMALL, 3, 5, (1, length)))
    after = Descriptor(0, hbm(0x4000, (1, 64)), sbuf(SMALL, 4, 0, (1, 64)))
    small.job(0, [before])
    table = small.job(0, [load, after])
    wanted = small.model(upto=1)[1], small.model(upto=2)[1]
    small.run()
    assert small.error == {
        "valid": 1,
        "code": ErrorCode.BUS_READ,
        "field": 0,
        "pc": table,
        "address": (edge if k else base) & ~7,  # where the burst begins, not the bad beat
    }
    assert len(small.updates) == 1
    got = small.sbuf.memory
    good = max(edge - base, 0)
    partial = (got == wanted[0]) | (got == wanted[1])
    assert partial.all()
    assert (got[3, 5 + good + 112 :] == wanted[0][3, 5 + good + 112 :]).all()
    assert all(now <= small.error_cycle for now, _, _ in small.bus.seen["ar"])


@pytest.mark.parametrize("k", range(5))
def test_a_write_error_in_any_burst_stops_the_engine(tiny, k):
    tiny.start(latency=30)
    burst, base, length = TINY.dma_burst_bytes, 0x1004, 1024
    edge = (base // burst + k) * burst
    tiny.bus.bad_writes.append((max(edge, base), edge + burst))
    store = Descriptor(0, sbuf(TINY, 3, 5, (1, length)), hbm(base, (1, length)))
    table = tiny.job(2, [store, store])
    before = tiny.bus.memory.copy()
    after = tiny.model()[0]
    tiny.run()
    assert tiny.error == {
        "valid": 1,
        "code": ErrorCode.BUS_WRITE,
        "field": 0,
        "pc": table,
        "address": max(edge, 0x1000),
    }
    assert not tiny.updates
    assert ((tiny.bus.memory == before) | (tiny.bus.memory == after)).all()
    assert all(now <= tiny.error_cycle for now, _, _ in tiny.bus.seen["aw"])


def test_beyond_the_memory_is_a_bus_error(tiny):
    for load in (True, False):
        tiny.start(latency=5)
        sides = [hbm(HBM_BYTES - 16, (1, 20)), sbuf(TINY, 0, 0, (1, 20))]
        table = tiny.job(0, [Descriptor(0, *(sides if load else sides[::-1]))])
        tiny.run()
        assert tiny.error["code"] == (ErrorCode.BUS_READ if load else ErrorCode.BUS_WRITE)
        assert (tiny.error["pc"], tiny.error["address"]) == (table, HBM_BYTES)
        assert not tiny.updates


@pytest.mark.parametrize("code", [ErrorCode.BUS_READ, ErrorCode.BUS_WRITE])
def test_a_bus_error_names_the_bus_word_with_which_the_burst_begins(tiny, code):
    """Runs of 20 bytes, 300 apart: the third one's second beat is refused."""
    tiny.start(latency=5)
    far, near = hbm(0x1003, (1, 20), (300, 5)), sbuf(TINY, 1, 0, (1, 100))
    first = 0x1003 + 2 * 300
    if code == ErrorCode.BUS_READ:
        tiny.bus.bad_reads.append((first + 15, first + 16))
        table = tiny.job(1, [Descriptor(0, far, near)])
    else:
        tiny.bus.bad_writes.append((first + 15, first + 16))
        table = tiny.job(1, [Descriptor(0, near, far)])
    tiny.run()
    assert tiny.error == {
        "valid": 1, "code": code, "field": 0, "pc": table, "address": first & ~7,
    }  # fmt: skip


def test_every_beat_of_sbuf_is_an_event(tiny):
    tiny.start(latency=5, pause=0.3)
    elements = ((1, 64), (0, 20))  # bytes, the same 64 over and over
    tiny.job(0, [Descriptor(0, sbuf(TINY, 0, 0, *elements), sbuf(TINY, 1, 64, *elements))])
    tiny.check()
    assert tiny.events["sbuf_beats"] == 2 * 20 * 8
    assert tiny.events["read_bytes"] == tiny.events["write_bytes"] == 0


@pytest.mark.parametrize("word", [0, 7, 15])
def test_an_unreadable_descriptor_is_a_bus_error_after_those_before_it(tiny, word):
    tiny.start(latency=30)
    first = Descriptor(0, hbm(0x10, (1, 900)), sbuf(TINY, 0, 1, (1, 900)))
    tiny.job(0, [first])
    table = tiny.job(0, [first, STORE, GOOD])
    unreadable = table + 2 * DESCRIPTOR_BYTES + 8 * word
    tiny.bus.bad_reads.append((unreadable, unreadable + 8))
    wanted = tiny.model(upto=3)
    tiny.run()
    tiny.compare(wanted)
    assert tiny.error == {
        "valid": 1,
        "code": ErrorCode.BUS_READ,
        "field": 0,
        "pc": table + 2 * DESCRIPTOR_BYTES,
        "address": table + 2 * DESCRIPTOR_BYTES,
    }
    assert len(tiny.updates) == 1


@pytest.mark.parametrize("share", range(6))
def test_an_error_anywhere_stops_cleanly(tiny, seed, share):
    """Some byte of some descriptor cannot be read or written, whatever else is under way."""
    rng = np.random.default_rng([seed, share])
    tiny.start(latency=(1, 20, 90)[share % 3], pause=(0.0, 0.3)[share % 2], seed=seed)
    readable, writable = [], []
    touched = np.zeros(HBM_BYTES, bool), np.zeros(tiny.sbuf.memory.size, bool)
    for i in range(4):
        queue = (i + share) % 4
        chain = [random_descriptor(rng, TINY, queue) for _ in range(rng.integers(1, 4))]
        table = tiny.job(queue, chain)
        readable += [(table, DESCRIPTOR_BYTES * len(chain))]
        for descriptor in chain:
            size = 1 << descriptor.size_log2
            memory, places = addresses(descriptor.dst, size)
            touched[memory][places] = True
            if not memory:
                writable.append((int(rng.choice(places)), 1))
            memory, places = addresses(descriptor.src, size)
            if not memory:
                readable.append((int(rng.choice(places)), 1))
    writes = share >= 3 and writable
    first, length = (writable if writes else readable)[-1]
    ranges = tiny.bus.bad_writes if writes else tiny.bus.bad_reads
    ranges.append((first, first + length))
    before = tiny.bus.memory.copy(), tiny.sbuf.memory.reshape(-1).copy()
    tiny.run()
    assert tiny.error["code"] == (ErrorCode.BUS_WRITE if writes else ErrorCode.BUS_READ)
    address = tiny.error["address"]
    assert first - TINY.dma_burst_bytes < address < first + length
    assert len(tiny.updates) < len(tiny.expected)
    for has, had, may in zip(
        (tiny.bus.memory, tiny.sbuf.memory.reshape(-1)), before, touched, strict=True
    ):
        assert (has == had)[~may].all()


# Halt and reset -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_halt_before_the_last_answer_leaves_the_job_without_update(tiny, direction):
    """Halted in every fifth cycle of a job; what is under way ends, and nothing follows it."""
    here, there = sbuf(TINY, 1, 0, (1, 256)), hbm(0x1000, (1, 256))
    sides = (here, there) if direction == "store" else (there, here)

    def job():
        tiny.start(latency=60)
        tiny.job(0, [Descriptor(0, *sides)])

    job()
    tiny.check()
    end = tiny.now
    halted = 0
    for halt_at in range(10, end, 5):
        job()
        tiny.run(halt_at=halt_at)
        halted += not tiny.updates
    assert halted > 20


@pytest.mark.parametrize("halt_at", [3, 60, 83, 97, 110, 131, 160, 222, 300])
def test_after_halt_and_reset_the_engine_works_again(tiny, seed, halt_at):
    tiny.start(latency=25, pause=0.2, seed=seed)
    for queue in range(4):
        tiny.job(queue, [random_descriptor(np.random.default_rng(queue), TINY, queue)] * 3)
    tiny.job(0, [Descriptor(0, hbm(0x100, (1, 999)), sbuf(TINY, 0, 9, (1, 999)))])
    tiny.job(1, [Descriptor(0, sbuf(TINY, 2, 9, (1, 999)), hbm(0x1111, (1, 999)))])
    wanted = []

    def again():
        for queue in range(4):
            rng = np.random.default_rng(10 + queue)
            tiny.job(queue, [random_descriptor(rng, TINY, queue) for _ in range(2)])
        wanted.append(tiny.model())

    tiny.run(halt_at=halt_at, after=again)
    assert tiny.error is None
    tiny.compare(wanted[0])
    tiny.check_updates()


# Speed --------------------------------------------------------------------------------------------


ALONG = (
    Descriptor(0, hbm(0x1003, (1, 4096)), sbuf(SMALL, 2, 13, (1, 4096))),
    Descriptor(0, sbuf(SMALL, 3, 13, (1, 4096)), hbm(0x4005, (1, 4096))),
)
ACROSS = (
    Descriptor(
        1,
        hbm(0x1000, (2, 16), (32, 128)),
        sbuf(SMALL, 0, 64, (SMALL.sbuf_partition_stride, 16), (2, 128)),
    ),
    Descriptor(
        1,
        sbuf(SMALL, 0, 1024, (SMALL.sbuf_partition_stride, 16), (2, 128)),
        hbm(0x4000, (2, 16), (32, 128)),
    ),
)
TILE = (
    Descriptor(
        1,
        hbm(0x1000, (2, 16), (64, 128)),
        sbuf(SMALL, 0, 64, (SMALL.sbuf_partition_stride, 16), (2, 128)),
    ),
    Descriptor(
        1,
        sbuf(SMALL, 0, 1024, (SMALL.sbuf_partition_stride, 16), (2, 128)),
        hbm(0x4000, (2, 16), (64, 128)),
    ),
)
"""A tile of 16 BF16 columns out of a matrix of 32: runs of 4 beats on both sides."""


@pytest.mark.parametrize(
    ("descriptors", "in_flight"),
    [(ALONG[:1], 4096), (ALONG[1:], 0), (ALONG, 4096), (ACROSS, 4096), (TILE, 2048)],
    ids=["load", "store", "load_and_store", "across", "tile"],
)
def test_4_kib_move_at_8_bytes_per_cycle_each_way(small, descriptors, in_flight):
    """512 beats and two latencies (descriptor, data or response), and little else."""
    small.start(latency=200)
    for queue, descriptor in enumerate(descriptors):
        small.job(queue, [descriptor])
    small.check()
    fixed = 130 if len(descriptors) > 1 else 100  # fetch, check, pipelines, the first burst
    assert small.events["busy"] < 512 * 1.02 + 2 * 200 + fixed
    assert small.bus.most_bytes >= in_flight
    assert small.bus.most >= (16 if in_flight else 1)


@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_runs_of_one_beat_cost_no_bubble(small, load):
    """512 runs of 8 bytes in HBM, each across four partitions in SBUF."""
    small.start(latency=20)
    sides = [
        hbm(0x1000, (2, 4), (16, 512)),
        sbuf(SMALL, 4, 64, (SMALL.sbuf_partition_stride, 4), (2, 512)),
    ]
    small.job(0, [Descriptor(1, *(sides if load else sides[::-1]))])
    small.check()
    assert small.events["busy"] < 512 * 1.02 + 2 * 20 + 70


def test_descriptors_follow_each_other_without_a_gap(small):
    """Eight loads of 512 bytes: the latency is paid for the first one only."""
    small.start(latency=200)
    loads = [Descriptor(1, hbm(0x200 * i, (2, 256)), sbuf(SMALL, i, 6, (2, 256))) for i in range(8)]
    small.job(0, loads)
    small.check()
    assert small.events["busy"] < 8 * (64 + 16) + 2 * 200 + 100


def test_outputs_do_not_depend_on_inputs_of_the_same_cycle(tiny, seed):
    rng = np.random.default_rng(seed)
    tiny.start(latency=3, pause=0.5, seed=seed)
    for queue in range(4):
        tiny.job(queue, [random_descriptor(rng, TINY, queue) for _ in range(2)])
    tiny.check(probe=True)


def test_an_idle_engine_gives_the_first_turns_to_queue_0():
    """Two queues want to fetch, to start and to retire in the same cycle."""
    dut = DmaQueues(config=TINY)
    orders = []

    async def work(ctx, wanted):
        """A job of one descriptor in each of ``wanted``; three orders of queues."""
        fetched, started, retired = [], [], []
        ctx.set(dut.stop, 1)
        ctx.set(dut.room, 0)
        ctx.set(dut.update.ready, 1)
        for queue in wanted:
            update = {"semaphore": queue, "mode": 1, "value": 1}
            ctx.set(dut.jobs.p, {"queue": queue, "table": 0, "count": 1, "update": update})
            ctx.set(dut.jobs.valid, 1)
            await ctx.tick().until(dut.jobs.ready)
            ctx.set(dut.jobs.valid, 0)
        await ctx.tick().repeat(3)  # the queues are two cycles deep
        ctx.set(dut.stop, 0)
        ctx.set(dut.fetch.ready, 1)
        tags = {}
        while len(fetched) < len(wanted):
            if ctx.get(dut.fetch.valid):
                tag = ctx.get(dut.fetch.p.tag)
                fetched.append(tag.queue)
                tags[tag.queue] = {"slot": tag.slot, "queue": tag.queue}
            await ctx.tick()
        for tag in tags.values():
            ctx.set(dut.word, {"valid": 1, "tag": tag, "index": 15})
            await ctx.tick()
        ctx.set(dut.word.valid, 0)
        ctx.set(dut.room, 15)
        ctx.set(dut.start.ready, 1)
        while len(started) < len(wanted):
            if ctx.get(dut.start.valid):
                started.append(ctx.get(dut.start.p.queue))
            await ctx.tick()
        for port, queue in zip(dut.done, wanted, strict=False):
            ctx.set(port, {"valid": 1, "tag": tags[queue]})
        await ctx.tick()
        for port in dut.done:
            ctx.set(port.valid, 0)
        while len(retired) < len(wanted):
            if ctx.get(dut.update.valid):
                retired.append(ctx.get(dut.update.p.semaphore))
            await ctx.tick()
        while ctx.get(dut.busy):
            await ctx.tick()
        await ctx.tick()
        return fetched, started, retired

    async def test(ctx):
        for before in range(4):
            await work(ctx, [before])
            orders.append(await work(ctx, [3, 1]))
            await work(ctx, [before])
            orders.append(await work(ctx, [2, 0]))

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(test)
    simulator.run()
    assert orders == [([1, 3],) * 3, ([0, 2],) * 3] * 4
