"""Sequencing of the engines behind the array: what an instruction reads and writes, and when.

A :class:`Sequencer` walks the access patterns of an instruction, commands the memories, owes the
semaphore updates, and tells its engine which element is where. What is done with the elements is
the business of the engine's lanes, one per partition, all alike.
"""

from dataclasses import dataclass

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..arch.events import events_layout
from ..arch.formats import FORMATS
from ..arch.isa import (
    INSTRUCTIONS,
    WORD_BITS,
    AccessPattern,
    DmaStart,
    EventSemaphore,
    Instruction,
    Space,
    UpdateMode,
)
from ..interfaces import SBUF_READ_CYCLES, Update, issue_port, update_port
from ..lib.stream import Queue

__all__ = [
    "GAP_CYCLES", "SCALARS", "UPDATES_DEPTH", "Delay", "Element", "PatternWalker", "Phases",
    "Sequencer", "size_log2",
]  # fmt: skip

GAP_CYCLES = 16
"""While a DMA beat starves the stream of elements has a one-cycle gap as often as this."""

UPDATES_DEPTH = 32
"""Instructions whose update is still owed, at most."""

SCALARS = 2
"""Scalars per partition that an instruction may take from SBUF."""


def size_log2(m, dtype, name):
    """log2 of the element size of format ``dtype``."""
    size = Signal(2, name=name)
    with m.Switch(dtype):
        for size_bytes in (1, 2, 4):
            with m.Case(*(fmt.code for fmt in FORMATS if fmt.bytes == size_bytes)):
                m.d.comb += size.eq(exact_log2(size_bytes))
    return size


class Delay:
    """A value that follows an element through the lanes, at any distance in cycles.

    Parameters
    ----------
    m : :class:`~amaranth.hdl.Module`
    value : :class:`~amaranth.hdl.Value`
    name : :class:`str`
    since : :class:`int`, cycles
        What ``value`` is late already.
    clean : :class:`bool`
        Reset the registers.
    """

    def __init__(self, m, value, name, *, since=0, clean=False):
        self._m = m
        self._line = [Value.cast(value)]
        self._name = name
        self._since = since
        self._clean = clean

    def __getitem__(self, cycles):
        """The value ``cycles`` after the element was read."""
        while len(self._line) <= cycles - self._since:
            past = self._line[-1]
            name = f"{self._name}_cycle{self._since + len(self._line)}"
            value = Signal(len(past), name=name, reset_less=not self._clean)
            self._m.d.sync += value.eq(past)
            self._line.append(value)
        return self._line[cycles - self._since]


