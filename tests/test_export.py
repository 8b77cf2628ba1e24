# amaranth: UnusedElaboratable=no
"""Exported Verilog: one module per replicated component; it does what the simulator does."""

import ctypes
import json
import re
import sys

import pytest
from amaranth.hdl import Module, Signal, Value
from amaranth.lib import data, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from makalu.rtl import verilog
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.rtl.lib.replicate import Replicated
from makalu.rtl.verilog import export, to_rtlil, write_export
from makalu.sim import toolchain
from makalu.sim.harness import Stepper
from makalu.sim.memory import Hbm


class Leaf(wiring.Component):
    """Adds; counts what it has added."""

    def __init__(self):
        super().__init__({"i": In(8), "index": In(4), "o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        m.d.sync += self.o.eq(self.i + self.index)
        return m


class Row(wiring.Component):
    """Four leaves in a chain, and a memory of its own."""

    def __init__(self):
        super().__init__({"i": In(8), "o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        value = self.i
        for k in range(4):
            m.submodules[f"leaf{k}"] = leaf = Replicated(Leaf(), "leaf")
            m.d.comb += [leaf.component.i.eq(value), leaf.component.index.eq(k)]
            value = leaf.component.o
        m.submodules.store = store = Memory(shape=8, depth=16, init=[])
        write, read = store.write_port(), store.read_port()
        m.d.comb += [
            write.addr.eq(value[:4]),
            write.data.eq(value),
            write.en.eq(value[7]),
            read.addr.eq(value[1:5]),
            self.o.eq(read.data),
        ]
        return m


class Grid(wiring.Component):
    """Rows, memories of several kinds, and a register with a constant part."""

    def __init__(self):
        super().__init__({"i": In(8), "address": In(4), "o": Out(8).array(3), "odd": Out(16)})

    def elaborate(self, platform):
        m = Module()
        for r in range(3):
            m.submodules[f"row{r}"] = row = Replicated(Row(), "row")
            m.d.comb += [row.component.i.eq(self.i ^ r), self.o[r].eq(row.component.o)]
        m.submodules.rom = rom = Memory(shape=8, depth=16, init=[3 * i for i in range(16)])
        m.submodules.late = late = Memory(shape=8, depth=12, init=[7 * i for i in range(1, 13)])
        m.submodules.bytes = store = Memory(shape=16, depth=16, init=[])
        write = store.write_port(granularity=8)
        plain, clear = store.read_port(), store.read_port(transparent_for=(write,))
        direct, table = store.read_port(domain="comb"), rom.read_port(domain="comb")
        held = late.read_port()
        layout = data.StructLayout({"constant": 4, "value": 8, "rest": 4})
        mixed = Signal(layout)
        m.d.comb += [
            write.addr.eq(self.i[:4]),
            write.data.eq(self.i * 257),
            write.en.eq(self.i[6:8]),
            plain.addr.eq(self.address),
            clear.addr.eq(self.address),
            clear.en.eq(self.i[0]),
            direct.addr.eq(self.address),
            table.addr.eq(self.address),
            held.addr.eq(self.i[1:4]),
            held.en.eq(self.i[4]),
            mixed.constant.eq(0b1010),
        ]
        with m.If(self.i[1]):
            m.d.comb += mixed.value.eq(table.data)
        m.d.sync += self.odd.eq(plain.data + 3 * clear.data + 5 * direct.data + 257 * held.data)
        with m.If(self.i[2]):
            m.d.sync += self.odd.eq(Value.cast(mixed))
        return m


def modules(verilog):
    return re.findall(r"^module \\?(\S+?) ?\(", verilog, re.MULTILINE)


def test_a_replicated_component_is_one_module_with_many_instances():
    text = export(Grid(), name="grid")
    names = modules(text)
    assert names.count("leaf") == names.count("row") == names.count("grid") == 1
    assert len(names) == len(set(names))
    assert len(re.findall(r"^  leaf leaf\d ", text, re.MULTILINE)) == 4
    assert len(re.findall(r"^  row row\d ", text, re.MULTILINE)) == 3


def test_equal_memories_are_one_module_that_starts_with_zeroes():
    text = export(Grid(), name="grid")
    assert modules(text).count("memory_16x8_1r1w") == 1
    assert "mem[row] = 0;" in text
    assert "mem[row]" not in export(Grid(), name="grid", zero_memories=False)


def test_a_rom_is_a_choice_among_constants():
    text = export(Grid(), name="grid", zero_memories=False)
    for name, word in (("rom_16x8", "4'hb:\n          data = 8'h21;"), ("rom_12x8", "4'h2:")):
        found = re.search(rf"^module {name}\(.*?^endmodule$", text, re.MULTILINE | re.DOTALL)
        assert found, name
        assert word in found[0]


def test_no_process_is_sensitive_to_nothing():
    text = export(Grid(), name="grid")
    for body in re.findall(r"always @\*\n(.*)", text):
        right = body.partition(" = ")[2]
        assert not right or re.search(r"(?<!')\b[a-zA-Z_\\]", right), body


@pytest.mark.parametrize("emit_src", [False, True])
def test_constant_bits_of_a_register_are_assigned_with_its_others(emit_src):
    text = export(Grid(), name="grid", emit_src=emit_src, zero_memories=False)
    # An initial block says nothing to a synthesizer for an ASIC.
    assert not re.search(r"^ *initial\b", text, re.MULTILINE)
    blocks = re.findall(r"^  always @\* begin\n.*?^  end$", text, re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "mixed[3:0] = 4'ha;" in block]
    assert len(blocks) == 1
    assert "mixed[11:4] = " in blocks[0]
    assert text.count("mixed[3:0] = ") == 1


CONSTANTS = """\
module m(a, \\o.x , s, t);
  always @*
    \\o.x [1:0] = 2'h1;
  always @* begin
    s[1] = 1'h0;
    casez (a)
      1'h1:
          \\o.x [2] = a;
    endcase
  end
  always @*
    s[0] = 1'h1;
  (* src = "here" *)
  always @*
    t[3:1] = { 1'h0, 2'h3 };
  always @*
    t[0] = a;
endmodule
"""


def test_constants_find_the_process_of_their_register():
    placed = verilog._MODULE.sub(verilog._place_constants, CONSTANTS)
    assert (
        placed
        == """\
module m(a, \\o.x , s, t);
  always @* begin
    s[0] = 1'h1;
    \\o.x [1:0] = 2'h1;
    s[1] = 1'h0;
    casez (a)
      1'h1:
          \\o.x [2] = a;
    endcase
  end
  always @* begin
    t[3:1] = { 1'h0, 2'h3 };
    t[0] = a;
  end
endmodule
"""
    )


def test_a_constant_without_a_process_is_an_error():
    text = CONSTANTS.replace("t[0] = a", "u[0] = a")
    with pytest.raises(AssertionError, match="the other bits of 't'"):
        verilog._MODULE.sub(verilog._place_constants, text)


def test_two_definitions_under_one_name_are_an_error():
    class Bad(wiring.Component):
        def __init__(self):
            super().__init__({"i": In(8), "o": Out(8)})

        def elaborate(self, platform):
            m = Module()
            m.submodules.a = Replicated(Leaf(), "same")
            m.submodules.b = Replicated(Row(), "same")
            return m

    with pytest.raises(ValueError, match="module 'same' is defined by"):
        to_rtlil(Bad(), name="bad")


def test_source_lines_are_optional():
    assert "test_export.py" not in export(Grid(), name="grid")
    assert "test_export.py" in export(Grid(), name="grid", emit_src=True)


# The same behaviour -------------------------------------------------------------------------------


def _ports(component):
    inputs, outputs = [], []
    for path, member, value in component.signature.flatten(component):
        name = "__".join(str(part) for part in path)
        (inputs if member.flow == In else outputs).append((name, Value.cast(value)))
    return inputs, outputs


def _lockstep(component, name, stimulus, *, cycles, glue_head=""):
    """Drive a component in both simulators with ``stimulus(rng, port)``; compare every output."""
    try:
        toolchain.find_verilator()
        toolchain.find_cxx()
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))
    inputs, outputs = _ports(component)

    def access(port, value):
        port = port.replace("__", "___05F")
        words = (len(value) + 31) // 32
        if len(value) <= 64:
            return f"memcpy(&t.{port}, p, sizeof t.{port}); p += {words};", (
                f"memcpy(p, &t.{port}, sizeof t.{port}); p += {words};"
            )
        return f"memcpy(t.{port}.data(), p, {4 * words}); p += {words};", (
            f"memcpy(p, t.{port}.data(), {4 * words}); p += {words};"
        )

    drive = "\n".join(access(*port)[0] for port in inputs)
    sample = "\n".join(access(*port)[1] for port in outputs)
    glue = f"""
#include "Vtop.h"
#include "verilated.h"
#include <cstring>
struct Model {{ VerilatedContext context; Vtop top{{&context}}; }};
extern "C" void* make() {{ auto m = new Model; m->top.rst = 0; return m; }}
extern "C" void drive(void* h, const unsigned* p) {{
    Vtop& t = static_cast<Model*>(h)->top;
    {drive}
    t.clk = 0; t.eval();
}}
extern "C" void sample(void* h, unsigned* p) {{
    Vtop& t = static_cast<Model*>(h)->top;
    {sample}
}}
extern "C" void edge(void* h) {{
    Vtop& t = static_cast<Model*>(h)->top;
    t.clk = 1; t.eval();
}}
"""
    path = toolchain.build_verilated(
        name=name, verilog=export(component, name=name), top=name, glue=glue, opt="-O1"
    )
    library = ctypes.CDLL(str(path))
    library.make.restype = ctypes.c_void_p
    model = ctypes.c_void_p(library.make())

    def pack(values):
        words = []
        for value, (_, port) in zip(values, inputs, strict=True):
            words += [value >> 32 * i & 0xFFFFFFFF for i in range((len(port) + 31) // 32)]
        return (ctypes.c_uint32 * len(words))(*words)

    def unpack(words):
        values, at = [], 0
        for _, port in outputs:
            count = (len(port) + 31) // 32
            value = sum(int(word) << 32 * i for i, word in enumerate(words[at : at + count]))
            values.append(value)
            at += count
        return values

    stepper = Stepper(component)
    library.drive(model, pack([stepper.get(port) for _, port in inputs]))
    library.edge(model)  # the cycle that the stepper starts with
    buffer = (ctypes.c_uint32 * sum((len(port) + 31) // 32 for _, port in outputs))()
    varied = set()
    for cycle in range(cycles):
        values = [stimulus(port, len(signal)) for port, signal in inputs]
        for value, (_, signal) in zip(values, inputs, strict=True):
            stepper.set(signal, value)
        library.drive(model, pack(values))
        library.sample(model, buffer)
        for (port, signal), got in zip(outputs, unpack(buffer), strict=True):
            expected = stepper.get(signal)
            assert got == expected, f"cycle {cycle}: {port} is {got:#x}, not {expected:#x}"
            varied.add((port, got))
        stepper.step()
        library.edge(model)
    return varied


@pytest.mark.verilator
def test_verilog_does_what_the_simulator_does(rng):
    varied = _lockstep(
        Grid(),
        "grid",
        lambda port, bits: int(rng.integers(1 << bits)),
        cycles=300,
    )
    assert len(varied) > 200


@pytest.mark.verilator
def test_verilog_of_the_hbm_does_what_the_simulator_does(rng):
    dut = Hbm(config=TINY, hbm=HbmConfig(size_bytes=4096, latency_cycles=7))
    fixed = {"settings": Value.cast(dut.settings).init}

    def stimulus(port, bits):
        if port in fixed:
            return fixed[port]
        if port.endswith("addr"):
            return int(rng.integers(2 * 4096))
        if port.endswith("len"):
            return int(rng.integers(6))
        if port.endswith("size"):
            return 3
        if port.endswith("burst"):
            return 1
        return int.from_bytes(rng.bytes(8), "little") & (1 << bits) - 1

    varied = _lockstep(dut, "hbm", stimulus, cycles=400)
    seen = {port for port, _ in varied}
    assert {("dma__0__rresp", 3), ("dma__0__bvalid", 1)} <= varied
    assert len([value for port, value in varied if port == "fetch__rdata"]) > 3
    assert "dma__0__bresp" in seen


# Files --------------------------------------------------------------------------------------------


def test_export_writes_verilog_ports_and_file_list(tmp_path):
    files = write_export(TINY, tmp_path / "out")
    assert sorted(path.name for path in files) == [
        "files.f", "makalu_core.v", "ports.json", "ports.md",
    ]  # fmt: skip
    assert sorted((tmp_path / "out").iterdir()) == sorted(files)
    text = (tmp_path / "out" / "makalu_core.v").read_text()
    table = json.loads((tmp_path / "out" / "ports.json").read_text())
    assert table["fingerprint"] == TINY.fingerprint
    body = re.search(r"^module makalu_core\(.*?^endmodule", text, re.DOTALL | re.MULTILINE)[0]
    for port in table["ports"]:
        width = f"[{port['bits'] - 1}:0] " if port["bits"] > 1 else ""
        assert f"  {port['direction']} {width}{port['name']};\n" in body
        assert f"| `{port['name']}` |" in (tmp_path / "out" / "ports.md").read_text()
    names = [port["name"] for port in table["ports"]]
    assert {"clk", "rst", "host__awaddr", "fetch__rdata", "dma0__wstrb"} <= set(names)
    assert modules(text).count("pe") == 1


def test_a_failed_export_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "makalu_core.v").write_text("old")
    monkeypatch.setattr(
        "makalu.rtl.verilog.export", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no yosys"))
    )
    with pytest.raises(RuntimeError, match="no yosys"):
        write_export(TINY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["makalu_core.v"]
    assert (tmp_path / "makalu_core.v").read_text() == "old"


@pytest.mark.slow
def test_the_full_machine_exports_within_two_gigabytes(tmp_path):
    import subprocess

    code = (
        "import resource, sys; from makalu.rtl.arch.config import TRN; "
        "from makalu.rtl.verilog import write_export; write_export(TRN, sys.argv[1]); "
        "who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN; "
        "used = [*map(resource.getrusage, who)]; "
        # Its own peak: that of getrusage begins with what the process that started it had used.
        "status = dict(line.split(':') for line in open('/proc/self/status')); "
        "own = int(status['VmHWM'].split()[0]); "
        "print(max(own, used[1].ru_maxrss), sum(u.ru_utime + u.ru_stime for u in used))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peak, seconds = map(float, done.stdout.split()[-2:])
    print(f"{seconds:.1f} s, {peak / 1e6:.2f} GB")
    text = (tmp_path / "makalu_core.v").read_text()
    assert modules(text).count("pe") == 1
    assert peak < 2e6
