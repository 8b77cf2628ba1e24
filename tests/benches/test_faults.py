"""Planted faults: one line of the hardware changed at a time must turn a named check red.

A fault replaces text within one function of :mod:`makalu.rtl`; the function is compiled again and
put in the place of the right one while the check runs. Every check passes without a fault.
"""

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import (
    AccessPattern,
    Engine,
    ErrorCode,
    EventSemaphore,
    LoadStationary,
    Memset,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)
from makalu.rtl.arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES
from makalu.rtl.arith.operand import Kind
from makalu.rtl.control.check import Checker
from makalu.rtl.control.queue import InstructionQueue
from makalu.rtl.control.semaphore import Semaphores
from makalu.rtl.engines.array import Pe, Quad
from makalu.rtl.engines.dma_hbm import HbmWriter
from makalu.rtl.engines.dma_walk import BurstSplitter
from makalu.rtl.engines.vector import LANE_CYCLES, PatternWalker, VectorLane
from makalu.rtl.memory.psum import PsumSlice

from .pins import add, fused, pack, random_sums

# Planting -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """``old`` becomes ``new`` in ``where`` (module below ``makalu.rtl``, colon, name)."""

    check: str
    name: str
    where: str
    old: str
    new: str

    def plant(self, monkeypatch):
        """Put the wrong function in place of the right one, wherever it is used."""
        module_name, _, path = self.where.partition(":")
        module = importlib.import_module(f"makalu.rtl.{module_name}")
        owner, _, name = path.rpartition(".")
        owner = getattr(module, owner) if owner else module
        right = getattr(owner, name)
        text = textwrap.dedent(inspect.getsource(right))
        assert text.count(self.old) == 1, f"{self.old!r} is {text.count(self.old)} times there"
        space = {}
        exec(compile(text.replace(self.old, self.new), f"<{self.name}>", "exec"),
             vars(module), space)  # fmt: skip
        wrong = space[name]
        if owner is not module:
            monkeypatch.setattr(owner, name, wrong)
            return
        users = [
            user for key, user in list(sys.modules.items())
            if key.startswith("makalu.rtl") and getattr(user, name, None) is right
        ]  # fmt: skip
        for user in users:
            monkeypatch.setattr(user, name, wrong)


def simulate(dut, body):
    """Run ``body(ctx, reset)`` on a component that the test can reset."""
    reset = Signal()
    simulator = Simulator(ResetInserter(reset)(dut))
    simulator.add_clock(1e-6)

    async def testbench(ctx):
        await body(ctx, reset)

    simulator.add_testbench(testbench)
    simulator.run()


def word(sig, exp, sign=0, kind=0):
    return sig | (exp & 0x1FF) << 12 | sign << 21 | kind << 22


def value_of(operand):
    sig, exp = operand & 0xFFF, operand >> 12 & 0x1FF
    exp -= 512 * (exp >= 256)
    kind = operand >> 22 & 3
    value = {Kind.INF: np.inf, Kind.NAN: np.nan}.get(kind, np.ldexp(float(sig), exp - 11))
    return -value if operand >> 21 & 1 else value


# Checks -------------------------------------------------------------------------------------------


