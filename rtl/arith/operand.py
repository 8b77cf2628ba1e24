"""The one internal operand form of the array, and the converter at its edge.

Every number format that the array multiplies fits a sign, a 9-bit exponent and a normalised 12-bit
significand exactly, so a processing element needs one multiplier and no knowledge of formats.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, enum, wiring
from amaranth.lib.wiring import In, Out

from ..arch.formats import FP32, MATMUL_FORMATS, TF32
from ..arch.isa import Half

__all__ = [
    "OPERAND_CYCLES", "Kind", "Operand", "OperandConverter", "normalize", "round_tf32", "void",
]  # fmt: skip

OPERAND_CYCLES = 1
"""Latency of :class:`OperandConverter`."""


class Kind(enum.IntEnum, shape=2):
    """What an operand is. The greater code wins when two operands meet in a product."""

    NUMBER = 0
    """``(-1)**sign * sig * 2**(exp - 11)``."""
    INF = 1
    """Infinity; ``sig`` must be 0x800."""
    NAN = 2
    """Not a number; sign and payload are not kept."""
    VOID = 3
    """Nothing: a product with it contributes nothing at all. The other fields do not matter."""


class Operand(data.Struct):
    """One factor of a product, 32 bits.

    Members
    -------
    sig : 12 bits
        Significand, ``sig[11]`` set; 0 for a zero.
    exp : signed 9 bits
        Exponent of ``sig[11]``; does not matter for a zero. From -149 (the last bit of a binary32
        subnormal) to 127.
    sign : 1 bit
    kind : :class:`Kind`
    pad : 8 bits
        Free; the converter drives it 0.
    """

    sig: 12
    exp: signed(9)
    sign: 1
    kind: Kind
    pad: 8


def void():
    """The operand that contributes nothing, as a constant and as an initial value."""
    return Operand.const({"kind": Kind.VOID})


def round_tf32(bits):
    """Magnitude of the binary32 value ``bits`` rounded to 10 stored significand bits, ties to even.

    The low 13 bits of the result are not cleared. Wrong for NaN, which may carry out of the word.
    """
    return (bits[:31] + bits[13] + 0xFFF)[:31]


def normalize(m, value, *, name):
    """Shift ``value`` left until its top bit is set.

    Returns
    -------
    shifted, count : :class:`~amaranth.hdl.Signal`
        ``count`` has as many bits as needed for ``len(value) - 1``; all ones if ``value`` is 0.
    """
    width = len(value)
    steps = (width - 1).bit_length()
    stage = value
    bits = []
    for step in reversed(range(steps)):
        distance = 1 << step
        empty = Signal(name=f"{name}_empty{distance}")
        after = Signal(width, name=f"{name}_by{distance}")
        m.d.comb += empty.eq(stage[width - distance :] == 0)
        m.d.comb += after.eq(Mux(empty, Cat(C(0, distance), stage[:-distance]), stage))
        bits.insert(0, empty)
        stage = after
    count = Signal(steps, name=f"{name}_count")
    m.d.comb += count.eq(Cat(*bits))
    return stage, count


class OperandConverter(wiring.Component):
    """Turn an element of any matmul format into an :class:`Operand`.

    Exact for every format of at most 12 significand bits, subnormals included. ``TF32`` rounds the
    binary32 in storage to nearest even (10 stored significand bits; may carry into infinity).
    ``FP32`` enters the array in halves; ``WHOLE`` with ``FP32`` cannot be exact and behaves as
    ``TF32``.

    Of every format, ``HI`` is the value with the low 12 of 23 fraction bits cleared (a NaN stays
    NaN) and ``LO`` the exact rest: void where that is zero or the value is infinite or NaN. In the
    narrow formats the low half is always zero.

    Members
    -------
    raw : :py:`In(32)`
        The element in the low bits; the bits above it are ignored.
    dtype : :py:`In(4)`
        Code of one of :data:`~.formats.MATMUL_FORMATS`; any other gives void.
    half : :py:`In(2)`
        :class:`~.isa.Half`.
    valid : :py:`In(1)`
        Without it the operand is void.
    operand : :py:`Out(Operand)`
        A field that does not matter (see :class:`Operand`) is 0.

    Timing
    ------
    One element per cycle, :data:`OPERAND_CYCLES` later. ::

        cycle         0  1  2
        valid         1  0  0
        operand.kind  .  0  3
    """

    def __init__(self):
        super().__init__(
            {
                "raw": In(32),
                "dtype": In(4),
                "half": In(2),
                "valid": In(1),
                "operand": Out(Operand, init={"kind": Kind.VOID}),
            }
        )

    def elaborate(self, platform):
        m = Module()

        # Binary32 in storage, rounded if it is used as TF32.
        rounds = Signal()
        m.d.comb += rounds.eq(
            (self.dtype == TF32.code)
            | ((self.dtype == FP32.code) & (self.half != Half.HI) & (self.half != Half.LO))
        )
        rounded = Signal(31)
        m.d.comb += rounded.eq(Mux(rounds, Cat(C(0, 13), round_tf32(self.raw)[13:]), self.raw[:31]))

        # Fields of every format, the fraction aligned with binary32's.
        sign = Signal()
        field = Signal(8)  # exponent as stored
        frac = Signal(23)
        rebias = Signal(signed(8))  # minus the bias
        inf = Signal()
        nan = Signal()
        known = Signal()
        with m.Switch(self.dtype):
            for fmt in MATMUL_FORMATS:
                with m.Case(fmt.code):
                    code = rounded if fmt.bits == 32 else self.raw
                    man = 23 if fmt.bits == 32 else fmt.man
                    stored_exp = code[man : man + fmt.exp]
                    stored_man = code[:man]
                    m.d.comb += [
                        known.eq(1),
                        sign.eq(self.raw[fmt.bits - 1]),
                        field.eq(stored_exp),
                        frac.eq(Cat(C(0, 23 - man), stored_man)),
                        rebias.eq(-fmt.bias),
                    ]
                    if fmt.finite:
                        m.d.comb += nan.eq(stored_exp.all() & stored_man.all())
                    elif fmt.bits == 32:
                        # NaN by the bits in storage, which rounding may have carried away.
                        m.d.comb += nan.eq(self.raw[23:31].all() & self.raw[:23].any())
                        m.d.comb += inf.eq(stored_exp.all())
                    else:
                        m.d.comb += nan.eq(stored_exp.all() & stored_man.any())
                        m.d.comb += inf.eq(stored_exp.all())

        # Twelve bits of the significand, normalised.
        low = Signal()
        part = Signal(12)
        exp = Signal(signed(9))
        m.d.comb += [
            low.eq(self.half == Half.LO),
            part.eq(Mux(low, frac[:12], Cat(frac[12:], field.any()))),
            exp.eq(Mux(field.any(), field, 1) + rebias - Mux(low, 12, 0)),
        ]
        sig, zeros = normalize(m, part, name="part")

        with m.If(~self.valid | ~known | (low & (nan | inf | ~part.any()))):
            m.d.sync += self.operand.eq(void())
        with m.Elif(nan | inf):
            m.d.sync += [
                self.operand.eq(0),
                self.operand.sig.eq(0x800),
                self.operand.sign.eq(sign & ~nan),
                self.operand.kind.eq(Mux(nan, Kind.NAN, Kind.INF)),
            ]
        with m.Else():
            m.d.sync += [
                self.operand.eq(0),
                self.operand.sig.eq(sig),
                self.operand.exp.eq(Mux(part.any(), exp - zeros, 0)),
                self.operand.sign.eq(sign),
            ]
        return m
