"""The HBM side of a DMA engine: AXI4 reads and writes.

Read data always has a place reserved before its address is issued, and a write burst is issued once
all its bytes are there. So no burst ever waits for another one, on either channel.
"""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect
from amaranth.utils import exact_log2

from ..arch.config import AXI_ADDR_BITS, AXI_DATA_BYTES
from ..arch.isa import DESCRIPTOR_BYTES
from ..lib.axi import AXI4
from ..lib.stream import Queue
from .dma_buffer import BeatPipe
from .dma_walk import (
    BurstSplitter,
    Walker,
    about_layout,
    burst_bytes_bits,
    plan_layout,
    tag_layout,
)

__all__ = ["HbmReader", "HbmWriter", "bus_error_layout", "fetch_layout", "word_layout"]

INCR = 1
BURST_QUEUE = 8


def bursts_in_flight(config):
    """Records kept of bursts in flight: short bursts may be more than ``dma_bursts``."""
    return 4 * config.dma_bursts


def fetch_layout(config):
    """A descriptor to read: where it lies, whose it is."""
    return data.StructLayout({"address": AXI_ADDR_BITS, "tag": tag_layout(config)})


def word_layout(config):
    """A 64-bit word of a descriptor, as it arrives."""
    return data.StructLayout(
        {"valid": 1, "tag": tag_layout(config), "index": 4, "data": 64, "error": 1}
    )


def bus_error_layout(config):
    """A bus error: descriptor, first byte of the burst."""
    return data.StructLayout({"valid": 1, "tag": tag_layout(config), "address": AXI_ADDR_BITS})


def done_layout(config):
    """A descriptor that is complete, and the byte buffer it used."""
    return data.StructLayout({"valid": 1, "tag": tag_layout(config), "buffer": 1})


def _first_word(address):
    """``address`` rounded down to a bus word."""
    return Cat(address[:3] & 0, address[3:])


def _words_minus_one(phase, count):
    """AXI burst length of ``count`` bytes that start at byte ``phase`` of a word."""
    return ((phase + count + 7) >> 3) - 1


class _Beats:
    """Progress within the burst at the head of a queue: bytes of the beat at hand.

    Attributes
    ----------
    phase, count : first useful byte and number of useful bytes of the beat
    ends : the beat is the burst's last
    left : bytes from this beat on
    """

    def __init__(self, m, phase, burst_bytes):
        started = Signal()
        rest = Signal(len(burst_bytes))
        self.left = Signal(len(burst_bytes))
        self.phase = Signal(3)
        self.count = Signal(4)
        self.ends = Signal()
        room = Signal(4)
        m.d.comb += [
            self.left.eq(Mux(started, rest, burst_bytes)),
            self.phase.eq(Mux(started, 0, phase)),
            room.eq(8 - self.phase),
            self.ends.eq(self.left <= room),
            self.count.eq(Mux(self.ends, self.left, room)),
        ]
        self._next = [started.eq(~self.ends), rest.eq(self.left - room)]

    def advance(self, m):
        """The beat was transferred."""
        m.d.sync += self._next


