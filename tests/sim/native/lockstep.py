"""A component compiled to C beside the same in Amaranth's simulator."""

import random

from amaranth.lib import wiring
from makalu.rtl.verilog import to_rtlil
from makalu.sim import toolchain
from makalu.sim.harness import Stepper
from makalu.sim.native.model import Model, Simulation, compile_netlist, netlist_of

__all__ = ["build", "compare"]


def build(component, folder, *, flags=("-O1",), threads=1, cc=None, **options):
    """Compile a component; return the opened simulation, one cycle old, as a Stepper is."""
    design = to_rtlil(component, name="top")
    modules, cc = netlist_of(design.text, "top"), cc or toolchain.find_cc()
    compile_netlist(folder, modules, "top", cc=cc, flags=flags, **options)
    simulation = Simulation(Model(folder), threads)
    simulation.step()
    return simulation


def _any(rng, width):
    value = rng.choice(
        [rng.getrandbits(width), 0, (1 << width) - 1, rng.getrandbits(width) & 15, 1 << width - 1]
    )
    return value & (1 << width) - 1


def compare(make, folder, *, cycles=60, seed=0, change=1.0, **options):
    """Run ``make()`` both ways with the same random inputs; every output in every cycle.

    ``change`` is the chance that an input changes in a cycle. Returns the compiled model.
    """
    simulation, component = build(make(), folder, **options), make()
    stepper, rng = Stepper(component), random.Random(seed)
    ports = [(path[0], member) for path, member, _ in component.signature.flatten(component)]
    compared = 0
    for cycle in range(cycles):
        for name, member in ports:
            if member.flow == wiring.In and rng.random() < change:
                signal = getattr(component, name)
                value = _any(rng, len(signal))
                simulation.set(name, value)
                if signal.shape().signed and value >> len(signal) - 1:
                    value -= 1 << len(signal)
                stepper.set(signal, value)
        simulation.settle()
        for name, member in ports:
            if member.flow == wiring.Out:
                signal = getattr(component, name)
                want = stepper.get(signal) & (1 << len(signal)) - 1
                got = simulation.get(name)
                assert got == want, f"cycle {cycle}: {name} is {got:#x}, not {want:#x}"
                compared += 1
        simulation.step()
        stepper.step()
    assert compared
    simulation.close()
    return simulation.model
