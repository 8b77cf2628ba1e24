"""A delay of a settable number of cycles: what gives the array its skew.

One definition serves every partition; how long it delays is an input, driven by a constant.
"""

from amaranth.hdl import Cat, Module, Shape, Signal, Value, unsigned
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

__all__ = ["DELAY_LATENCY", "DelayLine"]

DELAY_LATENCY = 3
"""Cycles through a :class:`DelayLine` of depth 0."""


class DelayLine(wiring.Component):
    """Delay several signals together by a settable number of cycles.

    Parameters
    ----------
    members : :class:`dict`
        Name to shape of each delayed signal. Each has a memory of its own.
    max_depth : :class:`int`, cycles
        Largest depth.

    Members
    -------
    i : :py:`In(Signature)`
        The signals, by name; taken in every cycle.
    o : :py:`Out(Signature)`
        The same, later. All bits are 0 for what was taken before the last reset.
    depth : :py:`In(range(max_depth + 1))`
        Constant: may change only during reset.

    Timing
    ------
    What ``i`` is in cycle ``t``, ``o`` is in cycle ``t + depth + 3``. At depth 0::

        cycle   0  1  2  3  4
        i       1  0  0  0  0
        o       .  .  .  1  0

    Internals
    ---------
    A ring buffer of ``max_depth + 2`` words, rounded up to a power of two. Its contents outlive a
    reset; a counter of cycles since the reset, saturated, tells old words from new ones.
    """

    def __init__(self, *, members, max_depth):
        if max_depth < 0:
            raise ValueError(f"max_depth must not be negative, not {max_depth}")
        self.members = dict(members)
        self.max_depth = max_depth
        self.words = 1 << ceil_log2(max_depth + 2)
        bundle = wiring.Signature({name: Out(shape) for name, shape in self.members.items()})
        super().__init__({"i": In(bundle), "o": Out(bundle), "depth": In(range(max_depth + 1))})

    def elaborate(self, platform):
        m = Module()

        write = Signal(range(self.words))
        read = Signal(range(self.words))
        age = Signal(range(self.words))
        fresh = Signal()
        m.d.sync += write.eq(write + 1)
        # The word written in cycle t is read in t + 1 + depth: the pointer has moved on by as much.
        m.d.comb += read.eq(write - 1 - self.depth)
        with m.If(~age.all()):
            m.d.sync += age.eq(age + 1)
        m.d.sync += fresh.eq(age > self.depth)

        for name, shape in self.members.items():
            width = Shape.cast(shape).width
            memory = Memory(shape=unsigned(width), depth=self.words, init=[])
            m.submodules[f"ring_{name}"] = memory
            writer, reader = memory.write_port(), memory.read_port()
            output = Value.cast(getattr(self.o, name))
            m.d.comb += [
                writer.addr.eq(write),
                writer.data.eq(Cat(getattr(self.i, name))),
                writer.en.eq(1),
                reader.addr.eq(read),
                reader.en.eq(1),
            ]
            m.d.sync += output.eq(reader.data & fresh.replicate(width))
        return m
