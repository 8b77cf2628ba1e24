"""Instruction fetch: brings instruction words from HBM into the store, ahead of their use.

One AXI4 read master serves all queues in turn. A burst is one instruction; data come back in the
order of the addresses, so a short queue of who asked tells where each beat belongs.
"""

from amaranth.hdl import Cat, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..arch.config import AXI_ADDR_BITS, AXI_DATA_BYTES
from ..arch.isa import WORD_BYTES, Engine
from ..lib.axi import AXI4Read
from ..lib.select import RoundRobin
from ..lib.stream import Queue
from .check import QUEUE_BITS

__all__ = ["BEATS", "BURSTS", "Fetch", "StoreWrite"]

BEATS = WORD_BYTES // AXI_DATA_BYTES
"""Beats of one instruction."""

BURSTS = 16
"""Bursts in flight: enough to keep the bus busy over a latency of 200 cycles."""


def StoreWrite(config):
    """One beat on its way into the store, as :class:`Fetch` sees it."""
    return wiring.Signature(
        {
            "en": Out(1),
            "queue": Out(QUEUE_BITS),
            "slot": Out(range(config.queue_depth)),
            "beat": Out(range(BEATS)),
            "data": Out(8 * AXI_DATA_BYTES),
        }
    )


class Fetch(wiring.Component):
    """Prefetch instructions for all queues.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    bus : :py:`Out(AXI4Read)`
        INCR bursts of :data:`BEATS` beats of 8 bytes, each a whole instruction.
    start : :py:`In(1)`
        Take ``base`` and ``count`` of every queue and begin. Only while ``idle``.
    base : :py:`In(64).array(len(Engine))`
        Address of the first instruction. An address that is no multiple of 128 or does not fit the
        bus fails like a bus error.
    count : :py:`In(32).array(len(Engine))`
    run : :py:`In(1)`
        While low no burst is begun; those begun are finished.
    clear : :py:`In(1)`
        Forget what is left to fetch.
    free : :py:`In(len(Engine))`
        A slot of that queue has been read for the last time.
    write : :py:`Out(StoreWrite(config))`
    fetched : :py:`Out(len(Engine))`
        The next instruction of that queue is in the store.
    failed : :py:`Out(len(Engine))`
        The instruction after those fetched cannot be had; held until the next start or clear.
    idle : :py:`Out(1)`
        Nothing is on the bus.
    bytes : :py:`Out(4)`
        Bytes taken in this cycle.

    Timing
    ------
    Queues with room take turns, one burst every two cycles at most; data are taken in every cycle
    (one instruction in :data:`BEATS` cycles) with up to :data:`BURSTS` bursts in flight.
    ``fetched`` comes one cycle after the last beat.
    """

    def __init__(self, *, config):
        self.config = config
        n = len(Engine)
        super().__init__(
            {
                "bus": Out(AXI4Read(addr_bits=AXI_ADDR_BITS, data_bytes=AXI_DATA_BYTES)),
                "start": In(1),
                "base": In(64).array(n),
                "count": In(32).array(n),
                "run": In(1),
                "clear": In(1),
                "free": In(n),
                "write": Out(StoreWrite(config)),
                "fetched": Out(n),
                "failed": Out(n),
                "idle": Out(1),
                "bytes": Out(4),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, bus = self.config, self.bus
        n, depth = len(Engine), config.queue_depth
        word_bits = (WORD_BYTES - 1).bit_length()

        turn = RoundRobin(count=n)
        m.submodules.turn = ResetInserter(self.start)(turn)  # every run starts alike
        place = data.StructLayout({"queue": QUEUE_BITS, "slot": range(depth)})
        m.submodules.asked = asked = Queue(shape=place, depth=BURSTS)

        # Per queue: which word is next (in units of words), how many are left, where it will go.
        index = [Signal(AXI_ADDR_BITS - word_bits, name=f"index{q}") for q in range(n)]
        left = [Signal(32, name=f"left{q}") for q in range(n)]
        slot = [Signal(range(depth), name=f"slot{q}") for q in range(n)]
        taken = [Signal(range(depth + 1), name=f"taken{q}") for q in range(n)]

        # Addresses: the grant goes into the address register.
        go = Signal()
        m.d.comb += [
            turn.requests.eq(
                Cat(
                    left[q].any() & (taken[q] != depth) & ~self.failed[q] & self.run
                    for q in range(n)
                )
            ),
            go.eq(turn.requests.any() & asked.i.ready & ~bus.arvalid),
            turn.take.eq(go),
            asked.i.valid.eq(go),
        ]
        with m.If(bus.arready):
            m.d.sync += bus.arvalid.eq(0)
        with m.If(go):
            m.d.sync += bus.arvalid.eq(1)
        for q in range(n):
            with m.If(turn.grant[q]):
                m.d.comb += [asked.i.p.queue.eq(q), asked.i.p.slot.eq(slot[q])]
                with m.If(go):
                    m.d.sync += [
                        bus.araddr.eq(index[q] << word_bits),
                        index[q].eq(index[q] + 1),
                        left[q].eq(left[q] - 1),
                        slot[q].eq(slot[q] + 1),
                    ]
            asks = Signal(name=f"asks{q}")
            m.d.comb += asks.eq(go & turn.grant[q])
            m.d.sync += taken[q].eq(taken[q] + asks - self.free[q])
        m.d.comb += [
            bus.arid.eq(0),
            bus.arlen.eq(BEATS - 1),
            bus.arsize.eq((AXI_DATA_BYTES - 1).bit_length()),
            bus.arburst.eq(1),
        ]

        # Data: beats are counted, so that a wrong ``rlast`` does no harm.
        beat = Signal(range(BEATS))
        bad = Signal()  # a beat of this burst was answered with an error
        last = Signal()
        takes = Signal()
        owner = asked.o.p
        m.d.comb += [
            bus.rready.eq(asked.o.valid),
            takes.eq(bus.rvalid & bus.rready),
            last.eq(takes & (beat == BEATS - 1)),
            asked.o.ready.eq(last),
            self.write.en.eq(takes),
            self.write.queue.eq(owner.queue),
            self.write.slot.eq(owner.slot),
            self.write.beat.eq(beat),
            self.write.data.eq(bus.rdata),
            self.bytes.eq(Mux(takes, AXI_DATA_BYTES, 0)),
            self.idle.eq(~bus.arvalid & (asked.level == 0)),
        ]
        with m.If(takes):
            m.d.sync += [
                beat.eq(beat + 1),
                bad.eq((bad | bus.rresp[1]) & ~last),
            ]
        m.d.sync += self.fetched.eq(0)
        for q in range(n):
            with m.If(last & (owner.queue == q)):
                with m.If(bad | bus.rresp[1]):
                    m.d.sync += self.failed[q].eq(1)
                with m.Elif(~self.failed[q]):
                    m.d.sync += self.fetched[q].eq(1)

        with m.If(self.start | self.clear):
            for q in range(n):
                unreachable = self.base[q][:word_bits].any() | self.base[q][AXI_ADDR_BITS:].any()
                m.d.sync += [
                    index[q].eq(self.base[q][word_bits:AXI_ADDR_BITS]),
                    left[q].eq(Mux(self.start, self.count[q], 0)),
                    slot[q].eq(0),
                    taken[q].eq(0),
                    self.failed[q].eq(self.start & unreachable),
                    self.fetched[q].eq(0),
                ]
        return m
