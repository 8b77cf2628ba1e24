"""A DMA engine between cocotbext-axi's memory and an SBUF in Python, pauses on every channel."""

import itertools
from collections import deque

import cocotb
import numpy as np
from cocotb.triggers import FallingEdge
from cocotbext.axi import AxiBus, AxiRam
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.arch.isa import Descriptor, DescriptorSide
from makalu.rtl.interfaces import DMA_READ_CYCLES, DmaJob, SbufBeat, SbufReadRequest, Update
from pins import begin, generator, pack, pauses, unpack

HBM = 1 << 16
TABLE = 0xE000
STRIDE = CONFIG.sbuf_partition_stride
AREA = 512  # bytes of each partition that are used


class Bench:
    """The engine's surroundings."""

    def __init__(self, dut, name, pause=0.0):
        self.dut, self.pause, self.name = dut, pause, name
        self.rng = generator(name)
        self.sbuf = self.rng.integers(0, 256, (CONFIG.partitions, AREA), np.uint8)
        self.updates = []
        self.writes = self.reads = 0
        self.table = TABLE

    async def start(self):
        dut = self.dut
        await begin(
            dut, halt=0, jobs__valid=0, jobs__payload=0, sbuf_write__ready=0, sbuf_read__ready=0,
            sbuf_read_data=0, update__ready=0,
        )  # fmt: skip
        self.ram = AxiRam(AxiBus.from_prefix(dut, "axi_"), dut.clk, dut.rst, size=HBM)
        if self.pause:
            read, write = self.ram.read_if, self.ram.write_if
            for i, channel in enumerate(
                (read.ar_channel, read.r_channel, write.aw_channel, write.w_channel,
                 write.b_channel)
            ):  # fmt: skip
                channel.set_pause_generator(pauses(f"{self.name} {i}", self.pause))
        self.hbm = self.rng.integers(0, 256, HBM, np.uint8)
        self.ram.write(0, self.hbm.tobytes())
        self.watcher = cocotb.start_soon(self._serve())

    def _places(self, beat):
        size = 1 << beat["size_log2"]
        if not beat["across"]:
            assert beat["offset"] % 8 == 0
            return [(beat["partition"], beat["offset"] + i) for i in range(8)]
        assert beat["offset"] % size == 0
        return [(beat["partition"] + i // size, beat["offset"] + i % size) for i in range(8)]

    async def _serve(self):
        """SBUF, updates, and the rules of the bus; outputs come from registers."""
        dut, rng = self.dut, self.rng
        pipe = deque([None] * (DMA_READ_CYCLES - 1))
        held = {}
        while True:
            answer = None
            for kind, layout in (("write", SbufBeat(CONFIG)), ("read", SbufReadRequest(CONFIG))):
                valid = int(getattr(dut, f"sbuf_{kind}__valid").value)
                bits = int(getattr(dut, f"sbuf_{kind}__payload").value) if valid else None
                assert held.get(kind) in (None, bits), f"SBUF {kind} changed while it waited"
                ready = rng.random() >= self.pause
                getattr(dut, f"sbuf_{kind}__ready").value = int(ready)
                held[kind] = None if ready else bits
                if not (valid and ready):
                    continue
                beat = unpack(layout, bits)
                places = self._places(beat)
                if kind == "write":
                    assert beat["strobe"], "a beat without bytes"
                    self.writes += 1
                    for i, (p, at) in enumerate(places):
                        if beat["strobe"] >> i & 1:
                            self.sbuf[p, at] = beat["data"] >> 8 * i & 0xFF
                else:
                    self.reads += 1
                    answer = 0
                    for i, (p, at) in enumerate(places):
                        if p < CONFIG.partitions and at < AREA:
                            answer |= int(self.sbuf[p, at]) << 8 * i
            ready = rng.random() >= self.pause
            dut.update__ready.value = int(ready)
            if ready and int(dut.update__valid.value):
                self.updates.append(unpack(Update, int(dut.update__payload.value)))
            for channel in ("aw", "ar"):
                if int(getattr(dut, f"axi__{channel}valid").value):
                    address = int(getattr(dut, f"axi__{channel}addr").value)
                    length = int(getattr(dut, f"axi__{channel}len").value) + 1
                    last = address + 8 * length - 1
                    assert address % 8 == 0
                    assert address >> 12 == last >> 12, f"{address:#x}..{last:#x} crosses 4 KiB"
                    assert 8 * length <= max(CONFIG.dma_burst_bytes, 128)
            pipe.append(answer)
            due = pipe.popleft()
            await FallingEdge(dut.clk)
            dut.sbuf_read_data.value = 0 if due is None else due << 1 | 1

    def model(self, descriptor):
        """Carry a descriptor out on copies of both memories."""
        size = 1 << descriptor.size_log2

        def cells(side):
            memory = side.address >> 40
            every = (side.addresses(size)[:, None] + np.arange(size)).reshape(-1)
            return memory, every & (1 << 40) - 1

        memory, at = cells(descriptor.src)
        values = self.want_sbuf[at // STRIDE, at % STRIDE] if memory else self.want_hbm[at]
        memory, at = cells(descriptor.dst)
        if memory:
            self.want_sbuf[at // STRIDE, at % STRIDE] = values
        else:
            self.want_hbm[at] = values

    async def job(self, descriptors, *, queue=0, update=None):
        """Hand a job over."""
        dut = self.dut
        raw = b"".join(descriptor.encode() for descriptor in descriptors)
        self.ram.write(self.table, raw)
        update = update or {"semaphore": 1, "mode": 1, "value": 1}
        job = {"queue": queue, "table": self.table, "count": len(descriptors), "update": update}
        self.hbm[self.table : self.table + len(raw)] = np.frombuffer(raw, np.uint8)
        self.table += len(raw)
        dut.jobs__payload.value = pack(DmaJob, job)
        dut.jobs__valid.value = 1
        for _ in range(20000):
            taken = int(dut.jobs__ready.value)
            await FallingEdge(dut.clk)
            if taken:
                break
        else:
            raise AssertionError("the job is not taken")
        dut.jobs__valid.value = 0

    async def run(self, jobs):
        """Run lists of descriptors as jobs; compare all of both memories and the updates."""
        hbm, sbuf = self.hbm.copy(), self.sbuf.copy()
        updates = []
        done = len(self.updates)
        for i, descriptors in enumerate(jobs):
            update = {"semaphore": i % 8, "mode": 1, "value": 1 + i}
            updates.append(update)
            await self.job(descriptors, update=update)
        for _ in range(40000):
            if not int(self.dut.busy.value):
                break
            await FallingEdge(self.dut.clk)
        else:
            raise AssertionError("the engine does not finish")
        for _ in range(4):
            await FallingEdge(self.dut.clk)
        assert not int(self.dut.error.value) & 1
        assert not self.watcher.done(), "the watcher stopped"
        self.want_hbm, self.want_sbuf = hbm.copy(), sbuf.copy()
        self.want_hbm[TABLE:] = self.hbm[TABLE:]
        for descriptor in itertools.chain(*jobs):
            self.model(descriptor)
        self.hbm = np.frombuffer(bytes(self.ram.read(0, HBM)), np.uint8).copy()
        np.testing.assert_array_equal(self.hbm, self.want_hbm)
        np.testing.assert_array_equal(self.sbuf, self.want_sbuf)
        assert (self.hbm[:TABLE] != hbm[:TABLE]).any() or (self.sbuf != sbuf).any()
        assert self.updates[done:] == updates


def hbm_side(address, *dims):
    return DescriptorSide(address, dims)


def sbuf_side(partition, offset, *dims):
    return DescriptorSide(CONFIG.sbuf_address(partition, offset), dims)


def random_descriptor(rng, slot):
    """A 3-D copy between disjoint areas of slot 0..7; odd strides, unaligned in HBM."""
    size_log2 = int(rng.integers(3))
    size = 1 << size_log2
    inner, outer, tiles = int(rng.integers(1, 9)), int(rng.integers(1, 4)), CONFIG.partitions
    packed = rng.random() < 0.6
    step = size if packed else size * int(rng.integers(1, 3))
    row = inner * step + size * int(rng.integers(3))
    hbm = hbm_side(
        slot * 0x1000 + int(rng.integers(0x400)),
        (size if packed else size + int(rng.integers(5)), inner), (101, outer), (777, tiles),
    )  # fmt: skip
    # Within a slot of 1/8 of the area, or as far as rows reach: 3 rows of at most 8 elements.
    sbuf = sbuf_side(0, 0, (size, inner), (inner * size, outer), (STRIDE, tiles))
    if row * outer <= AREA // 2:
        at = int(rng.integers((AREA - row * outer) // size)) * size
        sbuf = sbuf_side(0, at, (step, inner), (row, outer), (STRIDE, tiles))
    sides = [hbm, sbuf]
    if rng.random() < 0.5:
        sides.reverse()
    return Descriptor(size_log2, *sides)


@cocotb.test()
async def test_loads_and_stores_without_pauses(dut):
    bench = Bench(dut, "plain")
    await bench.start()
    load = Descriptor(
        2, hbm_side(0x1003, (4, 32), (512, 4)), sbuf_side(0, 64, (4, 32), (STRIDE, 4))
    )
    store = Descriptor(
        1, sbuf_side(0, 64, (2, 50), (STRIDE, 4)), hbm_side(0x2FF1, (2, 50), (300, 4))
    )
    await bench.run([[load], [store]])
    assert bench.reads > 20
    assert bench.writes > 60


@cocotb.test()
async def test_random_descriptors_with_random_pauses(dut):
    bench = Bench(dut, "random", pause=0.35)
    await bench.start()
    for _ in range(4):
        jobs = [
            [random_descriptor(bench.rng, slot) for slot in range(int(bench.rng.integers(1, 4)))]
            for _ in range(3)
        ]
        await bench.run(jobs)
    assert bench.reads > 50
    assert bench.writes > 50


@cocotb.test()
async def test_long_runs_end_bursts_before_4_kib(dut):
    bench = Bench(dut, "long", pause=0.1)
    await bench.start()
    load = Descriptor(0, hbm_side(0x0FAB, (1, 400)), sbuf_side(1, 5, (1, 400)))
    store = Descriptor(0, sbuf_side(1, 5, (1, 400)), hbm_side(0x3F01, (1, 400)))
    await bench.run([[load, store]])
    await bench.run([[Descriptor(0, hbm_side(0x0F01, (1, 900)), hbm_side(0x5EFF, (1, 900)))]])


@cocotb.test()
async def test_a_transpose_across_partitions(dut):
    bench = Bench(dut, "across", pause=0.2)
    await bench.start()
    across = Descriptor(1, hbm_side(0x500, (2, 4), (8, 30)), sbuf_side(0, 32, (STRIDE, 4), (2, 30)))
    back = Descriptor(1, sbuf_side(0, 32, (STRIDE, 4), (2, 30)), hbm_side(0x1801, (2, 4), (8, 30)))
    await bench.run([[across, back]])


@cocotb.test()
async def test_halt_drains_the_bus_and_reset_starts_clean(dut):
    bench = Bench(dut, "halt", pause=0.2)
    await bench.start()
    await bench.job([random_descriptor(bench.rng, slot) for slot in range(4)])
    for _ in range(90):
        await FallingEdge(dut.clk)
    dut.halt.value = 1
    for _ in range(2000):
        await FallingEdge(dut.clk)
        if int(dut.drained.value):
            break
    else:
        raise AssertionError("the engine does not drain")
    bench.watcher.cancel()
    dut.rst.value = 1
    await FallingEdge(dut.clk)
    await FallingEdge(dut.clk)
    dut.rst.value = 0
    dut.halt.value = 0
    await FallingEdge(dut.clk)
    assert not int(dut.busy.value)
    bench.updates.clear()
    bench.hbm = np.frombuffer(bytes(bench.ram.read(0, HBM)), np.uint8).copy()
    bench.watcher = cocotb.start_soon(bench._serve())
    await bench.run([[random_descriptor(bench.rng, slot)] for slot in range(3)])
