"""GpSimd engine: integers, functions of the place and random numbers, one lane per partition.

A :class:`~.sequencer.Sequencer` walks the access patterns; a :class:`GpSimdLane` per partition
computes. The engine has no ports of its own on the state buffer: it stands between the vector
engine and that engine's ports, and the two take turns, instruction by instruction.
"""

from amaranth.hdl import C, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import exact_log2

from ..arch.events import events_layout
from ..arch.formats import FORMATS, FP32, INT32, UINT32
from ..arch.isa import (
    AffineSelect,
    AluOp,
    Compare,
    Engine,
    IntegerTensorScalar,
    IntegerTensorTensor,
    Iota,
    Rng,
)
from ..arch.mixing import LAST_SHIFT, ROUNDS, SEED_TURN
from ..arith.alu import ALU_CYCLES
from ..arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES, CastIn, CastOut
from ..arith.integer import INTEGER_ALU_CYCLES, IntegerAlu
from ..arith.mixing import FRACTION_CYCLES, MIX_CYCLES, Fraction, MixRound
from ..interfaces import (
    SBUF_READ_CYCLES,
    Issue,
    SbufVectorReadPort,
    SbufVectorWritePort,
    Update,
)
from ..lib.replicate import Replicated
from .sequencer import Delay, PatternWalker, Sequencer, size_log2
from .vector import LANE_CYCLES

__all__ = ["GpSimdEngine", "GpSimdLane"]

assert INTEGER_ALU_CYCLES == ALU_CYCLES, "writes of this and of the vector engine must not meet"

_FIRST = 1 + CAST_IN_CYCLES  # cycle in which the operands enter the first operation
_SECOND = _FIRST + ALU_CYCLES
_CAST_OUT = _SECOND + ALU_CYCLES
assert _CAST_OUT + CAST_OUT_CYCLES + 1 == LANE_CYCLES
assert MIX_CYCLES == CAST_IN_CYCLES
assert FRACTION_CYCLES == CAST_OUT_CYCLES
assert [name for name, *_ in Rng.operands + Rng.scalars[:6]] == [
    name for name, *_ in Iota.operands + Iota.scalars[:6]
], "the function of the place is read in one place for both"

_OP = len(C(max(AluOp)))

CONTROLS = {
    "multiplier": (32, -1), "first_partition": (8, -1),
    "affine": (32, 0), "iota": (1, 0), "shift0": (2, 0), "shift1": (2, 0),
    "dtype": (4, 1), "compare": (_OP, 1),
    "seed": (32, 1), "own_seed": (1, 1), "load_seed": (1, 1),
    "converts": (1, _FIRST), "size0": (2, _FIRST), "signed0": (1, _FIRST),
    "size1": (2, _FIRST), "signed1": (1, _FIRST), "pair": (1, _FIRST),
    "op0": (_OP, _FIRST), "reverse0": (1, _FIRST), "number0": (32, _FIRST),
    "own0": (1, _FIRST), "load0": (1, _FIRST), "is_signed": (1, _FIRST),
    "mixes": (1, _FIRST), "seed_late": (32, _FIRST), "own_seed_late": (1, _FIRST),
    "op1": (_OP, _SECOND), "reverse1": (1, _SECOND), "number1": (32, _SECOND),
    "own1": (1, _SECOND), "load1": (1, _SECOND), "is_signed_late": (1, _SECOND),
    "mixes_between": (1, _SECOND),
    "selects": (1, _CAST_OUT), "value": (32, _CAST_OUT), "mixes_last": (1, _CAST_OUT),
    "dst_dtype": (4, _CAST_OUT), "saturate": (1, _CAST_OUT),
    "raw_bits": (1, LANE_CYCLES - 1), "fraction": (1, LANE_CYCLES - 1),
}  # fmt: skip
"""Inputs that all lanes share: width in bits, and the cycle in which an element needs them."""

_DERIVED = (
    "affine", "load0", "load1", "load_seed", "is_signed_late", "mixes_between", "mixes_last",
    "seed_late", "own_seed_late",
)  # fmt: skip
"""Those that are not constant during an instruction, or are others at another time."""


