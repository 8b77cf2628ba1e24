"""The exported core under cocotb, its AXI ports driven and served by cocotbext-axi."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels.matmul import matmul_program
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.isa import Engine
from makalu.rtl.core import Core
from makalu.rtl.verilog import TOP, export
from makalu.sim.golden import GoldenCore

from .runner import SIMULATORS, run_bench

pytestmark = pytest.mark.verilator
HBM = 1 << 16


@pytest.fixture(scope="module")
def verilog():
    return export(Core(config=TINY))


def matmul_case(path, config, m, k, n):
    """HBM before and after a matmul program by the golden model, for the bench."""
    rng = np.random.default_rng(7)
    program = matmul_program(config, (m, k), (k, n), formats.BF16)
    before = rng.integers(0, 256, HBM, dtype=np.uint8)
    addresses, free = {}, HBM // 2
    for tensor in program.tensors:
        addresses[tensor.name] = free
        if tensor.kind == "input":
            values = rng.standard_normal(tensor.shape).astype(ml_dtypes.bfloat16)
            before[free : free + tensor.nbytes] = np.frombuffer(values.tobytes(), np.uint8)
        free += -(-tensor.nbytes // 64) * 64
    image, queues = program.link(0, addresses)
    before[: len(image)] = np.frombuffer(image, np.uint8)
    golden = GoldenCore(config, HBM)
    golden.hbm[:] = before
    golden.run(queues)
    np.savez(
        path,
        before=before,
        after=np.asarray(golden.hbm),
        base=[queues.get(engine, (0, 0))[0] for engine in Engine],
        count=[queues.get(engine, (0, 0))[1] for engine in Engine],
    )


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_core(verilog, simulator, tmp_path):
    case = tmp_path / "case.npz"
    matmul_case(case, TINY, 6, 9, 11)
    passed = run_bench(
        verilog=verilog, top=TOP, bench=Path(__file__).with_name("bench_core.py"),
        build_dir=tmp_path / "build", simulator=simulator, environment={"MAKALU_BENCH": case},
    )  # fmt: skip
    assert passed == 6
