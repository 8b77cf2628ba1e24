"""Descriptor planner of a DMA engine: checks a descriptor and works out its runs.

Sequential, with one multiplier: 30 cycles per descriptor, hidden behind the data of the one before.
The first failed check is reported, in this order; the field is the first bit of what is named:

1. the descriptor could not be read (BUS_READ); ``kind``; ``size_log2``; reserved bits (16, 576);
2. ``dst_count0``: the sides differ in elements (if both have none, nothing else is checked);
3. for the source, then for the destination: ``address`` outside every window, or in SBUF not a
   multiple of the element size; ``step0`` to ``step3`` (of dimensions with more than one element),
   in SBUF neither a multiple of the partition stride nor shorter than it, or not a multiple of the
   element size; ``address`` again if an element leaves its window, partition or SBUF.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..arch.config import AXI_ADDR_BITS, SBUF_WINDOW, WINDOW_LOG2
from ..arch.isa import DESCRIPTOR_COPY, DESCRIPTOR_LAYOUT, ErrorCode
from .dma_hbm import done_layout, word_layout
from .dma_walk import DIMS, SLOTS, plan_layout, sbuf_position_bits, tag_layout

__all__ = ["DmaPlanner", "fault_layout"]

FIELD = {name: bit for name, bit, _ in DESCRIPTOR_LAYOUT}
TAIL_FIELD = max(bit + width for _, bit, width in DESCRIPTOR_LAYOUT)
TAIL_WORD = TAIL_FIELD // 64
FLAGS_WORD = 15
"""Word of the descriptor memory that holds, instead of zeros, what was wrong with words 9..15 (bit
0) and with the bus (bit 1)."""

WORDS = {"address": (1, 2), "steps01": (3, 6), "steps23": (4, 7), "counts": (5, 8)}
"""Words of a descriptor: source, destination."""

MERGE_LOG2 = 14
"""Runs of more elements than this are not merged further, so that run lengths fit in 32 bits."""

REACH_BITS = 52


def fault_layout(config):
    """A descriptor that must not be executed."""
    return data.StructLayout({"valid": 1, "tag": tag_layout(config), "code": 8, "field": 16})


class DmaPlanner(wiring.Component):
    """Check descriptors, plan both sides, hand the plans out.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    word : :py:`In(word_layout)`
        Descriptor words as they arrive.
    start : :py:`In(stream.Signature(tag))`
        The descriptor to plan next; all its words are there, and ``room`` allows it.
    room : :py:`Out(4)`
        Bit ``src + 2 * dst``: a descriptor between these memories would find its units free.
    read_hbm, read_sbuf, write_hbm, write_sbuf : :py:`Out(stream.Signature(plan))`
    done : :py:`Out(done_layout)`
        A descriptor without elements.
    finished : :py:`In(done_layout).array(2)`
        Descriptors that the writers completed.
    fault : :py:`Out(fault_layout)`
        A bad descriptor, held; nothing is planned after it.
    busy : :py:`Out(1)`
        A descriptor is being planned.

    Timing
    ------
    30 cycles per descriptor.
    """

    start: stream.Interface

    def __init__(self, *, config):
        self.config = config
        self.tag = tag_layout(config)
        hbm = plan_layout(config, AXI_ADDR_BITS)
        sbuf = plan_layout(config, sbuf_position_bits(config))
        super().__init__(
            {
                "word": In(word_layout(config)),
                "start": In(stream.Signature(self.tag)),
                "room": Out(4),
                "read_hbm": Out(stream.Signature(hbm)),
                "read_sbuf": Out(stream.Signature(sbuf)),
                "write_hbm": Out(stream.Signature(hbm)),
                "write_sbuf": Out(stream.Signature(sbuf)),
                "done": Out(done_layout(config)),
                "finished": In(done_layout(config)).array(2),
                "fault": Out(fault_layout(config)),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        self._store(m)
        self._state()
        self._control(m)
        self._room(m)
        return m

    def _store(self, m):
        """Keep arriving words; the last one is replaced by what was wrong with the others."""
        word = self.word
        depth = self.config.dma_queues * SLOTS * 16
        m.submodules.words = memory = Memory(shape=64, depth=depth, init=[])
        write, self.words = memory.write_port(), memory.read_port()
        tail, failed = Signal(), Signal()
        tail_now, failed_now = Signal(), Signal()
        m.d.comb += [
            tail_now.eq((word.index >= TAIL_WORD) & (tail | word.data.any())),
            failed_now.eq(word.error | failed & (word.index != 0)),
            write.en.eq(word.valid),
            write.addr.eq(Cat(word.index, word.tag)),
            write.data.eq(Mux(word.index == FLAGS_WORD, Cat(tail_now, failed_now), word.data)),
        ]
        with m.If(word.valid):
            m.d.sync += [tail.eq(tail_now & (word.index != 15)), failed.eq(failed_now)]

    def _state(self):
        """Registers of the descriptor at hand."""
        self.current = Signal(self.tag)
        self.side = Signal()  # 0 source, 1 destination
        self.size = Signal(2)
        self.src_sbuf, self.in_sbuf = Signal(), Signal()
        self.address = Signal(AXI_ADDR_BITS)
        self.counts, self.steps = Signal(64), Signal(64)
        self.dim, self.phase = Signal(2), Signal()
        self.product = Signal(signed(66))
        self.total, self.src_total = Signal(64), Signal(64)  # elements so far; of the source
        self.run = Signal(MERGE_LOG2 + 16)  # elements of a run
        self.merging, self.decided, self.across = Signal(), Signal(), Signal()
        self.back = Signal(AXI_ADDR_BITS)  # from the end of the dimensions below to their start
        self.bytes_low, self.bytes_high = (
            Signal(signed(REACH_BITS), name=f"bytes_{n}") for n in "lh"
        )
        self.parts_low, self.parts_high = (
            Signal(signed(REACH_BITS), name=f"parts_{n}") for n in "lh"
        )
        self.deltas = [Signal(AXI_ADDR_BITS, name=f"delta{d}") for d in range(DIMS)]
        self.repeats = [Signal(16, name=f"repeats{d}") for d in range(DIMS)]
        self.bad, self.bad_field = Signal(), Signal(16)
        self.head_bad, self.head_field = Signal(), Signal(16)
        self.handed_out = Signal()

    def _field(self, name):
        return Mux(self.side, FIELD[f"dst_{name}"], FIELD[f"src_{name}"])

    def _blame(self, m, condition, field):
        """Remember the first thing that is wrong."""
        with m.If(condition & ~self.bad):
            m.d.sync += [self.bad.eq(1), self.bad_field.eq(field)]

    def _control(self, m):
        words, word = self.words, self.words.data
        owner = Signal(self.tag)
        index = Signal(4)
        m.d.comb += [
            owner.eq(self.current),
            words.addr.eq(Cat(index, owner)),
            self.done.tag.eq(self.current),
            self.done.buffer.eq(0),
        ]

        def read(name, side=None):
            src, dst = WORDS[name]
            m.d.comb += index.eq(Mux(self.side if side is None else side, dst, src))

        def fault(field, code=ErrorCode.BAD_DESCRIPTOR):
            m.d.sync += [
                self.fault.valid.eq(1),
                self.fault.tag.eq(self.current),
                self.fault.code.eq(code),
                self.fault.field.eq(field),
            ]

        with m.FSM() as fsm:
            m.d.comb += self.busy.eq(~fsm.ongoing("IDLE"))
            with m.State("IDLE"):
                m.d.comb += [self.start.ready.eq(1), owner.eq(self.start.p), index.eq(0)]
                m.d.sync += [self.current.eq(self.start.p), self.side.eq(0), self.bad.eq(0)]
                with m.If(self.start.valid):
                    m.next = "HEAD"
            with m.State("HEAD"):
                m.d.comb += index.eq(FLAGS_WORD)
                kind, size, rest = word[0:8], word[8:16], word[16:64]
                m.d.sync += [
                    self.size.eq(size),
                    self.head_bad.eq((kind != DESCRIPTOR_COPY) | (size > 2) | rest.any()),
                    self.head_field.eq(
                        Mux(
                            kind != DESCRIPTOR_COPY,
                            FIELD["kind"],
                            Mux(size > 2, FIELD["size_log2"], FIELD["_reserved"]),
                        )
                    ),
                ]
                m.next = "FLAGS"
            with m.State("FLAGS"):
                read("address")
                m.next = "ADDRESS"
                with m.If(word[1]):
                    fault(0, ErrorCode.BUS_READ)
                    m.next = "FAULT"
                with m.Elif(self.head_bad | word[0]):
                    fault(Mux(self.head_bad, self.head_field, TAIL_FIELD))
                    m.next = "FAULT"
            with m.State("ADDRESS"):
                read("counts")
                self._begin_side(m, word)
                m.next = "COUNTS"
            with m.State("COUNTS"):
                read("steps01")
                m.d.sync += self.counts.eq(word)
                m.next = "STEPS"
            with m.State("STEPS"):
                read("steps23")
                m.d.sync += self.steps.eq(word)
                m.next = "DIMENSIONS"
            with m.State("DIMENSIONS"):
                read("steps23")
                self._dimension(m)
                m.d.sync += self.phase.eq(~self.phase)
                with m.If(self.phase):
                    m.d.sync += [
                        self.dim.eq(self.dim + 1),
                        self.counts.eq(self.counts >> 16),
                        self.steps.eq(Mux(self.dim == 1, word, self.steps >> 32)),
                    ]
                    with m.If(self.dim == DIMS - 1):
                        m.next = "TOTAL"
            with m.State("TOTAL"):
                m.d.sync += self.total.eq(self.product)
                m.next = "CONCLUDE"
            with m.State("CONCLUDE"):
                read("address", 1)
                self._conclude_side(m)
                m.d.sync += self.side.eq(1)
                with m.If(self.side):
                    m.next = "VERDICT"
                with m.Else():
                    m.d.sync += self.src_total.eq(self.total)
                    m.next = "ADDRESS"
            with m.State("VERDICT"):
                m.next = "IDLE"
                with m.If(self.total != self.src_total):
                    fault(FIELD["dst_count0"])
                    m.next = "FAULT"
                with m.Elif(self.total == 0):
                    m.d.comb += self.done.valid.eq(1)
                with m.Elif(self.bad):
                    fault(self.bad_field)
                    m.next = "FAULT"
                with m.Else():
                    self._hand_out(m)
            with m.State("FAULT"):
                pass

        for plan in (self.read_hbm, self.read_sbuf, self.write_hbm, self.write_sbuf):
            with m.If(plan.valid & plan.ready):
                m.d.sync += plan.valid.eq(0)

    def _begin_side(self, m, word):
        """Split the address; start the sums."""
        offset_bits, position_bits = self.config.sbuf_addr_bits, sbuf_position_bits(self.config)
        in_sbuf = Signal()
        offset, partition = word[:offset_bits], word[offset_bits:WINDOW_LOG2]
        misaligned = (word[0] & (self.size != 0)) | (word[1] & self.size[1])
        m.d.comb += in_sbuf.eq(word[WINDOW_LOG2:] == SBUF_WINDOW)
        self._blame(
            m,
            (word[WINDOW_LOG2:] > SBUF_WINDOW)
            | in_sbuf & (misaligned | word[position_bits:WINDOW_LOG2].any()),
            self._field("address"),
        )
        m.d.sync += [
            self.in_sbuf.eq(in_sbuf),
            self.address.eq(word),
            self.total.eq(1),
            self.run.eq(1),
            self.merging.eq(1),
            self.decided.eq(0),
            self.across.eq(0),
            self.back.eq(0),
        ]
        for reach in (self.bytes_low, self.bytes_high):
            m.d.sync += reach.eq(Mux(in_sbuf, offset, word[:WINDOW_LOG2]))
        for reach in (self.parts_low, self.parts_high):
            m.d.sync += reach.eq(Mux(in_sbuf, partition, 0))

    def _dimension(self, m):
        """Two cycles per dimension: its reach and how it is walked, then elements so far."""
        stride_log2 = self.config.sbuf_partition_log2
        step, count = self.steps[:32].as_signed(), self.counts[:16]
        repeats = Signal(signed(17))
        a, b = Signal(signed(49)), Signal(signed(17))
        m.d.comb += [
            repeats.eq(count - 1),
            a.eq(Mux(self.phase, self.total[:48], step)),
            b.eq(Mux(self.phase, count, repeats)),
        ]
        m.d.sync += self.product.eq(a * b)

        single, by_partition, by_byte, aligned = Signal(), Signal(), Signal(), Signal()
        along, across, merge = Signal(), Signal(), Signal()
        small = self.total[MERGE_LOG2:] == 0
        m.d.comb += [
            single.eq(count <= 1),
            by_partition.eq(step[:stride_log2] == 0),
            by_byte.eq((step[stride_log2:] == 0) | step[stride_log2:].all()),
            aligned.eq(~((step[0] & (self.size != 0)) | (step[1] & self.size[1]))),
            # Does this dimension continue the run? The first one decides in which order.
            along.eq(~self.across & (step == (self.total[:MERGE_LOG2] << self.size))),
            across.eq(
                self.in_sbuf
                & (self.across | ~self.decided)
                & (step == (self.total[:MERGE_LOG2] << stride_log2))
            ),
            merge.eq(self.merging & small & (along | across)),
        ]
        with m.If(~self.phase):
            with m.If(self.dim != 0):
                m.d.sync += self.total.eq(self.product)
        with m.Else():
            self._reach(m, self.in_sbuf & by_partition)
            with m.If(~single):
                self._blame(
                    m,
                    self.in_sbuf & ~(aligned & (by_partition | by_byte)),
                    self._field("step0") + (self.dim << 5),
                )
                m.d.sync += self.decided.eq(1)
                with m.If(merge):
                    m.d.sync += self.across.eq(across)
                with m.Else():
                    m.d.sync += [
                        self.merging.eq(0),
                        self.back.eq(self.back + self.product),
                    ]
                with m.If(self.merging & ~merge):
                    m.d.sync += self.run.eq(self.total)
            with m.Switch(self.dim):
                for d in range(DIMS):
                    with m.Case(d):
                        m.d.sync += [
                            self.repeats[d].eq(Mux(single | merge, 0, repeats)),
                            self.deltas[d].eq(step - self.back),
                        ]

    def _reach(self, m, in_partitions):
        """Add the way from the first to the last index of a dimension to the extremes."""
        for here, low, high, way in (
            (~in_partitions, self.bytes_low, self.bytes_high, self.product),
            (
                in_partitions,
                self.parts_low,
                self.parts_high,
                self.product >> self.config.sbuf_partition_log2,
            ),
        ):
            with m.If(here & (self.product < 0)):
                m.d.sync += low.eq(low + way)
            with m.Elif(here):
                m.d.sync += high.eq(high + way)

    def _conclude_side(self, m):
        """Check the extremes; write the plan."""
        config = self.config
        beyond = Signal()
        last = Signal(signed(REACH_BITS))  # highest byte, HBM only: in SBUF elements are aligned
        m.d.comb += [
            last.eq(self.bytes_high + (Const(1, 3) << self.size) - 1),
            beyond.eq(
                (self.bytes_low < 0)
                | Mux(
                    self.in_sbuf,
                    (self.bytes_high >= config.sbuf_bytes)
                    | (self.parts_low < 0)
                    | (self.parts_high >= config.partitions),
                    last >> WINDOW_LOG2 != 0,
                )
            ),
        ]
        self._blame(m, beyond, self._field("address"))
        with m.If(~self.side):
            m.d.sync += self.src_sbuf.eq(self.in_sbuf)
        for side, streams in enumerate(self._plans):
            for memory, plan in enumerate(streams):
                about = plan.p.about
                # The plan of another memory may still be waiting.
                with m.If((self.side == side) & (self.in_sbuf == memory)):
                    m.d.sync += [
                        plan.p.address.eq(self.address),
                        plan.p.bytes.eq(Mux(self.merging, self.total, self.run) << self.size),
                        about.tag.eq(self.current),
                        about.buffer.eq(self.src_sbuf),
                        about.across.eq(self.across),
                        about.size_log2.eq(self.size),
                    ]
                    m.d.sync += [plan.p.counts[d].eq(self.repeats[d]) for d in range(DIMS)]
                    m.d.sync += [plan.p.deltas[d].eq(self.deltas[d]) for d in range(DIMS)]

    @property
    def _plans(self):
        """Streams by side, then memory."""
        return (self.read_hbm, self.read_sbuf), (self.write_hbm, self.write_sbuf)

    def _hand_out(self, m):
        for memory, streams in ((self.src_sbuf, self._plans[0]), (self.in_sbuf, self._plans[1])):
            for i, plan in enumerate(streams):
                with m.If(memory == i):
                    m.d.sync += plan.valid.eq(1)
        m.d.comb += self.handed_out.eq(1)

    def _room(self, m):
        """A byte buffer serves one writer at a time; every unit has one plan waiting at most."""
        for b in range(2):
            inside = Signal(range(self.config.dma_queues * SLOTS + 1), name=f"inside{b}")
            writer = Signal(name=f"writer{b}")
            enters = self.handed_out & (self.src_sbuf == b)
            leaves = Cat(done.valid & (done.buffer == b) for done in self.finished).any()
            m.d.sync += inside.eq(inside + enters - leaves)
            with m.If(enters):
                m.d.sync += writer.eq(self.in_sbuf)
            for dst in range(2):
                m.d.comb += self.room[b + 2 * dst].eq(
                    ~self._plans[0][b].valid
                    & ~self._plans[1][dst].valid
                    & ((inside == 0) | (writer == dst))
                )
