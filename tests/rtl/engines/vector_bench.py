"""Engines of elements on a real state buffer, compiled to C: the bench and its patterns."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from amaranth.hdl import Module, Signal
from amaranth.lib.wiring import connect
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import (
    AccessPattern,
    Space,
    TensorCopy,
    Update,
    UpdateMode,
)
from makalu.rtl.engines.vector import VectorEngine
from makalu.rtl.interfaces import SBUF_READ_CYCLES
from makalu.rtl.memory.sbuf import Sbuf

from .compiled import Compiled
from .vector_model import execute, unsigned

CONFIG = replace(TINY, sbuf_bytes=1024, psum_bank_bytes=32)
EIGHT_ROWS = replace(TINY, rows=8, sbuf_bytes=1024, psum_bank_bytes=32)
HALF = CONFIG.sbuf_bytes // 2  # sources lie below, destinations above


class Machine:
    """Engines and state buffer, compiled once for all tests of a configuration.

    Attributes
    ----------
    vector : :class:`VectorEngine`
    engines : list of components
        The first one is that which is tested; its ports on SBUF are those of all.
    """

    cache: ClassVar = {}

    def __init__(self, config):
        self.config = config
        self.vector = vector = VectorEngine(config=config)
        self.sbuf = sbuf = Sbuf(config=config)
        self.starving = Signal(2)
        m = Module()
        m.submodules.vector = vector
        m.submodules.sbuf = sbuf
        self.engines = self.join(m)
        first = self.engines[0]
        for i, read in enumerate(first.sbuf_read):
            connect(m, read, sbuf.vector_read[i])
        connect(m, first.sbuf_write, sbuf.vector_write[0])
        for engine in self.engines:
            m.d.comb += engine.starving.eq(sbuf.starving | self.starving)
        inputs = [
            self.starving, vector.psum_busy_others, first.occupied, *vector.psum_read.data,
            sbuf.moving.valid, sbuf.moving.new, sbuf.moving.word,
            sbuf.dma_read[0].valid, sbuf.dma_write[0].valid,
        ]  # fmt: skip
        self.log = {
            "psum": vector.psum_read.valid,
            "bank": vector.psum_read.bank,
            "word": vector.psum_read.word,
            "write": first.sbuf_write.valid,
            "commit": first.sbuf_write.commit,
            "write_word": first.sbuf_write.word,
            "held": vector.psum_busy,
            "dma_read_ready": sbuf.dma_read[0].ready,
            "dma_write_ready": sbuf.dma_write[0].ready,
        }
        self.logs = []  # of each engine
        others = []
        for engine in self.engines:
            inputs += [engine.instructions.valid, engine.instructions.payload, engine.update.ready]
            self.logs.append(
                {
                    "update_valid": engine.update.valid,
                    "update": engine.update.payload,
                    "issue_ready": engine.instructions.ready,
                    "events": engine.events,
                }
            )
            others += [engine.instructions.valid, engine.busy]
            others += [read.valid for read in engine.sbuf_read]
        logged = [value for log in (self.log, *self.logs) for value in log.values()]
        self.ctx = Compiled(m, inputs, logged + others)
        self.banks = {}  # where a bank of a partition is: memory, lane
        for index, memory in enumerate(self.ctx.simulation.model.table["memories"]):
            for lane, path in enumerate(memory["paths"]):
                if found := re.search(r"group(\d+)\.slice(\d+)\.bank(\d+)", path):
                    group, part, bank = map(int, found.groups())
                    self.banks[8 * group + part, bank] = index, lane

    def join(self, m):
        """Add engines beside the vector engine; return all."""
        return [self.vector]

    @classmethod
    def of(cls, config):
        if (cls, config) not in cls.cache:
            cls.cache[cls, config] = cls(config)
        return cls.cache[cls, config]

    def memory(self):
        """Words of the state buffer that can be read and written: ``[partition][bank]``."""
        ctx = self.ctx
        ctx.simulation.touch()
        return [
            [
                ctx.simulation.memory(index)[:, lane]
                for index, lane in (self.banks[p, bank] for bank in range(2))
            ]
            for p in range(self.config.partitions)
        ]


class Side:
    """One engine of a bench: its instructions, and a log of what happened when."""

    def __init__(self, machine, index):
        self.machine = machine
        self.dut, self.signals = machine.engines[index], machine.logs[index]
        self.cycle = 0
        self.reads = []  # cycles in which an element was read
        self.updates = []  # (cycle, semaphore, mode, value)
        self.issues = []
        self.counts = dict.fromkeys(self.dut.events.shape().members, 0)
        self.ready = lambda cycle: True  # of the update port
        self.issued = self.taken = False  # what is driven: instructions.valid, update.ready

    def take(self, ctx):
        self.taken = bool(self.ready(self.cycle))
        ctx.set(self.dut.update.ready, self.taken)

    def look(self, ctx):
        """What the engine shows in this cycle."""
        return SimpleNamespace(**{name: ctx.get(value) for name, value in self.signals.items()})

    def note(self, now):
        """Log the cycle that ends."""
        if now.events.elements:
            self.reads.append(self.cycle - 1)  # the event is registered
        if now.update_valid and self.taken:
            update = now.update
            self.updates.append((self.cycle, update.semaphore, update.mode, update.value))
        if self.issued and now.issue_ready:
            self.issues.append(self.cycle)
        for name in self.counts:
            self.counts[name] += now.events[name]
        self.cycle += 1

    def offer(self, ctx, instruction):
        """Drive the instructions port; ``None``: offer nothing."""
        dut = self.dut
        self.issued = instruction is not None
        ctx.set(dut.instructions.valid, self.issued)
        if self.issued:
            word = int.from_bytes(instruction.encode(), "little")
            ctx.set(dut.instructions.payload, {"word": word, "pc": 0})

    async def issue(self, ctx, instruction):
        self.offer(ctx, instruction)
        for _ in range(2000):
            taken = ctx.get(self.dut.instructions.ready)
            await ctx.tick()
            if taken:
                break
        else:
            raise AssertionError("an instruction is not taken")
        self.offer(ctx, None)

    async def drain(self, ctx, limit=2000):
        for _ in range(limit):
            if not ctx.get(self.dut.busy):
                return
            await ctx.tick()
        raise AssertionError(f"still busy after {limit} cycles")

    async def feed(self, ctx, program, pause=lambda: 0):
        """Issue a program and wait until it is done."""
        for instruction in program:
            for _ in range(pause()):
                await ctx.tick()
            await self.issue(ctx, instruction)
        await ctx.tick()
        await self.drain(ctx)

    def expect_updates(self, program):
        expected = [
            (i.update.semaphore, i.update.mode, i.update.value)
            for i in program
            if i.update.mode != UpdateMode.NONE
        ]
        assert [update[1:] for update in self.updates] == expected


class Bench(Side):
    """The machine's first engine, what the memories hold at first, and what all have in common.

    Attributes
    ----------
    others : list of :class:`Side`
        The machine's other engines.
    """

    machine_class: ClassVar = Machine
    model = staticmethod(execute)

    def __init__(self, config, rng):
        self.config = config
        self.rng = rng
        super().__init__(self.machine_class.of(config), 0)
        self.others = [Side(self.machine, i) for i in range(1, len(self.machine.engines))]
        self.sbuf = self.machine.sbuf
        self.bytes = rng.integers(256, size=(config.partitions, config.sbuf_bytes), dtype=np.uint8)
        self.psum = rng.integers(256, size=(config.partitions, config.psum_bytes), dtype=np.uint8)
        shape = (config.partitions, config.psum_banks, config.psum_bank_words)
        self.psum_words = self.psum.view("<u4").reshape(shape)
        self.psum_line = [None] * (SBUF_READ_CYCLES - 1)
        self.commits = []
        self.held = []  # (cycle, psum_busy)
        self.hook = lambda ctx, now: None  # every cycle

    def pass_cycle(self):
        """Let a cycle pass: log it, answer PSUM reads, take updates."""
        ctx = self.machine.ctx
        now = SimpleNamespace(**{name: ctx.get(value) for name, value in self.machine.log.items()})
        sides = [self, *self.others]
        seen = [side.look(ctx) for side in sides]
        ctx.step()
        self.observe(ctx, now)
        for side, what in zip(sides, seen, strict=True):
            side.note(what)
        self.psum_line.append(self.psum_words[:, now.bank, now.word] if now.psum else None)
        answer = self.psum_line.pop(0)
        if answer is not None:
            for p, value in enumerate(answer):
                ctx.set(self.machine.vector.psum_read.data[p], int(value))
        for side in sides:
            side.take(ctx)

    def observe(self, ctx, now):
        """Log the cycle that ends."""
        if now.psum:
            assert now.held >> now.bank & 1, f"bank {now.bank} is read at {self.cycle}, not held"
        if now.write and now.commit:
            self.commits.append(self.cycle)
        self.held.append((self.cycle, now.held))
        self.hook(ctx, now)

    def load(self):
        for p, banks in enumerate(self.machine.memory()):
            words = self.bytes[p].reshape(-1, 16).view("<u8")
            for b, bank in enumerate(banks):
                bank[:] = words[b::2]

    def memory(self):
        out = np.zeros_like(self.bytes)
        for p, banks in enumerate(self.machine.memory()):
            words = out[p].reshape(-1, 16).view("<u8")
            for b, bank in enumerate(banks):
                words[b::2] = bank
        return out

    def expect(self, program):
        want = self.bytes.copy()
        last = {}
        for instruction in program:
            before = want.copy()
            self.model(instruction, want, self.psum)
            for at in map(tuple, np.argwhere(before != want)):
                last[at] = instruction
        got = self.memory()
        for p, offset in np.argwhere(got != want)[:1]:
            raise AssertionError(
                f"{np.count_nonzero(got != want)} bytes differ; the first is byte {offset} of "
                f"partition {p}: got {got[p, offset]:#x}, expected {want[p, offset]:#x}, "
                f"written by {last.get((p, offset))}"
            )

    def run(self, body):
        ctx = self.machine.ctx
        ctx.restart()
        self.load()
        for side in (self, *self.others):
            side.take(ctx)
        ctx.run(body, self.pass_cycle)

    def execute(self, program, pause=lambda: 0):
        """Issue, drain, compare, for a whole program."""

        async def body(ctx):
            await self.feed(ctx, program, pause)
            # What is complete is in the memory, or reaches it in the next cycle.
            await ctx.tick()
            self.expect(program)
            self.expect_updates(program)

        self.run(body)


def update(i=0):
    return Update(semaphore=i % 200, mode=UpdateMode.ADD, value=1 + i)


def line(fmt, offset, count, *, start=0, partitions=None, step=1, space=Space.SBUF, config=CONFIG):
    partitions = config.partitions if partitions is None else partitions
    return AccessPattern(fmt, start, partitions, offset, ((step, count),), space)


def copy(dst, src, **kwargs):
    return TensorCopy(dst=dst, src=src, **kwargs)


def random_pattern(rng, fmt, low, high, counts):
    """A pattern over ``counts`` whose elements lie in bytes ``low .. high - 1``."""
    size = fmt.bytes
    room = (high - low) // size
    while True:
        steps = [int(s) for s in rng.integers(-9, 10, size=len(counts))]
        if rng.random() < 0.3:
            steps[0] = 1
        spans = [s * (c - 1) for s, c in zip(steps, counts, strict=True)]
        below = -sum(min(0, s) for s in spans)
        above = sum(max(0, s) for s in spans)
        if below + above < room:
            break
    first = int(rng.integers(below, room - above))
    return low + first * size, tuple(zip(steps, counts, strict=True))


def random_starts(rng, config, count):
    """A number of partitions, and ``count`` start partitions for it.

    As the tile rule asks: a tile does not start where it would cross a half or the end.
    """
    quadrant = config.quadrant
    partitions = int(rng.integers(1, config.partitions + 1))
    if partitions > 2 * quadrant:
        starts = [0]
    elif partitions > quadrant:
        starts = [0, 2 * quadrant]
    else:
        starts = [k * quadrant for k in range(4)]
    return partitions, [int(rng.choice(starts)) for _ in range(count)]


def special_codes(rng, src, dst, count):
    """Codes of ``src``: its own corners, the corners of ``dst``, and random ones."""
    values = [0.0, 1.0, 1.5, 2.5, 3.5, 0.5, 0.75, 255.0, 256.0, 127.5, 128.0, 2.0**24 + 1]
    if dst.is_float:
        values += [dst.max, dst.max * (1 + 2.0 ** (-dst.man - 2)), dst.max * 1.5]
        values += [dst.min_subnormal * k for k in (0.25, 0.5, 0.75, 1, 1.5)]
    else:
        values += [dst.max, dst.max + 0.5, dst.max + 1.0, -float(dst.min), 2.0**31, 2.0**32]
    values += [-v for v in values]
    if src.is_float:
        values += [src.max, -src.max, src.min_subnormal, np.inf, -np.inf, np.nan, -np.nan]
        codes = src.encode(np.array(values))
    else:
        codes = src.encode(np.array([*values, float(src.max), float(src.min)]))
    codes = np.ascontiguousarray(codes).view(unsigned(src))
    corners = [0, 1, (1 << src.bits) - 1, 1 << (src.bits - 1), (1 << (src.bits - 1)) - 1]
    codes = np.concatenate([np.array(corners, unsigned(src)), np.unique(codes)])
    if len(codes) > count:
        return rng.permutation(codes)[:count]
    rest = rng.integers(1 << src.bits, size=count - len(codes), dtype=np.uint64)
    return np.concatenate([codes, rest.astype(unsigned(src))])
