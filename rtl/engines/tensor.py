"""The tensor engine: a sequencer, the edges, the array, and PSUM below it.

The sequencer turns instructions into SBUF read commands, control for the edges and commands for
PSUM. It knows only time: operands and sums never pass through it. It can be simulated alone.
"""

from amaranth.hdl import Cat, Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from ..arch.events import events_layout
from ..interfaces import (
    PSUM_READ_PORTS,
    SBUF_READ_CYCLES,
    PsumReadPort,
    SbufMovingPort,
    SbufWeightsPort,
    issue_port,
    update_port,
)
from ..lib.delay import DELAY_LATENCY, DelayLine
from ..lib.replicate import Replicated
from ..lib.select import RoundRobin
from ..lib.stream import connect_streams
from ..memory.psum import PSUM_RAW_CYCLES, Psum, PsumCommand
from .array import (
    ARRAY_CYCLES,
    EDGE_CYCLES,
    QUAD,
    ROW_SKEW,
    ArrayBlock,
    EdgeControl,
    block_rows,
)
from .tensor_units import MIN_INTERVAL, Dispatcher, LoadUnit, MatmulUnit, command_port

__all__ = ["MIN_INTERVAL", "TensorEngine", "TensorSequencer"]


class TensorSequencer(wiring.Component):
    """Instructions in, commands to SBUF, edges and PSUM out.

    Two units work side by side, each with one instruction waiting behind the present one: one walks
    the pattern of a ``LoadStationary``, the other those of a ``MatmulMoving``. Instructions reach
    them in order. A load is held before its first element until the swap that it must follow; a
    matmul that follows a load is held until that load is complete.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
        Opcodes other than MatmulMoving and LoadStationary complete at once and do nothing else.
    moving : :py:`Out(SbufMovingPort(config))`, without ``data``
    weights : :py:`Out(SbufWeightsPort(config))`, without ``data``
    control : :py:`Out(EdgeControl(config))`
        In the cycle in which SBUF's data can be sampled.
    psum : :py:`Out(PsumCommand(config))`
        As :class:`~..memory.psum.Psum` takes it.
    psum_busy_pe : :py:`Out(config.psum_banks)`
    psum_busy_others : :py:`In(config.psum_banks)`
    update : :py:`Out(stream.Signature(Update))`
    starving : :py:`In(2)`
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("pe"))`

    Timing
    ------
    A matmul of N columns: an idle engine gives the first ``moving`` command 5 cycles after taking
    the instruction. Then one column per cycle. The next matmul's first column follows after exactly
    ``max(N, MIN_INTERVAL)`` cycles if its weights are complete. One cycle may be added when a DMA
    starves for a bank that the moving operand has been reading in every cycle.

    Within a wave, a column is held back only where it would accumulate onto one of the
    ``PSUM_RAW_CYCLES - 1`` columns before it (a ``dst`` that revisits an address at once).

    A load of M elements: commands in ``M / 4`` consecutive cycles if they are contiguous, start at
    a multiple of four elements and are not refused. The first may be in the cycle of the swap (one
    before the first column of the matmul before); the next matmul's first column is at the earliest
    three cycles after the last. So a load is hidden behind every matmul of ``N >= M / 4 + 1``
    columns, plus one for each cycle in which SBUF refused.

    Updates are offered three cycles after the last command of a load, and three cycles after the
    last sum of a matmul is in PSUM. A column commanded in cycle ``t`` is in PSUM, for a vector
    engine that gives its read command then, in cycle ``t + drain_cycles``.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "instructions": issue_port(),
                "moving": Out(command_port(SbufMovingPort(config))),
                "weights": Out(command_port(SbufWeightsPort(config))),
                "control": Out(EdgeControl(config)),
                "psum": Out(PsumCommand(config)),
                "psum_busy_pe": Out(config.psum_banks),
                "psum_busy_others": In(config.psum_banks),
                "update": update_port(),
                "starving": In(2),
                "busy": Out(1),
                "events": Out(events_layout("pe")),
            }
        )

    @property
    def psum_cycles(self):
        """From a moving command to its PSUM command, one cycle ahead of the sums of quad 0."""
        above = ROW_SKEW * (self.config.rows - 1)
        return SBUF_READ_CYCLES + EDGE_CYCLES + above + ARRAY_CYCLES - 1

    @property
    def drain_cycles(self):
        """From a moving command to the cycle in which the vector engine may read the sums."""
        return self.psum_cycles + self.config.cols // QUAD + PSUM_RAW_CYCLES

    @property
    def waves(self):
        """Matmuls that can be on their way at once: as many as start while the first one drains."""
        return self.drain_cycles // MIN_INTERVAL + 4

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.dispatcher = dispatcher = Dispatcher(config=config)
        m.submodules.load = load = LoadUnit(config=config)
        m.submodules.matmul = matmul = MatmulUnit(config=config, waves=self.waves)
        connect(m, flipped(self.instructions), dispatcher.instructions)
        connect_streams(m, dispatcher.loads, load.loads)
        connect_streams(m, dispatcher.matmuls, matmul.matmuls)
        connect(m, load.port, flipped(self.weights))
        connect(m, matmul.port, flipped(self.moving))
        m.d.comb += [
            load.swaps.eq(matmul.swaps),
            matmul.loads.eq(load.done),
            load.moving_next.eq(matmul.moving_next),
            load.moving_bank.eq(matmul.moving_bank),
            matmul.psum_busy_others.eq(self.psum_busy_others),
            matmul.starving.eq(self.starving),
        ]

        # Control for the edges, with the data.
        control = Signal(EdgeControl(config))
        m.d.comb += [
            control.moving.eq(matmul.moving),
            control.swap.eq(matmul.swap),
            control.weights.eq(load.weights),
        ]
        for i in range(SBUF_READ_CYCLES):
            later = Signal(EdgeControl(config), name=f"control{i + 1}")
            m.d.sync += later.eq(control)
            control = later
        m.d.comb += self.control.eq(control)

        # Commands for PSUM, with the sums. The end of a matmul goes on to the last quad.
        m.submodules.drain = drain = DelayLine(
            members={"command": PsumCommand(config), "last": 1},
            max_depth=self.psum_cycles - DELAY_LATENCY,
        )
        written = Signal(self.drain_cycles - self.psum_cycles)
        m.d.comb += [
            drain.depth.eq(self.psum_cycles - DELAY_LATENCY),
            drain.i.command.eq(matmul.psum),
            drain.i.last.eq(matmul.last),
            self.psum.eq(drain.o.command),
            matmul.done.eq(written[-1]),
        ]
        m.d.sync += written.eq(Cat(drain.o.last, written))

        # A bank is ours from the first sight of its matmul until its last sum has been written.
        draining = Signal(config.psum_banks)
        for b in range(config.psum_banks):
            left = Signal(range(self.drain_cycles + 1), name=f"bank{b}_left")
            with m.If(matmul.banks[b]):
                m.d.sync += left.eq(self.drain_cycles)
            with m.Elif(left != 0):
                m.d.sync += left.eq(left - 1)
            m.d.comb += draining[b].eq(left != 0)
        m.d.comb += self.psum_busy_pe.eq(matmul.banks | draining)

        # Updates of both units in turn.
        turns = RoundRobin(count=2)
        m.submodules.turns = ResetInserter(~turns.requests.any())(turns)  # every run starts alike
        sources = [load.update, matmul.update]
        free = Signal()
        m.d.comb += [
            free.eq(~self.update.valid | self.update.ready),
            turns.requests.eq(Cat(source.valid for source in sources)),
            turns.take.eq(free),
            *(source.ready.eq(free & turns.grant[i]) for i, source in enumerate(sources)),
        ]
        with m.If(free):
            m.d.sync += self.update.valid.eq(turns.grant.any())
            for i, source in enumerate(sources):
                with m.If(turns.grant[i]):
                    m.d.sync += self.update.p.eq(source.p)

        working = Signal()
        m.d.comb += [
            working.eq(dispatcher.busy | load.busy | matmul.busy | draining.any()),
            self.busy.eq(working | self.update.valid),
        ]
        m.d.sync += [
            self.events.eq(0),
            *(self.events[name].eq(matmul.events[name]) for name, _ in matmul.events.shape()),
            self.events.busy.eq(working),
            self.events.wait_sbuf.eq(self.weights.valid & ~self.weights.ready),
        ]
        return m


class TensorEngine(wiring.Component):
    """The tensor engine with its PSUM.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    instructions : :py:`In(stream.Signature(Issue))`
        Checked; see :class:`TensorSequencer`.
    moving : :py:`Out(SbufMovingPort(config))`
    weights : :py:`Out(SbufWeightsPort(config))`
    psum_read : :py:`In(PsumReadPort(config)).array(PSUM_READ_PORTS)`
        The vector and the scalar engine's.
    psum_busy_pe : :py:`Out(config.psum_banks)`
        Banks in which a wave is, or is wanted next. Registered.
    psum_busy_others : :py:`In(config.psum_banks)`
        Banks that the vector and the scalar engine read; they must not begin on one of
        ``psum_busy_pe``.
    update : :py:`Out(stream.Signature(Update))`
    starving : :py:`In(2)`
        SBUF banks for which a DMA starves.
    busy : :py:`Out(1)`
    events : :py:`Out(events_layout("pe"))`

    Attributes
    ----------
    psum : :class:`~..memory.psum.Psum`
        For test benches: ``psum.slices[p].banks[b][word]``.
    sequencer : :class:`TensorSequencer`

    Timing
    ------
    As :class:`TensorSequencer`. From the command of a moving column to its sum in PSUM:
    ``2 * rows + cols / 4 + 11`` cycles: SBUF 3, edge 4, moving register and PE 4, skew
    ``2 * (rows - 1) + cols / 4 - 1``, PSUM 3.
    """

    def __init__(self, *, config):
        self.config = config
        self.psum = Psum(config=config)
        self.sequencer = TensorSequencer(config=config)
        super().__init__(
            {
                "instructions": issue_port(),
                "moving": Out(SbufMovingPort(config)),
                "weights": Out(SbufWeightsPort(config)),
                "psum_read": In(PsumReadPort(config)).array(PSUM_READ_PORTS),
                "psum_busy_pe": Out(config.psum_banks),
                "psum_busy_others": In(config.psum_banks),
                "update": update_port(),
                "starving": In(2),
                "busy": Out(1),
                "events": Out(events_layout("pe")),
            }
        )

    def elaborate(self, platform):
        m = Module()
        config = self.config
        m.submodules.sequencer = sequencer = self.sequencer
        m.submodules.psum = psum = self.psum

        connect(m, flipped(self.instructions), sequencer.instructions)
        connect(m, sequencer.update, flipped(self.update))
        for outside, inside in zip(self.psum_read, psum.read, strict=True):
            connect(m, flipped(outside), inside)
        for name in ("valid", "new", "word", "offset"):
            m.d.comb += getattr(self.moving, name).eq(getattr(sequencer.moving, name))
        for name in ("valid", "new", "word", "offsets"):
            m.d.comb += getattr(self.weights, name).eq(getattr(sequencer.weights, name))
        m.d.comb += [
            sequencer.weights.ready.eq(self.weights.ready),
            sequencer.psum_busy_others.eq(self.psum_busy_others),
            sequencer.starving.eq(self.starving),
            self.psum_busy_pe.eq(sequencer.psum_busy_pe),
            self.busy.eq(sequencer.busy),
            self.events.eq(sequencer.events),
            psum.command.eq(sequencer.psum),
        ]
        rows = block_rows(config)
        above = 0
        for b in range(config.rows // rows):
            block = ArrayBlock(config=config)
            m.submodules[f"block{b}"] = Replicated(block, "block")
            here = range(rows * b, rows * (b + 1))
            m.d.comb += [
                block.index.eq(b),
                block.control.eq(sequencer.control),
                block.moving.eq(Cat(self.moving.data[p] for p in here)),
                block.weights.eq(Cat(self.weights.data[p] for p in here)),
                block.psum_in.eq(above),
            ]
            above = block.psum_out
        m.d.comb += psum.sums.eq(above)
        return m
