"""Address generation of a DMA engine: from a planned descriptor side to runs, bursts and beats.

A *plan* describes one side of a checked descriptor: equal runs of bytes, nested four deep. A
:class:`Walker` steps through it, one run per cycle; a :class:`BurstSplitter` cuts runs into AXI
bursts, a :class:`BeatSplitter` into SBUF beats, each one per cycle with no gap between runs.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from ..arch.config import AXI_ADDR_BITS

__all__ = [
    "RUN_BITS", "SLOTS", "BeatSplitter", "BurstSplitter", "Walker", "about_layout", "beat_layout",
    "burst_layout", "plan_layout", "run_layout", "sbuf_position_bits", "tag_layout",
]  # fmt: skip

SLOTS = 8
"""Descriptors of one queue that are fetched or under way at the same time."""

RUN_BITS = 32
"""Width of the length of a run in bytes."""

DIMS = 4


def sbuf_position_bits(config):
    """Width of a position in SBUF: byte offset, then partition."""
    return config.sbuf_addr_bits + config.partition_bits


def tag_layout(config):
    """Which descriptor: queue and slot."""
    return data.StructLayout({"slot": exact_log2(SLOTS), "queue": exact_log2(config.dma_queues)})


def about_layout(config):
    """What travels with every piece of a descriptor.

    ``buffer`` is the byte buffer it passes through (0: filled from HBM, 1: from SBUF). ``across``
    and ``size_log2`` concern SBUF sides: runs go from partition to partition.
    """
    return data.StructLayout({"tag": tag_layout(config), "buffer": 1, "across": 1, "size_log2": 2})


def plan_layout(config, address_bits):
    """One side of a descriptor: ``bytes`` at ``address``, repeated along four dimensions.

    ``counts[d]`` is the number of repetitions minus one. ``deltas[d]`` leads from the last run of
    the dimensions below ``d`` to the first one of the next index of ``d``.
    """
    return data.StructLayout(
        {
            "address": address_bits,
            "bytes": RUN_BITS,
            "counts": data.ArrayLayout(16, DIMS),
            "deltas": data.ArrayLayout(address_bits, DIMS),
            "about": about_layout(config),
        }
    )


def run_layout(config, address_bits):
    """Contiguous bytes (in SBUF, with ``across``: elements of consecutive partitions)."""
    return data.StructLayout(
        {"address": address_bits, "bytes": RUN_BITS, "last": 1, "about": about_layout(config)}
    )


def burst_bytes_bits(config):
    """Width of the number of bytes in a burst."""
    return config.dma_burst_bytes.bit_length()


def burst_layout(config):
    """The useful bytes of one AXI burst; ``last`` of its descriptor."""
    return data.StructLayout(
        {
            "address": AXI_ADDR_BITS,
            "bytes": burst_bytes_bits(config),
            "last": 1,
            "about": about_layout(config),
        }
    )


def beat_layout(config):
    """The useful bytes of one SBUF beat: ``count`` bytes from byte ``phase`` on."""
    return data.StructLayout(
        {
            "partition": config.partition_bits,
            "offset": config.sbuf_addr_bits,
            "phase": 3,
            "count": 4,
            "last": 1,
            "about": about_layout(config),
        }
    )


class Walker(wiring.Component):
    """Turn a plan into its runs.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`
    address_bits : :class:`int`, bits

    Members
    -------
    i : :py:`In(stream.Signature(plan))`
    o : :py:`Out(stream.Signature(run))`

    Timing
    ------
    The first run follows its plan after one cycle; then one run per cycle, the next plan included.
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, config, address_bits):
        self.plan = plan_layout(config, address_bits)
        super().__init__(
            {
                "i": In(stream.Signature(self.plan)),
                "o": Out(stream.Signature(run_layout(config, address_bits))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        plan = Signal(self.plan)
        left = [Signal(16, name=f"left{d}") for d in range(DIMS)]
        address = Signal(len(self.o.p.address))
        valid = Signal()

        ended = [Signal(name=f"ended{d}") for d in range(DIMS + 1)]  # all dimensions below d
        m.d.comb += ended[0].eq(1)
        for d in range(DIMS):
            m.d.comb += ended[d + 1].eq(ended[d] & (left[d] == 0))
        delta = Signal(len(address))
        for d in reversed(range(DIMS)):
            with m.If(ended[d] & (left[d] != 0)):
                m.d.comb += delta.eq(plan.deltas[d])

        m.d.comb += [
            self.o.valid.eq(valid),
            self.o.p.address.eq(address),
            self.o.p.bytes.eq(plan.bytes),
            self.o.p.last.eq(ended[DIMS]),
            self.o.p.about.eq(plan.about),
            self.i.ready.eq(~valid | self.o.ready & ended[DIMS]),
        ]
        with m.If(self.i.ready):
            m.d.sync += [valid.eq(self.i.valid), plan.eq(self.i.p), address.eq(self.i.p.address)]
            m.d.sync += [left[d].eq(self.i.p.counts[d]) for d in range(DIMS)]
        with m.Elif(self.o.ready):
            m.d.sync += address.eq(address + delta)
            for d in range(DIMS):
                with m.If(ended[d]):
                    m.d.sync += left[d].eq(Mux(left[d] == 0, plan.counts[d], left[d] - 1))
        return m


class BurstSplitter(wiring.Component):
    """Cut runs into bursts that end at multiples of ``dma_burst_bytes``, so never cross 4 KiB.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(run))`
    o : :py:`Out(stream.Signature(burst))`

    Timing
    ------
    One cycle from run to burst; one burst per cycle.
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(run_layout(config, AXI_ADDR_BITS))),
                "o": Out(stream.Signature(burst_layout(config))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        burst = self.config.dma_burst_bytes
        bits = exact_log2(burst)
        run = Signal(self.i.p.shape())
        valid = Signal()
        room = Signal(bits + 1)
        ends = Signal()
        m.d.comb += [
            room.eq(burst - run.address[:bits]),
            ends.eq(run.bytes <= room),
            self.o.valid.eq(valid),
            self.o.p.address.eq(run.address),
            self.o.p.bytes.eq(Mux(ends, run.bytes, room)),
            self.o.p.last.eq(ends & run.last),
            self.o.p.about.eq(run.about),
            self.i.ready.eq(~valid | self.o.ready & ends),
        ]
        with m.If(self.i.ready):
            m.d.sync += [valid.eq(self.i.valid), run.eq(self.i.p)]
        with m.Elif(self.o.ready):
            m.d.sync += [
                run.address.eq(Cat(Const(0, bits), run.address[bits:] + 1)),
                run.bytes.eq(run.bytes - room),
            ]
        return m


class BeatSplitter(wiring.Component):
    """Cut runs into SBUF beats of up to 8 bytes, aligned as :func:`~..interfaces.SbufBeat` wants.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    i : :py:`In(stream.Signature(run))`
    o : :py:`Out(stream.Signature(beat))`

    Timing
    ------
    One cycle from run to beat; one beat per cycle.
    """

    i: stream.Interface
    o: stream.Interface

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "i": In(stream.Signature(run_layout(config, sbuf_position_bits(config)))),
                "o": Out(stream.Signature(beat_layout(config))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        offset_bits = self.config.sbuf_addr_bits
        run = Signal(self.i.p.shape())
        valid = Signal()
        across, size = run.about.across, run.about.size_log2
        offset, partition = run.address[:offset_bits], run.address[offset_bits:]

        # Position of the run's first byte within the beat.
        group = Signal(max(3, len(partition)))  # partitions of a beat minus one
        phase = Signal(3)
        m.d.comb += [
            group.eq(Const(7, 3) >> size),
            phase.eq(Mux(across, (partition & group) << size, offset[:3])),
        ]
        room = Signal(4)
        ends = Signal()
        m.d.comb += [
            room.eq(8 - phase),
            ends.eq(run.bytes <= room),
            self.o.valid.eq(valid),
            self.o.p.partition.eq(Mux(across, partition & ~group, partition)),
            self.o.p.offset.eq(Mux(across, offset, Cat(Const(0, 3), offset[3:]))),
            self.o.p.phase.eq(phase),
            self.o.p.count.eq(Mux(ends, run.bytes, room)),
            self.o.p.last.eq(ends & run.last),
            self.o.p.about.eq(run.about),
            self.i.ready.eq(~valid | self.o.ready & ends),
        ]
        with m.If(self.i.ready):
            m.d.sync += [valid.eq(self.i.valid), run.eq(self.i.p)]
        with m.Elif(self.o.ready):
            m.d.sync += [
                run.address.eq(
                    Mux(
                        across,
                        Cat(offset, (partition | group) + 1),
                        Cat(Const(0, 3), run.address[3:] + 1),
                    )
                ),
                run.bytes.eq(run.bytes - room),
            ]
        return m
