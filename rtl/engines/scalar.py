"""Scalar engine: functions of elements from SBUF or PSUM, one lane per partition, into SBUF.

A :class:`~.sequencer.Sequencer` walks the access patterns and commands both memories; an
:class:`~.activation.ActivationLane` per partition computes. One function's table is in the lanes at
a time; :class:`~.activation.ActivationTables` writes the next one when another function comes.
"""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import exact_log2

from ..arch.events import events_layout
from ..arch.formats import FP32
from ..arch.isa import Activation, Engine
from ..interfaces import (
    SBUF_READ_CYCLES,
    Issue,
    PsumReadPort,
    SbufVectorReadPort,
    SbufVectorWritePort,
    Update,
)
from ..lib.replicate import Replicated
from .activation import (
    ACTIVATION_LANE_CYCLES,
    CONTROL_CYCLES,
    TABLE_CYCLES,
    ActivationLane,
    ActivationTables,
    Steering,
)
from .sequencer import Delay, Sequencer
from .vector import VECTOR_CYCLES

__all__ = ["SCALAR_CYCLES", "ScalarEngine"]

SCALAR_CYCLES = SBUF_READ_CYCLES + ACTIVATION_LANE_CYCLES
"""From the cycle in which an element is read to the cycle in which it is written."""

_TABLE_DONE = SBUF_READ_CYCLES + TABLE_CYCLES.stop
"""From the cycle in which an element is read to the first in which its table may be replaced."""

STEER = data.StructLayout(
    {
        "shift": 2, "src_dtype": 4, "dst_dtype": 4, "saturate": 1, "own_scale": 1, "own_bias": 1,
        "scale": 32, "bias": 32, "alpha": 32, **Steering.as_shape().members,
    }
)  # fmt: skip
"""Controls of the lanes that stay the same while an instruction runs."""


