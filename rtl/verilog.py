"""Verilog of a core: one module per kind of component, plain memories, explicit clock and reset.

Amaranth emits a module per instance; here a component wrapped in
:class:`~.lib.replicate.Replicated` is converted once and instantiated by name, and so is every
memory of one geometry. The result is what ``makalu export`` writes and what the compiled simulators
are built from.
"""

import contextlib
import gc
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from amaranth._toolchain.yosys import find_yosys
from amaranth.back import rtlil
from amaranth.hdl import (
    ClockDomain,
    ClockSignal,
    Elaboratable,
    Fragment,
    Instance,
    MemoryInstance,
    Shape,
    Value,
)
from amaranth.hdl._ir import PortDirection
from amaranth.lib import wiring
from amaranth.utils import ceil_log2

from .lib.replicate import Library

__all__ = [
    "Rtlil", "export", "rtlil_texts", "seldom_collected", "to_rtlil", "to_verilog", "write_export",
]  # fmt: skip

TOP = "makalu_core"
"""Name of the top module of an exported core."""


# Memories -----------------------------------------------------------------------------------------


class _MemoryModules(Library):
    """A library that makes memories modules of their own, one per geometry.

    That keeps them recognisable, as single arrays that a memory compiler's macros can replace, and
    keeps initial contents of nothing but zeroes out of the text.

    A memory without a write port becomes a choice among constants, a module for each contents. To a
    synthesizer for an ASIC an initial block says nothing; of a choice any synthesizer makes logic,
    or a block of memory where there are some.
    """

    def __init__(self):
        super().__init__()
        self.memories = {}  # name -> text
        self.roms = {}  # name -> text
        self._names = {}  # geometry, and contents of a ROM -> name

    def get_memory(self, memory):
        """Return an instance of the module for ``memory`` (called by Amaranth)."""
        width, depth = Shape.cast(memory.shape).width, memory.depth
        reads, writes = memory.read_ports, memory.write_ports
        domains = []
        for port in (*writes, *reads):
            if port.domain not in domains and port.domain != "comb":
                domains.append(port.domain)
        if depth < 2 or width == 0:
            return _plain_memory(memory)
        if not writes and len(reads) == 1:
            return self._rom(memory, width, depth)
        if any(memory.data.init):
            return _plain_memory(memory)

        def clock(domain):
            return domains.index(domain) if domain != "comb" else None

        geometry = (
            width,
            depth,
            tuple((clock(port.domain), len(port.en)) for port in writes),
            tuple(
                (clock(port.domain), tuple(writes.index(w) for w in port.transparent_for))
                for port in reads
            ),
        )
        name = self._names.get(geometry)
        if name is None:
            name = f"memory_{depth}x{width}_{len(reads)}r{len(writes)}w"
            while name in self.memories:
                name += "_x"
            self._names[geometry] = name
            self.memories[name] = _memory_rtlil(name, geometry)
        ports = {f"i_clk{i}": ClockSignal(domain) for i, domain in enumerate(domains)}
        for i, port in enumerate(writes):
            ports[f"i_w{i}_addr"] = port.addr
            ports[f"i_w{i}_data"] = Value.cast(port.data)
            ports[f"i_w{i}_en"] = port.en
        for i, port in enumerate(reads):
            ports[f"i_r{i}_addr"] = port.addr
            ports[f"o_r{i}_data"] = Value.cast(port.data)
            if port.domain != "comb":
                ports[f"i_r{i}_en"] = port.en
        return Instance(name, **ports)

    def _rom(self, memory, width, depth):
        (port,) = memory.read_ports
        clocked = port.domain != "comb"
        words = tuple(memory.data.init._raw)
        name = self._names.get((width, clocked, words))
        if name is None:
            name = f"rom_{depth}x{width}"
            while name in self.roms:
                name += "_x"
            self._names[width, clocked, words] = name
            self.roms[name] = _rom_rtlil(name, width, words, clocked)
        ports = {"i_addr": port.addr, "o_data": Value.cast(port.data)}
        if clocked:
            ports |= {"i_clk": ClockSignal(port.domain), "i_en": port.en}
        return Instance(name, **ports)


def _plain_memory(memory):
    """What Amaranth itself makes of a memory."""
    instance = MemoryInstance(data=memory.data, attrs=memory.attrs, src_loc=memory.src_loc)
    writes = {
        port: instance.write_port(domain=port.domain, addr=port.addr, data=port.data, en=port.en)
        for port in memory.write_ports
    }
    for port in memory.read_ports:
        instance.read_port(
            domain=port.domain,
            data=port.data,
            addr=port.addr,
            en=port.en,
            transparent_for=tuple(writes[write] for write in port.transparent_for),
        )
    return instance


