"""The matmul kernel: programs that give numpy's result under any interleaving, bit for bit."""

import makalu.nki as nki
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from makalu.firmware.kernels.matmul import (
    Blocking,
    matmul,
    matmul_program,
    matmul_reference,
    plan_blocking,
)
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN
from makalu.sim.golden import GoldenCore

DTYPES = {
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def integers(rng, shape, dtype):
    return rng.integers(-4, 5, shape).astype(np.float32).astype(dtype)


def name(shape):
    return "x".join(map(str, shape))


SHAPES = [
    (1, 1, 1), (4, 4, 16), (8, 8, 16), (3, 5, 7), (5, 9, 18), (16, 4, 16), (33, 17, 40),
    (4, 40, 33), (64, 4, 4), (1, 64, 1), (2, 3, 100), (100, 3, 2), (40, 30, 20),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=name)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8_e4m3"])
def test_gives_the_product_whatever_the_interleaving(machine, shape, dtype):
    m, k, n = shape
    rng = np.random.default_rng(m * 1000 + k * 100 + n)
    a, b = integers(rng, (m, k), DTYPES[dtype]), integers(rng, (k, n), DTYPES[dtype])
    program = matmul.compile(TINY, a, b)
    out = machine(TINY, seed=7 * m + n).run(program, {"a": a, "b": b})["c"]
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


@pytest.mark.parametrize("shape", [(64, 64, 128), (50, 70, 90), (16, 256, 32)], ids=name)
def test_gives_the_product_on_a_wider_machine(machine, shape):
    m, k, n = shape
    rng = np.random.default_rng(5)
    a, b = integers(rng, (m, k), ml_dtypes.bfloat16), integers(rng, (k, n), ml_dtypes.bfloat16)
    program = matmul.compile(SMALL, a, b)
    out = machine(SMALL, seed=3).run(program, {"a": a, "b": b})["c"]
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))


# Numbers ------------------------------------------------------------------------------------------


