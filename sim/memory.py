"""The high-bandwidth memory of every RTL simulation: one component, whatever the simulator.

It is not part of the core. It answers AXI bursts from one array of 64-bit words, with a latency and
a bandwidth that all ports share.
"""

from math import gcd

from amaranth.hdl import Cat, Module, Mux, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory, MemoryData
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import ceil_log2

from ..rtl.arch.config import AXI_ADDR_BITS, AXI_DATA_BYTES, HbmConfig
from ..rtl.lib.axi import AXI4, AXI4Read, Resp
from ..rtl.lib.replicate import Replicated
from ..rtl.lib.stream import Queue

__all__ = ["BURSTS", "MIN_LATENCY", "Hbm", "HbmReader", "HbmWriter"]

BURSTS = 32
"""Bursts that a port takes before it begins to serve them; writes that may await their response."""

MIN_LATENCY = 5
"""The pipeline itself, in cycles."""

_WORD_BITS = 8 * AXI_DATA_BYTES
_WORD_LOG2 = AXI_DATA_BYTES.bit_length() - 1
_INCR = 1


def _burst_layout(address_bits):
    return data.StructLayout({"address": address_bits, "last": 8, "id": 1, "resp": 2})


def _first_cost(last, min_beats):
    """Beats that the first beat of a burst is charged, given the number of those that follow."""
    if min_beats == 1:
        return 1
    return Mux(last < min_beats - 1, (min_beats - last)[: ceil_log2(min_beats + 1)], 1)


