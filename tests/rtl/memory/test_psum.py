"""PSUM against binary32 addition in numpy: commands rippling, reads beside them, reset."""

from dataclasses import replace

import numpy as np
import pytest
from amaranth.hdl import Fragment, ResetInserter, Signal
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.formats import CANONICAL_NAN
from makalu.rtl.interfaces import PSUM_READ_PORTS, SBUF_READ_CYCLES
from makalu.rtl.lib.replicate import Library
from makalu.rtl.memory.psum import PSUM_RAW_CYCLES, Psum

SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, CANONICAL_NAN, 0x7F7FFFFF, 0x00800000],
    np.uint32,
)


def random_sums(rng, shape):
    """Canonical binary32 bits: every exponent, some near each other, some special."""
    bits = rng.integers(0, 1 << 32, shape, np.uint32)
    near = (rng.standard_normal(shape) * 8).astype(np.float32).view(np.uint32)
    bits = np.where(rng.random(shape) < 0.6, near, bits)
    bits = np.where(rng.random(shape) < 0.1, rng.choice(SPECIAL, shape), bits)
    return np.where(np.isnan(bits.view(np.float32)), CANONICAL_NAN, bits).astype(np.uint32)


def add(a, b):
    with np.errstate(all="ignore"):
        total = a.view(np.float32) + b.view(np.float32)
    return np.where(np.isnan(total), CANONICAL_NAN, total.view(np.uint32)).astype(np.uint32)


