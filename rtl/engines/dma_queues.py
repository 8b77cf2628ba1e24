"""Job queues of a DMA engine: order of descriptors, prefetch, completion.

Each queue is a ring of :data:`~.dma_walk.SLOTS` descriptor slots with three pointers: a slot is
allocated when its descriptor is fetched, started when the descriptor is planned, retired in order
when its data has arrived. So a queue prefetches while it works, and completes in order.
"""

from functools import reduce
from operator import or_

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..arch.config import AXI_ADDR_BITS
from ..arch.isa import DESCRIPTOR_BYTES
from ..interfaces import DmaJob, Update
from ..lib.select import RoundRobin
from ..lib.stream import Queue
from .dma_hbm import done_layout, fetch_layout, word_layout
from .dma_walk import SLOTS, tag_layout

__all__ = ["JOBS", "DmaQueues"]

JOBS = 4
"""Jobs that wait in one queue."""


def _selected(grant, values):
    """The value whose one-hot ``grant`` bit is set."""
    values = [Value.cast(value) for value in values]
    return reduce(or_, (value & grant[i].replicate(len(value)) for i, value in enumerate(values)))


class _Ring:
    """Registers of one queue: pointers (with a wrap bit) and a bit per slot."""

    def __init__(self, q):
        bits = exact_log2(SLOTS)
        self.index = Signal(16, name=f"index{q}")  # next descriptor of the job being fetched
        self.allocated = Signal(bits + 1, name=f"allocated{q}")
        self.started = Signal(bits + 1, name=f"started{q}")
        self.retired = Signal(bits + 1, name=f"retired{q}")
        for name in ("fetched", "nothing", "ends_job", "src_sbuf", "dst_sbuf", "done"):
            setattr(self, name, Signal(SLOTS, name=f"{name}{q}"))
        self.started_src = Signal(name=f"started_src{q}")  # memories of the descriptor started last
        self.started_dst = Signal(name=f"started_dst{q}")

    @property
    def full(self):
        """Every slot is taken."""
        return self.allocated == self.retired ^ SLOTS

    @staticmethod
    def at(bits, pointer):
        """The bit of ``bits`` for the slot that ``pointer`` is at."""
        return bits.bit_select(pointer[: exact_log2(SLOTS)], 1)


