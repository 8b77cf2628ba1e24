"""Number formats against ml_dtypes, numpy and exact rationals."""

from fractions import Fraction

import numpy as np
import pytest
from makalu.rtl.arch import formats
from makalu.rtl.arch.formats import FORMATS, format_by_code, format_of

FLOATS = [f for f in FORMATS if f.is_float]
NARROW = [f for f in FLOATS if f.bits <= 16]
IDS = [f.name for f in FLOATS]


def codes_of(fmt):
    return np.arange(1 << fmt.bits, dtype=np.uint16 if fmt.bits == 16 else np.uint8).view(fmt.dtype)


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_every_code_round_trips(fmt):
    codes = codes_of(fmt)
    values = fmt.decode(codes)
    again = fmt.encode(values)
    nan = np.isnan(values)
    raw = np.uint16 if fmt.bits == 16 else np.uint8
    assert np.array_equal(codes.view(raw)[~nan], again.view(raw)[~nan])
    assert np.isnan(fmt.decode(again)[nan]).all()


@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_rounding_equals_ml_dtypes_from_binary32(fmt, rng):
    x = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    spread = (rng.standard_normal(100_000) * 2.0 ** rng.integers(-30, 30, 100_000)).astype(
        np.float32
    )
    finite = codes_of(fmt)
    finite = np.unique(fmt.decode(finite)[np.isfinite(fmt.decode(finite))])
    ties = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    around = [np.nextafter(ties, np.float32(s) * np.float32(np.inf)) for s in (-1, 1)]
    x = np.concatenate([x, spread, ties, *around, np.float32([0, -0.0, np.inf, -np.inf, np.nan])])
    with np.errstate(all="ignore"):
        expected = x.astype(fmt.dtype)
        got = fmt.encode(x.astype(np.float64))
    raw = np.uint16 if fmt.bits == 16 else np.uint8
    if fmt is formats.FP16:  # numpy keeps NaN payloads, the core does not
        nan = np.isnan(expected)
        expected[nan] = np.copysign(np.float16(np.nan), expected[nan])
    assert np.array_equal(got.view(raw), expected.view(raw))


@pytest.mark.parametrize("fmt", FLOATS, ids=IDS)
def test_rounding_is_nearest_even_by_exact_rationals(fmt, rng):
    values = rng.standard_normal(300) * 2.0 ** rng.integers(-12, 12, 300)
    for x, y in zip(values, fmt.round(values), strict=True):
        exact = Fraction(x)
        if abs(exact) > Fraction(fmt.max):
            continue
        _, e = np.frexp(abs(float(x)))
        quantum = Fraction(2) ** (max(int(e) - 1, 1 - fmt.bias) - fmt.man)
        steps = exact / quantum
        low = steps.numerator // steps.denominator
        rest = steps - low
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2)
        expected = (low + up) * quantum
        if abs(expected) <= Fraction(fmt.max):
            assert Fraction(float(y)) == expected, (fmt.name, x)


def test_float64_is_rounded_once_not_through_binary32():
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(formats.BF16.encode(x)[0]) == 1.0078125
    assert float(formats.FP8_E4M3FN.encode(np.array([-431.99999999999994]))[0]) == -416.0


@pytest.mark.parametrize(
    ("value", "plain", "saturating"),
    [
        (448, 448, 448),
        (464, 448, 448),
        (465, np.nan, 448),
        (-1000, np.nan, -448),
        (np.inf, np.nan, 448),
    ],
)
def test_e4m3fn_overflow_is_nan_unless_saturating(value, plain, saturating):
    got = formats.FP8_E4M3FN.round(np.array([value], float))
    assert np.array_equal(got, np.array([plain], float), equal_nan=True)
    assert formats.FP8_E4M3FN.round(np.array([value], float), saturate=True)[0] == saturating


def test_integers_round_to_even_saturate_and_take_nan_to_zero():
    x = np.array([0.5, 1.5, -2.5, 1e9, -1e9, np.nan, np.inf])
    assert formats.INT8.encode(x).tolist() == [0, 2, -2, 127, -128, 0, 127]
    assert formats.UINT8.encode(x).tolist() == [0, 2, 0, 255, 0, 0, 255]


def test_tf32_decodes_by_rounding_the_low_bits_away():
    bits = np.array([0x3F801000, 0x3F803000, 0x3F801001], np.uint32)
    got = formats.TF32.decode(bits.view(np.float32)).astype(np.float32).view(np.uint32)
    assert [hex(b) for b in got] == ["0x3f800000", "0x3f804000", "0x3f802000"]


def test_codes_and_names_are_unique_and_known():
    assert len({f.code for f in FORMATS}) == len(FORMATS)
    for fmt in FORMATS:
        assert format_by_code(fmt.code) is fmt
        assert format_of(fmt.name) is fmt
    assert format_of(np.dtype(">f4")) is formats.FP32
    with pytest.raises(TypeError, match="bf16"):
        format_of(np.complex64)
    with pytest.raises(TypeError, match=r"use one of fp32, .*, int8, .*, uint32$"):
        format_of("bfloat")
    with pytest.raises(TypeError, match=r"use one of fp32, f32, .*, fp8_e3m4$"):
        format_of("bfloat", formats.MATMUL_FORMATS)
    with pytest.raises(ValueError, match="dtype code 99"):
        format_by_code(99)
