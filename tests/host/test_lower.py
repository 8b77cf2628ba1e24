"""Shapes as numpy's, and operands rounded once."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from makalu.host.errors import DtypeError, ShapeError
from makalu.host.lower import MatmulShape, operand_formats, to_format
from makalu.rtl.arch import formats
from makalu.rtl.arch.formats import BF16, FP8_E4M3FN, FP16, FP32, TF32

SHAPES = [
    (3,), (4,), (3, 4), (4, 3), (4, 5), (0, 4), (4, 0), (0,), (0, 0), (2, 3, 4), (2, 4, 5),
    (1, 4, 5), (3, 1, 3, 4), (2, 4, 3), (5, 3, 4), (0, 3, 4), (2, 0, 4), (1, 1, 1), (1, 4), (),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), list(itertools.product(SHAPES, SHAPES)))
def test_shapes_are_those_of_numpy(a, b):
    x, y = np.ones(a, np.float32), np.ones(b, np.float32)
    try:
        expected = np.matmul(x, y)
    except ValueError:
        with pytest.raises(ShapeError):
            MatmulShape.of(a, b)
        return
    shape = MatmulShape.of(a, b)
    assert shape.result == np.shape(expected)
    assert shape.is_empty == (expected.size == 0 or shape.k == 0)
    assert shape.macs == expected.size * shape.k
    if not shape.is_empty:
        parts = [left @ right for left, right in shape.jobs(x, y)]
        got = np.concatenate([p.reshape(-1) for p in parts]).reshape(shape.result)
        np.testing.assert_array_equal(got, expected)


def test_matrices_that_share_b_are_one_product(rng):
    a, b = rng.standard_normal((4, 5, 6, 7)), rng.standard_normal((7, 3))
    jobs = list(MatmulShape.of(a.shape, b.shape).jobs(a, b))
    assert [left.shape for left, _ in jobs] == [(120, 7)]
    a = rng.standard_normal((5, 400, 7))
    jobs = list(MatmulShape.of(a.shape, b.shape).jobs(a, b))
    assert [left.shape for left, _ in jobs] == [(800, 7), (800, 7), (400, 7)]
    np.testing.assert_array_equal(np.concatenate([x for x, _ in jobs]).reshape(a.shape), a)


def nearest(value, fmt, codes):
    """Nearest code of ``fmt`` to a fraction, ties to the even code: by trying all of them."""
    best = min(
        codes, key=lambda c: (abs(Fraction(float(fmt.decode(c))) - value), int(c.view("u1")) & 1)
    )
    return best


# (value, format, right): ml_dtypes rounds the first three twice (ml_dtypes #401).
ONCE = [
    (np.float64(1 + 2**-8 + 2**-40), BF16, 1.0078125),
    (np.float64(-431.99999999999994), FP8_E4M3FN, -416.0),
    (np.int64(16973823), BF16, 16908288.0),
    (np.float64(1 + 2**-24 + 2**-50), FP32, 1 + 2**-23),
    (np.float64(1 + 2**-11 + 2**-52), FP16, 1 + 2**-10),
    (np.float64(2**-25 * (1 + 2**-52)), FP16, 2**-24),
    (np.float64(2**-25), FP16, 0.0),
    (np.float64(0.4999999902343750), FP16, 0.5),
    (np.float64(1 + 2**-11 + 2**-50), TF32, 1 + 2**-10),
    (np.int64(2**53 + 2**45 + 1), BF16, float(2**53 + 2**46)),
    (np.int64(-(2**53 + 2**45 + 1)), BF16, -float(2**53 + 2**46)),
    (np.int64(2**62 + 2**38 + 1), FP32, float(2**62 + 2**39)),
    (np.int64(2**62 + 2**38), FP32, float(2**62)),
    (np.int64(-(2**63)), FP32, -float(2**63)),
    (np.uint64(2**64 - 1), FP32, float(2**64)),
    (np.uint64(2**63 + 2**39 + 1), FP32, float(2**63 + 2**40)),
    (np.uint64(2**63 + 2**39), FP32, float(2**63)),
    (np.longdouble(1) + np.longdouble(2) ** -24 + np.longdouble(2) ** -60, FP32, 1 + 2**-23),
    (np.longdouble(1) + np.longdouble(2) ** -24, FP32, 1.0),
    (np.bool_(True), BF16, 1.0),
]


@pytest.mark.parametrize(("value", "fmt", "right"), ONCE)
def test_operands_are_rounded_once(value, fmt, right):
    got = to_format(np.array([value]), fmt)
    assert got.dtype == fmt.dtype
    assert float(got.astype(np.float64)[0]) == right


def test_long_integers_round_as_the_exact_value_does(rng):
    values = rng.integers(-(2**63), 2**63 - 1, 3000, dtype=np.int64) >> rng.integers(0, 60, 3000)
    # Many of them close to ties of a 24-bit significand.
    values[::3] = (values[::3] >> 33 << 33) + (1 << 32) + rng.integers(-2, 3, len(values[::3]))
    for x in (values, values.view(np.uint64)):
        got = to_format(x, FP32).astype(np.float64)
        for exact, rounded in zip(x.tolist(), got.tolist(), strict=True):
            ulp = 2 ** max(abs(exact).bit_length() - 24, 0)
            error = abs(Fraction(rounded) - exact)
            assert error * 2 <= ulp
            if error * 2 == ulp and ulp > 1:
                assert int(rounded) // ulp % 2 == 0


@pytest.mark.parametrize("fmt", [formats.FP8_E4M3, formats.FP8_E5M2, formats.FP8_E3M4])
def test_doubles_round_to_the_nearest_code(rng, fmt):
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    top = float(codes.astype(np.float32).max())
    values = rng.uniform(-top, top, 60) * np.exp2(rng.integers(-8, 1, 60))
    got = to_format(values, fmt)
    for value, code in zip(values, got, strict=True):
        assert float(code) == float(nearest(Fraction(float(value)), fmt, codes))


def test_bits_of_the_format_itself_are_kept(rng):
    bits = rng.integers(0, 1 << 16, 1000, dtype=np.uint16)
    assert to_format(bits.view(ml_dtypes.bfloat16), BF16).tobytes() == bits.tobytes()
    wide = rng.integers(0, 1 << 32, 1000, dtype=np.uint32)
    assert to_format(wide.view(np.float32), FP32).tobytes() == wide.tobytes()
    swapped = wide.view(np.float32).astype(">f4")
    assert to_format(swapped, FP32).dtype.isnative


def test_tf32_rounds_what_binary32_holds_beyond_it():
    got = to_format(
        np.array([0x3F801000, 0x3F803000, 0x3F801001], np.uint32).view(np.float32), TF32
    )
    assert [hex(x) for x in got.view(np.uint32)] == ["0x3f800000", "0x3f804000", "0x3f802000"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.float64, np.float64), (np.int8, np.int8), (np.int32, np.float32), (bool, bool),
        (np.float32, np.float16), (np.float64, np.float32), (ml_dtypes.bfloat16, np.float16),
        (ml_dtypes.int4, ml_dtypes.int4), (ml_dtypes.float8_e4m3b11fnuz, np.float32),
        (ml_dtypes.float8_e5m2, ml_dtypes.bfloat16), (np.float32, ml_dtypes.float8_e3m4),
    ],
)  # fmt: skip
def test_formats_are_never_chosen_silently(a, b):
    x, y = np.ones((2, 2), a), np.ones((2, 2), b)
    with pytest.raises(TypeError, match="dtype=") as caught:
        operand_formats(x, y, None)
    assert isinstance(caught.value, DtypeError)


def test_two_fp8_formats_are_multiplied_as_they_are():
    x, y = np.ones((2, 2), ml_dtypes.float8_e4m3fn), np.ones((2, 2), ml_dtypes.float8_e5m2)
    assert operand_formats(x, y, None) == (FP8_E4M3FN, formats.FP8_E5M2)
    assert operand_formats(y, x, None) == (formats.FP8_E5M2, FP8_E4M3FN)
    assert operand_formats(x, x, None) == (FP8_E4M3FN, FP8_E4M3FN)
    assert operand_formats(x, y, "fp16") == (FP16, FP16)


NO_NUMBERS = {
    "complex": (np.ones((2, 2), np.complex64), r"real and imaginary parts: \(a\.real"),
    "text": (np.full((2, 2), "1.5"), r"a\.astype\(np\.float64\)"),
    "bytes": (np.full((2, 2), b"1"), r"a\.astype\(np\.float64\)"),
    "objects": (np.full((2, 2), object()), r"a\.astype\(np\.float32\)"),
    "dates": (np.full((2, 2), "2020", "M8[D]"), "subtract a date"),
    "durations": (np.ones((2, 2), "m8[s]"), "divide by a unit"),
    "records": (np.zeros((2, 2), [("x", "f4"), ("y", "f4")]), r"one of its fields, .* a\['x'\]"),
    "raw bytes": (np.zeros((2, 2), "V3"), r"a\.view\(format\)"),
}


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("case", NO_NUMBERS, ids=lambda case: case.replace(" ", "_"))
def test_what_is_not_a_real_number_is_refused(case, dtype):
    """With or without a format, full or empty; and said is what to do, not to give a format."""
    array, instead = NO_NUMBERS[case]
    for a, b in ((array, np.ones((2, 2), np.float32)), (array[:0], np.ones((2, 2)))):
        with pytest.raises(DtypeError, match=f"a is .*not a real number.*{instead}") as caught:
            operand_formats(a, b, dtype)
        assert "say " not in str(caught.value)
        with pytest.raises(DtypeError, match=r"b is .*not a real number"):
            operand_formats(b, a, dtype)
    with pytest.raises(DtypeError, match="not a real number"):
        to_format(array, BF16, name="a")


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4"])
def test_the_integers_of_ml_dtypes_are_rounded_as_all_others(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    values = np.arange(ml_dtypes.iinfo(dtype).min, ml_dtypes.iinfo(dtype).max + 1)
    array = values.astype(dtype)
    with pytest.raises(DtypeError, match=f"a is {name}.*dtype="):
        operand_formats(array, array, None)
    assert operand_formats(array, array, "bf16") == (BF16, BF16)
    for fmt in (BF16, FP32, FP8_E4M3FN):
        np.testing.assert_array_equal(to_format(array, fmt).astype(np.float64), values)


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float4_e2m1fn", "float8_e8m0fnu"])
def test_formats_of_ml_dtypes_that_the_core_has_not_are_rounded(name):
    array = np.array([0.5, 1, 2, 4], getattr(ml_dtypes, name))
    assert operand_formats(array, array, "bf16") == (BF16, BF16)
    np.testing.assert_array_equal(to_format(array, BF16).astype(np.float64), [0.5, 1, 2, 4])


@pytest.mark.parametrize(
    "dtype", ["int8", "fp64", "float64", 7, "bf17", ml_dtypes.int4, [1], {}, "f8, (", np.nan]
)
def test_a_format_that_is_not_multiplied_is_refused_by_name(dtype):
    x = np.ones((2, 2), np.float32)
    with pytest.raises(DtypeError, match=r"bf16"):
        operand_formats(x, x, dtype)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "BF16", ml_dtypes.bfloat16, BF16])
def test_a_format_goes_by_several_names(name):
    x = np.ones((2, 2))
    assert operand_formats(x, x, name) == (BF16, BF16)
