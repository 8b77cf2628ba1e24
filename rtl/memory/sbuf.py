"""State buffer: the on-chip memory that feeds the engines and that DMA fills.

One :class:`SbufSlice` per partition holds two address-interleaved banks of 16-byte words. The
engines command all partitions together, so their arbitration is central (:class:`Sbuf`); DMA beats
reach one group of partitions each and take what the engines leave (:class:`SbufGroup`).
"""

from functools import reduce
from operator import or_

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory, MemoryData
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..arch.events import events_layout
from ..interfaces import (
    VECTOR_READ_PORTS,
    VECTOR_WRITE_PORTS,
    DmaReadData,
    SbufBeat,
    SbufMovingPort,
    SbufReadRequest,
    SbufVectorReadPort,
    SbufVectorWritePort,
    SbufWeightsPort,
)
from ..lib.replicate import Replicated
from ..lib.select import RoundRobin

__all__ = ["DMA_PATIENCE_CYCLES", "Sbuf", "SbufGroup", "SbufSlice"]

BANKS = 2
DMA_PATIENCE_CYCLES = 16
"""Cycles that a DMA beat waits for a bank before weights and vector reads yield it."""


def _any(values):
    """OR of a non-empty sequence of values."""
    return reduce(or_, values)


_VECTORS = tuple(f"vector{i}" for i in range(VECTOR_READ_PORTS))

COMMON = {
    "moving_new": 1,
    "moving_bank": 1,
    "moving_offset": 4,
    "weights_new": 1,
    "weights_bank": 1,
    "weights_offsets": 16,
    **{
        f"{vector}_{name}": width
        for vector in _VECTORS
        for name, width in (("new", 1), ("bank", 1), ("offset", 4))
    },
    **{
        name.format(i): width
        for i in range(VECTOR_WRITE_PORTS)
        for name, width in (("put{}_size_log2", 2), ("put{}_mask", 128), ("commit{}", BANKS))
    },
}
"""Inputs of a slice that are the same in all partitions, with their widths."""


