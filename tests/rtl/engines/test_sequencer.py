"""The sequencer by itself, as an engine with one read port and a table has it.

With two read ports and real memories, :mod:`test_vector` has it.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.formats import BF16, FP32
from makalu.rtl.arch.isa import AccessPattern, Activation, Engine, Function, Update, UpdateMode
from makalu.rtl.engines.sequencer import Sequencer
from makalu.rtl.interfaces import SBUF_READ_CYCLES
from makalu.sim.harness import simulate

LANE_CYCLES, BEHIND = 6, 2
CYCLES = SBUF_READ_CYCLES + LANE_CYCLES  # from read to write


def activation(i, count, *, scale=None, bias=None):
    """``scale`` and ``bias`` are where they lie in SBUF."""
    ap = AccessPattern(FP32, 0, 4, 0, ((1, count),))
    return Activation(
        dst=AccessPattern(BF16, 0, 4, 1024 + 40 * i, ((1, count),)), src=ap,
        function=next(iter(Function)), scale=scale or 0, scale_pointer=int(scale is not None),
        bias=bias or 0, bias_pointer=int(bias is not None), alpha=0, saturate=0,
        update=Update(semaphore=i, mode=UpdateMode.ADD, value=1),
    )  # fmt: skip


def run(program, *, ready=None, hold=None, occupied=None, starving=None):
    """What there was in every cycle, until the sequencer is idle again."""
    dut = Sequencer(
        config=TINY, engine=Engine.ACT, lane_cycles=LANE_CYCLES, read_ports=1, behind=BEHIND
    )
    log, words = [], [int.from_bytes(i.encode(), "little") for i in program]

    async def testbench(ctx):
        ctx.set(dut.update.ready, 1)
        while words or ctx.get(dut.busy):
            now = SimpleNamespace(
                **{
                    name: int(chosen()) if chosen else default
                    for name, chosen, default in (
                        ("ready", ready, 1), ("hold", hold, 0), ("occupied", occupied, 0),
                        ("starving", starving, 0),
                    )
                }
            )  # fmt: skip
            ctx.set(dut.read_ready[0], now.ready)
            for name in ("hold", "occupied", "starving"):
                ctx.set(getattr(dut, name), getattr(now, name))
            ctx.set(dut.instructions.valid, bool(words))
            ctx.set(dut.instructions.p.word, words[0] if words else 0)
            element = ctx.get(dut.element)
            now.element, now.scalars = element.valid, element.scalars
            for name in ("start", "upcoming", "write_valid", "write_commit", "write_word"):
                setattr(now, name, ctx.get(getattr(dut, name)))
            now.read = ctx.get(dut.read_valid[0]) and now.ready
            now.address = 16 * ctx.get(dut.read_word[0]) + ctx.get(dut.read_offset[0])
            now.wait_table = ctx.get(dut.events.wait_table)
            now.update = ctx.get(dut.update.valid)
            log.append(now)
            if words and ctx.get(dut.instructions.ready):
                words.pop(0)
            await ctx.tick()

    simulate(dut, testbench, max_cycles=5000)
    assert sum(now.update for now in log) == len(program)
    return log


@pytest.mark.parametrize(
    ("scale", "bias"), [(None, None), (512, None), (None, 772), (512, 772)],
    ids=["none", "scale", "bias", "both"],
)  # fmt: skip
def test_scalars_are_read_one_by_one_before_the_elements(scale, bias, rng):
    program = [activation(i, 3, scale=scale, bias=bias) for i in range(4)]
    log = run(program, ready=lambda: rng.random() < 0.6)
    scalars = [(0b01, scale), (0b10, bias)]
    expected = [(which, at) for which, at in scalars if at is not None]
    expected += [(0, 4 * k) for k in range(3)]
    reads = [(now.scalars, now.address) for now in log if now.read]
    assert reads == 4 * expected
    assert all(now.read for now in log if now.scalars or now.element)


def test_scalars_cost_a_cycle_each():
    for pointers, cost in (({}, 0), ({"bias": 64}, 1), ({"scale": 512, "bias": 64}, 2)):
        log = run([activation(i, 5, **pointers) for i in range(4)])
        updates = [cycle for cycle, now in enumerate(log) if now.update]
        assert {b - a for a, b in pairwise(updates)} == {5 + cost}


def test_an_instruction_waits_while_it_is_held(rng):
    log = run([activation(i, 3) for i in range(8)], hold=lambda: rng.random() < 0.8)
    assert not any(now.start and now.hold for now in log)
    assert sum(now.start for now in log) == 8
    assert sum(now.wait_table for now in log) > 8


@pytest.mark.parametrize("starving", [0, 1], ids=["calm", "starving"])
def test_commits_and_gaps_are_announced_to_the_other_engine(starving, rng):
    """As long before as the other one takes less time from read to write."""
    program = [activation(i, int(rng.integers(1, 14))) for i in range(20)]
    log = run(program, starving=lambda: starving, ready=lambda: rng.random() < 0.9)
    commits = gaps = 0
    for cycle, now in enumerate(log[CYCLES:], CYCLES):
        announced = log[cycle - (CYCLES - BEHIND)].upcoming
        if now.write_valid and now.write_commit:
            commits += 1
            assert announced == 1 << (now.write_word & 1)
        elif announced:
            gaps += 1
            assert announced == 0b11
            assert not now.write_valid
    assert commits >= 20
    assert (gaps > 3) == bool(starving)


def test_elements_wait_for_the_other_engines_writes(rng):
    program = [activation(i, 20) for i in range(4)]
    log = run(program, occupied=lambda: rng.integers(4))
    writes = [cycle for cycle, now in enumerate(log) if now.write_valid]
    assert len(writes) == 80
    for cycle in writes:
        assert not log[cycle - CYCLES].occupied >> (log[cycle].write_word & 1) & 1
