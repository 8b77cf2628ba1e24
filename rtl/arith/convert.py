"""Casts between the number formats and binary32, in which the vector-side engines compute.

Both directions are pipelines without stalls that take any format in any cycle.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.formats import CANONICAL_NAN, FORMATS, FP32, TF32
from .operand import normalize, round_tf32

__all__ = ["CAST_IN_CYCLES", "CAST_OUT_CYCLES", "CastIn", "CastOut"]

CAST_IN_CYCLES = 2
"""Latency of :class:`CastIn`."""

CAST_OUT_CYCLES = 2
"""Latency of :class:`CastOut`."""

_FLOATS = tuple(fmt for fmt in FORMATS if fmt.is_float)
_INTEGERS = tuple(fmt for fmt in FORMATS if not fmt.is_float)


def _is_binary32_prefix(fmt):
    """Whether a code of ``fmt`` is the upper part of a binary32 encoding."""
    return fmt.exp == FP32.exp


def _man(fmt):
    """Fraction bits in storage."""
    return FP32.man if fmt is TF32 else fmt.man


class CastIn(wiring.Component):
    """An element of any format as a binary32 value.

    Exact, except that ``TF32`` and integers beyond 24 bits round to nearest even. A NaN keeps its
    sign and becomes the canonical one.

    Members
    -------
    raw : :py:`In(32)`
        The element in the low bits; the bits above it are ignored.
    dtype : :py:`In(4)`
        Code of the format; a code of none gives +0.
    value : :py:`Out(32)`
        Binary32.

    Timing
    ------
    One element per cycle, :data:`CAST_IN_CYCLES` later. For the int8 -1::

        cycle  0     1  2
        raw    0xFF  .  .
        dtype  9     .  .
        value  .     .  0xBF800000
    """

    def __init__(self):
        super().__init__({"raw": In(32), "dtype": In(4), "value": Out(32)})

    def elaborate(self, platform):
        m = Module()

        # Stage 1: the fields. Whatever is not a piece of binary32 becomes 32 bits of significand
        # and the exponent of the top one; none of those is a subnormal of binary32.
        sign = Signal()
        nan = Signal()
        inf = Signal()
        ready = Signal()  # already binary32
        word = Signal(32)
        exp = Signal(8)
        with m.Switch(self.dtype):
            for fmt in _FLOATS:
                with m.Case(fmt.code):
                    man = _man(fmt)
                    stored_exp = self.raw[man : man + fmt.exp]
                    stored_man = self.raw[:man]
                    m.d.comb += sign.eq(self.raw[fmt.bits - 1])
                    if fmt.finite:
                        m.d.comb += nan.eq(stored_exp.all() & stored_man.all())
                    else:
                        m.d.comb += nan.eq(stored_exp.all() & stored_man.any())
                        m.d.comb += inf.eq(stored_exp.all() & ~stored_man.any())
                    if _is_binary32_prefix(fmt):
                        m.d.comb += ready.eq(1)
                        m.d.comb += word.eq(Cat(C(0, 32 - fmt.bits), self.raw[: fmt.bits - 1]))
                        if fmt is TF32:
                            m.d.comb += word.eq(Cat(C(0, 13), round_tf32(self.raw)[13:]))
                    else:
                        hidden = stored_exp.any()
                        m.d.comb += word.eq(Cat(C(0, 31 - man), stored_man, hidden))
                        m.d.comb += exp.eq(Mux(hidden, stored_exp, 1) + (FP32.bias - fmt.bias))
            for fmt in _INTEGERS:
                with m.Case(fmt.code):
                    code = self.raw[: fmt.bits]
                    if fmt.signed:
                        m.d.comb += sign.eq(code[-1])
                        m.d.comb += word.eq(Mux(code[-1], -code.as_signed(), code))
                    else:
                        m.d.comb += word.eq(code)
                    m.d.comb += exp.eq(FP32.bias + 31)

        s1_sign = Signal()
        s1_nan = Signal()
        s1_ready = Signal()
        s1_word = Signal(32, reset_less=True)
        s1_exp = Signal(8)
        m.d.sync += [
            s1_sign.eq(sign),
            s1_nan.eq(nan),
            s1_ready.eq(ready | inf),
            s1_word.eq(Mux(inf, 0x7F800000, word)),
            s1_exp.eq(exp),
        ]

        # Stage 2: normalise, round, pack as in fma.round_sum.
        mag, zeros = normalize(m, s1_word, name="word")
        top = Signal(9)
        rounded = Signal(33)
        packed = Signal(31)
        m.d.comb += [
            top.eq(Mux(mag[-1], s1_exp - zeros - 1, 0)),
            rounded.eq(mag + mag[8] + 0x7F),
            packed.eq(Cat(C(0, 23), top) + rounded[8:]),
        ]
        m.d.sync += self.value.eq(
            Cat(Mux(s1_nan, CANONICAL_NAN, Mux(s1_ready, s1_word, packed))[:31], s1_sign)
        )
        return m


class CastOut(wiring.Component):
    """A binary32 value in any format, rounded once, ties to even.

    Floating-point overflow gives infinity (``E4M3FN``: NaN); with ``saturate``, the largest finite
    value, for infinities too. A NaN keeps its sign and becomes the format's canonical NaN. Integers
    saturate always; NaN becomes 0.

    Members
    -------
    value : :py:`In(32)`
        Binary32.
    dtype : :py:`In(4)`
        Code of the format; a code of none gives 0.
    saturate : :py:`In(1)`
    raw : :py:`Out(32)`
        The element in the low bits, zeros above it.

    Timing
    ------
    One element per cycle, :data:`CAST_OUT_CYCLES` later. For -1 as int8::

        cycle  0           1  2
        value  0xBF800000  .  .
        dtype  9           .  .
        raw    .           .  0xFF
    """

    def __init__(self):
        super().__init__({"value": In(32), "dtype": In(4), "saturate": In(1), "raw": Out(32)})

    def elaborate(self, platform):
        m = Module()

        # Stage 1. The result's magnitude is ``base + round(sig >> shift)``: an integer counts units
        # of one; a float's code counts units in the last place, and the significand's top bit adds
        # one to the exponent field in ``base``.
        field = self.value[23:31]
        normal = field.any()
        nan = Signal()
        exp = Signal(signed(10))
        m.d.comb += [
            nan.eq(field.all() & self.value[:23].any()),
            exp.eq(Mux(normal, field, 1)),
        ]
        s1_sign = Signal()
        s1_nan = Signal()
        s1_dtype = Signal(4)
        s1_saturate = Signal()
        s1_sig = Signal(32, reset_less=True)
        s1_shift = Signal(6, reset_less=True)
        s1_base = Signal(31, reset_less=True)
        s1_huge = Signal()
        m.d.sync += [
            s1_sign.eq(self.value[31]),
            s1_nan.eq(nan),
            s1_dtype.eq(self.dtype),
            s1_saturate.eq(self.saturate),
            s1_sig.eq(Cat(C(0, 8), self.value[:23], normal)),
        ]
        shift = Signal(signed(11))
        base = Signal(31)
        huge = Signal()
        with m.Switch(self.dtype):
            for fmt in _FLOATS:
                with m.Case(fmt.code):
                    # The exponent field that the value would have; below 1 it is a subnormal.
                    target = Signal(signed(10), name=f"exp_{fmt.name}")
                    m.d.comb += [
                        target.eq(exp - (FP32.bias - fmt.bias)),
                        base.eq(Cat(C(0, fmt.man), Mux(target > 0, target - 1, 0))),
                        shift.eq(31 - fmt.man + Mux(target > 0, 0, 1 - target)),
                    ]
            with m.Case(*(fmt.code for fmt in _INTEGERS)):
                m.d.comb += [
                    huge.eq(exp > FP32.bias + 31),
                    shift.eq(FP32.bias + 31 - exp),
                ]
        m.d.sync += [
            s1_base.eq(base),
            s1_huge.eq(huge),
            s1_shift.eq(Mux(shift > 33, 33, shift)),
        ]

        # Stage 2: shift and round.
        wide = Signal(34)  # two bits below the last one of the result
        kept = Signal(34)
        lost = Signal(34)
        units = Signal(33)
        count = Signal(33)
        m.d.comb += [
            wide.eq(Cat(C(0, 2), s1_sig)),
            kept.eq(wide >> s1_shift),
            lost.eq(wide & (C((1 << 33) - 1, 33) >> (33 - s1_shift)[:6])),
            units.eq(kept[2:] + (kept[1] & (kept[2] | kept[0] | (lost != 0)))),
            count.eq(units + s1_base),
        ]

        # The bounds of the format, and how it writes NaN and a sign.
        most = Signal(32)  # largest finite magnitude
        beyond = Signal(32)  # what stands for more
        mag = Signal(32)
        positive = Signal(32)
        negative = Signal(32)
        m.d.comb += mag.eq(Mux(s1_huge | (count > most), beyond, count))
        with m.Switch(s1_dtype):
            for fmt in _FLOATS:
                with m.Case(fmt.code):
                    top = (1 << fmt.exp) - 1
                    if fmt.finite:
                        last, quiet = (
                            (top << fmt.man) | ((1 << fmt.man) - 2),
                            (1 << fmt.bits - 1) - 1,
                        )
                    else:
                        last, quiet = (top << fmt.man) - 1, (top << fmt.man) | (1 << fmt.man - 1)
                    free = fmt.bits - 1 - fmt.exp - fmt.man  # 13 for TF32
                    m.d.comb += [
                        most.eq(last),
                        # The next code is infinity, or the NaN of a format without one.
                        beyond.eq(Mux(s1_saturate, last, last + 1)),
                        positive.eq(Cat(C(0, free), Mux(s1_nan, quiet, mag))),
                        negative.eq(positive | 1 << fmt.bits - 1),
                    ]
            for fmt in _INTEGERS:
                with m.Case(fmt.code):
                    limit = Mux(s1_sign, -fmt.min, fmt.max)
                    m.d.comb += [
                        most.eq(limit),
                        beyond.eq(limit),
                        positive.eq(Mux(s1_nan, 0, mag)),
                        negative.eq((-positive)[: fmt.bits]),
                    ]
        m.d.sync += self.raw.eq(Mux(s1_sign, negative, positive))
        return m
