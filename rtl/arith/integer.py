"""The operations of the GpSimd engine on two integers: :class:`~..arch.isa.AluOp`, modulo 2**32."""

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..arch.isa import AluOp

__all__ = ["INTEGER_ALU_CYCLES", "IntegerAlu"]

INTEGER_ALU_CYCLES = 4
"""Latency of :class:`IntegerAlu`."""


class IntegerAlu(wiring.Component):
    """``a op b`` in integers of 32 bits, exact modulo 2**32.

    Members
    -------
    op : :py:`In(AluOp)`
    is_signed : :py:`In(1)`
        The operands are int32, not uint32.
    a, b : :py:`In(32)`
    result : :py:`Out(32)`

    Timing
    ------
    One operation per cycle, :data:`INTEGER_ALU_CYCLES` later. For 3 - 5, then 65537 * 65536::

        cycle   0  1      2  3  4           5
        op      2  3      .  .  .           .
        a       3  65537  .  .  .           .
        b       5  65536  .  .  .           .
        result  .  .      .  .  0xFFFFFFFE  65536

    Cost
    ----
    Three 16 x 16 multipliers.
    """

    def __init__(self):
        super().__init__(
            {
                "op": In(len(C(max(AluOp)))),
                "is_signed": In(1),
                "a": In(32),
                "b": In(32),
                "result": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()

        def register(name, value):
            signal = Signal(len(value), name=name, reset_less=True)
            m.d.sync += signal.eq(value)
            return signal

        # Cycle 1: magnitudes where only these count.
        magnitude = (self.op == AluOp.ABS_MAX) | (self.op == AluOp.ABS_MIN)

        def strip(value):
            negative = magnitude & self.is_signed & value[31]
            return Mux(negative, -value, value)[:32]

        a, b = register("a_1", strip(self.a)), register("b_1", strip(self.b))
        op_1 = register("op_1", self.op)
        signed_1 = register("signed_1", self.is_signed & ~magnitude)

        # Cycle 2: what needs the whole words. The signs turn an order of int32 into one of uint32.
        low = register("low", a[:16] * b[:16])
        cross = register("cross", (a[:16] * b[16:] + a[16:] * b[:16])[:16])
        total = register("total", Mux(op_1 == AluOp.SUBTRACT, a - b, a + b)[:32])
        flip = Cat(C(0, 31), signed_1)
        above = register("above", (a ^ flip) > (b ^ flip))
        equal = register("equal", a == b)
        truth = register("truth", Cat(a.any(), b.any()))
        far = b[5:].any()
        fill = signed_1 & a[31]
        left = register("left", Mux(far, 0, a << b[:5])[:32])
        extended = Cat(a, fill).as_signed()
        right = register("right", Mux(far, fill.replicate(32), (extended >> b[:5])[:32]))
        a_2, b_2, op_2 = register("a_2", a), register("b_2", b), register("op_2", op_1)

        # Cycle 3: the one that was asked for.
        result = Signal(32, name="result_3", reset_less=True)
        with m.Switch(op_2):
            for codes, value in (
                ((AluOp.BYPASS,), a_2),
                ((AluOp.ADD, AluOp.SUBTRACT), total),
                ((AluOp.MULTIPLY,), (low + Cat(C(0, 16), cross))[:32]),
                ((AluOp.MAX, AluOp.ABS_MAX), Mux(above, a_2, b_2)),
                ((AluOp.MIN, AluOp.ABS_MIN), Mux(above, b_2, a_2)),
                ((AluOp.EQUAL,), equal),
                ((AluOp.NOT_EQUAL,), ~equal),
                ((AluOp.GREATER_EQUAL,), above | equal),
                ((AluOp.GREATER,), above),
                ((AluOp.LESS_EQUAL,), ~above),
                ((AluOp.LESS,), ~(above | equal)),
                ((AluOp.LOGICAL_AND,), truth.all()),
                ((AluOp.LOGICAL_OR,), truth.any()),
                ((AluOp.LOGICAL_XOR,), truth.xor()),
                ((AluOp.BITWISE_AND,), a_2 & b_2),
                ((AluOp.BITWISE_OR,), a_2 | b_2),
                ((AluOp.BITWISE_XOR,), a_2 ^ b_2),
                ((AluOp.BITWISE_NOT,), ~a_2),
                ((AluOp.LEFT_SHIFT,), left),
                ((AluOp.RIGHT_SHIFT,), right),
            ):
                with m.Case(*codes):
                    m.d.sync += result.eq(value)
        m.d.sync += self.result.eq(result)
        return m
