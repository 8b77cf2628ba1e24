"""Dispatch of DMA jobs: every engine gets each job exactly once, in order."""

import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.rtl.control.dispatch import DISPATCH_QUEUES, DispatchDma

UPDATE = ("semaphore", "mode", "value")


def test_a_start_gives_the_first_turn_to_the_first_queue():
    dut = DispatchDma(config=TINY)
    n = len(DISPATCH_QUEUES)
    order = []

    async def serve(ctx, wanted):
        """Requests of the queues ``wanted``; the order in which they are taken."""
        taken = []
        for i in wanted:
            ctx.set(dut.requests[i].valid, 1)
        while len(taken) < len(wanted) or ctx.get(dut.busy):
            ready = [i for i in wanted if i not in taken and ctx.get(dut.requests[i].ready)]
            await ctx.tick()
            for i in ready:
                taken.append(i)
                ctx.set(dut.requests[i].valid, 0)
        return taken

    async def run(ctx):
        ctx.set(dut.jobs[0].ready, 1)
        for request in dut.requests:
            ctx.set(request.p.engines_used, 1)
        for before in range(n):
            await serve(ctx, [before])
            ctx.set(dut.start, 1)
            await ctx.tick()
            ctx.set(dut.start, 0)
            order.append(await serve(ctx, range(n)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run)
    simulator.run()
    assert order == [list(range(n))] * n


@pytest.mark.parametrize("pauses", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("config", [TINY, SMALL, replace(TRN, rows=64), TRN], ids=lambda c: c.rows)
def test_every_engine_gets_each_job_once_and_in_order(config, pauses, seed):
    rng = random.Random(seed)
    engines = config.dma_engines
    dut = DispatchDma(config=config)
    plans = []
    for _ in DISPATCH_QUEUES:
        plan = []
        for _ in range(12):
            first = rng.randrange(engines)
            plan.append(
                {
                    "table": rng.randrange(1 << 33) << 7,
                    "first": first,
                    "engines_used": rng.randint(1, engines - first),
                    "queue": rng.randrange(4),
                    "count": rng.choice([0, 1, 2, 0xFFFF, rng.randrange(1 << 16)]),
                    "semaphore": rng.randrange(256),
                    "mode": rng.randrange(3),
                    "value": rng.randrange(1 << 32),
                }
            )
        plans.append(deque(plan))
    expected = [[] for _ in range(engines)]
    got = [[] for _ in range(engines)]
    taken = []  # cycles
    cycle = 0

    async def run(ctx):
        nonlocal cycle
        looks = []
        for request in dut.requests:
            looks += [request.valid, request.ready]
        jobs = [port.p for port in dut.jobs]
        members = [
            [job.queue, job.table, job.count, *(job.update[name] for name in UPDATE)]
            for job in jobs
        ]
        for port in dut.jobs:
            looks += [port.valid, port.ready]
        for fields in members:
            looks += fields
        held = [None] * engines
        while any(plans) or ctx.get(dut.busy) or cycle == 0:
            for request, plan in zip(dut.requests, plans, strict=True):
                if plan and not ctx.get(request.valid) and rng.random() >= pauses:
                    for name, value in plan[0].items():
                        field = request.p.update[name] if name in UPDATE else request.p[name]
                        ctx.set(field, value)
                    ctx.set(request.valid, 1)
            for port in dut.jobs:
                ctx.set(port.ready, rng.random() >= pauses)
            _, _, *values = await ctx.tick().sample(*looks)
            n = 2 * len(plans)
            payloads = values[n + 2 * engines :]
            for i, plan in enumerate(plans):
                valid, ready = values[2 * i : 2 * i + 2]
                if valid and ready:
                    taken.append(cycle)
                    job = plan.popleft()
                    ctx.set(dut.requests[i].valid, 0)
                    for k in range(job["engines_used"]):
                        expected[job["first"] + k].append(
                            [
                                job["queue"],
                                (job["table"] + k * job["count"] * 128) % (1 << 40),
                                job["count"],
                                *(job[name] for name in UPDATE),
                            ]
                        )
            for e in range(engines):
                valid, ready = values[n + 2 * e : n + 2 * e + 2]
                payload = list(payloads[6 * e : 6 * e + 6])
                if held[e] is not None:
                    assert valid
                    assert payload == held[e], "a job changed while it was offered"
                held[e] = payload if valid and not ready else None
                if valid and ready:
                    got[e].append(payload)
            cycle += 1
            assert cycle < 20000, "jobs are stuck"

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run)
    simulator.run()
    assert got == expected
    if not pauses:
        assert max(b - a for a, b in pairwise(taken)) <= 4


@pytest.mark.parametrize("late", range(6))
def test_clear_drops_what_has_not_been_handed_over(late):
    config = TINY if late % 2 else SMALL
    dut = DispatchDma(config=config)
    engines = config.dma_engines
    job = {"table": 0x80, "first": 0, "engines_used": engines, "count": 3, "queue": 1}

    async def run(ctx):
        async def offer(queue):
            for name, value in job.items():
                ctx.set(dut.requests[queue].p[name], value)
            ctx.set(dut.requests[queue].valid, 1)
            await ctx.tick().until(dut.requests[queue].ready)
            ctx.set(dut.requests[queue].valid, 0)

        # Nobody takes the jobs.
        await offer(0)
        for _ in range(late):
            await ctx.tick()
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.clear, 0)
        for _ in range(6):
            assert not ctx.get(dut.busy)
            assert not any(ctx.get(port.valid) for port in dut.jobs), "a job outlived the clear"
            await ctx.tick()

        # What comes next is handed over, once.
        handed = [0] * engines
        for port in dut.jobs:
            ctx.set(port.ready, 1)
        await offer(len(DISPATCH_QUEUES) - 1)
        for _ in range(8):
            for e, port in enumerate(dut.jobs):
                handed[e] += ctx.get(port.valid)
            await ctx.tick()
        assert handed == [1] * engines

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run)
    simulator.run()


def test_a_request_offered_during_a_clear_is_not_kept():
    dut = DispatchDma(config=TINY)

    async def run(ctx):
        ctx.set(dut.requests[0].p.engines_used, 1)
        ctx.set(dut.requests[0].valid, 1)
        ctx.set(dut.clear, 1)
        await ctx.tick()
        ctx.set(dut.requests[0].valid, 0)
        ctx.set(dut.clear, 0)
        for _ in range(6):
            assert not ctx.get(dut.busy)
            assert not ctx.get(dut.jobs[0].valid)
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(run)
    simulator.run()
