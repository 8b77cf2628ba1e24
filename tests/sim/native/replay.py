"""Run a compiled model and print all that it does, a line at a time.

``replay.py machine FOLDER SEED COUNT THREADS`` runs random programs on TINY; with ``design`` the
inputs of a design are driven for so many cycles. A model that is compiled to be stopped, or that
needs a library to be loaded first, thus gets a process of its own.
"""

import ctypes
import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
from makalu.sim.native.model import Model, Simulation


def guarded(simulation):
    """Tell the sanitizer what lies between the arrays of the state, if the model was made so."""
    guard = getattr(simulation.model.library, "guard", None)
    if guard is not None:
        guard.restype, guard.argtypes = None, [ctypes.c_void_p]
        guard(simulation.state)


def ended(library):
    """Say how many tasks the second thread did, if it counts them; it has ended."""
    if hasattr(library, "helped"):
        print("helped", ctypes.c_uint.in_dll(library, "helped").value)


def machine(folder, seed, count, threads):
    sys.path.insert(0, str(Path(__file__).parents[2] / "system"))
    from makalu.host.devices.registers import RegisterRunner
    from makalu.rtl.arch.config import TINY, HbmConfig
    from makalu.sim.backends import native
    from makalu.sim.golden import GoldenCore
    from programs import HBM_BYTES, random_program
    from runs import digests, fill

    native.build = lambda *_, **__: folder
    core = GoldenCore(TINY, HBM_BYTES)
    with native.NativeMachine(TINY, HbmConfig(size_bytes=HBM_BYTES)) as tiny:
        simulation = tiny._simulation
        simulation.threads = simulation.model.library.threads(simulation.state, threads)
        assert simulation.threads == threads
        guarded(simulation)
        runner = RegisterRunner(tiny)
        for number in range(count):
            rng = np.random.default_rng([seed, 2000, number])
            image = random_program(rng, TINY, int(rng.integers(3, 25)))
            fill(tiny, core, image, rng)
            counters = runner.run(image.queues)
            print(json.dumps({"program": number, **digests(tiny), **counters}), flush=True)
    ended(simulation.model.library)


def design(folder, seed, count, threads):
    simulation, rng = Simulation(Model(folder), threads), random.Random(seed)
    guarded(simulation)
    table, seen = simulation.model.table, hashlib.sha256()
    inputs = {n: width for n, (_, width) in table["inputs"].items() if n not in ("clk", "rst")}
    for cycle in range(count):
        change = 0.05 if cycle // 50 % 2 else 1  # by turns much happens and little
        for name, width in inputs.items():
            if rng.random() < change:
                simulation.set(name, rng.choice([rng.getrandbits(width), 0, (1 << width) - 1]))
        simulation.settle()
        seen.update(repr([simulation.get(name) for name in table["outputs"]]).encode())
        if cycle % 50 == 49:
            print(cycle, seen.hexdigest()[:16], flush=True)
        simulation.step()
    simulation.close()
    ended(simulation.model.library)


if __name__ == "__main__":
    kind, folder, *numbers = sys.argv[1:]
    {"machine": machine, "design": design}[kind](Path(folder), *map(int, numbers))
