"""Performance counters: one 64-bit count for each of :data:`~..arch.events.COUNTERS`.

Increments go to narrow accumulators. A visitor goes round and adds one accumulator per cycle to the
64-bit counts, which lie in a small memory: one wide adder serves all counters.
"""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..arch.events import COUNTERS, events_layout

__all__ = ["READ_CYCLES", "SOURCES", "Counters"]

SOURCES = tuple(dict.fromkeys(event.source for event in COUNTERS))
"""Blocks that raise events; :class:`Counters` has an input for each."""

READ_CYCLES = 2
"""From ``read`` to the cycle in which ``value`` may be used."""


class Counters(wiring.Component):
    """Count events.

    Members
    -------
    core, pe, dve, ... : :py:`In(events_layout(source))`
        Increments of this cycle, one input for each of :data:`SOURCES`.
    clear : :py:`In(1)`
        Set all counts to zero. Of this cycle's increments only those of ``core`` count.
    read : :py:`In(1)`
    select : :py:`In(range(len(COUNTERS)))`
        Bring the count of this counter, all earlier cycles included, to ``value``.
    value : :py:`Out(64)`
        Holds until the next read.

    Timing
    ------
    ``value`` holds the count two cycles after ``read``. Reads may come in every other cycle.
    """

    def __init__(self):
        super().__init__(
            {
                **{source: In(events_layout(source)) for source in SOURCES},
                "clear": In(1),
                "read": In(1),
                "select": In(range(len(COUNTERS))),
                "value": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        n = len(COUNTERS)
        m.submodules.counts = counts = Memory(shape=64, depth=n, init=[])
        old = counts.read_port(domain="comb")
        new = counts.write_port()

        # The visitor comes by every n cycles, or up to 2 n if the host reads all the time.
        turn = Signal(range(n))
        visit = Signal(range(n))
        m.d.comb += visit.eq(Mux(self.read, self.select, turn))
        with m.If(~self.read):
            m.d.sync += turn.eq(Mux(turn == n - 1, 0, turn + 1))

        gathered = []
        for i, event in enumerate(COUNTERS):
            increment = getattr(self, event.source)[event.name]
            total = Signal(event.width + (2 * n).bit_length(), name=event.full_name)
            kept = Mux(visit == i, 0, total)
            m.d.sync += total.eq(kept + increment)
            with m.If(self.clear):
                m.d.sync += total.eq(increment if event.source == "core" else 0)
            gathered.append(total)

        # Cycle 0: take what one accumulator holds. Cycle 1: add it to the count.
        valid, wanted = Signal(), Signal()
        where = Signal(range(n))
        more = Signal(max(len(total) for total in gathered))
        m.d.sync += [
            valid.eq(~self.clear),
            wanted.eq(self.read),
            where.eq(visit),
            more.eq(Array(gathered)[visit]),
        ]
        empty = Signal(n, init=(1 << n) - 1)  # the memory's word counts as zero
        total = Signal(64)
        m.d.comb += [
            old.addr.eq(where),
            total.eq(Mux(empty.bit_select(where, 1), 0, old.data) + more),
            new.addr.eq(where),
            new.data.eq(total),
            new.en.eq(valid),
        ]
        with m.If(valid):
            m.d.sync += empty.eq(empty & ~(1 << where))
        with m.If(valid & wanted):
            m.d.sync += self.value.eq(total)
        with m.If(self.clear):
            m.d.sync += empty.eq(~0)
        return m
