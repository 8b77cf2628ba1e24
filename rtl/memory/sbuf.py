"""State buffer: the on-chip memory that feeds the tensor and vector engines and that DMA fills.

One :class:`SbufSlice` per partition holds two address-interleaved banks of 16-byte words. The
engines command all partitions together, so their arbitration is central (:class:`Sbuf`); DMA beats
reach one group of partitions each and take what the engines leave (:class:`SbufGroup`).
"""

from functools import reduce
from operator import or_

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory, MemoryData
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from ..arch.events import events_layout
from ..interfaces import (
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


def _select(chosen, values):
    """The value whose ``chosen`` bit is set (0 if none): an AND-OR selector for one-hot choices."""
    values = [Value.cast(value) for value in values]
    return _any(
        value & bit.replicate(len(value)) for bit, value in zip(chosen, values, strict=True)
    )


class SbufSlice(wiring.Component):
    """One partition: two banks, element extraction for every reader, write combining.

    Instantiated once per partition by :class:`Sbuf`. What is common to all partitions (addresses,
    choices, byte masks) comes decoded from outside.

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
    weights_new, weights_bank, weights_offsets : four offsets
    vector_new, vector_bank, vector_offset
    dma_bank, dma_offset
        As ``moving``; always ``new``.
    moving, weights, vector, dma : :py:`Out(32)`, :py:`Out(128)`, :py:`Out(32)`, :py:`Out(64)`
        Cycle 3 of a read: the elements. ``dma`` carries the 8 bytes around the offset, the element
        at the offset lowest.
    put, put_size_log2, put_mask, put_data
        An element for the word under construction: ``put_mask`` has ones in its bits of the word.
    commit, write_row : :py:`In(1).array(2)`, :py:`In(row_bits).array(2)`
        Per bank: write the word under construction, as it stood at the end of the last cycle, and
        start an empty one.
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
                "moving_new": In(1),
                "moving_bank": In(1),
                "moving_offset": In(4),
                "weights_new": In(1),
                "weights_bank": In(1),
                "weights_offsets": In(4).array(4),
                "vector_new": In(1),
                "vector_bank": In(1),
                "vector_offset": In(4),
                "dma_bank": In(1),
                "dma_offset": In(4),
                "moving": Out(32),
                "weights": Out(128),
                "vector": Out(32),
                "dma": Out(64),
                "put": In(1),
                "put_size_log2": In(2),
                "put_mask": In(128),
                "put_data": In(32),
                "commit": In(1).array(BANKS),
                "write_row": In(row_bits).array(BANKS),
                "dma_write": In(1).array(BANKS),
                "dma_strobe": In(16),
                "dma_data": In(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        reads, writes = [], []
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

        def held(name, new, bank):
            word = Signal(128, name=f"{name}_word")
            hold = Signal(128, name=f"{name}_hold", reset_less=True)
            m.d.comb += word.eq(Mux(new, Mux(bank, reads[1], reads[0]), hold))
            m.d.sync += hold.eq(word)
            return word

        moving = held("moving", self.moving_new, self.moving_bank)
        weights = held("weights", self.weights_new, self.weights_bank)
        vector = held("vector", self.vector_new, self.vector_bank)
        m.d.sync += [
            self.moving.eq(element(moving, self.moving_offset)),
            self.weights.eq(Cat(element(weights, offset) for offset in self.weights_offsets)),
            self.vector.eq(element(vector, self.vector_offset)),
        ]
        half, low = word32(Mux(self.dma_bank, reads[1], reads[0]), self.dma_offset)
        m.d.sync += self.dma.eq(Cat(shifted(low, self.dma_offset)[0:32], half[32:64]))

        # Write combining. Bytes that are not gathered keep whatever stood there: their strobe is 0.
        gathered = Signal(128, reset_less=True)
        strobe = Signal(16)
        spread = Signal(32)
        size = self.put_size_log2
        m.d.comb += spread.eq(
            Mux(
                size[1],
                self.put_data,
                Mux(size[0], self.put_data[:16].replicate(2), self.put_data[:8].replicate(4)),
            )
        )
        mask = Signal(128)
        m.d.comb += mask.eq(Mux(self.put, self.put_mask, 0))
        m.d.sync += [
            gathered.eq(gathered ^ ((gathered ^ spread.replicate(4)) & mask)),
            strobe.eq(
                Mux(self.commit[0] | self.commit[1], 0, strobe)
                | Cat(mask[8 * i] for i in range(16))
            ),
        ]

        for b, write in enumerate(writes):
            m.d.comb += [
                write.data.eq(Mux(self.commit[b], gathered, self.dma_data.replicate(2))),
                write.en.eq(
                    Mux(self.commit[b], strobe, Mux(self.dma_write[b], self.dma_strobe, 0))
                ),
            ]
        return m


class SbufGroup(wiring.Component):
    """DMA access to one group of partitions: one write beat and one read beat per cycle.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    write_requests, read_requests : :py:`In(engines)`
        Engines whose beat is for this group and whose bank is free.
    write_grant, read_grant : :py:`Out(engines)`
        One-hot, combinational: the engine that is served now.
    write_beats : :py:`In(SbufBeat).array(engines)`
    read_beats : :py:`In(SbufReadRequest).array(engines)`
    engine_read, engine_row : :py:`In(1).array(2)`, :py:`In(row_bits).array(2)`
        Banks that the engines read, and where (cycle 0); DMA gets the others.
    commit, commit_row : :py:`In(1).array(2)`, :py:`In(row_bits)`
        Banks that the vector engine writes, and where (cycle 1).
    read_en, read_row, dma_bank, dma_offset, write_row, dma_write, dma_strobe, dma_data, dma
        Of the slices; see :class:`SbufSlice`.
    read_done : :py:`Out(engines)`
        Cycle 3 of a DMA read: the engine that asked.
    read_data : :py:`Out(64)`
        Cycle 3 of a DMA read: the bytes (combinational).
    """

    def __init__(self, *, config):
        self.config = config
        self.row_bits = row_bits = ceil_log2(config.sbuf_words // BANKS)
        engines, slices = config.dma_engines, config.group
        super().__init__(
            {
                "write_requests": In(engines),
                "write_grant": Out(engines),
                "write_beats": In(SbufBeat(config)).array(engines),
                "read_requests": In(engines),
                "read_grant": Out(engines),
                "read_beats": In(SbufReadRequest(config)).array(engines),
                "engine_read": In(1).array(BANKS),
                "engine_row": In(row_bits).array(BANKS),
                "commit": In(1).array(BANKS),
                "commit_row": In(row_bits),
                "read_en": Out(1).array(BANKS),
                "read_row": Out(row_bits).array(BANKS),
                "dma_bank": Out(1),
                "dma_offset": Out(4),
                "write_row": Out(row_bits).array(BANKS),
                "dma_write": Out(1).array(BANKS),
                "dma_strobe": Out(16).array(slices),
                "dma_data": Out(64).array(slices),
                "dma": In(64).array(slices),
                "read_done": Out(engines),
                "read_data": Out(64),
            }
        )

    def elaborate(self, platform):
        m = Module()
        self._writes(m)
        self._reads(m)
        return m

    def _arbitrate(self, m, name, requests, grant, beats, layout):
        """Choose an engine; return its beat and whether there is one."""
        m.submodules[name] = turn = RoundRobin(count=len(requests))
        beat = Signal(layout, name=f"{name}_beat")
        m.d.comb += [
            turn.requests.eq(requests),
            turn.take.eq(1),
            grant.eq(turn.grant),
            beat.as_value().eq(_select(grant, beats)),
        ]
        return beat

    def _slot(self, beat):
        """Number of the first partition within the group (zero width if the group has one)."""
        return beat.partition[: ceil_log2(self.config.group)]

    def _writes(self, m):
        layout = SbufBeat(self.config)
        beat = self._arbitrate(
            m, "write_turn", self.write_requests, self.write_grant, self.write_beats, layout
        )
        # Cycle 1: the beat is spread over the slices and written.
        now = Signal(layout, reset_less=True)
        valid = Signal()
        m.d.sync += [valid.eq(self.write_grant.any()), now.eq(beat)]

        row, bank, offset = now.offset[5:], now.offset[4], now.offset[0:4]
        for b in range(BANKS):
            m.d.comb += [
                self.dma_write[b].eq(valid & (bank == b)),
                self.write_row[b].eq(Mux(self.commit[b], self.commit_row, row)),
            ]

        slot = self._slot(now)
        low = Signal(8)  # where an element's strobes go within 8 bytes
        for j in range(self.config.group):
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
                    self.dma_data[j].eq(now.data),
                    strobe.eq(now.strobe),
                ]
            with m.Elif(now.size_log2 == 0):
                m.d.comb += [
                    reach.eq(1),
                    self.dma_data[j].eq(one.replicate(8)),
                    strobe.eq(now.strobe[byte].replicate(8) & low),
                ]
            with m.Elif(now.size_log2 == 1):
                m.d.comb += [
                    reach.eq(slot[2:] == j // 4),
                    self.dma_data[j].eq(two.replicate(4)),
                    strobe.eq(now.strobe.word_select(half, 2).replicate(4) & low),
                ]
            with m.Else():
                m.d.comb += [
                    reach.eq(slot[1:] == j // 2),
                    self.dma_data[j].eq(four.replicate(2)),
                    strobe.eq(now.strobe.word_select(word, 4).replicate(2) & low),
                ]
            m.d.comb += self.dma_strobe[j].eq(
                Cat(
                    Mux(reach & ~offset[3], strobe, 0)[0:8],
                    Mux(reach & offset[3], strobe, 0)[0:8],
                )
            )
        with m.Switch(now.size_log2):
            with m.Case(0):
                m.d.comb += low.eq(1 << offset[0:3])
            with m.Case(1):
                m.d.comb += low.eq(Cat((offset[1:3] == i).replicate(2) for i in range(4)))
            with m.Default():
                m.d.comb += low.eq(Cat((offset[2] == i).replicate(4) for i in range(2)))

    def _reads(self, m):
        engines = self.config.dma_engines
        layout = SbufReadRequest(self.config)
        beat = self._arbitrate(
            m, "read_turn", self.read_requests, self.read_grant, self.read_beats, layout
        )
        granted = self.read_grant.any()

        # Cycle 1: banks read. Cycle 2: slices extract. Cycle 3: elements are put together.
        for b in range(BANKS):
            m.d.sync += [
                self.read_en[b].eq(self.engine_read[b] | granted & (beat.offset[4] == b)),
                self.read_row[b].eq(Mux(self.engine_read[b], self.engine_row[b], beat.offset[5:])),
            ]
        stages = [Signal(layout, name=f"read{i}", reset_less=True) for i in range(1, 4)]
        done = [Signal(engines, name=f"read{i}_engine") for i in range(1, 4)]
        m.d.sync += [now.eq(past) for now, past in zip(stages, [beat, *stages], strict=False)]
        m.d.sync += [
            now.eq(past) for now, past in zip(done, [self.read_grant, *done], strict=False)
        ]
        m.d.comb += [
            self.dma_bank.eq(stages[1].offset[4]),
            self.dma_offset.eq(stages[1].offset[0:4]),
            self.read_done.eq(done[2]),
        ]

        last = stages[2]
        slot = self._slot(last)
        slices = list(self.dma)
        across = [
            Cat(value[: 8 << size] for value in slices[first : first + (8 >> size)])
            for size in range(3)
            for first in range(0, len(slices), 8 >> size)
        ]
        counts = [max(1, len(slices) >> (3 - size)) for size in range(3)]
        with m.If(~last.across):
            with m.Switch(slot):
                for j, value in enumerate(slices):
                    with m.Case(j):
                        m.d.comb += self.read_data.eq(value)
        with m.Elif(last.size_log2 == 0):
            m.d.comb += self.read_data.eq(across[0])
        with m.Elif(last.size_log2 == 1):
            with m.Switch(slot[2:]):
                for i in range(counts[1]):
                    with m.Case(i):
                        m.d.comb += self.read_data.eq(across[counts[0] + i])
        with m.Else():
            with m.Switch(slot[1:]):
                for i in range(counts[2]):
                    with m.Case(i):
                        m.d.comb += self.read_data.eq(across[counts[0] + counts[1] + i])


class Sbuf(wiring.Component):
    """The state buffer of all partitions.

    Per bank and cycle there is one read and one write. Reads go to moving, weights, vector, DMA in
    this order; writes to vector, DMA. Moving and vector writes are never refused. A DMA beat that
    has been refused its bank :data:`DMA_PATIENCE_CYCLES` times is starving: weights and vector reads
    yield that bank to DMA reads, and the vector engine, which sees ``starving``, leaves a gap in its
    writes. So, cycles in which moving takes the bank not counted, a DMA read is taken at most
    ``DMA_PATIENCE_CYCLES + dma_engines`` cycles after it was offered.

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
    vector_read : :py:`In(SbufVectorReadPort)`
    vector_write : :py:`In(SbufVectorWritePort)`
    dma_write : :py:`In(stream.Signature(SbufBeat)).array(engines)`
    dma_read : :py:`In(stream.Signature(SbufReadRequest)).array(engines)`
        Any engine reaches any partition; per group of partitions one beat of each kind per cycle,
        in turn.
    dma_read_data : :py:`Out(DmaReadData).array(engines)`
    starving : :py:`Out(2)`
        Per bank, registered: a DMA beat has waited too long.
    events : :py:`Out(events_layout("sbuf"))`
        Registered.

    Timing
    ------
    Commands and beats: one per port and cycle. Data:
    :data:`~..interfaces.SBUF_READ_CYCLES` (DMA: :data:`~..interfaces.DMA_READ_CYCLES`) cycles after
    the command was taken. A read taken in the cycle after a write sees it; in the same cycle it sees
    the old bytes. ::

        cycle          0  1  2  3  4
        command valid  1  0  0  0  0
        banks read     .  1  0  0  0
        word held      .  .  1  0  0
        data           .  .  .  1  0
        DMA data       .  .  .  .  1
    """

    def __init__(self, *, config):
        self.config = config
        self.slices = [SbufSlice(config=config) for _ in range(config.partitions)]
        engines = config.dma_engines
        super().__init__(
            {
                "moving": In(SbufMovingPort(config)),
                "weights": In(SbufWeightsPort(config)),
                "vector_read": In(SbufVectorReadPort(config)),
                "vector_write": In(SbufVectorWritePort(config)),
                "dma_write": In(stream.Signature(SbufBeat(config))).array(engines),
                "dma_read": In(stream.Signature(SbufReadRequest(config))).array(engines),
                "dma_read_data": Out(DmaReadData).array(engines),
                "starving": Out(BANKS),
                "events": Out(events_layout("sbuf")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        groups = [SbufGroup(config=config) for _ in range(config.partitions // config.group)]
        for g, group in enumerate(groups):
            m.submodules[f"group{g}"] = group
        for p, part in enumerate(self.slices):
            m.submodules[f"slice{p}"] = Replicated(part, "sbuf_slice")

        read_yield = Signal(BANKS)  # banks that weights and vector reads leave to DMA
        taken = self._engine_reads(m, groups, read_yield)
        committed = self._vector_writes(m, groups)
        self._dma(m, groups, taken, committed, read_yield)
        return m

    def _engine_reads(self, m, groups, read_yield):
        """Arbitrate moving, weights and vector reads; return the banks they take."""
        ports = (self.moving, self.weights, self.vector_read)
        names = ("moving", "weights", "vector")
        taken = Signal(BANKS)
        rows = Signal(data.ArrayLayout(groups[0].row_bits, BANKS))
        busy = [0] * BANKS
        for name, port in zip(names, ports, strict=True):
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
            chosen = Signal(2 + len(offset), name=f"{name}_cycle1")
            chosen_next = Signal.like(chosen, name=f"{name}_cycle2")
            m.d.sync += [
                chosen.eq(Cat(accepted & port.new, bank, offset)),
                chosen_next.eq(chosen),
            ]
            for part in self.slices:
                m.d.comb += [
                    getattr(part, f"{name}_new").eq(chosen_next[0]),
                    getattr(part, f"{name}_bank").eq(chosen_next[1]),
                ]
                if name == "weights":
                    for i, out in enumerate(part.weights_offsets):
                        m.d.comb += out.eq(chosen_next[2 + 4 * i : 6 + 4 * i])
                else:
                    m.d.comb += getattr(part, f"{name}_offset").eq(chosen_next[2:])

        m.d.comb += taken.eq(Cat(busy))
        for group in groups:
            for b in range(BANKS):
                m.d.comb += [group.engine_read[b].eq(taken[b]), group.engine_row[b].eq(rows[b])]
        for p, part in enumerate(self.slices):
            group = groups[p // self.config.group]
            m.d.comb += [
                self.moving.data[p].eq(part.moving),
                self.weights.data[p].eq(part.weights),
                self.vector_read.data[p].eq(part.vector),
                part.dma_bank.eq(group.dma_bank),
                part.dma_offset.eq(group.dma_offset),
            ]
            for b in range(BANKS):
                m.d.comb += [
                    part.read_en[b].eq(group.read_en[b]),
                    part.read_row[b].eq(group.read_row[b]),
                ]

        m.d.sync += [
            self.events.conflict_weights.eq(self.weights.valid & ~self.weights.ready),
            self.events.conflict_vector_read.eq(self.vector_read.valid & ~self.vector_read.ready),
        ]
        return taken

    def _vector_writes(self, m, groups):
        """Pass the vector engine's elements to the slices; return the banks it commits to."""
        port = self.vector_write
        size = port.size_log2
        put_bytes = Signal(16)
        for i in range(16):
            same = port.offset[2:] == i // 4
            half = port.offset[1] == i // 2 % 2
            byte = port.offset[0] == i % 2
            m.d.comb += put_bytes[i].eq(same & (size[1] | half & (size[0] | byte)))
        put_mask = Signal(128)
        m.d.comb += put_mask.eq(Cat((port.valid & put_bytes[i]).replicate(8) for i in range(16)))

        commits = Signal(BANKS)
        m.d.comb += commits.eq(
            Cat(port.valid & port.commit & (port.word[0] == b) for b in range(BANKS))
        )
        commit = Signal(BANKS)
        commit_row = Signal(groups[0].row_bits, reset_less=True)
        m.d.sync += [commit.eq(commits), commit_row.eq(port.word[1:])]

        for group in groups:
            m.d.comb += group.commit_row.eq(commit_row)
            for b in range(BANKS):
                m.d.comb += group.commit[b].eq(commit[b])
        for p, part in enumerate(self.slices):
            group, j = groups[p // self.config.group], p % self.config.group
            m.d.comb += [
                part.put.eq(port.valid & port.mask[p]),
                part.put_size_log2.eq(size),
                part.put_mask.eq(put_mask),
                part.put_data.eq(port.data[p]),
                part.dma_strobe.eq(group.dma_strobe[j]),
                part.dma_data.eq(group.dma_data[j]),
                group.dma[j].eq(part.dma),
            ]
            for b in range(BANKS):
                m.d.comb += [
                    part.commit[b].eq(commit[b]),
                    part.write_row[b].eq(group.write_row[b]),
                    part.dma_write[b].eq(group.dma_write[b]),
                ]
        return commits

    def _dma(self, m, groups, taken, committed, read_yield):
        """Offer the beats to their groups, return the data, watch over those that wait."""
        config = self.config
        starving = {}
        for kind, beats, used in (
            ("write", self.dma_write, committed),
            ("read", self.dma_read, taken),
        ):
            wanted = [[] for _ in groups]  # per group: engines with a beat for it
            free = []
            starves = [[] for _ in range(BANKS)]
            for e, beat in enumerate(beats):
                bank = beat.p.offset[4]
                number = beat.p.partition[ceil_log2(config.group) :]
                for g, wants in enumerate(wanted):
                    want = Signal(name=f"{kind}{e}_wants{g}")
                    m.d.comb += want.eq(beat.valid & (number == g))
                    wants.append(want)
                can = Signal(name=f"{kind}{e}_free")
                m.d.comb += can.eq(~Mux(bank, used[1], used[0]))
                free.append(can)

                waited = Signal(range(DMA_PATIENCE_CYCLES + 1), name=f"{kind}{e}_waited")
                starved = waited == DMA_PATIENCE_CYCLES
                with m.If(~beat.valid | beat.ready):
                    m.d.sync += waited.eq(0)
                with m.Elif(~can & ~starved):
                    m.d.sync += waited.eq(waited + 1)
                for b in range(BANKS):
                    starves[b].append(starved & beat.valid & ~beat.ready & (bank == b))
            starving[kind] = [_any(terms) for terms in starves]

            delayed = []
            ready = [[] for _ in beats]
            for g, group in enumerate(groups):
                requests = getattr(group, f"{kind}_requests")
                grant = getattr(group, f"{kind}_grant")
                inputs = getattr(group, f"{kind}_beats")
                m.d.comb += requests.eq(Cat(wanted[g]) & Cat(free))
                for e, beat in enumerate(beats):
                    m.d.comb += inputs[e].eq(beat.p)
                    ready[e].append(grant[e])
                delayed.append((Cat(wanted[g]) & ~grant).any())
            for e, beat in enumerate(beats):
                m.d.comb += beat.ready.eq(_any(ready[e]))
            m.d.sync += self.events[f"conflict_dma_{kind}"].eq(sum(delayed))

        m.d.sync += [
            read_yield.eq(Cat(starving["read"])),
            self.starving.eq(Cat(r | w for r, w in zip(*starving.values(), strict=True))),
        ]

        for e, answer in enumerate(self.dma_read_data):
            chosen = [group.read_done[e] for group in groups]
            m.d.sync += [
                answer.valid.eq(_any(chosen)),
                answer.data.eq(_select(chosen, [group.read_data for group in groups])),
            ]