def _memory_rtlil(name, geometry):
    """The module of one memory geometry, in Yosys's text form."""
    width, depth, writes, reads = geometry
    address = ceil_log2(depth)
    lines, number = [], 0

    def wire(name, bits, direction):
        nonlocal number
        number += 1
        lines.append(f"  wire width {bits} {direction} {number} \\{name}")

    def cell(kind, name, parameters, connections):
        lines.append(f"  cell {kind} \\{name}")
        for key, value in {"MEMID": '"\\\\mem"', "ABITS": address, **parameters}.items():
            lines.append(f"    parameter \\{key} {value}")
        for key, value in connections.items():
            lines.append(f"    connect \\{key} {value}")
        lines.append("  end")

    clocks = {port[0] for port in (*writes, *reads)} - {None}
    for clock in sorted(clocks):
        wire(f"clk{clock}", 1, "input")
    for i, (_, enables) in enumerate(writes):
        wire(f"w{i}_addr", address, "input")
        wire(f"w{i}_data", width, "input")
        wire(f"w{i}_en", enables, "input")
    for i, (clock, _) in enumerate(reads):
        wire(f"r{i}_addr", address, "input")
        wire(f"r{i}_data", width, "output")
        if clock is not None:
            wire(f"r{i}_en", 1, "input")
    lines.append(f"  memory width {width} size {depth} \\mem")
    for i, (clock, enables) in enumerate(writes):
        bits = [f"\\w{i}_en [{part}]" for part in range(enables) for _ in range(width // enables)]
        cell(
            "$memwr_v2",
            f"write{i}",
            {"WIDTH": width, "CLK_ENABLE": "1'1", "CLK_POLARITY": "1'1", "PORTID": i,
             "PRIORITY_MASK": 0},
            {"ADDR": f"\\w{i}_addr", "DATA": f"\\w{i}_data", "CLK": f"\\clk{clock}",
             "EN": "{ " + " ".join(reversed(bits)) + " }"},
        )  # fmt: skip
    undefined = f"{width}'{'x' * width}"
    for i, (clock, transparent) in enumerate(reads):
        mask = f"{len(writes)}'" + "".join(
            "1" if w in transparent else "0" for w in reversed(range(len(writes)))
        )
        zeros = f"{len(writes)}'" + "0" * len(writes)
        cell(
            "$memrd_v2",
            f"read{i}",
            {"WIDTH": width, "TRANSPARENCY_MASK": mask, "COLLISION_X_MASK": zeros,
             "ARST_VALUE": undefined, "SRST_VALUE": undefined, "INIT_VALUE": undefined,
             "CE_OVER_SRST": "1'0", "CLK_ENABLE": f"1'{int(clock is not None)}",
             "CLK_POLARITY": "1'1"},
            {"ADDR": f"\\r{i}_addr", "DATA": f"\\r{i}_data", "ARST": "1'0", "SRST": "1'0",
             "EN": "1'1" if clock is None else f"\\r{i}_en",
             "CLK": "1'0" if clock is None else f"\\clk{clock}"},
        )  # fmt: skip
    return "\n".join([f"module \\{name}", *lines, "end", ""])


def _rom_rtlil(name, width, words, clocked):
    """The module of a ROM, in Yosys's text form."""
    address = ceil_log2(len(words))
    mask = (1 << width) - 1
    lines = [
        f"  wire width {address} input 1 \\addr",
        f"  wire width {width} output 2 \\data",
    ]
    if clocked:
        lines += [
            "  wire input 3 \\clk",
            "  wire input 4 \\en",
            f"  wire width {width} \\word",
            "  cell $dffe \\register",
            f"    parameter \\WIDTH {width}",
            "    parameter \\CLK_POLARITY 1'1",
            "    parameter \\EN_POLARITY 1'1",
            "    connect \\CLK \\clk",
            "    connect \\EN \\en",
            "    connect \\D \\word",
            "    connect \\Q \\data",
            "  end",
        ]
    word = "\\word" if clocked else "\\data"
    lines += ["  process \\choice", "    switch \\addr"]
    # With a default Yosys sees that it is a memory.
    cases = [*(f"{address}'{i:0{address}b}" for i in range(len(words))), ""]
    for case, value in zip(cases, (*words, 0), strict=True):
        lines += [f"      case {case}", f"        assign {word} {width}'{value & mask:0{width}b}"]
    lines += ["    end", "  end"]
    return "\n".join([f"module \\{name}", *lines, "end", ""])


# Conversion ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rtlil:
    """A design as Yosys reads it.

    Attributes
    ----------
    text : :class:`str`
        All modules.
    top : :class:`str`
        Name of the top module.
    components : :class:`tuple` of :class:`str`
        Modules that stand for replicated components, outermost first.
    memories : :class:`tuple` of :class:`str`
        Modules that hold one memory each, an array called ``mem``.
    """

    text: str
    top: str
    components: tuple[str, ...]
    memories: tuple[str, ...]


def _mark_used(component):
    """Tell Amaranth that a component and those it was constructed with are not left over.

    Of replicated components all but one stay unelaborated.
    """
    waiting = [component]
    seen = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Elaboratable):
            item._MustUse__used = True
            waiting += vars(item).values()
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()


def _flat_ports(component):
    """Ports of a component by their name in the export: ``(value, is an input, shape)``."""
    ports = {}
    for path, member, value in component.signature.flatten(component):
        value = Value.cast(value)
        name = "__".join(str(part) for part in path)
        ports[name] = (value, member.flow == wiring.In)
    return ports


def _convert(component, name, library, emit_src):
    fragment = Fragment.get(component, library)
    domain = getattr(component, "sync_domain", None)
    if domain is None:
        domain = ClockDomain("sync")
        fragment.add_domains(domain)
    ports = {"clk": (domain.clk, PortDirection.Input), "rst": (domain.rst, PortDirection.Input)}
    for port, (value, is_input) in _flat_ports(component).items():
        ports[port] = (value, PortDirection.Input if is_input else PortDirection.Output)
    text, _ = rtlil.convert_fragment(fragment, ports, name, emit_src=emit_src)
    if name != library.top:
        text = text.replace("attribute \\top 1\n", "")
    return text


@contextlib.contextmanager
def seldom_collected():
    """Let Python look for garbage more seldom: millions of objects live until a design is done.

    Elaborating TRN takes 25 instead of 35 s, in as much memory.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@seldom_collected()
def to_rtlil(component, *, name=TOP, emit_src=False):
    """Convert a component and everything in it, each replicated component once.

    Parameters
    ----------
    component : :class:`~amaranth.lib.wiring.Component`
        Uses the domain ``sync`` of its surroundings, or has an attribute ``sync_domain``. Either
        way the module's ports are ``clk``, ``rst`` and the members of its signature, joined by
        ``__``.
    name : :class:`str`
        Of the top module.
    emit_src : :class:`bool`
        Whether to say for each cell which line of Python made it.

    Returns
    -------
    :class:`Rtlil`
    """
    library = _MemoryModules()
    texts = list(rtlil_texts(component, name=name, emit_src=emit_src, library=library))
    return Rtlil("\n".join(texts), name, tuple(library.components), tuple(library.memories))


def rtlil_texts(component, *, name=TOP, emit_src=False, library=None):
    """What :func:`to_rtlil` consists of, piece by piece, the top first."""
    _mark_used(component)
    library = _MemoryModules() if library is None else library
    library.top = name
    yield _convert(component, name, library, emit_src)
    done = 0
    while done < len(library.components):  # converting one may add others
        inner, part = list(library.components.items())[done]
        yield _convert(part, inner, library, emit_src)
        done += 1
    yield from library.memories.values()
    yield from library.roms.values()


_NAME = r"(?:\\\S+ |[\w$]+)"
_NUMBER = r"\d+'s?[hbdo][0-9a-fxz_]+"
_CONSTANT_PROCESS = re.compile(
    r"^(?:  \(\*[^\n]*\*\)\n)*  always @\*\n"
    rf"(?P<line>    (?P<name>{_NAME})[^=\n]* = (?:{_NUMBER}|\{{ (?:{_NUMBER},? )+\}});\n)",
    re.MULTILINE,
)
_MODULE = re.compile(r"^module .*?^endmodule$", re.MULTILINE | re.DOTALL)


def _place_constants(module):
    """A module in which the constant bits of a register are assigned together with its others.

    Yosys writes such bits as a process that is sensitive to nothing and so never runs. An initial
    block would do in simulators and FPGAs, but says nothing to a synthesizer for an ASIC.
    """
    text = module[0]
    for found in list(_CONSTANT_PROCESS.finditer(text)):
        line, name = found["line"], re.escape(found["name"])
        text = text.replace(found[0], "", 1)
        # A process that assigns other bits: a block, or a single statement.
        block = re.compile(
            rf"^  always @\* begin\n(?=(?:    .*\n)*? +{name}(?: ?\[[\d:]+\])? = )", re.MULTILINE
        )
        single = re.compile(
            rf"^  always @\*\n(    {name}(?: ?\[[\d:]+\])? = [^\n]*;\n)", re.MULTILINE
        )
        text, placed = block.subn(lambda head, line=line: head[0] + line, text, count=1)
        if not placed:
            text, placed = single.subn(
                lambda other, line=line: f"  always @* begin\n{line}{other[1]}  end\n",
                text,
                count=1,
            )
        if not placed:
            raise AssertionError(f"no process assigns the other bits of {found['name']!r}")
    return text


_ARRAY = re.compile(r"^  reg (\[\d+:0\] )?mem \[(\d+):0\];\n", re.MULTILINE)


def to_verilog(design, *, emit_src=False, zero_memories=True):
    """Return an :class:`Rtlil` as Verilog; see :func:`export`."""
    yosys = find_yosys(lambda version: version >= (0, 40))
    script = [
        f"read_rtlil <<rtlil\n{design.text}\nrtlil",
        "proc -nomux -norom",
        "memory_collect",
    ]
    for scope in ("", "-modattr "):
        script.append(
            f"attrmap {scope}-remove generator -remove top -remove amaranth.hierarchy "
            "-remove amaranth.decoding" + ("" if emit_src else " -remove src")
        )
    script.append("write_verilog -norename" + ("" if emit_src else " -noattr"))
    text = yosys.run(["-q", "-"], "\n".join(script), ignore_warnings=True)
    text = _MODULE.sub(_place_constants, text)
    if zero_memories:
        text = _ARRAY.sub(
            lambda match: (
                f"{match[0]}  integer row;\n  initial\n"
                f"    for (row = 0; row <= {match[2]}; row = row + 1)\n      mem[row] = 0;\n"
            ),
            text,
        )
    return text


def export(component, *, name=TOP, emit_src=False, zero_memories=True):
    """Return a component and everything in it as Verilog.

    Parameters
    ----------
    component, name, emit_src
        As for :func:`to_rtlil`.
    zero_memories : :class:`bool`
        Whether memories start out as zeroes, as in Amaranth's simulator. For a simulator without
        unknown values this is a waste of time.
    """
    design = to_rtlil(component, name=name, emit_src=emit_src)
    return to_verilog(design, emit_src=emit_src, zero_memories=zero_memories)


# Files --------------------------------------------------------------------------------------------


def _port_table(component):
    rows = [("clk", "input", 1), ("rst", "input", 1)]
    rows += [
        (port, "input" if is_input else "output", len(value))
        for port, (value, is_input) in _flat_ports(component).items()
    ]
    return rows


def _describe(config, ports):
    lines = [
        f"# {TOP}: {config.name}",
        "",
        f"    {config!r}",
        "",
        "All ports are synchronous to `clk`; `rst` is synchronous and active high. `host` is",
        "an AXI4-Lite subordinate; `fetch` and `dma0`, `dma1`, ... are AXI4 managers.",
        "",
        "| port | direction | bits |",
        "|---|---|---|",
        *(f"| `{name}` | {direction} | {bits} |" for name, direction, bits in ports),
        "",
    ]
    return "\n".join(lines)


def write_export(config, out_dir, *, emit_src=False):
    """Write the core for ``config`` as Verilog, with a table of its ports and a list of files.

    Each file replaces an older one as a whole; nothing is written if the export fails.

    Returns
    -------
    list of :class:`~pathlib.Path`
        The files: ``makalu_core.v``, ``ports.md``, ``ports.json`` and ``files.f``.
    """
    from .core import Core  # the one export that needs the whole core

    core = Core(config=config)
    _mark_used(core)
    ports = _port_table(core)
    head = f"// Makalu {config.name}: {config!r}\n`timescale 1ns / 1ps\n\n"
    table = {
        "top": TOP,
        "config": config.name,
        "fingerprint": config.fingerprint,
        "ports": [{"name": n, "direction": d, "bits": b} for n, d, b in ports],
    }
    files = {
        f"{TOP}.v": head + export(core, name=TOP, emit_src=emit_src),
        "ports.md": _describe(config, ports),
        "ports.json": json.dumps(table, indent=1) + "\n",
        "files.f": f"{TOP}.v\n",
    }
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".export-", dir=out_dir))
    try:
        for name, text in files.items():
            (work / name).write_text(text)
        for name in files:
            (work / name).replace(out_dir / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return [out_dir / name for name in files]
