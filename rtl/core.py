"""One core: control, memories and engines, wired from its configuration.

The control block lives in the clock domain ``sync``; engines and memories live in ``engines``,
which shares its clock and is reset by the host as well (see ``control``).
"""

from amaranth.hdl import ClockDomain, DomainRenamer, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out, connect, flipped

from .arch.config import AXI_ADDR_BITS
from .arch.events import events_layout, events_of
from .arch.registers import ADDRESS_BITS as REGISTER_ADDRESS_BITS
from .control.control import Control
from .engines.dma import DmaEngine
from .engines.gpsimd import GpSimdEngine
from .engines.scalar import ScalarEngine
from .engines.tensor import TensorEngine
from .engines.vector import VectorEngine
from .lib.axi import AXI4, AXI4Lite, AXI4Read
from .lib.replicate import Replicated
from .lib.stream import connect_streams
from .memory.sbuf import Sbuf

__all__ = ["Core"]


class Core(wiring.Component):
    """A NeuronCore.

    Parameters
    ----------
    config : :class:`~.arch.config.CoreConfig`

    Members
    -------
    host : :py:`In(AXI4Lite)`
        Registers (:mod:`.arch.registers`).
    fetch : :py:`Out(AXI4Read)`
        Instruction fetch from HBM.
    dma0, dma1, ... : :py:`Out(AXI4)`
        One per DMA engine.

    Attributes
    ----------
    sync_domain : :class:`amaranth.hdl.ClockDomain`
        Clock and hard reset; propagates to whatever contains the core.
    sbuf, tensor, vector, scalar, gpsimd, dma, control : components
        For test benches that look inside.
    """

    def __init__(self, *, config):
        self.config = config
        self.sync_domain = ClockDomain("sync")
        self.engines_domain = ClockDomain("engines")
        self.engines_domain.clk = self.sync_domain.clk
        self.control = Control(config=config)
        self.sbuf = Sbuf(config=config)
        self.tensor = TensorEngine(config=config)
        self.vector = VectorEngine(config=config)
        self.scalar = ScalarEngine(config=config)
        self.gpsimd = GpSimdEngine(config=config)
        self.dma = [DmaEngine(config=config) for _ in range(config.dma_engines)]
        super().__init__(
            {
                "host": In(AXI4Lite(addr_bits=REGISTER_ADDRESS_BITS)),
                "fetch": Out(AXI4Read(addr_bits=AXI_ADDR_BITS)),
                **{
                    f"dma{i}": Out(AXI4(addr_bits=AXI_ADDR_BITS)) for i in range(config.dma_engines)
                },
            }
        )

    @property
    def psum(self):
        """The PSUM, for test benches."""
        return self.tensor.psum

    def elaborate(self, platform):
        m = Module()
        control, sbuf, tensor = self.control, self.sbuf, self.tensor
        vector, scalar, gpsimd, dma = self.vector, self.scalar, self.gpsimd, self.dma
        m.domains.sync = self.sync_domain
        m.domains.engines = self.engines_domain
        m.d.comb += self.engines_domain.rst.eq(control.engine_reset)

        in_engines = DomainRenamer("engines")
        m.submodules.control = control
        m.submodules.sbuf = in_engines(sbuf)
        m.submodules.tensor = in_engines(tensor)
        m.submodules.vector = in_engines(vector)
        m.submodules.scalar = in_engines(scalar)
        m.submodules.gpsimd = in_engines(gpsimd)
        for i, engine in enumerate(dma):
            m.submodules[f"dma{i}"] = in_engines(Replicated(engine, "dma_engine"))

        # Outside
        connect(m, flipped(self.host), control.host)
        connect(m, control.fetch, flipped(self.fetch))
        for i, engine in enumerate(dma):
            connect(m, engine.axi, flipped(getattr(self, f"dma{i}")))

        # Work from the queues
        connect_streams(m, control.pe, tensor.instructions)
        connect_streams(m, control.act, scalar.instructions)
        connect_streams(m, control.dve, vector.instructions)
        connect_streams(m, control.pool, gpsimd.instructions)
        connect_streams(m, tensor.update, control.pe_update)
        connect_streams(m, scalar.update, control.act_update)
        connect_streams(m, vector.update, control.dve_update)
        connect_streams(m, gpsimd.update, control.pool_update)
        for i, engine in enumerate(dma):
            connect_streams(m, control.dma_jobs[i], engine.jobs)
            connect_streams(m, engine.update, control.dma_update[i])
            m.d.comb += [
                control.dma_error[i].eq(engine.error),
                engine.halt.eq(control.dma_halt),
                control.dma_drained[i].eq(engine.drained),
                control.dma_busy[i].eq(engine.busy),
            ]

        # Memories
        connect(m, tensor.moving, sbuf.moving)
        connect(m, tensor.weights, sbuf.weights)
        # The vector engine's ports lead through the GpSimd engine, which shares them.
        for read, through in zip(vector.sbuf_read, gpsimd.vector_read, strict=True):
            connect(m, read, through)
        connect(m, vector.sbuf_write, gpsimd.vector_write)
        reads, writes = (*gpsimd.sbuf_read, scalar.sbuf_read), (gpsimd, scalar)
        for port, read in zip(sbuf.vector_read, reads, strict=True):
            connect(m, read, port)
        for engine, write in zip(writes, sbuf.vector_write, strict=True):
            connect(m, engine.sbuf_write, write)
        for engine, psum in zip((vector, scalar), tensor.psum_read, strict=True):
            connect(m, engine.psum_read, psum)
        for i, engine in enumerate(dma):
            connect_streams(m, engine.sbuf_write, sbuf.dma_write[i])
            connect_streams(m, engine.sbuf_read, sbuf.dma_read[i])
            m.d.comb += engine.sbuf_read_data.eq(sbuf.dma_read_data[i])
        m.d.comb += [
            tensor.starving.eq(sbuf.starving),
            vector.starving.eq(sbuf.starving),
            scalar.starving.eq(sbuf.starving),
            gpsimd.starving.eq(sbuf.starving),
            vector.hold.eq(gpsimd.vector_hold),
            gpsimd.vector_wants.eq(vector.wants),
            gpsimd.vector_start.eq(vector.start),
            gpsimd.vector_running.eq(vector.running),
            # Both read PSUM, each another bank; of two that start together the vector engine does.
            tensor.psum_busy_others.eq(vector.psum_busy | scalar.psum_busy),
            vector.psum_busy_others.eq(tensor.psum_busy_pe | scalar.psum_busy),
            scalar.psum_busy_others.eq(tensor.psum_busy_pe | vector.psum_busy | vector.psum_claim),
            # The scalar engine's writes were decided first.
            vector.occupied.eq(scalar.upcoming),
            gpsimd.occupied.eq(scalar.upcoming),
        ]

        # State and events
        events = Signal(events_layout("dma"))
        for event in events_of("dma"):
            m.d.sync += events[event.name].eq(sum(engine.events[event.name] for engine in dma))
        m.d.comb += [
            control.pe_busy.eq(tensor.busy),
            control.act_busy.eq(scalar.busy),
            control.dve_busy.eq(vector.busy),
            control.pool_busy.eq(gpsimd.busy),
            control.pe_events.eq(tensor.events),
            control.act_events.eq(scalar.events),
            control.dve_events.eq(vector.events),
            control.pool_events.eq(gpsimd.events),
            control.sbuf_events.eq(sbuf.events),
            control.dma_events.eq(events),
        ]
        return m