def golden(config, program, inputs, shuffle=None):
    """Outputs of a program on the golden model."""
    core = GoldenCore(config, 1 << 20, shuffle=shuffle, fill=0xFF)
    at, where = 0, {}
    for info in program.tensors:
        where[info.name] = at
        if info.kind == "input":
            raw = np.ascontiguousarray(inputs[info.name]).view(np.uint8).reshape(-1)
            core.hbm[at : at + info.nbytes] = raw
        at += -(-info.nbytes // 64) * 64
    base = -(-at // 128) * 128
    image, entry = program.link(base, where)
    core.hbm[base : base + len(image)] = np.frombuffer(image, np.uint8)
    core.run(entry)
    info = program.tensor(program.outputs[0])
    raw = core.hbm[where[info.name] : where[info.name] + info.nbytes]
    return raw.view(info.dtype.dtype).reshape(info.shape)


def assert_same_bits(got, want):
    kind = np.dtype(f"u{got.dtype.itemsize}")
    np.testing.assert_array_equal(got.view(kind), np.ascontiguousarray(want).view(kind))


def random_values(rng, shape, fmt, special):
    """Values of many magnitudes; with ``special`` zeros, subnormals, infinities and NaN too."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if special:
        wild = rng.random(shape)
        values = np.where(wild < 0.05, np.inf, values)
        values = np.where(wild > 0.95, np.nan, values)
        values = np.where((wild > 0.4) & (wild < 0.5), 0.0, values)
        values = np.where((wild > 0.3) & (wild < 0.35), -fmt.min_subnormal, values)
        values = np.where((wild > 0.25) & (wild < 0.3), fmt.max, values)
    with np.errstate(all="ignore"):
        return fmt.encode(values)


@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda f: f.name)
def test_reference_and_golden_model_agree_bit_for_bit(fmt, special):
    rng = np.random.default_rng(fmt.code)
    a = random_values(rng, (11, 23), fmt, special)
    b = random_values(rng, (23, 21), fmt, special)
    program = matmul_program(TINY, a.shape, b.shape, fmt)
    got = golden(TINY, program, {"a": a, "b": b}, shuffle=1)
    assert_same_bits(got, matmul_reference(a, b, TINY.rows, a_dtype=fmt, b_dtype=fmt))


def test_mixed_formats():
    rng = np.random.default_rng(4)
    for left, right in [("fp8_e4m3", "fp8_e5m2"), ("bf16", "fp8_e3m4"), ("fp32", "tf32")]:
        a_fmt, b_fmt = formats.format_of(left), formats.format_of(right)
        a = random_values(rng, (5, 9), a_fmt, False)
        b = random_values(rng, (9, 6), b_fmt, False)
        specs = nki.TensorSpec(a.shape, a_fmt), nki.TensorSpec(b.shape, b_fmt)
        got = golden(TINY, matmul.compile(TINY, *specs), {"a": a, "b": b})
        assert_same_bits(got, matmul_reference(a, b, TINY.rows, a_dtype=a_fmt, b_dtype=b_fmt))


@pytest.mark.parametrize("out", ["bf16", "fp16", "fp8_e4m3", "tf32", "int32", "int8"])
def test_output_formats(out):
    rng = np.random.default_rng(8)
    a = random_values(rng, (9, 10), formats.BF16, False)
    b = random_values(rng, (10, 20), formats.BF16, False)
    program = matmul_program(TINY, a.shape, b.shape, "bf16", out)
    want = matmul_reference(a, b, TINY.rows, out_dtype=out)
    assert_same_bits(golden(TINY, program, {"a": a, "b": b}), want)


def test_reference_is_the_documented_sum():
    """Against plain scalar arithmetic: one rounding per product, K tiles added in PSUM."""
    rng = np.random.default_rng(2)
    a = rng.standard_normal((3, 10)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((10, 2)).astype(ml_dtypes.bfloat16)
    got = matmul_reference(a, b, 4)
    for i in range(3):
        for j in range(2):
            total = None
            for k0 in range(0, 10, 4):
                acc = np.float32(0)
                for k in range(k0, min(k0 + 4, 10)):
                    acc = np.float32(float(acc) + float(a[i, k]) * float(b[k, j]))
                total = acc if total is None else np.float32(total + acc)
            assert got[i, j] == total


def test_fp32_is_nearly_exact():
    rng = np.random.default_rng(6)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((8, 64), (64, 8)))
    got = matmul_reference(a, b, 16)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    bound = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) * 64 * 2.0**-24
    assert (np.abs(got - exact) <= bound).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_fp32_infinity_and_nan_do_not_leak_through_empty_halves(value):
    a = np.array([[value, 1.0]], np.float32)
    b = np.array([[2.0], [3.0]], np.float32)
    program = matmul_program(TINY, a.shape, b.shape, "fp32")
    got = golden(TINY, program, {"a": a, "b": b})[0, 0]
    assert np.isnan(got) if np.isnan(value) else got == value


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 8),
    st.integers(1, 12), st.integers(0, 2), st.sampled_from(["bf16", "fp32"]),
)  # fmt: skip
def test_blocking_does_not_change_results(m, k, n, m_tiles, k_tiles, strips, dtype):
    rng = np.random.default_rng(m + 41 * k + 1681 * n)
    fmt = formats.format_of(dtype)
    a, b = random_values(rng, (m, k), fmt, False), random_values(rng, (k, n), fmt, False)
    try:
        program = matmul.compile(TINY, a, b, blocking=Blocking(m_tiles, k_tiles, strips))
    except nki.KernelError as error:
        assert "SBUF" in str(error)  # noqa: PT017
        return
    got = golden(TINY, program, {"a": a, "b": b}, shuffle=m)
    assert_same_bits(got, matmul_reference(a, b, TINY.rows))


# Blocking and compilation -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (TINY, (1, 1000, 1)), (TINY, (100, 120, 50)), (TINY, (300, 7, 9)), (TINY, (7, 9, 500)),
        (SMALL, (512, 4096, 16)), (SMALL, (16, 3000, 300)), (SMALL, (1000, 1, 1000)),
        (SMALL, (257, 1025, 129)), (TRN, (2048, 2048, 2048)), (TRN, (300, 20000, 700)),
        (TRN, (129, 129, 513)),
    ],
    ids=lambda v: v.name if hasattr(v, "name") else name(v),
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16", "fp32"])
def test_every_shape_compiles(config, shape, dtype):
    m, k, n = shape
    program = matmul_program(config, (m, k), (k, n), dtype)
    assert program.stats["macs"] == m * k * n
    assert program.stats["passes"] == m * k * n * (4 if dtype == "fp32" else 1)
    assert program.stats["sbuf_bytes_used"] <= config.sbuf_bytes


def test_operands_that_fit_are_read_once():
    stats = matmul_program(TRN, (2048, 2048), (2048, 2048), "bf16").stats
    assert stats["hbm_bytes_read"] == 2 * 2048 * 2048 * 2
    stats = matmul_program(SMALL, (256, 256), (256, 256), "bf16").stats
    assert stats["hbm_bytes_read"] == 2 * 256 * 256 * 2
    assert stats["hbm_bytes_written"] == 256 * 256 * 4


def test_traffic_stays_well_below_the_bandwidth():
    for k in (512, 1024):
        stats = matmul_program(SMALL, (512, k), (k, 256), "bf16").stats
        fetched = 128 * (stats["loads"] + stats["matmuls"])
        moved = stats["hbm_bytes_read"] + stats["hbm_bytes_written"] + fetched
        assert moved < 0.75 * SMALL.rows * stats["ideal_cycles"]


def test_planner_prefers_residence_of_b():
    sizes = {"rows": 16, "bank_words": 128, "banks": 8, "sbuf_bytes": 16384}
    assert plan_blocking(512, 512, 512, 2, 2, 4, **sizes) == Blocking(8, 8, 1)
    assert plan_blocking(256, 256, 256, 2, 2, 4, **sizes) == Blocking(8, 8, 2)
    assert plan_blocking(512, 4096, 512, 2, 2, 4, **sizes).strips == 0
    with pytest.raises(nki.KernelError, match="does not fit"):
        plan_blocking(16, 16, 16, 4, 4, 4, rows=16, bank_words=128, banks=8, sbuf_bytes=64)


def test_shapes_that_disagree_are_explained():
    with pytest.raises(nki.KernelError, match="must agree in K, not 4 and 5"):
        matmul_program(TINY, (4, 4), (5, 4), "bf16")