class GpSimdLane(wiring.Component):
    """One partition of the GpSimd engine: an element in, an element out, every cycle.

    Members
    -------
    row : :py:`In(8)`
        Number of the partition; constant.
    sbuf, sbuf1 : :py:`In(32).array(4)`
        What partition ``p - k * quadrant`` read, for ``k`` = 0 .. 3, for either source.
    multiplier, first_partition
        Cycle -1: the increment per partition, and the partition in which it is none.
    affine, iota, shift0, shift1
        Cycle 0: the affine function in the first partition; whether it is the element.
    dtype, compare
        Cycle 1: format of the first source; comparison of the function with 0.
    seed, own_seed, load_seed
        Cycle 1: the seed of a random word, or ``own_seed``: the partition's. ``load_seed``: the
        first source is that seed; then the other two are 0.
    converts, size0, signed0, size1, signed1, pair, op0, reverse0, number0, own0, load0, is_signed
        Cycle ``1 + CAST_IN_CYCLES``, operands of the first operation: the first source as binary32
        (``converts``) or extended from so many bytes (log2), by its sign or by zeros; and the
        second source (``pair``), the partition's scalar (``own0``) or ``number0``. ``load0``: the
        first source is the partition's scalar.
    mixes, seed_late, own_seed_late
        With them: the first source is hashed. What the first round made of the seed enters,
        ``seed_late`` or the partition's scalar, which is that of a seed that is loaded. The
        operations are the other rounds.
    op1, reverse1, number1, own1, load1, is_signed_late
        ``INTEGER_ALU_CYCLES`` later, for the second operation. ``load1``: the second source is the
        partition's scalar. ``mixes_between``: the hash goes on.
    selects, value, dst_dtype, saturate, mixes_last
        Another ``INTEGER_ALU_CYCLES`` later: ``value`` where the comparison was false; the last
        step of the hash.
    raw_bits, fraction
        Cycle ``LANE_CYCLES - 1``: store bits, not the cast value, of what is not replaced, or the
        number from 0 to 1 that they make.
    raw : :py:`Out(32)`
        Cycle ``LANE_CYCLES``: the element in the low bits.
    """

    def __init__(self):
        super().__init__(
            {
                "row": In(8),
                "sbuf": In(32).array(4),
                "sbuf1": In(32).array(4),
                **{name: In(width) for name, (width, _) in CONTROLS.items()},
                "raw": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()

        def choose(sources, shift):
            pairs = [Mux(shift[0], sources[1], sources[0]), Mux(shift[0], sources[3], sources[2])]
            return Mux(shift[1], pairs[1], pairs[0])

        # The affine function, and whether it compares true.
        share = Signal(32, reset_less=True)
        place = Signal(32)
        here = Signal(signed(32), reset_less=True)
        m.d.sync += [
            share.eq(self.multiplier * (self.row - self.first_partition)[:8]),
            here.eq(place),
        ]
        m.d.comb += place.eq(self.affine + share)
        holds = Signal(reset_less=True)
        with m.Switch(self.compare):
            for op, truth in (
                (Compare.EQUAL, here == 0),
                (Compare.NOT_EQUAL, here != 0),
                (Compare.GREATER_EQUAL, here >= 0),
                (Compare.GREATER, here > 0),
                (Compare.LESS_EQUAL, here <= 0),
                (Compare.LESS, here < 0),
            ):
                with m.Case(op):
                    m.d.sync += holds.eq(truth)

        first, second = Signal(32, reset_less=True), Signal(32, reset_less=True)
        m.d.sync += [
            first.eq(Mux(self.iota, place, choose(self.sbuf, self.shift0))),
            second.eq(choose(self.sbuf1, self.shift1)),
        ]
        m.submodules.cast_in = cast_in = CastIn()
        m.d.comb += [cast_in.raw.eq(first), cast_in.dtype.eq(self.dtype)]
        plain0 = Delay(m, first, "first", since=1)[_FIRST]
        plain1 = Delay(m, second, "second", since=1)[_FIRST]

        def extended(value, size, is_signed):
            byte, half = value[:8], value[:16]
            signs = Cat(is_signed & byte[-1], is_signed & half[-1])
            return Mux(
                size[1],
                value,
                Mux(size[0], Cat(half, signs[1].replicate(16)), Cat(byte, signs[0].replicate(24))),
            )

        def operation(name, op, is_signed, value, other, reverse):
            alu = IntegerAlu()
            m.submodules[name] = alu
            m.d.comb += [
                alu.op.eq(op),
                alu.is_signed.eq(is_signed),
                alu.a.eq(Mux(reverse, other, value)),
                alu.b.eq(Mux(reverse, value, other)),
            ]
            return alu.result

        scalar0, scalar1 = Signal(32, reset_less=True), Signal(32, reset_less=True)
        own_seed = Signal(32, reset_less=True)
        with m.If(self.load_seed):
            m.d.sync += own_seed.eq(first)
        m.submodules.mix_round = mix_round = MixRound()
        m.d.comb += [
            mix_round.value.eq(first),
            mix_round.seed.eq(Mux(self.own_seed, own_seed, self.seed).rotate_left(SEED_TURN)),
        ]

        def shifted(value, shift, mixes):
            return value ^ Mux(mixes, value[shift:], 0)

        hashed = mix_round.result ^ Mux(self.own_seed_late, scalar0, self.seed_late)
        x = Mux(
            self.mixes,
            hashed ^ hashed[ROUNDS[1][0] :],
            Mux(self.converts, cast_in.value, extended(plain0, self.size0, self.signed0)),
        )
        y = extended(plain1, self.size1, self.signed1)
        other0 = Mux(self.pair, y, Mux(self.own0, scalar0, self.number0))
        with m.If(self.load0):
            m.d.sync += scalar0.eq(Mux(self.mixes, mix_round.result, plain0))
        late1 = Delay(m, plain1, "scalar1_in", since=_FIRST)[_SECOND]
        with m.If(self.load1):
            m.d.sync += scalar1.eq(late1)
        other1 = Mux(self.own1, scalar1, self.number1)
        between = operation("alu0", self.op0, self.is_signed, x, other0, self.reverse0)
        between = shifted(between, ROUNDS[2][0], self.mixes_between)
        result = operation("alu1", self.op1, self.is_signed_late, between, other1, self.reverse1)
        result = shifted(result, LAST_SHIFT, self.mixes_last)

        keeps = Delay(m, holds, "holds", since=2)[_CAST_OUT] | ~self.selects
        m.submodules.cast_out = cast_out = CastOut()
        m.d.comb += [
            cast_out.value.eq(Mux(keeps, result, self.value)),
            cast_out.dtype.eq(self.dst_dtype),
            cast_out.saturate.eq(self.saturate),
        ]
        stored = Delay(m, result, "stored", since=_CAST_OUT)[LANE_CYCLES - 1]
        kept = Delay(m, keeps, "kept", since=_CAST_OUT)[LANE_CYCLES - 1]
        m.submodules.to_fraction = to_fraction = Fraction()
        m.d.comb += to_fraction.word.eq(result)
        number = Mux(self.raw_bits & kept, stored, cast_out.raw)
        m.d.sync += self.raw.eq(Mux(self.fraction, to_fraction.number, number))
        return m


_FUNCTION = data.StructLayout(
    {
        "offset": 32,
        **{f"step{i}": signed(32) for i in range(4)},
        **{f"count{i}": 16 for i in range(4)},
    }
)
"""The affine function as a pattern: its values are the addresses."""


class GpSimdEngine(wiring.Component):
    """The GpSimd engine (POOL): :class:`~..arch.isa.Iota` and the others of its queue.

    Instructions run in order, one element per partition and cycle; the reads of one overlap the
    writes of the one before. Hazards and DMA are as with the :class:`~.vector.VectorEngine`.

    **Ports.** This and the vector engine share that engine's ports. Where both have an instruction
    that can begin they take turns, one instruction each, and an element of the other engine is read
    in the second cycle after the last one; where one has none the other goes on without a pause.
    Elements take the same time from read to write in both, so that their writes do not meet. An
    instruction that waits for PSUM, or for its engine's updates to be taken, holds nobody up.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
    vector_read : :py:`In(SbufVectorReadPort).array(2)`
    vector_write : :py:`In(SbufVectorWritePort)`
        What the vector engine wants of the state buffer.
    vector_wants, vector_start, vector_running : :py:`In(1)`
        Its state.
    vector_hold : :py:`Out(1)`
        It may not begin an instruction.
    sbuf_read : :py:`Out(SbufVectorReadPort).array(2)`
    sbuf_write : :py:`Out(SbufVectorWritePort)`
    starving, occupied : :py:`In(2)`
        As for the vector engine.
    update : :py:`Out(stream.Signature(Update))`
        Not offered for an instruction without one.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("pool"))`
        Registered.

    Timing
    ------
    As the vector engine: issue interval of ``N`` elements ``N`` cycles, one more with scalars in
    SBUF, at least 2; an element is written 17 cycles after it was read.
    """

    instructions: stream.Interface
    update: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": In(stream.Signature(Issue)),
                "vector_read": In(SbufVectorReadPort(config)).array(2),
                "vector_write": In(SbufVectorWritePort(config)),
                "vector_wants": In(1),
                "vector_start": In(1),
                "vector_running": In(1),
                "vector_hold": Out(1),
                "sbuf_read": Out(SbufVectorReadPort(config)).array(2),
                "sbuf_write": Out(SbufVectorWritePort(config)),
                "starving": In(2),
                "occupied": In(2),
                "update": Out(stream.Signature(Update)),
                "busy": Out(1),
                "events": Out(events_layout("pool")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = seq = Sequencer(
            config=config, engine=Engine.POOL, lane_cycles=LANE_CYCLES, read_ports=2
        )
        connect(m, flipped(self.instructions), seq.instructions)
        connect(m, seq.update, flipped(self.update))
        m.d.comb += [
            seq.starving.eq(self.starving),
            seq.occupied.eq(self.occupied),
            self.busy.eq(seq.busy),
            self.events.eq(seq.events),
        ]
        self._share(m, seq)

        controls = self._controls(m, seq)
        for p in range(config.partitions):
            lane = GpSimdLane()
            m.submodules[f"lane{p}"] = Replicated(lane, "gpsimd_lane")
            for k in range(4):
                source = (p - k * config.quadrant) % config.partitions
                m.d.comb += [
                    lane.sbuf[k].eq(self.sbuf_read[0].data[source]),
                    lane.sbuf1[k].eq(self.sbuf_read[1].data[source]),
                ]
            m.d.comb += [getattr(lane, name).eq(value) for name, value in controls.items()]
            m.d.comb += [
                lane.row.eq(p),
                self.sbuf_write.data[p].eq(
                    Mux(seq.write_valid, lane.raw, self.vector_write.data[p])
                ),
                self.sbuf_write.skip[p].eq(self.vector_write.skip[p] & ~seq.write_valid),
            ]
        return m

    def _share(self, m, seq):
        """Whose commands reach the state buffer, and who may begin."""
        vector_last = Signal()  # whose instruction began last
        with m.If(self.vector_start):
            m.d.sync += vector_last.eq(1)
        with m.Elif(seq.start):
            m.d.sync += vector_last.eq(0)
        # While this engine runs it was the last to begin; of two that want, the other one is next.
        m.d.comb += [
            self.vector_hold.eq(seq.running | (seq.wants & vector_last)),
            seq.hold.eq(
                self.vector_running | self.vector_start | (seq.running & self.vector_wants)
            ),
        ]
        for i, (port, theirs) in enumerate(zip(self.sbuf_read, self.vector_read, strict=True)):
            for name in ("valid", "new", "word", "offset"):
                ours = getattr(seq, f"read_{name}")[i]
                m.d.comb += getattr(port, name).eq(Mux(seq.running, ours, getattr(theirs, name)))
            m.d.comb += [seq.read_ready[i].eq(port.ready), theirs.ready.eq(port.ready)]
            m.d.comb += [there.eq(here) for there, here in zip(theirs.data, port.data, strict=True)]
        write, theirs = self.sbuf_write, self.vector_write
        m.d.comb += write.valid.eq(seq.write_valid | theirs.valid)
        for name in ("commit", "word", "offset", "size_log2", "mask"):
            ours = getattr(seq, f"write_{name}")
            m.d.comb += getattr(write, name).eq(Mux(seq.write_valid, ours, getattr(theirs, name)))

    def _controls(self, m, seq):
        """The lanes' :data:`CONTROLS`, each in the cycle in which the element needs it."""
        config = self.config
        iota, select = seq.view(Iota), seq.view(AffineSelect)
        pair, chain = seq.view(IntegerTensorTensor), seq.view(IntegerTensorScalar)
        random = seq.view(Rng)
        quadrant_log2 = exact_log2(config.quadrant)
        signed_codes = [fmt.code for fmt in FORMATS if not fmt.is_float and fmt.signed]

        def quadrant(ap):
            return ap.start_partition[quadrant_log2 : quadrant_log2 + 2]

        def is_signed(dtype):
            return Cat(dtype == code for code in signed_codes).any()

        # The affine function runs along with the destination.
        m.submodules.function = walker = PatternWalker(addr_bits=32, layout=_FUNCTION)
        selects = select.opcode == AffineSelect.opcode  # the others have it where iota has
        places = Mux(selects, Cat(
            select.offset, select.step0, select.step1, select.step2, select.step3,
        ), Cat(iota.offset, iota.step0, iota.step1, iota.step2, iota.step3))  # fmt: skip
        counts = Cat(iota.dst[f"count{i}"] for i in range(4))
        m.d.comb += [
            walker.pattern.as_value().eq(Cat(places, counts)),
            walker.load.eq(seq.start),
            walker.advance.eq(seq.element.valid),
        ]

        names = {name: width for name, (width, _) in CONTROLS.items() if name not in _DERIVED}
        steer = Signal(data.StructLayout(names), reset_less=True)
        with m.If(seq.start):
            m.d.sync += [
                steer.multiplier.eq(
                    Mux(selects, select.channel_multiplier, iota.channel_multiplier)
                ),
                steer.first_partition.eq(iota.dst.start_partition),
                steer.iota.eq(0),
                steer.shift0.eq(quadrant(pair.dst) - quadrant(pair.src0)),
                steer.shift1.eq(quadrant(pair.dst) - quadrant(pair.src0)),
                steer.dtype.eq(pair.src0.dtype),
                steer.compare.eq(select.compare),
                steer.converts.eq(0),
                steer.size0.eq(size_log2(m, pair.src0.dtype, "size0")),
                steer.size1.eq(size_log2(m, pair.src1.dtype, "size1")),
                steer.signed0.eq(is_signed(pair.src0.dtype)),
                steer.signed1.eq(is_signed(pair.src1.dtype)),
                steer.is_signed.eq(is_signed(pair.src0.dtype)),
                steer.pair.eq(0),
                *(steer[f"{name}{i}"].eq(0) for name in ("op", "reverse", "own") for i in range(2)),
                steer.number0.eq(chain.scalar0),
                steer.number1.eq(chain.scalar1),
                steer.selects.eq(0),
                steer.value.eq(select.value),
                steer.dst_dtype.eq(iota.dst.dtype),
                steer.saturate.eq(0),
                steer.raw_bits.eq(1),
                steer.seed.eq(Mux(random.seed_pointer, 0, random.seed)),
                steer.own_seed.eq(random.seed_pointer),
                steer.mixes.eq(0),
                steer.fraction.eq(0),
            ]
            with m.Switch(iota.opcode):
                with m.Case(Iota.opcode):
                    bits = Cat(iota.dst.dtype == fmt.code for fmt in (INT32, UINT32)).any()
                    m.d.sync += [
                        steer.iota.eq(1),
                        steer.dtype.eq(INT32.code),
                        steer.converts.eq(~bits),
                        steer.size0.eq(2),
                        steer.saturate.eq(iota.saturate),
                        steer.raw_bits.eq(bits),
                    ]
                with m.Case(Rng.opcode):
                    m.d.sync += [
                        steer.iota.eq(1),
                        steer.shift0.eq(0),  # the seed lies in the partitions of dst
                        steer.mixes.eq(1),
                        steer.op0.eq(AluOp.MULTIPLY), steer.op1.eq(AluOp.MULTIPLY),
                        steer.number0.eq(ROUNDS[1][1]), steer.number1.eq(ROUNDS[2][1]),
                        steer.fraction.eq(random.dst.dtype == FP32.code),
                    ]  # fmt: skip
                with m.Case(AffineSelect.opcode):
                    same = select.src.dtype == select.dst.dtype
                    m.d.sync += [
                        steer.converts.eq(~same),
                        steer.selects.eq(1),
                        steer.saturate.eq(select.saturate),
                        steer.raw_bits.eq(same),
                    ]
                with m.Case(IntegerTensorTensor.opcode):
                    m.d.sync += [
                        steer.shift1.eq(quadrant(pair.dst) - quadrant(pair.src1)),
                        steer.pair.eq(1),
                        steer.op0.eq(pair.op),
                    ]
                with m.Case(IntegerTensorScalar.opcode):
                    m.d.sync += [
                        steer.op0.eq(chain.op0), steer.op1.eq(chain.op1),
                        steer.reverse0.eq(chain.reverse0), steer.reverse1.eq(chain.reverse1),
                        steer.own0.eq(chain.scalar0_pointer), steer.own1.eq(chain.scalar1_pointer),
                    ]  # fmt: skip

        # Of a seed that is a number the first round is the same for all lanes.
        m.submodules.seed_round = seed_round = MixRound()
        m.d.comb += seed_round.value.eq(steer.seed)

        element = seq.element
        now = {name: steer[name] for name in names} | {
            "affine": walker.address,
            "iota": steer.iota & element.valid,
            "own_seed": steer.own_seed & element.valid,
            "load0": element.scalars[0],
            "load1": element.scalars[1],
            "load_seed": element.scalars[0],
            "is_signed_late": steer.is_signed,
            "mixes_between": steer.mixes,
            "mixes_last": steer.mixes,
            "own_seed_late": steer.own_seed,
        }
        late = {"seed_late": (seed_round.result, MIX_CYCLES)}
        late |= {name: (value, 0) for name, value in now.items()}
        return {
            name: Delay(m, value, name, since=since)[SBUF_READ_CYCLES + CONTROLS[name][1]]
            for name, (value, since) in late.items()
        }
