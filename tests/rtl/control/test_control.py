"""The whole control block: runs, throughput, errors, watchdog, reset."""

from makalu.rtl.arch import formats
from makalu.rtl.arch.isa import (
    AccessPattern,
    DmaStart,
    Engine,
    EventSemaphore,
    LoadStationary,
    MatmulMoving,
    Memset,
    Space,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)

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


def add(semaphore, value=1):
    return Update(semaphore, ADD, value)


def ge(semaphore, value):
    return Wait(semaphore, GE, value)


def event(engine, *, waits=(), update=None):
    return EventSemaphore(engine=engine, waits=waits, update=update)


def test_runs_a_program_on_all_queues_in_order(bench):
    b = bench(pauses=0.3)
    b.program(Engine.PE, [load() if i % 2 else matmul(update=add(1)) for i in range(20)])
    b.program(Engine.DVE, [memset(i, update=add(2)) for i in range(20)])
    b.program(Engine.ACT, [event(Engine.ACT, waits=[ge(1, i)], update=add(3)) for i in range(10)])
    b.program(Engine.POOL, [event(Engine.POOL, update=add(4, 2)) for i in range(10)])
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
    assert b.pcs("dve") == [b.base_of(Engine.DVE) + 128 * i for i in range(20)]
    for _, _, pc, word in b.issued:
        assert word == int.from_bytes(b.memory[pc], "little")
    assert [job[3:5] for job in b.jobs] == [(i * 128, i) for i in range(10)]
