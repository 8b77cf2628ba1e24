"""Semaphores: 32-bit words that updates change and waits compare.

The words lie in a small memory with combinational read ports (distributed RAM on an FPGA, a
register file elsewhere): one port per wait of every queue, so that both waits of all five heads are
evaluated in every cycle.
"""

from amaranth.hdl import Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from ..arch.config import AXI_ADDR_BITS
from ..arch.isa import HEADER, Engine, ErrorCode, UpdateMode
from ..interfaces import Error, Update
from ..lib.select import RoundRobin

__all__ = ["SOURCE_DMA", "Semaphores"]

SOURCE_DMA = 16
"""Error source of the first DMA engine; smaller numbers are queues."""


class Semaphores(wiring.Component):
    """All semaphores of the core.

    Parameters
    ----------
    config : :class:`~..arch.config.CoreConfig`

    Members
    -------
    queues : :py:`In(stream.Signature(Update)).array(len(Engine))`
        Updates made by the queues themselves; ``queue_pc`` says by which instruction.
    pe, act, dve, pool : :py:`In(stream.Signature(Update))`
    dma : :py:`In(stream.Signature(Update)).array(config.dma_engines)`
    host : :py:`In(stream.Signature(Update))`
        All sources take turns, beginning with the first after a ``start``.
    start : :py:`In(1)`
        A run begins.
    read_index : :py:`In(8).array(2 * len(Engine) + 1)`
    read_value : :py:`Out(32).array(2 * len(Engine) + 1)`
        Values now, combinational; the last is the host's. Not to be used while ``sweeping``.
    sweep : :py:`In(1)`
        Set all semaphores to 0. Updates wait meanwhile. A reset of the domain does so too.
    sweeping : :py:`Out(1)`
    clear : :py:`In(1)`
        Drop the update that has been taken but not made.
    idle : :py:`Out(1)`
        No update is offered or under way.
    moved : :py:`Out(1)`
        An update was taken.
    error : :py:`Out(Error)`, ``error_source`` : :py:`Out(8)`
        SEMAPHORE_OVERFLOW, for one cycle, as :data:`~..arch.isa.ERROR_REPORTS` says. The semaphore
        keeps its value.

    Attributes
    ----------
    memory : :class:`amaranth.lib.memory.Memory`
        The words, for test benches that look inside.

    Timing
    ------
    One update per cycle. A value read two cycles after its update was taken is the new one. ::

        cycle        0    1    2
        valid, ready 1    0    0
        read_value   old  old  new
    """

    def __init__(self, *, config):
        self.config = config
        self.memory = Memory(shape=32, depth=config.semaphores, init=[])
        n = len(Engine)
        updates = stream.Signature(Update)
        super().__init__(
            {
                "queues": In(updates).array(n),
                "queue_pc": In(AXI_ADDR_BITS).array(n),
                "pe": In(updates),
                "act": In(updates),
                "dve": In(updates),
                "pool": In(updates),
                "dma": In(updates).array(config.dma_engines),
                "host": In(updates),
                "start": In(1),
                "read_index": In(8).array(2 * n + 1),
                "read_value": Out(32).array(2 * n + 1),
                "sweep": In(1),
                "sweeping": Out(1, init=1),
                "clear": In(1),
                "idle": Out(1),
                "moved": Out(1),
                "error": Out(Error),
                "error_source": Out(8),
            }
        )

    def elaborate(self, platform):
        m = Module()
        index_bits = (self.config.semaphores - 1).bit_length()
        m.submodules.memory = memory = self.memory
        write = memory.write_port()
        for index, value in zip(self.read_index, self.read_value, strict=True):
            port = memory.read_port(domain="comb")
            m.d.comb += [port.addr.eq(index[:index_bits]), value.eq(port.data)]

        sources = [
            *((port, engine, self.queue_pc[engine]) for engine, port in enumerate(self.queues)),
            (self.pe, Engine.PE, 0),
            (self.act, Engine.ACT, 0),
            (self.dve, Engine.DVE, 0),
            (self.pool, Engine.POOL, 0),
            *((port, SOURCE_DMA + i, 0) for i, port in enumerate(self.dma)),
            (self.host, 0, 0),
        ]
        turn = RoundRobin(count=len(sources))
        m.submodules.turn = ResetInserter(self.start)(turn)

        # Cycle 0: choose one.
        pending = Signal()
        chosen = Signal(Update)
        source, pc = Signal(8), Signal(AXI_ADDR_BITS)
        take = Signal()
        m.d.comb += [
            take.eq(~self.sweeping),
            turn.take.eq(take),
            self.moved.eq(take & turn.requests.any()),
            self.idle.eq(~pending & ~turn.requests.any()),
        ]
        for i, (port, number, where) in enumerate(sources):
            m.d.comb += [
                turn.requests[i].eq(port.valid),
                port.ready.eq(turn.grant[i] & take),
            ]
            with m.If(turn.grant[i] & take):
                m.d.sync += [chosen.eq(port.payload), source.eq(number), pc.eq(where)]
        with m.If(take):
            m.d.sync += pending.eq(turn.requests.any())

        # Cycle 1: make it.
        old = memory.read_port(domain="comb")
        total = Signal(33)
        overflow = Signal()
        make = Signal()
        m.d.comb += [
            old.addr.eq(chosen.semaphore),
            total.eq(old.data + chosen.value),
            make.eq(pending & ~self.sweeping & ~self.clear),
            overflow.eq(make & (chosen.mode == UpdateMode.ADD) & total[32]),
            self.error.valid.eq(overflow),
            self.error.code.eq(ErrorCode.SEMAPHORE_OVERFLOW),
            self.error.field.eq({name: bit for name, bit, _ in HEADER}["update_semaphore"]),
            self.error.pc.eq(pc),
            self.error.address.eq(chosen.semaphore),
            self.error_source.eq(source),
        ]

        # The sweep has the write port for as many cycles as there are semaphores.
        swept = Signal(index_bits)
        with m.If(self.sweeping):
            m.d.sync += swept.eq(swept + 1)
            with m.If(swept == self.config.semaphores - 1):
                m.d.sync += self.sweeping.eq(0)
            m.d.comb += [write.addr.eq(swept), write.data.eq(0), write.en.eq(1)]
        with m.Else():
            m.d.comb += [
                write.addr.eq(chosen.semaphore),
                write.data.eq(Mux(chosen.mode == UpdateMode.ADD, total, chosen.value)),
                write.en.eq(make & (chosen.mode != UpdateMode.NONE) & ~overflow),
            ]
        with m.If(self.sweep):
            m.d.sync += [self.sweeping.eq(1), swept.eq(0)]
        with m.If(self.clear):
            m.d.sync += pending.eq(0)
        return m
