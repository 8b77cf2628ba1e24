"""Compile a design to C and run it."""

import ctypes
import json
import os
from pathlib import Path

import numpy as np
from amaranth._toolchain.yosys import find_yosys

from .. import toolchain
from .cells import words
from .emit import Emitter
from .netlist import MAX_CELLS, MIN_LANES, flatten
from .schedule import LoopError, schedule
from .split import split

__all__ = ["Model", "Simulation", "compile_netlist", "netlist_of"]

_CFLAGS = ("-O2", "-std=gnu11", "-fPIC", "-w", "-fno-strict-aliasing")

LARGE = 200_000
"""Cells in lanes from which on a second thread pays."""


def _processors():
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def netlist_of(text, top):
    """Return what Yosys makes of RTLIL: a dict of modules, words instead of processes."""
    yosys = find_yosys(lambda version: version >= (0, 40))
    script = [
        f"read_rtlil <<rtlil\n{text}\nrtlil",
        f"hierarchy -top {top}",
        "proc",
        "opt -fast",
        "memory_collect",
        "write_json",
    ]
    done = yosys.run(["-q", "-"], "\n".join(script), ignore_warnings=True)
    return json.loads(done)["modules"]


def _plan(modules, top, min_lanes, max_cells, externs):
    """Netlist and schedule; a group that makes a loop is taken apart."""
    banned = set()
    while True:
        netlist = flatten(
            modules, top, min_lanes=min_lanes, max_cells=max_cells, banned=banned, externs=externs
        )
        split(netlist)
        try:
            return netlist, schedule(netlist)
        except LoopError as error:
            if not error.groups:
                raise
            banned |= {netlist.contexts[g].name for g in error.groups}


def compile_netlist(
    work, modules, top, *, externs=None, prelude="", glue="", min_lanes=MIN_LANES,
    max_cells=MAX_CELLS, cc=None, flags=(),
):  # fmt: skip
    """Write C, ``model.json`` and ``model.so`` into a folder."""
    work = Path(work)
    externs = externs or {}
    netlist, plan = _plan(modules, top, min_lanes, max_cells, externs)
    emitter = Emitter(netlist, plan, externs)
    files = emitter.write(prelude=prelude, glue=glue)
    for name, text in files.items():
        (work / name).write_text(text)
    outputs, number = {}, 0
    for name, bits in netlist.outputs.items():
        outputs[name] = [number, len(bits)]
        number += -(-len(bits) // 64)
    table = {
        "inputs": {n: [v.number, v.width] for n, v in netlist.inputs.items()},
        "outputs": outputs,
        "memories": [
            {
                "name": m.name,
                "paths": [p + m.name.partition(">")[2] for p in netlist.contexts[m.context].paths]
                or [m.name],
                "width": m.width,
                "depth": m.depth,
                "lanes": netlist.contexts[m.context].lanes,
            }
            for m in emitter.memories
        ],
        "groups": [[c.name, c.lanes, len(c.cells)] for c in netlist.contexts],
    }
    (work / "model.json").write_text(json.dumps(table))
    cc = cc or toolchain.find_cc()
    command = [*cc, *toolchain.target_flags(cc), *_CFLAGS, *flags]
    sources = sorted((n for n in files if n.endswith(".c")), key=lambda n: -len(files[n]))
    toolchain.run_all(
        [[*command, "-c", "-o", str(work / f"{n}.o"), str(work / n)] for n in sources]
    )
    objects = [str(work / f"{n}.o") for n in sources]
    toolchain.run_all([[*command, "-shared", "-pthread", "-o", str(work / "model.so"), *objects]])
    for name in objects:
        Path(name).unlink()
    return work


class Model:
    """A compiled design."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.library = library = ctypes.CDLL(str(self.folder / "model.so"))
        pointer, u64, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        for name, result, *arguments in (
            ("state_open", pointer), ("state_close", None, pointer), ("settle", None, pointer),
            ("touch", None, pointer), ("step", None, pointer, u64),
            ("output", u64, pointer, number), ("threads", number, pointer, number),
            ("state_size", u64), ("member_count", u64),
            ("member_name", ctypes.c_char_p, u64), ("member_offset", u64, u64),
        ):  # fmt: skip
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.table = json.loads((self.folder / "model.json").read_text())
        self.offsets = {
            library.member_name(i).decode(): library.member_offset(i)
            for i in range(library.member_count())
        }


class Simulation:
    """A run of a :class:`Model`.

    Parameters
    ----------
    model : :class:`Model`
    threads : int, optional
        1 or 2; the results are the same. Unless told, a design large enough gets two where there
        are two processors.
    """

    def __init__(self, model, threads=None):
        if threads is None:
            work = sum(lanes * cells for _, lanes, cells in model.table["groups"])
            threads = 2 if work > LARGE and _processors() > 1 else 1
        self.model = model
        self.state = model.library.state_open()
        if not self.state:
            raise MemoryError("no room for the state of the design")
        self.threads = model.library.threads(self.state, threads)

    def close(self):
        """Free the state; may be called twice."""
        if self.state:
            self.model.library.state_close(self.state)
            self.state = None

    def _view(self, name, ctype, count):
        address = self.state + self.model.offsets[name]
        return np.ctypeslib.as_array((ctype * count).from_address(address))

    def set(self, name, value):
        """Set an input of the top."""
        number, width = self.model.table["inputs"][name]
        for word, part in enumerate(words(width)):
            ctype = ctypes.c_uint32 if part <= 32 else ctypes.c_uint64
            self._view(f"v{number}_{word}", ctype, 1)[0] = value >> 64 * word & ((1 << part) - 1)

    def get(self, name):
        """Return an output of the top, as of the last :meth:`settle`."""
        number, width = self.model.table["outputs"][name]
        return sum(
            self.model.library.output(self.state, number + word) << 64 * word
            for word in range(len(words(width)))
        )

    def settle(self):
        """Let outputs follow the inputs and registers."""
        self.model.library.settle(self.state)

    def step(self, cycles=1):
        """Let clock cycles pass."""
        self.model.library.step(self.state, cycles)

    def touch(self):
        """Say that a memory was written from outside, so that nothing idle misses it."""
        self.model.library.touch(self.state)

    def memory(self, index):
        """Rows of a memory: unsigned array [depth, lanes, words]. See :meth:`touch`."""
        m = self.model.table["memories"][index]
        part = words(m["width"])
        ctype = {8: ctypes.c_uint8, 16: ctypes.c_uint16, 32: ctypes.c_uint32}.get(
            next((size for size in (8, 16, 32) if part[0] <= size), 64), ctypes.c_uint64
        )
        shape = m["depth"], m["lanes"], len(part)
        return self._view(f"m{index}", ctype, int(np.prod(shape))).reshape(shape)