def check_pe():
    """Values, swaps, loads behind a wave, reset."""
    rng = np.random.default_rng(1)
    void = word(0, 0, kind=Kind.VOID)
    inf, nan, zero = word(0x800, 0, kind=Kind.INF), word(0, 0, kind=Kind.NAN), word(0, 0)
    directed = [  # moving, weight, sum
        (void, word(0x800, 0), 0x3F800000), (inf, zero, 0x3F800000), (nan, inf, 0),
        (inf, word(0x800, 0), 0xFF800000), (word(0xFFF, 127), word(0xFFF, 127), 0),
        (word(0x800, 0), word(0x800, -24), 0x3F800000),
        (word(0x800, 0), word(0x800, -24), 0x3F800001),
        (word(0x801, 0), word(0x801, -24), 0x3F800000), (word(0x800, -75), word(0x801, -75), 0),
        (word(0x800, -60), word(0x800, -80), 0x00000003), (word(0x800, 0, 1), word(0x800, 0), 0),
        (word(0x800, 0, 1), word(0x800, 0, 1), 0x40000000), (zero, word(0x800, 0), 0x80000000),
        (word(0x800, 0, 1), word(0x800, -40), 0x3F800000), (void, inf, 0x80000000),
        (word(0x800, 0), word(0x800, 0), 0x7FC00000),
    ]  # fmt: skip
    for _ in range(40):
        parts = [
            word(int(rng.integers(0x800, 0x1000)), int(rng.integers(-6, 7)), int(rng.integers(2)))
            for _ in range(2)
        ]
        directed.append((*parts, int(random_sums(rng, 1)[0])))
    dut = Pe()
    compared = 0

    async def body(ctx, reset):
        nonlocal compared

        async def one(moving, psum):
            ctx.set(dut.moving.as_value(), moving)
            await ctx.tick()
            ctx.set(dut.moving.as_value(), void)
            ctx.set(dut.psum_in, psum)
            await ctx.tick().repeat(2)
            return ctx.get(dut.psum_out)

        async def load(weight, swap=True):
            ctx.set(dut.weight.as_value(), weight)
            ctx.set(dut.capture, 1)
            await ctx.tick()
            ctx.set(dut.capture, 0)
            ctx.set(dut.swap, swap)
            await ctx.tick()
            ctx.set(dut.swap, 0)

        for x, w, psum in directed:
            await load(w)
            got = await one(x, psum)
            present = Kind.VOID not in (x >> 22 & 3, w >> 22 & 3)
            want = fused(
                np.array([psum], np.uint32),
                np.array([value_of(x)]),
                np.array([value_of(w)]),
                present,
            )
            assert got == int(want[0]), f"{x:#x} * {w:#x} + {psum:#x}: {got:#x}, not {want[0]:#x}"
            compared += 1
        await load(word(0x800, 0))
        await load(word(0x800, 1), swap=False)
        assert await one(word(0x800, 0), 0) == 0x3F800000, "a load took effect without a swap"
        ctx.set(reset, 1)
        await ctx.tick()
        ctx.set(reset, 0)
        assert await one(word(0x800, 0), 0x80000000) == 0x80000000, "the weight outlived a reset"

    simulate(dut, body)
    assert compared == len(directed)


def check_psum():
    """One slice: overwriting, accumulating, neighbours, the mask, reset."""
    rng = np.random.default_rng(2)
    dut = PsumSlice(config=TINY)
    index = 2
    model = {}

    async def body(ctx, reset):
        ctx.set(dut.index, index)

        async def command(bank, where, bits, accumulate, columns, wait=4):
            ctx.set(dut.command, {"valid": 1, "accumulate": accumulate, "bank": bank,
                                  "word": where, "columns": columns})  # fmt: skip
            ctx.set(dut.sum, bits)
            await ctx.tick()
            ctx.set(dut.command.valid, 0)
            await ctx.tick().repeat(wait)

        async def read(bank, where):
            ctx.set(dut.read, {"valid": 1, "bank": bank, "word": where})
            await ctx.tick()
            ctx.set(dut.read.valid, 0)
            await ctx.tick()
            return ctx.get(dut.data)

        for i in range(200):
            where = int(rng.integers(4)), int(rng.integers(4))
            bits = int(random_sums(rng, 1)[0]) if i % 4 else 0x80000000
            accumulate, columns = int(rng.random() < 0.5), int(rng.integers(TINY.partitions + 1))
            await command(*where, bits, accumulate, columns)
            if index < columns:
                old = np.array([model.get(where, 0)], np.uint32)
                new = np.array([bits], np.uint32)
                model[where] = int(add(old, new)[0]) if accumulate else bits
        for bank in range(4):
            for where in range(4):
                got, want = await read(bank, where), model.get((bank, where), 0)
                assert got == want, f"bank {bank} word {where}: {got:#x}, not {want:#x}"
        ctx.set(dut.command, {"valid": 1, "bank": 0, "word": 0, "columns": TINY.partitions})
        ctx.set(dut.sum, 0x12345678)
        await ctx.tick()
        ctx.set(dut.command.valid, 0)
        ctx.set(reset, 1)
        await ctx.tick()
        ctx.set(reset, 0)
        await ctx.tick().repeat(4)
        assert await read(0, 0) == model.get((0, 0), 0), "a command outlived a reset"

    simulate(dut, body)
    assert len(model) > 8