class PatternWalker(wiring.Component):
    """Addresses of the elements of an access pattern, in order, one per cycle.

    Keeps the address at which each dimension's current pass began: no multiplication is needed. All
    arithmetic is modulo ``2 ** addr_bits``, which is exact for elements inside the memory.

    Parameters
    ----------
    addr_bits : :class:`int`, bits
    layout : :class:`~amaranth.lib.data.Layout`
        Of the pattern: ``offset``, ``step0`` to ``step3``, ``count0`` to ``count3``.

    Members
    -------
    pattern : :py:`In(layout)`
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
    at_end : :py:`Out(4)`
        Per dimension: the current element is the last one along it.
    last : :py:`Out(1)`
        The current element is the last one.
    """

    def __init__(self, *, addr_bits, layout=None):
        self.addr_bits = addr_bits
        super().__init__(
            {
                "pattern": In(layout or AccessPattern.layout()),
                "size_log2": In(2),
                "load": In(1),
                "advance": In(1),
                "address": Out(addr_bits),
                "moved": Out(1),
                "at_end": Out(4),
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
        at_end = self.at_end
        following = Signal(bits)
        m.d.comb += [
            at_end.eq(Cat(rest == 1 for rest in left)),
            self.last.eq(at_end.all()),
            self.address.eq(base[0]),
        ]

        with m.If(self.load):
            for i in dims:
                scaled = Signal(signed(len(self.pattern.step0) + 4), name=f"scaled{i}")
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


class Element(data.Struct):
    """What an engine must know of the element, or of the scalars, that is being read.

    Members
    -------
    valid : 1 bit
        An element. Neither this nor ``scalars``: a cycle without.
    scalars : :data:`SCALARS` bits
        Scalars that are read in this cycle, each on its read port if there are two, else one by one
        on the only one.
    first : 1 bit
        The first element of an instruction.
    early : 1 bit
        The first or the second element of a row.
    only : 1 bit
        The row's only element.
    last : 1 bit
        The last element of a row: there is a result.
    load : 1 bit
        An element of the second source, which is read before the first one.
    flush : 1 bit
        No element: only a result.
    """

    valid: 1
    scalars: SCALARS
    first: 1
    early: 1
    only: 1
    last: 1
    load: 1
    flush: 1


@dataclass(frozen=True)
class Phases:
    """Instructions whose operands do not go side by side.

    Parameters
    ----------
    load : :class:`bool`
        All of the second source is read before the first one.
    flush : :class:`bool`
        All of ``dst`` is written after the last element has been read.
    """

    load: bool = False
    flush: bool = False


class Sequencer(wiring.Component):
    """Executes the instructions of one engine, in order, one element per cycle.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    engine : :class:`~..arch.isa.Engine`
    lane_cycles : :class:`int`, cycles
        Latency of the engine's lanes, from what the memories give to what is written.
    read_ports : :class:`int`
        1 or 2 ports on SBUF; the second one for second sources.
    intervals : dict of :class:`int`, cycles
        By instruction class, of those whose elements may not follow one another at once.
    phases : dict of :class:`Phases`
        By instruction class, of those that need it.
    behind : :class:`int`, cycles, or ``None``
        How much later than this engine's the writes of another one come, of which the state buffer
        must not see a commit in the same cycle and bank. ``None``: no other depends on this one.

    Members
    -------
    instructions, update, starving, busy, events
        Of the engine.
    hold : :py:`In(1)`
        The pending instruction may not start yet.
    pending : :py:`Out(1)`, ``word`` : :py:`Out(WORD_BITS)`
        The instruction that is next.
    wants : :py:`Out(1)`
        It could start if nothing else ran and ``hold`` were 0.
    start : :py:`Out(1)`
        It starts. In the next cycle ``element`` may belong to it.
    running : :py:`Out(1)`
        Elements are still to be read.
    element : :py:`Out(Element)`
        What is read in this cycle.
    psum_source : :py:`Out(2)`
        Which source of the running instruction comes from PSUM.
    psum_busy_others : :py:`In(config.psum_banks)`
        Banks that other engines hold, or take in this cycle.
    psum_claim : :py:`Out(config.psum_banks)`
        Banks that the instruction that starts in this cycle will hold.
    psum_busy : :py:`Out(config.psum_banks)`
        Banks that the running instruction holds.
    read_valid, read_ready, read_new, read_word, read_offset : arrays of ``read_ports``
        SBUF read commands.
    psum_valid, psum_bank, psum_word
        PSUM read command.
    write_valid, write_commit, write_word, write_offset, write_size_log2, write_mask
        SBUF write command, registered.
    upcoming : :py:`Out(2)`, ``occupied`` : :py:`In(2)`
        Banks to which no write may be made ``behind`` cycles before this engine's own; and the same
        of the other engine, for this one.
    """

    def __init__(
        self, *, config, engine, lane_cycles, read_ports, intervals=None, phases=None, behind=None
    ):
        self.config = config
        self.engine = engine
        self.lane_cycles = lane_cycles
        self.read_ports = read_ports
        self.intervals = intervals or {}
        self.phases = phases or {}
        self.behind = behind
        self.classes = [
            cls
            for cls in INSTRUCTIONS.values()
            if engine in cls.engines and cls not in (EventSemaphore, DmaStart)
        ]
        super().__init__(
            {
                "instructions": issue_port(),
                "update": update_port(),
                "starving": In(2),
                "busy": Out(1),
                "events": Out(events_layout(engine.name.lower())),
                "hold": In(1),
                "pending": Out(1),
                "word": Out(WORD_BITS),
                "wants": Out(1),
                "start": Out(1),
                "running": Out(1),
                "element": Out(Element),
                "psum_source": Out(2),
                "psum_busy_others": In(config.psum_banks),
                "psum_claim": Out(config.psum_banks),
                "psum_busy": Out(config.psum_banks),
                "read_valid": Out(1).array(read_ports),
                "read_ready": In(1).array(read_ports),
                "read_new": Out(1).array(read_ports),
                "read_word": Out(config.sbuf_word_bits).array(read_ports),
                "read_offset": Out(4).array(read_ports),
                "psum_valid": Out(1),
                "psum_bank": Out(config.psum_bank_bits),
                "psum_word": Out(config.psum_word_bits),
                "write_valid": Out(1),
                "write_commit": Out(1),
                "write_word": Out(config.sbuf_word_bits),
                "write_offset": Out(4),
                "write_size_log2": Out(2),
                "write_mask": Out(config.partitions),
                "upcoming": Out(2),
                "occupied": In(2),
            }
        )

    def view(self, cls: type[Instruction]):
        """The pending word as an instruction of ``cls``."""
        return data.View(cls.layout(), self.word)

    def is_any(self, classes):
        """Whether the pending word is an instruction of one of ``classes``."""
        opcode = self.view(self.classes[0]).opcode
        return Cat(opcode == cls.opcode for cls in classes).any()

    def _by_class(self, m, name, found):
        """Value of the first pair ``(class, value)`` whose class is pending, else 0."""
        width = max((len(Value.cast(value)) for _, value in found), default=1)
        chosen = Signal(width, name=name)
        with m.Switch(self.view(self.classes[0]).opcode):
            for cls, value in found:
                with m.Case(cls.opcode):
                    m.d.comb += chosen.eq(value)
        return chosen

    def elaborate(self, platform):
        m = Module()
        config, classes = self.config, self.classes
        vector_cycles = SBUF_READ_CYCLES + self.lane_cycles
        psum_addr_bits = exact_log2(config.psum_bytes)
        addr_bits = max(config.sbuf_addr_bits, psum_addr_bits)
        quadrant_log2 = exact_log2(config.quadrant)

        # The instruction that is next. PSUM sources wait two cycles for the range of their banks.
        word, pending = self.word, self.pending
        prepared = Signal(2)
        start = self.start
        m.d.comb += self.instructions.ready.eq(~pending)
        with m.If(self.instructions.valid & self.instructions.ready):
            m.d.sync += [word.eq(self.instructions.p.word), pending.eq(1), prepared.eq(0)]
        with m.Elif(start):
            m.d.sync += pending.eq(0)
        with m.Elif(prepared != 2):
            m.d.sync += prepared.eq(prepared + 1)

        # Its operands lie in the same places, whatever it is: dst first, then the sources.
        longest = max(classes, key=lambda cls: len(cls.operands))
        operands = [getattr(self.view(longest), name) for name, _, _ in longest.operands]
        for cls in classes:
            assert [op.writes for _, op, _ in cls.operands] == [True, False, False][
                : len(cls.operands)
            ]
        dst, sources = operands[0], operands[1:]
        used = [
            self.is_any([cls for cls in classes if len(cls.operands) > i + 1])
            for i in range(len(sources))
        ]
        is_empty = Signal()
        m.d.comb += is_empty.eq(
            Cat(
                present
                & (Cat(ap[f"count{i}"] == 0 for i in range(4)).any() | ~ap.num_partitions.any())
                for ap, present in zip(operands, (Const(1), *used), strict=True)
            ).any()
        )
        in_psum, in_sbuf = Signal(len(sources)), Signal(len(sources))
        for i, (ap, present) in enumerate(zip(sources, used, strict=True)):
            m.d.comb += [
                in_psum[i].eq(present & ~is_empty & (ap.space == Space.PSUM)),
                in_sbuf[i].eq(present & ~is_empty & (ap.space == Space.SBUF)),
            ]
        sizes = [size_log2(m, ap.dtype, f"size_log2_{i}") for i, ap in enumerate(operands)]
        of_psum, of_psum_size = sources[0], sizes[1]
        if len(sources) > 1:
            of_psum = Signal(AccessPattern.layout(), name="of_psum")
            m.d.comb += of_psum.eq(Mux(in_psum[1], sources[1].as_value(), sources[0].as_value()))
            of_psum_size = Mux(in_psum[1], sizes[2], sizes[1])
        banks = self._banks_of(m, of_psum, of_psum_size, psum_addr_bits)
        inner = self._by_class(
            m,
            "inner",
            [
                (cls, self.view(cls)[op.reduced])
                for cls in classes
                for _, op, _ in cls.operands
                if op.reduced
            ],
        )
        reduces = self.is_any(
            [cls for cls in classes if any(op.reduced for _, op, _ in cls.operands)]
        )
        pointers, points = [], Signal(SCALARS)
        for i in range(SCALARS):
            found = [(cls, [f for f in cls.scalars if f[1].pointer][i : i + 1]) for cls in classes]
            found = [(cls, fields[0]) for cls, fields in found if fields]
            flags = [(cls, self.view(cls)[item.pointer]) for cls, (_, item, _) in found]
            values = [(cls, self.view(cls)[name]) for cls, (name, _, _) in found]
            m.d.comb += points[i].eq(self._by_class(m, f"points{i}", flags) & ~is_empty)
            pointers.append(self._by_class(m, f"pointer{i}", values))

        # The instruction that runs: scalars first, then one element per cycle, unless a read is
        # refused, the write would meet another engine's, or a starving DMA beat gets a gap.
        walkers = []
        for i in range(len(sources)):
            walker = PatternWalker(addr_bits=addr_bits)
            m.submodules[f"src{i}_walker"] = walker
            walkers.append(walker)
        m.submodules.dst_walker = dst_walker = PatternWalker(addr_bits=config.sbuf_addr_bits)
        m.submodules.updates = updates = Queue(shape=Update, depth=UPDATES_DEPTH)
        running, empty = self.running, Signal()
        from_sbuf, from_psum = Signal(len(sources)), self.psum_source
        scalars_left = Signal(SCALARS)
        scalar_at = [Signal(config.sbuf_addr_bits, name=f"scalar{i}", reset_less=True)
                     for i in range(SCALARS)]  # fmt: skip
        rows, row_dims = Signal(), Signal(2, reset_less=True)  # whether it reduces, and how much
        position = Signal(2)  # in the row, up to 2
        first = Signal()
        between, pause = self._pauses(m, start)
        gap, offered, accepted = Signal(), Signal(), Signal()
        finishing, row_end = Signal(), Signal()
        prelude, blocked_write = Signal(), Signal()
        inside = walkers[0].at_end | (Const(0b1110, 4) << row_dims)[:4]
        loading, flushing, silent, reading = self._phases(m, start, accepted, walkers)
        m.d.comb += [
            prelude.eq(running & scalars_left.any()),
            row_end.eq((~rows | inside.all()) & ~loading & ~silent),
            blocked_write.eq(row_end & ~empty & self.occupied.bit_select(dst_walker.address[4], 1)),
            offered.eq(running & ~prelude & ~gap & ~blocked_write & ~pause.any()),
            finishing.eq(
                accepted
                & (empty | (Mux(rows, walkers[0].last, dst_walker.last) & ~loading & ~silent))
            ),
        ]

        ports_ready = []
        for i in range(self.read_ports):
            # The word that is kept since another port was refused.
            kept = Signal(name=f"kept{i}")
            here = Signal(name=f"scalar_on{i}")  # a scalar is read on this port
            address = Signal(config.sbuf_addr_bits, name=f"address{i}")
            walker = walkers[i]
            if self.read_ports == 1:
                at = Mux(scalars_left[0], scalar_at[0], scalar_at[1])
                m.d.comb += here.eq(prelude)
            else:
                at = scalar_at[i]
                m.d.comb += here.eq(prelude & scalars_left[i])
            m.d.comb += [
                address.eq(Mux(here, at, walker.address[: config.sbuf_addr_bits])),
                self.read_valid[i].eq((offered & from_sbuf[i] & reading[i]) | here),
                self.read_new[i].eq(here | (walker.moved & ~kept)),
                self.read_word[i].eq(address[4:]),
                self.read_offset[i].eq(address[:4]),
            ]
            ports_ready.append(self.read_ready[i] | ~self.read_valid[i])
            with m.If(self.read_valid[i] & self.read_ready[i] & ~here):
                m.d.sync += kept.eq(~accepted)

        taken = Signal(SCALARS)
        if self.read_ports == 1:
            took = self.read_ready[0] & prelude
            m.d.comb += taken.eq(Mux(scalars_left[0], 0b01, 0b10) & took.replicate(SCALARS))
        else:
            m.d.comb += taken.eq(scalars_left & Cat(self.read_ready) & prelude.replicate(SCALARS))
        m.d.sync += scalars_left.eq(scalars_left & ~taken)
        m.d.comb += accepted.eq(offered & Cat(ports_ready).all())
        with m.If(accepted):
            m.d.sync += [first.eq(0), pause.eq(Mux(finishing, 0, between))]
        with m.Elif(pause.any()):
            m.d.sync += pause.eq(pause - 1)
        with m.If(accepted):
            m.d.sync += position.eq(Mux(row_end, 0, Mux(position[1], 2, position + 1)))
        m.d.comb += [
            self.element.valid.eq(accepted & ~empty),
            self.element.scalars.eq(taken),
            self.element.first.eq(first),
            self.element.early.eq(~position[1]),
            self.element.only.eq((position == 0) & row_end),
            self.element.last.eq(row_end),
            self.element.load.eq(loading),
            self.element.flush.eq(flushing),
        ]
        advances = [accepted & row_end, *(accepted & on for on in reading[: len(walkers)])]
        for walker, pattern, size, advance in zip(
            (dst_walker, *walkers), operands, sizes, advances, strict=True
        ):
            m.d.comb += [
                walker.pattern.eq(pattern),
                walker.size_log2.eq(size),
                walker.load.eq(start),
                walker.advance.eq(advance),
            ]
        psum_address = walkers[0].address
        if len(sources) > 1:
            psum_address = Mux(from_psum[1], walkers[1].address, walkers[0].address)
        m.d.comb += [
            self.psum_valid.eq(offered & (from_psum & reading[: len(sources)]).any()),
            self.psum_bank.eq(psum_address[exact_log2(config.psum_bank_bytes) :]),
            self.psum_word.eq(psum_address[2:]),
        ]

        reads_psum = in_psum.any()
        is_ready, can_start, blocked = Signal(), Signal(), Signal()
        m.d.comb += [
            is_ready.eq(pending & (~reads_psum | (prepared == 2)) & updates.i.ready),
            can_start.eq(is_ready & (~running | finishing)),
            blocked.eq(reads_psum & (banks & self.psum_busy_others).any()),
            self.wants.eq(is_ready & ~blocked),
            start.eq(can_start & ~blocked & ~self.hold),
            self.psum_claim.eq(Mux(start & reads_psum, banks, 0)),
        ]
        with m.If(start):
            m.d.sync += [
                running.eq(1),
                empty.eq(is_empty),
                from_sbuf.eq(in_sbuf),
                from_psum.eq(in_psum),
                scalars_left.eq(points),
                *(at.eq(pointer) for at, pointer in zip(scalar_at, pointers, strict=True)),
                rows.eq(reduces),
                row_dims.eq(inner),
                position.eq(0),
                first.eq(1),
                self.psum_busy.eq(self.psum_claim),
            ]
        with m.Elif(finishing):
            m.d.sync += [running.eq(0), self.psum_busy.eq(0)]

        # What the write port needs of the running instruction.
        steer = Signal(
            data.StructLayout(
                {
                    "size_log2": 2,
                    "quadrant": 2,
                    "partitions": config.partition_bits + 1,
                    "updates": 1,
                }
            ),
            reset_less=True,
        )
        header = self.view(longest)
        has_update = header.update_mode != UpdateMode.NONE
        with m.If(start):
            m.d.sync += [
                steer.size_log2.eq(sizes[0]),
                steer.quadrant.eq(dst.start_partition[quadrant_log2 : quadrant_log2 + 2]),
                steer.partitions.eq(dst.num_partitions),
                steer.updates.eq(has_update),
            ]

        # The write: whether the word is complete is known one cycle later, from the element after.
        writes = Delay(m, accepted & ~empty & row_end, "write", clean=True)
        closing = Delay(m, finishing, "closing", clean=True)
        owing = Delay(m, finishing & steer.updates, "owing", clean=True)
        commit = Delay(m, closing[1] | dst_walker.moved, "commit", since=1)
        target = Delay(m, Cat(steer.size_log2, dst_walker.address), "target")
        reach = Delay(m, Cat(steer.quadrant, steer.partitions), "reach")[vector_cycles - 1]
        elements = Delay(m, accepted & ~empty, "element", clean=True)
        first = reach[:2] << quadrant_log2
        stop = first + reach[2:]
        m.d.sync += self.write_mask.eq(
            Cat((first <= p) & (stop > p) for p in range(config.partitions))
        )
        m.d.comb += [
            self.write_valid.eq(writes[vector_cycles]),
            self.write_commit.eq(commit[vector_cycles]),
            Cat(self.write_size_log2, self.write_offset, self.write_word).eq(target[vector_cycles]),
        ]

        # What keeps the other engine from writing: a commit, or the gap that a DMA beat waits for.
        if self.behind is not None:
            gaps = Delay(m, gap & running, "gap", clean=True)[self.behind]
            commits = writes[self.behind] & commit[self.behind]
            bank = target[self.behind][2 + 4]
            m.d.comb += self.upcoming.eq(Cat(gaps | (commits & ~bank), gaps | (commits & bank)))

        # Updates wait until the write of the last element is in the memory.
        owed = Signal(range(UPDATES_DEPTH + 1))
        complete = Signal(range(UPDATES_DEPTH + 1))
        done = Signal()
        m.d.comb += [
            updates.i.valid.eq(start & has_update),
            updates.i.p.semaphore.eq(header.update_semaphore),
            updates.i.p.mode.eq(header.update_mode),
            updates.i.p.value.eq(header.update_value),
            self.update.p.eq(updates.o.p),
            self.update.valid.eq(updates.o.valid & (complete != 0)),
            done.eq(self.update.valid & self.update.ready),
            updates.o.ready.eq((complete != 0) & self.update.ready),
        ]
        m.d.sync += [
            owed.eq(owed + updates.i.valid - done),
            complete.eq(complete + owing[vector_cycles] - done),
        ]

        # A starving DMA beat needs a cycle without write.
        rest = Signal(range(GAP_CYCLES))
        m.d.comb += gap.eq(self.starving.any() & (rest == 0))
        with m.If(gap & running):
            m.d.sync += rest.eq(GAP_CYCLES - 1)
        with m.Elif(rest != 0):
            m.d.sync += rest.eq(rest - 1)

        moving = Cat(
            line[cycles] for line in (elements, closing) for cycles in range(1, vector_cycles + 1)
        ).any()
        m.d.comb += self.busy.eq(pending | running | moving | (owed != 0))
        m.d.sync += [
            self.events.elements.eq(accepted & ~empty),
            self.events.busy.eq(running | moving),
            self.events.wait_sbuf.eq(running & ~accepted & ~taken.any()),
        ]
        if "wait_psum" in self.events.shape().members:
            m.d.sync += self.events.wait_psum.eq(can_start & blocked)
        if "wait_table" in self.events.shape().members:
            m.d.sync += self.events.wait_table.eq(can_start & ~blocked & self.hold)
        return m

    def _pauses(self, m, start):
        """Cycles that the running instruction asks for between elements, and a counter of them."""
        longest = max(self.intervals.values(), default=2)
        between = Signal(range(longest), name="between", reset_less=True)
        pause = Signal(range(longest), name="pause")
        found = [(cls, Const(cycles - 1)) for cls, cycles in self.intervals.items()]
        with m.If(start):
            m.d.sync += between.eq(self._by_class(m, "interval", found))
        return between, pause

    def _phases(self, m, start, accepted, walkers):
        """What the phase of the running instruction is: whether its second source is being loaded,
        whether it only writes, whether it does not write yet; and which sources are read."""
        loading, flushing = Signal(name="loading"), Signal(name="flushing")
        flushes, alone = Signal(name="flushes"), Signal(name="alone")
        reading = Signal(2, name="reading")
        if self.phases:
            with m.If(start):
                m.d.sync += [
                    loading.eq(self.is_any([c for c, phase in self.phases.items() if phase.load])),
                    flushes.eq(self.is_any([c for c, phase in self.phases.items() if phase.flush])),
                    alone.eq(self.is_any(self.phases)),
                    flushing.eq(0),
                ]
            with m.Elif(accepted & loading):
                m.d.sync += loading.eq(~walkers[1].last)
            with m.Elif(accepted & flushes & walkers[0].last):
                m.d.sync += flushing.eq(1)
        with m.If(flushing):
            m.d.comb += reading.eq(0b00)
        with m.Elif(loading):
            m.d.comb += reading.eq(0b10)
        with m.Elif(alone):
            m.d.comb += reading.eq(0b01)
        with m.Else():
            m.d.comb += reading.eq(0b11)
        return loading, flushing, flushes & ~flushing, reading

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
