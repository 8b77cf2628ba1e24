"""Angles modulo pi: the argument of a sine, exactly reduced over all of binary32."""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.functions import (
    ANGLE_DIRECT,
    PI_FACTOR,
    PI_FACTOR_BITS,
    WINDOW_BITS,
    inverse_pi_window,
)
from .operand import normalize

__all__ = ["ANGLE_CYCLES", "AngleReducer"]

ANGLE_CYCLES = 6
"""Latency of :class:`AngleReducer`."""

_LAST_EXPONENT = 254
_DROPPED = 22
"""Low bits of the product that are not used: the window lacks more than they hold."""


class AngleReducer(wiring.Component):
    """Distance of a positive number to the nearest multiple of pi, rounded to binary32.

    A multiple of 2 pi changes nothing, so the significand is multiplied only by those bits of
    1 / pi that matter modulo 2 (the method of Payne and Hanek). Numbers below pi / 2 are their own
    distance.

    Members
    -------
    angle : :py:`In(32)`
        Binary32; the sign bit is ignored. For infinity and NaN the result means nothing.
    reduced : :py:`Out(1)`
        The angle is greater than pi / 2. Without it the other outputs mean nothing.
    distance : :py:`Out(32)`
        Binary32, 0 to pi / 2, within 0.51 units in the last place.
    odd : :py:`Out(1)`
        ``floor(angle / pi)`` is odd.

    Timing
    ------
    One result per cycle, :data:`ANGLE_CYCLES` later. For 3::

        cycle     0           1  2  3  4  5  6
        angle     0x40400000  .  .  .  .  .  .
        reduced   .           .  .  .  .  .  1
        distance  .           .  .  .  .  .  0x3e10fdaa
        odd       .           .  .  .  .  .  0
    """

    def __init__(self):
        super().__init__({"angle": In(32), "reduced": Out(1), "distance": Out(32), "odd": Out(1)})

    def elaborate(self, platform):
        m = Module()

        # Stage 1: the bits of 1 / pi. All windows overlap: each is a part of the longest number.
        field = self.angle[23:31]
        whole = inverse_pi_window(_LAST_EXPONENT, bits=WINDOW_BITS + 127)
        reduced = Signal()
        s1_significand = Signal(24, reset_less=True)
        s1_window = Signal(WINDOW_BITS, reset_less=True)
        m.d.comb += reduced.eq(self.angle[:31] > ANGLE_DIRECT)
        m.d.sync += [
            s1_significand.eq(Cat(self.angle[:23], C(1, 1))),
            s1_window.eq(C(whole, WINDOW_BITS + 127) >> (_LAST_EXPONENT - field)[:7]),
        ]

        # Stage 2: quotient modulo 2.
        s2_quotient = Signal(WINDOW_BITS, reset_less=True)
        m.d.sync += s2_quotient.eq(s1_significand * s1_window)

        # Stage 3: the distance to the nearer multiple, in units of pi.
        fold = s2_quotient[-2]
        s3_turns = Signal(WINDOW_BITS - 2 - _DROPPED, reset_less=True)
        m.d.sync += s3_turns.eq(s2_quotient[_DROPPED:-2] ^ fold.replicate(len(s3_turns)))

        # Stage 4: normalised.
        turns, zeros = normalize(m, s3_turns, name="turns")
        s4_turns = Signal(PI_FACTOR_BITS, reset_less=True)
        s4_zeros = Signal(len(zeros), reset_less=True)
        m.d.sync += [s4_turns.eq(turns[-PI_FACTOR_BITS:]), s4_zeros.eq(zeros)]

        # Stage 5: times pi. The upper 26 bits: 24, one to round by, one that may be 0.
        product = Signal(2 * PI_FACTOR_BITS)
        s5_product = Signal(26, reset_less=True)
        s5_zeros = Signal(len(zeros), reset_less=True)
        m.d.comb += product.eq(s4_turns * PI_FACTOR)
        m.d.sync += [s5_product.eq(product[-26:]), s5_zeros.eq(s4_zeros)]

        # Stage 6: rounded and packed. The exponent is one less than the result's: the top bit of
        # the significand adds the one.
        upper = s5_product[-1]
        kept = Signal(25)
        rounded = Signal(26)
        exponent = Signal(8)
        m.d.comb += [
            kept.eq(Mux(upper, s5_product[1:], s5_product[:-1])),
            rounded.eq(kept + 1),
            exponent.eq(125 - s5_zeros + upper),
        ]
        m.d.sync += self.distance.eq(Cat(C(0, 23), exponent) + rounded[1:])

        for name, value, since, output in (
            ("reduced", reduced, 0, self.reduced),
            ("odd", s2_quotient[-1], 2, self.odd),
        ):
            for cycle in range(since + 1, ANGLE_CYCLES):
                past, value = value, Signal(name=f"s{cycle}_{name}", reset_less=True)
                m.d.sync += value.eq(past)
            m.d.sync += output.eq(value)
        return m
