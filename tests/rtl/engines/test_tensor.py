"""Tensor engine against the golden formula: every format, shape, pattern, order of instructions."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from amaranth.hdl import Fragment, Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.sim import Simulator
from makalu.rtl.arch.config import TINY, TRN
from makalu.rtl.arch.formats import (
    BF16,
    CANONICAL_NAN,
    FP8_E4M3FN,
    FP8_E5M2,
    FP16,
    FP32,
    MATMUL_FORMATS,
    TF32,
)
from makalu.rtl.arch.isa import (
    AccessPattern,
    Engine,
    EventSemaphore,
    Half,
    LoadStationary,
    MatmulMoving,
    Space,
    Update,
    UpdateMode,
)
from makalu.rtl.engines import array, tensor
from makalu.rtl.engines.tensor import MIN_INTERVAL, TensorEngine
from makalu.rtl.interfaces import PSUM_READ_PORTS, SBUF_READ_CYCLES
from makalu.rtl.lib.replicate import Library

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
                    value = np.where(np.isnan(value), np.nan, high)
                    present = np.ones(raw.shape, bool)
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
        self.watched = {}  # semaphore -> data of its read, by partition
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

        self.simulate(job)
        self.psum = psum["bits"]
        np.testing.assert_array_equal(self.psum, reference.psum_bits())
        return runs[0] if len(runs) == 1 else runs

    def simulate(self, job):
        """Run one testbench from the initial state."""
        self.job = job
        if self.used:
            self.sim.reset()
        self.used = True
        self.sim.run()

    def peek(self, ctx):
        return np.array(
            [
                [[ctx.get(bank[w]) for w in range(self.config.psum_bank_words)] for bank in s.banks]
                for s in self.engine.psum.slices
            ],
            np.uint32,
        )

    async def execute(
        self,
        ctx,
        program,
        *,
        rng,
        ready=1.0,
        gap=0.0,
        accept=1.0,
        limit=4000,
        stop_at=None,
        watch=None,
        refuse=None,
    ):
        """Feed ``program`` and return a :class:`Run`.

        ``ready``, ``gap``, ``accept``: probabilities that SBUF takes a weights command, that no
        instruction comes in a cycle, that an update is taken. ``stop_at`` resets the engine then.
        ``watch`` maps a semaphore to a bank and word that are read as soon as its update is seen:
        of an even one by the vector engine's port, of an odd one by the scalar engine's. ``refuse``
        is ``(cycles, beats)``: after so many beats SBUF refuses weights for so many cycles.
        """
        engine, run = self.engine, Run()
        words = [int.from_bytes(i.encode(), "little") for i in program]
        expected = sum(i.update.mode != UpdateMode.NONE for i in program)
        events = {name: 0 for name, _ in engine.events.shape()}
        reads = {}  # cycle of delivery -> (port, bytes per partition)
        held = {}
        watched = {}  # cycle of delivery -> (semaphore, port)
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
                if refuse and len(run.beats) == refuse[1] and run.refused < refuse[0]:
                    taken = False
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
            reading = None
            if ctx.get(engine.update.valid) and ctx.get(engine.update.ready):
                semaphore = ctx.get(engine.update.p.semaphore)
                run.updates.append((cycle, semaphore))
                reading = (watch or {}).get(semaphore)
            for i, port in enumerate(engine.psum_read):
                mine = reading is not None and semaphore % PSUM_READ_PORTS == i
                ctx.set(port.valid, mine)
                if mine:
                    ctx.set(port.bank, reading[0])
                    ctx.set(port.word, reading[1])
                    watched[cycle + SBUF_READ_CYCLES] = semaphore, port
            if cycle in watched:
                semaphore, port = watched.pop(cycle)
                data = [ctx.get(port.data[p]) for p in range(self.config.partitions)]
                run.watched[semaphore] = data
            value = ctx.get(engine.events)
            for name in events:
                events[name] += value[name]
            finished = not words and not offered and not ctx.get(engine.busy)
            await ctx.tick()
            if taken_instruction:
                ctx.set(engine.instructions.valid, 0)
                offered = False
            if finished and len(run.updates) == expected and not watched:
                break
        else:
            raise AssertionError(f"not done after {limit} cycles, {len(words)} words left")
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
def bench():
    """One bench for all tests: building one takes seconds."""
    return Bench(TINY)


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


def random_program(rng, config, count):
    """Loads and matmuls of all shapes, in any order, with updates, on random bytes."""
    rows, words = config.rows, config.psum_bank_words
    program = []
    for i in range(count):
        fmt = MATMUL_FORMATS[rng.integers(len(MATMUL_FORMATS))]
        half = Half(int(rng.integers(3)))
        start = int(rng.integers(rows))
        partitions = (start, int(rng.integers(1, rows - start + 1)))
        if rng.random() < 0.5:
            partitions = (0, rows)
        semaphore = i if rng.random() < 0.7 else None
        offset = int(rng.integers(config.sbuf_bytes // 4, config.sbuf_bytes // 2))
        offset -= offset % fmt.bytes
        step = int(rng.choice([1, 1, 1, 2, -1, 4, 0]))
        if rng.random() < 0.45:
            m = int(rng.integers(1, rows + 1))
            dims = ((step, m),) if m % 2 else ((step, m // 2), (int(rng.integers(-9, 9)), 2))
            program.append(load(fmt, offset, dims, partitions, half, semaphore))
        else:
            n = int(rng.integers(1, words + 1))
            a = max(d for d in range(1, n + 1) if n % d == 0 and d <= 4)
            dims = ((step, n),) if rng.random() < 0.5 else ((step, a), (3, n // a))
            # Forwards, backwards, transposed, or all onto one.
            word, dst = [
                (int(rng.integers(words - n + 1)), ((1, n),)),
                (n - 1, ((-1, n),)),
                (0, ((n // a, a), (1, n // a))),
                (int(rng.integers(words)), ((0, n),)),
            ][rng.choice(4, p=[0.5, 0.2, 0.2, 0.1])]
            program.append(
                matmul(
                    fmt, offset, dims, int(rng.integers(3)), word, dst, partitions,
                    int(rng.integers(1, rows + 1)), half, int(rng.random() < 0.6), semaphore,
                )
            )  # fmt: skip
    return program


# Tests --------------------------------------------------------------------------------------------


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
def test_every_format_with_random_bits(fmt, rng):
    b = bench()
    program = []
    b.fill(rng)
    for i in range(4):
        program.append(load(fmt, 16 * i, ((1, 4),)))
        program.append(matmul(fmt, 256 + 64 * i, ((1, 16),), bank=i))
    b.run(program, rng=rng)


@pytest.mark.parametrize("fmt", [FP8_E4M3FN, BF16], ids=lambda fmt: fmt.name)
def test_formats_may_differ_between_the_operands(fmt, rng):
    b = bench()
    b.fill(rng)
    other = FP8_E5M2 if fmt is FP8_E4M3FN else FP16
    b.run([load(fmt, 0, ((1, 4),)), matmul(other, 256, ((1, 16),))], rng=rng)


@pytest.mark.parametrize(
    "options",
    [{}, {"ready": 0.4, "gap": 0.5, "accept": 0.3}, {"gap": 0.9}],
    ids=["fast", "stalls", "slow-queue"],
)
@pytest.mark.parametrize("part", range(3))
def test_random_programs(options, part, seed):
    rng = np.random.default_rng([seed, part, len(options)])
    b = bench()
    b.fill(rng)
    program = random_program(rng, b.config, 24)
    run = b.run(program, rng=rng, **options)
    seen = [s for _, s in run.updates]
    for kind in (LoadStationary, MatmulMoving):
        ours = [i for i in range(len(program)) if isinstance(program[i], kind)]
        wanted = [i for i in ours if program[i].update.mode != UpdateMode.NONE]
        assert [s for s in seen if s in ours] == wanted


def test_eight_by_eight(seed, monkeypatch):
    """Two quads and two blocks: weights, commands and partial sums pass from one to the next."""
    for module in (array, tensor):
        monkeypatch.setattr(module, "block_rows", lambda config: 4)
    rng = np.random.default_rng(seed)
    b = Bench(replace(TINY, rows=8))
    b.fill(rng)
    b.run(random_program(rng, b.config, 16), rng=rng)


def test_short_tiles_ignore_what_lies_around_them(rng):
    """Every start and number of partitions; the rest of SBUF holds infinities and NaN."""
    b = bench()
    program = []
    values = np.full((4, 16), np.inf)
    values[:, ::2] = np.nan
    for start in range(4):
        for count in range(1, 5 - start):
            i = len(program) // 2
            stationary, moving = np.full((4, 4), np.nan), values.copy()
            stationary[start : start + count] = rng.standard_normal((count, 4))
            moving[start : start + count] = rng.standard_normal((count, 16))
            b.put(BF16, 64 * i, stationary)
            b.put(BF16, 1024 + 64 * i, moving)
            partitions = (start, count)
            program += [
                load(BF16, 64 * i, ((1, 4),), partitions),
                matmul(BF16, 1024 + 64 * i, ((1, 5),), i % 8, 5 * (i // 8), None, partitions),
            ]
    run = b.run(program, rng=rng)
    assert run.intervals(5) == [MIN_INTERVAL] * 9


def test_rows_outside_a_load_are_void(rng):
    """Only the weights' partitions are short: the moving operand meets voids, not older weights."""
    b = bench()
    b.fill(rng)
    b.put(BF16, 0, rng.standard_normal((4, 4)))
    b.put(BF16, 64, np.full((4, 8), np.inf))
    b.run(
        [
            load(BF16, 0, ((1, 4),)),
            matmul(BF16, 64, ((1, 8),), bank=0),
            load(BF16, 0, ((1, 4),), partitions=(1, 2)),
            matmul(BF16, 64, ((1, 8),), bank=1),
            load(BF16, 0, ((1, 4),), half=Half.LO),
            matmul(BF16, 64, ((1, 8),), bank=2),
        ],
        rng=rng,
    )


