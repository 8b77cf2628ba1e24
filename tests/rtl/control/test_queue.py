"""One instruction queue by itself: order, waits, what follows an illegal word, updates."""

import random

import pytest
from amaranth.sim import Simulator
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import (
    WORD_BYTES,
    AccessPattern,
    Activation,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    LoadStationary,
    Update,
    UpdateMode,
    Wait,
    WaitMode,
)
from makalu.rtl.arch.registers import QUEUE_STATE
from makalu.rtl.control.check import FRAME_CYCLES, Checker
from makalu.rtl.control.queue import InstructionQueue

BASE = 0x4000
GE, EQ = WaitMode.GE, WaitMode.EQ
STATES = {value: name for name, value in QUEUE_STATE.items()}


def load(*waits):
    pattern = AccessPattern(formats.BF16, 0, TINY.partitions, 0, ((1, 4),))
    return LoadStationary(src=pattern, waits=list(waits))


def activate(bias):
    pattern = AccessPattern(formats.BF16, 0, TINY.partitions, 0, ((1, 4),))
    return Activation(dst=pattern, src=pattern, bias=bias)


def event(engine, update=None, *waits):
    update = {} if update is None else {"update": Update(update, UpdateMode.ADD, 1)}
    return EventSemaphore(engine=engine, waits=list(waits), **update)


class Run:
    """A queue between a store, a checker, an engine and semaphores in Python.

    ``events`` (cycle to function of this run) changes them on the way; ``left`` are the things that
    left the queue, in order: ``("issue" or "dma", pc, word)``, ``("update", pc, semaphore)``.
    """

    def __init__(self, program, engine=Engine.PE, verdicts=None, ready=1.0, seed=1, rate=1.0):
        self.dut = InstructionQueue(config=TINY, engine=engine)
        self.words = [int.from_bytes(i.encode(), "little") for i in program]
        self.verdicts = verdicts or {}
        self.ready, self.rate, self.rng = ready, rate, random.Random(seed)
        self.semaphores, self.events, self.left = {}, {}, []
        self.run, self.hold, self.cycle = 1, 0, 0
        self.count = len(self.words)
        self.error = None
        self.offers_may_end = -1  # the cycle of a clear

    def simulate(self, cycles):
        simulator = Simulator(self.dut)
        simulator.add_clock(1e-6)

        async def testbench(ctx):
            await self.body(ctx, cycles)

        simulator.add_testbench(testbench)
        simulator.run()
        return self

    async def body(self, ctx, cycles):
        dut = self.dut
        self.ctx = ctx
        ctx.set(dut.base, BASE)
        ctx.set(dut.count, self.count)
        ctx.set(dut.start, 1)
        await ctx.tick()
        ctx.set(dut.start, 0)
        fetched = checked = freed = cooldown = 0
        due, reading = {}, None
        ports = {"update": dut.update}
        if dut.has_engine:
            ports["issue"] = dut.issue
        if dut.has_dma:
            ports["dma"] = dut.dma
        offered = {}
        for self.cycle in range(cycles):
            if self.cycle in self.events:
                self.events[self.cycle](self)
            ctx.set(dut.run, self.run)
            ctx.set(dut.hold, self.hold)
            more = (
                fetched < min(self.count, freed + TINY.queue_depth)
                and self.rng.random() < self.rate
            )
            ctx.set(dut.fetched, int(more))
            fetched += more
            takes = ctx.get(dut.check_want) and not cooldown
            ctx.set(dut.check_take, int(takes))
            if takes:
                assert ctx.get(dut.check_slot) == checked % TINY.queue_depth
                due[self.cycle + Checker.LATENCY_CYCLES] = self.verdicts.get(checked, 0)
                checked += 1
            cooldown = FRAME_CYCLES - 1 if takes else max(0, cooldown - 1)
            ctx.set(dut.verdict_valid, int(self.cycle in due))
            ctx.set(dut.verdict.code, due.get(self.cycle, 0))
            ctx.set(dut.issue_valid, int(reading is not None))
            ctx.set(dut.word, 0 if reading is None else reading)
            reading = None
            wants = ctx.get(dut.issue_want)
            ctx.set(dut.issue_take, wants)
            if wants:
                slot = ctx.get(dut.issue_slot)
                number = max(i for i in range(fetched) if i % TINY.queue_depth == slot)
                reading = self.words[number]
            freed += ctx.get(dut.free)
            for i in range(2):
                index = ctx.get(dut.wait_semaphore[i])
                ctx.set(dut.wait_value[i], self.semaphores.get(index, 0))
            moved = 0
            for name, port in ports.items():
                ready = self.rng.random() < self.ready
                ctx.set(port.ready, int(ready))
                valid, payload = ctx.get(port.valid), ctx.get(port.payload)
                if self.cycle == self.offers_may_end + 1:
                    offered.clear()
                if name in offered:
                    assert valid, f"{name} was withdrawn"
                    assert payload == offered.pop(name), f"{name} changed"
                if valid and not ready:
                    offered[name] = payload
                if valid and ready:
                    moved += 1
                    what = {
                        "update": lambda p: p.semaphore,
                        "issue": lambda p: p.word,
                        "dma": lambda p: p.table,
                    }[name](payload)
                    self.left.append((name, ctx.get(dut.status.pc), what))
            assert moved <= 1
            assert ctx.get(dut.moved) >= moved
            if ctx.get(dut.error.valid) and self.error is None:
                code, pc = ctx.get(dut.error.code), ctx.get(dut.error.pc)
                self.error = (self.cycle, code, pc)
            await ctx.tick()
        self.done = ctx.get(dut.done)
        self.status = ctx.get(dut.status)


