"""The control block: everything between the host and the engines.

It starts, fetches, checks, holds and issues instructions, keeps semaphores and counters, and stops
the machine in an orderly way when something is wrong.
"""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..arch.config import AXI_ADDR_BITS
from ..arch.events import events_layout
from ..arch.isa import Engine, ErrorCode
from ..arch.registers import ADDRESS_BITS, QUEUE_STATE
from ..interfaces import DmaJob, Error, Issue, Update
from ..lib.axi import AXI4Lite, AXI4Read
from ..lib.stream import connect_streams
from .check import Checker
from .counters import SOURCES, Counters
from .dispatch import DISPATCH_QUEUES, DispatchDma
from .fetch import Fetch
from .queue import InstructionQueue, InstructionStore
from .registers import HostRegisters
from .semaphore import SOURCE_DMA, Semaphores

__all__ = ["RESET_CYCLES", "SETTLE_CYCLES", "Control"]

RESET_CYCLES = 16
"""Length of a reset of the engines; the checker runs empty meanwhile."""

SETTLE_CYCLES = 4
"""How long everything must have been quiet before a run is done: engines may present their ``busy``
this much later than they take an instruction."""


def _shows_progress(name):
    """Whether an engine's event means that something moved."""
    return not name.startswith(("wait", "conflict", "busy"))


