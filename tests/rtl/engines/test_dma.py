"""DMA engine against a byte model, with memories that pause, are slow, and fail on demand."""

from collections import deque

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator

from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.isa import (
    DESCRIPTOR_BYTES,
    Descriptor,
    DescriptorSide,
    ErrorCode,
    Update,
    UpdateMode,
)
from makalu.rtl.engines.dma import DmaEngine
from makalu.rtl.interfaces import DMA_READ_CYCLES

HBM_BYTES = 1 << 16
TABLES = 0xC000
"""Descriptor tables are put here; the bytes below are for data."""


def addresses(side, size):
    """Window (0 or 1) and offset in it of every byte of a side, in order."""
    first = side.addresses(size)
    every = (first[:, None] + np.arange(size)).reshape(-1)
    return side.address >> 40, every & (1 << 40) - 1


class Bus:
    """AXI memory: latency, pauses, errors, and every rule that a manager can break.

    ``pause`` is the probability, per channel and cycle, that the memory is not ready or has nothing.
    """

    CHANNELS = {
        "ar": ("araddr", "arlen", "arsize", "arburst", "arid"),
        "aw": ("awaddr", "awlen", "awsize", "awburst", "awid"),
        "w": ("wdata", "wstrb", "wlast"),
    }

    def __init__(self, bench, latency, pause, rng):
        self.bench, self.latency, self.pause, self.rng = bench, latency, pause, rng
        self.memory = np.zeros(HBM_BYTES, np.uint8)
        self.bad_reads, self.bad_writes = [], []  # (first, end) answered with SLVERR
        self.reads, self.writes, self.data, self.answers = deque(), deque(), deque(), deque()
        self.beat = 0
        self.seen = {"ar": [], "aw": []}
        self.stalled = {}
        self.ready = {"ar": 0, "aw": 0, "w": 0}
        self.offers = {"r": 0, "b": 0}
        self.most = self.most_bytes = 0
        self.cycles_with_data = 0

    def pauses(self):
        return self.pause and self.rng.random() < self.pause

    def failing(self, address, ranges):
        """Response code of a word."""
        if any(first <= address + 7 and address < end for first, end in ranges):
            return 2
        return 0 if address + 8 <= HBM_BYTES else 3

    def check_address(self, address, length, size, burst, ident):
        config = self.bench.config
        assert (size, burst, ident) == (3, 1, 0)
        assert address % 8 == 0
        last = address + 8 * length + 7
        assert last - address + 1 <= config.dma_burst_bytes
        assert address >> 12 == last >> 12, f"{address:#x}..{last:#x} crosses 4 KiB"

    def cycle(self, now, axi):
        """``axi`` holds the manager's outputs of this cycle; return the inputs of the next."""
        ready, offers = self.ready, self.offers
        for channel, names in self.CHANNELS.items():
            payload = tuple(axi[name] for name in names)
            if self.stalled.get(channel) is not None:
                assert axi[channel + "valid"], f"{channel}valid fell"
                assert payload == self.stalled[channel], f"{channel} changed while stalled"
            taken = axi[channel + "valid"] and ready[channel]
            self.stalled[channel] = payload if axi[channel + "valid"] and not taken else None
            if not taken:
                continue
            if channel == "w":
                self.data.append(payload)
            else:
                self.check_address(*payload)
                self.seen[channel].append((now, payload[0], payload[1] + 1))
                queue = self.reads if channel == "ar" else self.writes
                queue.append((now + self.latency, payload[0], payload[1] + 1))
        if offers["r"] and axi["rready"]:
            offers["r"] = 0
            self.cycles_with_data += 1
            self.beat += 1
            if self.beat == self.reads[0][2]:
                self.beat = 0
                self.reads.popleft()
        if offers["b"] and axi["bready"]:
            offers["b"] = 0
            self.answers.popleft()
        self.most = max(self.most, len(self.reads))
        self.most_bytes = max(self.most_bytes, 8 * sum(length for *_, length in self.reads))
        self.write_bursts(now)

        inputs = {}
        for channel in ready:
            ready[channel] = int(not self.pauses())
            inputs[channel + "ready"] = ready[channel]
        if not offers["r"] and self.reads and self.reads[0][0] <= now + 1 and not self.pauses():
            offers["r"] = 1
        if offers["r"]:
            _, address, length = self.reads[0]
            address += 8 * self.beat
            response = self.failing(address, self.bad_reads)
            word = b"\xee" * 8 if response else self.memory[address : address + 8].tobytes()
            inputs["rdata"] = int.from_bytes(word, "little")
            inputs["rresp"] = response
            inputs["rlast"] = int(self.beat == length - 1)
        inputs["rvalid"] = offers["r"]
        if not offers["b"] and self.answers and self.answers[0][0] <= now + 1 and not self.pauses():
            offers["b"] = 1
        inputs["bvalid"] = offers["b"]
        if offers["b"]:
            inputs["bresp"] = self.answers[0][1]
        return inputs

    def write_bursts(self, now):
        """Carry out write bursts whose data is complete."""
        while self.writes:
            _, address, length = self.writes[0]
            if len(self.data) < length:
                for _, _, last in self.data:
                    assert not last, "WLAST too early"
                return
            self.writes.popleft()
            response = 0
            for i in range(length):
                word, strobe, last = self.data.popleft()
                assert last == (i == length - 1), "WLAST misplaced"
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
        self.pipe = deque([None] * (DMA_READ_CYCLES - 1))
        self.ready = {"write": 0, "read": 0}
        self.stalled = {"write": None, "read": None}
        self.beats = {"write": 0, "read": 0}

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

    def cycle(self, valid, beats):
        """``valid`` and ``beats`` by direction; return the ready inputs and the read data."""
        answer = None
        for kind in ("write", "read"):
            beat = beats[kind]
            if self.stalled[kind] is not None:
                assert valid[kind] and beat == self.stalled[kind], f"SBUF {kind} changed"
            taken = valid[kind] and self.ready[kind]
            self.stalled[kind] = beat if valid[kind] and not taken else None
            if not taken:
                continue
            self.beats[kind] += 1
            places = self.places(beat)
            if kind == "write":
                assert beat["strobe"]
                for i, (partition, offset) in enumerate(places):
                    if beat["strobe"] >> i & 1:
                        assert offset < self.config.sbuf_bytes
                        self.memory[partition, offset] = beat["data"] >> 8 * i & 0xFF
            else:
                answer = 0
                for i, (partition, offset) in enumerate(places):
                    if partition < self.config.partitions and offset < self.config.sbuf_bytes:
                        answer |= int(self.memory[partition, offset]) << 8 * i
        self.pipe.append(answer)
        for kind in self.ready:
            self.ready[kind] = int(not (self.pause and self.rng.random() < self.pause))
        return self.ready, self.pipe.popleft()


