"""The tensor engine between a state buffer in Python and a reader of PSUM."""

from collections import deque

import cocotb
import numpy as np
from makalu.rtl.arch.config import TINY as CONFIG
from makalu.rtl.arch.formats import BF16, FP8_E4M3FN, FP8_E5M2, FP16, FP32
from makalu.rtl.arch.isa import (
    AccessPattern,
    LoadStationary,
    MatmulMoving,
    Space,
    Update,
    UpdateMode,
)
from makalu.rtl.interfaces import PSUM_READ_PORTS, SBUF_READ_CYCLES, Issue
from makalu.rtl.interfaces import Update as UpdatePayload
from pins import add, begin, cycle, fused, generator, pack, settle, unpack

P, ROWS, COLS = CONFIG.partitions, CONFIG.rows, CONFIG.cols
AREA = 512
BANKS, WORDS = CONFIG.psum_banks, CONFIG.psum_bank_words
SUMS = np.zeros((COLS, BANKS, WORDS), np.uint32)
"""What PSUM holds. A reset keeps it: each test starts with what the one before left."""


class Bench:
    """SBUF commands are answered here; PSUM is read through its own port."""

    def __init__(self, dut, name, ready=1.0):
        self.dut, self.rng, self.ready = dut, generator(name), ready
        self.bytes = np.zeros((P, AREA), np.uint8)
        self.psum = SUMS
        self.pipes = {port: deque([None] * SBUF_READ_CYCLES) for port in ("moving", "weights")}
        self.held, self.updates, self.compared, self.refused = {}, [], 0, 0

    def get(self, name):
        return int(getattr(self.dut, name).value)

    def put(self, name, value):
        getattr(self.dut, name).value = value

    async def start(self):
        inputs = {f"{port}__data__{p}": 0 for port in self.pipes for p in range(P)}
        for i in range(PSUM_READ_PORTS):
            inputs |= {f"psum_read__{i}__{name}": 0 for name in ("valid", "bank", "word")}
        await begin(
            self.dut, instructions__valid=0, instructions__payload=0, weights__ready=0,
            psum_busy_others=0, update__ready=0, starving=0, **inputs,
        )  # fmt: skip

    async def step(self):
        """One cycle of SBUF and of the updates."""
        self.put("weights__ready", int(self.rng.random() < self.ready))
        await settle()
        for port, pipe in self.pipes.items():
            pipe.append(None)
            taken = self.get(f"{port}__valid")
            if port == "weights" and taken and not self.get("weights__ready"):
                self.refused += 1
                taken = 0
            if taken:
                word = self.get(f"{port}__word")
                if self.get(f"{port}__new"):
                    self.held[port] = self.bytes[:, 16 * word : 16 * word + 16].copy()
                bits = self.get(f"{port}__offset" + "s" * (port == "weights"))
                lanes = 4 if port == "weights" else 1
                pipe[-1] = [
                    [
                        int.from_bytes(bytes(row[at : at + 4]).ljust(4, b"\xa5"), "little")
                        for at in (bits >> 4 * i & 15 for i in range(lanes))
                    ]
                    for row in self.held[port]
                ]
            answer = pipe.popleft()
            for p in range(P) if answer else ():
                value = sum(lane << 32 * i for i, lane in enumerate(answer[p]))
                self.put(f"{port}__data__{p}", value)
        ready = int(self.rng.random() < 0.7)
        self.put("update__ready", ready)
        if ready and self.get("update__valid"):
            self.updates.append(unpack(UpdatePayload, self.get("update__payload"))["value"])
        await cycle(self.dut)

    async def execute(self, program):
        """Run, then read all of PSUM and compare."""
        expected = [i.update.value for i in program]
        self.updates.clear()
        for instruction in program:
            word = int.from_bytes(instruction.encode(), "little")
            self.put("instructions__payload", pack(Issue, {"word": word}))
            self.put("instructions__valid", 1)
            for _ in range(2000):
                await settle()
                taken = self.get("instructions__ready")
                await self.step()
                if taken:
                    break
            else:
                raise AssertionError("an instruction is never taken")
            self.put("instructions__valid", 0)
        for _ in range(4000):
            if not self.get("busy"):
                break
            await self.step()
        else:
            raise AssertionError("the engine does not finish")
        assert sorted(self.updates) == expected
        assert not self.get("psum_busy_pe")
        pending = deque()
        places = [(bank, word) for bank in range(BANKS) for word in range(min(WORDS, 16))]
        for place in (*places, *[None] * SBUF_READ_CYCLES):
            for i in range(PSUM_READ_PORTS):
                self.put(f"psum_read__{i}__valid", int(place is not None))
                if place:
                    # Every port another bank.
                    self.put(f"psum_read__{i}__bank", (place[0] + i) % BANKS)
                    self.put(f"psum_read__{i}__word", place[1])
            pending.append(place)
            if len(pending) > SBUF_READ_CYCLES:
                first, word = pending.popleft()
                for i in range(PSUM_READ_PORTS):
                    bank = (first + i) % BANKS
                    got = [self.get(f"psum_read__{i}__data__{c}") for c in range(COLS)]
                    want = self.psum[:, bank, word].tolist()
                    assert got == want, f"port {i} bank {bank} word {word}: {got} not {want}"
                    self.compared += COLS
            await cycle(self.dut)

    def values(self, fmt, offset, count):
        """Random finite values at ``offset`` of every partition, as stored."""
        values = self.rng.standard_normal((P, count)) * 2.0 ** self.rng.integers(-3, 4, (P, count))
        codes = np.ascontiguousarray(fmt.encode(values))
        raw = codes.view(np.uint8).reshape(P, -1)
        self.bytes[:, offset : offset + raw.shape[1]] = raw
        return fmt.decode(codes)

    def matmul(self, weights, moving, bank, word, accumulate):
        """Model: rows in order, one rounding each, then PSUM."""
        n = moving.shape[1]
        acc = np.zeros((COLS, n), np.uint32)
        for k in range(ROWS):
            w = np.broadcast_to(weights[k][:, None], acc.shape)
            acc = fused(acc, np.broadcast_to(moving[k], acc.shape), w)
        cell = self.psum[:, bank, word : word + n]
        cell[:] = add(cell, acc) if accumulate else acc


