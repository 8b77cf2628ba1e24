"""A design compiled to C, and testbenches that run on it as on Amaranth's simulator.

For tests of designs so large that Amaranth's simulator takes minutes for them.
"""

import inspect
import tempfile
import types

from amaranth.hdl import Module, Value
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out
from makalu.rtl.verilog import to_rtlil
from makalu.sim import toolchain
from makalu.sim.native.model import Model, Simulation, compile_netlist, netlist_of

__all__ = ["Compiled"]


class _Ports(wiring.Component):
    """``design`` with signals inside it as ports, numbered."""

    def __init__(self, design, inputs, outputs):
        self._design, self._inputs, self._outputs = design, inputs, outputs
        super().__init__(
            {f"i{n}": In(len(value)) for n, value in enumerate(inputs)}
            | {f"o{n}": Out(len(value)) for n, value in enumerate(outputs)}
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.design = self._design
        for n, value in enumerate(self._inputs):
            m.d.comb += value.eq(getattr(self, f"i{n}"))
        for n, value in enumerate(self._outputs):
            m.d.comb += getattr(self, f"o{n}").eq(value)
        return m


@types.coroutine
def _edge():
    yield


class Compiled:
    """A compiled design; what a testbench needs of a simulator's context.

    Parameters
    ----------
    design : elaboratable
        Uses the ``sync`` domain.
    inputs : sequence of signals or views
        Nothing else drives them.
    outputs : sequence of signals or views

    Attributes
    ----------
    simulation : :class:`~makalu.sim.native.model.Simulation`
    """

    def __init__(self, design, inputs, outputs):
        inputs, outputs = ([Value.cast(v) for v in side] for side in (inputs, outputs))
        self._inputs = {id(value): f"i{n}" for n, value in enumerate(inputs)}
        self._outputs = {id(value): f"o{n}" for n, value in enumerate(outputs)}
        self._kept = inputs, outputs  # whose identities are the keys
        text = to_rtlil(_Ports(design, inputs, outputs), name="top").text
        modules = netlist_of(text, "top")
        with tempfile.TemporaryDirectory() as folder:
            compile_netlist(
                folder, modules, "top", cc=toolchain.find_cc(), flags=("-O0",), min_lanes=2
            )
            self.simulation = Simulation(Model(folder), 1)
        self._settled = False

    def get(self, value):
        """What an output is now, as Amaranth's simulator gives it."""
        if not self._settled:
            self.simulation.settle()
            self._settled = True
        bits = self.simulation.get(self._outputs[id(Value.cast(value))])
        return value.shape().from_bits(bits) if isinstance(value, data.View) else bits

    def set(self, value, number):
        """Drive an input."""
        if isinstance(value, data.View) and not isinstance(number, int):
            number = value.shape().const(number).as_bits()
        self.simulation.set(self._inputs[id(Value.cast(value))], int(number))
        self._settled = False

    def hold_reset(self, level):
        """Drive the design's reset."""
        self.simulation.set("rst", level)
        self._settled = False

    def restart(self):
        """Drive all inputs with 0, and the design's reset for a cycle."""
        for name in self._inputs.values():
            self.simulation.set(name, 0)
        self.hold_reset(1)
        self.step()
        self.hold_reset(0)

    def step(self):
        """Let a cycle pass."""
        self.simulation.step()
        self._settled = False

    def tick(self):
        """To be awaited in a testbench: a cycle."""
        return _edge()

    def run(self, testbench, every_cycle):
        """Run an async function of this context; ``every_cycle()`` lets a cycle pass."""
        steps = testbench(self)
        assert inspect.iscoroutine(steps)
        while True:
            try:
                steps.send(None)
            except StopIteration:
                return
            every_cycle()
