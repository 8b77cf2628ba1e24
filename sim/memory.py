"""The high-bandwidth memory of every RTL simulation: one component, whatever the simulator.

It is not part of the core. It answers AXI bursts from one array of 64-bit words, with a latency and
a bandwidth that all ports share.
"""

from amaranth.hdl import Cat, ClockSignal, Const, Instance, Module, Mux, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory, MemoryData, ReadPort, WritePort
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import ceil_log2

from ..rtl.arch.config import AXI_ADDR_BITS, AXI_DATA_BYTES, HbmConfig
from ..rtl.lib.axi import AXI4, AXI4Read, Resp
from ..rtl.lib.replicate import Replicated
from ..rtl.lib.stream import Queue

__all__ = [
    "ARRAY", "ARRAY_WORDS", "BURSTS", "MIN_LATENCY", "Hbm", "HbmReader", "HbmSettings", "HbmWriter",
]  # fmt: skip

ARRAY = "hbm_array"
"""Module of the array of a settable :class:`Hbm`, which whoever simulates it provides."""

BURSTS = 32
"""Bursts that a port takes before it begins to serve them; writes that may await their response."""

MIN_LATENCY = 5
"""The pipeline itself, in cycles."""

ARRAY_WORDS = 1 << 32
"""Largest array that a settable memory addresses."""

_BEATS_BITS = 6
"""Of a charge, in beats; a short access is charged 32 at most."""

_WORD_BITS = 8 * AXI_DATA_BYTES
_WORD_LOG2 = AXI_DATA_BYTES.bit_length() - 1
_INCR = 1


