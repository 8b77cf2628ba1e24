"""The systolic array: processing elements, quads of four columns, rows, and their edges.

Everything here exists many times and is defined once: the array contains blocks of rows, a row
contains quads, a quad contains processing elements, each wrapped in
:class:`~..lib.replicate.Replicated`. What differs between instances (the number of a quad, of a
partition) is an input driven by a constant.
"""

from amaranth.hdl import Module, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import ceil_log2

from ..arith.fma import FMA_CYCLES, Product, Sum, align_add, product, round_sum
from ..arith.operand import OPERAND_CYCLES, Kind, Operand, OperandConverter
from ..lib.delay import DELAY_LATENCY, DelayLine
from ..lib.replicate import Replicated

__all__ = [
    "ARRAY_CYCLES", "EDGE_CYCLES", "ROW_SKEW", "ArrayBlock", "ArrayRow", "Edge",
    "EdgeControl", "LaneBus", "Pe", "Quad", "block_rows", "quad_bits",
]  # fmt: skip

QUAD = 4
"""Columns that share a moving register."""

ROW_SKEW = 2
"""Cycles by which a row is behind the one above: registers in the path of a partial sum."""

EDGE_CYCLES = OPERAND_CYCLES + DELAY_LATENCY
"""From SBUF data to the output of the edge of partition 0."""

ARRAY_CYCLES = 1 + FMA_CYCLES
"""From an edge's output to the partial sums of its row in quad 0 (moving register, then the PE)."""