class Control(wiring.Component):
    """Instruction fetch, queues, checking, semaphores, host registers, counters, reset.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    host : :py:`In(AXI4Lite)`
    fetch : :py:`Out(AXI4Read)`
    pe, act, dve, pool : :py:`Out(stream.Signature(Issue))`
        Legal instructions whose waits have held.
    dma_jobs : :py:`Out(stream.Signature(DmaJob)).array(config.dma_engines)`
    pe_update, act_update, dve_update, pool_update, dma_update
        : :py:`In(stream.Signature(Update))`
        Semaphore updates of completed work.
    dma_error : :py:`In(Error).array(config.dma_engines)`
    pe_busy, act_busy, dve_busy, pool_busy, dma_busy
        Work inside, updates included.
    pe_events, act_events, dve_events, pool_events, sbuf_events, dma_events
        Increments of counters; ``dma_events`` summed over engines.
    dma_halt : :py:`Out(1)`
        Begin no burst; ``dma_drained`` says that none is under way.
    engine_reset : :py:`Out(1)`
        Registered; resets the domain of engines and memories. High from a reset of this block on
        for :data:`RESET_CYCLES`, and as long during a reset by the host.

    Attributes
    ----------
    registers, semaphores : components
        For test benches that look inside.

    Timing
    ------
    An instruction whose wait becomes true is offered three cycles after the update was taken. All
    queues together issue an instruction in 16 cycles (the fetch bus); a queue with prefetched
    instructions issues one in at most four.

    Internals
    ---------
    Progress, for the watchdog, is: an instruction issued, an update, a job handed over, data
    fetched, or an engine's event other than its busy and waiting times (an element, a column, bytes
    or a beat moved).

    Arbiters begin every run at their first source, so that equal runs take equal time.

    An error stops what has not been offered to an engine; engines finish what they have. The
    registers of the queues keep showing who waits.
    """

    def __init__(self, *, config):
        self.config = config
        self.registers = HostRegisters(config=config)
        self.semaphores = Semaphores(config=config)
        engines = config.dma_engines
        updates = stream.Signature(Update)
        super().__init__(
            {
                "host": In(AXI4Lite(addr_bits=ADDRESS_BITS)),
                "fetch": Out(AXI4Read(addr_bits=AXI_ADDR_BITS)),
                "pe": Out(stream.Signature(Issue)),
                "act": Out(stream.Signature(Issue)),
                "dve": Out(stream.Signature(Issue)),
                "pool": Out(stream.Signature(Issue)),
                "dma_jobs": Out(stream.Signature(DmaJob)).array(engines),
                "pe_update": In(updates),
                "act_update": In(updates),
                "dve_update": In(updates),
                "pool_update": In(updates),
                "dma_update": In(updates).array(engines),
                "dma_error": In(Error).array(engines),
                "pe_busy": In(1),
                "act_busy": In(1),
                "dve_busy": In(1),
                "pool_busy": In(1),
                "dma_busy": In(engines),
                "pe_events": In(events_layout("pe")),
                "act_events": In(events_layout("act")),
                "dve_events": In(events_layout("dve")),
                "pool_events": In(events_layout("pool")),
                "sbuf_events": In(events_layout("sbuf")),
                "dma_events": In(events_layout("dma")),
                "dma_halt": Out(1),
                "dma_drained": In(engines),
                "engine_reset": Out(1, init=1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        # No verdict of a word from before a reset may come after it.
        assert RESET_CYCLES > Checker.LATENCY_CYCLES + 1
        m.submodules.registers = registers = self.registers
        m.submodules.fetcher = fetch = Fetch(config=config)
        m.submodules.store = store = InstructionStore(config=config)
        m.submodules.checker = checker = Checker(config=config)
        m.submodules.semaphores = semaphores = self.semaphores
        m.submodules.dispatch = dispatch = DispatchDma(config=config)
        m.submodules.counters = counters = Counters()
        queues = [InstructionQueue(config=config, engine=engine) for engine in Engine]
        for queue in queues:
            m.submodules[f"{queue.engine.name.lower()}_queue"] = queue

        # State of the machine
        start = Signal()
        busy, done, failed = Signal(), Signal(), Signal()
        resetting = Signal()
        clear = self.engine_reset
        m.d.comb += start.eq(registers.start & ~busy & ~failed & ~resetting)

        connect(m, flipped(self.host), registers.host)
        connect(m, fetch.bus, flipped(self.fetch))
        m.d.comb += [
            registers.busy.eq(busy),
            registers.done.eq(done),
            registers.failed.eq(failed),
            registers.resetting.eq(resetting),
            fetch.start.eq(start),
            store.start.eq(start),
            dispatch.start.eq(start),
            semaphores.start.eq(start),
            fetch.run.eq(busy),
            fetch.clear.eq(clear),
        ]

        # Fetch, store, checker, queues
        connect(m, fetch.write, store.write)
        m.d.comb += [
            checker.i.valid.eq(store.check_valid),
            checker.i.p.queue.eq(store.check_queue),
            checker.i.p.word.eq(store.word),
        ]
        for q, queue in enumerate(queues):
            m.d.comb += [
                fetch.base[q].eq(registers.base[q]),
                fetch.count[q].eq(registers.count[q]),
                fetch.free[q].eq(queue.free),
                queue.start.eq(start),
                queue.clear.eq(clear),
                queue.base.eq(registers.base[q]),
                queue.count.eq(registers.count[q]),
                queue.run.eq(busy),
                queue.hold.eq(semaphores.sweeping),
                queue.fetched.eq(fetch.fetched[q]),
                queue.failed.eq(fetch.failed[q]),
                store.check_want[q].eq(queue.check_want),
                store.check_slot[q].eq(queue.check_slot),
                queue.check_take.eq(store.check_take[q]),
                queue.verdict_valid.eq(checker.o.valid & (checker.o.p.queue == q)),
                queue.verdict.eq(checker.o.payload),
                store.issue_want[q].eq(queue.issue_want),
                store.issue_slot[q].eq(queue.issue_slot),
                queue.issue_take.eq(store.issue_take[q]),
                queue.issue_valid.eq(store.issue_valid[q]),
                queue.word.eq(store.word),
                semaphores.queue_pc[q].eq(queue.status.pc),
                registers.queues[q].eq(queue.status),
            ]
            for i in range(2):
                m.d.comb += [
                    semaphores.read_index[2 * q + i].eq(queue.wait_semaphore[i]),
                    queue.wait_value[i].eq(semaphores.read_value[2 * q + i]),
                ]
            connect_streams(m, queue.update, semaphores.queues[q])

        # Engines
        connect_streams(m, queues[Engine.PE].issue, self.pe)
        connect_streams(m, queues[Engine.ACT].issue, self.act)
        connect_streams(m, queues[Engine.DVE].issue, self.dve)
        connect_streams(m, queues[Engine.POOL].issue, self.pool)
        for i, engine in enumerate(DISPATCH_QUEUES):
            connect_streams(m, queues[engine].dma, dispatch.requests[i])
        connect_streams(m, self.pe_update, semaphores.pe)
        connect_streams(m, self.act_update, semaphores.act)
        connect_streams(m, self.dve_update, semaphores.dve)
        connect_streams(m, self.pool_update, semaphores.pool)
        for e in range(config.dma_engines):
            connect_streams(m, dispatch.jobs[e], self.dma_jobs[e])
            connect_streams(m, self.dma_update[e], semaphores.dma[e])
        m.d.comb += dispatch.clear.eq(clear)

        # Semaphores and host
        connect_streams(m, registers.semaphore, semaphores.host)
        m.d.comb += [
            semaphores.clear.eq(clear),
            semaphores.read_index[-1].eq(registers.semaphore_index),
            registers.semaphore_value.eq(semaphores.read_value[-1]),
            registers.sweeping.eq(semaphores.sweeping),
        ]

        # Counters
        m.d.comb += [
            counters.clear.eq(start),
            counters.core.cycles.eq(start | busy),
            counters.fetch.bytes.eq(fetch.bytes),
            counters.read.eq(registers.counter_read),
            counters.select.eq(registers.counter_select),
            registers.counter_value.eq(counters.value),
        ]
        events = {
            "pe": self.pe_events,
            "act": self.act_events,
            "dve": self.dve_events,
            "pool": self.pool_events,
            "sbuf": self.sbuf_events,
            "dma": self.dma_events,
            **{f"queue_{queue.engine.name.lower()}": queue.events for queue in queues},
        }
        assert set(events) | {"core", "fetch"} == set(SOURCES)
        for source, increments in events.items():
            m.d.comb += getattr(counters, source).eq(increments)

        # Watchdog
        progress = Signal()
        m.d.comb += progress.eq(
            Cat(
                (queue.moved for queue in queues),
                semaphores.moved,
                semaphores.sweeping,
                dispatch.moved,
                fetch.bytes.any(),
                (
                    layout[name].any()
                    for layout in (
                        self.pe_events,
                        self.act_events,
                        self.dve_events,
                        self.pool_events,
                        self.dma_events,
                    )
                    for name, _ in layout.shape()
                    if _shows_progress(name)
                ),
            ).any()
        )
        still = Signal(32)
        expired = Signal()
        m.d.sync += still.eq(Mux(busy & ~progress, still + 1, 0))
        m.d.comb += expired.eq(
            busy & ~progress & registers.watchdog.any() & (still >= registers.watchdog)
        )
        # Whom to name: the first queue that waits for a semaphore, else the first with work left.
        blamed, blamed_pc = Signal(8), Signal(AXI_ADDR_BITS)
        for unfinished in (True, False):
            for q, queue in reversed(list(enumerate(queues))):
                state = queue.status.state
                with m.If(~queue.done if unfinished else state == QUEUE_STATE["waiting_semaphore"]):
                    m.d.comb += [blamed.eq(q), blamed_pc.eq(queue.status.pc)]

        # The first error
        error = Signal(Error)
        source = Signal(8)
        found = [
            *((queue.error, q) for q, queue in enumerate(queues)),
            (semaphores.error, semaphores.error_source),
            *((port, SOURCE_DMA + e) for e, port in enumerate(self.dma_error)),
        ]
        stop = Signal()
        m.d.comb += [
            stop.eq((Cat(port.valid for port, _ in found).any() | expired) & ~failed & ~resetting),
            registers.error_code.eq(error.code),
            registers.error_source.eq(source),
            registers.error_field.eq(error.field),
            registers.error_pc.eq(error.pc),
            registers.error_address.eq(error.address),
        ]
        with m.If(stop):
            for i, (port, number) in enumerate(found):
                with m.If(port.valid) if i == 0 else m.Elif(port.valid):
                    m.d.sync += [error.eq(port), source.eq(number)]
            with m.Else():
                m.d.sync += [
                    error.valid.eq(1),
                    error.code.eq(ErrorCode.WATCHDOG),
                    error.field.eq(0),
                    error.pc.eq(blamed_pc),
                    error.address.eq(0),
                    source.eq(blamed),
                ]

        # Busy, done
        quiet = Signal()
        settled = Signal(range(SETTLE_CYCLES))
        m.d.comb += quiet.eq(
            Cat(queue.done for queue in queues).all()
            & ~dispatch.busy
            & semaphores.idle
            & ~semaphores.sweeping
            & ~self.pe_busy
            & ~self.act_busy
            & ~self.dve_busy
            & ~self.pool_busy
            & ~self.dma_busy.any()
        )
        with m.If(busy & quiet):
            m.d.sync += settled.eq(settled + 1)
            with m.If(settled == SETTLE_CYCLES - 1):
                m.d.sync += [busy.eq(0), done.eq(1)]
        with m.Else():
            m.d.sync += settled.eq(0)
        with m.If(start):
            m.d.sync += [busy.eq(1), done.eq(0), settled.eq(0)]
        with m.If(stop):
            m.d.sync += [busy.eq(0), done.eq(0), failed.eq(1)]

        # Reset
        left = Signal(range(RESET_CYCLES), init=RESET_CYCLES - 1)
        m.d.comb += [resetting.eq(1), semaphores.sweep.eq(registers.clear)]
        with m.FSM(init="POWER_UP"):
            with m.State("POWER_UP"):
                # The semaphores are being swept already; the run may begin before that ends.
                m.d.comb += registers.wait.eq(1)
                m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.d.sync += self.engine_reset.eq(0)
                    m.next = "READY"
            with m.State("READY"):
                m.d.comb += resetting.eq(0)
                with m.If(registers.reset):
                    m.d.sync += [self.dma_halt.eq(1), busy.eq(0), done.eq(0), failed.eq(0)]
                    m.d.sync += [error.eq(0), source.eq(0)]
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                m.d.sync += left.eq(RESET_CYCLES - 1)
                with m.If(self.dma_drained.all() & fetch.idle):
                    m.d.sync += self.engine_reset.eq(1)
                    m.next = "RESET"
            with m.State("RESET"):
                m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.d.sync += [self.engine_reset.eq(0), self.dma_halt.eq(0)]
                    m.d.comb += semaphores.sweep.eq(1)
                    m.next = "SWEEP"
            with m.State("SWEEP"):
                with m.If(~semaphores.sweeping):
                    m.next = "READY"
        return m
