"""The machine of C loops beside the other simulations: every byte, every counter, every cycle.

How many random programs there are is the option ``--programs``.
"""

import importlib
import pkgutil
from dataclasses import dataclass

import makalu
import numpy as np
import pytest
from makalu.firmware import kernels, nki
from makalu.firmware.kernels import (
    attention,
    mlp,
    normalization,
    scan,
    selection,
    training,
    vision,
)
from makalu.firmware.kernels.matmul import Blocking, matmul
from makalu.firmware.kernels.resident import matmul_in_sbuf
from makalu.host import devices
from makalu.host.devices.registers import RegisterRunner
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, HbmConfig
from makalu.sim import toolchain
from makalu.sim.backends.native import NativeMachine
from makalu.sim.backends.pysim import PysimMachine
from makalu.sim.golden import GoldenCore
from programs import HBM_BYTES, Image, contents, random_program
from runs import compare, fill

pytestmark = [pytest.mark.verilator, pytest.mark.xdist_group("tiny_devices")]


@pytest.fixture
def programs(request):
    """How many random programs TINY runs."""
    return request.config.getoption("--programs")


FAR = HbmConfig(size_bytes=HBM_BYTES)
NEAR = HbmConfig(size_bytes=HBM_BYTES, latency_cycles=10)
"""So that Amaranth's simulator waits less and works more."""


def _native(config, hbm=FAR):
    try:
        return NativeMachine(config, hbm)
    except toolchain.ToolMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def native():
    """TINY as C."""
    with _native(TINY) as machine:
        yield RegisterRunner(machine)


def race(runners, config, seed, numbers, longest):
    """Run programs on all runners; each begins where the one before it ended, semaphores apart."""
    core = GoldenCore(config, HBM_BYTES)
    for number in numbers:
        rng = np.random.default_rng([*seed, number])
        image = random_program(rng, config, int(rng.integers(3, longest)))
        what, counters = f"--seed {seed[0]}, {config.name} program {number}", []
        for runner in runners:
            fill(runner.machine, core, image, np.random.default_rng([*seed, number, 0]))
            counters.append(runner.run(image.queues))
        assert counters[1:] == counters[:-1], what
        core.run(image.queues)
        for runner in runners:
            compare(runner.machine, core, image, f"{runner.machine.name}, {what}")


def test_random_programs_on_tiny(tiny, native, seed, programs):
    race([native, tiny._runner], TINY, (seed, 3000), range(programs), 40)