def pc(i):
    return BASE + WORD_BYTES * i


@pytest.mark.parametrize("rate", [1.0, 0.1], ids=["prefetched", "slow-fetch"])
@pytest.mark.parametrize("ready", [1.0, 0.3], ids=["free", "pauses"])
def test_everything_leaves_once_and_in_order(ready, rate, seed):
    program = []
    for i in range(3 * TINY.queue_depth):
        program.append(event(Engine.PE, i) if i % 3 == 1 else load())
    run = Run(program, ready=ready, rate=rate, seed=seed).simulate(1000)
    assert run.left == [
        ("update", pc(i), i) if i % 3 == 1 else ("issue", pc(i), run.words[i])
        for i in range(len(program))
    ]
    assert run.done
    assert run.status.issued == len(program)
    assert STATES[run.status.state] == "done"
    assert run.error is None


def test_dma_starts_leave_by_their_own_port(seed):
    program = [
        DmaStart(engine=Engine.SP, table=128 * i, engines_used=1, count=1) if i % 2
        else event(Engine.SP, i)
        for i in range(12)
    ]  # fmt: skip
    run = Run(program, Engine.SP, ready=0.4, seed=seed).simulate(400)
    assert run.left == [
        ("dma", pc(i), 128 * i) if i % 2 else ("update", pc(i), i) for i in range(12)
    ]
    assert run.done


@pytest.mark.parametrize("ready", [1.0, 0.3], ids=["free", "pauses"])
def test_a_queue_with_an_engine_and_dma_keeps_one_order(ready, seed):
    rng = random.Random(seed)
    kinds = [rng.choice(["issue", "dma", "update"]) for _ in range(40)]
    kinds += ["issue", "dma", "issue", "update", "issue", "update", "dma", "update"]
    make = {
        "issue": activate,
        "dma": lambda i: DmaStart(engine=Engine.ACT, table=128 * i, engines_used=1, count=1),
        "update": lambda i: event(Engine.ACT, i),
    }
    run = Run([make[kind](i) for i, kind in enumerate(kinds)], Engine.ACT, ready=ready, seed=seed)
    run.simulate(1200)
    what = {"issue": lambda i: run.words[i], "dma": lambda i: 128 * i, "update": lambda i: i}
    assert run.left == [(kind, pc(i), what[kind](i)) for i, kind in enumerate(kinds)]
    assert run.done


def test_an_event_without_update_leaves_at_once():
    run = Run([event(Engine.PE), event(Engine.PE), load()], ready=0.0).simulate(60)
    assert run.left == []
    assert run.status.issued == 2


