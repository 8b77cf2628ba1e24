"""The state buffer against an array of bytes: every port at once, waits, conflicts."""

import cocotb
import numpy as np
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.interfaces import (
    DMA_READ_CYCLES,
    SBUF_READ_CYCLES,
    VECTOR_READ_PORTS,
    VECTOR_WRITE_PORTS,
    DmaReadData,
    SbufBeat,
    SbufReadRequest,
)
from pins import begin, cycle, generator, pack, settle, unpack

P = CONFIG.partitions
WORDS = min(CONFIG.sbuf_words, 24)  # of each partition that are used
VECTOR_READS = tuple(f"vector_read__{i}" for i in range(VECTOR_READ_PORTS))
PORTS = ("moving", "weights", *VECTOR_READS)
WRITERS = tuple(f"vector_write__{i}" for i in range(VECTOR_WRITE_PORTS))
PATIENCE = 60
CONTENTS = np.zeros((P, 16 * WORDS), np.uint8)
"""A reset keeps them, so that each test starts with what the one before left."""


class Bench:
    """Drives ports for a cycle, models what is taken, checks every answer in its cycle."""

    def __init__(self, dut, name):
        self.dut, self.rng = dut, generator(name)
        self.bytes = CONTENTS
        self.word = {port: np.zeros((P, 16), np.uint8) for port in WRITERS}
        self.strobe = {port: np.zeros((P, 16), bool) for port in WRITERS}
        self.held, self.pending, self.due = {}, {}, {}
        self.t = 0
        self.compared = dict.fromkeys((*PORTS, "dma"), 0)
        self.refused = dict.fromkeys((*PORTS, "dma_read", "dma_write"), 0)
        self.both_committed = 0

    async def start(self):
        inputs = {}
        for port in PORTS:
            offset = "offsets" if port == "weights" else "offset"
            inputs |= {f"{port}__{name}": 0 for name in ("valid", "new", "word", offset)}
        names = ("valid", "commit", "word", "offset", "size_log2", "mask")
        inputs |= {f"{port}__{name}": 0 for port in WRITERS for name in names}
        inputs |= {f"{port}__data__{p}": 0 for port in WRITERS for p in range(P)}
        for port in ("dma_write__0", "dma_read__0"):
            inputs |= {f"{port}__valid": 0, f"{port}__payload": 0}
        await begin(self.dut, **inputs)

    def get(self, name):
        return int(getattr(self.dut, name).value)

    def put(self, name, value):
        getattr(self.dut, name).value = value

    def cells(self, beat):
        """(partition, offset, byte of the beat)."""
        if not beat["across"]:
            return [(beat["partition"], beat["offset"] + i, i) for i in range(8)]
        size = 1 << beat["size_log2"]
        return [
            (beat["partition"] + i // size, beat["offset"] + i % size, i)
            for i in range(8)
            if beat["partition"] + i // size < P
        ]

    def random_beat(self, *, write):
        rng = self.rng
        across, size_log2 = int(rng.integers(2)), int(rng.integers(3))
        span = 8 >> size_log2
        beat = {
            "across": across, "size_log2": size_log2,
            "partition": int(rng.integers(max(1, P // span))) * span if across
            else int(rng.integers(P)),
            "offset": int(rng.integers(16 * WORDS >> size_log2)) << size_log2 if across
            else int(rng.integers(2 * WORDS)) * 8,
        }  # fmt: skip
        if write:
            strobe = int(rng.integers(1, 256)) if rng.random() < 0.5 else 255
            if across:
                strobe &= (1 << min(8, P << size_log2)) - 1
            beat |= {"data": int(rng.integers(1 << 63)), "strobe": strobe}
        return beat

    def check_due(self):
        answered = False
        for port, size, want in self.due.pop(self.t, []):
            if port == "dma":
                answered = True
                answer = unpack(DmaReadData, self.get("dma_read_data__0"))
                assert answer["valid"], f"cycle {self.t}: no DMA data"
                got = [(i, answer["data"] >> 8 * i & 0xFF) for i, _ in want]
                assert got == want, f"cycle {self.t}: DMA read {got}, not {want}"
            else:
                mask = (1 << 8 * size) - 1
                for p in range(P):
                    bits = self.get(f"{port}__data__{p}")
                    got = [bits >> 32 * i & mask for i in range(len(want))]
                    assert got == [int(lane[p]) for lane in want], f"{port} at {self.t}, {p}"
            self.compared[port] += 1
        if not answered:
            assert not self.get("dma_read_data__0") & 1, f"cycle {self.t}: unasked DMA data"

    def offer(self, chances):
        """Choose and drive the inputs of this cycle; returns the vector writes."""
        rng = self.rng
        for port in PORTS:
            if port not in self.pending and rng.random() < chances.get(port, 0):
                size_log2 = int(rng.integers(3))
                lanes = 4 if port == "weights" else 1
                offsets = [int(v) << size_log2 for v in rng.integers(16 >> size_log2, size=lanes)]
                new = port not in self.held or bool(rng.random() < 0.6)
                self.pending[port] = (new, int(rng.integers(WORDS)), offsets, 1 << size_log2)
            command = self.pending.get(port)
            self.put(f"{port}__valid", int(command is not None))
            if command:
                self.put(f"{port}__new", int(command[0]))
                self.put(f"{port}__word", command[1])
                bits = sum(offset << 4 * i for i, offset in enumerate(command[2]))
                self.put(f"{port}__offset" + "s" * (port == "weights"), bits)
        for kind, layout in (("write", SbufBeat(CONFIG)), ("read", SbufReadRequest(CONFIG))):
            key = f"dma_{kind}"
            if key not in self.pending and rng.random() < chances.get(key, 0):
                self.pending[key] = (self.random_beat(write=kind == "write"), self.t)
            self.put(f"{key}__0__valid", int(key in self.pending))
            if key in self.pending:
                self.put(f"{key}__0__payload", pack(layout, self.pending[key][0]))
        puts = {}
        for port in WRITERS:
            if rng.random() < chances.get(port, 0):
                puts[port] = self.vector_put(puts.values())
                for name, value in puts[port].items():
                    if name != "data":
                        self.put(f"{port}__{name}", value)
                for p in range(P):
                    self.put(f"{port}__data__{p}", puts[port]["data"][p])
            self.put(f"{port}__valid", int(port in puts))
        return puts

    def vector_put(self, others):
        """A vector write that does not commit to the bank of another one."""
        rng = self.rng
        size_log2 = int(rng.integers(3))
        put = {
            "commit": int(rng.random() < 0.4), "word": int(rng.integers(WORDS)),
            "offset": int(rng.integers(16 >> size_log2)) << size_log2,
            "size_log2": size_log2, "mask": int(rng.integers(1 << P)),
            "data": [int(v) for v in rng.integers(1 << 32, size=P)],
        }  # fmt: skip
        for other in others:
            if put["commit"] and other["commit"]:
                put["word"] = put["word"] & ~1 | ~other["word"] & 1
                self.both_committed += 1
        return put

    def take(self, puts):
        """Model what is taken in this cycle: all reads see the bytes from before all writes."""
        for port in PORTS:
            if port not in self.pending:
                continue
            if port != "moving" and not self.get(f"{port}__ready"):
                self.refused[port] += 1
                continue
            new, word, offsets, size = self.pending.pop(port)
            if new:
                self.held[port] = self.bytes[:, 16 * word : 16 * word + 16].copy()
            lanes = [
                np.ascontiguousarray(self.held[port][:, at : at + size]).view(f"<u{size}")[:, 0]
                for at in offsets
            ]
            self.due.setdefault(self.t + SBUF_READ_CYCLES, []).append((port, size, lanes))
        written = None
        for key in ("dma_read", "dma_write"):
            if key not in self.pending:
                continue
            beat, since = self.pending[key]
            assert self.t - since < PATIENCE, f"{key} waits for ever"
            if not self.get(f"{key}__0__ready"):
                self.refused[key] += 1
                continue
            del self.pending[key]
            if key == "dma_write":
                written = beat
                continue
            want = [(i, int(self.bytes[p, at])) for p, at, i in self.cells(beat)]
            self.due.setdefault(self.t + DMA_READ_CYCLES, []).append(("dma", 8, want))
        if written:
            for p, at, i in self.cells(written):
                if written["strobe"] >> i & 1:
                    self.bytes[p, at] = written["data"] >> 8 * i & 0xFF
        for port, put in puts.items():
            word, strobe, size = self.word[port], self.strobe[port], 1 << put["size_log2"]
            for p in range(P):
                if put["mask"] >> p & 1:
                    raw = put["data"][p].to_bytes(4, "little")[:size]
                    word[p, put["offset"] : put["offset"] + size] = list(raw)
                    strobe[p, put["offset"] : put["offset"] + size] = True
            if put["commit"]:
                window = self.bytes[:, 16 * put["word"] : 16 * put["word"] + 16]
                window[strobe] = word[strobe]
                strobe[:] = False

    async def run(self, cycles, **chances):
        for _ in range(cycles):
            self.check_due()
            puts = self.offer(chances)
            await settle()
            self.take(puts)
            await cycle(self.dut)
            self.t += 1

    async def drain(self):
        await self.run(PATIENCE)
        assert not self.pending
        assert not self.due


@cocotb.test()
async def test_vector_writes_and_reads(dut):
    bench = Bench(dut, "vector")
    await bench.start()
    for port in range(VECTOR_READ_PORTS):
        reader, writer = VECTOR_READS[port], WRITERS[port % VECTOR_WRITE_PORTS]
        await bench.run(700, **{reader: 0.8, writer: 0.9})
        await bench.drain()
        assert bench.compared[reader] > 400
    await bench.run(1500, **dict.fromkeys(WRITERS, 0.9), **dict.fromkeys(VECTOR_READS, 0.8))
    await bench.drain()
    assert min(bench.compared[port] for port in VECTOR_READS) > 800, bench.compared
    assert min(bench.refused[port] for port in VECTOR_READS[1:]) > 100, bench.refused
    assert bench.both_committed > 100


@cocotb.test()
async def test_dma_writes_and_reads_with_every_strobe(dut):
    bench = Bench(dut, "dma")
    await bench.start()
    await bench.run(1500, dma_write=0.8, dma_read=0.8)
    await bench.drain()
    assert bench.compared["dma"] > 800


@cocotb.test()
async def test_all_ports_at_once(dut):
    bench = Bench(dut, "all")
    await bench.start()
    for chances in (0.3, 0.6, 0.9):
        await bench.run(
            900, moving=chances, weights=0.7, dma_write=0.9, dma_read=0.9,
            **dict.fromkeys(VECTOR_READS, 0.7), **dict.fromkeys(WRITERS, 0.4),
        )  # fmt: skip
        await bench.drain()
    assert min(bench.compared.values()) > 200, bench.compared
    assert min(n for port, n in bench.refused.items() if port != "moving") > 50, bench.refused


@cocotb.test()
async def test_contents_stay_over_a_reset(dut):
    bench = Bench(dut, "reset")
    await bench.start()
    await bench.run(300, dma_write=1)
    await bench.drain()
    dut.rst.value = 1
    await cycle(dut)
    await cycle(dut)
    dut.rst.value = 0
    await bench.run(300, dma_read=0.9, vector_read__0=0.9)
    await bench.drain()
    assert bench.compared["dma"] > 100
    assert bench.compared["vector_read__0"] > 100
