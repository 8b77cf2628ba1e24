"""Vector engine: elements from SBUF or PSUM through one lane per partition into SBUF.

A :class:`~.sequencer.Sequencer` walks the access patterns and commands both memories; a
:class:`VectorLane` per partition computes with what comes back. Every lane does the same, so the
lanes hold data only.
"""

from enum import IntEnum

from amaranth.hdl import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import exact_log2

from ..arch.events import events_layout
from ..arch.isa import (
    BITWISE_OPS,
    AluOp,
    CopyPredicated,
    Engine,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    ReduceOp,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
)
from ..arith.alu import ALU_CYCLES, LATE_CYCLES, Alu
from ..arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES, CastIn, CastOut
from ..arith.eight import INDEX_BITS, Eight
from ..interfaces import (
    SBUF_READ_CYCLES,
    Issue,
    PsumReadPort,
    SbufVectorReadPort,
    SbufVectorWritePort,
    Update,
)
from ..lib.replicate import Replicated
from .sequencer import GAP_CYCLES, Delay, Phases, Sequencer, size_log2

__all__ = [
    "GAP_CYCLES", "LANE_CYCLES", "SCAN_CYCLES", "VECTOR_CYCLES", "Operand", "VectorEngine",
    "VectorLane",
]  # fmt: skip

_FIRST = 1 + CAST_IN_CYCLES  # cycle in which the operands enter the first operation
_LATE = _FIRST + LATE_CYCLES
_SECOND = _FIRST + ALU_CYCLES
_CAST_OUT = _SECOND + ALU_CYCLES

LANE_CYCLES = _CAST_OUT + CAST_OUT_CYCLES + 1
"""Latency of :class:`VectorLane`: choice of the source, cast, two operations, cast, choice."""

EIGHTS = {
    Max8: Phases(flush=True),
    FindIndex8: Phases(load=True, flush=True),
    MatchReplace8: Phases(load=True),
}
"""Instructions on eight numbers, and how they go."""

SCAN_CYCLES = 2 * ALU_CYCLES
"""From an element of a scan to the next one."""

VECTOR_CYCLES = SBUF_READ_CYCLES + LANE_CYCLES
"""From the cycle in which an element is read to the cycle in which it is written."""


class Operand(IntEnum):
    """Second operand of an operation in a :class:`VectorLane`."""

    NUMBER = 0
    """The same number in all partitions."""
    SCALAR = 1
    """The partition's scalar."""
    ELEMENT = 2
    """The second source's element."""
    RESULT = 3
    """An earlier result: of the second operation, for the first one (in a scan); of the first, for
    the second one (in a reduction)."""


class Partial(IntEnum):
    """What the first operation of a reduction combines an element with."""

    IDENTITY = 0
    NOW = 1
    """The result that leaves the operation in this cycle."""
    LAST = 2
    """The last result before."""
    LAST_BUT_ONE = 3