def check_quad():
    """Weights go to their lanes, of their quad only, where the mask says so."""
    dut = Quad(config=TINY)
    one = word(0x800, 0)
    void = word(0, 0, kind=Kind.VOID)

    async def body(ctx, reset):
        async def load(exponents, mask, quad):
            for lane, exp in enumerate(exponents):
                ctx.set(dut.i.lanes[lane].as_value(), word(0x800, exp))
            for name, value in (("load", 1), ("mask", mask), ("quad", quad)):
                ctx.set(getattr(dut.i, name), value)
            await ctx.tick()
            ctx.set(dut.i.load, 0)
            ctx.set(dut.i.swap, 1)
            await ctx.tick()
            ctx.set(dut.i.swap, 0)
            ctx.set(dut.i.moving.as_value(), one)
            await ctx.tick()
            ctx.set(dut.i.moving.as_value(), void)
            await ctx.tick().repeat(3)
            bits = ctx.get(dut.psum_out)
            return [bits >> 32 * lane & 0xFFFFFFFF for lane in range(4)]

        def want(*exponents):
            return [127 + exp << 23 for exp in exponents]

        ctx.set(dut.index, 0)
        assert await load((0, 1, 2, 3), 15, 0) == want(0, 1, 2, 3)
        assert await load((4, 5, 6, 7), 0b0101, 0) == want(4, 1, 6, 3)
        assert await load((8, 8, 8, 8), 15, 1) == want(4, 1, 6, 3)

    simulate(dut, body)


def check_pattern_walker():
    """Addresses of patterns with negative and zero steps."""
    dut = PatternWalker(addr_bits=12)
    rng = np.random.default_rng(3)
    compared = 0

    async def body(ctx, reset):
        nonlocal compared
        for i in range(12):
            fmt = (formats.INT8, formats.BF16, formats.FP32)[i % 3]
            dims = tuple(
                (int(rng.integers(-3, 6)), int(rng.integers(1, 5)))
                for _ in range(int(rng.integers(1, 5)))
            )
            if i == 0:
                dims = ((1, 40), (-2, 2))
            pattern = AccessPattern(fmt, 0, 1, 1024, dims)
            want = [int(at) % 4096 for at in pattern.element_offsets()]
            layout = dut.pattern.shape()
            fields = {"offset": 1024}
            for d in range(4):
                step, count = dims[d] if d < len(dims) else (0, 1)
                fields |= {f"step{d}": step, f"count{d}": count}
            ctx.set(dut.pattern.as_value(), pack(layout, fields))
            ctx.set(dut.size_log2, fmt.bytes.bit_length() - 1)
            ctx.set(dut.load, 1)
            await ctx.tick()
            ctx.set(dut.load, 0)
            ctx.set(dut.advance, 1)
            for k, at in enumerate(want):
                assert ctx.get(dut.address) == at, f"{dims} element {k}"
                moved = k == 0 or at // 16 != want[k - 1] // 16
                assert ctx.get(dut.moved) == moved, f"{dims} element {k}: moved"
                assert ctx.get(dut.last) == (k == len(want) - 1), f"{dims} element {k}: last"
                compared += 1
                await ctx.tick()
            ctx.set(dut.advance, 0)

    simulate(dut, body)
    assert compared > 100


