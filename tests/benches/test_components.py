"""Exported components under cocotb, each against a numpy model of what it does."""

from pathlib import Path

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out, connect, flipped
from makalu.rtl.arch.config import TINY
from makalu.rtl.control.control import Control
from makalu.rtl.engines.array import Pe
from makalu.rtl.engines.dma import DmaEngine
from makalu.rtl.engines.gpsimd import GpSimdEngine
from makalu.rtl.engines.tensor import TensorEngine
from makalu.rtl.engines.vector import VectorEngine
from makalu.rtl.interfaces import (
    DmaReadData,
    PsumReadPort,
    SbufBeat,
    SbufReadRequest,
    issue_port,
    update_port,
)
from makalu.rtl.memory.psum import Psum
from makalu.rtl.memory.sbuf import Sbuf
from makalu.rtl.verilog import export

from .runner import SIMULATORS, run_bench

pytestmark = pytest.mark.verilator
HERE = Path(__file__).parent


class VectorOnSbuf(wiring.Component):
    """The vector engine and the state buffer that it works on, which DMA ports fill and empty."""

    def __init__(self, *, config, **more):
        self.config = config
        super().__init__(
            {
                **more,
                "instructions": issue_port(),
                "update": update_port(),
                "psum_read": Out(PsumReadPort(config)),
                "psum_busy_others": In(config.psum_banks),
                "psum_busy": Out(config.psum_banks),
                "busy": Out(1),
                "dma_write": In(stream.Signature(SbufBeat(config))),
                "dma_read": In(stream.Signature(SbufReadRequest(config))),
                "dma_read_data": Out(DmaReadData),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.vector = vector = VectorEngine(config=self.config)
        m.submodules.sbuf = sbuf = Sbuf(config=self.config)
        connect(m, vector.psum_read, flipped(self.psum_read))
        ports = self.ports(m, vector, sbuf)
        for i, read in enumerate(ports.sbuf_read):
            connect(m, read, sbuf.vector_read[i])
        connect(m, ports.sbuf_write, sbuf.vector_write[0])
        connect(m, flipped(self.dma_write), sbuf.dma_write[0])
        connect(m, flipped(self.dma_read), sbuf.dma_read[0])
        m.d.comb += [
            vector.starving.eq(sbuf.starving),
            vector.psum_busy_others.eq(self.psum_busy_others),
            self.psum_busy.eq(vector.psum_busy),
            self.dma_read_data.eq(sbuf.dma_read_data[0]),
        ]
        return m

    def ports(self, m, vector, sbuf):
        """Connect what issues instructions; return the component with the ports on SBUF."""
        connect(m, flipped(self.instructions), vector.instructions)
        connect(m, vector.update, flipped(self.update))
        m.d.comb += self.busy.eq(vector.busy)
        return vector


class GpSimdOnSbuf(VectorOnSbuf):
    """The same with the GpSimd engine between; the vector engine's ports begin with its name."""

    def __init__(self, *, config):
        super().__init__(
            config=config, vector_instructions=issue_port(), vector_update=update_port(),
            vector_busy=Out(1),
        )  # fmt: skip

    def ports(self, m, vector, sbuf):
        m.submodules.gpsimd = gpsimd = GpSimdEngine(config=self.config)
        connect(m, flipped(self.instructions), gpsimd.instructions)
        connect(m, gpsimd.update, flipped(self.update))
        connect(m, flipped(self.vector_instructions), vector.instructions)
        connect(m, vector.update, flipped(self.vector_update))
        for read, through in zip(vector.sbuf_read, gpsimd.vector_read, strict=True):
            connect(m, read, through)
        connect(m, vector.sbuf_write, gpsimd.vector_write)
        m.d.comb += [
            gpsimd.starving.eq(sbuf.starving),
            vector.hold.eq(gpsimd.vector_hold),
            gpsimd.vector_wants.eq(vector.wants),
            gpsimd.vector_start.eq(vector.start),
            gpsimd.vector_running.eq(vector.running),
            self.busy.eq(gpsimd.busy),
            self.vector_busy.eq(vector.busy),
        ]
        return gpsimd


COMPONENTS = {
    "pe": (lambda: Pe(), 4),
    "psum": (lambda: Psum(config=TINY), 4),
    "dma": (lambda: DmaEngine(config=TINY), 5),
    "control": (lambda: Control(config=TINY), 5),
    "sbuf": (lambda: Sbuf(config=TINY), 4),
    "vector": (lambda: VectorOnSbuf(config=TINY), 6),
    "gpsimd": (lambda: GpSimdOnSbuf(config=TINY), 4),
    "tensor": (lambda: TensorEngine(config=TINY), 2),
}


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_component(name, simulator, seed, tmp_path):
    make, tests = COMPONENTS[name]
    passed = run_bench(
        verilog=export(make(), name=name), top=name, bench=HERE / f"bench_{name}.py",
        build_dir=tmp_path, simulator=simulator, seed=seed, environment={"MAKALU_SEED": seed},
    )  # fmt: skip
    assert passed == tests
