"""Vector engine: streams elements from SBUF or PSUM through one lane per partition into SBUF.

A :class:`Sequencer` walks the access patterns and commands both memories; a :class:`VectorLane` per
partition converts what comes back. Every lane does the same, so the lanes hold data only.
"""

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from amaranth.utils import exact_log2

from ..arch.events import events_layout
from ..arch.formats import FORMATS
from ..arch.isa import WORD_BITS, AccessPattern, Memset, Space, TensorCopy, UpdateMode
from ..arith.convert import CAST_IN_CYCLES, CAST_OUT_CYCLES, CastIn, CastOut
from ..interfaces import (
    SBUF_READ_CYCLES,
    Issue,
    PsumReadPort,
    SbufVectorReadPort,
    SbufVectorWritePort,
    Update,
    issue_port,
    update_port,
)
from ..lib.replicate import Replicated
from ..lib.stream import Queue

__all__ = [
    "GAP_CYCLES", "LANE_CYCLES", "VECTOR_CYCLES", "PatternWalker", "Sequencer", "VectorEngine",
    "VectorLane",
]  # fmt: skip

LANE_CYCLES = 1 + CAST_IN_CYCLES + CAST_OUT_CYCLES + 1
"""Latency of :class:`VectorLane`: choice of the source, casts, choice of the result."""

VECTOR_CYCLES = SBUF_READ_CYCLES + LANE_CYCLES
"""From the cycle in which an element is read to the cycle in which it is written."""

GAP_CYCLES = 16
"""While a DMA beat starves the stream of elements has a one-cycle gap as often as this."""

UPDATES_DEPTH = 8
"""Instructions whose update is still owed, at most."""

assert TensorCopy.operands[0][2] == Memset.operands[0][2], "dst is the first operand"


def _size_log2(m, dtype, name):
    """log2 of the element size of format ``dtype``."""
    size = Signal(2, name=name)
    with m.Switch(dtype):
        for size_bytes in (1, 2, 4):
            with m.Case(*(fmt.code for fmt in FORMATS if fmt.bytes == size_bytes)):
                m.d.comb += size.eq(exact_log2(size_bytes))
    return size


