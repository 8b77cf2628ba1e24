"""Instruction queues: the store of prefetched words and the head of each queue.

A word passes through: store (written by :mod:`.fetch`) -> read for the checker -> found legal ->
read again into ``next`` -> ``head``, where its waits are held against the semaphores -> issued.
The store has one read port; words are never multiplexed between queues.
"""

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..arch.config import AXI_ADDR_BITS, AXI_DATA_BYTES
from ..arch.events import events_layout
from ..arch.isa import (
    INSTRUCTIONS,
    WORD_BITS,
    WORD_BYTES,
    DmaStart,
    Engine,
    ErrorCode,
    EventSemaphore,
    UpdateMode,
    WaitMode,
)
from ..arch.registers import QUEUE_STATE
from ..interfaces import Error, Issue, Update
from ..lib.select import RoundRobin
from .check import FRAME_CYCLES, QUEUE_BITS, Verdict
from .dispatch import DmaRequest
from .fetch import BEATS, StoreWrite

__all__ = ["InstructionQueue", "InstructionStore", "QueueStatus", "instructions_of"]


def instructions_of(engine):
    """Instruction classes that the queue of ``engine`` takes."""
    return [cls for cls in INSTRUCTIONS.values() if engine in cls.engines]


class QueueStatus(data.Struct):
    """What a queue's registers show; names as in :mod:`..arch.registers`."""

    state: 4
    wait: 1
    mode: 8
    semaphore: 8
    wanted: 32
    seen: 32
    pc: AXI_ADDR_BITS
    issued: 32


