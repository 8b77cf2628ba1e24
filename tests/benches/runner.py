"""Run a cocotb bench on exported Verilog from pytest, and trust its green.

cocotb's own runner returns normally when a test failed, when the filter matched nothing and when a
test module could not be imported; Icarus goes on after a failed assertion. :func:`run_bench`
therefore counts the results, wants exactly the tests that the module defines, and reads the log.
``test_guards.py`` holds a broken design for each of these guards.
"""

import ast
import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import cocotb_tools.config
from cocotb_tools.runner import Icarus, Verilator
from makalu.sim import toolchain

__all__ = ["SIMULATORS", "BenchFailure", "run_bench"]

MODELS = Path(__file__).parents[1] / "rtl" / "engines"
"""Where benches find the models that the tests of ``rtl/`` use too."""

SIMULATORS = ["verilator", *(["icarus"] if shutil.which("iverilog") else [])]
"""Simulators of this machine; Icarus is optional."""


class BenchFailure(AssertionError):
    """A bench that did not pass, whatever its simulator's exit code was."""


def _defined_tests(path):
    """Names of the coroutines that ``@cocotb.test`` or ``@cocotb.parametrize`` decorates."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                if "cocotb" in ast.unparse(decorator):
                    names.add(node.name)
    return names


class _VerilatorWheel(Verilator):
    """cocotb's Verilator runner without make and Perl: our toolchain compiles."""

    vlt = ""

    def _simulator_in_path_build_only(self):
        self.executable = toolchain.find_verilator().command[0]

    def _build_command(self):
        verilator, cxx = toolchain.find_verilator(), toolchain.find_cxx()
        work = Path(self.build_dir)
        model = work / "model"
        shutil.rmtree(model, ignore_errors=True)
        control = work / "public.vlt"
        control.write_text(self.vlt)
        main = cocotb_tools.config.share_dir / "lib" / "verilator" / "verilator.cpp"
        toolchain.run_all(
            [
                [
                    *verilator.command, "-cc", "--exe", "-Mdir", str(model), "--top-module",
                    self.hdl_toplevel, "--vpi", "--prefix", "Vtop", "--timescale", "1ns/1ps",
                    "-Wno-lint", "-Wno-style", "-Wno-fatal", "--assert", "--no-timing", "-O3",
                    str(main), str(control), *(str(s.value) for s in self._verilog_sources),
                    *(str(s.value) for s in self._sources),
                ]
            ],
            env={**os.environ, "VERILATOR_ROOT": str(verilator.root)},
        )  # fmt: skip
        include = verilator.root / "include"
        flags = [
            "-std=c++17", "-w", "-O1", "-DVERILATOR=1", "-DVM_COVERAGE=0", "-DVM_SC=0",
            "-DVM_TRACE=0", f"-I{include}", f"-I{include / 'vltstd'}", f"-I{model}",
        ]  # fmt: skip
        units = [*sorted(model.glob("*.cpp")), Path(main)]
        objects = [work / f"{unit.stem}.o" for unit in units]
        toolchain.run_all(
            [
                [*cxx, *flags, "-c", str(unit), "-o", str(obj)]
                for unit, obj in zip(units, objects, strict=True)
            ]
        )
        names = ["verilated", "verilated_threads", "verilated_vpi"]
        objects += toolchain.runtime_objects(
            names,
            cxx,
            verilator,
            "-O1",
            2,
            without=("-DVL_TIME_CONTEXT",),  # sc_time_stamp rules
        )
        libs = cocotb_tools.config.libs_dir
        toolchain.run_all(
            [
                [
                    *cxx, "-o", str(work / self.hdl_toplevel), *map(str, objects), f"-L{libs}",
                    f"-Wl,-rpath,{libs}", "-lcocotbvpi_verilator", "-pthread", "-ldl",
                ]
            ]
        )  # fmt: skip
        return []


def run_bench(
    *, verilog, top, bench, build_dir, simulator="verilator", only=None, environment=(), seed=1
):
    """Run the tests of a cocotb module on a design.

    Parameters
    ----------
    verilog : :class:`str`
        The design.
    top : :class:`str`
        Its top module.
    bench : :class:`~pathlib.Path`
        Python file with the ``@cocotb.test`` coroutines.
    build_dir : :class:`~pathlib.Path`
        Empty folder to work in.
    simulator : ``"verilator"`` or ``"icarus"``
    only : :class:`str`, optional
        Name of the single test to run.
    environment : mapping
        For the bench.
    seed : :class:`int`
        cocotb's random seed.

    Returns
    -------
    :class:`int`
        Tests passed.

    Raises
    ------
    :exc:`BenchFailure`
        If a test failed, was skipped, did not run, or the log holds an error.
    """
    build_dir = Path(build_dir)
    build_dir.mkdir(parents=True, exist_ok=True)
    source = build_dir / f"{top}.v"
    source.write_text(verilog)
    if simulator == "verilator":
        runner = _VerilatorWheel()
        runner.vlt = f'`verilator_config\npublic_flat_rw -module "{top}" -var "*"\n'
        runner.build(
            sources=[source], hdl_toplevel=top, build_dir=build_dir, always=True,
            log_file=build_dir / "build.log",
        )  # fmt: skip
    else:
        runner = Icarus()
        runner.build(
            sources=[source], hdl_toplevel=top, build_dir=build_dir, always=True,
            build_args=["-g2012"], timescale=("1ns", "1ps"), log_file=build_dir / "build.log",
        )  # fmt: skip
    results = build_dir / "results.xml"
    results.unlink(missing_ok=True)
    log = build_dir / "test.log"
    before = list(sys.path)  # the runner hands sys.path to the simulator's Python
    sys.path[:0] = [str(bench.parent), str(MODELS)]
    try:
        runner.test(
            test_module=bench.stem,
            hdl_toplevel=top,
            hdl_toplevel_lang="verilog",
            build_dir=build_dir,
            results_xml=str(results),
            log_file=log,
            testcase=only,
            seed=seed,
            extra_env={key: str(value) for key, value in dict(environment).items()},
        )
    except (SystemExit, RuntimeError) as error:
        raise BenchFailure(f"{bench.name}: the simulator stopped: {error}\n{_tail(log)}") from None
    finally:
        sys.path[:] = before
    return check_results(results, log, bench, only)


def _tail(log, lines=60):
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def check_results(results, log, bench, only=None):
    """Turn a results file and a log into a count of passed tests, or :exc:`BenchFailure`."""
    expected = {only} if only else _defined_tests(bench)
    if not expected:
        raise BenchFailure(f"{bench.name} defines no test")
    if not results.exists():
        raise BenchFailure(f"{bench.name}: no results were written\n{_tail(log)}")
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    bad = [
        case.get("name")
        for case in cases
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    ]
    if bad:
        raise BenchFailure(f"{bench.name}: not passed: {', '.join(bad)}\n{_tail(log)}")
    ran = {case.get("name").split("/")[0] for case in cases}
    missing = expected - ran
    if missing or not cases:
        raise BenchFailure(f"{bench.name}: did not run: {', '.join(sorted(missing))}")
    text = log.read_text(errors="replace") if log.exists() else ""
    for line in text.splitlines():
        if line.startswith(("ERROR:", "%Error", "- S_ERROR")) or "Assertion failed" in line:
            raise BenchFailure(f"{bench.name}: the design reported: {line}")
    return len(cases)