class ScalarEngine(wiring.Component):
    """The scalar engine (ACT): :class:`~..arch.isa.Activation`.

    Instructions run in order, one element per partition and cycle; the reads of one overlap the
    writes of the one before. Hazards, PSUM and DMA are as with the
    :class:`~.vector.VectorEngine`.

    **Tables.** An instruction whose function has another table than the one in the lanes waits
    until the last element before it has read its own, and then while the new one is written: one
    entry per cycle, at most 512 and at least 64.

    **Writes.** Two engines may not commit a word to the same bank of SBUF in the same cycle. This
    one takes longer, so its writes are decided first: ``upcoming`` tells the vector engine which
    banks it must leave, and leaves it the gaps that starving DMA beats wait for.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
    sbuf_read : :py:`Out(SbufVectorReadPort)`
    sbuf_write : :py:`Out(SbufVectorWritePort)`
    psum_read : :py:`Out(PsumReadPort)`
    psum_busy_others : :py:`In(psum_banks)`
        Banks that other engines hold, or will hold from the next cycle on.
    psum_busy : :py:`Out(psum_banks)`
        Registered.
    starving : :py:`In(2)`
    upcoming : :py:`Out(2)`
        Banks to which what the vector engine reads in this cycle must not be written.
    update : :py:`Out(stream.Signature(Update))`
        Not offered for an instruction without one.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("act"))`
        Registered.

    Timing
    ------
    Issue interval of ``N`` elements: ``N`` cycles, one more for each scalar in SBUF, at least 3
    (source in PSUM: 4). An element is written :data:`SCALAR_CYCLES` = 47 cycles after it was read;
    the update is offered in the cycle after the last write. An idle engine reads its first element
    3 cycles after it took the instruction (source in PSUM: 4) if it has its table.
    """

    instructions: stream.Interface
    update: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": In(stream.Signature(Issue)),
                "sbuf_read": Out(SbufVectorReadPort(config)),
                "sbuf_write": Out(SbufVectorWritePort(config)),
                "psum_read": Out(PsumReadPort(config)),
                "psum_busy_others": In(config.psum_banks),
                "psum_busy": Out(config.psum_banks),
                "starving": In(2),
                "upcoming": Out(2),
                "update": Out(stream.Signature(Update)),
                "busy": Out(1),
                "events": Out(events_layout("act")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = seq = Sequencer(
            config=config,
            engine=Engine.ACT,
            lane_cycles=ACTIVATION_LANE_CYCLES,
            read_ports=1,
            behind=SCALAR_CYCLES - VECTOR_CYCLES,
        )
        m.submodules.tables = tables = ActivationTables()
        connect(m, flipped(self.instructions), seq.instructions)
        connect(m, seq.update, flipped(self.update))
        read, write, psum = self.sbuf_read, self.sbuf_write, self.psum_read
        m.d.comb += [
            seq.starving.eq(self.starving),
            seq.psum_busy_others.eq(self.psum_busy_others),
            self.psum_busy.eq(seq.psum_busy),
            self.upcoming.eq(seq.upcoming),
            self.busy.eq(seq.busy),
            self.events.eq(seq.events),
            read.valid.eq(seq.read_valid[0]),
            seq.read_ready[0].eq(read.ready),
            read.new.eq(seq.read_new[0]),
            read.word.eq(seq.read_word[0]),
            read.offset.eq(seq.read_offset[0]),
            psum.valid.eq(seq.psum_valid),
            psum.bank.eq(seq.psum_bank),
            psum.word.eq(seq.psum_word),
            write.valid.eq(seq.write_valid),
            write.commit.eq(seq.write_commit),
            write.word.eq(seq.write_word),
            write.offset.eq(seq.write_offset),
            write.size_log2.eq(seq.write_size_log2),
            write.mask.eq(seq.write_mask),
        ]
        self._tables(m, seq, tables)
        controls = self._controls(m, seq, tables)
        for p in range(config.partitions):
            lane = ActivationLane()
            m.submodules[f"lane{p}"] = Replicated(lane, "activation_lane")
            for k in range(4):
                source = (p - k * config.quadrant) % config.partitions
                m.d.comb += [lane.sbuf[k].eq(read.data[source]), lane.psum[k].eq(psum.data[source])]
            for name, value in controls.items():
                if name == "bounds":
                    m.d.comb += [lane.bounds[i].eq(value.word_select(i, 31)) for i in range(2)]
                else:
                    m.d.comb += getattr(lane, name).eq(value)
            m.d.comb += [lane.entry.eq(tables.entry), write.data[p].eq(lane.raw)]
        return m

    def _tables(self, m, seq, tables):
        """Hold the pending instruction until the lanes have its table."""
        # The store needs a cycle to see what the pending instruction wants.
        seen = Signal()
        m.d.sync += seen.eq(seq.pending & ~seq.start)
        reading = Signal(range(_TABLE_DONE + 1))  # cycles for which elements may read their table
        with m.If(seq.element.valid):
            m.d.sync += reading.eq(_TABLE_DONE)
        with m.Elif(reading.any()):
            m.d.sync += reading.eq(reading - 1)
        m.d.comb += [
            tables.function.eq(seq.view(Activation).function),
            seq.hold.eq(~(seen & tables.held)),
            tables.load.eq(seen & ~tables.held & ~tables.busy & ~seq.running & ~reading.any()),
        ]

    def _controls(self, m, seq, tables):
        """The lanes' controls by name, each in the cycle in which the element needs it."""
        word = seq.view(Activation)
        quadrant_log2 = exact_log2(self.config.quadrant)

        def quadrant(ap):
            return ap.start_partition[quadrant_log2 : quadrant_log2 + 2]

        steer = Signal(STEER, reset_less=True)
        with m.If(seq.start):
            m.d.sync += [
                steer.shift.eq(quadrant(word.dst) - quadrant(word.src)),
                steer.src_dtype.eq(word.src.dtype),
                steer.dst_dtype.eq(word.dst.dtype),
                steer.saturate.eq(word.saturate),
                steer.own_scale.eq(word.scale_pointer),
                steer.own_bias.eq(word.bias_pointer),
                steer.scale.eq(word.scale),
                steer.bias.eq(word.bias),
                steer.alpha.eq(word.alpha),
                *(steer[name].eq(tables.steering[name]) for name in Steering.as_shape().members),
            ]
        element = seq.element
        is_scalar = element.scalars.any()
        now = {name: steer[name] for name in STEER.members} | {
            "from_psum": seq.psum_source[0] & ~is_scalar,
            "src_dtype": Mux(is_scalar, FP32.code, steer.src_dtype),
            "load_scale": element.scalars[0],
            "load_bias": element.scalars[1],
        }
        return {
            name: Delay(m, now[name], name)[SBUF_READ_CYCLES + cycle]
            for name, cycle in CONTROL_CYCLES.items()
        }
