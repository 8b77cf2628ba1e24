"""DMA engine: strided copies between HBM and SBUF, described by tables in HBM.

::

    jobs ─► DmaQueues ─► DmaPlanner ─┬─► HbmReader ──► byte buffer 0 ──┬──► SbufWriter ──► SBUF
                 ▲  descriptors      └─► SbufReader ─► byte buffer 1 ──┴──► HbmWriter ──► HBM
                 └──────────────────────────┘ done, updates

A descriptor has one reader and one writer, which run apart: readers are ahead of writers by what
the byte buffers hold, so that the latency of HBM is paid once. Each unit takes its descriptors in
the order of planning. Loads and stores share no unit: both stream 8 bytes per cycle at once.
"""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..arch.config import AXI_ADDR_BITS
from ..arch.events import events_layout
from ..arch.isa import ErrorCode
from ..interfaces import DmaJob, DmaReadData, Error, SbufBeat, SbufReadRequest, Update
from ..lib.axi import AXI4
from ..lib.stream import Queue
from .dma_buffer import ByteBuffer
from .dma_hbm import HbmReader, HbmWriter
from .dma_plan import DmaPlanner
from .dma_queues import DmaQueues
from .dma_sbuf import SbufReader, SbufWriter
from .dma_walk import SLOTS, tag_layout

__all__ = ["DmaEngine"]

STORE_BURSTS = 4
"""Longest bursts that the byte buffer filled from SBUF holds."""


