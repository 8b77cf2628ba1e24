"""The operations of the vector engine on two elements: :class:`~..arch.isa.AluOp`."""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.formats import CANONICAL_NAN
from ..arch.isa import AluOp
from .fma import FMA32_CYCLES, Fma32

__all__ = ["ALU_CYCLES", "LATE_CYCLES", "Alu"]

ALU_CYCLES = FMA32_CYCLES
"""Latency of :class:`Alu`."""

LATE_CYCLES = 2
"""From the operands to the cycle in which the second one may still be exchanged."""

_ONE = 0x3F800000
_SIGN = 1 << 31
_INFINITY = 0x7F800000


class Alu(wiring.Component):
    """``a op b``, by one fused multiply-add for what rounds, and a comparator for the rest.

    Members
    -------
    op : :py:`In(AluOp)`
    a, b : :py:`In(32)`
        Binary32 numbers, or bits.
    take_late, late : :py:`In(1)`, :py:`In(32)`
        :data:`LATE_CYCLES` after ``op``: ``late`` instead of ``b``. Not for MULTIPLY.
    result : :py:`Out(32)`
        Chosen from two registers.

    Timing
    ------
    One operation per cycle, :data:`ALU_CYCLES` later. From ``late`` it is two cycles, so that two
    interleaved sums of a stream can be kept by feeding ``result`` back. 1 + 2, then 1 + 3 (late)::

        cycle      0           1           2  3           4           5
        a          0x3F800000  0x3F800000  .  .           .           .
        b          0x40000000  .           .  .           .           .
        take_late  .           .           0  1           .           .
        late       .           .           .  0x40400000  .           .
        result     .           .           .  .           0x40400000  0x40800000
    """

    def __init__(self):
        super().__init__(
            {
                "op": In(len(C(max(AluOp)))),
                "a": In(32),
                "b": In(32),
                "take_late": In(1),
                "late": In(32),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.fma = fma = Fma32()

        def follow(name, value, cycles):
            for i in range(cycles):
                past, value = value, Signal(len(value), name=f"{name}_{i + 1}", reset_less=True)
                m.d.sync += value.eq(past)
            return value

        # Cycle 2: both operands.
        op = follow("op", self.op, LATE_CYCLES)
        a = follow("a", self.a, LATE_CYCLES)
        early = follow("b", self.b, LATE_CYCLES)
        b = Signal(32, name="second")
        multiplies = op == AluOp.MULTIPLY
        m.d.comb += [
            b.eq(Mux(self.take_late, self.late, early)),
            fma.a.eq(self.a),
            fma.b.eq(Mux(self.op == AluOp.MULTIPLY, self.b, _ONE)),
            # -0 changes nothing, the sign of a zero included.
            fma.c.eq(Mux(multiplies, _SIGN, b ^ Cat(C(0, 31), op == AluOp.SUBTRACT))),
        ]

        # What the comparator finds. In ``greater`` -0 comes before +0.
        magnitude = (op == AluOp.ABS_MAX) | (op == AluOp.ABS_MIN)
        x, y = Signal(32), Signal(32)
        m.d.comb += [x.eq(Cat(a[:31], a[31] & ~magnitude)), y.eq(Cat(b[:31], b[31] & ~magnitude))]
        x_3, y_3, op_3 = (Signal(len(s), name=f"{n}_3", reset_less=True)
                          for n, s in (("x", x), ("y", y), ("op", op)))  # fmt: skip
        above, below, zero_a, zero_b, nan = (
            Signal(name=name, reset_less=True)
            for name in ("above", "below", "zero_a", "zero_b", "nan")
        )
        shifted = Signal(32)
        bits = Signal(32, reset_less=True)
        m.d.comb += shifted.eq(
            Mux(b[5:].any(), 0, Mux(op == AluOp.LEFT_SHIFT, a << b[:5], a >> b[:5]))
        )
        m.d.sync += [
            x_3.eq(x),
            y_3.eq(y),
            op_3.eq(op),
            above.eq(Mux(x[31] ^ y[31], y[31], Mux(x[31], x[:31] < y[:31], x[:31] > y[:31]))),
            below.eq(Mux(x[31] ^ y[31], x[31], Mux(x[31], x[:31] > y[:31], x[:31] < y[:31]))),
            zero_a.eq(a[:31] == 0),
            zero_b.eq(b[:31] == 0),
            nan.eq((a[:31] > _INFINITY) | (b[:31] > _INFINITY)),
        ]
        with m.Switch(op):
            for code, value in (
                (AluOp.BITWISE_AND, a & b),
                (AluOp.BITWISE_OR, a | b),
                (AluOp.BITWISE_XOR, a ^ b),
                (AluOp.BITWISE_NOT, ~a),
            ):
                with m.Case(code):
                    m.d.sync += bits.eq(value)
            with m.Default():
                m.d.sync += bits.eq(shifted)

        # Cycle 3: everything that does not round.
        both_zero = zero_a & zero_b
        greater, less, equal = above & ~both_zero, below & ~both_zero, ~(above | below) | both_zero
        truth = Signal()
        other = Signal(32, reset_less=True)
        rounds = Signal(reset_less=True)
        with m.Switch(op_3):
            for code, value in (
                (AluOp.EQUAL, equal & ~nan),
                (AluOp.NOT_EQUAL, ~equal | nan),
                (AluOp.GREATER_EQUAL, ~less & ~nan),
                (AluOp.GREATER, greater & ~nan),
                (AluOp.LESS_EQUAL, ~greater & ~nan),
                (AluOp.LESS, less & ~nan),
                (AluOp.LOGICAL_AND, ~zero_a & ~zero_b),
                (AluOp.LOGICAL_OR, ~zero_a | ~zero_b),
                (AluOp.LOGICAL_XOR, zero_a ^ zero_b),
            ):
                with m.Case(code):
                    m.d.comb += truth.eq(value)
        with m.Switch(op_3):
            with m.Case(AluOp.BYPASS):
                m.d.sync += other.eq(x_3)
            with m.Case(AluOp.MAX, AluOp.ABS_MAX):
                m.d.sync += other.eq(Mux(nan, CANONICAL_NAN, Mux(above, x_3, y_3)))
            with m.Case(AluOp.MIN, AluOp.ABS_MIN):
                m.d.sync += other.eq(Mux(nan, CANONICAL_NAN, Mux(below, x_3, y_3)))
            with m.Case(*(op for op in AluOp if op >= AluOp.BITWISE_AND)):
                m.d.sync += other.eq(bits)
            with m.Default():
                m.d.sync += other.eq(Mux(truth, _ONE, 0))
        m.d.sync += rounds.eq((op_3 >= AluOp.ADD) & (op_3 <= AluOp.MULTIPLY))
        m.d.comb += self.result.eq(Mux(rounds, fma.result, other))
        return m