class PatternWalker(wiring.Component):
    """Addresses of the elements of an access pattern, in order, one per cycle.

    Keeps the address at which each dimension's current pass began: no multiplication is needed. All
    arithmetic is modulo ``2 ** addr_bits``, which is exact for elements inside the memory.

    Parameters
    ----------
    addr_bits : :class:`int`, bits

    Members
    -------
    pattern : :py:`In(AccessPattern.layout())`
        Counts must not be 0.
    size_log2 : :py:`In(2)`
        Of an element.
    load : :py:`In(1)`
        Begin ``pattern``: element 0 is presented in the next cycle.
    advance : :py:`In(1)`
        Present the next element in the next cycle.
    address : :py:`Out(addr_bits)`
        Byte address of the current element.
    moved : :py:`Out(1)`
        The current element is the first one or lies in another 16-byte word than the one before.
    last : :py:`Out(1)`
        The current element is the last one.
    """

    def __init__(self, *, addr_bits):
        self.addr_bits = addr_bits
        super().__init__(
            {
                "pattern": In(AccessPattern.layout()),
                "size_log2": In(2),
                "load": In(1),
                "advance": In(1),
                "address": Out(addr_bits),
                "moved": Out(1),
                "last": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        bits = self.addr_bits
        dims = range(4)
        count = [Signal(16, name=f"count{i}", reset_less=True) for i in dims]
        left = [Signal(16, name=f"left{i}", reset_less=True) for i in dims]  # this one included
        step = [Signal(bits, name=f"step{i}", reset_less=True) for i in dims]
        base = [Signal(bits, name=f"base{i}", reset_less=True) for i in dims]
        at_end = Signal(4)
        following = Signal(bits)
        m.d.comb += [
            at_end.eq(Cat(rest == 1 for rest in left)),
            self.last.eq(at_end.all()),
            self.address.eq(base[0]),
        ]

        with m.If(self.load):
            for i in dims:
                scaled = Signal(signed(20), name=f"scaled{i}")
                loaded = self.pattern[f"count{i}"]
                m.d.comb += scaled.eq(self.pattern[f"step{i}"] << self.size_log2)
                m.d.sync += [
                    count[i].eq(loaded),
                    left[i].eq(loaded),
                    step[i].eq(scaled),
                    base[i].eq(self.pattern.offset),
                ]
            m.d.sync += self.moved.eq(1)
        with m.Elif(self.advance):
            # The innermost dimension that goes on takes a step; those inside it begin again.
            for i in dims:
                first = at_end[:i].all() & ~at_end[i] if i else ~at_end[0]
                with m.If(first):
                    m.d.comb += following.eq(base[i] + step[i])
                    m.d.sync += left[i].eq(left[i] - 1)
                    m.d.sync += [left[j].eq(count[j]) for j in range(i)]
                    m.d.sync += [base[j].eq(following) for j in range(i + 1)]
            m.d.sync += self.moved.eq(following[4:] != self.address[4:])
        return m


class VectorLane(wiring.Component):
    """One partition of the vector engine: an element in, an element out, every cycle.

    Members
    -------
    sbuf, psum : :py:`In(32).array(4)`
        What partition ``p - k * quadrant`` read, for ``k`` = 0 .. 3.
    from_psum, constant, shift, value : :py:`In(1)`, :py:`In(1)`, :py:`In(2)`, :py:`In(32)`
        Cycle 0: take ``value``, or what came from a memory, shifted by whole quadrants.
    src_dtype : :py:`In(4)`
        Cycle 1.
    dst_dtype, saturate : :py:`In(4)`, :py:`In(1)`
        Cycle ``1 + CAST_IN_CYCLES``.
    copy : :py:`In(1)`
        Cycle ``LANE_CYCLES - 1``: the bits as they were read, instead of the cast value.
    raw : :py:`Out(32)`
        Cycle ``LANE_CYCLES``: the element in the low bits.

    Internals
    ---------
    Between the two casts everything is binary32: arithmetic stages go there, ``LANE_CYCLES`` grows
    by their latency, and the ``bits`` line with it. A second operand is a register that keeps a
    value after ``CastIn``; a reduction is a register after the arithmetic.
    """

    def __init__(self):
        super().__init__(
            {
                "sbuf": In(32).array(4),
                "psum": In(32).array(4),
                "from_psum": In(1),
                "constant": In(1),
                "shift": In(2),
                "value": In(32),
                "src_dtype": In(4),
                "dst_dtype": In(4),
                "saturate": In(1),
                "copy": In(1),
                "raw": Out(32),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.cast_in = cast_in = CastIn()
        m.submodules.cast_out = cast_out = CastOut()

        far = [
            Mux(self.from_psum, psum, sbuf) for psum, sbuf in zip(self.psum, self.sbuf, strict=True)
        ]
        pairs = [Mux(self.shift[0], far[1], far[0]), Mux(self.shift[0], far[3], far[2])]
        element = Signal(32, reset_less=True)
        m.d.sync += element.eq(
            Mux(self.constant, self.value, Mux(self.shift[1], pairs[1], pairs[0]))
        )

        m.d.comb += [
            cast_in.raw.eq(element),
            cast_in.dtype.eq(self.src_dtype),
            cast_out.value.eq(cast_in.value),
            cast_out.dtype.eq(self.dst_dtype),
            cast_out.saturate.eq(self.saturate),
        ]

        # The bits as they are, for copies within one format.
        bits = element
        for i in range(CAST_IN_CYCLES + CAST_OUT_CYCLES):
            past, bits = bits, Signal(32, name=f"bits{i}", reset_less=True)
            m.d.sync += bits.eq(past)
        m.d.sync += self.raw.eq(Mux(self.copy, bits, cast_out.raw))
        return m


class Sequencer(wiring.Component):
    """Executes the instructions: commands the memories, tells the lanes what to do and when.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions, update, starving, psum_busy_pe, psum_busy_dve, busy, events
        Of the :class:`VectorEngine`.
    read_valid, read_ready, read_new, read_word, read_offset
        SBUF read command.
    psum_valid, psum_bank, psum_word
        PSUM read command.
    from_psum, constant, shift, value, src_dtype, dst_dtype, saturate, copy
        Of the lanes; each in the cycle in which they need it.
    write_valid, write_commit, write_word, write_offset, write_size_log2, write_mask
        SBUF write command, registered.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": issue_port(),
                "update": update_port(),
                "starving": In(2),
                "psum_busy_pe": In(config.psum_banks),
                "psum_busy_dve": Out(config.psum_banks),
                "busy": Out(1),
                "events": Out(events_layout("dve")),
                "read_valid": Out(1),
                "read_ready": In(1),
                "read_new": Out(1),
                "read_word": Out(config.sbuf_word_bits),
                "read_offset": Out(4),
                "psum_valid": Out(1),
                "psum_bank": Out(config.psum_bank_bits),
                "psum_word": Out(config.psum_word_bits),
                "from_psum": Out(1),
                "constant": Out(1),
                "shift": Out(2),
                "value": Out(32),
                "src_dtype": Out(4),
                "dst_dtype": Out(4),
                "saturate": Out(1),
                "copy": Out(1),
                "write_valid": Out(1),
                "write_commit": Out(1),
                "write_word": Out(config.sbuf_word_bits),
                "write_offset": Out(4),
                "write_size_log2": Out(2),
                "write_mask": Out(config.partitions),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        psum_addr_bits = exact_log2(config.psum_bytes)
        addr_bits = max(config.sbuf_addr_bits, psum_addr_bits)
        quadrant_log2 = exact_log2(config.quadrant)

        # The instruction that is next. PSUM sources wait two cycles for the range of their banks.
        word = Signal(WORD_BITS, reset_less=True)
        pending = Signal()
        prepared = Signal(2)
        start = Signal()
        m.d.comb += self.instructions.ready.eq(~pending)
        with m.If(self.instructions.valid & self.instructions.ready):
            m.d.sync += [word.eq(self.instructions.p.word), pending.eq(1), prepared.eq(0)]
        with m.Elif(start):
            m.d.sync += pending.eq(0)
        with m.Elif(prepared != 2):
            m.d.sync += prepared.eq(prepared + 1)

        move = data.View(TensorCopy.layout(), word)
        fill = data.View(Memset.layout(), word)
        dst, src = move.dst, move.src
        is_fill = move.opcode == Memset.opcode
        is_empty = Signal()
        m.d.comb += is_empty.eq(
            (dst.num_partitions == 0) | Cat(dst[f"count{i}"] == 0 for i in range(4)).any()
        )
        reads_psum = Signal()
        reads_sbuf = Signal()
        m.d.comb += [
            reads_psum.eq(~is_fill & ~is_empty & (src.space == Space.PSUM)),
            reads_sbuf.eq(~is_fill & ~is_empty & (src.space == Space.SBUF)),
        ]
        dst_size = _size_log2(m, dst.dtype, "dst_size_log2")
        src_size = _size_log2(m, src.dtype, "src_size_log2")
        banks = self._banks_of(m, src, src_size, psum_addr_bits)

        # The instruction that runs: one element per cycle, unless a read is refused or a starving
        # DMA beat gets a gap.
        m.submodules.src_walker = src_walker = PatternWalker(addr_bits=addr_bits)
        m.submodules.dst_walker = dst_walker = PatternWalker(addr_bits=config.sbuf_addr_bits)
        m.submodules.updates = updates = Queue(shape=Update, depth=UPDATES_DEPTH)
        running = Signal()
        empty = Signal()
        from_sbuf = Signal()
        from_psum = Signal()
        constant = Signal(reset_less=True)
        gap = Signal()
        offered = Signal()
        accepted = Signal()
        finishing = Signal()
        m.d.comb += [
            offered.eq(running & ~gap),
            accepted.eq(offered & (~from_sbuf | self.read_ready)),
            finishing.eq(accepted & (empty | dst_walker.last)),
        ]
        for walker, pattern, size in ((src_walker, src, src_size), (dst_walker, dst, dst_size)):
            m.d.comb += [
                walker.pattern.eq(pattern),
                walker.size_log2.eq(size),
                walker.load.eq(start),
                walker.advance.eq(accepted),
            ]

        m.d.comb += [
            self.read_valid.eq(offered & from_sbuf),
            self.read_new.eq(src_walker.moved),
            self.read_word.eq(src_walker.address[4 : config.sbuf_addr_bits]),
            self.read_offset.eq(src_walker.address[:4]),
            self.psum_valid.eq(offered & from_psum),
            self.psum_bank.eq(src_walker.address[exact_log2(config.psum_bank_bytes) :]),
            self.psum_word.eq(src_walker.address[2:]),
        ]

        can_start = Signal()
        blocked = Signal()
        m.d.comb += [
            can_start.eq(
                pending & (~reads_psum | (prepared == 2)) & (~running | finishing) & updates.i.ready
            ),
            blocked.eq(reads_psum & (banks & self.psum_busy_pe).any()),
            start.eq(can_start & ~blocked),
        ]
        with m.If(start):
            m.d.sync += [
                running.eq(1),
                empty.eq(is_empty),
                from_sbuf.eq(reads_sbuf),
                from_psum.eq(reads_psum),
                constant.eq(is_fill),
                self.psum_busy_dve.eq(Mux(reads_psum, banks, 0)),
            ]
        with m.Elif(finishing):
            m.d.sync += [running.eq(0), self.psum_busy_dve.eq(0)]

        # What the lanes and the write port need of the running instruction.
        steer = Signal(
            data.StructLayout(
                {
                    "value": 32,
                    "shift": 2,
                    "src_dtype": 4,
                    "dst_dtype": 4,
                    "saturate": 1,
                    "copy": 1,
                    "size_log2": 2,
                    "quadrant": 2,
                    "partitions": config.partition_bits + 1,
                    "updates": 1,
                }
            ),
            reset_less=True,
        )
        to_quadrant = dst.start_partition[quadrant_log2 : quadrant_log2 + 2]
        from_quadrant = src.start_partition[quadrant_log2 : quadrant_log2 + 2]
        has_update = move.update_mode != UpdateMode.NONE
        with m.If(start):
            m.d.sync += [
                steer.value.eq(fill.value),
                steer.shift.eq(to_quadrant - from_quadrant),
                steer.src_dtype.eq(src.dtype),
                steer.dst_dtype.eq(dst.dtype),
                steer.saturate.eq(move.saturate),
                steer.copy.eq(is_fill | (src.dtype == dst.dtype)),
                steer.size_log2.eq(dst_size),
                steer.quadrant.eq(to_quadrant),
                steer.partitions.eq(dst.num_partitions),
                steer.updates.eq(has_update),
            ]

        # Everything below follows an element at fixed distances, in cycles after its read.
        def after(cycles, value, name, *, since=0, clean=False):
            """``value``, which belongs to cycle ``since``, delayed to ``cycles``."""
            line = []
            for i in range(since + 1, cycles + 1):
                past = Value.cast(value)
                value = Signal(len(past), name=f"{name}_cycle{i}", reset_less=not clean)
                m.d.sync += value.eq(past)
                line.append(value)
            return line

        cast_in = SBUF_READ_CYCLES + 1
        cast_out = cast_in + CAST_IN_CYCLES
        entry = Cat(from_psum, constant, steer.shift, steer.value)
        m.d.comb += [
            Cat(self.from_psum, self.constant, self.shift, self.value).eq(
                after(SBUF_READ_CYCLES, entry, "entry")[-1]
            ),
            self.src_dtype.eq(after(cast_in, steer.src_dtype, "src_dtype")[-1]),
            Cat(self.dst_dtype, self.saturate).eq(
                after(cast_out, Cat(steer.dst_dtype, steer.saturate), "dst_dtype")[-1]
            ),
            self.copy.eq(after(VECTOR_CYCLES - 1, steer.copy, "copy")[-1]),
        ]

        # The write: whether the word is complete is known one cycle later, from the element after.
        writes = after(VECTOR_CYCLES, accepted & ~empty, "write", clean=True)
        closing = after(VECTOR_CYCLES, finishing, "closing", clean=True)
        owing = after(VECTOR_CYCLES, finishing & steer.updates, "owing", clean=True)
        commit = after(VECTOR_CYCLES, closing[0] | dst_walker.moved, "commit", since=1)
        target = after(VECTOR_CYCLES, Cat(steer.size_log2, dst_walker.address), "target")
        reach = after(VECTOR_CYCLES - 1, Cat(steer.quadrant, steer.partitions), "reach")
        first = reach[-1][:2] << quadrant_log2
        stop = first + reach[-1][2:]
        m.d.sync += self.write_mask.eq(
            Cat((first <= p) & (stop > p) for p in range(config.partitions))
        )
        m.d.comb += [
            self.write_valid.eq(writes[-1]),
            self.write_commit.eq(commit[-1]),
            Cat(self.write_size_log2, self.write_offset, self.write_word).eq(target[-1]),
        ]

        # Updates wait until the write of the last element is in the memory.
        owed = Signal(range(UPDATES_DEPTH + 1))
        complete = Signal(range(UPDATES_DEPTH + 1))
        done = Signal()
        m.d.comb += [
            updates.i.valid.eq(start & has_update),
            updates.i.p.semaphore.eq(move.update_semaphore),
            updates.i.p.mode.eq(move.update_mode),
            updates.i.p.value.eq(move.update_value),
            self.update.p.eq(updates.o.p),
            self.update.valid.eq(updates.o.valid & (complete != 0)),
            done.eq(self.update.valid & self.update.ready),
            updates.o.ready.eq((complete != 0) & self.update.ready),
        ]
        m.d.sync += [
            owed.eq(owed + updates.i.valid - done),
            complete.eq(complete + owing[-1] - done),
        ]

        # A starving DMA beat needs a cycle without write.
        rest = Signal(range(GAP_CYCLES))
        m.d.comb += gap.eq(self.starving.any() & (rest == 0))
        with m.If(gap & running):
            m.d.sync += rest.eq(GAP_CYCLES - 1)
        with m.Elif(rest != 0):
            m.d.sync += rest.eq(rest - 1)

        moving = Cat(writes, closing).any()
        m.d.comb += self.busy.eq(pending | running | moving | (owed != 0))
        m.d.sync += [
            self.events.elements.eq(accepted & ~empty),
            self.events.busy.eq(running | moving),
            self.events.wait_psum.eq(can_start & blocked),
            self.events.wait_sbuf.eq(running & ~accepted),
        ]
        return m

    def _banks_of(self, m, src, size, addr_bits):
        """PSUM banks from the lowest to the highest element of ``src``, two cycles later."""
        config = self.config
        # How far each dimension reaches. Inside PSUM, so addr_bits hold it.
        below, above = [], []
        for i in range(4):
            step, count = src[f"step{i}"], src[f"count{i}"]
            far = Signal(addr_bits, name=f"extent{i}", reset_less=True)
            down = Signal(name=f"down{i}", reset_less=True)
            distance = Mux(step < 0, -step, step)[:addr_bits]
            product = distance * (count - 1)[:addr_bits]
            m.d.sync += [far.eq(product << size), down.eq(step < 0)]
            below.append(Mux(down, far, 0))
            above.append(Mux(down, 0, far))
        low = (src.offset - sum(below))[:addr_bits]
        high = (src.offset + sum(above))[:addr_bits]
        bank_log2 = exact_log2(config.psum_bank_bytes)
        banks = Signal(config.psum_banks, reset_less=True)
        m.d.sync += banks.eq(
            Cat((low[bank_log2:] <= b) & (high[bank_log2:] >= b) for b in range(config.psum_banks))
        )
        return banks


class VectorEngine(wiring.Component):
    """The vector engine (DVE): :class:`~..arch.isa.TensorCopy` and :class:`~..arch.isa.Memset`.

    Instructions run in order, one at a time in the sequencer, one element per partition and cycle.
    The reads of an instruction overlap the writes of the one before. Writes are in order.

    **Hazards.** An instruction may read what an earlier one of this engine writes only if it waits
    for that one's update: nothing else holds its reads back. Its writes need no wait. ``dst`` may
    be the same elements as ``src``; any other overlap of the two gives unspecified elements.

    **PSUM.** An instruction with its source in PSUM holds all banks from its lowest to its highest
    element (``psum_busy_dve``) from before its first read until its last, and starts only when the
    tensor engine holds none of them.

    **DMA.** While ``starving``, the stream has a one-cycle gap every :data:`GAP_CYCLES` cycles,
    which leaves the write ports free :data:`VECTOR_CYCLES` cycles later.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
    sbuf_read : :py:`Out(SbufVectorReadPort)`
    sbuf_write : :py:`Out(SbufVectorWritePort)`
    psum_read : :py:`Out(PsumReadPort)`
    psum_busy_pe : :py:`In(psum_banks)`
    psum_busy_dve : :py:`Out(psum_banks)`
        Registered.
    starving : :py:`In(2)`
    update : :py:`Out(stream.Signature(Update))`
        Not offered for an instruction without one.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("dve"))`
        Registered.

    Timing
    ------
    Issue interval of ``N`` elements: ``N`` cycles, at least 2 (source in PSUM: 4). An element is
    written :data:`VECTOR_CYCLES` = 9 cycles after it was read; the update is offered in the cycle
    after the last write. An idle engine reads its first element 2 cycles after it took the
    instruction (source in PSUM: 4), so the update is offered ``N + 11`` (``N + 13``) cycles after
    that. With ``N`` = 2, from SBUF::

        cycle               0  1  2  3  4  5  6  7  8  9 10 11 12 13
        instructions.valid  1  0  0  0  0  0  0  0  0  0  0  0  0  0
        sbuf_read.valid     0  0  1  1  0  0  0  0  0  0  0  0  0  0
        sbuf_write.valid    0  0  0  0  0  0  0  0  0  0  0  1  1  0
        update.valid        0  0  0  0  0  0  0  0  0  0  0  0  0  1

    Internals
    ---------
    Where further instructions plug in:

    - opcodes are decoded in :class:`Sequencer` from the pending word; what is constant during an
      instruction goes to ``steer`` and from there to the lanes by ``after(cycle, ...)``;
    - a second operand gets a :class:`PatternWalker`; from the other memory it is read in the same
      cycle, from the same one in alternate cycles (interval 2 N, as on the real machine);
    - a scalar per partition is an element read before element 0 into a register of the lane;
    - arithmetic stands between the casts of :class:`VectorLane`;
    - a reduction holds ``accepted`` elements back from the write line, except the last of a row.
    """

    instructions: stream.Interface
    update: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": In(stream.Signature(Issue)),
                "sbuf_read": Out(SbufVectorReadPort(config)),
                "sbuf_write": Out(SbufVectorWritePort(config)),
                "psum_read": Out(PsumReadPort(config)),
                "psum_busy_pe": In(config.psum_banks),
                "psum_busy_dve": Out(config.psum_banks),
                "starving": In(2),
                "update": Out(stream.Signature(Update)),
                "busy": Out(1),
                "events": Out(events_layout("dve")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = seq = Sequencer(config=config)
        connect(m, flipped(self.instructions), seq.instructions)
        connect(m, seq.update, flipped(self.update))
        read, write, psum = self.sbuf_read, self.sbuf_write, self.psum_read
        m.d.comb += [
            seq.starving.eq(self.starving),
            seq.psum_busy_pe.eq(self.psum_busy_pe),
            self.psum_busy_dve.eq(seq.psum_busy_dve),
            self.busy.eq(seq.busy),
            self.events.eq(seq.events),
            read.valid.eq(seq.read_valid),
            seq.read_ready.eq(read.ready),
            read.new.eq(seq.read_new),
            read.word.eq(seq.read_word),
            read.offset.eq(seq.read_offset),
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

        uniform = (
            "from_psum", "constant", "shift", "value", "src_dtype", "dst_dtype", "saturate", "copy",
        )  # fmt: skip
        for p in range(config.partitions):
            lane = VectorLane()
            m.submodules[f"lane{p}"] = Replicated(lane, "vector_lane")
            for k in range(4):
                source = (p - k * config.quadrant) % config.partitions
                m.d.comb += [lane.sbuf[k].eq(read.data[source]), lane.psum[k].eq(psum.data[source])]
            m.d.comb += [getattr(lane, name).eq(getattr(seq, name)) for name in uniform]
            m.d.comb += write.data[p].eq(lane.raw)
        return m
