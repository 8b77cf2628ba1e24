"""The whole control block: runs, throughput, errors, watchdog, reset."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.arch.isa import (
    INSTRUCTIONS,
    AccessPattern,
    Activation,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    Function,
    IntegerTensorScalar,
    Iota,
    LoadStationary,
    MatmulMoving,
    Memset,
    Space,
    TensorTensor,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)
from makalu.rtl.arch.registers import address_of, queue_register
from makalu.rtl.control.check import FRAME_CYCLES
from makalu.rtl.control.control import RESET_CYCLES, SETTLE_CYCLES
from makalu.rtl.control.fetch import BEATS
from makalu.rtl.control.queue import InstructionStore
from makalu.sim import golden

ENGINES = [Engine.PE, Engine.ACT, Engine.DVE, Engine.POOL]
"""Queues whose instructions go to an engine."""
GE, EQ = WaitMode.GE, WaitMode.EQ
ADD, SET = UpdateMode.ADD, UpdateMode.SET


def sbuf(count=4, *, offset=0, fmt=formats.BF16, partitions=4):
    return AccessPattern(fmt, 0, partitions, offset, ((1, count),))


def psum(count=4, partitions=4):
    return AccessPattern(formats.FP32, 0, partitions, 0, ((1, count),), Space.PSUM)


def load(**keywords):
    return LoadStationary(src=sbuf(), **keywords)


def matmul(**keywords):
    return MatmulMoving(dst=psum(), src=sbuf(), **keywords)


def memset(value=0, **keywords):
    return Memset(dst=sbuf(), value=value, **keywords)


def activate(bias=0, **keywords):
    return Activation(dst=sbuf(), src=sbuf(), function=Function.EXP, bias=bias, **keywords)


def iota(offset=0, **keywords):
    return Iota(dst=sbuf(), offset=offset, **keywords)


def start_dma(table=0, count=1, *, engine=Engine.ACT, **keywords):
    return DmaStart(engine=engine, table=table, engines_used=1, count=count, **keywords)


def add(semaphore, value=1):
    return Update(semaphore, ADD, value)


def ge(semaphore, value):
    return Wait(semaphore, GE, value)


def event(engine, *, waits=(), update=None):
    return EventSemaphore(engine=engine, waits=waits, update=update)


@pytest.mark.parametrize(("pauses", "lag"), [(0.3, 0), (0.0, SETTLE_CYCLES - 1), (0.8, 1)])
def test_runs_a_program_on_all_queues_in_order(pauses, lag, bench):
    b = bench(pauses=pauses)
    b.lag = lag
    b.program(Engine.PE, [load() if i % 2 else matmul(update=add(1)) for i in range(20)])
    b.program(Engine.DVE, [memset(i, update=add(2)) for i in range(20)])
    b.program(
        Engine.ACT,
        [activate(i, update=add(3)) if i % 3 else event(Engine.ACT, waits=[ge(1, i)], update=add(3))
         for i in range(10)],
    )  # fmt: skip
    b.program(
        Engine.POOL,
        [iota(i, update=add(4, 2)) if i % 4 else event(Engine.POOL, update=add(4, 2))
         for i in range(10)],
    )  # fmt: skip
    b.program(
        Engine.SP,
        [DmaStart(engine=Engine.SP, table=i * 128, engines_used=1, count=i, update=add(5))
         for i in range(10)],
    )  # fmt: skip

    async def test(ctx):
        assert await b.execute(ctx) == {"busy": 0, "done": 1, "error": 0, "resetting": 0}
        assert [await b.semaphore(ctx, i) for i in range(6)] == [0, 10, 20, 10, 20, 10]
        for engine in Engine:
            status = await b.queue(ctx, engine)
            assert status["state"] == "done"
            assert status["issued"] == b.programs[engine]
            assert status["pc"] == b.base_of(engine) + 128 * b.programs[engine]

    b.run(test)
    assert b.pcs("pe") == [b.base_of(Engine.PE) + 128 * i for i in range(20)]
    assert b.pcs("act") == [b.base_of(Engine.ACT) + 128 * i for i in range(10) if i % 3]
    assert b.pcs("dve") == [b.base_of(Engine.DVE) + 128 * i for i in range(20)]
    assert b.pcs("pool") == [b.base_of(Engine.POOL) + 128 * i for i in range(10) if i % 4]
    for _, _, pc, word in b.issued:
        assert word == int.from_bytes(b.memory[pc], "little")
    assert [job[3:5] for job in b.jobs] == [(i * 128, i) for i in range(10)]


@pytest.mark.parametrize("engine", [Engine.ACT, Engine.POOL], ids=lambda engine: engine.name)
def test_work_and_dma_starts_of_one_queue_keep_their_order(engine, bench):
    b = bench(pauses=0.3)
    n = 8
    # Two of each, in every order; the second half waits for all that the first half did.
    program = []
    for i in range(n):
        waits = [ge(1, n), ge(2, n)] if i == n // 2 else []
        pair = [
            good(engine, i, add(1, 2)),
            start_dma(128 * i, i % 3, engine=engine, update=add(2, 2)),
        ]
        program += pair[:: 1 if i % 2 else -1]
        program[-2] = program[-2].replace(waits=waits)
    b.program(engine, program)

    async def test(ctx):
        assert (await b.execute(ctx))["done"]
        assert [await b.semaphore(ctx, i) for i in (1, 2)] == [2 * n, 2 * n]
        assert (await b.queue(ctx, engine))["issued"] == 2 * n

    b.run(test)
    name = engine.name.lower()
    place = {name: [i for i, word in enumerate(program) if not isinstance(word, DmaStart)]}
    place["dma"] = [i for i in range(2 * n) if i not in place[name]]
    assert b.pcs(name) == [b.base_of(engine) + 128 * i for i in place[name]]
    assert [table for _, _, _, table, _, _ in b.jobs] == [128 * i for i in range(n)]
    computed = dict(zip(place[name], b.cycles(name), strict=True))
    begun = dict(zip(place["dma"], (cycle for cycle, *_ in b.jobs), strict=True))
    for i, cycle in begun.items():
        before = [computed[j] for j in place[name] if j < i]
        assert not before or max(before) < cycle
    first = min(cycle for i, cycle in [*computed.items(), *begun.items()] if i >= n)
    done = sorted(cycle for cycle, *_ in b.updated)
    assert first > done[n - 1]


@pytest.mark.parametrize("blocked", ["act", "dma0"])
def test_what_one_port_of_a_queue_does_not_take_holds_back_the_other(blocked, bench):
    b = bench(latency=5)
    first, then = [activate(i) for i in range(6)], [start_dma(128 * i) for i in range(8)]
    if blocked == "dma0":
        first, then = then, first
    b.hung = {blocked}
    b.program(Engine.ACT, first + then)

    async def test(ctx):
        await b.write(ctx, "watchdog", 100)
        assert (await b.execute(ctx))["error"]
        error = await b.error(ctx)
        assert (error["code"], error["source"]) == (ErrorCode.WATCHDOG, Engine.ACT)
        queue = await b.queue(ctx, Engine.ACT)
        assert queue["state"] == "waiting_engine"
        assert queue["issued"] < len(first)
        b.hung.clear()
        await b.reset(ctx)
        await runs_clean(b, ctx)

    b.run(test)
    assert len(b.jobs if blocked == "act" else b.cycles("act")) == (0 if blocked == "act" else 2)


# Waits and rate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_waits_compare_unsigned(index, bench):
    b = bench(latency=3)
    big = 0xFFFFFFFF
    table = [
        (GE, 5, 5, True), (GE, 5, 4, False), (GE, 5, 6, True), (GE, 0, 0, True),
        (GE, 1 << 31, (1 << 31) - 1, False), (GE, 1, 1 << 31, True), (GE, big, big, True),
        (GE, big, big - 1, False), (EQ, 5, 5, True), (EQ, 5, 6, False), (EQ, 5, 4, False),
        (EQ, 0, 0, True), (EQ, 1 << 31, 0, False), (EQ, big, big, True),
    ]  # fmt: skip

    async def test(ctx):
        await b.write(ctx, "watchdog", 40)
        for mode, wanted, seen, passes in table:
            waits = [Wait(), Wait()]
            waits[index] = Wait(3, mode, wanted)
            b.program(Engine.POOL, [event(Engine.POOL, waits=waits, update=add(2))])
            await b.set_semaphore(ctx, 3, seen)
            status = await b.execute(ctx)
            assert status["done"] == passes, (mode, wanted, seen)
            if not passes:
                queue = await b.queue(ctx, Engine.POOL)
                assert queue == {
                    "state": "waiting_semaphore", "wait": index, "mode": mode, "semaphore": 3,
                    "wanted": wanted, "seen": seen, "pc": b.base_of(Engine.POOL), "issued": 0,
                }  # fmt: skip
                await b.reset(ctx)
                await b.write(ctx, "watchdog", 40)

    b.run(test)


def test_both_waits_must_hold_in_the_same_cycle(bench):
    # Semaphore 1 is 1 for a while, then 0; only afterwards semaphore 2 becomes 1.
    b = bench(latency=3)
    equal = [Wait(1, EQ, 1), Wait(2, EQ, 1)]
    b.program(Engine.PE, [load(waits=equal)])
    b.program(
        Engine.ACT,
        [
            event(Engine.ACT, update=Update(1, SET, 1)),
            event(Engine.ACT, update=Update(1, SET, 0)),
            event(Engine.ACT, update=Update(2, SET, 1)),
            event(Engine.ACT, update=add(3)),
        ],
    )

    async def test(ctx):
        await b.write(ctx, "watchdog", 100)
        status = await b.execute(ctx)
        assert status["error"]
        queue = await b.queue(ctx, Engine.PE)
        assert (queue["state"], queue["wait"], queue["seen"]) == ("waiting_semaphore", 0, 0)
        assert await b.semaphore(ctx, 3) == 1

    b.run(test)
    assert b.issued == []


def test_an_instruction_is_offered_three_cycles_after_the_update_it_waits_for(bench):
    b = bench(delays=(40, 60))
    n = 6
    b.program(Engine.DVE, [memset(update=add(1)) for _ in range(n)])
    b.program(Engine.PE, [load(waits=[ge(1, i + 1)]) for i in range(n)])

    async def test(ctx):
        assert (await b.execute(ctx))["done"]

    b.run(test)
    assert b.cycles("pe") == [cycle + 3 for cycle, *_ in b.updated]


def test_prefetched_instructions_issue_every_four_cycles_in_two_queues_at_once(bench):
    b = bench(delays=(1, 1), latency=200)
    n = b.config.queue_depth

    def gate(engine):
        return event(engine, waits=[ge(1, 1)])

    b.program(Engine.PE, [gate(Engine.PE), *(load() for _ in range(n))])
    b.program(Engine.DVE, [gate(Engine.DVE), *(memset() for _ in range(n))])
    # SP opens both gates when everything has long been fetched.
    pause = [DmaStart(engine=Engine.SP, table=0, engines_used=1, count=250, update=add(2))]
    opens = [event(Engine.SP, waits=[ge(2, 1)], update=add(1))]
    b.program(Engine.SP, pause + opens)

    async def test(ctx):
        assert (await b.execute(ctx))["done"]

    b.run(test)
    for name in ("pe", "dve"):
        cycles = b.cycles(name)
        assert len(cycles) == n
        assert max(after - before for before, after in pairwise(cycles)) <= 4
    assert max(cycle for cycle, *_ in b.bursts) < min(cycle for cycle, *_ in b.issued) - 100


@pytest.mark.parametrize("engines", [1, 2])
def test_sustains_an_instruction_in_sixteen_cycles_over_a_latency_of_two_hundred(bench, engines):
    b = bench(delays=(1, 1), latency=200)
    n = 48
    b.program(Engine.PE, [load() for _ in range(n // engines)])
    if engines == 2:
        b.program(Engine.DVE, [memset() for _ in range(n // engines)])

    async def test(ctx):
        status = await b.execute(ctx)
        assert status["done"]
        assert await b.counter(ctx, "fetch_bytes") == 128 * n

    b.run(test)
    cycles = sorted(cycle for cycle, *_ in b.issued)
    assert len(cycles) == n
    assert cycles[-1] - cycles[0] <= 16 * (n - 1) + 4


@pytest.mark.parametrize("job_pauses", [0.0, 0.97])
def test_done_waits_for_dma_that_updates_nothing(job_pauses, bench):
    b = bench(latency=5)
    b.job_pauses = job_pauses
    start = DmaStart(engine=Engine.POOL, table=0, engines_used=1, count=12)
    b.program(Engine.POOL, [start])

    async def test(ctx):
        for _ in range(3):
            assert (await b.execute(ctx))["done"]

    b.run(test)
    assert len(b.jobs) == 3


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_done_waits_for_an_engine_that_updates_nothing(engine, bench):
    b = bench(latency=5, delays=(80, 80))
    b.program(engine, [good(engine, 0)])

    async def test(ctx):
        for _ in range(2):
            assert (await b.execute(ctx))["done"]

    b.run(test)
    assert len(b.issued) == 2


# Errors -------------------------------------------------------------------------------------------


def at(cls, operand, member):
    """First bit of a member of an operand."""
    first = next(bit for name, _, bit in cls.operands if name == operand)
    return first + next(bit for name, bit, _ in AccessPattern.LAYOUT if name == member)


def corrupted(instruction, bit, value, width):
    word = int.from_bytes(instruction.encode(), "little")
    return word & ~((1 << width) - 1 << bit) | value << bit


ILLEGAL = {
    "illegal_opcode": (Engine.PE, corrupted(load(), 0, 0xEE, 8), ErrorCode.ILLEGAL_OPCODE, 0),
    "of_another_queue": (Engine.DVE, load(), ErrorCode.ILLEGAL_OPCODE, 0),
    "reserved_bits": (
        Engine.ACT, corrupted(event(Engine.ACT), 1023, 1, 1), ErrorCode.RESERVED_BITS, 0,
    ),
    "bad_field": (
        Engine.SP, DmaStart(engine=Engine.SP, table=0, first=1, engines_used=1),
        ErrorCode.BAD_FIELD, next(bit for name, _, bit in DmaStart.scalars if name == "first"),
    ),
    "bad_wait": (Engine.POOL, corrupted(event(Engine.POOL), 40, 7, 8), ErrorCode.BAD_FIELD, 40),
    "bad_partition": (
        Engine.PE, LoadStationary(src=AccessPattern(formats.BF16, 1, 4, 0, ((1, 4),))),
        ErrorCode.BAD_PARTITION, at(LoadStationary, "src", "start_partition"),
    ),
    "out_of_range": (
        Engine.DVE, Memset(dst=sbuf(offset=2044), value=0),
        ErrorCode.OUT_OF_RANGE, at(Memset, "dst", "offset"),
    ),
    "size_mismatch": (
        Engine.PE, MatmulMoving(dst=psum(3), src=sbuf(4)),
        ErrorCode.SIZE_MISMATCH, at(MatmulMoving, "dst", "count0"),
    ),
    "pointer": (
        Engine.ACT, activate(bias=2, bias_pointer=1),
        ErrorCode.BAD_FIELD, next(bit for name, _, bit in Activation.scalars if name == "bias"),
    ),
    "integer_pointer": (
        Engine.POOL,
        IntegerTensorScalar(
            dst=sbuf(fmt=formats.INT16), src=sbuf(fmt=formats.INT16), scalar1=6, scalar1_pointer=1
        ),
        ErrorCode.BAD_FIELD,
        next(bit for name, _, bit in IntegerTensorScalar.scalars if name == "scalar1"),
    ),
    "float_of_an_integer_operation": (
        Engine.POOL,
        corrupted(
            IntegerTensorScalar(dst=sbuf(fmt=formats.INT16), src=sbuf(fmt=formats.INT16)),
            at(IntegerTensorScalar, "src", "dtype"), formats.BF16.code, 4,
        ),
        ErrorCode.BAD_FIELD, at(IntegerTensorScalar, "src", "dtype"),
    ),
    "both_sources_in_psum": (
        Engine.DVE, TensorTensor(dst=sbuf(), src0=psum(), src1=psum()),
        ErrorCode.BAD_FIELD, at(TensorTensor, "src1", "space"),
    ),
}  # fmt: skip


def good(engine, i, update=None):
    """A harmless instruction for a queue."""
    if engine == Engine.PE:
        return load(update=update)
    if engine == Engine.DVE:
        return memset(i, update=update)
    if engine == Engine.ACT:
        return activate(i, update=update)
    if engine == Engine.POOL:
        return iota(i, update=update)
    return event(engine, update=update)


async def runs_clean(b, ctx):
    """Run something on every queue and look at the outcome."""
    for engine in Engine:
        b.program(engine, [good(engine, i, add(1)) for i in range(2)])
    before = await b.semaphore(ctx, 1)
    assert await b.execute(ctx) == {"busy": 0, "done": 1, "error": 0, "resetting": 0}
    assert await b.semaphore(ctx, 1) == before + 2 * len(Engine)


def test_illegal_instructions_stop_their_queue_and_are_reported(bench):
    b = bench(latency=10)

    async def test(ctx):
        for name, (engine, word, code, field) in ILLEGAL.items():
            for position in (0, 3):
                b.programs.clear()
                program = [good(engine, i, add(1)) for i in range(6)]
                program[position] = word
                b.program(engine, program)
                first = len(b.issued)
                status = await b.execute(ctx)
                assert status == {"busy": 0, "done": 0, "error": 1, "resetting": 0}, name
                pc = b.base_of(engine) + 128 * position
                assert await b.error(ctx) == {
                    "code": code, "source": engine, "field": field, "pc": pc, "address": 0,
                }, name  # fmt: skip
                queue = await b.queue(ctx, engine)
                assert (queue["state"], queue["issued"], queue["pc"]) == ("stopped", position, pc)
                # A start is ignored; what was before the word is done, nothing behind it.
                await b.start(ctx)
                assert await b.status(ctx) == status
                for _ in range(30):
                    await ctx.tick()
                assert await b.semaphore(ctx, 1) == position
                if engine in ENGINES:
                    assert len(b.issued) - first == position
                await b.reset(ctx)
                assert await b.error(ctx) == {
                    "code": 0, "source": 0, "field": 0, "pc": 0, "address": 0
                }  # fmt: skip
                assert await b.semaphore(ctx, 1) == 0

    b.run(test)


def test_other_queues_issue_nothing_new_after_an_error(bench):
    b = bench(latency=10, delays=(20, 20))
    b.program(Engine.SP, [event(Engine.SP, waits=[ge(1, 1)]), load()])
    b.program(Engine.PE, [load(update=add(1)) for _ in range(12)])

    async def test(ctx):
        status = await b.execute(ctx)
        assert status["error"]
        seen = len(b.issued)
        for _ in range(400):
            await ctx.tick()
        # One may have been offered already: it stays offered until it is taken.
        assert len(b.issued) <= seen + 1
        assert len(b.issued) < 12
        queue = await b.queue(ctx, Engine.PE)
        assert queue["issued"] == len(b.issued)
        # Engines ran out.
        assert await b.semaphore(ctx, 1) == len(b.issued)
        await b.reset(ctx)
        await runs_clean(b, ctx)

    b.run(test)


def test_a_bus_error_is_reported_when_the_instruction_has_its_turn(bench):
    b = bench(latency=10)

    async def test(ctx):
        for engine in Engine:
            for position in (0, 5) if engine in (Engine.PE, Engine.ACT) else (2,):
                b.programs.clear()
                b.program(engine, [good(engine, i) for i in range(6)])
                pc = b.base_of(engine) + 128 * position
                b.bad_addresses = {pc, pc + 256}
                assert (await b.execute(ctx))["error"]
                assert await b.error(ctx) == {
                    "code": ErrorCode.BUS_FETCH, "source": engine, "field": 0, "pc": pc,
                    "address": pc,
                }  # fmt: skip
                assert (await b.queue(ctx, engine))["issued"] == position
                b.bad_addresses = set()
                await b.reset(ctx)
        await runs_clean(b, ctx)

    b.run(test)


@pytest.mark.parametrize("code", [ErrorCode.RESERVED_BITS, ErrorCode.BUS_FETCH])
def test_an_error_of_a_prefetched_word_waits_for_its_turn(code, bench):
    b = bench(latency=10)
    wrong = load(update=add(2))
    if code == ErrorCode.BUS_FETCH:
        b.bad_addresses = {b.base_of(Engine.PE) + 2 * 128}
    else:
        wrong = corrupted(wrong, 900, 1, 1)
    held = [load(waits=[ge(1, 1)], update=add(2)), load(update=add(2))]
    b.program(Engine.PE, [*held, wrong, load(update=add(2)), load(update=add(2))])
    # SP lets the first two go when everything has been fetched and checked.
    pause = DmaStart(engine=Engine.SP, table=0, engines_used=1, count=50, update=add(1))
    b.program(Engine.SP, [pause, event(Engine.SP, waits=[ge(1, 1)])])

    async def test(ctx):
        await b.load(ctx)
        await b.start(ctx)
        for _ in range(200):
            await ctx.tick()
        assert (await b.status(ctx))["busy"]
        assert (await b.finish(ctx))["error"]
        error = await b.error(ctx)
        assert (error["code"], error["pc"]) == (code, b.base_of(Engine.PE) + 2 * 128)
        for _ in range(20):
            await ctx.tick()
        assert await b.semaphore(ctx, 2) == 2

    b.run(test)


def test_prefetch_beyond_a_stop_raises_nothing(bench):
    b = bench(latency=10)
    bad = b.base_of(Engine.ACT) + 128 * 3

    async def test(ctx):
        b.bad_addresses = {bad}
        # Behind an illegal word
        b.program(Engine.ACT, [event(Engine.ACT), event(Engine.ACT), load(), event(Engine.ACT)])
        assert (await b.execute(ctx))["error"]
        assert (await b.error(ctx))["code"] == ErrorCode.ILLEGAL_OPCODE
        await b.reset(ctx)
        # Behind a wait that is never met
        await b.write(ctx, "watchdog", 150)
        waits = event(Engine.ACT, waits=[ge(1, 1)])
        b.program(Engine.ACT, [event(Engine.ACT), event(Engine.ACT), waits, event(Engine.ACT)])
        assert (await b.execute(ctx))["error"]
        assert (await b.error(ctx))["code"] == ErrorCode.WATCHDOG
        await b.reset(ctx)
        # Behind the last instruction
        b.program(Engine.ACT, [event(Engine.ACT)] * 3)
        assert (await b.execute(ctx))["done"]

    b.run(test)


def test_a_start_after_an_error_changes_nothing(bench):
    b = bench(latency=10)
    b.program(Engine.ACT, [load()])
    b.program(Engine.DVE, [memset(1) for _ in range(20)])

    async def test(ctx):
        assert (await b.execute(ctx))["error"]
        for _ in range(400):
            await ctx.tick()
        error, begun, issued = await b.error(ctx), len(b.bursts), len(b.issued)
        await b.start(ctx)
        for _ in range(400):
            await ctx.tick()
        assert await b.status(ctx) == {"busy": 0, "done": 0, "error": 1, "resetting": 0}
        assert (await b.error(ctx), len(b.bursts), len(b.issued)) == (error, begun, issued)

    b.run(test)


def test_no_burst_is_begun_after_an_error(bench):
    b = bench(latency=10)
    b.program(Engine.ACT, [load()])
    b.program(Engine.DVE, [memset(i) for i in range(40)])

    async def test(ctx):
        assert (await b.execute(ctx))["error"]
        begun = len(b.bursts)
        for _ in range(400):
            await ctx.tick()
        assert len(b.bursts) == begun < 41

    b.run(test)


@pytest.mark.parametrize("base", [4, 64, 1 << 40, 1 << 63], ids=hex)
def test_a_base_that_cannot_be_fetched_is_a_bus_error(base, bench):
    b = bench(latency=10)
    b.program(Engine.POOL, [event(Engine.POOL)])

    async def test(ctx):
        await b.load(ctx)
        await b.write(ctx, queue_register(Engine.POOL, "base_lo"), base % (1 << 32))
        await b.write(ctx, queue_register(Engine.POOL, "base_hi"), base >> 32)
        await b.start(ctx)
        assert (await b.finish(ctx))["error"]
        error = await b.error(ctx)
        assert (error["code"], error["source"]) == (ErrorCode.BUS_FETCH, Engine.POOL)
        assert b.bursts == []
        # A queue without instructions does not care.
        await b.reset(ctx)
        await b.write(ctx, queue_register(Engine.POOL, "count"), 0)
        await b.start(ctx)
        assert (await b.finish(ctx))["done"]

    b.run(test)


def test_semaphore_overflow_names_its_source(bench):
    b = bench(latency=5)
    top = (1 << 32) - 1
    dma = DmaStart(engine=Engine.SP, table=0, engines_used=1, count=0, update=add(6, 2))
    cases = [
        (Engine.PE, [load(update=add(6, 2))], Engine.PE, 0),
        (Engine.ACT, [activate(update=add(6, 2))], Engine.ACT, 0),
        (Engine.DVE, [memset(update=add(6, 2))], Engine.DVE, 0),
        (Engine.POOL, [iota(update=add(6, 2))], Engine.POOL, 0),
        (Engine.SP, [dma], 16, 0),
        *((engine, [event(engine), event(engine, update=add(6, 2))], engine,
           b.base_of(engine) + 128) for engine in (Engine.PE, Engine.POOL)),
    ]  # fmt: skip

    async def test(ctx):
        for engine, program, source, pc in cases:
            b.programs.clear()
            b.program(engine, program)
            await b.set_semaphore(ctx, 6, top - 2)
            assert (await b.execute(ctx))["done"]
            assert await b.semaphore(ctx, 6) == top
            await b.set_semaphore(ctx, 6, top - 1)
            assert (await b.execute(ctx))["error"], engine
            assert await b.error(ctx) == {
                "code": ErrorCode.SEMAPHORE_OVERFLOW, "source": source, "field": 128, "pc": pc,
                "address": 6,
            }  # fmt: skip
            assert await b.semaphore(ctx, 6) == top - 1
            await b.reset(ctx)

    b.run(test)


def test_dma_errors_are_taken_and_the_first_is_kept(bench):
    b = bench(config=replace(SMALL, semaphores=8), latency=10)
    errors = [
        {"valid": 1, "code": ErrorCode.BUS_WRITE, "field": 0, "pc": 1 << 39, "address": 1 << 47},
        {"valid": 1, "code": ErrorCode.BAD_DESCRIPTOR, "field": 64, "pc": 0x80, "address": 0},
    ]  # fmt: skip
    b.program(Engine.PE, [load(waits=[ge(1, 1)])])

    async def test(ctx):
        for order in ([0], [1], [0, 1], [1, 0], [(0, 1)]):
            await b.load(ctx)
            await b.start(ctx)
            for _ in range(50):
                await ctx.tick()
            for which in order:
                for e in (which,) if isinstance(which, int) else which:
                    ctx.set(b.dut.dma_error[e], errors[e])
                await ctx.tick()
            first = order[0] if isinstance(order[0], int) else order[0][0]
            assert (await b.finish(ctx))["error"]
            got = await b.error(ctx)
            want = {key: value for key, value in errors[first].items() if key != "valid"}
            assert got == {**want, "source": 16 + first}
            await b.write(ctx, "control", 2)
            while not ctx.get(b.dut.engine_reset):
                await ctx.tick()
            for e in range(2):
                ctx.set(b.dut.dma_error[e].valid, 0)
            while (await b.status(ctx))["resetting"]:
                pass
            assert not (await b.status(ctx))["error"]

    b.run(test)


# Watchdog -----------------------------------------------------------------------------------------


def test_the_watchdog_names_the_first_queue_that_waits(bench):
    b = bench(latency=10)
    b.hung = {"pe"}
    b.program(Engine.PE, [load() for _ in range(8)])
    b.program(Engine.DVE, [memset(), memset(waits=[ge(1, 7)])])
    b.program(Engine.POOL, [event(Engine.POOL, waits=[Wait(), Wait(2, EQ, 9)])])
    limit = 120

    async def test(ctx):
        await b.write(ctx, "watchdog", limit)
        await b.set_semaphore(ctx, 2, 8)
        await b.load(ctx)
        await b.start(ctx)
        begin = b.cycle
        assert (await b.finish(ctx))["error"]
        assert limit < b.cycle - begin < limit + 200
        pc = b.base_of(Engine.DVE) + 128
        assert await b.error(ctx) == {
            "code": ErrorCode.WATCHDOG, "source": Engine.DVE, "field": 0, "pc": pc, "address": 0,
        }  # fmt: skip
        assert await b.queue(ctx, Engine.DVE) == {
            "state": "waiting_semaphore", "wait": 0, "mode": GE, "semaphore": 1, "wanted": 7,
            "seen": 0, "pc": pc, "issued": 1,
        }  # fmt: skip
        assert await b.queue(ctx, Engine.POOL) == {
            "state": "waiting_semaphore", "wait": 1, "mode": EQ, "semaphore": 2, "wanted": 9,
            "seen": 8, "pc": b.base_of(Engine.POOL), "issued": 0,
        }  # fmt: skip
        assert (await b.queue(ctx, Engine.PE))["state"] == "waiting_engine"
        assert (await b.queue(ctx, Engine.ACT))["state"] == "done"
        b.hung.clear()
        await b.reset(ctx)
        await runs_clean(b, ctx)

    b.run(test)


def test_the_watchdog_sees_an_engine_that_hangs(bench):
    b = bench(latency=10)
    b.hung = {"pe", "dma0"}
    b.program(Engine.PE, [load() for _ in range(8)])

    async def test(ctx):
        await b.write(ctx, "watchdog", 60)
        assert (await b.execute(ctx))["error"]
        error = await b.error(ctx)
        assert (error["code"], error["source"]) == (ErrorCode.WATCHDOG, Engine.PE)
        assert (await b.queue(ctx, Engine.PE))["state"] == "waiting_engine"
        await b.reset(ctx)
        b.programs.clear()
        b.program(
            Engine.ACT, [DmaStart(engine=Engine.ACT, table=0, engines_used=1) for _ in range(2)]
        )
        assert (await b.execute(ctx))["error"]
        assert (await b.error(ctx))["code"] == ErrorCode.WATCHDOG
        b.hung.clear()
        await b.reset(ctx)
        await runs_clean(b, ctx)

    b.run(test)


def test_the_watchdog_leaves_slow_runs_alone_and_zero_is_never(bench):
    b = bench(latency=10, delays=(90, 90))
    b.program(Engine.DVE, [memset(update=add(1)) for _ in range(4)])
    b.program(Engine.PE, [load(waits=[ge(1, 4)])])

    async def test(ctx):
        await b.write(ctx, "watchdog", 100)
        assert (await b.execute(ctx))["done"]
        await b.write(ctx, "watchdog", 0)
        b.programs[Engine.DVE] = 0
        await b.set_semaphore(ctx, 1, 0)
        await b.load(ctx)
        await b.start(ctx)
        for _ in range(300):
            await ctx.tick()
        assert (await b.status(ctx))["busy"]
        # An event of an engine is progress; its busy and waiting times are not.
        for events in (b.dut.act_events, b.dut.dve_events, b.dut.pool_events):
            ctx.set(events.elements, 1)
            await b.write(ctx, "watchdog", 50)
            for _ in range(200):
                ctx.set(events.elements, b.cycle % 8 == 0)
                await ctx.tick()
            assert (await b.status(ctx))["busy"]
            ctx.set(events.elements, 0)
        ctx.set(b.dut.dve_events.busy, 1)
        ctx.set(b.dut.pool_events.busy, 1)
        ctx.set(b.dut.pool_events.wait_sbuf, 1)
        ctx.set(b.dut.act_events.wait_table, 1)
        ctx.set(b.dut.pe_events.wait_psum, 1)
        assert (await b.finish(ctx, limit=200))["error"]

    b.run(test)


def test_a_beat_between_dma_and_sbuf_is_progress(bench):
    b = bench(latency=10)
    b.hung = {"dma0"}
    b.program(Engine.SP, [DmaStart(engine=Engine.SP, table=0, engines_used=1, count=1)])

    async def test(ctx):
        await b.write(ctx, "watchdog", 50)
        await b.load(ctx)
        await b.start(ctx)
        for _ in range(400):
            ctx.set(b.dut.dma_events.busy, 1)
            ctx.set(b.dut.dma_events.sbuf_beats, 2 * (b.cycle % 40 == 0))
            await ctx.tick()
        assert (await b.status(ctx))["busy"]
        ctx.set(b.dut.dma_events.sbuf_beats, 0)
        assert (await b.finish(ctx, limit=200))["error"]
        assert (await b.error(ctx))["code"] == ErrorCode.WATCHDOG

    b.run(test)


# Start, reset, counters ---------------------------------------------------------------------------


def test_the_very_first_write_may_be_the_start(bench):
    b = bench()

    async def test(ctx):
        await b.start(ctx)
        assert await b.finish(ctx) == {"busy": 0, "done": 1, "error": 0, "resetting": 0}

    b.run(test)


@pytest.mark.parametrize("pauses", [0.0, 0.5])
def test_a_status_read_after_the_start_never_shows_idle(pauses, bench):
    b = bench(latency=3, pauses=pauses)

    async def test(ctx):
        for count in (0, 1, 2, 1):
            b.program(Engine.ACT, [event(Engine.ACT)] * count)
            await b.load(ctx)
            await b.start(ctx)
            status = await b.status(ctx)
            assert status["busy"] or status["done"]
            if count:
                assert not status["done"]
            assert await b.finish(ctx) == {"busy": 0, "done": 1, "error": 0, "resetting": 0}
            assert (await b.queue(ctx, Engine.ACT))["issued"] == count

    b.run(test)


def test_busy_is_set_in_the_cycle_after_the_start_was_accepted(bench):
    b = bench()
    registers = []

    async def test(ctx):
        host = b.dut.host
        for value, signal in ((0, host.awaddr), (1, host.wdata)):
            ctx.set(signal, value)
        ctx.set(host.awaddr, address_of("control"))
        ctx.set(host.wstrb, 15)
        ctx.set(host.awvalid, 1)
        ctx.set(host.wvalid, 1)
        # A read whose address comes with the write response
        ctx.set(host.araddr, address_of("status"))
        ctx.set(host.rready, 1)
        ctx.set(host.bready, 1)
        for _ in range(40):
            if ctx.get(host.awready) and ctx.get(host.awvalid):
                await ctx.tick()
                ctx.set(host.awvalid, 0)
                ctx.set(host.wvalid, 0)
                continue
            if ctx.get(host.bvalid):
                ctx.set(host.arvalid, 1)
            await ctx.tick()
            if ctx.get(host.rvalid):
                registers.append(ctx.get(host.rdata))
                ctx.set(host.arvalid, 0)
        assert registers
        assert registers[0] in (1, 2)

    b.run(test)


def test_a_start_while_busy_changes_nothing(bench):
    b = bench(latency=10, delays=(20, 20))
    n = 5
    b.program(Engine.PE, [load(update=add(1)) for _ in range(n)])

    async def test(ctx):
        await b.load(ctx)
        await b.start(ctx)
        # Registers may be set for the next run meanwhile.
        await b.write(ctx, queue_register(Engine.PE, "count"), 1)
        for _ in range(5):
            await b.start(ctx)
        await b.set_semaphore(ctx, 1, 0, expect=2)
        await b.write(ctx, "clear", 1, expect=2)
        assert (await b.finish(ctx))["done"]
        assert await b.semaphore(ctx, 1) == n
        assert (await b.queue(ctx, Engine.PE))["issued"] == n
        await b.start(ctx)
        assert (await b.finish(ctx))["done"]
        assert await b.semaphore(ctx, 1) == n + 1

    b.run(test)
    base = b.base_of(Engine.PE)
    assert b.pcs("pe") == [base + 128 * i for i in range(n)] + [base]


def test_clear_sets_semaphores_to_zero_before_the_next_run_looks_at_them(bench):
    b = bench(latency=2)
    b.program(Engine.ACT, [event(Engine.ACT, waits=[Wait(7, EQ, 0)], update=Update(7, SET, 9))])

    async def test(ctx):
        await b.load(ctx)
        for _ in range(3):
            await b.write(ctx, "clear", 1)
            await b.start(ctx)
            assert (await b.finish(ctx))["done"]
            assert await b.semaphore(ctx, 7) == 9
        for i in range(8):
            await b.set_semaphore(ctx, i, i + 1)
        await b.write(ctx, "clear", 1)
        assert [await b.semaphore(ctx, i) for i in range(8)] == [0] * 8

    b.run(test)


def test_nothing_is_issued_before_a_sweep_has_ended(bench):
    b = bench(config=TINY, latency=2)
    last = TINY.semaphores - 1
    b.program(Engine.ACT, [event(Engine.ACT, waits=[ge(last, 9)], update=add(0))])

    async def test(ctx):
        await b.write(ctx, "watchdog", 60)
        await b.load(ctx)
        await b.set_semaphore(ctx, last, 9)
        await b.write(ctx, "clear", 1)
        await b.start(ctx)
        assert (await b.finish(ctx))["error"]
        assert (await b.error(ctx))["code"] == ErrorCode.WATCHDOG
        assert await b.semaphore(ctx, 0) == 0

    b.run(test)


def test_a_reset_at_any_time_leaves_a_clean_machine(bench):
    b = bench(latency=20, delays=(1, 8))
    start_dma = DmaStart(engine=Engine.SP, table=128, engines_used=1, count=4, update=add(2))
    programs = {
        Engine.PE: [load(update=add(1)), matmul(waits=[ge(2, 1)], update=add(3))] * 3,
        Engine.DVE: [memset(waits=[ge(3, i + 1)], update=add(4)) for i in range(3)],
        Engine.SP: [start_dma, event(Engine.SP, waits=[ge(4, 1)], update=add(5)), start_dma],
        Engine.ACT: [activate(waits=[ge(5, 1)], update=add(6, 2)), activate(1, update=add(6))],
        Engine.POOL: [iota(i, update=add(7)) for i in range(2)],
    }

    async def test(ctx):
        final = [0, 3, 2, 3, 3, 1, 3, 2]
        for point in [0, 1, 2, 3, 5, 8, *range(10, 140, 9)]:
            b.pauses = b.rng.choice([0, 0.3])
            b.programs.clear()
            for engine, words in programs.items():
                b.program(engine, words)
            await b.load(ctx)
            await b.start(ctx)
            for _ in range(point):
                await ctx.tick()
            await b.write(ctx, "control", 2 | b.rng.getrandbits(1))
            assert (await b.status(ctx))["resetting"]
            await b.start(ctx)  # ignored
            while (await b.status(ctx))["resetting"]:
                pass
            assert await b.status(ctx) == {"busy": 0, "done": 0, "error": 0, "resetting": 0}
            assert not b.outstanding, "the bus was left in the middle of a burst"
            assert b.semaphores(ctx) == [0] * 8
            if point % 2 == 0:
                first = len(b.issued)
                assert (await b.execute(ctx))["done"], point
                assert b.semaphores(ctx) == final
                for engine in ENGINES:
                    name = engine.name.lower()
                    pcs = [pc for _, which, pc, _ in b.issued[first:] if which == name]
                    expected = [b.base_of(engine) + 128 * i for i in range(len(programs[engine]))]
                    assert pcs == expected
                await b.write(ctx, "clear", 1)

    b.run(test)


def test_a_reset_drops_what_was_offered(bench):
    b = bench(latency=5)
    b.job_pauses = 1.0
    start = DmaStart(engine=Engine.POOL, table=0, engines_used=1, count=1, update=add(1))
    b.program(Engine.POOL, [start, start])

    async def test(ctx):
        await b.load(ctx)
        await b.start(ctx)
        await ctx.tick().repeat(100)
        assert ctx.get(b.dut.dma_jobs[0].valid)
        await b.reset(ctx)
        b.job_pauses = 0.0
        await ctx.tick().repeat(50)
        assert b.jobs == []
        await runs_clean(b, ctx)

    b.run(test)
    assert b.jobs == []


def test_a_reset_is_long_enough_and_waits_for_dma(bench):
    b = bench(latency=10)
    b.program(Engine.PE, [load()] * 3)
    b.drain_cycles = 90
    log = []

    def watch():
        dut = b.dut

        def model():
            while True:
                log.append((yield))

        return [dut.dma_halt, dut.dma_drained, dut.engine_reset], model()

    b.extra.append(watch)

    async def test(ctx):
        await b.load(ctx)
        await b.start(ctx)
        for _ in range(30):
            await ctx.tick()
        await b.reset(ctx)

    b.run(test)
    resets = [i for i, (_, _, reset) in enumerate(log) if reset]
    first = resets[RESET_CYCLES]
    assert resets[:RESET_CYCLES] == list(range(RESET_CYCLES)), "after a reset of the domain"
    assert resets[RESET_CYCLES:] == list(range(first, first + RESET_CYCLES))
    assert RESET_CYCLES >= 4
    assert all(halt for halt, _, reset in log[RESET_CYCLES:] if reset)
    assert log[first - 1][:2] == (1, 1)
    assert not log[-1][0]


def test_equal_runs_take_equal_time(bench):
    b = bench(latency=12, delays=(3, 3))
    b.program(Engine.PE, [load(update=add(1)) for _ in range(5)])
    b.program(Engine.DVE, [memset(waits=[ge(1, i)], update=add(2)) for i in range(5)])
    for engine in (Engine.ACT, Engine.POOL, Engine.SP):
        start = DmaStart(engine=engine, table=0, engines_used=1, count=1, update=add(3))
        waits = good(engine, 0, add(4)).replace(waits=[ge(2, 3)])
        b.program(engine, [start, waits, start])
    logs, lengths = [], []

    async def test(ctx):
        for i in range(4):
            b.issued.clear()
            b.updated.clear()
            b.jobs.clear()
            await b.write(ctx, "clear", 1)
            await b.set_semaphore(ctx, 5, i)  # takes a turn of its own
            await b.load(ctx)
            await ctx.tick().repeat(i + 1)
            await b.start(ctx)
            begin = b.cycle
            assert (await b.finish(ctx))["done"]
            lengths.append(await b.counter(ctx, "core_cycles"))
            logs.append([(c - begin, *rest) for c, *rest in (*b.issued, *b.updated, *b.jobs)])

    b.run(test)
    assert len(set(lengths)) == 1
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("delay", [14, 15, 16])
def test_what_ran_before_does_not_change_the_turns(delay, bench):
    b = bench(latency=12, delays=(delay, delay))

    def dma(engine, **keywords):
        return DmaStart(engine=engine, table=0, engines_used=1, count=1, **keywords)

    def event_and_dma(engine):
        return {engine: [event(engine, update=add(2)), dma(engine)]}

    # With one of the delays the first update of the tensor engine meets that of ACT. Later SP lets
    # two queues hand over their first DMA jobs at once.
    run = {
        Engine.PE: [load(update=add(1)) for _ in range(4)],
        Engine.ACT: [event(Engine.ACT, update=add(2)), dma(Engine.ACT, waits=[ge(7, 1)])],
        Engine.POOL: [dma(Engine.POOL, waits=[ge(7, 1)])],
        Engine.SP: [event(Engine.SP)] * 12 + [event(Engine.SP, update=add(7))],
    }
    before = [
        {},
        {Engine.DVE: [memset(update=add(2))], Engine.SP: [dma(Engine.SP)]},
        *(event_and_dma(engine) for engine in (Engine.ACT, Engine.POOL, Engine.SP)),
    ]
    logs = []

    async def test(ctx):
        for programs in before:
            for which in (programs, run):
                b.programs.clear()
                for engine, words in which.items():
                    b.program(engine, words)
                for log in (b.issued, b.updated, b.jobs, b.bursts):
                    log.clear()
                await b.write(ctx, "clear", 1)
                await b.load(ctx)
                await ctx.tick().repeat(20)
                await b.start(ctx)
                begin = b.cycle
                assert (await b.finish(ctx))["done"]
            found = (*b.issued, *b.updated, *b.jobs, *b.bursts)
            logs.append([(c - begin, *rest) for c, *rest in found])

    b.run(test)
    for programs, log in zip(before, logs, strict=True):
        assert log == logs[0], programs


def test_a_start_gives_the_first_turn_at_the_store_to_the_first_queue():
    dut = InstructionStore(config=TINY)
    n = len(Engine)
    found = []

    async def turns(ctx, wanted, want, take):
        """Queues in the order in which the store takes their requests."""
        order, left = [], wanted
        ctx.set(want, left)
        while left:
            taken = ctx.get(take)
            await ctx.tick()
            if taken:
                order.append(taken.bit_length() - 1)
                left &= ~taken
                ctx.set(want, left)
        return order

    async def test(ctx):
        ports = (dut.issue_want, dut.issue_take), (dut.check_want, dut.check_take)
        for before in range(n):
            for port in ports:
                await turns(ctx, 1 << before, *port)
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            for port in ports:
                found.append(await turns(ctx, (1 << n) - 1, *port))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(test)
    simulator.run()
    assert found == [list(range(n))] * (2 * n)


def test_queues_take_turns_at_being_checked():
    dut = InstructionStore(config=TINY)
    n, taken = len(Engine), []

    async def test(ctx):
        ctx.set(dut.check_want, (1 << n) - 1)
        for _ in range(2 * n * FRAME_CYCLES):
            if queues := ctx.get(dut.check_take):
                taken.append(queues.bit_length() - 1)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(test)
    simulator.run()
    assert taken == 2 * list(range(n))


def test_the_store_reads_for_issue_first_and_keeps_checks_apart(seed):
    dut = InstructionStore(config=TINY)
    rng = random.Random(seed)
    n, depth = len(Engine), TINY.queue_depth
    checks, both = [], 0

    def word(queue, slot):
        return sum((1 + queue * depth + slot + 256 * beat) << 64 * beat for beat in range(BEATS))

    async def test(ctx):
        nonlocal both
        for queue in range(n):
            for slot in range(depth):
                for beat in range(BEATS):
                    data = word(queue, slot) >> 64 * beat & (1 << 64) - 1
                    values = {"en": 1, "queue": queue, "slot": slot, "beat": beat, "data": data}
                    for name, value in values.items():
                        ctx.set(getattr(dut.write, name), value)
                    await ctx.tick()
        ctx.set(dut.write.en, 0)
        for cycle in range(300):
            issue = rng.getrandbits(n) if rng.random() < 0.3 else 0
            check = rng.getrandbits(n) if rng.random() < 0.9 else 0
            slots = [[rng.randrange(depth) for _ in range(n)] for _ in range(2)]
            ctx.set(dut.issue_want, issue)
            ctx.set(dut.check_want, check)
            for queue in range(n):
                ctx.set(dut.issue_slot[queue], slots[0][queue])
                ctx.set(dut.check_slot[queue], slots[1][queue])
            taken, checked = ctx.get(dut.issue_take), ctx.get(dut.check_take)
            both += bool(issue and check)
            assert taken.bit_count() == (issue != 0)
            assert taken & ~issue == checked & ~check == 0
            assert not (issue and checked), "a check goes before an issue"
            assert checked.bit_count() <= 1
            if checked:
                checks.append(cycle)
            await ctx.tick()
            assert ctx.get(dut.issue_valid) == taken
            assert ctx.get(dut.check_valid) == bool(checked)
            queue = (taken or checked).bit_length() - 1
            if queue >= 0:
                assert ctx.get(dut.word) == word(queue, slots[not taken][queue])
            if checked:
                assert ctx.get(dut.check_queue) == queue

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(test)
    simulator.run()
    assert min(b - a for a, b in pairwise(checks)) == FRAME_CYCLES
    assert both > 50


def test_counters_account_for_every_cycle_of_every_queue(bench):
    b = bench(latency=25, pauses=0.2, delays=(5, 30))
    b.program(Engine.PE, [load(update=add(1)) for _ in range(12)])
    b.program(Engine.DVE, [memset(waits=[ge(1, i)], update=add(2)) for i in range(12)])
    b.program(Engine.ACT, [event(Engine.ACT, waits=[ge(2, i)]) for i in range(8)])
    marks = []

    async def test(ctx):
        for _ in range(2):  # the second run starts from zero
            await b.write(ctx, "clear", 1)
            await b.load(ctx)
            await b.start(ctx)
            begin = b.cycle
            ctx.set(b.dut.sbuf_events.conflict_dma_read, 3)
            ctx.set(b.dut.dma_events.read_bytes, 100)
            ctx.set(b.dut.act_events.wait_table, 1)
            for _ in range(10):
                await ctx.tick()
            ctx.set(b.dut.sbuf_events.conflict_dma_read, 0)
            ctx.set(b.dut.dma_events.read_bytes, 0)
            ctx.set(b.dut.act_events.wait_table, 0)
            assert (await b.finish(ctx))["done"]
            counters = await b.counters(ctx)
            assert counters["core_cycles"] == await b.counter(ctx, "core_cycles")
            assert counters["sbuf_conflict_dma_read"] == 30
            assert counters["dma_read_bytes"] == 1000
            assert counters["act_wait_table"] == 10
            assert counters["fetch_bytes"] == 128 * sum(b.programs.values())
            assert abs(counters["core_cycles"] - (b.cycle - begin)) < 1000
            for engine in Engine:
                name = f"queue_{engine.name.lower()}"
                parts = [
                    counters[f"{name}_{what}"]
                    for what in ("issued", "wait_semaphore", "wait_engine", "wait_fetch")
                ]
                assert parts[0] == b.programs.get(engine, 0)
                assert sum(parts) < counters["core_cycles"]
            pe = sum(
                counters[f"queue_pe_{what}"]
                for what in ("issued", "wait_semaphore", "wait_engine", "wait_fetch")
            )
            # The queue's time ends when its last instruction is taken.
            marks.append((pe, b.cycles("pe")[-1] - begin))
        assert all(abs(counted - measured) <= 3 for counted, measured in marks)

    b.run(test)


def test_core_cycles_count_from_the_accepted_start_to_the_visible_end(bench):
    b = bench(latency=10)
    b.program(Engine.ACT, [event(Engine.ACT)] * 4)
    log = []

    def watch():
        registers = b.dut.registers

        def model():
            while True:
                log.append((yield))

        return [registers.start, registers.busy, registers.done], model()

    b.extra.append(watch)

    async def test(ctx):
        await b.load(ctx)
        await b.start(ctx)
        assert (await b.finish(ctx))["done"]
        assert await b.counter(ctx, "core_cycles") == cycles()

    def cycles():
        begin = next(i for i, (start, _, _) in enumerate(log) if start)
        end = next(i for i, (_, _, done) in enumerate(log) if done)
        assert log[begin + 1][1], "busy in the next cycle"
        return end - begin

    b.run(test)


# Anything -----------------------------------------------------------------------------------------


def test_random_words_end_in_an_error_or_are_issued_and_never_hang(bench, seed):
    b = bench(latency=4, delays=(0, 2))
    rng = random.Random(seed)
    outcomes = Counter()

    def mutated(engine):
        word = int.from_bytes(good(engine, 1, add(rng.randrange(8))).encode(), "little")
        used = [bit for bit in range(1024) if INSTRUCTIONS[word & 0xFF].used_mask() >> bit & 1]
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            word ^= 1 << rng.choice([rng.choice(used), rng.choice(used), rng.randrange(1024)])
        return word

    async def test(ctx):
        for _ in range(30):
            await b.write(ctx, "watchdog", 40)
            for engine in Engine:
                words = [
                    mutated(engine) if rng.random() < 0.95 else rng.getrandbits(1024)
                    for _ in range(rng.randint(0, 2))
                ]
                b.program(engine, words)
            first = len(b.issued)
            status = await b.execute(ctx, limit=1500)
            assert status["done"] != status["error"]
            code = (await b.error(ctx))["code"] if status["error"] else ErrorCode.NONE
            outcomes[code.name] += 1
            for _, name, pc, word in b.issued[first:]:
                golden.check_word(word.to_bytes(128, "little"), Engine[name.upper()], b.config)
                assert word == int.from_bytes(b.memory[pc], "little")
            if status["error"]:
                await b.reset(ctx)
            else:
                await b.write(ctx, "clear", 1)
        await runs_clean(b, ctx)

    b.run(test)
    assert outcomes["NONE"] >= 1, outcomes
    assert len(outcomes) >= 4, outcomes


@pytest.mark.parametrize("depth", [2, 32])
def test_queues_of_any_depth_wrap(depth, bench):
    b = bench(config=replace(TINY, semaphores=8, queue_depth=depth), latency=7, pauses=0.1)
    n = depth + 7
    b.program(Engine.PE, [load(update=add(1)) for _ in range(n)])
    b.program(Engine.POOL, [event(Engine.POOL, update=add(2)) for _ in range(n)])

    async def test(ctx):
        assert (await b.execute(ctx))["done"]
        assert await b.semaphore(ctx, 1) == await b.semaphore(ctx, 2) == n

    b.run(test)
    assert b.pcs("pe") == [b.base_of(Engine.PE) + 128 * i for i in range(n)]
    for _, _, pc, word in b.issued:
        assert word == int.from_bytes(b.memory[pc], "little")


@pytest.mark.parametrize("depth", [2, 8])
def test_a_queue_that_waits_prefetches_no_more_than_its_store_holds(depth, bench):
    b = bench(config=replace(TINY, semaphores=8, queue_depth=depth), delays=(90, 90))
    n = 3 * depth + 4
    b.program(Engine.PE, [load(waits=[ge(1, 1)] if not i else [], update=add(2)) for i in range(n)])
    b.program(Engine.DVE, [memset(i, update=add(3)) for i in range(10)])
    b.program(Engine.POOL, [event(Engine.POOL, waits=[ge(3, 10)], update=add(1))])

    async def test(ctx):
        await b.write(ctx, "watchdog", 500)
        assert (await b.execute(ctx))["done"]
        assert await b.semaphore(ctx, 2) == n

    b.run(test)
    assert b.pcs("pe") == [b.base_of(Engine.PE) + 128 * i for i in range(n)]
    for _, _, pc, word in b.issued:
        assert word == int.from_bytes(b.memory[pc], "little")
    first = next(cycle for cycle, name, _, _ in b.issued if name == "pe")
    early = [c for c, at in b.bursts if at >> 16 == b.base_of(Engine.PE) >> 16 and c < first]
    assert len(early) == depth + 2  # the store, the next one, the head


def test_a_machine_with_sixteen_dma_engines(bench):
    b = bench(config=replace(TRN, semaphores=16), latency=10, pauses=0.3)
    b.descriptor_cycles = 1
    program = [
        DmaStart(engine=Engine.ACT, table=1 << 20, first=0, engines_used=16, count=3,
                 update=add(15)),
        DmaStart(engine=Engine.ACT, table=1 << 21, first=5, engines_used=7, count=2, queue=3,
                 update=add(15), waits=[ge(15, 16)]),
        event(Engine.ACT, waits=[ge(15, 23)], update=add(14)),
    ]  # fmt: skip
    b.program(Engine.ACT, program)

    async def test(ctx):
        assert (await b.execute(ctx))["done"]
        assert await b.semaphore(ctx, 15) == 23
        assert await b.semaphore(ctx, 14) == 1

    b.run(test)
    got = sorted((engine, queue, table, count) for _, engine, queue, table, count, _ in b.jobs)
    want = [(e, 0, (1 << 20) + e * 3 * 128, 3) for e in range(16)]
    want += [(5 + i, 3, (1 << 21) + i * 2 * 128, 2) for i in range(7)]
    assert got == sorted(want)
