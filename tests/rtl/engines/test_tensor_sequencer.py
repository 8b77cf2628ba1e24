"""Cycles of the tensor engine, on the sequencer of the full machine: no bubbles, loads hidden."""

from functools import cache

import numpy as np
import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TRN
from makalu.rtl.arch.formats import BF16, FP8_E4M3, FP32
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
from makalu.rtl.engines.tensor import MIN_INTERVAL, TensorSequencer
from makalu.rtl.interfaces import SBUF_READ_CYCLES

LOAD, MATMUL = 1, 2  # semaphores


class Run:
    """Cycles of everything that was seen."""

    def __init__(self):
        self.taken = []  # instructions
        self.columns = []  # (cycle, byte address)
        self.beats = []  # (cycle, word, offsets by lane)
        self.new_words = 0  # beats for which SBUF reads
        self.controls = []  # (mask, quad) of each beat, when its data come
        self.psum = []  # (cycle, bank, word)
        self.arrivals = []  # moving elements, by control, minus the latency of the data
        self.swaps = []  # the same for swaps
        self.updates = []  # (cycle, semaphore)
        self.busy_pe = []  # by cycle
        self.counts = {}

    def weights(self):
        """Where each weight that reached the array came from, in order: (column, byte address)."""
        return [
            (4 * quad + lane, 16 * word + offsets[lane])
            for (_, word, offsets), (mask, quad) in zip(self.beats, self.controls, strict=True)
            for lane in range(4)
            if mask >> lane & 1
        ]

    def starts(self, n):
        return [cycle for cycle, _ in self.columns[::n]]

    def intervals(self, n):
        return np.diff(self.starts(n)).tolist()


class Bench:
    def __init__(self, config):
        self.config = config
        self.dut = TensorSequencer(config=config)
        self.sim = Simulator(self.dut)
        self.sim.add_clock(1e-6)
        self.sim.add_testbench(self._testbench)
        self.used = False
        self.job = None

    async def _testbench(self, ctx):
        await self.job(ctx)

    def run(self, program, **options):
        result = []

        async def job(ctx):
            result.append(await self.execute(ctx, program, **options))

        self.job = job
        if self.used:
            self.sim.reset()
        self.used = True
        self.sim.run()
        return result[0]

    async def execute(
        self, ctx, program, *, every=4, refuse=None, starving=None, busy_dve=None, accept=None,
        limit=20000,
    ):  # fmt: skip
        """``every``: cycles between instructions. Functions of the cycle give the rest."""
        dut, run = self.dut, Run()
        words = [int.from_bytes(i.encode(), "little") for i in program]
        expected = sum(i.update.mode != UpdateMode.NONE for i in program)
        events = {name: 0 for name, _ in dut.events.shape()}
        next_offer = 0
        for cycle in range(limit):
            if words and cycle >= next_offer:
                ctx.set(dut.instructions.valid, 1)
                ctx.set(dut.instructions.p.word, words[0])
            else:
                ctx.set(dut.instructions.valid, 0)
            if busy_dve:
                ctx.set(dut.psum_busy_others, busy_dve(cycle))
            if starving:
                ctx.set(dut.starving, starving(cycle))
            ctx.set(dut.update.ready, accept(cycle) if accept else 1)
            moving_bank = None
            if ctx.get(dut.moving.valid):
                word = ctx.get(dut.moving.word)
                run.columns.append((cycle, 16 * word + ctx.get(dut.moving.offset)))
                if ctx.get(dut.moving.new):
                    moving_bank = word & 1
            ready = 0
            if ctx.get(dut.weights.valid):
                word, new = ctx.get(dut.weights.word), ctx.get(dut.weights.new)
                ready = not (new and word & 1 == moving_bank) and not (refuse and refuse(cycle))
                if ready:
                    run.new_words += new
                    offsets = [ctx.get(dut.weights.offsets[lane]) for lane in range(4)]
                    run.beats.append((cycle, word, offsets))
            ctx.set(dut.weights.ready, ready)
            if ctx.get(dut.psum.valid):
                run.psum.append((cycle, ctx.get(dut.psum.bank), ctx.get(dut.psum.word)))
            if ctx.get(dut.control.weights.valid):
                weights = ctx.get(dut.control.weights)
                run.controls.append((weights.mask, weights.quad))
                assert run.beats[len(run.controls) - 1][0] == cycle - SBUF_READ_CYCLES
            if ctx.get(dut.control.moving.valid):
                run.arrivals.append(cycle - SBUF_READ_CYCLES)
            if ctx.get(dut.control.swap):
                run.swaps.append(cycle - SBUF_READ_CYCLES)
            if ctx.get(dut.update.valid):
                assert ctx.get(dut.busy), "not busy, although an update waits"
            if ctx.get(dut.update.valid) and ctx.get(dut.update.ready):
                run.updates.append((cycle, ctx.get(dut.update.p.semaphore)))
            if words and cycle >= next_offer and ctx.get(dut.instructions.ready):
                words.pop(0)
                next_offer = cycle + every
                run.taken.append(cycle)
            run.busy_pe.append(ctx.get(dut.psum_busy_pe))
            now = ctx.get(dut.events)
            for name in events:
                events[name] += now[name]
            idle = not words and not ctx.get(dut.busy) and not ctx.get(dut.instructions.valid)
            await ctx.tick()
            if idle and len(run.updates) == expected:
                break
        else:
            raise AssertionError(f"not done after {limit} cycles")
        run.counts = events
        return run