def check_lane():
    """Casts with and without saturation, quadrant shifts, constants, plain copies."""
    dut = VectorLane()
    f32, f16, i8, bf16 = (f.code for f in (formats.FP32, formats.FP16, formats.INT8, formats.BF16))
    big = 0x7149F2CA  # 1e30
    table = [  # src, dst, saturate, copy, shift, bits, wanted
        (f32, f16, 1, 0, 0, big, 0x7BFF), (f32, f16, 0, 0, 0, big, 0x7C00),
        (f32, i8, 1, 0, 1, 0x42FE0000, 127), (f32, bf16, 0, 0, 2, 0x3F808001, 0x3F81),
        (f32, bf16, 0, 0, 3, 0x3F808000, 0x3F80), (f32, f32, 0, 1, 1, 0x7F800001, 0x7F800001),
        (f16, f32, 0, 0, 0, 0x3C00, 0x3F800000), (f32, bf16, 0, 0, 0, 0x3F818000, 0x3F82),
    ]  # fmt: skip

    async def body(ctx, reset):
        for src, dst, saturate, copy, shift, bits, want in table:
            for source in range(3):  # SBUF, PSUM, constant
                for k in range(4):
                    ctx.set(dut.sbuf[k], bits if source == 0 and k == shift else 0x1111)
                    ctx.set(dut.psum[k], bits if source == 1 and k == shift else 0x2222)
                ctx.set(dut.value, bits if source == 2 else 0x3333)
                for name, value in (
                    ("from_psum", source == 1), ("constant", source == 2), ("shift", shift),
                    ("src_dtype", src), ("dst_dtype", dst), ("saturate", saturate), ("copy", copy),
                ):  # fmt: skip
                    ctx.set(getattr(dut, name), int(value))
                await ctx.tick().repeat(LANE_CYCLES)
                width = {f32: 32, i8: 8}.get(dst, 16)
                got = ctx.get(dut.raw) & (1 << width) - 1
                assert got == want, f"{bits:#x} from {src} to {dst}: {got:#x}, not {want:#x}"

    assert LANE_CYCLES == 2 + CAST_IN_CYCLES + CAST_OUT_CYCLES
    simulate(dut, body)


def check_bursts():
    """Bursts cover a run, end at burst boundaries, and wait for ready unchanged."""
    dut = BurstSplitter(config=TINY)
    size = TINY.dma_burst_bytes
    rng = np.random.default_rng(4)
    runs = [(4096 - 5, 300), (size, size), (2 * size + 1, size - 1), (8, 1), (4095, 2)]
    runs += [(int(rng.integers(1 << 20)), int(rng.integers(1, 900))) for _ in range(12)]

    async def body(ctx, reset):
        for address, count in runs:
            ctx.set(dut.i.payload, {"address": address, "bytes": count, "last": 1})
            ctx.set(dut.i.valid, 1)
            await ctx.tick()
            ctx.set(dut.i.valid, 0)
            at, left = address, count
            while left:
                take = min(left, size - at % size)
                ready = int(rng.random() < 0.5)
                ctx.set(dut.o.ready, ready)
                assert ctx.get(dut.o.valid), f"{left} bytes are missing"
                got = ctx.get(dut.o.p.address), ctx.get(dut.o.p.bytes), ctx.get(dut.o.p.last)
                assert got == (at, take, int(take == left)), f"run {address:#x} of {count}: {got}"
                await ctx.tick()
                if ready:
                    at, left = at + take, left - take
            assert not ctx.get(dut.o.valid), "a burst too many"

    simulate(dut, body)


def check_semaphores():
    """Updates of several sources at once, modes, overflow."""
    dut = Semaphores(config=TINY)

    async def body(ctx, reset):
        await ctx.tick().repeat(TINY.semaphores + 4)
        ports = [dut.pe, dut.dve, dut.host, *dut.dma, *dut.queues]
        total = 0
        for round_ in range(3):
            waiting = {}
            for i, port in enumerate(ports):
                value = 1 + i + 16 * round_
                total += value
                ctx.set(port.payload, {"semaphore": 3, "mode": UpdateMode.ADD, "value": value})
                ctx.set(port.valid, 1)
                waiting[i] = port
            for _ in range(40):
                taken = [i for i, port in waiting.items() if ctx.get(port.ready)]
                await ctx.tick()
                for i in taken:
                    ctx.set(waiting.pop(i).valid, 0)
            assert not waiting
        ctx.set(dut.read_index[0], 3)
        await ctx.tick().repeat(3)
        assert ctx.get(dut.read_value[0]) == total
        ctx.set(dut.pe.payload, {"semaphore": 3, "mode": UpdateMode.SET, "value": 0xFFFFFFFF})
        ctx.set(dut.pe.valid, 1)
        await ctx.tick().until(dut.pe.ready)
        ctx.set(dut.pe.valid, 0)
        await ctx.tick().repeat(3)
        assert ctx.get(dut.read_value[0]) == 0xFFFFFFFF, "a set is not a set"
        ctx.set(dut.dve.payload, {"semaphore": 3, "mode": UpdateMode.ADD, "value": 1})
        ctx.set(dut.dve.valid, 1)
        await ctx.tick().until(dut.dve.ready)
        ctx.set(dut.dve.valid, 0)
        assert ctx.get(dut.error.valid), "an overflow is not reported"
        assert ctx.get(dut.error.code) == ErrorCode.SEMAPHORE_OVERFLOW
        await ctx.tick().repeat(3)
        assert ctx.get(dut.read_value[0]) == 0xFFFFFFFF

    simulate(dut, body)