class HbmReader(wiring.Component):
    """Read runs of bytes, and descriptors, from HBM.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(plan))`
    fetch : :py:`In(stream.Signature({address, tag}))`
        Descriptors to read; they go before data.
    axi : :py:`Out(AXI4)`
        Only the read channels are driven.
    stop : :py:`In(1)`
        Issue nothing more.
    put, reserve, space
        Of the byte buffer for data.
    word : :py:`Out(word_layout)`
        Descriptor words, one cycle after they arrived.
    error : :py:`Out(bus_error_layout)`
        First bus error of a data burst, held. No data after it is put, nothing more is issued.
    idle : :py:`Out(1)`
        Nothing outstanding and nothing being issued.
    read_bytes, descriptor_bytes : :py:`Out(4)`
        Useful bytes in this cycle.
    waits : :py:`Out(1)`
        Reads are outstanding and no data came.

    Timing
    ------
    Three cycles from plan to address; one burst per cycle.
    """

    def __init__(self, *, config):
        self.config = config
        number = range(config.dma_bursts * config.dma_burst_bytes + 1)
        super().__init__(
            {
                "i": In(stream.Signature(plan_layout(config, AXI_ADDR_BITS))),
                "fetch": In(stream.Signature(fetch_layout(config))),
                "axi": Out(AXI4(addr_bits=AXI_ADDR_BITS)),
                "stop": In(1),
                "put": Out(
                    wiring.Signature(
                        {"valid": Out(1), "data": Out(64), "phase": Out(3), "count": Out(4)}
                    )
                ),
                "reserve": Out(number),
                "space": In(number),
                "word": Out(word_layout(config)),
                "error": Out(bus_error_layout(config)),
                "idle": Out(1),
                "read_bytes": Out(4),
                "descriptor_bytes": Out(4),
                "waits": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, axi = self.config, self.axi
        m.submodules.walker = walker = Walker(config=config, address_bits=AXI_ADDR_BITS)
        m.submodules.splitter = splitter = BurstSplitter(config=config)
        connect(m, walker.o, splitter.i)
        m.d.comb += [
            walker.i.valid.eq(self.i.valid),
            walker.i.p.eq(self.i.p),
            self.i.ready.eq(walker.i.ready),
        ]
        bytes_bits = max(burst_bytes_bits(config), DESCRIPTOR_BYTES.bit_length())
        m.submodules.records = records = Queue(
            shape=data.StructLayout(
                {
                    "descriptor": 1,
                    "phase": 3,
                    "bytes": bytes_bits,
                    "address": AXI_ADDR_BITS - 3,
                    "tag": tag_layout(config),
                }
            ),
            depth=bursts_in_flight(config),
        )

        # Addresses
        burst, record = splitter.o.p, records.i.p
        free, take_fetch, take_burst = Signal(), Signal(), Signal()
        m.d.comb += [
            free.eq(
                (~axi.arvalid | axi.arready) & records.i.ready & ~self.stop & ~self.error.valid
            ),
            take_fetch.eq(free & self.fetch.valid),
            take_burst.eq(
                free & ~self.fetch.valid & splitter.o.valid & (burst.bytes <= self.space)
            ),
            self.fetch.ready.eq(free),
            splitter.o.ready.eq(take_burst),
            self.reserve.eq(Mux(take_burst, burst.bytes, 0)),
            records.i.valid.eq(take_fetch | take_burst),
            record.descriptor.eq(take_fetch),
        ]
        with m.If(self.fetch.valid):
            m.d.comb += [
                record.phase.eq(0),
                record.bytes.eq(DESCRIPTOR_BYTES),
                record.address.eq(self.fetch.p.address[3:]),
                record.tag.eq(self.fetch.p.tag),
            ]
        with m.Else():
            m.d.comb += [
                record.phase.eq(burst.address[:3]),
                record.bytes.eq(burst.bytes),
                record.address.eq(burst.address[3:]),
                record.tag.eq(burst.about.tag),
            ]
        m.d.comb += [
            axi.arid.eq(0),
            axi.arsize.eq(exact_log2(AXI_DATA_BYTES)),
            axi.arburst.eq(INCR),
        ]
        with m.If(records.i.valid):
            m.d.sync += [
                axi.arvalid.eq(1),
                axi.araddr.eq(Cat(record.phase & 0, record.address)),
                axi.arlen.eq(_words_minus_one(record.phase, record.bytes)),
            ]
        with m.Elif(axi.arready):
            m.d.sync += axi.arvalid.eq(0)

        # Data
        head = records.o.p
        beat = _Beats(m, head.phase, head.bytes)
        arrives = Signal()
        m.d.comb += [
            axi.rready.eq(records.o.valid),
            arrives.eq(axi.rvalid & axi.rready),
            records.o.ready.eq(arrives & beat.ends),
        ]
        with m.If(arrives):
            beat.advance(m)

        failed = axi.rresp[1]
        m.d.comb += [
            self.put.valid.eq(arrives & ~head.descriptor & ~failed & ~self.error.valid),
            self.put.data.eq(axi.rdata),
            self.put.phase.eq(beat.phase),
            self.put.count.eq(beat.count),
        ]
        m.d.sync += self.word.valid.eq(arrives & head.descriptor)
        with m.If(arrives & head.descriptor):
            m.d.sync += [
                self.word.tag.eq(head.tag),
                self.word.index.eq(DESCRIPTOR_BYTES // AXI_DATA_BYTES - (beat.left >> 3)),
                self.word.data.eq(axi.rdata),
                self.word.error.eq(failed),
            ]
        with m.If(arrives & ~head.descriptor & failed & ~self.error.valid):
            m.d.sync += [
                self.error.valid.eq(1),
                self.error.tag.eq(head.tag),
                self.error.address.eq(Cat(head.phase & 0, head.address)),
            ]

        m.d.comb += [
            self.idle.eq(~axi.arvalid & (records.level == 0) & ~records.i.valid),
            self.read_bytes.eq(Mux(arrives & ~head.descriptor, beat.count, 0)),
            self.descriptor_bytes.eq(Mux(arrives & head.descriptor, beat.count, 0)),
            self.waits.eq((records.level != 0) & ~axi.rvalid),
        ]
        return m


class HbmWriter(wiring.Component):
    """Write runs of bytes to HBM.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(plan))`
    axi : :py:`Out(AXI4)`
        Only the write channels are driven.
    stop : :py:`In(1)`
        Issue no further burst; those issued are completed with their data.
    available : :py:`In(bytes).array(2)`
    claim : :py:`Out(bytes).array(2)`
    pop_en, pop_phase, pop_count, buffer_data
        Of the byte buffers.
    done : :py:`Out(done_layout)`
        The last response of a descriptor arrived.
    error : :py:`Out(bus_error_layout)`
        A bus error arrived, in one cycle.
    idle : :py:`Out(1)`
        Nothing outstanding and nothing being issued.
    write_bytes : :py:`Out(4)`
        Useful bytes transferred in this cycle.

    Timing
    ------
    Three cycles from plan to address if the data is there, three more to the first data beat; one
    burst per cycle, one beat per cycle.
    """

    def __init__(self, *, config, capacities):
        self.config = config
        number = range(max(capacities) + 1)
        super().__init__(
            {
                "i": In(stream.Signature(plan_layout(config, AXI_ADDR_BITS))),
                "axi": Out(AXI4(addr_bits=AXI_ADDR_BITS)),
                "stop": In(1),
                "available": In(number).array(2),
                "claim": Out(number).array(2),
                "pop_en": Out(1).array(2),
                "pop_phase": Out(3),
                "pop_count": Out(4),
                "buffer_data": In(64).array(2),
                "done": Out(done_layout(config)),
                "error": Out(bus_error_layout(config)),
                "idle": Out(1),
                "write_bytes": Out(4),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, axi = self.config, self.axi
        m.submodules.walker = walker = Walker(config=config, address_bits=AXI_ADDR_BITS)
        m.submodules.splitter = splitter = BurstSplitter(config=config)
        connect(m, walker.o, splitter.i)
        m.d.comb += [
            walker.i.valid.eq(self.i.valid),
            walker.i.p.eq(self.i.p),
            self.i.ready.eq(walker.i.ready),
        ]
        m.submodules.bursts = bursts = Queue(
            shape=data.StructLayout({"buffer": 1, "phase": 3, "bytes": burst_bytes_bits(config)}),
            depth=BURST_QUEUE,
        )
        m.submodules.records = records = Queue(
            shape=data.StructLayout(
                {"last": 1, "address": AXI_ADDR_BITS - 3, "about": about_layout(config)}
            ),
            depth=bursts_in_flight(config),
        )
        m.submodules.pipe = pipe = BeatPipe(about=1)
        self._addresses(m, splitter.o, bursts.i, records.i)
        self._data(m, bursts.o, pipe)

        # Responses
        head = records.o.p
        answered = Signal()
        m.d.comb += [
            axi.bready.eq(records.o.valid),
            answered.eq(axi.bvalid & axi.bready),
            records.o.ready.eq(answered),
            self.done.valid.eq(answered & head.last & ~axi.bresp[1]),
            self.done.tag.eq(head.about.tag),
            self.done.buffer.eq(head.about.buffer),
            self.error.valid.eq(answered & axi.bresp[1]),
            self.error.tag.eq(head.about.tag),
            self.error.address.eq(head.address << 3),
            self.idle.eq(~axi.awvalid & (records.level == 0) & ~records.i.valid),
        ]
        return m

    def _addresses(self, m, bursts, beats, records):
        axi, burst = self.axi, bursts.p
        available = Mux(burst.about.buffer, self.available[1], self.available[0])
        take = Signal()
        m.d.comb += [
            take.eq(
                bursts.valid
                & (~axi.awvalid | axi.awready)
                & beats.ready
                & records.ready
                & ~self.stop
                & (burst.bytes <= available)
            ),
            bursts.ready.eq(take),
            beats.valid.eq(take),
            beats.p.buffer.eq(burst.about.buffer),
            beats.p.phase.eq(burst.address[:3]),
            beats.p.bytes.eq(burst.bytes),
            records.valid.eq(take),
            records.p.last.eq(burst.last),
            records.p.address.eq(burst.address[3:]),
            records.p.about.eq(burst.about),
            axi.awid.eq(0),
            axi.awsize.eq(exact_log2(AXI_DATA_BYTES)),
            axi.awburst.eq(INCR),
        ]
        for b in range(2):
            m.d.comb += self.claim[b].eq(Mux(take & (burst.about.buffer == b), burst.bytes, 0))
        with m.If(take):
            m.d.sync += [
                axi.awvalid.eq(1),
                axi.awaddr.eq(_first_word(burst.address)),
                axi.awlen.eq(_words_minus_one(burst.address[:3], burst.bytes)),
            ]
        with m.Elif(axi.awready):
            m.d.sync += axi.awvalid.eq(0)

    def _data(self, m, bursts, pipe):
        axi = self.axi
        beat = _Beats(m, bursts.p.phase, bursts.p.bytes)
        m.d.comb += [
            pipe.i.valid.eq(bursts.valid),
            pipe.i.p.buffer.eq(bursts.p.buffer),
            pipe.i.p.phase.eq(beat.phase),
            pipe.i.p.count.eq(beat.count),
            pipe.i.p.about.eq(beat.ends),
            bursts.ready.eq(pipe.i.ready & beat.ends),
            self.pop_phase.eq(pipe.pop_phase),
            self.pop_count.eq(pipe.pop_count),
            axi.wvalid.eq(pipe.o.valid),
            axi.wdata.eq(pipe.o.p.data),
            axi.wstrb.eq(pipe.o.p.strobe),
            axi.wlast.eq(pipe.o.p.about),
            pipe.o.ready.eq(axi.wready),
            self.write_bytes.eq(Mux(axi.wvalid & axi.wready, pipe.o.p.count, 0)),
        ]
        for b in range(2):
            m.d.comb += [
                self.pop_en[b].eq(pipe.pop_en[b]),
                pipe.buffer_data[b].eq(self.buffer_data[b]),
            ]
        with m.If(pipe.i.valid & pipe.i.ready):
            beat.advance(m)