class Bench:
    """One engine and its surroundings; simulated again from reset for every scenario."""

    def __init__(self, config):
        self.config = config
        self.dut = DmaEngine(config=config)
        self.reset = Signal()
        self.simulator = Simulator(ResetInserter(self.reset)(self.dut))
        self.simulator.add_clock(1e-8)
        self.simulator.add_testbench(self._main)
        self._first = True
        axi = self.dut.axi
        self.outputs = [
            name
            for name, member in axi.signature.flip().members.items()
            if member.flow.name == "In" and name != "rid"
        ]

    def start(self, *, latency=20, pause=0.0, seed=1, update_pause=None):
        rng = np.random.default_rng(seed)
        self.rng = rng
        self.bus = Bus(self, latency, pause, rng)
        self.sbuf = Sbuf(self, pause, rng)
        self.bus.memory[:] = rng.integers(0, 256, HBM_BYTES)
        self.sbuf.memory[:] = rng.integers(0, 256, self.sbuf.memory.shape)
        self.update_pause = pause if update_pause is None else update_pause
        self.table = TABLES
        self.jobs, self.updates, self.expected = deque(), [], []
        self.events = {}
        self.now = 0
        self.error = None
        return self

    def job(self, queue, descriptors, *, update=None):
        """Queue descriptors (:class:`Descriptor` or raw bytes); return the table's address."""
        table = self.table
        raw = b"".join(d if isinstance(d, bytes) else d.encode() for d in descriptors)
        self.bus.memory[table : table + len(raw)] = np.frombuffer(raw, np.uint8)
        self.table += max(len(raw), DESCRIPTOR_BYTES)
        assert self.table <= HBM_BYTES
        if update is None:
            update = Update(len(self.jobs) % 8, UpdateMode.ADD, 1 + len(self.jobs))
        self.jobs.append((queue, table, len(descriptors), update))
        self.expected.append((queue, list(descriptors), update))
        return table

    def apply(self, hbm, sbuf, descriptor):
        """The model: element by element, in order."""
        size = 1 << descriptor.size_log2
        flat = sbuf.reshape(-1)
        if descriptor.src.elements == 0:
            return
        memory, places = addresses(descriptor.src, size)
        values = (flat if memory else hbm)[places]
        memory, places = addresses(descriptor.dst, size)
        (flat if memory else hbm)[places] = values

    def run(self, limit=20000, until=None, halt_at=None, settle=8):
        """Simulate until everything queued is complete (or ``until`` says so)."""
        self.limit, self.until, self.halt_at, self.settle = limit, until, halt_at, settle
        if not self._first:
            self.simulator.reset()
        self._first = False
        self.simulator.run()
        return self

    def check(self, count=True):
        """Run what is queued and compare all of both memories with the model."""
        hbm, sbuf = self.bus.memory.copy(), self.sbuf.memory.copy()
        for _, descriptors, _ in self.expected:
            for descriptor in descriptors:
                self.apply(hbm, sbuf, descriptor)
        self.run()
        assert self.error is None, self.error
        self.compare(hbm, sbuf)
        wanted = sorted((u.semaphore, int(u.mode), u.value) for _, _, u in self.expected)
        assert sorted(self.updates) == wanted
        for queue in range(self.config.dma_queues):
            in_order = [
                (u.semaphore, int(u.mode), u.value) for q, _, u in self.expected if q == queue
            ]
            assert [u for u in self.updates if u in in_order] == in_order
        return self

    def compare(self, hbm, sbuf):
        for name, got, wanted in (("HBM", self.bus.memory, hbm), ("SBUF", self.sbuf.memory, sbuf)):
            wrong = np.argwhere(got != wanted)
            assert len(wrong) == 0, (
                f"{name}: {len(wrong)} bytes differ, first at {wrong[0]}: "
                f"got {got[tuple(wrong[0])]:#x}, expected {wanted[tuple(wrong[0])]:#x}"
            )

    async def _main(self, ctx):
        dut, bus = self.dut, self.bus
        axi = [getattr(dut.axi, name) for name in self.outputs]
        streams = {"write": dut.sbuf_write, "read": dut.sbuf_read}
        watched = [
            *axi, dut.sbuf_write.valid, dut.sbuf_read.valid, dut.sbuf_write.p, dut.sbuf_read.p,
            dut.jobs.ready, dut.update.valid, dut.update.p, dut.error, dut.busy, dut.drained,
            dut.events,
        ]  # fmt: skip
        count = len(axi)
        current = {}

        def put(signal, value):
            if current.get(id(signal)) != value:
                current[id(signal)] = value
                ctx.set(signal, value)

        offered = None
        update_ready = 0
        quiet_for = 0
        halted = False
        inputs = {
            name: getattr(dut.axi, name)
            for name in dut.axi.signature.members
            if name not in self.outputs
        }
        tick = ctx.tick().sample(*watched)
        while True:
            _, _, *values = await tick
            (
                write_valid, read_valid, write, read, jobs_ready, update_valid, update, error, busy,
                drained, events,
            ) = values[count:]  # fmt: skip
            now = self.now
            self.now += 1
            for name, value in bus.cycle(
                now, dict(zip(self.outputs, values, strict=False))
            ).items():
                put(inputs[name], value)
            valid = {"write": write_valid, "read": read_valid}
            beats = {"write": None, "read": None}
            for kind, payload in (("write", write), ("read", read)):
                if valid[kind]:
                    beats[kind] = {name: payload[name] for name in payload.shape().members}
            ready, answer = self.sbuf.cycle(valid, beats)
            for kind, stream in streams.items():
                put(stream.ready, ready[kind])
            put(dut.sbuf_read_data.valid, int(answer is not None))
            put(dut.sbuf_read_data.data, answer or 0)
            if update_valid and update_ready:
                self.updates.append((update.semaphore, update.mode, update.value))
            update_ready = int(not (self.update_pause and self.rng.random() < self.update_pause))
            put(dut.update.ready, update_ready)
            for name in events.shape().members:
                if events[name]:
                    self.events[name] = self.events.get(name, 0) + events[name]

            if offered is not None and jobs_ready:
                offered = None
            if offered is None and self.jobs and not halted:
                offered = self.jobs.popleft()
                queue, table, length, what = offered
                ctx.set(
                    dut.jobs.p,
                    {
                        "queue": queue,
                        "table": table,
                        "count": length,
                        "update": {
                            "semaphore": what.semaphore,
                            "mode": int(what.mode),
                            "value": what.value,
                        },
                    },
                )
            put(dut.jobs.valid, int(offered is not None))

            if self.halt_at is not None and now >= self.halt_at and not halted:
                halted = True
                put(dut.halt, 1)
            if halted and now > self.halt_at + 2 and drained:
                assert bus.quiet, "drained, but the bus is not"
                break
            if error.valid and self.error is None:
                self.error = {name: error[name] for name in ("code", "field", "pc", "address")}
                self.error_cycle = now
            if self.error is not None and drained and bus.quiet and now > self.error_cycle + 20:
                break
            self.busy = busy
            done = not self.jobs and offered is None and not busy and bus.quiet
            quiet_for = quiet_for + 1 if done else 0
            if self.until is not None and self.until(self):
                break
            if quiet_for > self.settle:
                break
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


def test_loads_along_one_partition(tiny):
    tiny.start()
    tiny.job(0, [Descriptor(0, hbm(0x100, (1, 64)), sbuf(TINY, 1, 64, (1, 64)))])
    tiny.check()


def test_stores_from_one_partition(tiny):
    tiny.start()
    tiny.job(0, [Descriptor(0, sbuf(TINY, 1, 64, (1, 64)), hbm(0x100, (1, 64)))])
    tiny.check()
