"""Fused multiply-add and addition in binary32, cut where a processing element puts its registers.

Three functions build combinational logic in the caller's module, and the caller registers between
them: :func:`product` (or :func:`addend`), :func:`align_add`, :func:`round_sum`. Together they
compute ``RNE(acc + x * w)`` with one rounding, by IEEE-754: subnormals are kept, every NaN is
:data:`~.formats.CANONICAL_NAN`.

The logic is written in few, word-wide steps of at most 32 bits. It stays fast in simulators that
turn each step into a vector instruction over all processing elements, and small in a netlist.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..arch.formats import CANONICAL_NAN
from .operand import Kind, Operand, normalize

__all__ = [
    "ADD_CYCLES", "FMA32_CYCLES", "FMA_CYCLES", "Add", "Factor", "Fma", "Fma32", "Product", "Sum",
    "WideProduct", "WideSum", "addend", "align_add", "factor", "product", "round_sum",
    "wide_product",
]  # fmt: skip

FMA_CYCLES = 3
"""Latency of :class:`Fma` from ``x`` and ``w``; one less from ``acc``."""

FMA32_CYCLES = 4
"""Latency of :class:`Fma32` from ``a`` and ``b``; two less from ``c``."""

ADD_CYCLES = 2
"""Latency of :class:`Add`."""

_GUARD = 4
"""Bits kept below the last bit of a term: one to round by, two by which cancellation may shift the
sum left after an inexact alignment (two, as a product may have a leading zero), and sticky."""

_INF_EXP = 383
"""Exponent that stands for infinity: above every finite one, and a sum there overflows."""


class Product(data.Struct):
    """A term on its way to the adder: ``(-1)**sign * sig * 2**(exp - 150)``, 37 bits.

    ``sig`` may have leading zeros: one in a product, more only with ``exp`` 1. A term that
    contributes nothing is -0, which is the identity of addition.

    Members
    -------
    sig : 24 bits
    sign : 1 bit
    inf : 1 bit
        ``exp`` is then 383 and ``sig`` is not 0, so that the sum overflows.
    nan : 1 bit
    exp : signed 10 bits
        Biased like binary32's, from -170 to 383. At most 1 if ``sig`` is 0.
    """

    sig: 24
    sign: 1
    inf: 1
    nan: 1
    exp: signed(10)


class WideProduct(data.Struct):
    """An exact product of two binary32 numbers: ``(-1)**sign * sig * 2**(exp - 174)``, 61 bits.

    As :class:`Product`, but ``sig`` has at most one leading zero unless it is 0.
    """

    sig: 48
    sign: 1
    inf: 1
    nan: 1
    exp: signed(10)


class Sum(data.Struct):
    """An exact sum before rounding, except for the sticky lowest bit: 40 bits.

    Members
    -------
    mag : 29 bits
        Magnitude; ``mag[27]`` has the exponent ``exp``, ``mag[0]`` is sticky.
    sign : 1 bit
        Also of an exact zero.
    nan : 1 bit
    exp : 9 bits
        Biased, from 1 to 383.
    """

    mag: 29
    sign: 1
    nan: 1
    exp: 9


class WideSum(data.Struct):
    """A :class:`Sum` with a :class:`WideProduct`; ``mag[51]`` has the exponent ``exp``."""

    mag: 53
    sign: 1
    nan: 1
    exp: 9


class Factor(data.Struct):
    """A binary32 number to be multiplied: ``(-1)**sign * sig * 2**(exp - 150)``, 37 bits.

    The top bit of ``sig`` is set, in subnormals too; ``sig`` of zero, infinity and NaN is 0.
    """

    sig: 24
    sign: 1
    inf: 1
    nan: 1
    exp: signed(10)


def factor(m, bits, *, name="factor"):
    """A binary32 value as a factor (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    bits : :class:`~amaranth.hdl.Value`, 32 bits
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`Factor`
    """
    result = Signal(Factor, name=name)
    fields = _Binary32(m, Value.cast(bits), name=f"{name}_of")
    shifted, zeros = normalize(m, fields.sig, name=f"{name}_norm")
    special = fields.inf | fields.nan
    m.d.comb += [
        result.sig.eq(Mux(special, 0, shifted)),
        result.sign.eq(fields.sign),
        result.inf.eq(fields.inf),
        result.nan.eq(fields.nan),
        result.exp.eq(fields.exp - zeros),
    ]
    return result


def wide_product(m, a, b, *, name="product"):
    """Multiply two factors exactly (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    a, b : view of :class:`Factor`
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`WideProduct`
    """
    result = Signal(WideProduct, name=name)
    inf = Signal(name=f"{name}_is_inf")
    number = Signal(name=f"{name}_nonzero")
    nan = Signal(name=f"{name}_is_nan")
    sig = Signal(48, name=f"{name}_sig")
    exp = Signal(signed(10), name=f"{name}_exp")
    m.d.comb += [
        inf.eq(a.inf | b.inf),
        number.eq(a.sig[23] & b.sig[23]),
        # Infinity times zero, which has neither a top bit nor a flag.
        nan.eq(a.nan | b.nan | (a.inf & ~b.inf & ~b.sig[23]) | (b.inf & ~a.inf & ~a.sig[23])),
        sig.eq(a.sig * b.sig),
        # sig[47] has the weight of two.
        exp.eq(a.exp + b.exp - 126),
        result.sig.eq(Mux(inf, 1 << 47, sig)),
        result.sign.eq(a.sign ^ b.sign),
        result.inf.eq(inf),
        result.nan.eq(nan),
        result.exp.eq(Mux(inf, _INF_EXP, Mux(number, exp, 0))),
    ]
    return result


def product(m, x, w, *, name="product"):
    """Multiply two operands exactly (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    x, w : view of :class:`~.operand.Operand`
        Void wins over NaN, NaN over infinity; infinity times zero is NaN.
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`Product`
    """
    result = Signal(Product, name=name)
    kind = Signal(2, name=f"{name}_kind")
    number = Signal(name=f"{name}_nonzero")
    inf = Signal(name=f"{name}_is_inf")
    is_void = Signal(name=f"{name}_is_void")
    exp = Signal(signed(10), name=f"{name}_exp")
    sig = Signal(24, name=f"{name}_sig")
    m.d.comb += [
        kind.eq(Mux(x.kind > w.kind, x.kind, w.kind)),
        is_void.eq(kind == Kind.VOID),
        inf.eq(kind == Kind.INF),
        # A normalised significand is zero exactly if its top bit is.
        number.eq(x.sig[11] & w.sig[11] & ~is_void),
        sig.eq(x.sig * w.sig),
        # sig[23] has the weight of two: 127 + 1.
        exp.eq(x.exp + w.exp + 128),
        result.sig.eq(Mux(is_void, 0, sig)),
        result.sign.eq(x.sign ^ w.sign | is_void),
        result.inf.eq(inf),
        result.nan.eq((kind == Kind.NAN) | (inf & ~number)),
        result.exp.eq(Mux(inf, _INF_EXP, Mux(number, exp, 0))),
    ]
    return result


class _Binary32:
    """Fields of a binary32 value, subnormals with exponent 1, infinity with :data:`_INF_EXP`."""

    def __init__(self, m, bits, *, name):
        field = bits[23:31]
        zero = Signal(name=f"{name}_low")
        top = Signal(name=f"{name}_top")
        empty = Signal(name=f"{name}_empty")
        self.sign = bits[31]
        self.sig = Signal(24, name=f"{name}_sig")
        self.exp = Signal(9, name=f"{name}_exp")
        self.inf = Signal(name=f"{name}_inf")
        self.nan = Signal(name=f"{name}_nan")
        m.d.comb += [
            zero.eq(field == 0),
            top.eq(field == 255),
            empty.eq(bits[:23] == 0),
            self.sig.eq(Cat(bits[:23], ~zero)),
            self.exp.eq((field | zero) + Cat(C(0, 7), top)),  # 255 + 128 = 383
            self.inf.eq(top & empty),
            self.nan.eq(top & ~empty),
        ]


def addend(m, bits, *, name="addend"):
    """A binary32 value as a term (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    bits : :class:`~amaranth.hdl.Value`, 32 bits
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`Product`
    """
    result = Signal(Product, name=name)
    fields = _Binary32(m, Value.cast(bits), name=name)
    m.d.comb += [
        result.sig.eq(fields.sig),
        result.sign.eq(fields.sign),
        result.inf.eq(fields.inf),
        result.nan.eq(fields.nan),
        result.exp.eq(fields.exp),
    ]
    return result


def align_add(m, term, acc, *, name="sum"):
    """Add a term and a binary32 value, without rounding (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    term : view of :class:`Product` or :class:`WideProduct`
    acc : :class:`~amaranth.hdl.Value`, 32 bits
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`Sum` or :class:`WideSum`
    """
    width = len(term.sig) + _GUARD
    far = (1 << (width - 1).bit_length()) - 1  # shifts everything out
    result = Signal(Sum if len(term.sig) == 24 else WideSum, name=name)
    c = _Binary32(m, Value.cast(acc), name=f"{name}_acc")

    # The one with the greater exponent stays where it is, the other is shifted right. The sum's
    # exponent is thereby at least 1: subnormals need nothing more.
    ahead = Signal(signed(11), name=f"{name}_ahead")
    swap = Signal(name=f"{name}_swap")
    distance = Signal(10, name=f"{name}_distance")
    shift = Signal(range(far + 1), name=f"{name}_shift")
    m.d.comb += [
        ahead.eq(term.exp - c.exp),
        swap.eq(ahead[10]),
        distance.eq(Mux(swap, -ahead, ahead)),
        shift.eq(Mux(distance > far, far, distance)),
    ]
    own = Cat(C(0, len(term.sig) - 24), c.sig)
    high = Signal(width, name=f"{name}_high")
    small = Signal(width, name=f"{name}_small")
    kept = Signal(width, name=f"{name}_kept")
    lost = Signal(width, name=f"{name}_lost")
    low = Signal(width, name=f"{name}_low")
    m.d.comb += [
        high.eq(Cat(C(0, _GUARD), Mux(swap, own, term.sig))),
        small.eq(Cat(C(0, _GUARD), Mux(swap, term.sig, own))),
        kept.eq(small >> shift),
        lost.eq(small & (C((1 << far) - 1, far) >> ~shift)),  # far - shift
        low.eq(kept | (lost != 0)),
    ]

    # Both differences, so that no carry chain follows another. If the terms cancel, neither is
    # negative, and no sign below is set: the +0 of round to nearest.
    total = Signal(width + 1, name=f"{name}_total")
    above = Signal(signed(width + 1), name=f"{name}_above")
    below = Signal(signed(width + 1), name=f"{name}_below")
    opposite = Signal(name=f"{name}_opposite")
    m.d.comb += [
        opposite.eq(term.sign ^ c.sign),
        total.eq(high + low),
        above.eq(high - low),
        below.eq(low - high),
        result.mag.eq(Mux(opposite, Mux(above[-1], below, above), total)),
        result.sign.eq(Mux(opposite, Mux(term.sign ^ swap, below[-1], above[-1]), term.sign)),
        result.nan.eq(term.nan | c.nan | (term.inf & c.inf & opposite)),
        result.exp.eq(Mux(swap, c.exp, term.exp)),
    ]
    return result


def round_sum(m, s, *, name="result"):
    """Round a sum to binary32, to nearest, ties to even (combinational).

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    s : view of :class:`Sum` or :class:`WideSum`
    name : :class:`str`
        Prefix of the signals.

    Returns
    -------
    :class:`~amaranth.hdl.Signal`, 32 bits
    """
    width = len(s.mag)
    drop = width - 24  # bits below the result's last bit
    shifted, zeros = normalize(m, s.mag, name=f"{name}_norm")

    # Back where the exponent would fall below that of subnormals. ``exp`` is one less than the
    # result's exponent: the top bit of the significand adds the one. A subnormal has no such bit.
    left = Signal(signed(10), name=f"{name}_left")
    back = Signal(len(zeros), name=f"{name}_back")
    mag = Signal(width, name=f"{name}_mag")
    exp = Signal(9, name=f"{name}_exp")
    m.d.comb += [
        left.eq(s.exp - zeros),
        back.eq(Mux(left[-1], -left, 0)),
        mag.eq(shifted >> back),
        exp.eq(Mux(mag[-1], left, 0)),
    ]

    # Half of the last place, less one where that bit is 0: a tie then falls to the even side. A
    # carry moves into the exponent as it should.
    rounded = Signal(width + 1, name=f"{name}_rounded")
    packed = Signal(32, name=f"{name}_packed")
    finite = Signal(31, name=f"{name}_finite")
    result = Signal(32, name=name)
    m.d.comb += [
        rounded.eq(mag + mag[drop] + ((1 << (drop - 1)) - 1)),
        packed.eq(Cat(C(0, 23), exp) + rounded[drop:]),
        finite.eq(Mux(packed >= 0x7F800000, 0x7F800000, packed)),
        result.eq(Mux(s.nan, CANONICAL_NAN, Cat(finite, s.sign))),
    ]
    return result


class Fma(wiring.Component):
    """``RNE(acc + x * w)`` in three stages, as in a processing element.

    Members
    -------
    x, w : :py:`In(Operand)`
    acc : :py:`In(32)`
        Binary32, one cycle after ``x`` and ``w``.
    result : :py:`Out(32)`
        Binary32.

    Timing
    ------
    One result per cycle, :data:`FMA_CYCLES` after ``x`` and ``w``. For 1 times 1 plus 2::

        cycle   0  1           2  3
        x       1  .           .  .
        w       1  .           .  .
        acc     .  0x40000000  .  .
        result  .  .           .  0x40400000
    """

    def __init__(self):
        super().__init__({"x": In(Operand), "w": In(Operand), "acc": In(32), "result": Out(32)})

    def elaborate(self, platform):
        m = Module()
        s1_product = Signal(Product, reset_less=True)
        s2_sum = Signal(Sum, reset_less=True)
        m.d.sync += [
            s1_product.eq(product(m, self.x, self.w)),
            s2_sum.eq(align_add(m, s1_product, self.acc)),
            self.result.eq(round_sum(m, s2_sum, name="rounded")),
        ]
        return m


class Fma32(wiring.Component):
    """``RNE(a * b + c)`` of binary32 numbers, rounded once, in four stages.

    Members
    -------
    a, b : :py:`In(32)`
    c : :py:`In(32)`
        Two cycles after ``a`` and ``b``.
    result : :py:`Out(32)`

    Timing
    ------
    One result per cycle, :data:`FMA32_CYCLES` after ``a`` and ``b``. For 3 times 1 plus -1::

        cycle   0           1  2           3  4
        a       0x40400000  .  .           .  .
        b       0x3f800000  .  .           .  .
        c       .           .  0xbf800000  .  .
        result  .           .  .           .  0x40000000
    """

    def __init__(self):
        super().__init__({"a": In(32), "b": In(32), "c": In(32), "result": Out(32)})

    def elaborate(self, platform):
        m = Module()
        s1_a, s1_b = (Signal(Factor, reset_less=True, name=f"s1_{name}") for name in "ab")
        s2_product = Signal(WideProduct, reset_less=True)
        s3_sum = Signal(WideSum, reset_less=True)
        m.d.sync += [
            s1_a.eq(factor(m, self.a, name="a")),
            s1_b.eq(factor(m, self.b, name="b")),
            s2_product.eq(wide_product(m, s1_a, s1_b)),
            s3_sum.eq(align_add(m, s2_product, self.c)),
            self.result.eq(round_sum(m, s3_sum, name="rounded")),
        ]
        return m


class Add(wiring.Component):
    """``RNE(a + b)`` in binary32, in two stages.

    Members
    -------
    a, b : :py:`In(32)`
    result : :py:`Out(32)`

    Timing
    ------
    One result per cycle, :data:`ADD_CYCLES` after ``a`` and ``b``.
    """

    def __init__(self):
        super().__init__({"a": In(32), "b": In(32), "result": Out(32)})

    def elaborate(self, platform):
        m = Module()
        s1_sum = Signal(Sum, reset_less=True)
        m.d.sync += [
            s1_sum.eq(align_add(m, addend(m, self.a), self.b)),
            self.result.eq(round_sum(m, s1_sum, name="rounded")),
        ]
        return m
