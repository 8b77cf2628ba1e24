"""Compile a design to C and run it."""

import contextlib
import ctypes
import gzip
import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
from amaranth._toolchain.yosys import find_yosys

from .. import toolchain
from ..pace import Pace
from . import checkpoint
from .cells import ctype, storage, words
from .emit import Emitter
from .netlist import MAX_CELLS, MIN_LANES, Unsupported, flatten
from .schedule import LoopError, schedule
from .signals import Signals, table_of
from .split import split
from .waves import Recording

__all__ = ["Model", "Simulation", "compile_files", "compile_netlist", "keep_c", "netlist_of"]

_CFLAGS = ("-O2", "-std=gnu11", "-fPIC", "-w", "-fno-strict-aliasing", "-fvisibility=protected")
# Protected: a call of `step` is never one of the `step` in the system's C library.

_TYPES = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}

LARGE = 200_000
"""Cells in lanes from which on a second thread pays."""


def _processors():
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


BATCH = 1_000_000
"""Characters of RTLIL for a process of its own."""


def netlist_of(texts, top):
    """Return what Yosys makes of RTLIL: a dict of modules, words instead of processes.

    ``texts`` is RTLIL, or an iterable of pieces of it. Nothing is done across modules, so that the
    first are worked on while others are still being written, and two at the same time.
    """
    texts = [texts] if isinstance(texts, str) else texts
    batch, size = [], 0
    with ThreadPoolExecutor(2) as pool:
        jobs = []
        for module in chain.from_iterable(map(_MODULE.findall, texts)):
            batch.append(module)
            size += len(module)
            if size > BATCH:
                jobs.append(pool.submit(_words_of, "".join(batch)))
                batch, size = [], 0
        jobs.append(pool.submit(_words_of, "".join(batch)))
        found = {name: module for job in jobs for name, module in job.result().items()}
    if top not in found:
        raise Unsupported(f"the design has no module {top}")
    return found


_MODULE = re.compile(r"^(?:attribute [^\n]*\n)*module .*?^end\n", re.MULTILINE | re.DOTALL)


