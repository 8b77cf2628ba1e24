"""``dev.matmul`` on the hardware: any operands, the bits of the formula, every time."""

import hashlib

import makalu
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makalu.firmware.kernels.matmul import matmul_reference
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY, HbmConfig
from makalu.sim.memory import MIN_LATENCY
from programs import HBM_BYTES

pytestmark = [pytest.mark.verilator, pytest.mark.xdist_group("tiny_devices")]

SPECIAL = [
    0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38,
    -3.4028235e38, 2.0**-24, 6e-8, 65504.0, 1 + 2.0**-23, 1 + 2.0**-12, -448.0, 57344.0, 2.0**-9,
]  # fmt: skip


@st.composite
def operand(draw, shape, fmt):
    """An array in the format, perhaps transposed, reversed or with strides."""
    seed = draw(st.integers(0, 1 << 32))
    share = draw(st.sampled_from([0, 0, 0.02, 0.3, 1]))
    scale = draw(st.integers(-20, 20))
    layout = draw(st.sampled_from(["C", "F", "strided", "reversed", "wide"]))
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        values = rng.standard_normal(shape) * 2.0**scale
        special = rng.random(shape) < share
        values[special] = rng.choice(SPECIAL, special.sum())
        array = fmt.encode(values.astype(np.float32))
    if layout == "F":
        return np.ascontiguousarray(array.T).T
    if layout == "strided":
        base = np.zeros((2 * shape[0], 3 * shape[1]), array.dtype)
        base[::2, 1::3] = array
        return base[::2, 1::3]
    if layout == "reversed":
        return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    if layout == "wide":
        return np.broadcast_to(array[:1], shape)
    return array


@st.composite
def product(draw):
    m, k, n = (draw(st.integers(1, 20)) for _ in range(3))
    left = right = draw(st.sampled_from(formats.MATMUL_FORMATS))
    if left.bits == 8:
        right = draw(st.sampled_from([fmt for fmt in formats.MATMUL_FORMATS if fmt.bits == 8]))
    out = draw(st.sampled_from([formats.FP32, formats.FP32, formats.BF16, formats.FP16]))
    return draw(operand((m, k), left)), draw(operand((k, n), right)), (left, right), out


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=product())
def test_products_have_the_bits_of_the_formula(tiny, case):
    a, b, fmts, out = case
    # Without a dtype the operands' own decides; TF32 has none of its own.
    dtype = "tf32" if formats.TF32 in fmts else None
    if dtype:
        a, b = (formats.TF32.round(x).astype(np.float32) for x in (a, b))
    found = tiny.matmul(a, b, dtype=dtype, out_dtype=out)
    expected = matmul_reference(a, b, TINY.rows, out_dtype=out, a_dtype=fmts[0], b_dtype=fmts[1])
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes(), (a, b, found, expected)


def check(device, rng, m, k, n, fmt=formats.BF16):
    a, b = (fmt.encode(rng.standard_normal(shape)) for shape in ((m, k), (k, n)))
    expected = matmul_reference(a, b, device.config.rows)
    assert device.matmul(a, b).tobytes() == expected.tobytes()


@pytest.mark.parametrize("m", [1, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 3, 4, 5])
def test_one_less_and_one_more_than_the_array(tiny, rng, m, k):
    for n in (1, 3, 5, 15, 16, 17):
        check(tiny, rng, m, k, n)


@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda fmt: fmt.name)
def test_one_number_by_one_number(tiny, fmt):
    for x, y in ((1.5, -2.0), (0.0, -1.0), (np.inf, 0.0), (-0.0, -0.0)):
        with np.errstate(all="ignore"):
            a, b = (fmt.encode(np.array([[v]])) for v in (x, y))
        expected = matmul_reference(a, b, TINY.rows, a_dtype=fmt, b_dtype=fmt)
        assert tiny.matmul(a, b, dtype=fmt).tobytes() == expected.tobytes()


@pytest.mark.parametrize("latency", [MIN_LATENCY, MIN_LATENCY + 1, MIN_LATENCY + 2, 37, 300])
def test_the_latency_of_memory_changes_no_bit(rng, latency):
    """gemmini 341: loads hang with one latency, products are wrong with another."""
    hbm = HbmConfig(size_bytes=HBM_BYTES, latency_cycles=latency)
    with makalu.open(TINY, "verilator", hbm=hbm) as device:
        for fmt in formats.MATMUL_FORMATS:
            a, b = (fmt.encode(rng.standard_normal(shape)) for shape in ((8, 7), (7, 32)))
            expected = matmul_reference(a, b, TINY.rows, a_dtype=fmt, b_dtype=fmt)
            assert device.matmul(a, b, dtype=fmt).tobytes() == expected.tobytes()


def test_a_product_may_lie_at_the_very_end_of_memory(rng):
    """aws-neuron-sdk 1306: a kernel that works alone leaves its memory behind another."""
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((5, 6), (6, 19)))
    expected = matmul_reference(a, b, TINY.rows).tobytes()
    with makalu.open(TINY, "verilator", hbm=HBM_BYTES) as device:
        assert device.matmul(a, b).tobytes() == expected
        report = device.last_run
        for spare in range(1 << 14, 0, -256):
            while device._matmuls:
                device._matmuls.popitem()[1].unload()
            low = device.allocate(device.free_bytes - spare, "uint8")
            try:
                found = device.matmul(a, b)
            except makalu.errors.HbmOutOfMemory:
                break
            finally:
                low.free()
            assert found.tobytes() == expected
            if device.last_run.runs > 1:  # memory is too small for one program
                break
            assert device.last_run.hbm_bytes_read == report.hbm_bytes_read
        assert spare < 1 << 13


def test_a_thousand_runs_have_one_hash(tiny, rng):
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((4, 4), (4, 8)))
    expected = matmul_reference(a, b, TINY.rows).tobytes()
    results, counters = set(), set()
    for _ in range(1000):
        results.add(hashlib.sha256(tiny.matmul(a, b).tobytes()).hexdigest())
        counters.add(tuple(sorted(tiny.last_run.counters.items())))
    assert results == {hashlib.sha256(expected).hexdigest()}
    assert len(counters) == 1, "the cycles of a run depend on those before it"


def test_a_program_leaves_nothing_behind_for_the_next(tiny, rng):
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 9), (9, 7)))
    c, d = (formats.FP8_E5M2.encode(rng.standard_normal(shape)) for shape in ((3, 5), (5, 18)))
    first = tiny.matmul(a, b).tobytes()
    counters = tiny.last_run.counters
    assert first == matmul_reference(a, b, TINY.rows).tobytes()
    poison = np.full((8, 8), np.nan, np.float32)
    for left, right in ((c, d), (poison, poison)):
        expected = matmul_reference(left, right, TINY.rows)
        assert tiny.matmul(left, right).tobytes() == expected.tobytes()
        assert tiny.matmul(a, b).tobytes() == first
        assert tiny.last_run.counters == counters
