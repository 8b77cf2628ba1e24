"""Stream pieces: a join that compares payloads, and a queue.

Streams are :class:`amaranth.lib.stream.Signature`; its four transfer rules hold everywhere: a
producer keeps ``valid`` and ``payload`` until ``ready``, and decides ``valid`` without looking at
``ready``.
"""

from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import In, Out

__all__ = ["Queue", "connect_streams"]


def connect_streams(m, source, sink):
    """Connect stream ``source`` to stream ``sink``.

    Raises
    ------
    :exc:`TypeError`
        If the payload shapes differ; :func:`amaranth.lib.wiring.connect` compares only widths.
    """
    shapes = [s.signature.members["payload"].shape for s in (source, sink)]
    if shapes[0] != shapes[1]:
        raise TypeError(f"streams carry different payloads: {shapes[0]!r} and {shapes[1]!r}")
    m.d.comb += [
        sink.payload.eq(source.payload),
        sink.valid.eq(source.valid),
        source.ready.eq(sink.ready),
    ]


class Queue(wiring.Component):
    """A first-in first-out queue.

    Parameters
    ----------
    shape : shape-like
        Payload.
    depth : :class:`int`, payloads

    Members
    -------
    i : :py:`In(stream.Signature(shape))`
    o : :py:`Out(stream.Signature(shape))`
    level : :py:`Out(range(depth + 1))`
        Payloads inside.

    Timing
    ------
    A payload appears at ``o`` two cycles after it was taken (one if depth is 1); one per cycle.
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, shape, depth):
        self.shape = shape
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        width = len(self.i.p.as_value()) if hasattr(self.i.p, "as_value") else len(self.i.p)
        m.submodules.fifo = fifo = SyncFIFOBuffered(width=width, depth=self.depth)
        m.d.comb += [
            fifo.w_data.eq(self.i.p),
            fifo.w_en.eq(self.i.valid),
            self.i.ready.eq(fifo.w_rdy),
            self.o.valid.eq(fifo.r_rdy),
            fifo.r_en.eq(self.o.ready),
            self.level.eq(fifo.level),
        ]
        payload = self.o.p.as_value() if hasattr(self.o.p, "as_value") else self.o.p
        m.d.comb += payload.eq(fifo.r_data)
        return m