class Bench:
    """Drives columns of sums with the skew of the array, and reads, cycle by cycle."""

    def __init__(self, config):
        self.config = config
        self.dut = Psum(config=config)

    def run(self, script):
        """``script(cycle)`` gives ``(command, sums, reads)``, each or all ``None``.

        ``reads`` maps ports to a bank and word; answers are by cycle and port. The run ends 40
        cycles after the script.
        """
        config, dut = self.config, self.dut
        answers = {}

        async def testbench(ctx):
            skewed = {}  # cycle -> {partition: sum}
            expected = {}
            idle, cycle = 0, 0
            while idle < 40:
                step = script(cycle)
                if step is None:
                    idle += 1
                command, sums, reads = step or (None, None, None)
                ctx.set(dut.command.valid, command is not None)
                if command is not None:
                    ctx.set(dut.command, {"valid": 1, **command})
                    for p in range(config.partitions):
                        skewed.setdefault(cycle + 1 + p // 4, {})[p] = int(sums[p])
                now = skewed.pop(cycle, {})
                word = sum(now.get(p, 0xDEADBEEF) << 32 * p for p in range(config.partitions))
                ctx.set(dut.sums, word)
                for i, port in enumerate(dut.read):
                    read = (reads or {}).get(i)
                    ctx.set(port.valid, read is not None)
                    if read is not None:
                        ctx.set(port.bank, read[0])
                        ctx.set(port.word, read[1])
                        expected[cycle + SBUF_READ_CYCLES, i] = cycle
                    if (cycle, i) in expected:
                        answers[expected.pop((cycle, i)), i] = np.array(
                            [ctx.get(port.data[p]) for p in range(config.partitions)], np.uint32
                        )
                await ctx.tick()
                cycle += 1
            self.memory = np.array(
                [
                    [[ctx.get(bank[w]) for w in range(config.psum_bank_words)] for bank in s.banks]
                    for s in dut.slices
                ],
                np.uint32,
            )

        sim = Simulator(dut)
        sim.add_clock(1e-6)
        sim.add_testbench(testbench)
        sim.run()
        return answers


def test_random_traffic(rng):
    """Commands as close as the rule allows, to all banks; every port reads another bank."""
    config = replace(TINY, rows=8, psum_banks=4)
    b = Bench(config)
    model = np.zeros((8, 4, config.psum_bank_words), np.uint32)
    recent = []
    reads = {}

    def script(cycle):
        if cycle >= 400:
            return None
        command, sums = None, None
        if rng.random() < 0.8:
            accumulate = int(rng.random() < 0.7)
            bank, word = int(rng.integers(4)), int(rng.integers(3))
            too_close = (bank, word) in recent[-(PSUM_RAW_CYCLES - 1) :]
            if not (accumulate and too_close):
                columns = int(rng.integers(0, 9))
                sums = random_sums(rng, 8)
                command = {
                    "accumulate": accumulate, "bank": bank, "word": word, "columns": columns,
                }  # fmt: skip
                cell = model[:columns, bank, word]
                new = sums[:columns]
                model[:columns, bank, word] = add(cell, new) if accumulate else new
        recent.append(None if command is None else (command["bank"], command["word"]))
        # Banks that no command is in, nor was lately.
        busy = {where[0] for where in recent[-12:] if where}
        quiet = rng.permutation([bank for bank in range(4) if bank not in busy])
        now = {}
        for i, bank in zip(rng.permutation(PSUM_READ_PORTS), quiet, strict=False):
            now[int(i)] = where = int(bank), int(rng.integers(3))
            reads[cycle, int(i)] = where, model[(slice(None), *where)].copy()
        return command, sums, now

    answers = b.run(script)
    np.testing.assert_array_equal(b.memory, model)
    assert answers.keys() == reads.keys()
    assert all(sum(i == port for _, port in reads) > 5 for i in range(PSUM_READ_PORTS))
    for (cycle, i), (where, want) in reads.items():
        message = f"cycle {cycle}, port {i}, {where}"
        np.testing.assert_array_equal(answers[cycle, i], want, err_msg=message)


def test_every_port_reads_any_bank_beside_the_others(rng):
    """All pairs of different banks in one cycle after the other, while a sum enters a third."""
    config = replace(TINY, psum_banks=4)
    b = Bench(config)
    places = [(bank, word) for bank in range(4) for word in range(2)]
    sums = {where: random_sums(rng, 4) for where in places}
    fill = [({"accumulate": 0, "bank": b, "word": w, "columns": 4}, sums[b, w]) for b, w in places]
    pairs = [(x, y) for x in places for y in places if x[0] != y[0]]
    rng.shuffle(pairs)
    start = len(fill) + b.dut.write_cycles

    def script(cycle):
        if cycle < start:
            return (*(fill[cycle] if cycle < len(fill) else (None, None)), None)
        if cycle >= start + len(pairs):
            return None
        reads = dict(enumerate(pairs[cycle - start]))
        other = next(bank for bank in range(4) if all(bank != read[0] for read in reads.values()))
        command = {"accumulate": 0, "bank": other, "word": 5, "columns": 4}
        return command, sums[0, 0], reads

    answers = b.run(script)
    for n, pair in enumerate(pairs):
        for i, where in enumerate(pair):
            message = f"{pair}, port {i}"
            np.testing.assert_array_equal(answers[start + n, i], sums[where], err_msg=message)


@pytest.mark.parametrize("port", range(PSUM_READ_PORTS))
@pytest.mark.parametrize("late", [0, 1, 5])
def test_a_read_sees_a_sum_as_soon_as_documented(late, port, rng):
    config = replace(TINY, rows=8)
    b = Bench(config)
    sums = random_sums(rng, 8)
    at = b.dut.write_cycles + late

    def script(cycle):
        command = {"accumulate": 1, "bank": 2, "word": 3, "columns": 8} if cycle == 0 else None
        return (command, sums, {port: (2, 3)} if cycle == at else None) if cycle <= at else None

    answers = b.run(script)
    np.testing.assert_array_equal(answers[at, port], add(sums, np.zeros(8, np.uint32)))


def test_accumulating_at_the_shortest_distance(rng):
    b = Bench(TINY)
    columns = [random_sums(rng, 4) for _ in range(40)]
    total = np.full(4, 0x80000000, np.uint32)
    for i, sums in enumerate(columns):
        total = add(total, sums) if i else sums

    def script(cycle):
        i, rest = divmod(cycle, PSUM_RAW_CYCLES)
        if i >= len(columns):
            return None
        command = {"accumulate": i > 0, "bank": 1, "word": 0, "columns": 4}
        return (command, columns[i], None) if rest == 0 else (None, None, None)

    b.run(script)
    np.testing.assert_array_equal(b.memory[:, 1, 0], total)


def test_overwriting_is_exact_whatever_was_there():
    """Old NaN and infinities do not matter; -0 stays -0."""
    b = Bench(TINY)
    values = [CANONICAL_NAN, 0x80000000, 0x7F800000, 0, 0xFF800000, 0x80000000, 1]

    def script(cycle):
        if cycle >= len(values):
            return None
        command = {"accumulate": 0, "bank": 0, "word": 5, "columns": 4}
        return command, [values[cycle]] * 4, None

    for count in (2, 3, len(values)):
        values, rest = values[:count], values[count:]
        b.run(script)
        assert b.memory[:, 0, 5].tolist() == [values[-1]] * 4
        values += rest


@pytest.mark.parametrize("when", range(6))
def test_nothing_is_written_after_a_reset(when):
    """``when`` cycles after a command for every partition."""
    config = replace(TINY, rows=8)
    dut, reset = Psum(config=config), Signal()
    cells = [bank[w] for part in dut.slices for bank in part.banks for w in range(4)]
    where = [part.banks[1][2] for part in dut.slices]
    states = []

    async def testbench(ctx):
        for i, cell in enumerate(cells):
            ctx.set(cell, 0x3F800000 + i)
        for p in range(config.partitions):
            ctx.set(dut.sums.word_select(p, 32), 0x12340000 + p)
        ctx.set(dut.command, {"valid": 1, "bank": 1, "word": 2, "columns": config.partitions})
        for cycle in range(20):
            ctx.set(reset, cycle == when)
            await ctx.tick()
            ctx.set(dut.command.valid, 0)
            if cycle >= when:
                states.append([ctx.get(cell) for cell in cells])

        # What comes afterwards works as ever.
        ctx.set(dut.command, {"valid": 1, "bank": 1, "word": 2, "columns": config.partitions})
        await ctx.tick()
        ctx.set(dut.command.valid, 0)
        await ctx.tick().repeat(dut.write_cycles)
        assert [ctx.get(cell) for cell in where] == [0x12340000 + p for p in range(8)]

    sim = Simulator(ResetInserter(reset)(dut))
    sim.add_clock(1e-6)
    sim.add_testbench(testbench)
    sim.run()
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("config", [SMALL, TRN], ids=lambda c: c.name)
def test_export_defines_one_slice(config):
    library = Library()
    Fragment.get(Psum(config=config), library)
    assert list(library.components) == ["psum_slice"]