def test_partitions_of_psum_beyond_the_tile_are_kept(rng):
    b = bench()
    b.fill(rng)
    program = [load(FP16, 0, ((1, 4),)), matmul(FP16, 64, ((1, 16),))]
    for columns in (1, 2, 3):
        program.append(matmul(FP16, 96, ((1, 16),), columns=columns, accumulate=columns & 1))
    b.run(program, rng=rng)


def test_overwriting_ignores_old_nan_and_keeps_the_sign_of_zero():
    b = bench()
    b.sbuf[:] = 0
    b.put(BF16, 0, np.full((4, 4), np.nan))
    b.put(BF16, 16, np.array([[-(2.0**-120)] * 4]))
    b.put(BF16, 64, np.array([[2.0**-60] * 8]))
    one = (0, 1)
    program = [
        load(BF16, 0, ((1, 4),)),
        matmul(BF16, 64, ((1, 8),)),
        load(BF16, 16, ((1, 4),), one),
        matmul(BF16, 64, ((1, 8),), partitions=one),  # rounds to -0
        matmul(BF16, 64, ((1, 4),), partitions=one, accumulate=1),  # -0 + -0
    ]
    b.run(program)
    assert b.psum[0, 0, :9].tolist() == [0x80000000] * 8 + [0]


def test_fp32_in_four_passes(rng):
    """K = 8 on 4 rows: eight accumulations, hidden loads, the design's formula."""
    b = bench()
    b.fill(rng)
    s = (rng.standard_normal((8, 4)) * 2.0 ** rng.integers(-9, 9, (8, 4))).astype(np.float32)
    x = (rng.standard_normal((8, 16)) * 2.0 ** rng.integers(-9, 9, (8, 16))).astype(np.float32)
    s[0, 0], x[1, 1], x[2, 2], s[2, 3] = 1.5, 2.0, np.inf, 0.0  # low halves that are void
    program = []
    for tile in range(2):
        b.put(FP32, 16 * tile, s[4 * tile : 4 * tile + 4])
        b.put(FP32, 64 + 64 * tile, x[4 * tile : 4 * tile + 4])
        for a, c in (
            (Half.LO, Half.LO),
            (Half.LO, Half.HI),
            (Half.HI, Half.LO),
            (Half.HI, Half.HI),
        ):
            program.append(load(FP32, 16 * tile, ((1, 4),), half=a))
            first = not program[1:]
            program.append(
                matmul(FP32, 64 + 64 * tile, ((1, 16),), half=c, accumulate=not first, semaphore=1)
            )
    run = b.run(program, rng=rng)
    assert run.intervals(16) == [16] * 7
    with np.errstate(all="ignore"):
        want = s.astype(np.float64).T @ x.astype(np.float64)
    got = b.psum[:, 0].view(np.float32)
    fine = np.isfinite(want)
    assert not fine[:, 2].any()
    assert np.isnan(got[3, 2])  # 0 x inf
    scale = np.abs(s).astype(np.float64).T @ np.where(np.isfinite(x), np.abs(x), 0).astype(float)
    assert (np.abs(got[fine] - want[fine]) <= scale[fine] * 2.0**-22).all()


