"""Selection: the fair arbiter that every shared port uses."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

__all__ = ["RoundRobin", "lowest_one"]


def lowest_one(value):
    """The lowest set bit of ``value``, one-hot (0 if there is none)."""
    width = len(value)
    return (value & (~value + 1))[:width]


class RoundRobin(wiring.Component):
    """Grant one of several requests in turn.

    Parameters
    ----------
    count : :class:`int`

    Members
    -------
    requests : :py:`In(count)`
    grant : :py:`Out(count)`
        One-hot, combinational: the first request at or after the turn.
    take : :py:`In(1)`
        The grant was used: the turn passes to the next. A request is granted after at most
        ``count - 1`` uses by others.
    hold : :py:`In(1)`
        With ``take``: the turn stays with the one granted, as long as it requests. A request then
        waits until each of the others has given up its turn.
    """

    def __init__(self, *, count):
        self.count = count
        super().__init__({"requests": In(count), "grant": Out(count), "take": In(1), "hold": In(1)})

    def elaborate(self, platform):
        m = Module()
        n = self.count
        mask = Signal(n, init=(1 << n) - 1)  # ones at and after the turn
        ahead = Signal(n)
        m.d.comb += ahead.eq(self.requests & mask)
        m.d.comb += self.grant.eq(
            lowest_one(ahead) | lowest_one(self.requests) & ~ahead.any().replicate(n)
        )
        with m.If(self.take & self.grant.any()):
            # Ones strictly after the granted bit; all ones when it was the last.
            after = Signal(n)
            m.d.comb += after.eq(~((self.grant << 1) - 1))
            with m.If(self.hold):
                m.d.sync += mask.eq(after | self.grant)
            with m.Else():
                m.d.sync += mask.eq(after | (~after.any()).replicate(n))
        return m