class InstructionStore(wiring.Component):
    """Memory for the prefetched words of all queues, with one shared read port.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    start : :py:`In(1)`
        A run begins: the first turn is the first queue's.
    write : :py:`In(StoreWrite(config))`
    issue_want, issue_take : :py:`In(len(Engine))`, :py:`Out(len(Engine))`
        A queue wants its next checked word; it is being read.
    issue_slot : :py:`In(range(config.queue_depth)).array(len(Engine))`
    check_want, check_take, check_slot
        The same for words to be checked: second in priority, at least
        :data:`~.check.FRAME_CYCLES` apart.
    issue_valid : :py:`Out(len(Engine))`
        ``word`` is what that queue asked for.
    check_valid : :py:`Out(1)`
        ``word`` is to be checked, for queue ``check_queue``.
    word : :py:`Out(WORD_BITS)`

    Timing
    ------
    The word comes one cycle after ``take``. One read per cycle.
    """

    def __init__(self, *, config):
        self.config = config
        n, slot = len(Engine), range(config.queue_depth)
        super().__init__(
            {
                "start": In(1),
                "write": In(StoreWrite(config)),
                "issue_want": In(n),
                "issue_take": Out(n),
                "issue_slot": In(slot).array(n),
                "issue_valid": Out(n),
                "check_want": In(n),
                "check_take": Out(n),
                "check_slot": In(slot).array(n),
                "check_valid": Out(1),
                "check_queue": Out(QUEUE_BITS),
                "word": Out(WORD_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        n, depth = len(Engine), self.config.queue_depth
        m.submodules.memory = memory = Memory(shape=WORD_BITS, depth=n * depth, init=[])
        write = memory.write_port(granularity=8 * AXI_DATA_BYTES)
        read = memory.read_port()
        issue_turn, check_turn = RoundRobin(count=n), RoundRobin(count=n)
        m.submodules.issue_turn = ResetInserter(self.start)(issue_turn)
        m.submodules.check_turn = ResetInserter(self.start)(check_turn)

        slot_bits = (depth - 1).bit_length()

        def row(queue, slot):
            return (queue << slot_bits) + slot

        m.d.comb += [
            write.addr.eq(row(self.write.queue, self.write.slot)),
            write.data.eq(self.write.data.replicate(BEATS)),
            write.en.eq(self.write.en << self.write.beat),
        ]

        cooldown = Signal(range(FRAME_CYCLES))
        with m.If(cooldown.any()):
            m.d.sync += cooldown.eq(cooldown - 1)
        with m.If(self.check_take.any()):
            m.d.sync += cooldown.eq(FRAME_CYCLES - 1)
        m.d.comb += [
            issue_turn.requests.eq(self.issue_want),
            issue_turn.take.eq(1),
            check_turn.requests.eq(self.check_want),
            check_turn.take.eq(self.check_take.any()),
            self.issue_take.eq(issue_turn.grant),
            read.en.eq(self.issue_take.any() | self.check_take.any()),
        ]
        with m.If(~self.issue_want.any() & ~cooldown.any()):
            m.d.comb += self.check_take.eq(check_turn.grant)
        for q in range(n):
            with m.If(issue_turn.grant[q]):
                m.d.comb += read.addr.eq(row(q, self.issue_slot[q]))
        with m.If(~self.issue_want.any()):
            for q in range(n):
                with m.If(check_turn.grant[q]):
                    m.d.comb += read.addr.eq(row(q, self.check_slot[q]))
                    m.d.sync += self.check_queue.eq(q)
        m.d.sync += [
            self.issue_valid.eq(self.issue_take),
            self.check_valid.eq(self.check_take.any()),
        ]
        m.d.comb += self.word.eq(read.data)
        return m


class InstructionQueue(wiring.Component):
    """One in-order queue: what is left, where its words are, and its head.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    engine : :class:`~..arch.isa.Engine`

    Members
    -------
    start : :py:`In(1)`
        Begin at ``base`` with ``count`` instructions.
    clear : :py:`In(1)`
        Forget everything.
    run : :py:`In(1)`
        While low no instruction begins to be issued; one that is being offered stays offered.
    hold : :py:`In(1)`
        Semaphores are not readable: as ``run`` low.
    fetched, failed
        From :class:`~.fetch.Fetch`; ``free`` goes there.
    check_want, check_take, check_slot, issue_want, issue_take, issue_slot, issue_valid, word
        From and to :class:`InstructionStore`.
    verdict : :py:`In(Verdict)`, valid with ``verdict_valid``
        From :class:`~.check.Checker`, for this queue.
    wait_semaphore : :py:`Out(8).array(2)`, ``wait_value`` : :py:`In(32).array(2)`
        Semaphores of the head's waits, combinational.
    issue : :py:`Out(stream.Signature(Issue))`
        Only if the queue has an engine: instructions for it.
    dma : :py:`Out(stream.Signature(DmaRequest))`
        Only if the queue takes :class:`DmaStart`.
    update : :py:`Out(stream.Signature(Update))`
        Updates of :class:`EventSemaphore`, which is executed here.
    error : :py:`Out(Error)`
        The next instruction cannot be issued; all before it have been.
    status : :py:`Out(QueueStatus)`
    events : :py:`Out(events_layout("queue_..."))`
    done : :py:`Out(1)`
        Nothing left to issue.
    moved : :py:`Out(1)`
        An instruction left the queue.

    Timing
    ------
    Both waits must hold in the same cycle. The instruction is offered in the cycle after. An
    instruction without waits is offered in the first cycle at the head. With everything prefetched
    an instruction leaves every three cycles.
    """

    def __init__(self, *, config, engine):
        self.config = config
        self.engine = Engine(engine)
        accepted = instructions_of(self.engine)
        self.word_bits = max(cls.used_mask().bit_length() for cls in accepted)
        self.has_engine = any(cls not in (EventSemaphore, DmaStart) for cls in accepted)
        self.has_dma = DmaStart in accepted
        slot = range(config.queue_depth)
        members = {
            "start": In(1),
            "clear": In(1),
            "base": In(AXI_ADDR_BITS),
            "count": In(32),
            "run": In(1),
            "hold": In(1),
            "fetched": In(1),
            "failed": In(1),
            "free": Out(1),
            "check_want": Out(1),
            "check_take": In(1),
            "check_slot": Out(slot),
            "verdict_valid": In(1),
            "verdict": In(Verdict),
            "issue_want": Out(1),
            "issue_take": In(1),
            "issue_slot": Out(slot),
            "issue_valid": In(1),
            "word": In(WORD_BITS),
            "wait_semaphore": Out(8).array(2),
            "wait_value": In(32).array(2),
            "update": Out(stream.Signature(Update)),
            "error": Out(Error),
            "status": Out(QueueStatus),
            "events": Out(events_layout(f"queue_{self.engine.name.lower()}")),
            "done": Out(1),
            "moved": Out(1),
        }
        if self.has_engine:
            members["issue"] = Out(stream.Signature(Issue))
        if self.has_dma:
            members["dma"] = Out(stream.Signature(DmaRequest))
        super().__init__(members)

    def elaborate(self, platform):
        m = Module()
        depth = self.config.queue_depth

        # Progress of words through the store. Levels count words, slots say where they lie.
        unchecked = Signal(range(depth + 1))  # fetched, not yet read by the checker
        ready = Signal(range(depth + 1))  # legal, not yet read for issue
        legal = Signal(range(depth + 3))  # legal, not yet issued
        asked = Signal()  # a read for issue is under way
        bad = Signal()  # the word after the legal ones is illegal: nothing behind it matters
        bad_code, bad_field = Signal(8), Signal(16)
        checking = Signal(range(depth + 1))  # in the checker
        passes = Signal()
        m.d.comb += [
            self.check_want.eq(unchecked.any() & ~bad),
            passes.eq(self.verdict_valid & (self.verdict.code == ErrorCode.NONE) & ~bad),
            self.free.eq(self.issue_take),
        ]
        m.d.sync += [
            unchecked.eq(unchecked + self.fetched - self.check_take),
            checking.eq(checking + self.check_take - self.verdict_valid),
            ready.eq(ready + passes - self.issue_take),
            legal.eq(legal + passes - self.moved),
            self.check_slot.eq(self.check_slot + self.check_take),
            self.issue_slot.eq(self.issue_slot + self.issue_take),
        ]
        with m.If(self.verdict_valid & (self.verdict.code != ErrorCode.NONE) & ~bad):
            m.d.sync += [
                bad.eq(1),
                bad_code.eq(self.verdict.code),
                bad_field.eq(self.verdict.field),
            ]

        # next: a legal word, so that the read of the store is hidden.
        following = Signal(self.word_bits)
        following_valid = Signal()
        moves = Signal()
        m.d.comb += self.issue_want.eq(ready.any() & ~asked & ~following_valid)
        with m.If(self.issue_take):
            m.d.sync += asked.eq(1)
        with m.If(self.issue_valid):
            m.d.sync += [following.eq(self.word), following_valid.eq(1), asked.eq(0)]
        with m.Elif(moves):
            m.d.sync += following_valid.eq(0)

        def header(word, name):
            return EventSemaphore.layout()(_padded(word))[name]

        # head: its waits are evaluated, then it is offered until taken.
        head = Signal(self.word_bits)
        head_valid = Signal()
        offered = Signal()  # waits have held
        may_go = Signal()
        none = WaitMode.NONE
        m.d.comb += [
            may_go.eq(self.run & ~self.hold),
            moves.eq(following_valid & (~head_valid | self.moved) & may_go),
        ]
        holds = Signal(2)
        for i in range(2):
            mode, wanted = header(head, f"wait{i}_mode"), header(head, f"wait{i}_value")
            seen = self.wait_value[i]
            m.d.comb += [
                self.wait_semaphore[i].eq(header(head, f"wait{i}_semaphore")),
                holds[i].eq(
                    Mux(
                        mode == WaitMode.GE,
                        seen >= wanted,
                        (seen == wanted) | (mode == none),
                    )
                ),
            ]
        with m.If(moves):
            m.d.sync += [
                head.eq(following),
                head_valid.eq(1),
                offered.eq(
                    (header(following, "wait0_mode") == none)
                    & (header(following, "wait1_mode") == none)
                ),
            ]
        with m.Elif(self.moved):
            m.d.sync += [head_valid.eq(0), offered.eq(0)]
        with m.Elif(head_valid & holds.all() & may_go):
            m.d.sync += offered.eq(1)

        # Where the head goes.
        left, issued = Signal(32), Signal(32)
        pc = Signal(AXI_ADDR_BITS)
        opcode = header(head, "opcode")
        is_event, is_dma = Signal(), Signal()
        m.d.comb += is_event.eq(opcode == EventSemaphore.opcode)
        if self.has_dma:
            m.d.comb += is_dma.eq(opcode == DmaStart.opcode)
        offers = Signal()
        m.d.comb += offers.eq(head_valid & offered)
        update = {
            "semaphore": header(head, "update_semaphore"),
            "mode": header(head, "update_mode"),
            "value": header(head, "update_value"),
        }
        updates = Signal()
        m.d.comb += updates.eq(is_event & (update["mode"] != UpdateMode.NONE))
        m.d.comb += self.update.valid.eq(offers & updates)
        for name, value in update.items():
            m.d.comb += self.update.p[name].eq(value)
        taken = Signal()
        m.d.comb += taken.eq(Mux(updates, self.update.ready, is_event))
        if self.has_engine:
            m.d.comb += [
                self.issue.valid.eq(offers & ~is_event & ~is_dma),
                self.issue.p.word.eq(head),
                self.issue.p.pc.eq(pc),
            ]
            with m.If(~is_event & ~is_dma):
                m.d.comb += taken.eq(self.issue.ready)
        if self.has_dma:
            fields = DmaStart.layout()(_padded(head))
            m.d.comb += [
                self.dma.valid.eq(offers & is_dma),
                *(self.dma.p[name].eq(fields[name]) for name, _, _ in DmaStart.scalars),
                *(self.dma.p.update[name].eq(value) for name, value in update.items()),
            ]
            with m.If(is_dma):
                m.d.comb += taken.eq(self.dma.ready)
        m.d.comb += self.moved.eq(offers & taken)
        with m.If(self.moved):
            m.d.sync += [left.eq(left - 1), issued.eq(issued + 1), pc.eq(pc + WORD_BYTES)]
        m.d.comb += self.done.eq(left == 0)

        # An instruction that cannot be issued is reported when its turn has come.
        failed = Signal()
        stopped = Signal()
        m.d.comb += [
            failed.eq(self.failed & ~bad & (unchecked == 0) & (checking == 0) & ~self.fetched),
            stopped.eq((bad | failed) & (legal == 0) & ~self.done),
            self.error.valid.eq(stopped),
            self.error.code.eq(Mux(bad, bad_code, ErrorCode.BUS_FETCH)),
            self.error.field.eq(Mux(bad, bad_field, 0)),
            self.error.pc.eq(pc),
            self.error.address.eq(Mux(bad, 0, pc)),
        ]

        # What registers and counters see. Every cycle of a queue with work is one of four.
        waits, idle = Signal(), Signal()
        m.d.comb += [
            waits.eq(head_valid & ~offered),
            idle.eq(~head_valid & ~self.done),
            self.events.issued.eq(self.moved),
            self.events.wait_semaphore.eq(waits & self.run),
            self.events.wait_engine.eq(offers & ~taken & self.run),
            self.events.wait_fetch.eq(idle & self.run),
            self.status.pc.eq(pc),
            self.status.issued.eq(issued),
        ]
        with m.If(stopped):
            m.d.comb += self.status.state.eq(QUEUE_STATE["stopped"])
        with m.Elif(self.done):
            m.d.comb += self.status.state.eq(QUEUE_STATE["done"])
        with m.Elif(waits):
            m.d.comb += self.status.state.eq(QUEUE_STATE["waiting_semaphore"])
            which = Signal()
            m.d.comb += [which.eq(holds[0]), self.status.wait.eq(which)]
            for i in range(2):
                with m.If(which == i):
                    m.d.comb += [
                        self.status.mode.eq(header(head, f"wait{i}_mode")),
                        self.status.semaphore.eq(header(head, f"wait{i}_semaphore")),
                        self.status.wanted.eq(header(head, f"wait{i}_value")),
                        self.status.seen.eq(self.wait_value[i]),
                    ]
        with m.Elif(head_valid):
            m.d.comb += self.status.state.eq(QUEUE_STATE["waiting_engine"])
        with m.Else():
            m.d.comb += self.status.state.eq(QUEUE_STATE["fetching"])

        with m.If(self.start | self.clear):
            m.d.sync += [
                *(
                    level.eq(0)
                    for level in (
                        unchecked, ready, legal, asked, bad, checking, following_valid,
                        head_valid, offered, issued, self.check_slot, self.issue_slot,
                    )
                ),
                left.eq(Mux(self.start, self.count, 0)),
                pc.eq(self.base),
            ]  # fmt: skip
        return m


def _padded(word):
    """``word`` with zeros up to the length of an instruction."""
    return Cat(word, Const(0, WORD_BITS - len(word)))
