"""Tensor engine against the golden formula: every format, shape, pattern and order of instructions."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.sim import Simulator

from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.formats import (
    BF16,
    CANONICAL_NAN,
    FP8_E3M4,
    FP8_E4M3,
    FP8_E4M3FN,
    FP8_E5M2,
    FP16,
    FP32,
    MATMUL_FORMATS,
    TF32,
)
from makalu.rtl.arch.isa import (
    AccessPattern,
    EventSemaphore,
    Half,
    LoadStationary,
    MatmulMoving,
    Space,
    Update,
    UpdateMode,
)
from makalu.rtl.engines.tensor import MIN_INTERVAL, TensorEngine
from makalu.rtl.interfaces import SBUF_READ_CYCLES

# The reference ------------------------------------------------------------------------------------


class Reference:
    """What the instructions mean: weights, PSUM, and the formula of the processing element."""

    def __init__(self, config, sbuf):
        self.config = config
        self.sbuf = sbuf
        rows, cols = config.rows, config.cols
        self.shadow = np.full((rows, cols), np.nan), np.zeros((rows, cols), bool)
        self.active = self.shadow
        self.loaded = False
        self.psum = np.zeros((cols, config.psum_banks, config.psum_bank_words), np.float32)

    def operand(self, pattern, half):
        """Values and presence (not void) of every element, all partitions."""
        fmt = pattern.dtype
        index = pattern.element_offsets()[:, None] + np.arange(fmt.bytes)
        raw = np.ascontiguousarray(self.sbuf[:, index]).view(fmt.dtype)[:, :, 0]
        with np.errstate(all="ignore"):
            if fmt is FP32 and half != Half.WHOLE:
                bits = raw.view(np.uint32)
                high = (bits & 0xFFFFF000).view(np.float32).astype(np.float64)
                value = raw.astype(np.float64)
                if half == Half.HI:
                    value, present = np.where(np.isnan(value), np.nan, high), np.ones(raw.shape, bool)
                else:
                    low = value - high
                    present = np.isfinite(value) & (low != 0)
                    value = np.where(present, low, 0)
            else:
                value = (TF32 if fmt is FP32 else fmt).decode(raw)
                present = np.full(raw.shape, half != Half.LO)
        partition = np.arange(self.config.partitions)[:, None]
        start, stop = pattern.start_partition, pattern.start_partition + pattern.num_partitions
        return value, present & (partition >= start) & (partition < stop)

    def execute(self, instruction):
        values = instruction.values
        if isinstance(instruction, LoadStationary):
            src = values["src"]
            if src.num_partitions and src.elements:
                value, present = self.operand(src, values["half"])
                self.shadow = self.shadow[0].copy(), self.shadow[1].copy()
                self.shadow[0][:, : src.elements] = value
                self.shadow[1][:, : src.elements] = present
                self.loaded = True
        elif isinstance(instruction, MatmulMoving):
            src, dst = values["src"], values["dst"]
            if not (src.num_partitions and src.elements and dst.num_partitions):
                return
            if self.loaded:
                self.active, self.loaded = self.shadow, False
            moving, moving_present = self.operand(src, values["half"])
            weight, weight_present = self.active
            acc = np.zeros((self.config.cols, src.elements), np.float32)
            with np.errstate(all="ignore"):
                for k in range(self.config.rows):
                    total = acc.astype(np.float64) + np.outer(weight[k], moving[k])
                    present = np.outer(weight_present[k], moving_present[k])
                    acc = np.where(present, total.astype(np.float32), acc)
                for n, offset in enumerate(dst.element_offsets()):
                    bank, byte = divmod(int(offset), self.config.psum_bank_bytes)
                    cell = self.psum[: dst.num_partitions, bank, byte // 4]
                    new = acc[: dst.num_partitions, n]
                    cell[:] = cell + new if values["accumulate"] else new

    def psum_bits(self):
        bits = self.psum.view(np.uint32).copy()
        bits[np.isnan(self.psum)] = CANONICAL_NAN
        return bits


# The bench ----------------------------------------------------------------------------------------


class Resettable(wiring.Component):
    """The engine with a reset of its own, as the core gives it."""

    def __init__(self, *, engine):
        self.engine = engine
        super().__init__({})
        self.reset = Signal()

    def elaborate(self, platform):
        m = Module()
        m.submodules.engine = ResetInserter(self.reset)(self.engine)
        return m


class Run:
    """What happened: cycle numbers by kind of event."""

    def __init__(self):
        self.columns = []  # of each moving command
        self.beats = []  # of each weights command taken
        self.refused = 0
        self.updates = []  # (cycle, semaphore)
        self.counts = {}
        self.cycles = 0

    def intervals(self, n):
        """Cycles between the first columns of successive matmuls of ``n`` columns."""
        return list(np.diff(self.columns[::n]))


class Bench:
    """An engine between an emulated SBUF, an instruction queue and a semaphore unit."""

    def __init__(self, config):
        self.config = config
        self.engine = TensorEngine(config=config)
        self.top = Resettable(engine=self.engine)
        self.job = None
        self.used = False
        self.sim = Simulator(self.top)
        self.sim.add_clock(1e-6)
        self.sim.add_testbench(self._testbench)
        self.sbuf = np.zeros((config.partitions, config.sbuf_bytes), np.uint8)

    async def _testbench(self, ctx):
        await self.job(ctx)

    def fill(self, rng):
        """Bytes that hold every kind of number in every format, infinities and NaN included."""
        self.sbuf[:] = rng.integers(0, 256, self.sbuf.shape, np.uint8)

    def put(self, fmt, offset, values):
        """Store ``values[partition, element]`` from byte ``offset`` of every partition."""
        raw = np.ascontiguousarray(fmt.encode(values)).view(np.uint8)
        self.sbuf[: raw.shape[0], offset : offset + raw.shape[1]] = raw

    def run(self, *programs, rng=None, **options):
        """Run one or more programs, without a reset in between, and compare PSUM at the end."""
        rng = rng or np.random.default_rng(0)
        runs = []
        reference = Reference(self.config, self.sbuf)
        psum = {}

        async def job(ctx):
            for program in programs:
                runs.append(await self.execute(ctx, program, rng=rng, **options))
                for instruction in program:
                    reference.execute(instruction)
            psum["bits"] = self.peek(ctx)

        self.job = job
        if self.used:
            self.sim.reset()
        self.used = True
        self.sim.run()
        np.testing.assert_array_equal(psum["bits"], reference.psum_bits())
        return runs[0] if len(runs) == 1 else runs

    def peek(self, ctx):
        return np.array(
            [
                [[ctx.get(bank[w]) for w in range(self.config.psum_bank_words)] for bank in s.banks]
                for s in self.engine.psum.slices
            ],
            np.uint32,
        )

    async def execute(
        self, ctx, program, *, rng, ready=1.0, gap=0.0, accept=1.0, limit=4000, stop_at=None
    ):
        """Feed ``program`` and return a :class:`Run`.

        ``ready``, ``gap``, ``accept``: probabilities that SBUF takes a weights command, that no
        instruction comes in a cycle, that an update is taken. ``stop_at`` resets the engine then.
        """
        engine, run = self.engine, Run()
        words = [int.from_bytes(i.encode(), "little") for i in program]
        expected = sum(i.update.mode != UpdateMode.NONE for i in program)
        events = {name: 0 for name, _ in engine.events.shape()}
        reads = {}  # cycle of delivery -> (port, bytes per partition)
        held = {}
        ctx.set(engine.instructions.valid, 0)
        offered = False
        for cycle in range(limit):
            if stop_at is not None and cycle == stop_at:
                ctx.set(self.top.reset, 1)
                await ctx.tick()
                ctx.set(self.top.reset, 0)
                return run
            # SBUF: commands of this cycle, data of an earlier one.
            moving_bank = None
            if ctx.get(engine.moving.valid):
                run.columns.append(cycle)
                word = ctx.get(engine.moving.word)
                if ctx.get(engine.moving.new):
                    moving_bank = word & 1
                    held["moving"] = self.sbuf[:, 16 * word : 16 * word + 16]
                data = self.pick(held["moving"], [ctx.get(engine.moving.offset)], rng)
                reads.setdefault(cycle + SBUF_READ_CYCLES, []).append((engine.moving, data))
            if ctx.get(engine.weights.valid):
                word, new = ctx.get(engine.weights.word), ctx.get(engine.weights.new)
                taken = not (new and word & 1 == moving_bank) and rng.random() < ready
                ctx.set(engine.weights.ready, taken)
                run.refused += not taken
                if taken:
                    run.beats.append(cycle)
                    if new:
                        held["weights"] = self.sbuf[:, 16 * word : 16 * word + 16]
                    offsets = [ctx.get(engine.weights.offsets[lane]) for lane in range(4)]
                    data = self.pick(held["weights"], offsets, rng)
                    reads.setdefault(cycle + SBUF_READ_CYCLES, []).append((engine.weights, data))
            for port, data in reads.pop(cycle, ()):
                for p, value in enumerate(data):
                    ctx.set(port.data[p], value)
            # Instructions and updates.
            if not offered and words and rng.random() >= gap:
                ctx.set(engine.instructions.p.word, words[0])
                ctx.set(engine.instructions.valid, 1)
                offered = True
            if offered and ctx.get(engine.instructions.ready):
                words.pop(0)
                taken_instruction = True
            else:
                taken_instruction = False
            ctx.set(engine.update.ready, rng.random() < accept)
            if ctx.get(engine.update.valid) and ctx.get(engine.update.ready):
                run.updates.append((cycle, ctx.get(engine.update.p.semaphore)))
            value = ctx.get(engine.events)
            for name in events:
                events[name] += value[name]
            finished = not words and not offered and not ctx.get(engine.busy)
            await ctx.tick()
            if taken_instruction:
                ctx.set(engine.instructions.valid, 0)
                offered = False
            if finished and len(run.updates) == expected:
                break
        else:
            raise AssertionError(f"not done after {limit} cycles: {len(words)} words left, {run.updates}")
        await ctx.tick().repeat(3)
        run.counts, run.cycles = events, cycle
        return run

    @staticmethod
    def pick(rows, offsets, rng):
        """Elements at ``offsets`` of each partition's word; what lies above them is noise."""
        noise = rng.integers(0, 256, (rows.shape[0], 4), np.uint8)
        padded = np.concatenate([rows, noise], axis=1)
        lanes = np.stack([padded[:, o : o + 4] for o in offsets], axis=1).reshape(rows.shape[0], -1)
        return [int.from_bytes(lane.tobytes(), "little") for lane in lanes]