def test_one_column_and_long_k(rng):
    """Accumulating onto one address as fast as matmuls can follow each other."""
    b = bench()
    b.put(BF16, 0, rng.standard_normal((4, 96)))
    b.put(BF16, 256, rng.standard_normal((4, 24)))
    program = [
        instruction
        for tile in range(24)
        for instruction in (
            load(BF16, 8 * tile, ((1, 4),)),
            matmul(BF16, 256 + 2 * tile, ((1, 1),), accumulate=tile > 0, semaphore=tile),
        )
    ]
    run = b.run(program, rng=rng)
    assert run.intervals(1) == [MIN_INTERVAL] * 23
    b.run(program, rng=rng, ready=0.5)


def test_swap_between_two_columns(rng):
    """The last column before a swap meets the old weights, the next one the new."""
    b = bench()
    program = []
    for i in range(8):
        b.put(BF16, 16 * i, np.full((4, 4), 2.0**i))
        program += [load(BF16, 16 * i, ((1, 4),)), matmul(BF16, 256, ((1, 8),), bank=i)]
    b.put(BF16, 256, np.ones((4, 8)))
    run = b.run(program, rng=rng)
    assert run.intervals(8) == [8] * 7
    sums = b.psum[:, :, :8].view(np.float32)
    np.testing.assert_array_equal(
        sums, np.broadcast_to(4.0 * 2.0 ** np.arange(8)[:, None], (4, 8, 8))
    )