def check_queue():
    """A queue issues every instruction once, in order, when its waits hold and it is taken."""
    dut = InstructionQueue(config=TINY, engine=Engine.PE)
    pattern = AccessPattern(formats.BF16, 0, TINY.partitions, 0, ((1, 4),))
    program = [
        LoadStationary(src=pattern),
        EventSemaphore(engine=Engine.PE, waits=[Wait(1, WaitMode.GE, 5)],
                       update=Update(2, UpdateMode.ADD, 1)),
        LoadStationary(src=pattern, waits=[Wait(1, WaitMode.GE, 5), Wait(3, WaitMode.EQ, 7)]),
        LoadStationary(src=pattern, waits=[Wait(1, WaitMode.EQ, 5)]),
        LoadStationary(src=pattern),
    ]  # fmt: skip
    words = [int.from_bytes(i.encode(), "little") for i in program]
    semaphores = {1: 4, 3: 6}
    seen = []

    async def body(ctx, reset):
        depth, base = TINY.queue_depth, 0x4000
        ctx.set(dut.base, base)
        ctx.set(dut.count, len(words))
        ctx.set(dut.run, 1)
        ctx.set(dut.start, 1)
        await ctx.tick()
        ctx.set(dut.start, 0)
        fetched, verdicts, reading = 0, [], None
        for cycle in range(160):
            if cycle == 60:
                assert len(seen) == 1, "an instruction went although its wait does not hold"
                semaphores[1] = 5
            if cycle == 90:
                assert len(seen) == 2, "only the first of two waits holds"
                semaphores[3] = 7
            ctx.set(dut.fetched, int(fetched < min(len(words), depth)))
            fetched += fetched < min(len(words), depth)
            check = ctx.get(dut.check_want)
            ctx.set(dut.check_take, check)
            verdicts.append(check)
            valid = len(verdicts) > 3 and verdicts[-4]
            ctx.set(dut.verdict_valid, int(valid))
            want = ctx.get(dut.issue_want)
            ctx.set(dut.issue_take, want)
            ctx.set(dut.issue_valid, int(reading is not None))
            if reading is not None:
                ctx.set(dut.word, words[reading % len(words)])
            reading = ctx.get(dut.issue_slot) if want else None
            for i in range(2):
                index = ctx.get(dut.wait_semaphore[i])
                ctx.set(dut.wait_value[i], semaphores.get(index, 0))
            ready = int(cycle % 5 == 4)
            ctx.set(dut.issue.ready, ready)
            ctx.set(dut.update.ready, ready)
            if ctx.get(dut.issue.valid) and ready:
                seen.append((ctx.get(dut.issue.p.pc), ctx.get(dut.issue.p.word)))
            if ctx.get(dut.update.valid) and ready:
                seen.append((base + 128, words[1]))
            await ctx.tick()
        assert seen == [(base + 128 * i, word) for i, word in enumerate(words)]
        assert ctx.get(dut.done)
        assert ctx.get(dut.status.issued) == len(words)

    simulate(dut, body)


