"""The SBUF side of a DMA engine: one beat per cycle each way."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect

from ..interfaces import DMA_READ_CYCLES, DmaReadData, SbufBeat, SbufReadRequest
from .dma_buffer import BeatPipe
from .dma_hbm import done_layout
from .dma_walk import BeatSplitter, Walker, beat_layout, plan_layout, sbuf_position_bits

__all__ = ["SbufReader", "SbufWriter"]


def _beats(m, component):
    """Walker and splitter of ``component``; return the stream of beats."""
    config = component.config
    m.submodules.walker = walker = Walker(config=config, address_bits=sbuf_position_bits(config))
    m.submodules.splitter = splitter = BeatSplitter(config=config)
    connect(m, walker.o, splitter.i)
    m.d.comb += [
        walker.i.valid.eq(component.i.valid),
        walker.i.p.eq(component.i.p),
        component.i.ready.eq(walker.i.ready),
    ]
    return splitter.o


class SbufReader(wiring.Component):
    """Read runs from SBUF into a byte buffer.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    capacity : :class:`int`, bytes
        Of the byte buffer.

    Members
    -------
    i : :py:`In(stream.Signature(plan))`
    requests : :py:`Out(stream.Signature(SbufReadRequest))`
    read_data : :py:`In(DmaReadData)`
    stop : :py:`In(1)`
        Request nothing more.
    put, reserve, space
        Of the byte buffer.

    Timing
    ------
    Three cycles from plan to request; one request per cycle.
    """

    def __init__(self, *, config, capacity):
        self.config = config
        number = range(capacity + 1)
        super().__init__(
            {
                "i": In(stream.Signature(plan_layout(config, sbuf_position_bits(config)))),
                "requests": Out(stream.Signature(SbufReadRequest(config))),
                "read_data": In(DmaReadData),
                "stop": In(1),
                "put": Out(
                    wiring.Signature(
                        {"valid": Out(1), "data": Out(64), "phase": Out(3), "count": Out(4)}
                    )
                ),
                "reserve": Out(number),
                "space": In(number),
            }
        )

    def elaborate(self, platform):
        m = Module()
        beats = _beats(m, self)
        beat, request = beats.p, self.requests.p
        where = data.StructLayout({"phase": 3, "count": 4})
        asked = Signal(where)
        take = Signal()
        m.d.comb += [
            take.eq(
                beats.valid
                & (~self.requests.valid | self.requests.ready)
                & (beat.count <= self.space)
                & ~self.stop
            ),
            beats.ready.eq(take),
            self.reserve.eq(Mux(take, beat.count, 0)),
        ]
        with m.If(take):
            m.d.sync += [
                self.requests.valid.eq(1),
                request.across.eq(beat.about.across),
                request.size_log2.eq(beat.about.size_log2),
                request.partition.eq(beat.partition),
                request.offset.eq(beat.offset),
                asked.phase.eq(beat.phase),
                asked.count.eq(beat.count),
            ]
        with m.Elif(self.requests.ready):
            m.d.sync += self.requests.valid.eq(0)

        # Where the bytes of a request lie, for as long as the read takes.
        for cycle in range(1, DMA_READ_CYCLES + 1):
            later = Signal(where, name=f"asked_{cycle}")
            m.d.sync += later.eq(asked)
            asked = later
        m.d.comb += [
            self.put.valid.eq(self.read_data.valid),
            self.put.data.eq(self.read_data.data),
            self.put.phase.eq(asked.phase),
            self.put.count.eq(asked.count),
        ]
        return m


class SbufWriter(wiring.Component):
    """Write runs from the byte buffers into SBUF.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    capacities : tuple of :class:`int`, bytes
        Of the two byte buffers.

    Members
    -------
    i : :py:`In(stream.Signature(plan))`
    o : :py:`Out(stream.Signature(SbufBeat))`
    stop : :py:`In(1)`
        Write nothing more.
    available : :py:`In(bytes).array(2)`
    claim : :py:`Out(bytes).array(2)`
    pop_en, pop_phase, pop_count, buffer_data
        Of the byte buffers.
    done : :py:`Out(done_layout)`
        The last beat of a descriptor was taken.

    Timing
    ------
    Four cycles from plan to beat if the data is there; one beat per cycle.
    """

    def __init__(self, *, config, capacities):
        self.config = config
        number = range(max(capacities) + 1)
        super().__init__(
            {
                "i": In(stream.Signature(plan_layout(config, sbuf_position_bits(config)))),
                "o": Out(stream.Signature(SbufBeat(config))),
                "stop": In(1),
                "available": In(number).array(2),
                "claim": Out(number).array(2),
                "pop_en": Out(1).array(2),
                "pop_phase": Out(3),
                "pop_count": Out(4),
                "buffer_data": In(64).array(2),
                "done": Out(done_layout(config)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        beats = _beats(m, self)
        beat = beats.p
        m.submodules.pipe = pipe = BeatPipe(about=beat_layout(self.config))
        ready = Signal()
        m.d.comb += [
            ready.eq(
                beats.valid
                & ~self.stop
                & (beat.count <= Mux(beat.about.buffer, self.available[1], self.available[0]))
            ),
            pipe.i.valid.eq(ready),
            pipe.i.p.buffer.eq(beat.about.buffer),
            pipe.i.p.phase.eq(beat.phase),
            pipe.i.p.count.eq(beat.count),
            pipe.i.p.about.eq(beat),
            beats.ready.eq(ready & pipe.i.ready),
            self.pop_phase.eq(pipe.pop_phase),
            self.pop_count.eq(pipe.pop_count),
        ]
        for b in range(2):
            m.d.comb += [
                self.claim[b].eq(Mux(pipe.pop_en[b], beat.count, 0)),
                self.pop_en[b].eq(pipe.pop_en[b]),
                pipe.buffer_data[b].eq(self.buffer_data[b]),
            ]

        ahead = pipe.o.p.about
        m.d.comb += [
            self.o.valid.eq(pipe.o.valid),
            pipe.o.ready.eq(self.o.ready),
            self.o.p.across.eq(ahead.about.across),
            self.o.p.size_log2.eq(ahead.about.size_log2),
            self.o.p.partition.eq(ahead.partition),
            self.o.p.offset.eq(ahead.offset),
            self.o.p.data.eq(pipe.o.p.data),
            self.o.p.strobe.eq(pipe.o.p.strobe),
            self.done.valid.eq(pipe.o.valid & self.o.ready & ahead.last),
            self.done.tag.eq(ahead.about.tag),
            self.done.buffer.eq(ahead.about.buffer),
        ]
        return m
