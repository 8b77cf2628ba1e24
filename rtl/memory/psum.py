"""PSUM: the memory below the array that overwrites with, or adds, the sums it is sent.

One slice per column; commands enter at the first quad of columns and ripple from quad to quad with
the sums. The vector and the scalar engine read all partitions at once.
"""

from amaranth.hdl import Module, Mux, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory, MemoryData
from amaranth.lib.wiring import In, Out

from ..arith.fma import Sum, addend, align_add, round_sum
from ..interfaces import PSUM_READ_PORTS, SBUF_READ_CYCLES, PsumReadPort
from ..lib.replicate import Replicated

__all__ = ["PSUM_RAW_CYCLES", "Psum", "PsumCommand", "PsumRead", "PsumSlice"]

PSUM_RAW_CYCLES = 3
"""From a sum's command to the first command that may accumulate onto the result."""

_QUAD = 4
_IDENTITY = 0x80000000  # -0: adding it changes nothing, the sign of a zero included


def PsumCommand(config):
    """What to do with one column of sums.

    Members
    -------
    valid : 1 bit
    accumulate : 1 bit
        Add to the old value instead of overwriting it.
    bank, word : where
    columns : number of partitions, from 0, that take part
    """
    return data.StructLayout(
        {
            "valid": 1,
            "accumulate": 1,
            "bank": config.psum_bank_bits,
            "word": config.psum_word_bits,
            "columns": config.partition_bits + 1,
        }
    )


def PsumRead(config):
    """A read of one port: ``valid``, ``bank``, ``word``."""
    return data.StructLayout(
        {"valid": 1, "bank": config.psum_bank_bits, "word": config.psum_word_bits}
    )