def check_writer():
    """Addresses, lengths, strobes and WLAST of write bursts; valid stays until ready; answers."""
    sizes = (TINY.dma_bursts * TINY.dma_burst_bytes,) * 2
    dut = HbmWriter(config=TINY, capacities=sizes)
    rng = np.random.default_rng(5)
    burst_bytes = TINY.dma_burst_bytes
    plans = [(0x1000, 8), (0x1003, 1), (0x2FFD, 6), (0x800, burst_bytes + 8), (0x7F9, 40)]
    plans += [(int(rng.integers(1 << 16)), int(rng.integers(1, 200))) for _ in range(8)]

    async def body(ctx, reset):
        axi = dut.axi
        for b in range(2):
            ctx.set(dut.available[b], sizes[b])
        for number, (address, count) in enumerate(plans):
            addresses, beats, want, strobes = [], [], [], []
            at, end = address, address + count
            while at < end:
                stop = min(end, at // burst_bytes * burst_bytes + burst_bytes)
                first = at & ~7
                want.append((first, (stop - first + 7) // 8 - 1))
                for word in range(first, stop, 8):
                    strobe = sum(1 << i for i in range(8) if at <= word + i < stop)
                    strobes.append((strobe, int(word + 8 >= stop)))
                at = stop
            bad = number == len(plans) - 1
            ctx.set(dut.i.payload, {"address": address, "bytes": count})
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)
            owed, dones, errors, offered = 0, 0, 0, None
            for _ in range(200):
                aw, w = int(rng.random() < 0.4), int(rng.random() < 0.6)
                ctx.set(axi.awready, aw)
                ctx.set(axi.wready, w)
                ctx.set(axi.bvalid, int(owed > 0))
                ctx.set(axi.bresp, 2 * bad)
                address_now = (ctx.get(axi.awaddr), ctx.get(axi.awlen))
                valid = ctx.get(axi.awvalid)
                assert offered is None or (valid and address_now == offered), "AW was withdrawn"
                offered = address_now if valid and not aw else None
                if valid and aw:
                    addresses.append(address_now)
                dones += ctx.get(dut.done.valid)
                errors += ctx.get(dut.error.valid)
                owed -= ctx.get(axi.bvalid & axi.bready)
                if ctx.get(axi.wvalid) and w:
                    beats.append((ctx.get(axi.wstrb), ctx.get(axi.wlast)))
                    owed += beats[-1][1]
                await ctx.tick()
            assert addresses == want, f"{count} bytes at {address:#x}"
            assert beats == strobes, f"{count} bytes at {address:#x}"
            assert (dones, errors > 0) == ((0, True) if bad else (1, False))

    simulate(dut, body)


def check_checker():
    """Legal and illegal words on both sides of every limit."""
    dut = Checker(config=TINY)
    top, n = TINY.sbuf_bytes, TINY.partitions

    def fill(fmt, offset, *dims, start=0, partitions=n, update=None):
        dst = AccessPattern(fmt, start, partitions, offset, dims)
        return Memset(dst=dst, value=0, **({"update": update} if update else {}))

    legal, out = ErrorCode.NONE, ErrorCode.OUT_OF_RANGE
    table = [
        (fill(formats.INT8, top - 4, (1, 4)), legal), (fill(formats.INT8, top - 4, (1, 5)), out),
        (fill(formats.BF16, 6, (-1, 4)), legal), (fill(formats.BF16, 6, (-1, 5)), out),
        (fill(formats.BF16, 7, (1, 1)), out),
        (fill(formats.INT8, 0, (1, 1), partitions=n + 1), ErrorCode.BAD_PARTITION),
        (fill(formats.INT8, 0, (1, 1), update=Update(TINY.semaphores - 1, UpdateMode.ADD, 1)),
         legal),
    ]  # fmt: skip
    source = AccessPattern(formats.BF16, 0, n, 0, ((1, 4),))
    table.append((LoadStationary(src=source), ErrorCode.ILLEGAL_OPCODE))

    async def body(ctx, reset):
        for instruction, code in table:
            word = int.from_bytes(instruction.encode(), "little")
            ctx.set(dut.i.payload, {"queue": Engine.DVE, "word": word})
            ctx.set(dut.i.valid, 1)
            await ctx.tick()
            ctx.set(dut.i.valid, 0)
            verdicts = []
            for _ in range(Checker.LATENCY_CYCLES + 2):
                if ctx.get(dut.o.valid):
                    verdicts.append(ctx.get(dut.o.p.code))
                await ctx.tick()
            assert verdicts == [code], f"{instruction}: {verdicts}, not {code!r}"

    simulate(dut, body)


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}

# Faults -------------------------------------------------------------------------------------------

FMA, ARRAY, PSUM, WALK = "arith.fma:", "engines.array:", "memory.psum:", "engines.dma_walk:"
VECTOR, QUEUE = "engines.vector:", "control.queue:InstructionQueue.elaborate"
SEMAPHORE = "control.semaphore:Semaphores.elaborate"
SLICE, SPLIT = PSUM + "PsumSlice.elaborate", WALK + "BurstSplitter.elaborate"
PATTERN, LANE = VECTOR + "PatternWalker.elaborate", VECTOR + "VectorLane.elaborate"

HBM, CHECK = "engines.dma_hbm:HbmWriter.", "control.check:_Operand.elaborate"

FAULTS = [
    Fault("pe", "void ignored", FMA + "product", "is_void.eq(kind == Kind.VOID)", "is_void.eq(0)"),
    Fault("pe", "sign of the weight ignored", FMA + "product", "x.sign ^ w.sign", "x.sign"),
    Fault("pe", "infinity times zero is a number", FMA + "product", " | (inf & ~number)", ""),
    Fault("pe", "sticky bit lost", FMA + "align_add", "kept | (lost != 0)", "kept"),
    Fault("pe", "infinities do not cancel to NaN", FMA + "align_add",
          " | (term.inf & c.inf & opposite)", ""),
    Fault("pe", "rounding dropped", FMA + "round_sum",
          "mag + mag[drop] + ((1 << (drop - 1)) - 1)", "mag"),
    Fault("pe", "ties not to even", FMA + "round_sum", "mag + mag[drop] +", "mag + 1 +"),
    Fault("pe", "canonical NaN wrong", FMA + "round_sum", "CANONICAL_NAN", "0x7FC00001"),
    Fault("pe", "overflow wraps", FMA + "round_sum",
          "Mux(packed >= 0x7F800000, 0x7F800000, packed)", "packed"),
    Fault("pe", "subnormals not shifted back", FMA + "round_sum", "Mux(left[-1], -left, 0)", "0"),
    Fault("pe", "stale weight: swap ignored", ARRAY + "Pe.elaborate",
          "m.If(self.swap)", "m.If(self.swap & 0)"),
    Fault("pe", "load overwrites the active weight", ARRAY + "Pe.elaborate",
          "shadow.eq(self.weight)", "[shadow.eq(self.weight), active.eq(self.weight)]"),
    Fault("pe", "reset keeps the weight", ARRAY + "Pe.elaborate",
          'active = Signal(Operand, init={"kind": Kind.VOID})',
          'active = Signal(Operand, init={"kind": Kind.VOID}, reset_less=True)'),
    Fault("psum", "accumulate dropped", SLICE, "s1_accumulate.eq(command.accumulate)",
          "s1_accumulate.eq(0)"),
    Fault("psum", "wrong bank bit", SLICE, "(s2_where.bank == b)", "((s2_where.bank ^ 1) == b)"),
    Fault("psum", "wrong word bit", SLICE, "writer.addr.eq(s2_where.word)",
          "writer.addr.eq(s2_where.word & ~1)"),
    Fault("psum", "partition mask off by one", SLICE, "self.index < command.columns",
          "self.index <= command.columns"),
    Fault("psum", "minus zero lost on overwriting", SLICE, "_IDENTITY", "0"),
    Fault("psum", "reset keeps a valid flag", SLICE, "s1_valid, s2_valid = Signal(), Signal()",
          "s1_valid, s2_valid = Signal(reset_less=True), Signal(reset_less=True)"),
    Fault("quad", "weight lanes swapped", ARRAY + "Quad.elaborate", "self.o.lanes[lane]",
          "self.o.lanes[lane ^ 1]"),
    Fault("quad", "lane mask ignored", ARRAY + "Quad.elaborate", "mine & self.o.mask[lane]",
          "mine"),
    Fault("quad", "number of the quad ignored", ARRAY + "Quad.elaborate",
          " & (self.o.quad == self.index)", ""),
    Fault("pattern_walker", "sign of the step", PATTERN, "base[i] + step[i]", "base[i] - step[i]"),
    Fault("pattern_walker", "strides of two dimensions swapped", PATTERN,
          'self.pattern[f"step{i}"]', 'self.pattern[f"step{i ^ 1}"]'),
    Fault("pattern_walker", "element size ignored", PATTERN, " << self.size_log2", ""),
    Fault("pattern_walker", "count off by one", PATTERN, "left[i].eq(loaded)",
          "left[i].eq(loaded + 1)"),
    Fault("pattern_walker", "word boundary missed", PATTERN, "following[4:] != self.address[4:]",
          "following[5:] != self.address[5:]"),
    Fault("lane", "saturate ignored", LANE, "cast_out.saturate.eq(self.saturate)",
          "cast_out.saturate.eq(0)"),
    Fault("lane", "quadrant shift ignored", LANE, "Mux(self.shift[1], pairs[1], pairs[0])",
          "pairs[0]"),
    Fault("lane", "copy through the cast", LANE, "Mux(self.copy, bits, cast_out.raw)",
          "cast_out.raw"),
    Fault("lane", "PSUM and SBUF swapped", LANE, "Mux(self.from_psum, psum, sbuf)",
          "Mux(self.from_psum, sbuf, psum)"),
    Fault("bursts", "burst boundary, and 4 KiB, ignored", SPLIT,
          "room.eq(burst - run.address[:bits])", "room.eq(burst)"),
    Fault("bursts", "burst length off by one", SPLIT, "room.eq(burst - run.address[:bits])",
          "room.eq(burst - run.address[:bits] - 1)"),
    Fault("bursts", "last burst of a full run not last", SPLIT, "run.bytes <= room",
          "run.bytes < room"),
    Fault("bursts", "ready ignored", SPLIT, "m.Elif(self.o.ready)", "m.Else()"),
    Fault("bursts", "every burst is the last", SPLIT, "ends & run.last", "run.last"),
    Fault("semaphores", "update lost: all sources taken at once", SEMAPHORE,
          "port.ready.eq(turn.grant[i] & take)", "port.ready.eq(take)"),
    Fault("semaphores", "set adds", SEMAPHORE,
          "Mux(chosen.mode == UpdateMode.ADD, total, chosen.value)", "total"),
    Fault("semaphores", "overflow not reported", SEMAPHORE, " & total[32]", " & 0"),
    Fault("queue", "GE read as GT", QUEUE, "seen >= wanted", "seen > wanted"),
    Fault("queue", "second wait ignored", QUEUE, "holds.all()", "holds[0]"),
    Fault("queue", "skips an instruction", QUEUE, "self.issue_slot + self.issue_take",
          "self.issue_slot + self.issue_take + self.issue_take"),
    Fault("queue", "ready of the engine ignored", QUEUE, "taken.eq(self.issue.ready)",
          "taken.eq(1)"),
    Fault("queue", "counter counts twice", QUEUE, "issued.eq(issued + 1)", "issued.eq(issued + 2)"),
    Fault("queue", "address does not advance", QUEUE, "pc.eq(pc + WORD_BYTES)", "pc.eq(pc)"),
    Fault("writer", "AXI length off by one", "engines.dma_hbm:_words_minus_one", "count + 7",
          "count + 8"),
    Fault("writer", "AWVALID dropped before AWREADY", HBM + "_addresses", "m.Elif(axi.awready)",
          "m.Else()"),
    Fault("writer", "byte strobes of later beats wrong", "engines.dma_hbm:_Beats.__init__",
          "Mux(started, 0, phase)", "phase"),
    Fault("writer", "WLAST in every beat", HBM + "_data", "pipe.i.p.about.eq(beat.ends)",
          "pipe.i.p.about.eq(1)"),
    Fault("writer", "done after the first response", HBM + "elaborate",
          "answered & head.last & ~axi.bresp[1]", "answered & ~axi.bresp[1]"),
    Fault("writer", "write error ignored", HBM + "elaborate",
          "self.error.valid.eq(answered & axi.bresp[1])", "self.error.valid.eq(0)"),
    Fault("checker", "range check off by one", CHECK, "high_byte >= space_bytes",
          "high_byte > space_bytes"),
    Fault("checker", "elements below the memory", CHECK, "(low_byte < 0)", "(low_byte < -2)"),
    Fault("checker", "alignment not checked", CHECK, "| misaligned",
          "| (misaligned & 0)"),
    Fault("checker", "last partition refused", CHECK, "start + count > config.partitions",
          "start + count >= config.partitions"),
    Fault("checker", "partition beyond the last accepted", CHECK,
          "start + count > config.partitions", "start + count > config.partitions + 1"),
    Fault("checker", "instruction of another queue accepted", "control.check:_Fixed.elaborate",
          '~on_this_queue | (header("engine") != self.queue)', "0"),
]  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_without_a_fault(name):
    CHECKS[name]()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.name}")
def test_fault_is_noticed(fault, monkeypatch):
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[fault.check]()


def test_there_are_enough_faults():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
    assert {fault.check for fault in FAULTS} == set(CHECKS)
