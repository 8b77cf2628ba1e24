"""Dispatch of :class:`~..arch.isa.DmaStart`: one instruction, a job for each of its engines."""

from amaranth.hdl import Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..arch.config import AXI_ADDR_BITS
from ..arch.isa import DESCRIPTOR_BYTES, DmaStart, Engine
from ..interfaces import DmaJob, Update
from ..lib.select import RoundRobin

__all__ = ["DISPATCH_QUEUES", "DispatchDma", "DmaRequest"]

DISPATCH_QUEUES = tuple(Engine(engine) for engine in sorted(DmaStart.engines))
"""Queues that take :class:`DmaStart`, in the order of :attr:`DispatchDma.requests`."""


DmaRequest = data.StructLayout(
    {**{name: item.width for name, item, _ in DmaStart.scalars}, "update": Update}
)
"""What :class:`DispatchDma` needs of a :class:`DmaStart` (stream payload); names as there."""


class DispatchDma(wiring.Component):
    """Hand jobs to DMA engines, one instruction at a time, to all its engines at once.

    Each engine takes its job when it is ready, exactly once; the next instruction begins when all
    have. Queues take turns, beginning with the first after a ``start``.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    requests : :py:`In(stream.Signature(DmaRequest)).array(len(DISPATCH_QUEUES))`
        Checked: the engines exist, the descriptors lie below 2**40.
    start : :py:`In(1)`
        A run begins.
    clear : :py:`In(1)`
        Drop what has not been handed over.
    jobs : :py:`Out(stream.Signature(DmaJob)).array(config.dma_engines)`
    busy : :py:`Out(1)`
        Jobs are still to be handed over.
    moved : :py:`Out(1)`
        A job was handed over.

    Timing
    ------
    A request is taken in the cycle it is offered if nothing else is being handed over; its jobs are
    offered three cycles later. One instruction in four cycles when engines are ready.
    """

    def __init__(self, *, config):
        self.config = config
        super().__init__(
            {
                "requests": In(stream.Signature(DmaRequest)).array(len(DISPATCH_QUEUES)),
                "start": In(1),
                "clear": In(1),
                "jobs": Out(stream.Signature(DmaJob)).array(config.dma_engines),
                "busy": Out(1),
                "moved": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        engines = self.config.dma_engines
        turn = RoundRobin(count=len(DISPATCH_QUEUES))
        m.submodules.turn = ResetInserter(self.start)(turn)

        # Cycle 0: take one.
        job = Signal(DmaRequest)
        located, multiplied = Signal(), Signal()
        pending = Signal(engines)
        m.d.comb += [
            self.busy.eq(located | multiplied | pending.any()),
            turn.take.eq(~self.busy),
        ]
        m.d.sync += [located.eq(turn.take & turn.requests.any()), multiplied.eq(located)]
        for i, request in enumerate(self.requests):
            m.d.comb += [
                turn.requests[i].eq(request.valid),
                request.ready.eq(turn.grant[i] & turn.take),
            ]
            with m.If(request.ready):
                m.d.sync += job.eq(request.payload)

        # Cycle 1: which engines, and the how-manieth each is. Cycle 2: its first descriptor.
        moved = Signal(engines)
        for e, port in enumerate(self.jobs):
            index = Signal(range(engines), name=f"index{e}")
            uses = Signal(name=f"uses{e}")
            skip = Signal(job.count.shape().width + len(index), name=f"skip{e}")
            m.d.sync += [
                index.eq(e - job.first),
                uses.eq((job.first <= e) & (e < job.first + job.engines_used)),
                skip.eq(index * job.count),
            ]
            m.d.comb += [
                port.valid.eq(pending[e]),
                port.p.queue.eq(job.queue),
                port.p.table.eq((job.table + skip * DESCRIPTOR_BYTES)[:AXI_ADDR_BITS]),
                port.p.count.eq(job.count),
                port.p.update.eq(job.update),
                moved[e].eq(port.valid & port.ready),
            ]
            m.d.sync += pending[e].eq(Mux(multiplied, uses, pending[e] & ~port.ready))
        m.d.comb += self.moved.eq(moved.any())

        with m.If(self.clear):
            m.d.sync += [located.eq(0), multiplied.eq(0), pending.eq(0)]
        return m