@cache
def bench(rows=4):
    """One bench for all tests of this size: building one takes seconds."""
    return Bench(TINY if rows == TINY.rows else replace(TINY, rows=rows))


# Programs -----------------------------------------------------------------------------------------


def update(semaphore):
    return Update(semaphore, UpdateMode.ADD, 1)


def load(fmt, offset, dims, partitions=(0, 4), half=Half.WHOLE, semaphore=None):
    return LoadStationary(
        src=AccessPattern(fmt, partitions[0], partitions[1], offset, dims),
        half=half,
        update=None if semaphore is None else update(semaphore),
    )


def matmul(
    fmt, offset, dims, bank=0, word=0, dst=None, partitions=(0, 4), columns=4, half=Half.WHOLE,
    accumulate=0, semaphore=None,
):  # fmt: skip
    elements = AccessPattern(fmt, 0, 1, 0, dims).elements
    return MatmulMoving(
        dst=AccessPattern(
            FP32, 0, columns, bank * TINY.psum_bank_bytes + 4 * word, dst or ((1, elements),),
            Space.PSUM,
        ),
        src=AccessPattern(fmt, partitions[0], partitions[1], offset, dims),
        half=half,
        accumulate=accumulate,
        update=None if semaphore is None else update(semaphore),
    )  # fmt: skip


def test_one_tile(rng):
    b = bench()
    b.fill(rng)
    b.put(BF16, 0, rng.standard_normal((4, 4)))
    b.put(BF16, 64, rng.standard_normal((4, 16)))
    program = [load(BF16, 0, ((1, 4),), semaphore=1), matmul(BF16, 64, ((1, 16),), semaphore=2)]
    run = b.run(program)
    assert [s for _, s in run.updates] == [1, 2]
    assert run.counts["columns"] == 16
    assert run.counts["passes"] == 16 * 16


@pytest.mark.parametrize("fmt", MATMUL_FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_with_every_bit_pattern(fmt, rng):
    b = bench()
    program = []
    b.fill(rng)
    for i in range(8):
        program.append(load(fmt, 16 * i, ((1, 4),)))
        program.append(matmul(fmt, 256 + 64 * i, ((1, 16),), bank=i))
    b.run(program, rng=rng)