def test_random_programs_on_small(seed, programs):
    reason = devices.missing("verilator", SMALL)
    if reason is not None:
        pytest.skip(reason)
    with (
        makalu.open(SMALL, "verilator", hbm=HBM_BYTES) as device,
        _native(SMALL) as machine,
    ):
        runners = [RegisterRunner(machine), device._runner]
        race(runners, SMALL, (seed, 3001), range(max(1, programs // 10)), 40)


def test_random_programs_in_amaranths_simulator(seed, programs):
    with _native(TINY, NEAR) as compiled, PysimMachine(TINY, NEAR) as machine:
        runners = [RegisterRunner(compiled), RegisterRunner(machine)]
        for number in range(max(1, programs // 40)):
            for runner in runners:
                runner.reset()
            race(runners, TINY, (seed, 3002), [number], 5)


# The kernel library -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call of a kernel with random operands."""

    kernel: object
    shapes: tuple
    fmts: tuple
    options: tuple = ()

    def __str__(self):
        sides = " ".join(
            "x".join(map(str, shape)) + f" {fmt.name}"
            for shape, fmt in zip(self.shapes, self.fmts, strict=True)
        )
        options = (getattr(value, "name", value) for _, value in self.options)
        return " ".join([self.kernel.__name__, sides, *map(str, options)])


def products():
    """Calls of ``matmul``: every format with itself, fp8 pairs, odd shapes, results, blockings."""
    for fmt in formats.MATMUL_FORMATS:
        yield Case(matmul, ((9, 10), (10, 18)), (fmt, fmt))
    e4, e5, bf16 = formats.FP8_E4M3, formats.FP8_E5M2, formats.BF16
    yield Case(matmul, ((5, 7), (7, 6)), (e4, e5))
    for m, k, n in ((1, 1, 1), (4, 4, 16), (1, 33, 2), (40, 3, 1), (3, 5, 40), (17, 20, 33)):
        yield Case(matmul, ((m, k), (k, n)), (bf16, bf16))
    for out in (formats.BF16, formats.FP16, formats.FP8_E4M3, formats.INT8):
        yield Case(matmul, ((6, 9), (9, 17)), (bf16, bf16), (("out_dtype", out),))
    for blocking in (Blocking(1, 1, 0), Blocking(2, 2, 1), Blocking(3, 1, 2)):
        yield Case(matmul, ((13, 11), (11, 35)), (bf16, bf16), (("blocking", blocking),))


def products_in_sbuf():
    """Calls of ``matmul_in_sbuf``: every format, odd shapes, results that leave no room."""
    for fmt in formats.MATMUL_FORMATS:
        yield Case(matmul_in_sbuf, ((8, 10), (10, 18)), (fmt, fmt))
    bf16 = formats.BF16
    for m, k, n in ((1, 1, 1), (4, 9, 40), (17, 5, 1)):
        for out in (formats.FP32, bf16):
            yield Case(matmul_in_sbuf, ((m, k), (k, n)), (bf16, bf16), (("out_dtype", out),))


def library():
    """Calls of the other kernels: more than a tile, ragged."""
    f32, bf16 = formats.FP32, formats.BF16
    for fmt in (f32, bf16):
        for kernel, *shapes in (
            (normalization.softmax, (9, 7)),
            (normalization.rmsnorm, (9, 7), (7,)),
            (normalization.layernorm, (9, 7), (7,), (7,)),
            (attention.attention, (6, 5), (9, 5), (9, 3)),
            (attention.rotary, (5, 6), (5, 3), (5, 3)),
            (mlp.mlp, (5, 6), (6, 7), (7,), (7, 5), (5,)),
            (vision.conv2d, (1, 3, 5, 4), (5, 3, 2, 2)),
            (vision.max_pool2d, (5, 4, 4)),
            (vision.average_pool2d, (5, 4, 4)),
            (training.sgd_step, *[(5, 7)] * 3),
            (scan.cumsum, (9, 7)),
            (selection.topk, (6, 9)),
        ):
            yield Case(kernel, tuple(shapes), (fmt,) * len(shapes))
    causal = (("causal", True),)
    yield Case(attention.attention, ((9, 5), (9, 5), (9, 3)), (f32,) * 3, causal)
    yield Case(training.cross_entropy, ((9, 7), (9,)), (f32, formats.INT32))
    for fmt in (f32, bf16):
        yield Case(training.dropout, ((9, 7), (1,)), (fmt, formats.UINT32), (("rate", 0.3),))
    yield Case(training.adam_step, (*[(5, 7)] * 4, (2,)), (f32,) * 5)
    yield Case(selection.topk, ((5, 20),), (f32,), (("k", 19),))
    yield Case(scan.selective_scan, ((5, 7), (5, 7), (5, 2), (2, 7), (2, 7)), (f32,) * 5)


CASES = [*products(), *products_in_sbuf(), *library()]


def test_no_kernel_is_forgotten():
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        contents = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        found |= {item for item in contents.values() if isinstance(item, nki.Kernel)}
    assert found == {case.kernel for case in CASES}


@pytest.fixture(scope="module")
def three(tiny):
    """TINY in three ways, the golden model last; all of their memories hold the same."""
    with (
        makalu.open(TINY, "native", hbm=HBM_BYTES) as native,
        makalu.open(TINY, "golden", hbm=HBM_BYTES) as golden,
    ):
        core, rng = golden._runner.core, np.random.default_rng(0)
        for memory in (core.hbm, core.sbuf, core.psum):
            memory[:] = contents(rng, memory.size).reshape(memory.shape)
        for device in (native, tiny):
            machine = device._runner.machine
            machine.hbm_write(0, core.hbm.tobytes())
            machine.sbuf_write(core.sbuf)
            machine.psum_write(core.psum)
        yield native, tiny, golden


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(three, seed, case):
    rng = np.random.default_rng(seed)
    specs = [nki.TensorSpec(s, f) for s, f in zip(case.shapes, case.fmts, strict=True)]
    program = case.kernel.compile(TINY, *specs, **dict(case.options))
    arrays = [f.encode(rng.standard_normal(s).astype(np.float32)) for s, f in
              zip(case.shapes, case.fmts, strict=True)]  # fmt: skip
    results, counters = [], []
    for device in three:
        loaded, inputs = device.load(program), {}
        for name, array in zip(loaded.inputs, arrays, strict=True):
            inputs[name] = device.allocate(array.shape, loaded.tensors[name].dtype)
            inputs[name].write(array)
        results.append(loaded.execute(inputs))
        counters.append(device.last_run.counters)
        loaded.unload()
        for tensor in inputs.values():
            tensor.free()
    native, verilator, golden = three
    assert counters[0] == counters[1]
    assert counters[2]
    assert {name: counters[0][name] for name in counters[2]} == counters[2]
    for device in (native, verilator):
        compare(device._runner.machine, golden._runner.core, Image([], []), device.backend)
    for name, expected in results[2].items():
        for seen in results[:2]:
            assert seen[name].tobytes() == expected.tobytes()


def test_the_comparison_can_fail(native, seed):
    """A single bit, and it is said where."""
    core = GoldenCore(TINY, HBM_BYTES)
    image = random_program(np.random.default_rng([seed, 5]), TINY, 10)
    fill(native.machine, core, image, np.random.default_rng(seed))
    native.run(image.queues)
    core.run(image.queues)
    compare(native.machine, core, image, "native")
    core.psum[2, 5] ^= 1
    with pytest.raises(AssertionError, match=r"1 bytes of PSUM differ, .* \['0x2', '0x5'\]"):
        compare(native.machine, core, image, "native")
