"""Byte streams inside a DMA engine: realignment between source and destination.

Bytes are stored by their position in the stream alone. The reader rotates what arrives into place,
the writer rotates what it takes to its own alignment, so the two never need to agree.
"""

from amaranth.hdl import Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

__all__ = ["BeatPipe", "ByteBuffer", "rotate_bytes", "rotate_left"]

LANES = 8
BANKS = 2


def rotate_left(m, name, value, amount, unit=1):
    """``value`` rotated left by ``amount`` (3 bits) times ``unit`` bits, in three stages."""
    for stage in range(3):
        rotated = Signal(len(value), name=f"{name}_{1 << stage}")
        m.d.comb += rotated.eq(
            Mux(amount[stage], value.rotate_left((unit << stage) % len(value)), value)
        )
        value = rotated
    return value


def rotate_bytes(m, name, value, amount):
    """As :func:`rotate_left`, by bytes: byte 0 moves to byte ``amount``."""
    return rotate_left(m, name, value, amount, unit=8)


def _amount(m, name, value):
    """``value`` modulo 8 as a signal of its own."""
    signal = Signal(3, name=name)
    m.d.comb += signal.eq(value)
    return signal


class ByteBuffer(wiring.Component):
    """A first-in first-out buffer of bytes, up to 8 in and 8 out per cycle at any alignment.

    Two memories hold the even and the odd rows of 8 bytes, so that any 8 consecutive bytes can be
    reached in one cycle.

    Parameters
    ----------
    capacity : :class:`int`, bytes
        Power of two, at least 32.

    Members
    -------
    put : signature of ``valid``, ``data``, ``phase``, ``count``
        Append ``count`` bytes of ``data`` from byte ``phase`` on. They must have been reserved.
    reserve : :py:`In(bytes)`
        Bytes to set aside now, at most ``space``.
    space : :py:`Out(bytes)`
        Bytes not set aside, registered.
    claim : :py:`In(bytes)`
        Bytes promised to a writer now, at most ``available``.
    available : :py:`Out(bytes)`
        Bytes present and not claimed, registered.
    pop : signature of ``en``, ``phase``, ``count``
        Take ``count`` claimed bytes, to stand from byte ``phase`` on.
    data : :py:`Out(64)`
        The bytes popped last, from the cycle after ``pop`` until the next. Other bytes are
        unspecified.
    """

    def __init__(self, *, capacity):
        if capacity < 32 or capacity & capacity - 1:
            raise ValueError(f"capacity must be a power of two, at least 32, not {capacity!r}")
        self.capacity = capacity
        number = range(capacity + 1)
        super().__init__(
            {
                "put": In(
                    wiring.Signature(
                        {"valid": Out(1), "data": Out(64), "phase": Out(3), "count": Out(4)}
                    )
                ),
                "reserve": In(number),
                "space": Out(number, init=capacity),
                "claim": In(number),
                "available": Out(number),
                "pop": In(wiring.Signature({"en": Out(1), "phase": Out(3), "count": Out(4)})),
                "data": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        put, pop = self.put, self.pop
        bits = exact_log2(self.capacity)
        head, tail = Signal(bits), Signal(bits)  # position in the stream: out, in
        put_count, pop_count = Signal(4), Signal(4)
        m.d.comb += [
            put_count.eq(Mux(put.valid, put.count, 0)),
            pop_count.eq(Mux(pop.en, pop.count, 0)),
        ]
        m.d.sync += [
            tail.eq(tail + put_count),
            head.eq(head + pop_count),
            self.space.eq(self.space + pop_count - self.reserve),
            self.available.eq(self.available + put_count - self.claim),
        ]

        # In: lane l gets stream position tail + (l - tail) % 8; those below tail in the next row.
        rotated = rotate_bytes(m, "put", put.data, _amount(m, "put_by", tail[:3] - put.phase))
        lanes = rotate_left(
            m, "put_lanes", ((Const(1, LANES + 1) << put_count) - 1)[:LANES], tail[:3]
        )
        upper = Signal(LANES)
        m.d.comb += upper.eq((Const(0xFF, LANES) << tail[:3])[:LANES])
        this_row, next_row = lanes & upper, lanes & ~upper

        # Out: the same seen from the other end, one cycle later.
        lane, parity, by = Signal(3), Signal(), Signal(3)
        with m.If(pop.en):
            m.d.sync += [
                lane.eq(head[:3]),
                parity.eq(head[3]),
                by.eq(pop.phase - head[:3]),
            ]

        reads = []
        for b in range(BANKS):
            m.submodules[f"bank{b}"] = memory = Memory(
                shape=64, depth=self.capacity // LANES // BANKS, init=[]
            )
            write = memory.write_port(granularity=8)
            read = memory.read_port()
            # Of two neighbouring rows the odd one has the same number in its bank or the even one
            # has the next.
            m.d.comb += [
                write.addr.eq(tail[4:] + (tail[3] if b == 0 else 0)),
                write.data.eq(rotated),
                write.en.eq(Mux(tail[3] == b, this_row, next_row)),
                read.addr.eq(head[4:] + (head[3] if b == 0 else 0)),
                read.en.eq(pop.en),
            ]
            reads.append(read.data)

        stream_row = Signal(64)
        for i in range(LANES):
            m.d.comb += stream_row.word_select(i, 8).eq(
                Mux(
                    parity ^ (i < lane),
                    reads[1].word_select(i, 8),
                    reads[0].word_select(i, 8),
                )
            )
        m.d.comb += self.data.eq(rotate_bytes(m, "pop", stream_row, by))
        return m


class BeatPipe(wiring.Component):
    """Fetch the bytes of beats from the two byte buffers.

    Parameters
    ----------
    about : shape-like
        What travels with a beat.

    Members
    -------
    i : :py:`In(stream.Signature({buffer, phase, count, about}))`
        A beat whose bytes have been claimed.
    o : :py:`Out(stream.Signature({data, strobe, count, about}))`
    pop_en, pop_phase, pop_count, buffer_data
        Of each byte buffer.

    Timing
    ------
    Two cycles; one beat per cycle.
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, about):
        self.about = about
        super().__init__(
            {
                "i": In(
                    stream.Signature(
                        data.StructLayout({"buffer": 1, "phase": 3, "count": 4, "about": about})
                    )
                ),
                "o": Out(
                    stream.Signature(
                        data.StructLayout({"data": 64, "strobe": 8, "count": 4, "about": about})
                    )
                ),
                "pop_en": Out(1).array(2),
                "pop_phase": Out(3),
                "pop_count": Out(4),
                "buffer_data": In(64).array(2),
            }
        )

    def elaborate(self, platform):
        m = Module()
        s1 = Signal(self.i.p.shape())
        s1_valid, s1_moves = Signal(), Signal()
        m.d.comb += [
            s1_moves.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(~s1_valid | s1_moves),
            self.pop_phase.eq(self.i.p.phase),
            self.pop_count.eq(self.i.p.count),
        ]
        for b in range(2):
            m.d.comb += self.pop_en[b].eq(self.i.valid & self.i.ready & (self.i.p.buffer == b))
        with m.If(self.i.ready):
            m.d.sync += [s1_valid.eq(self.i.valid), s1.eq(self.i.p)]
        with m.If(s1_moves):
            ones = Signal(8)
            m.d.comb += ones.eq((Const(1, 9) << s1.count) - 1)
            m.d.sync += [
                self.o.valid.eq(s1_valid),
                self.o.p.data.eq(Mux(s1.buffer, self.buffer_data[1], self.buffer_data[0])),
                self.o.p.strobe.eq((ones << s1.phase)[:8]),
                self.o.p.count.eq(s1.count),
                self.o.p.about.eq(s1.about),
            ]
        return m