def test_matmul_without_load_keeps_the_weights(rng):
    b = bench()
    b.fill(rng)
    program = [load(FP16, 0, ((1, 4),)), matmul(FP16, 64, ((1, 16),))]
    for i in range(1, 8):
        program.append(matmul(FP16, 128 + 64 * i, ((1, 16),), bank=i))
    run = b.run(program, rng=rng)
    assert run.intervals(16) == [16] * 7


def test_before_any_load_the_weights_are_void():
    b = bench()
    b.put(BF16, 0, np.full((4, 8), np.nan))
    b.run([matmul(BF16, 0, ((1, 8),))])
    assert not b.psum.any()


def test_an_update_means_that_the_sums_can_be_read(rng):
    b = bench()
    b.fill(rng)
    program, watch = [load(BF16, 0, ((1, 4),))], {}
    for i in range(5):
        program.append(matmul(BF16, 64 + 32 * i, ((1, 6),), bank=i, semaphore=i))
        watch[i] = (i, 5)
    run = b.run(program, rng=rng, watch=watch)
    for i in range(5):
        assert run.watched[i] == b.psum[:, i, 5].tolist()


def test_what_updated_last_does_not_change_who_updates_first():
    b = bench()
    last_was_load = [load(BF16, 0, ((1, 4),)), load(BF16, 0, ((1, 4),), semaphore=1)]
    last_was_matmul = [load(BF16, 0, ((1, 4),)), matmul(BF16, 0, ((1, 6),), semaphore=1)]
    # A matmul and a load that end at about the same time, for some delay in the same cycle.
    both = [
        load(BF16, 0, ((1, 4),)),
        matmul(BF16, 0, ((1, 1),), semaphore=2),
        load(BF16, 0, ((1, 4),), semaphore=3),
    ]
    met = 0
    for delay in range(12, 30):
        found = []
        for before in (last_was_load, last_was_matmul):
            runs = b.run(before, both, refuse=(delay, 1))
            found.append(runs[1].updates)
        assert found[0] == found[1], delay
        (first, _), (second, _) = found[0]
        met += second - first == 1
    assert met


@pytest.mark.parametrize("when", [3, 8, 14, 21, 30])
def test_reset_in_mid_work(when, rng):
    """Whatever was under way leaves no trace but in PSUM; old weights and swaps are gone."""
    b = bench()
    b.fill(rng)
    wild = [
        instruction
        for i in range(4)
        for instruction in (load(FP16, 16 * i, ((1, 4),)), matmul(FP16, 64, ((1, 9),), semaphore=1))
    ]
    tame = [
        matmul(FP16, 64, ((1, 16),), bank=0, semaphore=1),
        load(BF16, 512, ((1, 4),), semaphore=2),
        matmul(BF16, 640, ((1, 16),), bank=1, semaphore=3),
    ]
    out = {}

    async def job(ctx):
        await b.execute(ctx, wild, rng=rng, stop_at=when)
        out["run"] = await b.execute(ctx, tame, rng=rng)
        out["psum"] = b.peek(ctx)

    b.simulate(job)
    reference = Reference(b.config, b.sbuf)
    for instruction in tame:
        reference.execute(instruction)
    np.testing.assert_array_equal(out["psum"][:, :2], reference.psum_bits()[:, :2])
    assert [s for _, s in out["run"].updates] in ([1, 2, 3], [2, 1, 3])


def test_no_elements(rng):
    b = bench()
    b.fill(rng)
    none = [
        load(BF16, 32, ((1, 0),), semaphore=1),
        load(BF16, 32, ((1, 4),), partitions=(0, 0), semaphore=2),
        matmul(BF16, 0, ((1, 0),), semaphore=3),
        EventSemaphore(engine=Engine.PE, update=update(4)),
    ]
    program = [load(BF16, 0, ((1, 4),)), *none, matmul(BF16, 64, ((1, 16),)), *none]
    run = b.run(program, rng=rng)
    assert sorted(s for _, s in run.updates) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_export_defines_each_component_once():
    library = Library()
    pending = [TensorEngine(config=TRN)]
    while pending:
        known = set(library.components)
        Fragment.get(pending.pop(), library)
        pending += [c for name, c in library.components.items() if name not in known]
    assert sorted(library.components) == ["array_edge", "block", "pe", "psum_slice", "quad", "row"]