class SbufSlice(wiring.Component):
    """One partition: two banks, element extraction for every reader, write combining.

    What is common to all partitions (addresses, choices, byte masks) comes decoded from outside.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Attributes
    ----------
    banks : list of :class:`~amaranth.lib.memory.MemoryData`
        Bank ``b`` holds word ``2 * row + b`` in ``banks[b][row]``, byte 0 lowest.

    Members
    -------
    read_en, read_row : :py:`In(1).array(2)`, :py:`In(row_bits).array(2)`
        Per bank, cycle 1 of a read.
    moving_new, moving_bank, moving_offset
        Cycle 2 of a read: take the word of ``bank`` (``new``) or the one taken last; element's
        offset.
    weights_new, weights_bank, weights_offsets
        The same, with four offsets in 16 bits.
    vector0_new, vector0_bank, vector0_offset, vector1_new, ...
        As ``moving``; each port has a word of its own.
    dma_bank, dma_offset
        As ``moving``; always ``new``.
    moving, weights, vector0, vector1, ..., dma
        : :py:`Out(32)`, :py:`Out(128)`, :py:`Out(32)`, ..., :py:`Out(64)`
        Cycle 3 of a read: the elements. ``dma`` carries the 8 bytes around the offset, the element
        at the offset lowest.
    put0, put0_skip, put0_size_log2, put0_mask, put0_data, put1, ...
        By write port, an element for its word under construction, if it is not to be left out
        (``put0_skip``): ``put0_mask`` has ones in the element's bits of the word.
    commit0, commit1, ... : :py:`In(2)`
        By write port, a bit per bank: write the port's word under construction, as it stood at the
        end of the last cycle, and start an empty one.
    write_row : :py:`In(row_bits).array(2)`
        Per bank, for commits and for DMA.
    dma_write, dma_strobe, dma_data : :py:`In(1).array(2)`, :py:`In(16)`, :py:`In(64)`
        Per bank: write these bytes; the 8 bytes stand in both halves of the word.
    """

    def __init__(self, *, config):
        self.config = config
        depth = config.sbuf_words // BANKS
        self.banks = [MemoryData(shape=128, depth=depth, init=[]) for _ in range(BANKS)]
        row_bits = ceil_log2(depth)
        super().__init__(
            {
                "read_en": In(1).array(BANKS),
                "read_row": In(row_bits).array(BANKS),
                **{name: In(width) for name, width in COMMON.items()},
                "dma_bank": In(1),
                "dma_offset": In(4),
                "moving": Out(32),
                "weights": Out(128),
                **{vector: Out(32) for vector in _VECTORS},
                "dma": Out(64),
                **{f"put{i}": In(1) for i in range(VECTOR_WRITE_PORTS)},
                **{f"put{i}_skip": In(1) for i in range(VECTOR_WRITE_PORTS)},
                **{f"put{i}_data": In(32) for i in range(VECTOR_WRITE_PORTS)},
                "write_row": In(row_bits).array(BANKS),
                "dma_write": In(1).array(BANKS),
                "dma_strobe": In(16),
                "dma_data": In(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        reads, writes = [], []
        commits = [getattr(self, f"commit{i}") for i in range(VECTOR_WRITE_PORTS)]
        for b, bank in enumerate(self.banks):
            m.submodules[f"bank{b}"] = memory = Memory(bank)
            read = memory.read_port()
            write = memory.write_port(granularity=8)
            m.d.comb += [
                read.en.eq(self.read_en[b]),
                read.addr.eq(self.read_row[b]),
                write.addr.eq(self.write_row[b]),
            ]
            reads.append(read.data)
            writes.append(write)

        # Readers: cycle 2 selects the word and the element. Elements are aligned, so the byte shift
        # concerns one 32-bit word.
        def word32(word, offset):
            half = Mux(offset[3], word[64:128], word[0:64])
            return half, Mux(offset[2], half[32:64], half[0:32])

        def shifted(word, offset):
            word = Mux(offset[1], word[16:32], word)
            return Mux(offset[0], word[8:32], word)

        def element(word, offset):
            return shifted(word32(word, offset)[1], offset)

        def held(name):
            word = Signal(128, name=f"{name}_word")
            hold = Signal(128, name=f"{name}_hold", reset_less=True)
            new, bank = getattr(self, f"{name}_new"), getattr(self, f"{name}_bank")
            m.d.comb += word.eq(Mux(new, Mux(bank, reads[1], reads[0]), hold))
            m.d.sync += hold.eq(word)
            return word

        weights = held("weights")
        m.d.sync += self.weights.eq(
            Cat(element(weights, self.weights_offsets.word_select(i, 4)) for i in range(4))
        )
        for name in ("moving", *_VECTORS):
            offset = getattr(self, f"{name}_offset")
            m.d.sync += getattr(self, name).eq(element(held(name), offset))
        half, low = word32(Mux(self.dma_bank, reads[1], reads[0]), self.dma_offset)
        m.d.sync += self.dma.eq(Cat(shifted(low, self.dma_offset)[0:32], half[32:64]))

        # Write combining. Bytes that are not gathered keep whatever stood there: their strobe is 0.
        words = []
        for i, commit in enumerate(commits):
            gathered = Signal(128, name=f"gathered{i}", reset_less=True)
            strobe = Signal(16, name=f"strobe{i}")
            spread = Signal(32, name=f"spread{i}")
            mask = Signal(128, name=f"mask{i}")
            put = getattr(self, f"put{i}") & ~getattr(self, f"put{i}_skip")
            value = getattr(self, f"put{i}_data")
            size = getattr(self, f"put{i}_size_log2")
            m.d.comb += [
                spread.eq(
                    Mux(
                        size[1],
                        value,
                        Mux(size[0], value[:16].replicate(2), value[:8].replicate(4)),
                    )
                ),
                mask.eq(Mux(put, getattr(self, f"put{i}_mask"), 0)),
            ]
            m.d.sync += [
                gathered.eq(gathered ^ ((gathered ^ spread.replicate(4)) & mask)),
                strobe.eq(Mux(commit.any(), 0, strobe) | Cat(mask[8 * j] for j in range(16))),
            ]
            words.append(Cat(gathered, strobe))

        # At most one port commits to a bank, and DMA writes to it only if none does.
        for b, write in enumerate(writes):
            committed = _any(commit[b] for commit in commits)
            word = Signal(128 + 16, name=f"committed{b}")
            m.d.comb += [
                word.eq(
                    _any(Mux(commit[b], own, 0) for commit, own in zip(commits, words, strict=True))
                ),
                write.data.eq(Mux(committed, word[:128], self.dma_data.replicate(2))),
                write.en.eq(Mux(committed, word[128:], Mux(self.dma_write[b], self.dma_strobe, 0))),
            ]
        return m


class SbufGroup(wiring.Component):
    """The partitions that share their DMA access: one write beat and one read beat per cycle.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Attributes
    ----------
    slices : list of :class:`SbufSlice`
        By partition within the group.

    Members
    -------
    write_beat, write_engine : :py:`In(SbufBeat)`, :py:`In(engines)`
        Cycle 0: the beat that is taken, if any, and from whom (one-hot).
    read_beat, read_engine : :py:`In(SbufReadRequest)`, :py:`In(engines)`
    engine_read, engine_row : :py:`In(1).array(2)`, :py:`In(row_bits).array(2)`
        Cycle 0: banks that the engines read, and where; the beat needs the other one.
    commit_row : :py:`In(row_bits).array(2)`
        Cycle 1: where the write ports write, by bank.
    put0, put0_skip, put0_data, put1, ...
        : :py:`In(slices)`, :py:`In(1).array(slices)`, :py:`In(32).array(slices)`, ...
        Cycle 0 of a vector write, by partition.
    moving_new, ..., commit0, ... : :data:`COMMON`
        Passed on to the slices.
    moving, weights, vector0, ...
        : :py:`Out(32).array(slices)`, :py:`Out(128).array(slices)`, :py:`Out(32).array(slices)`
        Cycle 3 of a read.
    read_done, read_data : :py:`Out(engines)`, :py:`Out(64)`
        Cycle 4 of a DMA read: the engine that asked (one-hot), the bytes.
    """

    def __init__(self, *, config):
        self.config = config
        self.row_bits = row_bits = ceil_log2(config.sbuf_words // BANKS)
        engines, count = config.dma_engines, config.group
        self.slices = [SbufSlice(config=config) for _ in range(count)]
        super().__init__(
            {
                "write_beat": In(SbufBeat(config)),
                "write_engine": In(engines),
                "read_beat": In(SbufReadRequest(config)),
                "read_engine": In(engines),
                "engine_read": In(1).array(BANKS),
                "engine_row": In(row_bits).array(BANKS),
                "commit_row": In(row_bits).array(BANKS),
                **{f"put{i}": In(count) for i in range(VECTOR_WRITE_PORTS)},
                **{f"put{i}_skip": In(1).array(count) for i in range(VECTOR_WRITE_PORTS)},
                **{f"put{i}_data": In(32).array(count) for i in range(VECTOR_WRITE_PORTS)},
                **{name: In(width) for name, width in COMMON.items()},
                "moving": Out(32).array(count),
                "weights": Out(128).array(count),
                **{vector: Out(32).array(count) for vector in _VECTORS},
                "read_done": Out(engines),
                "read_data": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        for j, part in enumerate(self.slices):
            m.submodules[f"slice{j}"] = Replicated(part, "sbuf_slice")
            m.d.comb += [getattr(part, name).eq(getattr(self, name)) for name in COMMON]
            for name in ("moving", "weights", *_VECTORS):
                m.d.comb += getattr(self, name)[j].eq(getattr(part, name))
            for i in range(VECTOR_WRITE_PORTS):
                for name in (f"put{i}", f"put{i}_skip", f"put{i}_data"):
                    m.d.comb += getattr(part, name).eq(getattr(self, name)[j])
        self._writes(m)
        self._reads(m)
        return m

    def _slot(self, beat):
        """Number of the first partition within the group."""
        return beat.partition[: ceil_log2(self.config.group)]

    def _writes(self, m):
        # Cycle 1: the beat is spread over the slices and written.
        now = Signal(SbufBeat(self.config), reset_less=True)
        valid = Signal()
        m.d.sync += [valid.eq(self.write_engine.any()), now.eq(self.write_beat)]

        row, bank, offset = now.offset[5:], now.offset[4], now.offset[0:4]
        dma_write = [Signal(name=f"dma_write{b}") for b in range(BANKS)]
        write_row = [Signal(self.row_bits, name=f"write_row{b}") for b in range(BANKS)]
        for b in range(BANKS):
            committed = _any(getattr(self, f"commit{i}")[b] for i in range(VECTOR_WRITE_PORTS))
            m.d.comb += [
                dma_write[b].eq(valid & (bank == b)),
                write_row[b].eq(Mux(committed, self.commit_row[b], row)),
            ]

        slot = self._slot(now)
        low = Signal(8)  # where an element's strobes go within 8 bytes
        for j, part in enumerate(self.slices):
            # Element of slice j in a beat across partitions, and whether the beat reaches it.
            byte, half, word = j % 8, j % 4, j % 2
            one, two, four = (
                now.data.word_select(byte, 8),
                now.data.word_select(half, 16),
                now.data.word_select(word, 32),
            )
            reach = Signal(name=f"reach{j}")
            strobe = Signal(8, name=f"strobe{j}")
            with m.If(~now.across):
                m.d.comb += [
                    reach.eq(slot == j),
                    part.dma_data.eq(now.data),
                    strobe.eq(now.strobe),
                ]
            with m.Elif(now.size_log2 == 0):
                m.d.comb += [
                    reach.eq(1),
                    part.dma_data.eq(one.replicate(8)),
                    strobe.eq(now.strobe[byte].replicate(8) & low),
                ]
            with m.Elif(now.size_log2 == 1):
                m.d.comb += [
                    reach.eq(slot[2:] == j // 4),
                    part.dma_data.eq(two.replicate(4)),
                    strobe.eq(now.strobe.word_select(half, 2).replicate(4) & low),
                ]
            with m.Else():
                m.d.comb += [
                    reach.eq(slot[1:] == j // 2),
                    part.dma_data.eq(four.replicate(2)),
                    strobe.eq(now.strobe.word_select(word, 4).replicate(2) & low),
                ]
            m.d.comb += part.dma_strobe.eq(
                Cat(Mux(reach & ~offset[3], strobe, 0), Mux(reach & offset[3], strobe, 0))
            )
            for b in range(BANKS):
                m.d.comb += [
                    part.write_row[b].eq(write_row[b]),
                    part.dma_write[b].eq(dma_write[b]),
                ]
        with m.Switch(now.size_log2):
            with m.Case(0):
                m.d.comb += low.eq(1 << offset[0:3])
            with m.Case(1):
                m.d.comb += low.eq(Cat((offset[1:3] == i).replicate(2) for i in range(4)))
            with m.Default():
                m.d.comb += low.eq(Cat((offset[2] == i).replicate(4) for i in range(2)))

    def _reads(self, m):
        engines = self.config.dma_engines
        beat = self.read_beat
        granted = self.read_engine.any()

        # Cycle 1: banks read. Cycle 2: slices extract. Cycle 3: elements are put together.
        for b in range(BANKS):
            read_en = Signal(name=f"read_en{b}")
            read_row = Signal(self.row_bits, name=f"read_row{b}")
            m.d.sync += [
                read_en.eq(self.engine_read[b] | (granted & (beat.offset[4] == b))),
                read_row.eq(Mux(self.engine_read[b], self.engine_row[b], beat.offset[5:])),
            ]
            for part in self.slices:
                m.d.comb += [part.read_en[b].eq(read_en), part.read_row[b].eq(read_row)]

        stages = [
            Signal(SbufReadRequest(self.config), name=f"read_cycle{i}", reset_less=True)
            for i in range(1, 4)
        ]
        done = [Signal(engines, name=f"read_engine_cycle{i}") for i in range(1, 4)]
        m.d.sync += [now.eq(past) for now, past in zip(stages, [beat, *stages], strict=False)]
        m.d.sync += [
            now.eq(past) for now, past in zip(done, [self.read_engine, *done], strict=False)
        ]
        m.d.sync += self.read_done.eq(done[-1])
        for part in self.slices:
            m.d.comb += [
                part.dma_bank.eq(stages[1].offset[4]),
                part.dma_offset.eq(stages[1].offset[0:4]),
            ]

        last = stages[2]
        slot = self._slot(last)
        value = Signal(64)

        def across(size_log2):
            """Elements of the consecutive partitions from ``slot``."""
            span = 8 >> size_log2
            with m.Switch(slot[3 - size_log2 :]):
                for i in range(0, len(self.slices), span):
                    with m.Case(i // span):
                        parts = self.slices[i : i + span]
                        m.d.comb += value.eq(Cat(part.dma[: 8 << size_log2] for part in parts))

        with m.If(~last.across):
            with m.Switch(slot):
                for j, part in enumerate(self.slices):
                    with m.Case(j):
                        m.d.comb += value.eq(part.dma)
        with m.Elif(last.size_log2 == 0):
            across(0)
        with m.Elif(last.size_log2 == 1):
            across(1)
        with m.Else():
            across(2)
        m.d.sync += self.read_data.eq(value)


class Sbuf(wiring.Component):
    """The state buffer of all partitions.

    Per bank and cycle there is one read and one write. Reads go to moving, weights, vector ports 0,
    1 and 2, DMA in this order; writes to the vector ports, DMA. Moving and vector writes are never
    refused: the engines see to it that no two write ports commit to the same bank in a cycle. A DMA
    beat that has been refused its bank :data:`DMA_PATIENCE_CYCLES` times is starving: it goes
    before other beats, weights and all vector reads yield the bank to DMA reads, and the engines,
    which see ``starving``, leave gaps in their writes. A starving write is made in a cycle in which
    no port commits to its bank: gaps help only where they meet.

    Thus a DMA read that has its group for itself waits at most ``DMA_PATIENCE_CYCLES + 1`` cycles
    for weights and vector reads; cycles in which moving takes the bank come on top. Engines that
    want the same group take turns.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Attributes
    ----------
    slices : list of :class:`SbufSlice`
        By partition. A simulator finds byte ``i`` of partition ``p`` in
        ``slices[p].banks[i // 16 % 2][i // 32]``.

    Members
    -------
    moving : :py:`In(SbufMovingPort)`
    weights : :py:`In(SbufWeightsPort)`
    vector_read : :py:`In(SbufVectorReadPort).array(VECTOR_READ_PORTS)`
        First and second source of the vector engine, source of the scalar engine.
    vector_write : :py:`In(SbufVectorWritePort).array(VECTOR_WRITE_PORTS)`
        Of the vector engine, of the scalar engine.
    dma_write : :py:`In(stream.Signature(SbufBeat)).array(engines)`
    dma_read : :py:`In(stream.Signature(SbufReadRequest)).array(engines)`
        Any engine reaches any partition; per group of partitions one beat of each kind per cycle,
        in turn. An engine that goes across the partitions has its turn for all beats of a group.
    dma_read_data : :py:`Out(DmaReadData).array(engines)`
    starving : :py:`Out(2)`
        Per bank, registered: a DMA beat has waited too long.
    events : :py:`Out(events_layout("sbuf"))`
        Registered.

    Timing
    ------
    Commands and beats: one per port and cycle. Data:
    :data:`~..interfaces.SBUF_READ_CYCLES` (DMA: :data:`~..interfaces.DMA_READ_CYCLES`) cycles after
    the command was taken. A read taken in the cycle after a write sees it; one taken in the same
    cycle sees the old bytes. ::

        cycle          0  1  2  3  4
        command valid  1  0  0  0  0
        banks read     .  1  0  0  0
        word held      .  .  1  0  0
        data           .  .  .  1  0
        DMA data       .  .  .  .  1
    """

    def __init__(self, *, config):
        self.config = config
        groups = config.partitions // config.group
        self._groups = [SbufGroup(config=config) for _ in range(groups)]
        self.slices = [part for group in self._groups for part in group.slices]
        engines = config.dma_engines
        super().__init__(
            {
                "moving": In(SbufMovingPort(config)),
                "weights": In(SbufWeightsPort(config)),
                "vector_read": In(SbufVectorReadPort(config)).array(VECTOR_READ_PORTS),
                "vector_write": In(SbufVectorWritePort(config)).array(VECTOR_WRITE_PORTS),
                "dma_write": In(stream.Signature(SbufBeat(config))).array(engines),
                "dma_read": In(stream.Signature(SbufReadRequest(config))).array(engines),
                "dma_read_data": Out(DmaReadData).array(engines),
                "starving": Out(BANKS),
                "events": Out(events_layout("sbuf")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        groups = self._groups
        for g, group in enumerate(groups):
            m.submodules[f"group{g}"] = Replicated(group, "sbuf_group")
        for part in self.slices:
            # In an export one group stands for all: the slices of the others stay unused.
            part._MustUse__used = True

        read_yield = Signal(BANKS)  # banks that weights and vector reads leave to DMA
        common = {name: Signal(width, name=name) for name, width in COMMON.items()}
        for group in groups:
            m.d.comb += [getattr(group, name).eq(value) for name, value in common.items()]
        taken = self._engine_reads(m, common, read_yield)
        committed = self._vector_writes(m, common)
        self._dma(m, taken, committed, read_yield)
        return m

    def _engine_reads(self, m, common, read_yield):
        """Arbitrate moving, weights and vector reads; return the banks they take."""
        ports = {"moving": self.moving, "weights": self.weights}
        ports |= zip(_VECTORS, self.vector_read, strict=True)
        taken = Signal(BANKS)
        rows = Signal(data.ArrayLayout(self._groups[0].row_bits, BANKS))
        busy = [0] * BANKS
        for name, port in ports.items():
            bank = port.word[0]
            wants = [port.valid & port.new & (bank == b) for b in range(BANKS)]
            if port is self.moving:
                accepted = port.valid
            else:
                blocked = Signal(BANKS, name=f"{name}_blocked")
                m.d.comb += blocked.eq(Cat(busy[b] | read_yield[b] for b in range(BANKS)))
                m.d.comb += port.ready.eq(~(port.new & Mux(bank, blocked[1], blocked[0])))
                wants = [want & ~blocked[b] for b, want in enumerate(wants)]
                accepted = port.valid & port.ready
            for b, want in enumerate(wants):
                with m.If(want):
                    m.d.comb += rows[b].eq(port.word[1:])
                busy[b] = busy[b] | want

            # Two registers: the slices need the choice one cycle after the address.
            offset = port.offsets.as_value() if name == "weights" else port.offset
            chosen = Signal(2 + len(offset), name=f"{name}_cycle1", reset_less=True)
            plural = "s" if name == "weights" else ""
            m.d.sync += [
                chosen.eq(Cat(accepted & port.new, bank, offset)),
                Cat(
                    common[f"{name}_new"], common[f"{name}_bank"], common[f"{name}_offset{plural}"]
                ).eq(chosen),
            ]

        m.d.comb += taken.eq(Cat(busy))
        for group in self._groups:
            for b in range(BANKS):
                m.d.comb += [group.engine_read[b].eq(taken[b]), group.engine_row[b].eq(rows[b])]
        for p in range(self.config.partitions):
            group, j = self._groups[p // self.config.group], p % self.config.group
            m.d.comb += [port.data[p].eq(getattr(group, name)[j]) for name, port in ports.items()]

        m.d.sync += [
            self.events.conflict_weights.eq(self.weights.valid & ~self.weights.ready),
            self.events.conflict_vector_read.eq(
                sum(port.valid & ~port.ready for port in self.vector_read)
            ),
        ]
        return taken

    def _vector_writes(self, m, common):
        """Pass the elements of the write ports to the slices; return the banks committed to."""
        count = self.config.group
        all_commits, rows = [], []
        for n, port in enumerate(self.vector_write):
            size = port.size_log2
            put_bytes = []
            for i in range(16):
                same = port.offset[2:] == i // 4
                half = port.offset[1] == i // 2 % 2
                byte = port.offset[0] == i % 2
                put_bytes.append(same & (size[1] | (half & (size[0] | byte))))
            m.d.comb += [
                common[f"put{n}_mask"].eq(Cat(put.replicate(8) for put in put_bytes)),
                common[f"put{n}_size_log2"].eq(size),
            ]

            commits = Signal(BANKS, name=f"commits{n}")
            m.d.comb += commits.eq(
                Cat(port.valid & port.commit & (port.word[0] == b) for b in range(BANKS))
            )
            m.d.sync += common[f"commit{n}"].eq(commits)
            all_commits.append(commits)
            rows.append([Mux(commit, port.word[1:], 0) for commit in commits])

            put = Signal(self.config.partitions, name=f"put{n}")
            m.d.comb += put.eq(Mux(port.valid, port.mask, 0))
            for g, group in enumerate(self._groups):
                m.d.comb += getattr(group, f"put{n}").eq(put.word_select(g, count))
                values, skips = (getattr(group, f"put{n}_{name}") for name in ("data", "skip"))
                m.d.comb += [values[j].eq(port.data[g * count + j]) for j in range(count)]
                m.d.comb += [skips[j].eq(port.skip[g * count + j]) for j in range(count)]

        # No two ports commit to the same bank, so that there is nothing to choose.
        for b, here in enumerate(zip(*rows, strict=True)):
            commit_row = Signal(self._groups[0].row_bits, name=f"commit_row{b}", reset_less=True)
            m.d.sync += commit_row.eq(_any(here))
            m.d.comb += [group.commit_row[b].eq(commit_row) for group in self._groups]
        return _any(all_commits)

    def _hold(self, m, turn, beat, wanted):
        """Let an engine that goes across the partitions pass through a group at once.

        A group takes several beats. If engines that do the same took turns in between, they would
        stay together from group to group, and leave all others idle. So the first one gets ahead,
        and in the end each has a group for itself.
        """
        group_log2 = ceil_log2(self.config.group)
        most = max(1, self.config.group // 2)  # beats of a group, with elements of 4 bytes
        held = Signal(range(most))  # so that nobody holds on to it
        last = (Const(7, 3) >> beat.size_log2)[:group_log2] | beat.partition[:group_log2]
        m.d.comb += turn.hold.eq(beat.across & ~last.all() & (held != most - 1))
        with m.If(~wanted.any()):
            m.d.sync += held.eq(0)  # every run starts alike
        with m.Elif(turn.grant.any()):
            m.d.sync += held.eq(Mux(turn.hold, held + 1, 0))

    def _dma(self, m, taken, committed, read_yield):
        """Offer the beats to their groups, return the data, watch over those that wait."""
        groups, engines = self._groups, self.config.dma_engines
        group_log2 = ceil_log2(self.config.group)
        starving = {}
        for kind, beats, used in (
            ("write", self.dma_write, committed),
            ("read", self.dma_read, taken),
        ):
            # Per engine: whether the bank is free, and whether it was not for too long.
            free = Signal(engines, name=f"{kind}_free")
            starved = Signal(engines, name=f"{kind}_starved")
            banks = Cat(beat.p.offset[4] for beat in beats)
            m.d.comb += free.eq(
                ~((banks & used[1].replicate(engines)) | (~banks & used[0].replicate(engines)))
            )
            for e, beat in enumerate(beats):
                waited = Signal(range(DMA_PATIENCE_CYCLES + 1), name=f"{kind}{e}_waited")
                m.d.comb += starved[e].eq(waited == DMA_PATIENCE_CYCLES)
                with m.If(~beat.valid | beat.ready):
                    m.d.sync += waited.eq(0)
                with m.Elif(~free[e] & ~starved[e]):
                    m.d.sync += waited.eq(waited + 1)

            # Per group the engines take turns; those whose bank is taken are passed over, those
            # that starve come first.
            delayed = []
            grants = []
            for g, group in enumerate(groups):
                wanted = Signal(engines, name=f"{kind}_wanted{g}")
                m.d.comb += wanted.eq(
                    Cat(beat.valid & (beat.p.partition[group_log2:] == g) for beat in beats)
                )
                able = Signal(engines, name=f"{kind}_able{g}")
                urgent = Signal(engines, name=f"{kind}_urgent{g}")
                turn = RoundRobin(count=engines)
                # Every run starts alike.
                m.submodules[f"{kind}_turn{g}"] = ResetInserter(~wanted.any())(turn)
                m.d.comb += [
                    able.eq(wanted & free),
                    urgent.eq(able & starved),
                    turn.requests.eq(Mux(urgent.any(), urgent, able)),
                    turn.take.eq(1),
                    getattr(group, f"{kind}_engine").eq(turn.grant),
                ]
                granted = getattr(group, f"{kind}_beat")
                with m.Switch(turn.grant):
                    for e, beat in enumerate(beats):
                        with m.Case(1 << e):
                            m.d.comb += granted.eq(beat.p)
                self._hold(m, turn, granted, wanted)
                grants.append(turn.grant)
                delayed.append((wanted & ~turn.grant).any())
            served = Signal(engines, name=f"{kind}_served")
            m.d.comb += served.eq(_any(grants))
            m.d.comb += [beat.ready.eq(served[e]) for e, beat in enumerate(beats)]
            m.d.sync += self.events[f"conflict_dma_{kind}"].eq(sum(delayed))
            hungry = starved & ~served
            starving[kind] = Cat((hungry & ~banks).any(), (hungry & banks).any())

        m.d.sync += [
            read_yield.eq(starving["read"]),
            self.starving.eq(starving["read"] | starving["write"]),
        ]

        for e, answer in enumerate(self.dma_read_data):
            m.d.comb += answer.valid.eq(_any(group.read_done[e] for group in groups))
            with m.Switch(Cat(group.read_done[e] for group in groups)):
                for g, group in enumerate(groups):
                    with m.Case(1 << g):
                        m.d.comb += answer.data.eq(group.read_data)