class HbmSettings(data.Struct):
    """What can be set without another elaboration; constant while anything is under way."""

    words: AXI_ADDR_BITS - _WORD_LOG2 + 1
    bytes_per_cycle: 16
    latency: 16
    min_beats: _BEATS_BITS

    @staticmethod
    def of(config, hbm):
        """The settings for an :class:`~makalu.rtl.arch.config.HbmConfig`, by name.

        Raises
        ------
        :exc:`ValueError`
            If it cannot be simulated.
        """
        if hbm.latency_cycles < MIN_LATENCY:
            raise ValueError(
                f"HbmConfig: latency_cycles must be at least {MIN_LATENCY}, "
                f"not {hbm.latency_cycles}"
            )
        bandwidth = config.rows if hbm.bytes_per_cycle is None else hbm.bytes_per_cycle
        if bandwidth > 65535:
            raise ValueError(f"HbmConfig: bytes_per_cycle must be at most 65535, not {bandwidth}")
        return {
            "words": hbm.size_bytes // AXI_DATA_BYTES,
            "bytes_per_cycle": bandwidth,
            "latency": hbm.latency_cycles,
            "min_beats": max(1, hbm.min_access_bytes // AXI_DATA_BYTES),
        }


def _burst_layout(address_bits):
    return data.StructLayout({"address": address_bits, "last": 8, "id": 1, "resp": 2})


class _Bursts(wiring.Component):
    """Bursts of one port between the address channel and the one being served.

    Members
    -------
    a : burst as the address channel has it; ``valid`` and ``ready`` are both registered outside
    due : one more burst may begin
    next : leave the burst being served
    active, address, cost, last, id, resp : the burst being served, registered
    """

    def __init__(self, *, word_bits, timed):
        self.word_bits = word_bits
        self.timed = timed
        super().__init__(
            {
                "words": In(AXI_ADDR_BITS - _WORD_LOG2 + 1),
                "min_beats": In(_BEATS_BITS),
                "address": In(AXI_ADDR_BITS),
                "len": In(8),
                "size": In(3),
                "burst": In(2),
                "id": In(1),
                "valid": In(1),
                "room": In(1),
                "ready": Out(1),
                "due": In(1),
                "step": In(1),
                "active": Out(1),
                "word": Out(word_bits),
                "left": Out(8),
                "cost": Out(_BEATS_BITS),
                "burst_id": Out(1),
                "resp": Out(2),
            }
        )

    def elaborate(self, platform):
        m = Module()
        layout = _burst_layout(self.word_bits)
        m.submodules.queue = queue = Queue(shape=layout, depth=BURSTS + 1)

        # A burst that does not lie in the memory, or is of a kind not served, is answered with an
        # error on every beat.
        first = self.address[_WORD_LOG2:]
        end = Signal(AXI_ADDR_BITS - _WORD_LOG2 + 1)
        resp = Signal(2)
        m.d.comb += end.eq(first + self.len)
        with m.If(end >= self.words):
            m.d.comb += resp.eq(Resp.DECERR)
        with m.Elif((self.len != 0) & ((self.size != _WORD_LOG2) | (self.burst != _INCR))):
            m.d.comb += resp.eq(Resp.SLVERR)
        taken = Signal()
        m.d.comb += [
            taken.eq(self.valid & self.ready),
            queue.i.valid.eq(taken),
            queue.i.p.address.eq(first),
            queue.i.p.last.eq(self.len),
            queue.i.p.id.eq(self.id),
            queue.i.p.resp.eq(resp),
        ]

        # Bursts taken, and bursts old enough, that have not begun.
        load = Signal()
        count = Signal(range(BURSTS + 1))
        count_next = Signal(range(BURSTS + 2))
        m.d.comb += count_next.eq(count + taken - load)
        m.d.sync += [count.eq(count_next), self.ready.eq((count_next < BURSTS) & self.room)]
        if self.timed:
            ripe = Signal(range(BURSTS + 1))
            m.d.sync += ripe.eq(ripe + self.due - load)
            begin = (ripe != 0) | self.due
        else:
            begin = 1

        free = ~self.active | (self.step & (self.left == 0))
        m.d.comb += [load.eq(free & queue.o.valid & begin), queue.o.ready.eq(load)]
        with m.If(self.step):
            m.d.sync += [self.word.eq(self.word + 1), self.left.eq(self.left - 1), self.cost.eq(1)]
        with m.If(load):
            m.d.sync += [
                self.word.eq(queue.o.p.address),
                self.left.eq(queue.o.p.last),
                self.cost.eq(
                    Mux(
                        self.min_beats > queue.o.p.last + 1,
                        self.min_beats - queue.o.p.last,
                        1,
                    )
                ),
                self.burst_id.eq(queue.o.p.id),
                self.resp.eq(queue.o.p.resp),
            ]
        with m.If(free):
            m.d.sync += self.active.eq(load)
        return m


class HbmReader(wiring.Component):
    """The read side of one port.

    Parameters
    ----------
    word_bits : :class:`int`, bits
        Width of the address of a word in the array.

    Members
    -------
    words, min_beats : :py:`In`
        Size of the memory; what a shorter burst is charged as.
    axi : :py:`In(AXI4Read)`
    due : :py:`In(1)`
        One more burst, in the order of acceptance, is old enough to be served.
    want, cost, word : :py:`Out`
        A beat to be read, its charge in beats, and its address. It can be granted when the answer
        has room: ``~axi.rvalid | axi.rready``.
    grant : :py:`In(1)`
        That beat is being read.
    data : :py:`In(64)`
        The word read last.
    """

    def __init__(self, *, word_bits):
        self.word_bits = word_bits
        super().__init__(
            {
                "words": In(AXI_ADDR_BITS - _WORD_LOG2 + 1),
                "min_beats": In(_BEATS_BITS),
                "axi": In(AXI4Read(addr_bits=AXI_ADDR_BITS)),
                "due": In(1),
                "want": Out(1),
                "cost": Out(_BEATS_BITS),
                "word": Out(word_bits),
                "grant": In(1),
                "data": In(_WORD_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.bursts = bursts = _Bursts(word_bits=self.word_bits, timed=True)
        m.d.comb += [bursts.words.eq(self.words), bursts.min_beats.eq(self.min_beats)]
        axi = self.axi
        m.d.comb += [
            bursts.address.eq(axi.araddr),
            bursts.len.eq(axi.arlen),
            bursts.size.eq(axi.arsize),
            bursts.burst.eq(axi.arburst),
            bursts.id.eq(axi.arid),
            bursts.valid.eq(axi.arvalid),
            bursts.room.eq(1),
            axi.arready.eq(bursts.ready),
            bursts.due.eq(self.due),
            bursts.step.eq(self.grant),
            self.want.eq(bursts.active),
            self.cost.eq(bursts.cost),
            self.word.eq(bursts.word),
        ]

        # The array's output register holds the granted beat for as long as the answer before it
        # waits to be taken.
        read = Signal()
        last = Signal()
        beat_id = Signal()
        resp = Signal(2)
        with m.If(~axi.rvalid | axi.rready):
            m.d.sync += [
                read.eq(self.grant),
                last.eq(bursts.left == 0),
                beat_id.eq(bursts.burst_id),
                resp.eq(bursts.resp),
                axi.rvalid.eq(read),
                axi.rlast.eq(last),
                axi.rid.eq(beat_id),
                axi.rresp.eq(resp),
                axi.rdata.eq(Mux(resp == Resp.OKAY, self.data, 0)),
            ]
        return m


class HbmWriter(wiring.Component):
    """The write side of one port: addresses and responses. The data go straight to the array.

    Parameters
    ----------
    word_bits : :class:`int`, bits
        As for :class:`HbmReader`.

    Members
    -------
    words, min_beats : :py:`In`
        As for :class:`HbmReader`.
    awid ... bready : the write channels of AXI, without ``wdata``, ``wstrb`` and ``wready``
    due : :py:`In(1)`
        The response to one more burst is due, one cycle before it is presented.
    want, cost, word : :py:`Out`
        There is a burst for write beats to go to; charge and address of the next beat.
    resp : :py:`Out(2)`
        What the burst will be answered; its beats are dropped unless this is OKAY.
    grant : :py:`In(1)`
        A beat is being taken.
    """

    def __init__(self, *, word_bits):
        self.word_bits = word_bits
        axi = AXI4(addr_bits=AXI_ADDR_BITS).flip().members
        super().__init__(
            {
                "words": In(AXI_ADDR_BITS - _WORD_LOG2 + 1),
                "min_beats": In(_BEATS_BITS),
                **{
                    name: member
                    for name, member in axi.items()
                    if name.startswith(("aw", "b")) or name == "wlast"
                },
                "due": In(1),
                "want": Out(1),
                "cost": Out(_BEATS_BITS),
                "word": Out(word_bits),
                "resp": Out(2),
                "left": Out(8),
                "grant": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.bursts = bursts = _Bursts(word_bits=self.word_bits, timed=False)
        m.d.comb += [bursts.words.eq(self.words), bursts.min_beats.eq(self.min_beats)]
        layout = data.StructLayout({"id": 1, "resp": 2})
        m.submodules.answers = answers = Queue(shape=layout, depth=BURSTS + 1)

        # As many bursts are taken as there are places for their answers.
        open_bursts = Signal(range(BURSTS + 1))
        open_next = Signal(range(BURSTS + 2))
        answered = Signal()
        m.d.comb += [
            answered.eq(self.bvalid & self.bready),
            open_next.eq(open_bursts + (self.awvalid & self.awready) - answered),
        ]
        m.d.sync += open_bursts.eq(open_next)

        m.d.comb += [
            bursts.address.eq(self.awaddr),
            bursts.len.eq(self.awlen),
            bursts.size.eq(self.awsize),
            bursts.burst.eq(self.awburst),
            bursts.id.eq(self.awid),
            bursts.valid.eq(self.awvalid),
            bursts.room.eq(open_next < BURSTS),
            self.awready.eq(bursts.ready),
            bursts.step.eq(self.grant),
            self.want.eq(bursts.active),
            self.cost.eq(bursts.cost),
            self.word.eq(bursts.word),
            self.left.eq(bursts.left),
        ]
        m.d.comb += self.resp.eq(bursts.resp)

        # A wrong wlast is told to whoever sent it.
        is_last = bursts.left == 0
        broken = Signal()
        odd = Signal()
        m.d.comb += odd.eq(broken | (self.wlast != is_last))
        with m.If(self.grant):
            m.d.sync += broken.eq(odd & ~is_last)
        m.d.comb += [
            answers.i.valid.eq(self.grant & is_last),
            answers.i.p.id.eq(bursts.burst_id),
            answers.i.p.resp.eq(Mux((bursts.resp == Resp.OKAY) & odd, Resp.SLVERR, bursts.resp)),
        ]
        ripe = Signal(range(BURSTS + 1))
        take = Signal()
        m.d.comb += [
            take.eq((~self.bvalid | self.bready) & ((ripe != 0) | self.due)),
            answers.o.ready.eq(take),
        ]
        m.d.sync += ripe.eq(ripe + self.due - take)
        with m.If(~self.bvalid | self.bready):
            m.d.sync += [
                self.bvalid.eq(take),
                self.bid.eq(answers.o.p.id),
                self.bresp.eq(answers.o.p.resp),
            ]
        return m


class Hbm(wiring.Component):
    """Memory behind the DMA engines and the instruction fetch.

    Serves INCR bursts of full words (single beats of any size) with byte strobes. A burst that
    leaves the memory is answered with DECERR, any other kind with SLVERR; such reads give 0 and
    such writes are dropped. Responses keep the order of their requests.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
        Gives the number of DMA ports and the default bandwidth.
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
    settable : :class:`bool`
        Leave the array out, for whoever simulates the design to provide as module
        :data:`ARRAY`, so that one compiled model serves every ``hbm``. Its ports are ``clk``,
        ``r0_en``, ``r0_addr``, ``r0_data``, ... and ``w0_en`` (a bit per byte), ``w0_addr``,
        ``w0_data``, ...: what a read finds and a write leaves is as in an Amaranth memory without
        transparency.

    Members
    -------
    settings : :py:`In(HbmSettings)`
        As ``hbm`` says if not connected.
    dma : :py:`In(AXI4(addr_bits=40)).array(config.dma_engines)`
    fetch : :py:`In(AXI4Read(addr_bits=40))`
        Served before the others.

    Attributes
    ----------
    data : :class:`amaranth.hdl.MemoryData`
        The contents: 64-bit words, little-endian. None if settable.

    Timing
    ------
    ``rvalid`` of a burst's first beat rises ``latency_cycles`` after the cycle in which its address
    was accepted, ``bvalid`` ``latency_cycles`` after that of its last write beat, if the bandwidth
    allows. A port moves at most one read and one write beat per cycle. Each beat costs 8 bytes of
    ``bytes_per_cycle``; the first beat of a burst shorter than ``min_access_bytes`` makes up the
    difference. Unused bandwidth is kept for one cycle. Ports that find none left come first in the
    next cycle; after a cycle without requests port 0 does.

    Internals
    ---------
    One delay line as deep as the latency carries, for all ports together, one bit per accepted
    address and one per last write beat: a burst knows that it is old enough by counting. Ports are
    granted as long as the credit is positive, so that a charge may leave a debt.
    """

    def __init__(self, *, config, hbm=None, settable=False):
        hbm = HbmConfig() if hbm is None else hbm
        settings = HbmSettings.of(config, hbm)
        self.config = config
        self.hbm = hbm
        self.settable = settable
        self.words = settings["words"]
        self.data = None
        if settable:
            self.word_bits = ceil_log2(ARRAY_WORDS)
        else:
            self.word_bits = ceil_log2(self.words)
            self.data = MemoryData(shape=unsigned(_WORD_BITS), depth=self.words, init=[])
        super().__init__(
            {
                "settings": In(HbmSettings, init=settings),
                "dma": In(AXI4(addr_bits=AXI_ADDR_BITS)).array(config.dma_engines),
                "fetch": In(AXI4Read(addr_bits=AXI_ADDR_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        engines = self.config.dma_engines
        readers = [HbmReader(word_bits=self.word_bits) for _ in range(engines + 1)]
        writers = [HbmWriter(word_bits=self.word_bits) for _ in range(engines)]
        for i, reader in enumerate(readers):
            m.submodules[f"reader{i}"] = Replicated(reader, "hbm_reader")
        for i, writer in enumerate(writers):
            m.submodules[f"writer{i}"] = Replicated(writer, "hbm_writer")
        for side in (*readers, *writers):
            m.d.comb += [
                side.words.eq(self.settings.words),
                side.min_beats.eq(self.settings.min_beats),
            ]

        # Connections of the ports; the fetch is the last reader.
        connect(m, flipped(self.fetch), readers[engines].axi)
        for port, reader, writer in zip(self.dma, readers, writers, strict=False):
            for name, member in reader.axi.signature.members.items():
                inner, outer = getattr(reader.axi, name), getattr(port, name)
                m.d.comb += inner.eq(outer) if member.flow == In else outer.eq(inner)
            for name, member in writer.signature.members.items():
                if hasattr(port, name):
                    inner, outer = getattr(writer, name), getattr(port, name)
                    m.d.comb += inner.eq(outer) if member.flow == In else outer.eq(inner)

        # What each port asks for, in beats.
        reads, writes = [], []
        for i, reader in enumerate(readers):
            reads.append(read := Signal(name=f"read{i}"))
            m.d.comb += read.eq(reader.want & (~reader.axi.rvalid | reader.axi.rready))
        for i, (port, writer) in enumerate(zip(self.dma, writers, strict=True)):
            writes.append(write := Signal(name=f"write{i}"))
            m.d.comb += write.eq(writer.want & port.wvalid)

        grants = self._share(m, readers, writers, reads, writes)

        array = self._array(m, len(readers), len(writers))
        for read, reader, grant, port in zip(reads, readers, grants, array[0], strict=True):
            m.d.comb += [
                reader.grant.eq(grant & read),
                port.en.eq(reader.grant),
                port.addr.eq(reader.word),
                reader.data.eq(port.data),
            ]
        for i, (axi, writer, port) in enumerate(zip(self.dma, writers, array[1], strict=True)):
            kept = writer.grant & (writer.resp == Resp.OKAY)
            m.d.comb += [
                writer.grant.eq(grants[i] & writes[i]),
                axi.wready.eq(grants[i] & writer.want),
                port.en.eq(axi.wstrb & kept.replicate(AXI_DATA_BYTES)),
                port.addr.eq(writer.word),
                port.data.eq(axi.wdata),
            ]

        self._age(m, readers, writers)
        return m

    def _array(self, m, readers, writers):
        """The array: its read ports and its write ports."""
        if not self.settable:
            m.submodules.array = array = Memory(data=self.data)
            return (
                [array.read_port() for _ in range(readers)],
                [array.write_port(granularity=8) for _ in range(writers)],
            )
        read = ReadPort.Signature(addr_width=self.word_bits, shape=unsigned(_WORD_BITS))
        write = WritePort.Signature(
            addr_width=self.word_bits, shape=unsigned(_WORD_BITS), granularity=8
        )
        reads = [read.create(path=(f"r{i}",)) for i in range(readers)]
        writes = [write.create(path=(f"w{i}",)) for i in range(writers)]
        ports = {"i_clk": ClockSignal()}
        for i, port in enumerate(reads):
            ports |= {f"i_r{i}_en": port.en, f"i_r{i}_addr": port.addr, f"o_r{i}_data": port.data}
        for i, port in enumerate(writes):
            ports |= {f"i_w{i}_en": port.en, f"i_w{i}_addr": port.addr, f"i_w{i}_data": port.data}
        m.submodules.array = Instance(ARRAY, **ports)
        return reads, writes

    def _share(self, m, readers, writers, reads, writes):
        """Share the bandwidth; return one grant per reader, its port's writes included."""
        income = self.settings.bytes_per_cycle
        width = len(income) + 3
        credit = Signal(width)  # bytes, two's complement
        available = Signal(width)
        m.d.comb += available.eq(credit)

        def charge(i):
            read = Mux(reads[i], readers[i].cost, 0)
            beats = read + Mux(writes[i], writers[i].cost, 0) if i < len(writes) else read
            return Cat(Const(0, _WORD_LOG2), beats)

        def spend(name, requested, left, i):
            grant, after = Signal(name=f"grant_{name}"), Signal(width, name=f"left_{name}")
            positive = ~left[-1] & (left != 0)
            m.d.comb += [
                grant.eq(requested & positive),
                after.eq(left - Mux(grant, charges[i], 0)),
            ]
            return grant, after

        count = len(writes)
        charges, requests = [], []
        for i in range(count + 1):
            charges.append(amount := Signal(width, name=f"charge{i}"))
            requests.append(request := Signal(name=f"request{i}"))
            m.d.comb += [
                amount.eq(charge(i)),
                request.eq(reads[i] | writes[i] if i < count else reads[i]),
            ]

        # The fetch, then the ports from the turn on, then those before it.
        fetch_grant, left = spend("fetch", requests[count], available, count)
        after_turn = Signal(count, init=(1 << count) - 1)
        early, late = [], []
        for i in range(count):
            grant, left = spend(f"early{i}", requests[i] & after_turn[i], left, i)
            early.append(grant)
        for i in range(count):
            grant, left = spend(f"late{i}", requests[i] & ~after_turn[i], left, i)
            late.append(grant)

        ceiling, sum_ = Signal(width), Signal(width)
        m.d.comb += [ceiling.eq(income << 1), sum_.eq(left + income)]
        with m.If(~sum_[-1] & (sum_ > ceiling)):
            m.d.sync += credit.eq(ceiling)
        with m.Else():
            m.d.sync += credit.eq(sum_)

        # The first that found nothing left has the next turn.
        refused_early, refused_late = Signal(count), Signal(count)
        m.d.comb += [
            refused_early.eq(Cat(requests[:count]) & after_turn & ~Cat(early)),
            refused_late.eq(Cat(requests[:count]) & ~after_turn & ~Cat(late)),
        ]
        with m.If(refused_early.any()):
            m.d.sync += after_turn.eq(refused_early | (~refused_early + 1))
        with m.Elif(refused_late.any()):
            m.d.sync += after_turn.eq(refused_late | (~refused_late + 1))
        with m.Elif(~Cat(requests[:count]).any()):
            m.d.sync += after_turn.eq(~0)  # every run starts alike
        return [*(a | b for a, b in zip(early, late, strict=True)), fetch_grant]

    def _age(self, m, readers, writers):
        """Tell each port when its bursts have become old enough."""
        accepted = Cat(reader.axi.arvalid & reader.axi.arready for reader in readers)
        finished = Cat(writer.grant & (writer.left == 0) for writer in writers)
        marks = Cat(accepted, finished)

        # Written in cycle t, read in t + latency - 4, seen one cycle later. The array starts with
        # what it held before a reset, so nothing is believed until it has been written again.
        depth = 1 << (16 if self.settable else self.hbm.latency_cycles.bit_length())
        distance = Signal(range(depth))
        m.d.comb += distance.eq(self.settings.latency - 4)
        now = Signal(range(depth))
        primed = Signal()
        m.submodules.age = line = Memory(shape=len(marks), depth=depth, init=[])
        write, read = line.write_port(), line.read_port()
        m.d.sync += now.eq(now + 1)
        with m.If(now == distance):
            m.d.sync += primed.eq(1)
        m.d.comb += [
            write.addr.eq(now),
            write.data.eq(marks),
            write.en.eq(1),
            read.addr.eq((now - distance)[: len(now)]),
            read.en.eq(1),
        ]
        due = Signal(len(marks))
        m.d.comb += due.eq(read.data & primed.replicate(len(marks)))
        # Reading takes two cycles more than answering.
        answers, answers_r = Signal(len(finished)), Signal(len(finished))
        m.d.sync += [answers_r.eq(due[len(accepted) :]), answers.eq(answers_r)]
        for i, reader in enumerate(readers):
            m.d.comb += reader.due.eq(due[i])
        for i, writer in enumerate(writers):
            m.d.comb += writer.due.eq(answers[i])