def test_both_waits_hold_before_an_instruction_is_offered():
    program = [load(), load(Wait(1, GE, 5)), load(Wait(1, GE, 5), Wait(3, EQ, 7)), load()]
    run = Run(program)
    run.semaphores = {1: 4, 3: 8}
    seen = []

    def change(semaphore, value):
        def apply(run):
            seen.append(len(run.left))
            run.semaphores[semaphore] = value

        return apply

    run.events = {60: change(1, 5), 90: change(3, 6), 120: change(3, 7), 150: change(3, 0)}
    run.simulate(160)
    assert seen == [1, 2, 2, 4]


@pytest.mark.parametrize("bad", [0, 1, 4])
def test_words_that_are_legal_behind_an_illegal_one_do_not_count(bad, seed):
    """They are in the checker already when the illegal one is found."""
    program = [load() for _ in range(8)]
    run = Run(program, verdicts={bad: ErrorCode.BAD_FIELD}, seed=seed).simulate(120)
    assert run.left == [("issue", pc(i), run.words[i]) for i in range(bad)]
    assert run.error[1:] == (ErrorCode.BAD_FIELD, pc(bad))
    assert STATES[run.status.state] == "stopped"
    assert not run.done


def test_the_first_of_two_illegal_words_is_reported():
    verdicts = {2: ErrorCode.OUT_OF_RANGE, 3: ErrorCode.BAD_FIELD}
    run = Run([load() for _ in range(6)], verdicts=verdicts).simulate(120)
    assert run.error[1:] == (ErrorCode.OUT_OF_RANGE, pc(2))


@pytest.mark.parametrize("what", ["run", "hold"])
def test_nothing_new_is_offered_while_stopped_or_held(what, seed):
    run = Run([load() for _ in range(8)], ready=0.5, seed=seed)
    lengths = []

    def change(value):
        def apply(run):
            lengths.append(len(run.left))
            setattr(run, what, value)

        return apply

    # What is being offered may still go.
    stop, go = (0, 1) if what == "run" else (1, 0)
    run.events = {25: change(stop), 80: change(go)}
    run.simulate(200)
    assert lengths[1] - lengths[0] <= 1
    assert len(run.left) == 8


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "offered"])
def test_a_clear_forgets_everything(waits, after):
    program = [load(Wait(1, GE, 1)) if waits else load() for _ in range(8)]
    # No verdict comes after a clear: it lasts longer than a check.
    at = len(program) * FRAME_CYCLES + Checker.LATENCY_CYCLES + after
    run = Run(program, ready=0.0)

    def clear(run):
        run.count = 0
        run.ctx.set(run.dut.clear, 1)

    def go_on(run):
        run.ctx.set(run.dut.clear, 0)
        run.ready, run.semaphores[1] = 1.0, 1
        offers = run.ctx.get(run.dut.issue.valid)
        assert not offers, "what was offered outlived the clear"

    run.events = {at: clear, at + 1: go_on}
    run.offers_may_end = at
    run.simulate(80)
    assert run.left == []
    assert run.done
    assert (STATES[run.status.state], run.status.issued) == ("done", 0)


def test_the_wait_that_does_not_hold_is_shown():
    run = Run([load(Wait(1, GE, 5), Wait(3, EQ, 7))])
    shown = []

    def look(**semaphores):
        def apply(run):
            status = run.ctx.get(run.dut.status)
            shown.append((STATES[status.state], status.wait, status.mode, status.semaphore,
                          status.wanted, status.seen))  # fmt: skip
            run.semaphores |= {int(name[1:]): value for name, value in semaphores.items()}

        return apply

    run.events = {40: look(s1=9), 50: look(s1=4, s3=7), 60: look(s1=5), 70: look()}
    run.simulate(80)
    assert shown == [
        ("waiting_semaphore", 0, GE, 1, 5, 0),
        ("waiting_semaphore", 1, EQ, 3, 7, 0),
        ("waiting_semaphore", 0, GE, 1, 5, 4),
        ("done", 0, 0, 0, 0, 0),
    ]