class DmaEngine(wiring.Component):
    """One DMA engine.

    A queue behaves as if its descriptors ran one after the other. Loads (HBM to SBUF) overlap with
    loads before them and stores with stores; otherwise a descriptor waits until the one before it
    in its queue is complete. Queues take turns by descriptor and do not wait for each other, except
    for the units they share.

    An error is raised when everything before it in its queue is complete (write errors: at once).
    Then the engine starts nothing more until reset; what is under way on AXI ends legally.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    axi : :py:`Out(AXI4)`
        INCR bursts of 8-byte words from aligned addresses, at most ``dma_burst_bytes``, never
        across a multiple of it. Read data is never refused once its burst is the oldest; write data
        follows its address without waiting for anything but the bus.
    jobs : :py:`In(stream.Signature(DmaJob))`
        ``ready`` follows ``valid`` by one cycle if the job's queue has room.
    sbuf_write : :py:`Out(stream.Signature(SbufBeat))`
    sbuf_read : :py:`Out(stream.Signature(SbufReadRequest))`
    sbuf_read_data : :py:`In(DmaReadData)`
    update : :py:`Out(stream.Signature(Update))`
        Once per job, when its last byte has been handed to SBUF or its last write response arrived.
    error : :py:`Out(Error)`
        Held until reset.
    halt : :py:`In(1)`
        Start nothing more on any port.
    drained : :py:`Out(1)`
        Nothing is outstanding on AXI.
    busy : :py:`Out(1)`
        Jobs inside, updates included.
    events : :py:`Out(events_layout("dma"))`

    Timing
    ------
    All outputs come from registers. A job of one descriptor of ``n`` bytes, whose runs are not
    shorter than a bus word, is busy for about ``n / 8`` cycles, twice the latency of HBM (once for
    the descriptor) and 60 cycles (a store: 97, as its first burst waits until it is complete).
    Jobs that follow hide all but ``n / 8`` and 16 cycles for each descriptor. Bursts of less than
    ``dma_burst_bytes`` may be more than ``dma_bursts`` in flight, up to four times as many.
    """

    jobs: stream.Interface
    update: stream.Interface
    sbuf_write: stream.Interface
    sbuf_read: stream.Interface

    def __init__(self, *, config):
        self.config = config
        self.tag = tag_layout(config)
        super().__init__(
            {
                "axi": Out(AXI4(addr_bits=AXI_ADDR_BITS)),
                "jobs": In(stream.Signature(DmaJob)),
                "sbuf_write": Out(stream.Signature(SbufBeat(config))),
                "sbuf_read": Out(stream.Signature(SbufReadRequest(config))),
                "sbuf_read_data": In(DmaReadData),
                "update": Out(stream.Signature(Update)),
                "error": Out(Error),
                "halt": In(1),
                "drained": Out(1, init=1),
                "busy": Out(1),
                "events": Out(events_layout("dma")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        capacities = (
            config.dma_bursts * config.dma_burst_bytes,
            STORE_BURSTS * config.dma_burst_bytes,
        )
        m.submodules.queues = queues = DmaQueues(config=config)
        m.submodules.planner = planner = DmaPlanner(config=config)
        m.submodules.hbm_reader = hbm_reader = HbmReader(config=config)
        m.submodules.sbuf_reader = sbuf_reader = SbufReader(config=config, capacity=capacities[1])
        m.submodules.hbm_writer = hbm_writer = HbmWriter(config=config, capacities=capacities)
        m.submodules.sbuf_writer = sbuf_writer = SbufWriter(config=config, capacities=capacities)
        buffers = [ByteBuffer(capacity=capacity) for capacity in capacities]
        m.submodules.load_buffer, m.submodules.store_buffer = buffers

        # Work
        connect(m, flipped(self.jobs), queues.jobs)
        connect(m, queues.update, flipped(self.update))
        connect(m, queues.fetch, hbm_reader.fetch)
        connect(m, queues.start, planner.start)
        connect(m, planner.read_hbm, hbm_reader.i)
        connect(m, planner.read_sbuf, sbuf_reader.i)
        for name, source, writer in (
            ("hbm_plans", planner.write_hbm, hbm_writer),
            ("sbuf_plans", planner.write_sbuf, sbuf_writer),
        ):
            # Short descriptors: many are read while the first one's data is under way.
            m.submodules[name] = plans = Queue(shape=source.p.shape(), depth=SLOTS)
            connect(m, source, plans.i)
            connect(m, plans.o, writer.i)
        m.d.comb += [
            queues.word.eq(hbm_reader.word),
            planner.word.eq(hbm_reader.word),
            queues.room.eq(planner.room),
            queues.done[0].eq(hbm_writer.done),
            queues.done[1].eq(sbuf_writer.done),
            queues.done[2].eq(planner.done),
            planner.finished[0].eq(hbm_writer.done),
            planner.finished[1].eq(sbuf_writer.done),
        ]

        # Bytes
        connect(m, hbm_reader.put, buffers[0].put)
        connect(m, sbuf_reader.put, buffers[1].put)
        for b, (buffer, reader) in enumerate(zip(buffers, (hbm_reader, sbuf_reader), strict=True)):
            m.d.comb += [
                buffer.reserve.eq(reader.reserve),
                reader.space.eq(buffer.space),
                buffer.claim.eq(hbm_writer.claim[b] | sbuf_writer.claim[b]),
                buffer.pop.en.eq(hbm_writer.pop_en[b] | sbuf_writer.pop_en[b]),
                buffer.pop.phase.eq(
                    Mux(hbm_writer.pop_en[b], hbm_writer.pop_phase, sbuf_writer.pop_phase)
                ),
                buffer.pop.count.eq(
                    Mux(hbm_writer.pop_en[b], hbm_writer.pop_count, sbuf_writer.pop_count)
                ),
            ]
            for writer in (hbm_writer, sbuf_writer):
                m.d.comb += [
                    writer.available[b].eq(buffer.available),
                    writer.buffer_data[b].eq(buffer.data),
                ]

        # Outside
        self._connect_axi(m, hbm_reader, hbm_writer)
        connect(m, sbuf_writer.o, flipped(self.sbuf_write))
        connect(m, sbuf_reader.requests, flipped(self.sbuf_read))
        m.d.comb += sbuf_reader.read_data.eq(self.sbuf_read_data)
        self._stop(m, queues, planner, hbm_reader, hbm_writer, sbuf_reader, sbuf_writer)
        self._events(m, hbm_reader, hbm_writer)
        m.d.comb += self.busy.eq(queues.busy)
        return m

    def _connect_axi(self, m, reader, writer):
        axi = self.axi
        for unit, outputs, inputs in (
            (
                reader.axi,
                ("arid", "araddr", "arlen", "arsize", "arburst", "arvalid", "rready"),
                ("arready", "rid", "rdata", "rresp", "rlast", "rvalid"),
            ),
            (
                writer.axi,
                (
                    *("awid", "awaddr", "awlen", "awsize", "awburst", "awvalid"),
                    *("wdata", "wstrb", "wlast", "wvalid", "bready"),
                ),
                ("awready", "wready", "bid", "bresp", "bvalid"),
            ),
        ):
            for name in outputs:
                m.d.comb += getattr(axi, name).eq(getattr(unit, name))
            for name in inputs:
                m.d.comb += getattr(unit, name).eq(getattr(axi, name))
        m.d.sync += self.drained.eq(reader.idle & writer.idle)

    def _stop(self, m, queues, planner, hbm_reader, hbm_writer, sbuf_reader, sbuf_writer):
        """Halt, and errors: the first one that is due stops everything, then is reported."""
        raised, looked_up = Signal(), Signal()
        stop = Signal()
        tag = Signal(self.tag)
        code, field = Signal(8), Signal(16)
        address = Signal(AXI_ADDR_BITS)
        in_table = Signal()  # the address in question is the descriptor's
        m.d.comb += [
            stop.eq(self.halt | raised),
            queues.stop.eq(stop),
            queues.lookup.eq(raised & ~looked_up),
            queues.lookup_tag.eq(tag),
        ]
        for unit in (hbm_reader, hbm_writer, sbuf_reader, sbuf_writer):
            m.d.comb += unit.stop.eq(stop)

        def due(what):
            return what.valid & (queues.oldest[what.tag.queue] == what.tag.slot)

        def take(what, its_code, its_field=0, its_address=None):
            m.d.sync += [
                raised.eq(1),
                tag.eq(what.tag),
                code.eq(its_code),
                field.eq(its_field),
                address.eq(0 if its_address is None else its_address),
                in_table.eq(its_address is None),
            ]

        read, write, fault = hbm_reader.error, hbm_writer.error, planner.fault
        with m.If(raised):
            pass
        with m.Elif(write.valid):
            take(write, ErrorCode.BUS_WRITE, its_address=write.address)
        with m.Elif(due(read)):
            take(read, ErrorCode.BUS_READ, its_address=read.address)
        with m.Elif(due(fault)):
            take(fault, fault.code, fault.field)
        m.d.sync += looked_up.eq(raised)
        with m.If(looked_up & ~self.error.valid):
            m.d.sync += [
                self.error.valid.eq(1),
                self.error.code.eq(code),
                self.error.field.eq(field),
                self.error.pc.eq(queues.pc),
                self.error.address.eq(Mux(in_table, queues.pc, address)),
            ]

    def _events(self, m, reader, writer):
        write, read = self.sbuf_write, self.sbuf_read
        m.d.sync += [
            self.events.busy.eq(self.busy),
            self.events.read_bytes.eq(reader.read_bytes),
            self.events.write_bytes.eq(writer.write_bytes),
            self.events.descriptor_bytes.eq(reader.descriptor_bytes),
            self.events.wait_read.eq(reader.waits),
            self.events.wait_sbuf.eq(write.valid & ~write.ready | read.valid & ~read.ready),
            self.events.sbuf_beats.eq((write.valid & write.ready) + (read.valid & read.ready)),
        ]