def _words_of(text):
    """Modules by name, from RTLIL."""
    yosys = find_yosys(lambda version: version >= (0, 40))
    # Cleaned before registers are sought: enables and resets are found where nothing else looks.
    # `opt -fast` would do the same three times, for 4 % fewer cells.
    script = [
        f"read_rtlil <<rtlil\n{text}\nrtlil",
        *("proc", "opt_expr", "opt_clean", "opt_merge", "opt_dff", "opt_clean"),
        *("memory_collect", "write_json"),
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


def _state_of(netlist, doubled):
    """What holds the state: name, kind, width, lanes; number, in lanes or not, copies."""
    return [
        [
            *(v.name, v.kind, v.width, netlist.contexts[v.context].lanes),
            *(v.number, v.context > 0, 1 + (v.number in doubled)),
        ]
        for v in netlist.values
        if v.kind in ("reg", "read", "input", "extern")
    ]


def _without_sources(item):
    """A netlist less where in the source things come from."""
    if isinstance(item, dict):
        return {k: _without_sources(v) for k, v in item.items() if k != "src"}
    return [_without_sources(v) for v in item] if isinstance(item, list) else item


def compile_netlist(
    work, modules, top, *, externs=None, prelude="", glue="", min_lanes=MIN_LANES,
    max_cells=MAX_CELLS, cc=None, flags=(), watched=(),
):  # fmt: skip
    """Write C, ``model.so`` and what :class:`Model` reads into a folder.

    ``watched`` are numbers of values to keep though nothing else needs them.
    """
    work = Path(work)
    externs = externs or {}
    cc = cc or toolchain.find_cc()
    recipe = {
        "modules": modules, "top": top, "prelude": prelude, "glue": glue, "min_lanes": min_lanes,
        "max_cells": max_cells, "cc": list(cc), "flags": list(flags),
    }  # fmt: skip
    netlist, plan = _plan(modules, top, min_lanes, max_cells, externs)
    emitter = Emitter(netlist, plan, externs)
    files = emitter.write(watched=set(watched), prelude=prelude, glue=glue)
    for name, text in files.items():
        (work / name).write_text(text)

    def describe():
        state = _state_of(netlist, emitter.doubled)
        table = _table(netlist, emitter.memories, state, modules, top)
        (work / "model.json").write_text(json.dumps(table))
        for name, contents in (("signals", table_of(netlist, plan)), ("recipe", recipe)):
            (work / f"{name}.json.gz").write_bytes(
                gzip.compress(json.dumps(contents).encode(), 3, mtime=0)
            )

    compile_files(work, cc=cc, flags=flags, meanwhile=describe)
    return work


def _table(netlist, memories, state, modules, top):
    """What :class:`Model` has to know."""
    outputs, number = {}, 0
    for name, bits in netlist.outputs.items():
        outputs[name] = [number, len(bits)]
        number += -(-len(bits) // 64)
    memories = [
        {
            "name": m.name,
            "paths": [p + m.name.partition(">")[2] for p in netlist.contexts[m.context].paths]
            or [m.name],
            "width": m.width,
            "depth": m.depth,
            "lanes": netlist.contexts[m.context].lanes,
        }
        for m in memories
    ]
    shape = [row[:4] for row in state]
    design = json.dumps([top, shape, memories, _without_sources(modules)], sort_keys=True)
    return {
        "top": top,
        "design": hashlib.sha256(design.encode()).hexdigest()[:24],
        "inputs": {n: [v.number, v.width] for n, v in netlist.inputs.items()},
        "outputs": outputs,
        "memories": memories,
        "groups": [[c.name, c.lanes, len(c.cells)] for c in netlist.contexts],
        "state": state,
    }


def compile_files(work, *, cc=None, flags=(), meanwhile=None):
    """Compile the C files of a folder to ``model.so``, with further flags.

    ``meanwhile`` is called while the compiler works.
    """
    cc = cc or toolchain.find_cc()
    command = [*cc, *toolchain.target_flags(cc), *_CFLAGS, *flags]
    sources = sorted(Path(work).glob("*.c"), key=lambda file: -file.stat().st_size)
    objects = [str(file.with_suffix(".o")) for file in sources]
    toolchain.run_all(
        [
            [*command, "-c", "-o", to, str(file)]
            for file, to in zip(sources, objects, strict=True)
        ],
        meanwhile=meanwhile,
    )  # fmt: skip
    library = str(Path(work) / "model.so")
    toolchain.run_all([[*command, "-shared", "-pthread", "-o", library, *objects]])
    for name in objects:
        Path(name).unlink()


def keep_c(folder, to):
    """Copy the C of a model and the table of its ports and memories to a folder of the user's."""
    to = Path(to)
    to.mkdir(parents=True, exist_ok=True)
    found = sorted(path for path in Path(folder).iterdir() if path.suffix in (".c", ".h", ".json"))
    return [Path(shutil.copy(path, to)) for path in found]


@cache
def _sources_hash():
    """Hash of what makes C of a netlist."""
    return toolchain.hash_of(*sorted(Path(__file__).parent.glob("*.[ph]*")))


class Model:
    """A compiled design.

    Parameters
    ----------
    folder : path
        That :func:`compile_netlist` filled.
    externs : dict of :class:`~.netlist.Extern`, optional
        As that function was given; waveforms may need them.
    """

    def __init__(self, folder, externs=None):
        self.folder, self.externs = Path(folder), externs or {}
        self.library = library = ctypes.CDLL(str(self.folder / "model.so"))
        pointer, u64, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        for name, result, *arguments in (
            ("state_open", pointer), ("state_close", None, pointer), ("settle", None, pointer),
            ("touch", None, pointer), ("step", None, pointer, u64),
            ("output", u64, pointer, number), ("threads", number, pointer, number),
            ("state_size", u64), ("member_count", u64),
            ("member_name", ctypes.c_char_p, u64), ("member_offset", u64, u64),
            ("run_until", number, pointer, number, number, pointer, u64),
            ("notes_begin", None, pointer, pointer), ("notes_end", None, pointer),
        ):  # fmt: skip
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.table = json.loads((self.folder / "model.json").read_text())
        self.offsets = {
            library.member_name(i).decode(): library.member_offset(i)
            for i in range(library.member_count())
        }
        self._signals = None

    def opened(self):
        """Address of a new state."""
        state = self.library.state_open()
        if not state:
            raise MemoryError("no room for the state of the design")
        return state

    def _unpacked(self, name):
        return json.loads(gzip.decompress((self.folder / f"{name}.json.gz").read_bytes()))

    @property
    def signals(self):
        """The :class:`~.signals.Signals` of the design."""
        if self._signals is None:
            self._signals = Signals(self._unpacked("signals"))
        return self._signals

    def watching(self, values):
        """This model, or one of the same design that keeps these values too; from the cache."""
        missing = sorted(v for v in values if f"v{v}_0" not in self.offsets)
        if not missing:
            return self
        recipe = self._unpacked("recipe")
        cc = recipe["cc"]
        key = toolchain.hash_of(
            self.table["design"], *sorted(self.folder.glob("model*.[ch]")), missing,
            _sources_hash(), toolchain.tool_version(cc), toolchain.target_flags(cc),
            recipe["flags"], toolchain.processor(),
        )  # fmt: skip

        def fill(work):
            compile_netlist(work, **recipe, externs=self.externs, watched=missing)

        model = Model(toolchain.cached("watched", recipe["top"], key, fill), self.externs)
        if model.table["design"] != self.table["design"]:
            raise RuntimeError("the design came out differently when it was compiled again")
        return model


class Simulation:
    """A run of a :class:`Model`.

    Parameters
    ----------
    model : :class:`Model`
    threads : int, optional
        1 or 2; the results are the same. Unless told, a design large enough gets two where there
        are two processors.

    Attributes
    ----------
    model : :class:`Model`
    state : address of the state
    cycles : :class:`int`
        Clock cycles that have passed.
    on_change : callable or None
        Called after :attr:`model` and :attr:`state` have become others.
    """

    def __init__(self, model, threads=None):
        if threads is None:
            work = sum(lanes * cells for _, lanes, cells in model.table["groups"])
            threads = 2 if work > LARGE and _processors() > 1 else 1
        self.model = model
        self.state = model.opened()
        self.use_threads(threads)
        self.recording = None
        self.on_change = None
        self._pace = Pace()

    def use_threads(self, number):
        """Work with 1 or 2 threads from now on; return how many there are."""
        self.threads = self.model.library.threads(self.state, number)
        return self.threads

    def close(self):
        """Free the state; may be called twice."""
        if self.state:
            if self.recording is not None:
                self.recording.end()
            self.model.library.state_close(self.state)
            self.state = None

    def _array(self, name, kind, count):
        """Elements of a member of the state."""
        dtype = np.dtype(_TYPES[kind])
        address = self.state + self.model.offsets[name]
        return np.frombuffer(
            (ctypes.c_char * (dtype.itemsize * count)).from_address(address), dtype
        )

    @property
    def cycles(self):
        """Clock cycles that have passed."""
        return int(self._array("cycles", "u64", 1)[0])

    def set(self, name, value):
        """Set an input of the top."""
        number, width = self.model.table["inputs"][name]
        for word, part in enumerate(words(width)):
            self._array(f"v{number}_{word}", ctype(part), 1)[0] = value >> 64 * word & (
                (1 << part) - 1
            )

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

    # Running --------------------------------------------------------------------------------------

    def _slice(self, left):
        """How many cycles to run next."""
        left = min(left, self._pace.cycles)
        return left if self.recording is None else self.recording.next(left)

    def step(self, cycles=1):
        """Let clock cycles pass; an interrupt is heard within a tenth of a second."""
        while cycles > 0:
            part = self._slice(cycles)
            with self._pace.measured(lambda: self.cycles):
                self.model.library.step(self.state, part)
            cycles -= part
            if self.recording is not None:
                self.recording.drain()

    def run(self, until, cycles):
        """Let clock cycles pass until an output has a value, ``cycles`` at most.

        ``until`` is the name of the output and the value. Returns whether the output has it; then
        :meth:`get` tells the other outputs of the same cycle.
        """
        name, value = until
        number, width = self.model.table["outputs"][name]
        if not 0 <= value < 1 << width:
            raise ValueError(f"output {name} has {width} bits and is never {value}")
        count = len(words(width))
        wanted = (ctypes.c_uint64 * count)(
            *(value >> 64 * word & (1 << 64) - 1 for word in range(count))
        )
        end = self.cycles + cycles
        while True:
            part = self._slice(end - self.cycles)
            with self._pace.measured(lambda: self.cycles):
                met = self.model.library.run_until(self.state, number, count, wanted, part)
            if self.recording is not None:
                self.recording.drain()
            if met or self.cycles >= end:
                return bool(met)

    # Memories -------------------------------------------------------------------------------------

    def touch(self):
        """Say that a memory was written from outside, so that nothing idle misses it."""
        self.model.library.touch(self.state)

    def memory(self, index):
        """Rows of a memory: unsigned array [depth, lanes, words]. See :meth:`touch`."""
        m = self.model.table["memories"][index]
        part = words(m["width"])
        shape = m["depth"], m["lanes"], len(part)
        return self._array(f"m{index}", storage(part[0]), int(np.prod(shape))).reshape(shape)

    # Checkpoints ----------------------------------------------------------------------------------

    def _held(self):
        """What holds the state, word by word: type in a checkpoint, present contents, copies."""
        flip = int(self._array("flip", "u32", 1)[0])
        for *_, width, lanes, number, in_lanes, copies in self.model.table["state"]:
            for word, part in enumerate(words(width)):
                name = f"v{number}_{word}"
                kind = storage(part) if in_lanes else ctype(part)
                views = list(self._array(name, kind, lanes * copies).reshape(copies, lanes))
                if f"n{name}" in self.model.offsets:
                    views.append(self._array(f"n{name}", kind, 1))
                yield _TYPES[storage(part)], views[flip if copies > 1 else 0], views

    def contents(self):
        """The complete state as arrays by name."""
        values = b"".join(now.astype(kind).tobytes() for kind, now, _ in self._held())
        found = {"cycles": np.array(self.cycles), "values": np.frombuffer(values, np.uint8)}
        for index in range(len(self.model.table["memories"])):
            found[f"memory{index}"] = self.memory(index).copy()
        return found

    def put(self, contents):
        """Take on a state that :meth:`contents` returned, of any model of the same design.

        Raises
        ------
        :exc:`~.checkpoint.CheckpointError`
            If something is missing or of another size; then nothing has changed.
        """
        held = list(self._held())
        memories = {f"memory{i}": self.memory(i) for i in range(len(self.model.table["memories"]))}
        sizes = {
            "cycles": (),
            "values": (sum(now.size * np.dtype(kind).itemsize for kind, now, _ in held),),
            **{name: rows.shape for name, rows in memories.items()},
        }
        for name, shape in sizes.items():
            if name not in contents or contents[name].shape != shape:
                raise checkpoint.CheckpointError(f"{name} is missing or of another size")
        at, values = 0, contents["values"].tobytes()
        for kind, now, views in held:
            new = np.frombuffer(values, kind, now.size, at)
            at += new.nbytes
            for view in views:
                view[:] = new
        for name, rows in memories.items():
            rows[:] = contents[name]
        self._array("cycles", "u64", 1)[0] = contents["cycles"]
        self.touch()
        self.settle()

    def facts(self):
        """What must be the same where a checkpoint is restored."""
        return {"top": self.model.table["top"], "design": self.model.table["design"]}

    def save(self, path):
        """Write the complete state to a file; it is there whole or not at all."""
        checkpoint.write(path, self.facts(), self.contents())

    def restore(self, path):
        """Take on the state that :meth:`save` wrote, here or in another process.

        Raises
        ------
        :exc:`~.checkpoint.CheckpointError`
            If the file is no checkpoint, is damaged, or is of another design or version; then
            nothing has changed.
        """
        self.check_no_recording()
        facts, contents = checkpoint.read(path)
        checkpoint.check(path, facts, self.facts())
        self.put(contents)

    def check_no_recording(self):
        """Raise :exc:`RuntimeError` while waveforms are recorded."""
        if self.recording is not None:
            raise RuntimeError("waveforms are being recorded: end the recording first")

    # Waveforms ------------------------------------------------------------------------------------

    def become(self, model, state):
        """Go on with another model of the same design; returns the model and state left behind."""
        left, contents = (self.model, self.state), self.contents()
        model.library.threads(state, self.threads)
        self.model, self.state = model, state
        self.put(contents)
        if self.on_change is not None:
            self.on_change()
        return left

    @contextlib.contextmanager
    def record(self, path, signals="*", *, start=None, cycles=None, lane=None, margin=0, zero=0):
        """Write waveforms (VCD) of what passes in a block; the file is complete after it.

        Parameters
        ----------
        path : path
        signals : :class:`str` or sequence of them
            See :meth:`~.signals.Signals.find`.
        start : :class:`int`, optional
            First cycle, counted as :attr:`cycles` is; the present one if not given.
        cycles : :class:`int`, optional
            How many from there on; all if not given. Outside of them nothing is noted, and nothing
            is slower.
        lane : :class:`int`, optional
            Of equal instances only this one.
        margin : :class:`int`, cycles
            By how much whoever steps the state may run past what was agreed.
        zero : :class:`int`
            The cycle from which ``start`` and the times in the file are counted.

        Raises
        ------
        :exc:`~.signals.UnknownSignal`
            If a name matches nothing; the message lists those that are near.
        :exc:`~.signals.WindowError`
            If the window begins in the past, or none of its cycles has passed; nothing is written.

        Arrays from :meth:`memory` taken before show the memory as it was before.
        """
        self.check_no_recording()
        recording = self.recording = Recording(self, signals, start, cycles, lane, margin, zero)
        try:
            with recording.writing(path):
                yield recording
        finally:
            self.recording = None

    def waves(self, path, signals="*", *, start=None, cycles, lane=None):
        """Run to cycle ``start``, then for ``cycles`` cycles; write waveforms of these.

        See :meth:`record`.
        """
        start = self.cycles if start is None else start
        with self.record(path, signals, start=start, cycles=cycles, lane=lane):
            self.step(start + cycles - self.cycles)