class _Bursts(wiring.Component):
    """Bursts of one port between the address channel and the one being served.

    Members
    -------
    a : burst as the address channel has it; ``valid`` and ``ready`` are both registered outside
    due : one more burst may begin
    next : leave the burst being served
    active, address, cost, last, id, resp : the burst being served, registered
    """

    def __init__(self, *, words, min_beats, timed):
        self.words = words
        self.min_beats = min_beats
        self.timed = timed
        self.address_bits = max(1, ceil_log2(words))
        super().__init__(
            {
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
                "word": Out(self.address_bits),
                "left": Out(8),
                "cost": Out(range(min_beats + 1)),
                "burst_id": Out(1),
                "resp": Out(2),
            }
        )

    def elaborate(self, platform):
        m = Module()
        layout = _burst_layout(self.address_bits)
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
                self.cost.eq(_first_cost(queue.o.p.last, self.min_beats)),
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
    words : :class:`int`, 8-byte words
        Size of the memory.
    min_beats : :class:`int`, beats
        What a shorter burst is charged as.

    Members
    -------
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

    def __init__(self, *, words, min_beats):
        self.bursts = _Bursts(words=words, min_beats=min_beats, timed=True)
        super().__init__(
            {
                "axi": In(AXI4Read(addr_bits=AXI_ADDR_BITS)),
                "due": In(1),
                "want": Out(1),
                "cost": Out(range(min_beats + 1)),
                "word": Out(self.bursts.address_bits),
                "grant": In(1),
                "data": In(_WORD_BITS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.bursts = bursts = self.bursts
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
    words, min_beats
        As for :class:`HbmReader`.

    Members
    -------
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

    def __init__(self, *, words, min_beats):
        self.bursts = _Bursts(words=words, min_beats=min_beats, timed=False)
        axi = AXI4(addr_bits=AXI_ADDR_BITS).flip().members
        super().__init__(
            {
                **{
                    name: member
                    for name, member in axi.items()
                    if name.startswith(("aw", "b")) or name == "wlast"
                },
                "due": In(1),
                "want": Out(1),
                "cost": Out(range(min_beats + 1)),
                "word": Out(self.bursts.address_bits),
                "resp": Out(2),
                "left": Out(8),
                "grant": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.bursts = bursts = self.bursts
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

    Members
    -------
    dma : :py:`In(AXI4(addr_bits=40)).array(config.dma_engines)`
    fetch : :py:`In(AXI4Read(addr_bits=40))`
        Served before the others.

    Attributes
    ----------
    data : :class:`amaranth.hdl.MemoryData`
        The contents: 64-bit words, little-endian.

    Timing
    ------
    ``rvalid`` of a burst's first beat rises ``latency_cycles`` after the cycle in which its address
    was accepted, ``bvalid`` ``latency_cycles`` after that of its last write beat, if the bandwidth
    allows. A port moves at most one read and one write beat per cycle. Each beat costs 8 bytes of
    ``bytes_per_cycle``; the first beat of a burst shorter than ``min_access_bytes`` makes up the
    difference. Unused bandwidth is kept for one cycle. Ports that find none left come first in the
    next cycle.

    Internals
    ---------
    One delay line as deep as the latency carries, for all ports together, one bit per accepted
    address and one per last write beat: a burst knows that it is old enough by counting. Ports are
    granted as long as the credit is positive, so that a charge may leave a debt.
    """

    def __init__(self, *, config, hbm=None):
        hbm = HbmConfig() if hbm is None else hbm
        if hbm.latency_cycles < MIN_LATENCY:
            raise ValueError(
                f"HbmConfig: latency_cycles must be at least {MIN_LATENCY}, "
                f"not {hbm.latency_cycles}"
            )
        self.config = config
        self.hbm = hbm
        self.words = hbm.size_bytes // AXI_DATA_BYTES
        self.bytes_per_cycle = hbm.bytes_per_cycle or config.rows
        self.data = MemoryData(shape=unsigned(_WORD_BITS), depth=self.words, init=[])
        super().__init__(
            {
                "dma": In(AXI4(addr_bits=AXI_ADDR_BITS)).array(config.dma_engines),
                "fetch": In(AXI4Read(addr_bits=AXI_ADDR_BITS)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.array = array = Memory(data=self.data)
        engines = self.config.dma_engines
        parameters = dict(
            words=self.words, min_beats=max(1, self.hbm.min_access_bytes // AXI_DATA_BYTES)
        )
        readers = [HbmReader(**parameters) for _ in range(engines + 1)]
        writers = [HbmWriter(**parameters) for _ in range(engines)]
        for i, reader in enumerate(readers):
            m.submodules[f"reader{i}"] = Replicated(reader, "hbm_reader")
        for i, writer in enumerate(writers):
            m.submodules[f"writer{i}"] = Replicated(writer, "hbm_writer")

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

        # The array.
        for read, reader, grant in zip(reads, readers, grants, strict=True):
            port = array.read_port()
            m.d.comb += [
                reader.grant.eq(grant & read),
                port.en.eq(reader.grant),
                port.addr.eq(reader.word),
                reader.data.eq(port.data),
            ]
        for write, axi, writer, grant in zip(writes, self.dma, writers, grants, strict=False):
            port = array.write_port(granularity=8)
            kept = writer.grant & (writer.resp == Resp.OKAY)
            m.d.comb += [
                writer.grant.eq(grant & write),
                axi.wready.eq(grant & writer.want),
                port.en.eq(axi.wstrb & kept.replicate(AXI_DATA_BYTES)),
                port.addr.eq(writer.word),
                port.data.eq(axi.wdata),
            ]

        self._age(m, readers, writers)
        return m

    def _share(self, m, readers, writers, reads, writes):
        """Share the bandwidth; return one grant per reader, its port's writes included.

        Credit and charges are counted in ``gcd(8, bytes_per_cycle)`` bytes.
        """
        unit = gcd(AXI_DATA_BYTES, self.bytes_per_cycle)
        income, beat = self.bytes_per_cycle // unit, AXI_DATA_BYTES // unit
        most = 2 * beat * max(1, self.hbm.min_access_bytes // AXI_DATA_BYTES)
        width = (2 * income + most + beat).bit_length() + 1
        credit = Signal(width)  # two's complement
        available = Signal(width)
        m.d.comb += available.eq(credit)

        def charge(i):
            read = Mux(reads[i], readers[i].cost, 0)
            beats = read + Mux(writes[i], writers[i].cost, 0) if i < len(writes) else read
            return (beats << (beat.bit_length() - 1))[:width]

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

        ceiling = 2 * income
        sum_ = Signal(width)
        m.d.comb += sum_.eq(left + income)
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
        return [*(a | b for a, b in zip(early, late, strict=True)), fetch_grant]

    def _age(self, m, readers, writers):
        """Tell each port when its bursts have become old enough."""
        latency = self.hbm.latency_cycles
        accepted = Cat(reader.axi.arvalid & reader.axi.arready for reader in readers)
        finished = Cat(writer.grant & (writer.left == 0) for writer in writers)
        marks = Cat(accepted, finished)

        # Written in cycle t, read in t + latency - 4, seen one cycle later. The array starts with
        # what it held before a reset, so nothing is believed until it has been written again.
        distance = latency - 4
        depth = 1 << distance.bit_length()
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