def line(fmt, offset, count, space=Space.SBUF, partitions=P):
    return AccessPattern(fmt, 0, partitions, offset, ((1, count),), space)


async def run_pairs(bench, formats, pairs):
    """Loads and matmuls in turn, over changing formats, banks and lengths."""
    program = []
    for i in range(pairs):
        fmt = formats[i % len(formats)]
        slot = i % 4 * 128  # what is on its way is not overwritten: memory is static in a program
        weights = bench.values(fmt, slot, COLS)
        n = int(bench.rng.integers(1, 9))
        moving = bench.values(fmt, slot + 64, n)
        bank, word = int(bench.rng.integers(BANKS)), int(bench.rng.integers(8))
        accumulate = int(bench.rng.random() < 0.5)
        program += [
            LoadStationary(src=line(fmt, slot, COLS), update=Update(0, UpdateMode.ADD, 2 * i)),
            MatmulMoving(
                dst=line(
                    FP32, bank * CONFIG.psum_bank_bytes + 4 * word, n, Space.PSUM, COLS
                ),
                src=line(fmt, slot + 64, n), accumulate=accumulate,
                update=Update(1, UpdateMode.ADD, 2 * i + 1),
            ),
        ]  # fmt: skip
        bench.matmul(weights, moving, bank, word, accumulate)
        if i % 4 == 3:
            await bench.execute(program)
            program = []


@cocotb.test()
async def test_products_in_every_narrow_format(dut):
    bench = Bench(dut, "formats")
    await bench.start()
    await run_pairs(bench, (BF16, FP16, FP8_E4M3FN, FP8_E5M2), 24)
    assert bench.compared >= 6 * BANKS * COLS


@cocotb.test()
async def test_products_while_sbuf_refuses_weights(dut):
    bench = Bench(dut, "refused", ready=0.4)
    await bench.start()
    await run_pairs(bench, (BF16,), 16)
    assert bench.refused > 5
    assert bench.compared >= 4 * BANKS * COLS
