"""Random numbers: the first round of :mod:`~..arch.mixing`, and words as numbers from 0 to 1."""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.mixing import FRACTION_BITS, ROUNDS

__all__ = ["FRACTION_CYCLES", "MIX_CYCLES", "Fraction", "MixRound"]

MIX_CYCLES = 2
"""Latency of :class:`MixRound`."""

FRACTION_CYCLES = 2
"""Latency of :class:`Fraction`."""

_BIAS = 127


class MixRound(wiring.Component):
    """The first round: ``x = value ^ seed; (x ^ x >> 17) * 0xED5AD4BB`` modulo 2**32.

    Members
    -------
    value, seed : :py:`In(32)`
    result : :py:`Out(32)`

    Timing
    ------
    One word per cycle, :data:`MIX_CYCLES` later::

        cycle   0  1        2           3
        value   1  0x20000  .           .
        seed    0  0        .           .
        result  .  .        0xED5AD4BB  0x96D0D4BB

    Cost
    ----
    Three 16 x 16 multipliers by constants.
    """

    def __init__(self):
        super().__init__({"value": In(32), "seed": In(32), "result": Out(32)})

    def elaborate(self, platform):
        m = Module()
        shift, multiplier = ROUNDS[0]
        high, low = multiplier >> 16, multiplier & 0xFFFF
        seeded, x = Signal(32), Signal(32)
        m.d.comb += [seeded.eq(self.value ^ self.seed), x.eq(seeded ^ seeded[shift:])]
        whole, cross = Signal(32, reset_less=True), Signal(16, reset_less=True)
        m.d.sync += [
            whole.eq(x[:16] * C(low, 16)),
            cross.eq(x[:16] * C(high, 16) + x[16:] * C(low, 16)),
            self.result.eq(whole + Cat(C(0, 16), cross)),
        ]
        return m


class Fraction(wiring.Component):
    """A word as a binary32 number: its 24 high bits times 2**-24, exact.

    Members
    -------
    word : :py:`In(32)`
    number : :py:`Out(32)`

    Timing
    ------
    One number per cycle, :data:`FRACTION_CYCLES` later. For 2**-1, 2**-24 and 0::

        cycle   0           1      2           3           4
        word    0x80000000  0x100  0xFF        .           .
        number  .           .      0x3F000000  0x33800000  0
    """

    def __init__(self):
        super().__init__({"word": In(32), "number": Out(32)})

    def elaborate(self, platform):
        m = Module()
        # Leading zeros are shifted out by 16 and 8 bits, then by 4, 2 and 1.
        bits = self.word[-FRACTION_BITS:]
        left = Signal(5)
        steps, passed = [16, 8, 4, 2, 1], []
        for step in steps:
            empty = Signal(name=f"empty{step}")
            m.d.comb += empty.eq(~bits[-step:].any())
            bits = Mux(empty, bits << step, bits)[:FRACTION_BITS]
            passed.append(empty)
            if step == 8:
                held = Signal(FRACTION_BITS, name="held", reset_less=True)
                m.d.sync += held.eq(bits)
                bits = held
        late = [Signal(name=f"late{step}", reset_less=True) for step in steps[:2]]
        m.d.sync += [to.eq(of) for to, of in zip(late, passed[:2], strict=True)]
        m.d.comb += left.eq(Cat(*reversed(passed[2:]), *reversed(late)))
        packed = Cat(bits[: FRACTION_BITS - 1], (_BIAS - 1 - left)[:8])
        m.d.sync += self.number.eq(Mux(bits[-1], packed, 0))
        return m