class VectorLane(wiring.Component):
    """One partition of the vector engine: an element in, an element out, every cycle.

    Members
    -------
    sbuf, psum : :py:`In(32).array(4)`
        What partition ``p - k * quadrant`` read, for ``k`` = 0 .. 3, for the first source.
    sbuf1 : :py:`In(32).array(4)`
        The same for the second source. PSUM has one read port: either source may come from it.
    from_psum, constant, shift0, value, from_psum1, shift1
        Cycle 0: take ``value``, or what came from a memory, shifted by whole quadrants.
    dtype0, dtype1 : :py:`In(4)`
        Cycle 1: formats of the sources.
    bits, size0, size1 : :py:`In(1)`, :py:`In(2)`, :py:`In(2)`
        Cycle ``1 + CAST_IN_CYCLES``: the elements enter the first operation as the bits that they
        are, of so many bytes (log2), instead of as binary32.
    operand0, number0, reverse0, op0, load0
        The same cycle: second operand, whether the operands are exchanged, and the operation.
        ``load0``: the first source's element is the partition's scalar for this operation.
    reduces, partial, identity
        :data:`~..arith.alu.LATE_CYCLES` later: the second operand is a partial result.
    keep : :py:`In(1)`
        ``ALU_CYCLES`` after the operands: the result of the first operation is one.
    fresh : :py:`In(1)`
        With the operands: the result of the second operation leaves it in this cycle.
    scanned : :py:`In(1)`
        ``2 * ALU_CYCLES`` after the operands: keep the result of the second operation.
    predicated, unless
        With the operands: leave the element out if the second source's is zero, or (``unless``) if
        it is not.
    eight_load, eight_insert, eight_clear, eight_match, eight_flush, eight_indices, eight_index
        With the operands: what :class:`~..arith.eight.Eight` does with the first source's element
        or, ``eight_load``, with the second's. ``number0`` is its ``number``.
    eight_result : :py:`In(1)`
        ``ALU_CYCLES`` after the operands: its result enters the second operation, not that of the
        first one.
    operand1, number1, reverse1, op1, load1
        The same cycle, for the second operation. ``load1``: the second source's element is the
        partition's scalar.
    negate, dst_dtype, saturate
        Another ``ALU_CYCLES`` later.
    raw_bits : :py:`In(1)`
        Cycle ``LANE_CYCLES - 1``: store bits, not the cast value.
    raw, skip : :py:`Out(32)`, :py:`Out(1)`
        Cycle ``LANE_CYCLES``: the element in the low bits; whether it is left out.
    """

    def __init__(self):
        super().__init__(
            {
                "sbuf": In(32).array(4),
                "psum": In(32).array(4),
                "sbuf1": In(32).array(4),
                **{name: In(width) for name, (width, _) in CONTROLS.items()},
                "raw": Out(32),
                "skip": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()

        def choose(name, sbuf, from_psum, shift):
            far = [Mux(from_psum, p, s) for p, s in zip(self.psum, sbuf, strict=True)]
            pairs = [Mux(shift[0], far[1], far[0]), Mux(shift[0], far[3], far[2])]
            element = Signal(32, name=name, reset_less=True)
            return element, Mux(shift[1], pairs[1], pairs[0])

        first, chosen0 = choose("first", self.sbuf, self.from_psum, self.shift0)
        second, chosen1 = choose("second", self.sbuf1, self.from_psum1, self.shift1)
        m.d.sync += [first.eq(Mux(self.constant, self.value, chosen0)), second.eq(chosen1)]

        # Binary32, or the bits as they are.
        inputs = []
        for i, (element, dtype, size) in enumerate(
            ((first, self.dtype0, self.size0), (second, self.dtype1, self.size1))
        ):
            m.submodules[f"cast_in{i}"] = cast_in = CastIn()
            m.d.comb += [cast_in.raw.eq(element), cast_in.dtype.eq(dtype)]
            plain = Delay(m, element, f"plain{i}", since=1)[_FIRST]
            own = Cat(C(0xFF, 8), (size != 0).replicate(8), size[1].replicate(16))
            value = Signal(32, name=f"operand{i}_value")
            m.d.comb += value.eq(Mux(self.bits, plain & own, cast_in.value))
            inputs.append((value, plain, plain & own))
        (x, plain0, _), (y, plain1, predicate) = inputs

        # Whether the element counts.
        left_out = Delay(
            m, self.predicated & (predicate.any() == self.unless), "left_out", since=_FIRST
        )
        m.d.comb += self.skip.eq(left_out[LANE_CYCLES])

        # The first operation. Reductions combine the element with the result of the last but one,
        # which is two cycles old at least.
        m.submodules.alu0 = alu0 = Alu()
        scalar0, scalar1 = Signal(32, reset_less=True), Signal(32, reset_less=True)
        scanned = Signal(32, name="scanned_result", reset_less=True)
        result1 = Signal(32)
        other0 = Signal(32)
        with m.Switch(self.operand0):
            for code, value in (
                (Operand.NUMBER, self.number0),
                (Operand.SCALAR, scalar0),
                (Operand.ELEMENT, y),
                (Operand.RESULT, Mux(self.fresh, result1, scanned)),
            ):
                with m.Case(code):
                    m.d.comb += other0.eq(value)
        with m.If(self.load0):
            m.d.sync += scalar0.eq(plain0)
        last, last_but_one = Signal(32, reset_less=True), Signal(32, reset_less=True)
        with m.If(self.keep):
            m.d.sync += [last.eq(alu0.result), last_but_one.eq(last)]
        m.d.comb += [
            alu0.op.eq(self.op0),
            alu0.a.eq(Mux(self.reverse0, other0, x)),
            alu0.b.eq(Mux(self.reverse0, x, other0)),
            alu0.take_late.eq(self.reduces),
        ]
        with m.Switch(self.partial):
            for code, value in (
                (Partial.IDENTITY, self.identity),
                (Partial.NOW, alu0.result),
                (Partial.LAST, last),
                (Partial.LAST_BUT_ONE, last_but_one),
            ):
                with m.Case(code):
                    m.d.comb += alu0.late.eq(value)

        # The eight numbers that are looked for, or the greatest ones.
        m.submodules.eight = Replicated(eight := Eight(), "eight")
        m.d.comb += [
            eight.x.eq(x),
            eight.value.eq(y),
            eight.number.eq(self.number0),
            *(
                getattr(eight, name).eq(getattr(self, f"eight_{name}"))
                for name in ("load", "insert", "clear", "match", "flush", "indices", "index")
            ),
        ]
        of_eight = Delay(m, eight.o, "of_eight", since=_FIRST + 1)[_SECOND]
        result0 = Signal(32)
        m.d.comb += result0.eq(Mux(self.eight_result, of_eight, alu0.result))

        # The second operation.
        m.submodules.alu1 = alu1 = Alu()
        element1 = Delay(m, y, "element1", since=_FIRST)[_SECOND]
        plain1 = Delay(m, plain1, "scalar1_in", since=_FIRST)[_SECOND]
        with m.If(self.load1):
            m.d.sync += scalar1.eq(plain1)
        other1 = Signal(32)
        with m.Switch(self.operand1):
            for code, value in (
                (Operand.NUMBER, self.number1),
                (Operand.SCALAR, scalar1),
                (Operand.ELEMENT, element1),
                (Operand.RESULT, last),
            ):
                with m.Case(code):
                    m.d.comb += other1.eq(value)
        m.d.comb += [
            alu1.op.eq(self.op1),
            alu1.a.eq(Mux(self.reverse1, other1, result0)),
            alu1.b.eq(Mux(self.reverse1, result0, other1)),
        ]

        m.d.comb += result1.eq(alu1.result)
        with m.If(self.scanned):
            m.d.sync += scanned.eq(result1)

        m.submodules.cast_out = cast_out = CastOut()
        result = Signal(32)
        m.d.comb += [
            result.eq(alu1.result ^ Cat(C(0, 31), self.negate)),
            cast_out.value.eq(result),
            cast_out.dtype.eq(self.dst_dtype),
            cast_out.saturate.eq(self.saturate),
        ]
        stored = Delay(m, result, "stored", since=_CAST_OUT)[LANE_CYCLES - 1]
        m.d.sync += self.raw.eq(Mux(self.raw_bits, stored, cast_out.raw))
        return m


_OP = len(C(max(AluOp)))

CONTROLS = {
    "from_psum": (1, 0), "constant": (1, 0), "shift0": (2, 0), "value": (32, 0),
    "from_psum1": (1, 0), "shift1": (2, 0),
    "dtype0": (4, 1), "dtype1": (4, 1),
    "bits": (1, _FIRST), "size0": (2, _FIRST), "size1": (2, _FIRST),
    "fresh": (1, _FIRST), "predicated": (1, _FIRST), "unless": (1, _FIRST),
    "operand0": (2, _FIRST), "number0": (32, _FIRST), "reverse0": (1, _FIRST),
    "op0": (_OP, _FIRST), "load0": (1, _FIRST),
    "reduces": (1, _LATE), "partial": (2, _LATE), "identity": (32, _LATE),
    **{f"eight_{name}": (1, _FIRST) for name in ("load", "insert", "clear", "match", "flush")},
    "eight_indices": (1, _FIRST), "eight_index": (INDEX_BITS, _FIRST),
    "eight_result": (1, _SECOND),
    "keep": (1, _SECOND),
    "operand1": (2, _SECOND), "number1": (32, _SECOND), "reverse1": (1, _SECOND),
    "op1": (_OP, _SECOND), "load1": (1, _SECOND),
    "scanned": (1, _CAST_OUT),
    "negate": (1, _CAST_OUT), "dst_dtype": (4, _CAST_OUT), "saturate": (1, _CAST_OUT),
    "raw_bits": (1, LANE_CYCLES - 1),
}  # fmt: skip
"""Inputs that all lanes share: width in bits, and the cycle in which an element needs them."""

STEER = data.StructLayout(
    {
        name: width
        for name, (width, _) in CONTROLS.items()
        if name
        not in (
            "from_psum", "from_psum1", "load0", "load1", "partial", "identity", "keep", "raw_bits",
            "fresh", "scanned", "eight_load", "eight_clear", "eight_flush", "eight_index",
            "eight_result",
        )
    }
)  # fmt: skip
"""Those that stay the same while an instruction runs."""


class VectorEngine(wiring.Component):
    """The vector engine (DVE): copies, fills, arithmetic and reductions of :mod:`~..arch.isa`.

    Instructions run in order, one at a time in the sequencer, one element per partition and cycle.
    The reads of an instruction overlap the writes of the one before. Writes are in order.

    **Hazards.** An instruction may read what an earlier one of this engine writes only if it waits
    for that one's update: nothing else holds its reads back. Its writes need no wait. ``dst`` may
    be the same elements as a source, in the same order; any other overlap of the two, or of ``dst``
    and a scalar, gives unspecified elements.

    **PSUM.** An instruction with a source in PSUM holds all banks from its lowest to its highest
    element (``psum_busy``) from before its first read until its last, and starts only when no
    other engine holds one of them.

    **DMA.** While ``starving``, the stream has a one-cycle gap every
    :data:`~.sequencer.GAP_CYCLES` cycles, which leaves the write ports free
    :data:`VECTOR_CYCLES` cycles later.

    **Scans.** An element of a scan needs the result of the one before, which takes both operations:
    :data:`SCAN_CYCLES` cycles.

    **Eight numbers.** :class:`~..arch.isa.FindIndex8` and :class:`~..arch.isa.MatchReplace8` first
    read the numbers that they look for, :class:`~..arch.isa.Max8` and ``FindIndex8`` write their
    eight results after the last element: eight cycles each.

    **Sums.** Two partial results of a row alternate in the first operation, whose result returns to
    it after two cycles; the second operation joins them.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
    sbuf_read : :py:`Out(SbufVectorReadPort).array(2)`
        For the first and the second source; scalars are read on both.
    sbuf_write : :py:`Out(SbufVectorWritePort)`
    psum_read : :py:`Out(PsumReadPort)`
    psum_busy_others : :py:`In(psum_banks)`
    psum_claim : :py:`Out(psum_banks)`
        Banks that will be held from the next cycle on.
    psum_busy : :py:`Out(psum_banks)`
        Registered.
    starving : :py:`In(2)`
    occupied : :py:`In(2)`
        Banks of SBUF to which what is read in this cycle must not be written.
    hold : :py:`In(1)`
        No instruction may begin: another engine uses the ports on SBUF.
    wants, start, running : :py:`Out(1)`
        An instruction could begin but for ``hold`` and the one before; one begins; elements are
        still to be read.
    update : :py:`Out(stream.Signature(Update))`
        Not offered for an instruction without one.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("dve"))`
        Registered.

    Timing
    ------
    Issue interval of ``N`` elements: ``N`` cycles, one more with scalars in SBUF, and what scans
    and eight numbers take; at least 2 (source in PSUM: 4). Two sources in the same bank of SBUF
    take turns where both want a new word. An element is written :data:`VECTOR_CYCLES` = 17 cycles
    after it was read; the update is offered in the cycle after the last write. An idle engine reads
    its first element 2 cycles after it took the instruction (source in PSUM: 4), so the update is
    offered ``N + 19`` (``N + 21``) cycles after that. With ``N`` = 2, from SBUF::

        cycle               0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21
        instructions.valid  1  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
        sbuf_read.valid     0  0  1  1  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
        sbuf_write.valid    0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  1  1  0
        update.valid        0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0  1
    """

    instructions: stream.Interface
    update: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": In(stream.Signature(Issue)),
                "sbuf_read": Out(SbufVectorReadPort(config)).array(2),
                "sbuf_write": Out(SbufVectorWritePort(config)),
                "psum_read": Out(PsumReadPort(config)),
                "psum_busy_others": In(config.psum_banks),
                "psum_claim": Out(config.psum_banks),
                "psum_busy": Out(config.psum_banks),
                "starving": In(2),
                "occupied": In(2),
                "hold": In(1),
                "wants": Out(1),
                "start": Out(1),
                "running": Out(1),
                "update": Out(stream.Signature(Update)),
                "busy": Out(1),
                "events": Out(events_layout("dve")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = seq = Sequencer(
            config=config,
            engine=Engine.DVE,
            lane_cycles=LANE_CYCLES,
            read_ports=len(self.sbuf_read),
            intervals={TensorTensorScan: SCAN_CYCLES},
            phases=EIGHTS,
        )
        connect(m, flipped(self.instructions), seq.instructions)
        connect(m, seq.update, flipped(self.update))
        write, psum = self.sbuf_write, self.psum_read
        m.d.comb += [
            seq.starving.eq(self.starving),
            seq.occupied.eq(self.occupied),
            seq.hold.eq(self.hold),
            self.wants.eq(seq.wants),
            self.start.eq(seq.start),
            self.running.eq(seq.running),
            seq.psum_busy_others.eq(self.psum_busy_others),
            self.psum_claim.eq(seq.psum_claim),
            self.psum_busy.eq(seq.psum_busy),
            self.busy.eq(seq.busy),
            self.events.eq(seq.events),
            psum.valid.eq(seq.psum_valid),
            psum.bank.eq(seq.psum_bank),
            psum.word.eq(seq.psum_word),
            write.valid.eq(seq.write_valid),
            write.commit.eq(seq.write_commit),
            write.word.eq(seq.write_word),
            write.offset.eq(seq.write_offset),
            write.size_log2.eq(seq.write_size_log2),
            write.mask.eq(seq.write_mask),
        ]
        for i, read in enumerate(self.sbuf_read):
            m.d.comb += [
                read.valid.eq(seq.read_valid[i]),
                seq.read_ready[i].eq(read.ready),
                read.new.eq(seq.read_new[i]),
                read.word.eq(seq.read_word[i]),
                read.offset.eq(seq.read_offset[i]),
            ]

        controls = self._controls(m, seq)
        for p in range(config.partitions):
            lane = VectorLane()
            m.submodules[f"lane{p}"] = Replicated(lane, "vector_lane")
            for k in range(4):
                source = (p - k * config.quadrant) % config.partitions
                m.d.comb += [
                    lane.sbuf[k].eq(self.sbuf_read[0].data[source]),
                    lane.sbuf1[k].eq(self.sbuf_read[1].data[source]),
                    lane.psum[k].eq(psum.data[source]),
                ]
            m.d.comb += [getattr(lane, name).eq(value) for name, value in controls.items()]
            m.d.comb += [write.data[p].eq(lane.raw), write.skip[p].eq(lane.skip)]
        return m

    def _controls(self, m, seq):
        """The lanes' :data:`CONTROLS`, each in the cycle in which the element needs it."""
        copy, fill = seq.view(TensorCopy), seq.view(Memset)
        pair, chain = seq.view(TensorTensor), seq.view(TensorScalar)
        mixed, reduce = seq.view(ScalarTensorTensor), seq.view(TensorReduce)
        scan, choice = seq.view(TensorTensorScan), seq.view(CopyPredicated)
        find, replace = seq.view(FindIndex8), seq.view(MatchReplace8)
        quadrant_log2 = exact_log2(self.config.quadrant)

        def quadrant(ap):
            return ap.start_partition[quadrant_log2 : quadrant_log2 + 2]

        def is_bitwise(*ops):
            return Cat(op == code for op in ops for code in BITWISE_OPS).any()

        # What is the same for all elements of an instruction.
        steer = Signal(STEER, reset_less=True)
        scanning, eights, plain = Signal(), Signal(), Signal()
        op0, op1 = Signal(_OP, name="pending_op0"), Signal(_OP, name="pending_op1")
        with m.If(seq.start):
            m.d.sync += [
                steer.constant.eq(0),
                steer.value.eq(fill.value),
                steer.shift0.eq(quadrant(copy.dst) - quadrant(copy.src)),
                steer.shift1.eq(quadrant(copy.dst) - quadrant(copy.src)),
                steer.dtype0.eq(copy.src.dtype),
                steer.dtype1.eq(pair.src1.dtype),
                steer.size0.eq(size_log2(m, copy.src.dtype, "size0")),
                steer.size1.eq(size_log2(m, pair.src1.dtype, "size1")),
                steer.dst_dtype.eq(copy.dst.dtype),
                steer.bits.eq(is_bitwise(op0, op1)),
                steer.op0.eq(op0),
                steer.op1.eq(op1),
                *(
                    steer[name].eq(0)
                    for name in (
                        "reverse0",
                        "reverse1",
                        "reduces",
                        "negate",
                        "predicated",
                        "eight_insert",
                        "eight_match",
                        "eight_indices",
                    )
                ),
                eights.eq(seq.is_any(EIGHTS)),
                plain.eq(0),
                steer.unless.eq(choice.reverse),
                scanning.eq(0),
                steer.operand0.eq(Operand.NUMBER),
                steer.operand1.eq(Operand.NUMBER),
            ]
            with m.Switch(copy.opcode):
                with m.Case(TensorCopy.opcode):
                    m.d.sync += [
                        steer.bits.eq(copy.src.dtype == copy.dst.dtype),
                        steer.saturate.eq(copy.saturate),
                    ]
                with m.Case(Memset.opcode):
                    m.d.sync += [steer.constant.eq(1), steer.bits.eq(1), steer.size0.eq(2)]
                with m.Case(TensorTensor.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(pair.dst) - quadrant(pair.src1)),
                        steer.operand0.eq(Operand.ELEMENT),
                        steer.saturate.eq(pair.saturate),
                    ]
                with m.Case(TensorScalar.opcode):
                    m.d.sync += [
                        steer.operand0.eq(Mux(chain.scalar0_pointer, Operand.SCALAR, 0)),
                        steer.operand1.eq(Mux(chain.scalar1_pointer, Operand.SCALAR, 0)),
                        *(
                            steer[f"{name}{i}"].eq(chain[f"{field}{i}"])
                            for i in range(2)
                            for name, field in (("number", "scalar"), ("reverse", "reverse"))
                        ),
                        steer.saturate.eq(chain.saturate),
                    ]
                with m.Case(ScalarTensorTensor.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(mixed.dst) - quadrant(mixed.src1)),
                        steer.operand0.eq(Mux(mixed.scalar0_pointer, Operand.SCALAR, 0)),
                        steer.operand1.eq(Operand.ELEMENT),
                        steer.number0.eq(mixed.scalar0),
                        steer.reverse0.eq(mixed.reverse0),
                        steer.reverse1.eq(mixed.reverse1),
                        steer.saturate.eq(mixed.saturate),
                    ]
                with m.Case(TensorTensorScan.opcode):
                    m.d.sync += [
                        scanning.eq(1),
                        steer.shift1.eq(quadrant(scan.dst) - quadrant(scan.src1)),
                        steer.operand0.eq(Mux(scan.initial_pointer, Operand.SCALAR, 0)),
                        steer.operand1.eq(Operand.ELEMENT),
                        steer.number0.eq(scan.initial),
                        steer.reverse0.eq(scan.reverse0),
                        steer.reverse1.eq(scan.reverse1),
                        steer.saturate.eq(scan.saturate),
                    ]
                with m.Case(CopyPredicated.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(choice.dst) - quadrant(choice.predicate)),
                        steer.bits.eq(choice.src.dtype == choice.dst.dtype),
                        steer.predicated.eq(1),
                        steer.saturate.eq(choice.saturate),
                    ]
                with m.Case(Max8.opcode):
                    m.d.sync += [
                        steer.eight_insert.eq(1),
                        steer.saturate.eq(seq.view(Max8).saturate),
                    ]
                with m.Case(FindIndex8.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(find.dst) - quadrant(find.vals)),
                        steer.eight_match.eq(1),
                        steer.eight_indices.eq(1),
                        plain.eq(1),
                    ]
                with m.Case(MatchReplace8.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(replace.dst) - quadrant(replace.vals)),
                        steer.number0.eq(replace.value),
                        steer.eight_match.eq(1),
                        steer.saturate.eq(replace.saturate),
                    ]
                with m.Case(TensorReduce.opcode):
                    m.d.sync += [
                        steer.operand1.eq(Operand.RESULT),
                        steer.reduces.eq(1),
                        steer.negate.eq(reduce.negate),
                        steer.saturate.eq(reduce.saturate),
                    ]
        with m.Switch(copy.opcode):
            with m.Case(TensorTensor.opcode):
                m.d.comb += op0.eq(pair.op)
            with m.Case(TensorScalar.opcode):
                m.d.comb += [op0.eq(chain.op0), op1.eq(chain.op1)]
            with m.Case(ScalarTensorTensor.opcode):
                m.d.comb += [op0.eq(mixed.op0), op1.eq(mixed.op1)]
            with m.Case(TensorTensorScan.opcode):
                m.d.comb += [op0.eq(scan.op0), op1.eq(scan.op1)]
            with m.Case(TensorReduce.opcode):
                m.d.comb += [op0.eq(reduce.op), op1.eq(reduce.op)]

        # What follows an element, in cycles after its read.
        element = seq.element
        lines = {name: Delay(m, steer[name], name) for name in STEER.members}

        def late(name, cycle, value=None):
            if value is not None:
                lines[name] = Delay(m, value, name)
            return lines[name][SBUF_READ_CYCLES + cycle]

        controls = {
            name: late(name, CONTROLS[name][1]) for name in STEER.members if name in CONTROLS
        }
        valid = Delay(m, element.valid, "valid", clean=True)
        now = SBUF_READ_CYCLES + _LATE
        one_ahead, two_ahead = valid[now + 1], valid[now + 2]  # elements, by so many cycles
        early = late("early", _LATE, element.early)
        partial, identity = Signal(Partial), Signal(32)
        with m.If(early):
            m.d.comb += partial.eq(Partial.IDENTITY)
        with m.Elif(one_ahead):
            m.d.comb += partial.eq(Mux(two_ahead, Partial.NOW, Partial.LAST))
        with m.Else():
            m.d.comb += partial.eq(Mux(two_ahead, Partial.LAST, Partial.LAST_BUT_ONE))
        with m.Switch(late("op0", _LATE)):
            for op in ReduceOp:
                with m.Case(op):
                    m.d.comb += identity.eq(op.identity)
        only = late("only", _SECOND, element.only)
        index = Signal(INDEX_BITS, reset_less=True)
        with m.If(element.valid):
            m.d.sync += index.eq(Mux(element.load, 0, index + 1))
        streams = late("streams", _FIRST, element.valid & ~element.load & ~element.flush)
        follows = late("follows", _FIRST, scanning & ~element.first)
        return controls | {
            "from_psum": late("from_psum", 0, seq.psum_source[0] & ~element.scalars[0]),
            "from_psum1": late("from_psum1", 0, seq.psum_source[1] & ~element.scalars[1]),
            "load0": late("load0", _FIRST, element.scalars[0]),
            "load1": late("load1", _SECOND, element.scalars[1]),
            "partial": partial,
            "identity": identity,
            "operand0": Mux(follows, Operand.RESULT, late("operand0", _FIRST)),
            "fresh": valid[SBUF_READ_CYCLES + _FIRST + SCAN_CYCLES],
            "scanned": valid[SBUF_READ_CYCLES + _CAST_OUT],
            "keep": valid[SBUF_READ_CYCLES + _SECOND] & late("reduces", _SECOND),
            "op1": Mux(late("reduces", _SECOND) & only, AluOp.BYPASS, late("op1", _SECOND)),
            "raw_bits": late("bits", LANE_CYCLES - 1) | late("plain", LANE_CYCLES - 1, plain),
            "eight_load": late("eight_load", _FIRST, element.valid & element.load),
            "eight_insert": controls["eight_insert"] & streams,
            "eight_clear": late("eight_clear", _FIRST, element.first),
            "eight_match": controls["eight_match"] & streams,
            "eight_flush": late("eight_flush", _FIRST, element.valid & element.flush),
            "eight_index": late("eight_index", _FIRST, index),
            "eight_result": late("eight_result", _SECOND, eights),
        }