@cache
def bench(config):
    return Bench(config)


def load(config, m, fmt=BF16, offset=0, dims=None, half=Half.WHOLE):
    return LoadStationary(
        src=AccessPattern(fmt, 0, config.rows, offset, dims or ((1, m),)),
        half=half,
        update=Update(LOAD, UpdateMode.ADD, 1),
    )


def matmul(config, n, fmt=BF16, offset=0, bank=0, word=0, accumulate=0, dst=None, m=None):
    return MatmulMoving(
        dst=AccessPattern(
            FP32, 0, m or config.cols, bank * config.psum_bank_bytes + 4 * word, dst or ((1, n),),
            Space.PSUM,
        ),
        src=AccessPattern(fmt, 0, config.rows, offset, ((1, n),)),
        half=Half.WHOLE,
        accumulate=accumulate,
        update=Update(MATMUL, UpdateMode.ADD, 1),
    )  # fmt: skip


def chain(config, count, n, m=None, fmt=BF16, **options):
    """Matmuls that each bring their own weights."""
    m = m or config.cols
    program = []
    for i in range(count):
        program.append(load(config, m, fmt, offset=1024 * fmt.bytes * (i % 4)))
        program.append(matmul(config, n, fmt, offset=8192 * (1 + i % 4), bank=i % 8, **options))
    return program


@pytest.mark.parametrize(
    ("config", "n"),
    [(TRN, 36), (TRN, 40), (TRN, 64), (TRN, 128), (SMALL, 8), (SMALL, 13), (SMALL, 128)],
    ids=lambda x: getattr(x, "name", x),
)
def test_loads_hide_behind_matmuls(config, n):
    run = bench(config).run(chain(config, 8, n))
    assert run.intervals(n) == [n] * 7
    assert len(run.columns) == 8 * n
    assert run.arrivals == [cycle for cycle, _ in run.columns]
    assert len(run.beats) == 8 * config.cols // 4
    assert run.swaps == [start - 1 for start in run.starts(n)]
    assert run.counts["wait_psum"] == run.counts["wait_interval"] == 0
    assert run.counts["columns"] == 8 * n
    assert run.counts["passes"] == 8 * n * config.rows * config.cols


@pytest.mark.parametrize("fmt", [FP8_E4M3, BF16, FP32], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shift", [0, 16, 32, 48])
def test_loads_hide_in_every_format_and_phase(fmt, shift):
    n = TRN.cols // 4 + 4
    program = []
    for i in range(6):
        program.append(load(TRN, TRN.cols, fmt, offset=shift))
        program.append(matmul(TRN, n, fmt, offset=4096, bank=i))
    run = bench(TRN).run(program)
    assert run.intervals(n) == [n] * 5


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 9])
def test_interval_without_loads(n):
    program = [matmul(TRN, n, bank=i % 8) for i in range(8)]
    run = bench(TRN).run(program, every=1)
    assert run.intervals(n) == [max(n, MIN_INTERVAL)] * 7
    assert bool(run.counts["wait_interval"]) == (n < MIN_INTERVAL)


def test_many_short_matmuls_fill_the_pipeline():
    """As many waves as fit between the first column and its update, without waiting for updates."""
    run = bench(TRN).run([matmul(TRN, 6, bank=i % 8) for i in range(70)], every=1)
    assert set(run.intervals(6)) == {6}


