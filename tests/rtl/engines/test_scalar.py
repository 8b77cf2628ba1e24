"""Scalar engine on a real state buffer: values, tables, cycles, what it tells the vector engine."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib.wiring import connect
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.formats import BF16, FORMATS, FP32, INT32, TF32
from makalu.rtl.arch.isa import AccessPattern, Activation, Function, Space, Update, UpdateMode
from makalu.rtl.engines.scalar import SCALAR_CYCLES, ScalarEngine
from makalu.rtl.engines.sequencer import GAP_CYCLES
from makalu.rtl.engines.vector import VECTOR_CYCLES
from makalu.rtl.interfaces import SBUF_READ_CYCLES
from makalu.rtl.memory.sbuf import Sbuf
from makalu.sim.golden import EXECUTORS, GoldenCore

from .compiled import Compiled

CONFIG = replace(TINY, sbuf_bytes=1024, psum_bank_bytes=32)
HALF = CONFIG.sbuf_bytes // 2  # sources lie below, destinations above
TABLE_ENTRIES = 64  # at least


class Bench:
    """Engine and state buffer, compiled; what the golden model makes of the same program."""

    def __init__(self):
        self.dut = dut = ScalarEngine(config=CONFIG)
        self.sbuf = sbuf = Sbuf(config=CONFIG)
        self.starving = Signal(2)
        m = Module()
        m.submodules.scalar = dut
        m.submodules.sbuf = sbuf
        connect(m, dut.sbuf_read, sbuf.vector_read[2])
        connect(m, dut.sbuf_write, sbuf.vector_write[1])
        m.d.comb += dut.starving.eq(sbuf.starving | self.starving)
        inputs = [
            self.starving, dut.instructions.valid, dut.instructions.payload, dut.update.ready,
            dut.psum_busy_others, *dut.psum_read.data,
        ]  # fmt: skip
        self.log = {
            "taken": dut.instructions.ready, "psum": dut.psum_read.valid,
            "bank": dut.psum_read.bank, "word": dut.psum_read.word, "held": dut.psum_busy,
            "read": dut.sbuf_read.valid, "write": dut.sbuf_write.valid,
            "commit": dut.sbuf_write.commit, "at": dut.sbuf_write.word,
            "upcoming": dut.upcoming, "update": dut.update.valid, "payload": dut.update.payload,
            "busy": dut.busy, "events": dut.events,
        }  # fmt: skip
        self.ctx = Compiled(m, inputs, list(self.log.values()))
        self.banks = {}
        for index, memory in enumerate(self.ctx.simulation.model.table["memories"]):
            for lane, path in enumerate(memory["paths"]):
                if found := re.search(r"group(\d+)\.slice(\d+)\.bank(\d+)", path):
                    group, part, bank = map(int, found.groups())
                    self.banks[8 * group + part, bank] = index, lane

    def words(self):
        """Words of the state buffer: ``[partition][bank]``."""
        simulation = self.ctx.simulation
        simulation.touch()
        return [
            [simulation.memory(index)[:, lane] for index, lane in (self.banks[p, 0],
                                                                  self.banks[p, 1])]
            for p in range(CONFIG.partitions)
        ]  # fmt: skip

    def run(self, rng, program, *, starving=lambda cycle: 0, others=lambda cycle: 0, limit=20000):
        """Execute; return what happened by cycle. The memories must be the golden model's."""
        ctx, dut = self.ctx, self.dut
        core = GoldenCore(CONFIG, 1 << 16)
        values = rng.standard_normal((CONFIG.partitions, HALF // 4)) * 2
        core.sbuf[:, :HALF] = values.astype(np.float32).view(np.uint8)
        core.psum[:] = rng.integers(256, size=core.psum.shape, dtype=np.uint8)
        sums = core.psum.view("<u4").reshape(CONFIG.partitions, CONFIG.psum_banks, -1)
        ctx.restart()
        for p, banks in enumerate(self.words()):
            words = np.ascontiguousarray(core.sbuf[p]).reshape(-1, 16).view("<u8")
            for b, bank in enumerate(banks):
                bank[:] = words[b::2]
        waiting, line, seen = list(program), [None] * (SBUF_READ_CYCLES - 1), []
        for cycle in range(limit):
            ctx.set(dut.instructions.valid, bool(waiting))
            if waiting:
                word = int.from_bytes(waiting[0].encode(), "little")
                ctx.set(dut.instructions.payload, {"word": word, "pc": 0})
            ctx.set(dut.update.ready, 1)
            ctx.set(self.starving, starving(cycle))
            ctx.set(dut.psum_busy_others, others(cycle))
            now = {name: ctx.get(value) for name, value in self.log.items()}
            seen.append(now)
            ctx.step()
            if waiting and now["taken"]:
                waiting.pop(0)
                now["issued"] = True
            line.append(sums[:, now["bank"], now["word"]] if now["psum"] else None)
            answer = line.pop(0)
            if answer is not None:
                for p, value in enumerate(answer):
                    ctx.set(dut.psum_read.data[p], int(value))
            if not waiting and not now["busy"] and cycle > 3:
                break
        else:
            raise AssertionError("still busy")
        ctx.step()
        for instruction in program:
            EXECUTORS[Activation](core, instruction)
        for p, banks in enumerate(self.words()):
            found = np.empty((CONFIG.sbuf_bytes // 16, 2), "<u8")
            for b, bank in enumerate(banks):
                found[b::2] = bank
            np.testing.assert_array_equal(
                found.view(np.uint8).reshape(-1), core.sbuf[p], f"partition {p}"
            )
        return seen

    @classmethod
    @functools.cache
    def shared(cls):
        """One for all tests: compiling takes a while."""
        return cls()


@pytest.fixture
def bench():
    return Bench.shared()


def cycles(seen, name):
    """Cycles in which something was high."""
    return [cycle for cycle, now in enumerate(seen) if now.get(name)]


def line(fmt, offset, count, *, start=0, partitions=CONFIG.partitions, space=Space.SBUF):
    return AccessPattern(fmt, start, partitions, offset, ((1, count),), space)


def activation(function, offset, count, *, src=None, dst=FP32, **fields):
    update = Update(offset % 200, UpdateMode.ADD, 1)
    return Activation(
        dst=line(dst, HALF + offset, count), src=line(FP32, offset, count) if src is None else src,
        function=int(function), update=update, **fields,
    )  # fmt: skip


def number(value):
    return int(np.float32(value).view(np.uint32))


ONE = number(1)


def test_random_instructions(bench, rng):
    """Formats, places, scalars of each partition; tables that change on the way."""
    quadrant = CONFIG.quadrant
    for _ in range(6):
        functions = rng.choice(list(Function), 3)
        program, at = [], HALF
        while at < CONFIG.sbuf_bytes - 128:
            count = int(rng.integers(1, 20))
            from_psum = rng.random() < 0.3
            src_fmt = (FP32, TF32, INT32)[rng.integers(3)] if from_psum else FP32
            dst_fmt = FORMATS[rng.integers(len(FORMATS))]
            partitions = int(rng.integers(1, CONFIG.partitions + 1))
            starts = [0, 2 * quadrant] if partitions > quadrant else range(4 * quadrant)
            starts = [0] if partitions > 2 * quadrant else starts
            first = [int(rng.choice(starts)) for _ in range(2)]
            room = (CONFIG.psum_bytes if from_psum else HALF) // 4 - count
            src = line(
                src_fmt, 4 * int(rng.integers(room + 1)), count, start=first[0],
                partitions=partitions, space=Space.PSUM if from_psum else Space.SBUF,
            )  # fmt: skip
            own = rng.integers(2, size=2)
            scale, bias = (
                4 * int(rng.integers(HALF // 4)) if mine else number(rng.standard_normal())
                for mine in own
            )
            program.append(
                Activation(
                    dst=line(dst_fmt, at, count, start=first[1], partitions=partitions),
                    src=src,
                    function=int(rng.choice(functions)),
                    scale=scale,
                    bias=bias,
                    scale_pointer=int(own[0]),
                    bias_pointer=int(own[1]),
                    alpha=number(0.25),
                    saturate=int(rng.integers(2)),
                    update=Update(7, UpdateMode.ADD, len(program)),
                )
            )
            at += 4 * count + 4
        seen = bench.run(rng, program)
        updates = [now["payload"].value for now in seen if now["update"]]
        assert updates == list(range(len(program)))
        assert sum(now["events"].elements for now in seen) == sum(
            instruction.src.elements for instruction in program
        )


def test_the_cycles_of_an_instruction(bench, rng):
    """As the docstring of the engine says."""
    count = 24
    for own, psum in ((0, False), (1, False), (2, False), (0, True)):
        pointers = {"scale": 256 if own else ONE, "scale_pointer": own > 0, "bias": 260}
        pointers |= {"bias_pointer": own > 1} if own > 1 else {"bias": 0}
        src = line(FP32, 0, min(count, 8), space=Space.PSUM) if psum else None
        n = 8 if psum else count
        seen = bench.run(rng, [activation(Function.ABS, 0, n, src=src, **pointers)])
        (issued,) = cycles(seen, "issued")
        reads = cycles(seen, "psum" if psum else "read")
        assert reads == list(range(issued + (4 if psum else 3), issued + 3 + psum + own + n))
        writes = cycles(seen, "write")
        assert writes == list(range(reads[own] + SCALAR_CYCLES, reads[-1] + SCALAR_CYCLES + 1))
        assert cycles(seen, "update") == [writes[-1] + 1]


def test_equal_functions_follow_each_other_without_a_gap(bench, rng):
    seen = bench.run(rng, [activation(Function.EXP, 40 * i, 10) for i in range(8)])
    reads = cycles(seen, "read")
    assert reads == list(range(reads[0], reads[0] + 80))


def test_another_table_waits_for_the_last_element_that_reads_the_one_before(bench, rng):
    """And no longer; functions without a table, and the same one, do not wait."""
    order = [Function.EXP, Function.EXP, Function.TANH, Function.ABS, Function.TANH]
    seen = bench.run(rng, [activation(f, 40 * i, 10) for i, f in enumerate(order)])
    reads = cycles(seen, "read")
    gaps = [int(gap) - 1 for gap in np.diff(reads) if gap > 1]
    assert len(gaps) == 1
    assert TABLE_ENTRIES < gaps[0] < 512 + SCALAR_CYCLES
    waits = sum(now["events"].wait_table for now in seen)
    assert waits >= gaps[0] - 2


def test_the_vector_engine_is_told_of_every_commit(bench, rng):
    program = [activation(Function.SQUARE, 44 * i, 11, dst=BF16) for i in range(6)]
    seen = bench.run(rng, program)
    commits = {(c, now["at"] & 1) for c, now in enumerate(seen) if now["write"] and now["commit"]}
    told = {
        (cycle + VECTOR_CYCLES, bank)
        for cycle, now in enumerate(seen)
        for bank in range(2)
        if now["upcoming"] >> bank & 1
    }
    assert commits
    assert told == commits


def test_a_starving_dma_beat_gets_gaps(bench, rng):
    seen = bench.run(rng, [activation(Function.COPY, 0, 64)], starving=lambda cycle: 1)
    reads = cycles(seen, "read")
    missing = sorted(set(range(reads[0], reads[-1] + 1)) - set(reads))
    assert len(missing) >= 3
    assert set(np.diff(missing)) == {GAP_CYCLES}
    # The vector engine leaves the same cycles free.
    free = [c for c, now in enumerate(seen) if now["upcoming"] == 3]
    assert {c + SCALAR_CYCLES - VECTOR_CYCLES for c in missing} <= set(free)


def test_a_bank_of_another_engine_is_waited_for(bench, rng):
    bank = CONFIG.psum_bank_bytes
    src = line(FP32, 2 * bank, 4, space=Space.PSUM)
    seen = bench.run(
        rng, [activation(Function.COPY, 0, 4, src=src)],
        others=lambda cycle: 0b100 if cycle < 50 else 0b1000,
    )  # fmt: skip
    assert cycles(seen, "psum") == list(range(51, 55))
    assert all(now["held"] == (0b100 if 51 <= c < 55 else 0) for c, now in enumerate(seen))
    assert sum(now["events"].wait_psum for now in seen) > 40