def quad_bits(config):
    """Width of the number of a quad."""
    return max(1, ceil_log2(config.cols // QUAD))


def block_rows(config):
    """Rows of an :class:`ArrayBlock`."""
    return min(8, config.rows)


def LaneBus(config):
    """What travels along a row: a moving word, and weights for one quad.

    Members
    -------
    moving : :class:`~..arith.operand.Operand`
        Void where nothing moves.
    swap : 1 bit
        One cycle ahead of the first moving word of a matmul: the shadow weights become active.
    load : 1 bit
        ``lanes`` holds weights.
    quad : number of the quad that they are for
    mask : 4 bits
        Lanes that hold a weight.
    lanes : 4 :class:`~..arith.operand.Operand`
        Lane ``i`` is for column ``4 * quad + i``.
    """
    return wiring.Signature(
        {
            "moving": Out(Operand, init={"kind": Kind.VOID}),
            "swap": Out(1),
            "load": Out(1),
            "quad": Out(quad_bits(config)),
            "mask": Out(QUAD),
            "lanes": Out(data.ArrayLayout(Operand, QUAD)),
        }
    )


def EdgeControl(config):
    """What all edges are told about the elements that arrive in the same cycle.

    ``moving`` and ``weights`` hold ``valid`` (elements arrive), ``dtype``, ``half``, and the
    partitions in use: ``start`` up to, not including, ``stop``. ``weights`` also has ``mask`` and
    ``quad`` of :func:`LaneBus`. ``swap`` is one cycle ahead of the first moving element.
    """
    operand = {
        "valid": 1,
        "dtype": 4,
        "half": 2,
        "start": config.partition_bits + 1,
        "stop": config.partition_bits + 1,
    }
    return data.StructLayout(
        {
            "moving": data.StructLayout(operand),
            "swap": 1,
            "weights": data.StructLayout({**operand, "mask": QUAD, "quad": quad_bits(config)}),
        }
    )


class Pe(wiring.Component):
    """A processing element: ``psum_out = RNE(psum_in + moving * weight)``, fused, in binary32.

    Members
    -------
    moving : :py:`In(Operand)`
        The quad's moving register.
    swap : :py:`In(1)`
        From the next cycle on the shadow weight multiplies. One cycle ahead of the first moving
        word that it is for: the word of this cycle still meets the old weight.
    weight : :py:`In(Operand)`
    capture : :py:`In(1)`
        Take ``weight`` into the shadow. With ``swap`` it is for the swap after that.
    psum_in : :py:`In(32)`
        Partial sum from above, one cycle after the moving word that it belongs to.
    psum_out : :py:`Out(32)`

    Timing
    ------
    One product per cycle; ``psum_out`` three cycles after ``moving``, two after ``psum_in``. Before
    the first swap, and after a reset, the weight is void.
    """

    def __init__(self):
        super().__init__(
            {
                "moving": In(Operand),
                "swap": In(1),
                "weight": In(Operand),
                "capture": In(1),
                "psum_in": In(32),
                "psum_out": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        shadow = Signal(Operand, init={"kind": Kind.VOID})
        active = Signal(Operand, init={"kind": Kind.VOID})
        with m.If(self.swap):
            m.d.sync += active.eq(shadow)
        with m.If(self.capture):
            m.d.sync += shadow.eq(self.weight)

        s1_product = Signal(Product, reset_less=True)
        s2_sum = Signal(Sum, reset_less=True)
        m.d.sync += [
            s1_product.eq(product(m, self.moving, active)),
            s2_sum.eq(align_add(m, s1_product, self.psum_in)),
            self.psum_out.eq(round_sum(m, s2_sum, name="rounded")),
        ]
        return m


class Quad(wiring.Component):
    """Four processing elements of a row, their moving register and their weight register.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    index : :py:`In(quad_bits(config))`
        Constant: number of the quad in its row.
    i : :py:`In(LaneBus(config))`
    o : :py:`Out(LaneBus(config))`
        The same one cycle later, for the next quad.
    psum_in, psum_out : :py:`In(128)`, :py:`Out(128)`
        Four partial sums, column 0 lowest.

    Timing
    ------
    A moving word at ``i`` reaches ``psum_out`` after four cycles; ``psum_in`` after two.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "index": In(quad_bits(config)),
                "i": In(LaneBus(config)),
                "o": Out(LaneBus(config)),
                "psum_in": In(32 * QUAD),
                "psum_out": Out(32 * QUAD),
            }
        )

    def elaborate(self, platform):
        m = Module()
        for name in self.i.signature.members:
            m.d.sync += getattr(self.o, name).eq(getattr(self.i, name))

        mine = Signal()
        m.d.comb += mine.eq(self.o.load & (self.o.quad == self.index))
        for lane in range(QUAD):
            pe = Pe()
            m.submodules[f"pe{lane}"] = Replicated(pe, "pe")
            m.d.comb += [
                pe.moving.eq(self.o.moving),
                pe.swap.eq(self.o.swap),
                pe.weight.eq(self.o.lanes[lane]),
                pe.capture.eq(mine & self.o.mask[lane]),
                pe.psum_in.eq(self.psum_in.word_select(lane, 32)),
                self.psum_out.word_select(lane, 32).eq(pe.psum_out),
            ]
        return m


class ArrayRow(wiring.Component):
    """One row of the array: ``cols / 4`` quads in a chain.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(LaneBus(config))`
    psum_in, psum_out : :py:`In(32 * cols)`, :py:`Out(32 * cols)`
        Partial sums, column 0 lowest. (Thousands of narrow ports would take minutes to export.)

    Timing
    ------
    Quad ``q`` works ``q`` cycles after quad 0.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "i": In(LaneBus(config)),
                "psum_in": In(32 * config.cols),
                "psum_out": Out(32 * config.cols),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bus = flipped(self.i)
        for q in range(self.config.cols // QUAD):
            quad = Quad(config=self.config)
            m.submodules[f"quad{q}"] = Replicated(quad, "quad")
            connect(m, bus, quad.i)
            m.d.comb += [
                quad.index.eq(q),
                quad.psum_in.eq(self.psum_in.word_select(q, 32 * QUAD)),
                self.psum_out.word_select(q, 32 * QUAD).eq(quad.psum_out),
            ]
            bus = quad.o
        return m


class Edge(wiring.Component):
    """What feeds one row: converts the elements that SBUF delivers, and delays them by its skew.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    index : :py:`In(config.partition_bits)`
        Constant: number of the partition, and of the row.
    control : :py:`In(EdgeControl(config))`
    moving : :py:`In(32)`
        Element, in the low bits.
    weights : :py:`In(128)`
        Four elements, lane 0 lowest, each in the low bits of 32.
    o : :py:`Out(LaneBus(config))`

    Timing
    ------
    ``o`` is ``EDGE_CYCLES + 2 * index`` cycles after the inputs: :data:`EDGE_CYCLES` is 4.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "index": In(config.partition_bits),
                "control": In(EdgeControl(config)),
                "moving": In(32),
                "weights": In(128),
                "o": Out(LaneBus(config)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        control = self.control

        def convert(name, raw, side):
            m.submodules[name] = converter = OperandConverter()
            m.d.comb += [
                converter.raw.eq(raw),
                converter.dtype.eq(side.dtype),
                converter.half.eq(side.half),
                converter.valid.eq(
                    side.valid & (self.index >= side.start) & (self.index < side.stop)
                ),
            ]
            return converter.operand.as_value()

        # Plain bits in the delay line: one memory for each operand, one for all the flags.
        flags = Signal(
            data.StructLayout({"swap": 1, "load": 1, "mask": QUAD, "quad": quad_bits(config)})
        )
        operands = {"moving": convert("moving_converter", self.moving, control.moving)}
        for lane in range(QUAD):
            raw = self.weights.word_select(lane, 32)
            operands[f"lane{lane}"] = convert(f"lane{lane}_converter", raw, control.weights)
        m.d.sync += [
            flags.swap.eq(control.swap),
            flags.load.eq(control.weights.valid),
            flags.mask.eq(control.weights.mask),
            flags.quad.eq(control.weights.quad),
        ]

        m.submodules.skew = skew = DelayLine(
            members={**{name: unsigned(32) for name in operands}, "flags": flags.shape()},
            max_depth=ROW_SKEW * (config.rows - 1),
        )
        m.d.comb += [
            skew.depth.eq(self.index * ROW_SKEW),
            skew.i.flags.eq(flags),
            *(getattr(skew.i, name).eq(value) for name, value in operands.items()),
            self.o.moving.eq(skew.o.moving),
            *(self.o.lanes[lane].eq(getattr(skew.o, f"lane{lane}")) for lane in range(QUAD)),
            *(
                getattr(self.o, name).eq(skew.o.flags[name])
                for name in ("swap", "load", "mask", "quad")
            ),
        ]
        return m


class ArrayBlock(wiring.Component):
    """Some consecutive rows of the array with their edges.

    The array is a chain of blocks, partial sums flowing down from +0. Blocks exist for the export:
    Amaranth's time goes with the number of wires in a module.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    index : :py:`In(config.partition_bits)`
        Constant: number of the block.
    control : :py:`In(EdgeControl(config))`
    moving : :py:`In(32 * block_rows(config))`
    weights : :py:`In(128 * block_rows(config))`
        As in :class:`Edge`, the first row lowest.
    psum_in, psum_out : :py:`In(32 * cols)`, :py:`Out(32 * cols)`
        Column 0 lowest.

    Timing
    ------
    The element that is at ``moving`` of row 0 of the array in cycle ``t`` has its sums below the
    last row, at the columns of quad ``q``, in cycle
    ``t + EDGE_CYCLES + ROW_SKEW * (rows - 1) + ARRAY_CYCLES + q``.
    """

    def __init__(self, *, config):
        self.config = config
        rows = block_rows(config)
        super().__init__(
            {
                "index": In(config.partition_bits),
                "control": In(EdgeControl(config)),
                "moving": In(32 * rows),
                "weights": In(32 * QUAD * rows),
                "psum_in": In(32 * config.cols),
                "psum_out": Out(32 * config.cols),
            }
        )

    def elaborate(self, platform):
        m = Module()
        rows = block_rows(self.config)
        above = self.psum_in
        for k in range(rows):
            edge = Edge(config=self.config)
            row = ArrayRow(config=self.config)
            m.submodules[f"edge{k}"] = Replicated(edge, "array_edge")
            m.submodules[f"row{k}"] = Replicated(row, "row")
            connect(m, edge.o, row.i)
            m.d.comb += [
                edge.index.eq(self.index * rows + k),
                edge.control.eq(self.control),
                edge.moving.eq(self.moving.word_select(k, 32)),
                edge.weights.eq(self.weights.word_select(k, 32 * QUAD)),
                row.psum_in.eq(above),
            ]
            above = row.psum_out
        m.d.comb += self.psum_out.eq(above)
        return m
