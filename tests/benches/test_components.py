"""Exported components under cocotb, each against a numpy model of what it does."""

from pathlib import Path

import pytest
from makalu.rtl.arch.config import TINY
from makalu.rtl.control.control import Control
from makalu.rtl.engines.array import Pe
from makalu.rtl.engines.dma import DmaEngine
from makalu.rtl.memory.psum import Psum
from makalu.rtl.verilog import export

from .runner import SIMULATORS, run_bench

pytestmark = pytest.mark.verilator
HERE = Path(__file__).parent

COMPONENTS = {
    "pe": (lambda: Pe(), 4),
    "psum": (lambda: Psum(config=TINY), 4),
    "dma": (lambda: DmaEngine(config=TINY), 5),
    "control": (lambda: Control(config=TINY), 4),
}


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize("name", COMPONENTS)
def test_component(name, simulator, seed, tmp_path):
    make, tests = COMPONENTS[name]
    passed = run_bench(
        verilog=export(make(), name=name), top=name, bench=HERE / f"bench_{name}.py",
        build_dir=tmp_path, simulator=simulator, seed=seed, environment={"MAKALU_SEED": seed},
    )  # fmt: skip
    assert passed == tests