class PsumSlice(wiring.Component):
    """PSUM of one partition.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    index : :py:`In(config.partition_bits)`
        Constant: number of the partition.
    command : :py:`In(PsumCommand(config))`
    sum : :py:`In(32)`
        Binary32, in the cycle of its command.
    read : :py:`In(PsumRead(config)).array(PSUM_READ_PORTS)`
        In the same cycle, reads must be in different banks, and in others than a command.
    data : :py:`Out(32).array(PSUM_READ_PORTS)`

    Attributes
    ----------
    banks : list of :class:`~amaranth.lib.memory.MemoryData`
        Contents, for test benches.

    Timing
    ------
    One command and one read per port and cycle; ``data`` two cycles after ``read``. A command, or a
    read, at least :data:`PSUM_RAW_CYCLES` cycles after a command sees its result.
    """

    def __init__(self, *, config):
        self.config = config
        self.banks = [
            MemoryData(shape=unsigned(32), depth=config.psum_bank_words, init=[])
            for _ in range(config.psum_banks)
        ]
        super().__init__(
            {
                "index": In(config.partition_bits),
                "command": In(PsumCommand(config)),
                "sum": In(32),
                "read": In(PsumRead(config)).array(PSUM_READ_PORTS),
                "data": Out(32).array(PSUM_READ_PORTS),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config, command = self.config, self.command

        mine = Signal()
        m.d.comb += mine.eq(command.valid & (self.index < command.columns))

        # Cycle 1: the old value is there. Cycle 2: the exact sum, rounded and written.
        where = data.StructLayout({"bank": config.psum_bank_bits, "word": config.psum_word_bits})
        s1_valid, s2_valid = Signal(), Signal()
        s1_where, s2_where = Signal(where), Signal(where)
        s1_accumulate = Signal()
        s1_sum = Signal(32)
        s2_sum = Signal(Sum)
        result = Signal(32)

        stored = []
        for b, contents in enumerate(self.banks):
            m.submodules[f"bank{b}"] = memory = Memory(contents)
            writer = memory.write_port()
            reader = memory.read_port()
            here = Signal(name=f"command_bank{b}")
            first, *others = self.read
            enable, word = first.valid & (first.bank == b), first.word
            for read in others:
                wanted = read.valid & (read.bank == b)
                enable, word = enable | wanted, Mux(wanted, read.word, word)
            m.d.comb += [
                here.eq(mine & (command.bank == b)),
                reader.en.eq(here | enable),
                reader.addr.eq(Mux(here, command.word, word)),
                writer.en.eq(s2_valid & (s2_where.bank == b)),
                writer.addr.eq(s2_where.word),
                writer.data.eq(result),
            ]
            stored.append(reader.data)

        def select(bank):
            value = Signal(32)
            with m.Switch(bank):
                for b, word in enumerate(stored):
                    with m.Case(b):
                        m.d.comb += value.eq(word)
            return value

        old = Mux(s1_accumulate, select(s1_where.bank), _IDENTITY)
        m.d.comb += result.eq(round_sum(m, s2_sum, name="rounded"))
        m.d.sync += [
            s1_valid.eq(mine),
            s1_where.bank.eq(command.bank),
            s1_where.word.eq(command.word),
            s1_accumulate.eq(command.accumulate),
            s1_sum.eq(self.sum),
            s2_valid.eq(s1_valid),
            s2_where.eq(s1_where),
            s2_sum.eq(align_add(m, addend(m, s1_sum), old)),
        ]
        for i, (read, value) in enumerate(zip(self.read, self.data, strict=True)):
            read_bank = Signal(config.psum_bank_bits, name=f"read{i}_bank")
            m.d.sync += [read_bank.eq(read.bank), value.eq(select(read_bank))]
        return m


class Psum(wiring.Component):
    """All slices, the rippling commands, and the read ports of the vector and scalar engine.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    command : :py:`In(PsumCommand(config))`
        One cycle ahead of the sums of quad 0.
    sums : :py:`In(32 * cols)`
        Column 0 lowest. Those of quad ``q`` come ``q`` cycles after those of quad 0.
    read : :py:`In(PsumReadPort(config)).array(PSUM_READ_PORTS)`
        Each reads any bank.

    Attributes
    ----------
    slices : list of :class:`PsumSlice`
        By partition; ``slices[p].banks[b][word]`` is a sum.

    Timing
    ------
    A sum is in memory :attr:`write_cycles` cycles after its command: a read from then on sees it.
    """

    def __init__(self, *, config):
        self.config = config
        self.slices = [PsumSlice(config=config) for _ in range(config.partitions)]
        super().__init__(
            {
                "command": In(PsumCommand(config)),
                "sums": In(32 * config.cols),
                "read": In(PsumReadPort(config)).array(PSUM_READ_PORTS),
            }
        )

    @property
    def write_cycles(self):
        """From a command to the cycle in which a read sees the result in every partition."""
        return self.config.cols // _QUAD + PSUM_RAW_CYCLES

    def elaborate(self, platform):
        m = Module()
        config = self.config

        # One register feeds all slices: cycle 1 of SBUF_READ_CYCLES. Then memory, bank multiplexer.
        assert SBUF_READ_CYCLES == 3
        reads = []
        for i, port in enumerate(self.read):
            read = Signal(PsumRead(config), name=f"read{i}")
            m.d.sync += [
                read.valid.eq(port.valid),
                read.bank.eq(port.bank),
                read.word.eq(port.word),
            ]
            reads.append(read)

        command = self.command
        for q in range(config.cols // _QUAD):
            here = Signal(PsumCommand(config), name=f"command{q}")
            m.d.sync += here.eq(command)
            command = here
            for p in range(_QUAD * q, _QUAD * (q + 1)):
                part = self.slices[p]
                m.submodules[f"slice{p}"] = Replicated(part, "psum_slice")
                m.d.comb += [
                    part.index.eq(p),
                    part.command.eq(here),
                    part.sum.eq(self.sums.word_select(p, 32)),
                ]
                for i, port in enumerate(self.read):
                    m.d.comb += [part.read[i].eq(reads[i]), port.data[p].eq(part.data[i])]
        return m