class DmaQueues(wiring.Component):
    """Queues of jobs.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    jobs : :py:`In(stream.Signature(DmaJob))`
        ``ready`` is a register: it answers a job that is offered after one cycle, if the job's
        queue has room.
    stop : :py:`In(1)`
        Fetch, start and retire nothing more.
    fetch : :py:`Out(stream.Signature({address, tag}))`
    word : :py:`In(word_layout)`
        Descriptor words as they arrive.
    start : :py:`Out(stream.Signature(tag))`
        Descriptors to plan, the queues in turn. Within a queue a descriptor starts before the one
        before it is complete only if neither can see what the other does: both load, or both store.
    room : :py:`In(4)`
        Bit ``src + 2 * dst``: a descriptor from memory ``src`` to memory ``dst`` can start (0
        is HBM, 1 is SBUF).
    done : :py:`In(done_layout).array(3)`
        Descriptors that are complete.
    update : :py:`Out(stream.Signature(Update))`
    oldest : :py:`Out(slot).array(queues)`
        Slot that each queue retires next.
    lookup, lookup_tag : :py:`In`
        Ask for the address of a descriptor; after ``stop``.
    pc : :py:`Out(40)`
        The answer, one cycle later.
    busy : :py:`Out(1)`
        Jobs inside, updates included.

    Timing
    ------
    A job is fetched three cycles after it was taken; a descriptor starts one cycle after its last
    word; an update is offered three cycles after its descriptor is done. Turns begin with queue 0
    when the engine was idle.
    """

    jobs: stream.Interface
    fetch: stream.Interface
    start: stream.Interface
    update: stream.Interface

    def __init__(self, *, config):
        self.config = config
        self.tag = tag_layout(config)
        super().__init__(
            {
                "jobs": In(stream.Signature(DmaJob)),
                "stop": In(1),
                "fetch": Out(stream.Signature(fetch_layout(config))),
                "word": In(word_layout(config)),
                "start": Out(stream.Signature(self.tag)),
                "room": In(4),
                "done": In(done_layout(config)).array(3),
                "update": Out(stream.Signature(Update)),
                "oldest": Out(data.ArrayLayout(exact_log2(SLOTS), config.dma_queues)),
                "lookup": In(1),
                "lookup_tag": In(self.tag),
                "pc": Out(AXI_ADDR_BITS),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        queues = self.config.dma_queues
        rings = [_Ring(q) for q in range(queues)]
        waiting = []
        for q in range(queues):
            m.submodules[f"jobs{q}"] = queue = Queue(shape=DmaJob, depth=JOBS)
            waiting.append(queue)
        memory_shape = data.StructLayout({"update": Update, "pc": AXI_ADDR_BITS})
        m.submodules.slots = slots = Memory(shape=memory_shape, depth=queues * SLOTS, init=[])

        self._accept(m, waiting)
        self._allocate(m, waiting, rings, slots.write_port())
        self._arrive(m, rings)
        self._start(m, rings)
        found = self._retire(m, rings, slots.read_port())
        m.d.comb += self.busy.eq(
            Cat(
                *(queue.level != 0 for queue in waiting),
                *(ring.allocated != ring.retired for ring in rings),
                found,
                self.update.valid,
                self.jobs.ready,
            ).any()
        )
        return m

    def _accept(self, m, waiting):
        room = Signal(len(waiting))
        mine = self.jobs.p.queue
        for q, queue in enumerate(waiting):
            m.d.comb += [
                room[q].eq(queue.i.ready),
                queue.i.p.eq(self.jobs.p),
                queue.i.valid.eq(self.jobs.valid & self.jobs.ready & (mine == q)),
            ]
        m.d.sync += self.jobs.ready.eq(
            self.jobs.valid & ~self.jobs.ready & room.bit_select(mine, 1)
        )

    def _allocate(self, m, waiting, rings, slots):
        """Take the next descriptor of a job, the queues in turn."""
        turn = RoundRobin(count=len(rings))
        m.submodules.fetch_turn = ResetInserter(~self.busy)(turn)
        pick = turn.grant
        take = Signal()
        jobs = [queue.o.p for queue in waiting]
        table, count = Signal(AXI_ADDR_BITS), Signal(16)
        index = Signal(16)
        ends, nothing = Signal(), Signal()
        tag = Signal(self.tag)
        m.d.comb += [
            turn.requests.eq(
                Cat(queue.o.valid & ~ring.full for queue, ring in zip(waiting, rings, strict=True))
            ),
            take.eq(pick.any() & (~self.fetch.valid | self.fetch.ready) & ~self.stop),
            turn.take.eq(take),
            table.eq(_selected(pick, [job.table for job in jobs])),
            count.eq(_selected(pick, [job.count for job in jobs])),
            index.eq(_selected(pick, [ring.index for ring in rings])),
            tag.slot.eq(_selected(pick, [ring.allocated[:-1] for ring in rings])),
            tag.queue.eq(_selected(pick, [Const(q, len(tag.queue)) for q in range(len(rings))])),
            nothing.eq(count == 0),
            ends.eq(nothing | (index + 1 == count)),
            slots.en.eq(take),
            slots.addr.eq(tag.as_value()),
            slots.data.update.eq(_selected(pick, [job.update for job in jobs])),
            slots.data.pc.eq(table + (index << exact_log2(DESCRIPTOR_BYTES))),
        ]
        with m.If(take):
            m.d.sync += [
                self.fetch.valid.eq(~nothing),
                self.fetch.p.address.eq(slots.data.pc),
                self.fetch.p.tag.eq(tag),
            ]
        with m.Elif(self.fetch.ready):
            m.d.sync += self.fetch.valid.eq(0)
        for q, (queue, ring) in enumerate(zip(waiting, rings, strict=True)):
            m.d.comb += queue.o.ready.eq(take & pick[q] & ends)
            with m.If(take & pick[q]):
                m.d.sync += [
                    ring.index.eq(Mux(ends, 0, ring.index + 1)),
                    ring.allocated.eq(ring.allocated + 1),
                    ring.at(ring.fetched, ring.allocated).eq(nothing),
                    ring.at(ring.nothing, ring.allocated).eq(nothing),
                    ring.at(ring.ends_job, ring.allocated).eq(ends),
                    ring.at(ring.done, ring.allocated).eq(0),
                ]

    def _arrive(self, m, rings):
        """Note the memories of a descriptor, then that it is there."""
        word = self.word
        for q, ring in enumerate(rings):
            with m.If(word.valid & (word.tag.queue == q)):
                with m.Switch(word.index):
                    with m.Case(1):
                        m.d.sync += ring.at(ring.src_sbuf, word.tag.slot).eq(word.data[40])
                    with m.Case(2):
                        m.d.sync += ring.at(ring.dst_sbuf, word.tag.slot).eq(word.data[40])
                    with m.Case(15):
                        m.d.sync += ring.at(ring.fetched, word.tag.slot).eq(1)

    def _start(self, m, rings):
        turn = RoundRobin(count=len(rings))
        m.submodules.start_turn = ResetInserter(~self.busy)(turn)
        pick = turn.grant
        m.d.comb += [
            self.start.valid.eq(pick.any() & ~self.stop),
            self.start.p.slot.eq(_selected(pick, [ring.started[:-1] for ring in rings])),
            self.start.p.queue.eq(
                _selected(pick, [Const(q, exact_log2(len(rings))) for q in range(len(rings))])
            ),
            turn.take.eq(self.start.valid & self.start.ready),
        ]
        for q, ring in enumerate(rings):
            here, nothing, src, dst = (Signal(name=f"{n}{q}") for n in ("here", "no", "src", "dst"))
            overlaps = Signal(name=f"overlaps{q}")
            m.d.comb += [
                here.eq((ring.started != ring.allocated) & ring.at(ring.fetched, ring.started)),
                nothing.eq(ring.at(ring.nothing, ring.started)),
                src.eq(ring.at(ring.src_sbuf, ring.started)),
                dst.eq(ring.at(ring.dst_sbuf, ring.started)),
                overlaps.eq(
                    (ring.started == ring.retired)
                    | (src != dst) & (src == ring.started_src) & (dst == ring.started_dst)
                ),
                turn.requests[q].eq(
                    here & ~nothing & overlaps & self.room.bit_select(Cat(src, dst), 1)
                ),
            ]
            with m.If(here & nothing):
                m.d.sync += [
                    ring.started.eq(ring.started + 1),
                    ring.at(ring.done, ring.started).eq(1),
                ]
            with m.Elif(turn.take & pick[q]):
                m.d.sync += [
                    ring.started.eq(ring.started + 1),
                    ring.started_src.eq(src),
                    ring.started_dst.eq(dst),
                ]
            for done in self.done:
                with m.If(done.valid & (done.tag.queue == q)):
                    m.d.sync += ring.at(ring.done, done.tag.slot).eq(1)
            m.d.comb += self.oldest[q].eq(ring.retired)

    def _retire(self, m, rings, slots):
        turn = RoundRobin(count=len(rings))
        m.submodules.retire_turn = ResetInserter(~self.busy)(turn)
        pick = turn.grant
        found = Signal()  # the slot memory answers with an update
        take = Signal()
        tag = Signal(self.tag)
        m.d.comb += [
            turn.requests.eq(
                Cat(
                    (ring.retired != ring.started) & ring.at(ring.done, ring.retired)
                    for ring in rings
                )
            ),
            take.eq(pick.any() & ~self.stop & ~found & ~self.update.valid),
            turn.take.eq(take),
            tag.slot.eq(_selected(pick, [ring.retired[:-1] for ring in rings])),
            tag.queue.eq(_selected(pick, [Const(q, len(tag.queue)) for q in range(len(rings))])),
            slots.en.eq(take | self.lookup),
            slots.addr.eq(Mux(self.lookup, self.lookup_tag.as_value(), tag.as_value())),
            self.pc.eq(slots.data.pc),
        ]
        m.d.sync += found.eq(
            take & _selected(pick, [ring.at(ring.ends_job, ring.retired) for ring in rings])
        )
        for q, ring in enumerate(rings):
            with m.If(take & pick[q]):
                m.d.sync += ring.retired.eq(ring.retired + 1)
        with m.If(found):
            m.d.sync += [self.update.valid.eq(1), self.update.p.eq(slots.data.update)]
        with m.Elif(self.update.ready):
            m.d.sync += self.update.valid.eq(0)
        return found