@pytest.mark.parametrize("config", [SMALL, TRN], ids=lambda c: c.name)
def test_latencies(config):
    """Every number that the docstring of the sequencer states."""
    dut = bench(config).dut
    run = bench(config).run([matmul(config, 8)])
    (taken,), first, last = run.taken, run.columns[0][0], run.columns[-1][0]
    assert first == taken + 5
    assert [cycle for cycle, _, _ in run.psum] == [c + dut.psum_cycles for c, _ in run.columns]
    assert run.updates == [(last + dut.drain_cycles + 3, MATMUL)]
    held = [cycle for cycle, banks in enumerate(run.busy_pe) if banks]
    assert held[0] == taken + 3
    assert held[-1] == last + dut.drain_cycles
    assert held == list(range(held[0], held[-1] + 1))

    run = bench(config).run([load(config, config.cols), matmul(config, 8)], every=1)
    beats = [cycle for cycle, _, _ in run.beats]
    assert beats == [run.taken[0] + 5 + i for i in range(config.cols // 4)]
    assert run.columns[0][0] == beats[-1] + 3
    assert run.updates[0] == (beats[-1] + 3, LOAD)
    assert run.counts["wait_weights"] == beats[-1] + 1 - (run.taken[1] + 3) + 1


@pytest.mark.parametrize("refusal", ["never", "often", "bursts"])
def test_weights_come_from_their_pattern(refusal, rng):
    """Random patterns of up to four dimensions; the order within a load is free."""
    config = TRN
    refuse = {
        "never": None,
        "often": lambda cycle: rng.random() < 0.5,
        "bursts": lambda cycle: cycle // 9 % 2,
    }[refusal]
    for fmt in (FP8_E4M3, BF16, FP32):
        program, expected = [], []
        for _ in range(5):
            dims = []
            left = config.cols
            for _ in range(rng.integers(1, 5)):
                count = int(rng.integers(1, left + 1)) if rng.random() < 0.7 else min(left, 4)
                step = int(rng.choice([1, 1, 1, -1, 0, 2, 3, -5, 8, 63]))
                dims.append((step, count))
                left //= count
            src = AccessPattern(
                fmt, 0, config.rows, 96 * 1024 + 4 * int(rng.integers(64)), tuple(dims)
            )
            program.append(
                LoadStationary(src=src, half=Half.WHOLE, update=Update(LOAD, UpdateMode.ADD, 1))
            )
            expected.append(list(enumerate(src.element_offsets())))
            if rng.random() < 0.8:
                program.append(matmul(config, int(rng.integers(1, 70)), FP32, bank=0))
        run = bench(config).run(program, refuse=refuse, every=int(rng.integers(1, 5)))
        seen = run.weights()
        for load_ in expected:
            assert sorted(seen[: len(load_)]) == load_
            seen = seen[len(load_) :]
        assert not seen


def test_strided_weights_of_one_word_come_together():
    """Step 2 of BF16: four elements of a word in one cycle; a column of a matrix: one per cycle."""
    run = bench(TRN).run([load(TRN, 128, dims=((2, 128),))])
    assert len(run.beats) == 32
    run = bench(TRN).run([load(TRN, 128, dims=((128, 128),))])
    assert len(run.beats) == 128
    run = bench(TRN).run([load(TRN, 128, offset=2)])
    assert len(run.beats) == 32 + 16  # a quad that straddles two words takes two


@pytest.mark.parametrize(
    ("fmt", "words"), [(FP8_E4M3, 1), (BF16, 2), (FP32, 4)], ids=["bytes", "halves", "words"]
)
def test_weights_of_one_word_are_read_once(fmt, words):
    loads = [load(SMALL, 16, fmt), load(SMALL, 16, fmt)]
    run = bench(SMALL).run(loads)
    assert len(run.beats) == 8
    assert run.new_words == 2 * words  # a load begins with a read, whatever was read before


@pytest.mark.parametrize("fmt", [FP8_E4M3, BF16, FP32], ids=lambda fmt: fmt.name)
def test_moving_operand_and_sums_follow_their_patterns(fmt, rng):
    config = SMALL
    program, columns, sums = [], [], []
    for i in range(20):
        shapes = [(rng.integers(1, 6), rng.integers(1, 5)) for _ in range(2)]
        (a, b), (c, d) = shapes
        steps = rng.integers(-3, 9, 8)
        n = int(a * b * c * d)
        if n > config.psum_bank_words:
            a, b, c, d, n = 2, 2, 3, 4, 48
        src_dims = tuple((int(s), int(k)) for s, k in zip(steps, (a, b, c, d), strict=False))
        dst_dims = ((1, int(a * b)), (int(a * b), int(c * d)))
        src = AccessPattern(fmt, 0, config.rows, 8192 + 4 * int(rng.integers(32)), src_dims)
        bank = int(rng.integers(8))
        dst = AccessPattern(FP32, 0, 3, 512 * bank, dst_dims, Space.PSUM)
        program.append(MatmulMoving(dst=dst, src=src, half=Half.WHOLE, accumulate=i % 2))
        columns += src.element_offsets().tolist()
        sums += [(bank, offset % 512 // 4) for offset in dst.element_offsets().tolist()]
    run = bench(config).run(program)
    assert [address for _, address in run.columns] == columns
    assert [where for _, *where in run.psum] == [list(where) for where in sums]


def test_moving_operand_reads_a_word_once():
    """BF16: one bank access in eight cycles; the others are free for weights and DMA."""
    b = bench(SMALL)
    news = []

    async def job(ctx):
        ctx.set(b.dut.update.ready, 1)
        ctx.set(b.dut.instructions.valid, 1)
        ctx.set(b.dut.instructions.p.word, int.from_bytes(matmul(SMALL, 64).encode(), "little"))
        for _ in range(80):
            await ctx.tick()
            ctx.set(b.dut.instructions.valid, 0)
            news.append(ctx.get(b.dut.moving.new & b.dut.moving.valid))

    b.job = job
    if b.used:
        b.sim.reset()
    b.used = True
    b.sim.run()
    assert sum(news) == 64 * 2 // 16


def test_sums_that_follow_too_closely_are_held_back():
    """Accumulating onto one address in every column: one per three cycles. Backwards over the end
    of the matmul before: only where two columns are less than three apart."""
    n = 8
    run = bench(SMALL).run([matmul(SMALL, n, dst=((0, n),), accumulate=1)])
    assert np.diff([cycle for cycle, *_ in run.psum]).tolist() == [3] * (n - 1)
    run = bench(SMALL).run([matmul(SMALL, n, dst=((0, n),), accumulate=0)])
    assert np.diff([cycle for cycle, *_ in run.psum]).tolist() == [1] * (n - 1)
    forth = matmul(SMALL, n, accumulate=1)
    back = matmul(SMALL, n, word=n - 1, dst=((-1, n),), accumulate=1)
    run = bench(SMALL).run([forth, back], every=1)
    assert np.diff([cycle for cycle, *_ in run.psum]).tolist() == [1] * 7 + [3] + [1] * 7


def test_psum_bank_of_the_vector_engine_is_waited_for():
    free_at = 60
    program = [matmul(SMALL, 8, bank=1), matmul(SMALL, 8, bank=2), matmul(SMALL, 8, bank=3)]
    run = bench(SMALL).run(program, busy_dve=lambda cycle: (1 << 2) * (cycle < free_at))
    starts = run.starts(8)
    assert starts[0] < 20
    assert starts[1] == free_at + 2
    assert starts[2] == starts[1] + 8
    assert run.counts["wait_psum"] > 30
    # It was announced for all that time.
    assert all(banks >> 2 & 1 for banks in run.busy_pe[20 : starts[1] + 8])


def test_both_want_a_bank_in_the_same_cycle():
    """The vector engine, by the rule, takes a bank whose announcement it cannot have seen yet."""
    quiet = bench(SMALL).run([matmul(SMALL, 8)])
    announced = next(cycle for cycle, banks in enumerate(quiet.busy_pe) if banks)
    for delay in (-1, 0):
        taken = announced + delay  # its decision was one cycle before: nothing was announced
        held = range(taken, taken + 20)
        run = bench(SMALL).run([matmul(SMALL, 8)], busy_dve=lambda cycle, held=held: cycle in held)
        assert run.columns[0][0] == taken + 20 + 2


def test_loads_without_matmul_between_do_not_wait_for_each_other():
    program = [load(SMALL, 16, offset=64 * i) for i in range(12)] + [matmul(SMALL, 8)] * 2
    run = bench(SMALL).run(program, every=1)
    assert len(run.beats) == 12 * 4
    assert len(run.swaps) == 1
    assert run.columns[0][0] > run.beats[-1][0]


def test_a_load_waits_for_the_swap_before_it():
    """While a matmul is held back, the next load must leave its weights alone."""
    program = [load(SMALL, 16), matmul(SMALL, 8, bank=1), load(SMALL, 16, offset=64)]
    run = bench(SMALL).run(program, busy_dve=lambda cycle: 2 * (cycle < 80), every=1)
    assert [cycle for cycle, *_ in run.beats][4:] == [run.swaps[0] + i for i in range(4)]
    assert run.swaps[0] > 80


def test_loads_that_wait_keep_their_order():
    """More than the unit and the place before it hold."""
    offsets = [64 * i for i in range(6)]
    first, *others = (load(SMALL, 16, offset=offset) for offset in offsets)
    program = [first, matmul(SMALL, 8, bank=1), *others]
    run = bench(SMALL).run(program, busy_dve=lambda cycle: 2 * (cycle < 80), every=1)
    words = [word for _, word, _ in run.beats]
    assert words == [offset // 16 + i // 2 for offset in offsets for i in range(4)]


def test_no_elements():
    none = [
        load(SMALL, 16, dims=((1, 0), (7, 60000))),
        LoadStationary(src=AccessPattern(BF16, 0, 0, 0, ((1, 16),)), half=Half.WHOLE,
                       update=Update(LOAD, UpdateMode.ADD, 1)),
        matmul(SMALL, 0),
        MatmulMoving(src=AccessPattern(BF16, 0, 0, 0, ((1, 8),)),
                     dst=AccessPattern(FP32, 0, 4, 0, ((1, 8),), Space.PSUM),
                     half=Half.WHOLE, update=Update(MATMUL, UpdateMode.ADD, 1)),
        EventSemaphore(engine=Engine.PE, update=Update(9, UpdateMode.ADD, 1)),
    ]  # fmt: skip
    run = bench(SMALL).run(none)
    assert sorted(s for _, s in run.updates) == [LOAD, LOAD, MATMUL, MATMUL, 9]
    assert not run.columns
    assert not run.beats
    assert not run.swaps
    # They neither take weights away from a matmul nor give it others.
    run = bench(SMALL).run([load(SMALL, 16), *none, matmul(SMALL, 8), *none, matmul(SMALL, 8)])
    assert len(run.columns) == 16
    assert len(run.beats) == 4
    assert run.swaps == [run.columns[0][0] - 1]


def test_updates_in_order_with_back_pressure(rng):
    program = []
    for i in range(30):
        instruction = matmul(SMALL, 6, bank=i % 8) if i % 3 else load(SMALL, 16)
        program.append(instruction.replace(update=Update(i, UpdateMode.SET, i)))
    for i in (4, 9):
        program[i] = program[i].replace(update=Update())
    run = bench(SMALL).run(program, accept=lambda cycle: rng.random() < 0.1, every=1)
    seen = [s for _, s in run.updates]
    assert [s for s in seen if s % 3] == [i for i in range(30) if i % 3 and i != 4]
    assert [s for s in seen if not s % 3] == [i for i in range(0, 30, 3) if i != 9]


def test_starving_dma_gets_one_cycle_between_waves():
    """Only if the moving operand has been reading that bank in every cycle."""
    n = 16
    hog = ((16, n),)  # BF16, 32 bytes: the same bank each time

    def program(dims):
        src = AccessPattern(BF16, 0, SMALL.rows, 0, dims)
        return [matmul(SMALL, n, bank=i).replace(src=src) for i in range(4)]

    run = bench(SMALL).run(program(hog), starving=lambda cycle: 1)
    assert run.intervals(n) == [n + 1] * 3
    run = bench(SMALL).run(program(hog), starving=lambda cycle: 2)
    assert run.intervals(n) == [n] * 3
    run = bench(SMALL).run(program(((1, n),)), starving=lambda cycle: 3)
    assert run.intervals(n) == [n] * 3


def test_beats_overtake_only_within_their_load(rng):
    """Loads of one beat each, in the way of a moving operand of 4-byte elements."""
    offsets = [16 * int(rng.integers(64)) for _ in range(60)]
    loads = [load(SMALL, 4, FP32, offset=offset) for offset in offsets]
    run = bench(SMALL).run([matmul(SMALL, 128, FP32, offset=4096), *loads], every=1)
    assert run.counts["wait_sbuf"]
    assert [address for _, address in run.weights()[::4]] == offsets
    assert [s for _, s in run.updates].count(LOAD) == 60


def test_overtaken_beats_of_every_length(rng):
    """Any beat of a load may be the one that is overtaken, the last one too."""
    program, expected = [], []
    for m in range(4, 68, 4):
        program.append(load(TRN, m, FP32, offset=16 * int(rng.integers(64))))
        expected.append(list(enumerate(program[-1].values["src"].element_offsets())))
        program.append(matmul(TRN, 24, FP32, offset=4096))
    run = bench(TRN).run(program)
    assert run.intervals(24) == [24] * 15
    seen = run.weights()
    assert seen != [weight for weights in expected for weight in weights]  # some were overtaken
    for weights in expected:
        assert sorted(seen[: len(weights)]) == weights
        seen = seen[len(weights) :]
