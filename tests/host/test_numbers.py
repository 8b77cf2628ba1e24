"""Special values, with numpy's binary64 as the witness: single products, sums, and the check.

A product of two operands has at most 48 bits and lies far within the range of binary64, which makes
``float32(0 + float64(a) * float64(b))`` the exact product, rounded once, on sums that start at +0.
"""

import itertools

import makalu
import ml_dtypes
import numpy as np
import pytest
from makalu.host.device import Device
from makalu.host.report import RunReport
from makalu.host.witness import LEAST_HIGH_HALF, compare
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import HbmConfig
from makalu.rtl.arch.formats import BF16, FP8_E4M3FN, FP8_E5M2, FP16, FP32, TF32

NAN = np.uint32(0x7FC00000)
FP8 = [fmt for fmt in formats.MATMUL_FORMATS if fmt.bits == 8]


def specials(fmt):
    """Both signs of: zero, the ends of the subnormals and normals, ones, powers, infinity, NaN."""
    if fmt.bits == 8:
        codes = np.arange(256)
    else:
        man, one, top = fmt.man, fmt.bias << fmt.man, (1 << fmt.exp) - 1
        half = 1 << man // 2
        codes = np.array(
            [
                *(0, 1, 2, half - 1, half, half + 1, (1 << man) - 1, 1 << man, (1 << man) + 1),
                *(one - 1, one, one + 1, one + half, one + (1 << man - 1), one + (1 << man)),
                *(e << man for e in range(2, top, top // 11)),
                *((e << man) + (1 << man) - 1 for e in range(2, top, top // 7)),
                *((top << man) - half, (top << man) - 2, (top << man) - 1, top << man),
                *((top << man) + payload for payload in (1, half, 1 << man - 1, (1 << man) - 1)),
            ]
        )
        codes = np.concatenate([codes, codes | 1 << fmt.man + fmt.exp])
    if fmt is TF32:
        # As binary32, and what lies between: just below, at and above the ties.
        codes = codes[:, None] << 13
        codes = np.concatenate([codes, codes + 0xFFF, codes + 0x1000, codes + 0x1001]).reshape(-1)
    return codes.astype(f"u{fmt.bytes}").view(fmt.dtype)


def as_multiplied(x, fmt):
    """What the array sees of operands, as binary64."""
    if fmt is TF32:
        bits = x.view(np.uint32).astype(np.uint64)
        bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~np.uint64(0x1FFF)  # carries up to infinity
        x = np.where(np.isnan(x), x, bits.astype(np.uint32).view(np.float32))
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(np.float64)


def witness(a, b):
    """The binary64 product in binary32, every NaN the canonical one."""
    with np.errstate(all="ignore"):
        c = (0.0 + a * b).astype(np.float32)
    return np.where(np.isnan(c), NAN.view(np.float32), c)


PAIRS = [(fmt, fmt) for fmt in formats.MATMUL_FORMATS if fmt is not FP32]
PAIRS += itertools.permutations(FP8, 2)


@pytest.mark.parametrize("fmts", PAIRS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_single_products_are_those_of_binary64(dev, fmts):
    """Of all codes of FP8, and all special values of the others."""
    x, y = (specials(fmt) for fmt in fmts)
    c = dev.matmul(x[:, None], y[None, :], dtype="tf32" if TF32 in fmts else None)
    expected = witness(as_multiplied(x, fmts[0])[:, None], as_multiplied(y, fmts[1])[None, :])
    wrong = np.argwhere(c.view(np.uint32) != expected.view(np.uint32))
    assert not len(wrong), [(x[i], y[j], c[i, j], expected[i, j]) for i, j in wrong[:5]]
    if not fmts[0].finite:
        assert np.isinf(expected).any()
    assert (expected.view(np.uint32) == NAN).any()
    assert (expected.view(np.uint32) == 0).any()


def test_single_products_of_the_simulated_hardware_are_those_of_binary64():
    codes = [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x3F80, 0xBFC1, 0x1A01, 0x7F7F, 0x7F80, 0xFF80,
             0x7F81]  # fmt: skip
    x = np.array(codes, np.uint16).view(BF16.dtype)
    with makalu.open("TINY", "pysim", hbm=HbmConfig(latency_cycles=10)) as tiny:
        c = tiny.matmul(x[:, None], x[None, :])
    values = as_multiplied(x, BF16)
    assert c.tobytes() == witness(values[:, None], values[None, :]).tobytes()


def test_single_products_of_binary32_are_those_of_binary64_with_three_exceptions(dev):
    """What four passes of 12-bit halves cannot do, and nothing else."""
    x = specials(FP32)
    a, b = as_multiplied(x, FP32)[:, None], as_multiplied(x, FP32)[None, :]
    c, expected = dev.matmul(x[:, None], x[None, :]), witness(a, b)
    bits, right = c.view(np.uint32), expected.view(np.uint32)
    with np.errstate(all="ignore"):
        exact = np.abs(a * b)
    # 1. A number below 2**-137 has a high half of zero: times infinity it is NaN.
    small = np.abs(a) < 2.0**-137, np.abs(b) < 2.0**-137
    lost = np.isinf(a) & small[1] | np.isinf(b) & small[0]
    assert (bits[lost] == NAN).all()
    assert np.isinf(expected[lost]).any()
    rest = ~lost
    assert (bits == right)[rest & ~np.isfinite(expected)].all()
    # 2. A product that rounds to zero may lose its sign.
    zero = rest & (expected == 0)
    assert np.isin(bits[zero], (0, 0x80000000)).all()
    assert ((bits == right) | (bits == 0))[zero].all()
    assert (bits == right)[zero & (exact == 0)].all()
    # 3. Sums are rounded four times: the last place may be off by one, and is not where one
    # operand has a low half of zero and nothing lies near the subnormals.
    finite = rest & np.isfinite(expected)
    apart = np.abs(bits.astype(np.int64) % 2**31 - right.astype(np.int64) % 2**31)
    assert apart[finite].max() == 1
    assert (bits == right)[rest & (apart == 0) & (c != 0)].all()
    short = x.view(np.uint32) & 0xFFF == 0
    assert (bits == right)[rest & (short[:, None] | short[None, :]) & (exact > 2.0**-100)].all()


@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("k", [2, 5, 33])
def test_sums_are_nan_infinite_or_finite_as_those_of_binary64(dev, rng, fmt, k):
    """With finite operands near 1, so that nothing overflows."""
    a, b = (fmt.encode(rng.choice([-1.5, 1, 0, 2], shape)) for shape in ((60, k), (k, 50)))
    for x in (a, b):
        odd = rng.random(x.shape) < 0.6 / k
        codes = specials(fmt)
        codes = codes[~np.isfinite(codes.astype(np.float32))]
        x[odd] = rng.choice(codes, odd.sum())
    c = dev.matmul(a, b, dtype=fmt)
    with np.errstate(all="ignore"):
        expected = as_multiplied(a, fmt) @ as_multiplied(b, fmt)
    np.testing.assert_array_equal(np.isnan(c), np.isnan(expected))
    np.testing.assert_array_equal(c, expected)
    assert (c.view(np.uint32)[np.isnan(c)] == NAN).all()
    kinds = [np.isnan(c), np.isfinite(c), *([] if fmt.finite else [c == np.inf, c == -np.inf])]
    assert all(kind.any() for kind in kinds)


# The check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e4m3fn", "int8"])
@pytest.mark.parametrize("fmt", formats.MATMUL_FORMATS, ids=lambda fmt: fmt.name)
def test_what_the_core_makes_is_never_called_wrong(dev, rng, fmt, out):
    """Whatever the operands: special values, overflow on the way, overflow of the result."""
    for k, scale in itertools.product((1, 7, 40), (1.0, 2.0**6, fmt.max / 8)):
        a, b = (
            fmt.encode(np.clip(rng.standard_normal(s) * scale, -fmt.max, fmt.max))
            for s in ((9, k), (k, 8))
        )
        for x in (a, b):
            odd = rng.random(x.shape) < rng.choice([0, 0.3 / k, 1])
            x[odd] = rng.choice(specials(fmt), odd.sum())
        dev.matmul(a, b, dtype=fmt, out_dtype=out, check=True)
        assert dev.last_run.mismatches == 0, (k, scale)
        assert dev.last_run.first_mismatch is None


OUTS = [FP32, BF16, FP16, FP8_E5M2, FP8_E4M3FN]


@pytest.mark.parametrize("out", OUTS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("fmt", [FP32, FP16], ids=lambda fmt: fmt.name)
def test_every_element_of_another_kind_is_counted(rng, fmt, out):
    a, b = (fmt.encode(rng.choice([-1.0, 1, 2], shape)) for shape in ((4, 6), (6, 5)))
    a[1, 2], a[2, 3] = np.nan, np.inf
    b[3] = np.abs(b[3])
    right = out.encode(np.matmul(a.astype(np.float64), b.astype(np.float64)))
    assert compare(a, b, (fmt, fmt), right, out).mismatches == 0
    swaps = [((0, 1), np.nan), ((0, 2), np.inf), ((1, 0), 3.0), ((2, 4), 1.0)]
    if not out.finite:
        swaps += [((2, 0), -np.inf), ((2, 1), np.nan), ((1, 3), np.inf)]
    for where, value in swaps:
        wrong = right.copy()
        wrong[where] = value
        found = compare(a, b, (fmt, fmt), wrong, out)
        assert (found.mismatches, found.first) == (1, list(where)), (where, value)
    for where, value in swaps:
        right[where] = value
    found = compare(a, b, (fmt, fmt), right, out)
    assert (found.mismatches, found.first) == (len(swaps), [0, 1])


@pytest.mark.parametrize("out", [*OUTS, formats.INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("fmt", [FP32, BF16], ids=lambda fmt: fmt.name)
def test_every_element_that_rounding_does_not_explain_is_counted(dev, rng, fmt, out):
    """Two units of the last place of the result; of binary32, as many as its sums may lose."""
    a, b = (fmt.encode(rng.uniform(1, 2, shape)) for shape in ((4, 6), (6, 5)))
    right = dev.matmul(a, b, out_dtype=out, check=True)
    assert dev.last_run.mismatches == 0
    codes = right.view(f"u{out.bytes}")
    step = 2 if out is not FP32 else 64 if fmt is FP32 else 32
    for where in ((0, 1), (3, 4)):
        codes[where] += step
    found = compare(a, b, (fmt, fmt), right, out)
    assert (found.mismatches, found.first) == (2, [0, 1])
    assert found.max_abs_error > 0


def test_what_binary32_cannot_do_is_excused_there_and_nowhere_else():
    tiny = np.float32(2.0**-138)
    a = np.array([[np.inf], [tiny], [1]], np.float32)
    b = np.array([[tiny, np.inf, 1, 2.0**-137]], np.float32)
    assert tiny < LEAST_HIGH_HALF
    c = np.array(
        [[np.nan, np.inf, np.inf, np.inf], [0, np.nan, tiny, 0], [tiny, np.inf, 1, 2.0**-137]], "f4"
    )
    assert compare(a, b, (FP32, FP32), c, FP32).mismatches == 0
    with makalu.open("SMALL", "golden") as dev:
        np.testing.assert_array_equal(np.isnan(dev.matmul(a, b)), np.isnan(c))
    infinity, least = (np.array([[x]], BF16.dtype) for x in (np.inf, BF16.min_subnormal))
    assert compare(infinity, least, (BF16, BF16), c[:1, :1], FP32).mismatches == 1
    for where in ((0, 2), (0, 3), (2, 1), (2, 2)):
        wrong = c.copy()
        wrong[where] = np.nan
        found = compare(a, b, (FP32, FP32), wrong, FP32)
        assert (found.mismatches, found.first) == (1, list(where))


def test_overflow_excuses_what_it_can_cause_and_no_more():
    big = np.array([[3e38, 3e38, -3e38, 1]], np.float32)
    ones = np.ones((4, 1), np.float32)
    for value, wrong in ((np.inf, 0), (np.nan, 0), (3e38, 0)):
        c = np.array([[value]], np.float32)
        assert compare(big, ones, (FP32, FP32), c, FP32).mismatches == wrong
    for value, wrong in ((np.inf, 1), (np.nan, 1), (3e38 / 9, 0), (1e38, 1)):
        c = np.array([[value]], np.float32)
        assert compare(big / 9, ones, (FP32, FP32), c, FP32).mismatches == wrong
    # Past the format of the result, which holds 448 or 65504.
    x = np.full((1, 4), 100.0, np.float16)
    y = np.ones((4, 1), np.float16)
    for scale, out, value, wrong in (
        (2, FP8_E4M3FN, np.nan, 0), (1, FP8_E4M3FN, np.nan, 1), (1, FP16, np.inf, 1),
        (200, FP16, np.inf, 0),
    ):  # fmt: skip
        c = np.array([[value]]).astype(out.dtype)
        assert compare(x * np.float16(scale), y, (FP16, FP16), c, out).mismatches == wrong
    # An infinity among the operands is there to stay, unless an overflow met it.
    x[0, 0] = np.inf
    for value, wrong in ((np.inf, 0), (np.nan, 1), (-np.inf, 1), (4.0, 1)):
        c = np.array([[value]], np.float32)
        assert compare(x, y, (FP16, FP16), c, FP32).mismatches == wrong
    big[0, 3] = np.inf
    for value, wrong in ((np.inf, 0), (np.nan, 0), (-np.inf, 1), (4.0, 1)):
        c = np.array([[value]], np.float32)
        assert compare(big, ones, (FP32, FP32), c, FP32).mismatches == wrong


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [((3,), (3,), []), ((2, 3), (3,), [1]), ((2, 2, 3), (3, 4), [1, 1, 3]), ((3,), (3, 4), [3])],
)
def test_a_wrong_element_is_reported_with_its_place(dev, monkeypatch, a, b, first):
    multiply = Device._multiply

    def wrong(self, *args):
        result = multiply(self, *args)
        result[-1, -1] = np.nan
        return result

    x, y = np.ones(a, np.float32), np.ones(b, np.float32)
    dev.matmul(x, y, check=True)
    assert dev.last_run.mismatches == 0
    assert "MISMATCH" not in str(dev.last_run)
    monkeypatch.setattr(Device, "_multiply", wrong)
    dev.matmul(x, y, check=True)
    report = dev.last_run
    assert (report.mismatches, report.first_mismatch) == (1, first)
    assert report.max_abs_error == 0
    text = " ".join(str(report).split())
    assert "1 element" in text
    assert f"the first at {tuple(first)}" in text
    assert RunReport.from_dict(report.to_dict()) == report
    total = RunReport.from_dict(report.to_dict()).add(report)
    assert (total.mismatches, total.first_mismatch) == (2, first)
    dev.matmul(x, y)
    assert dev.last_run.mismatches is None


def test_integers_are_compared_as_what_nan_and_infinity_become(dev):
    a = np.array([[np.nan], [np.inf], [-np.inf], [1000], [3]], np.float32)
    c = dev.matmul(a, np.ones((1, 1), np.float32), out_dtype="int8", check=True)
    assert c[:, 0].tolist() == [0, 127, -128, 127, 3]
    assert dev.last_run.mismatches == 0
    c[:2] = 1
    found = compare(a, np.ones((1, 1), np.float32), (FP32, FP32), c, formats.INT8)
    assert (found.mismatches, found.first) == (2, [0, 0])


def test_mixed_formats_are_compared_too(dev, rng):
    a = np.array([[np.nan, 1], [1, 2]], ml_dtypes.float8_e4m3fn)
    b = np.array([[1, np.inf], [1, 2]], ml_dtypes.float8_e5m2)
    c = dev.matmul(a, b, check=True)
    np.testing.assert_array_equal(c, [[np.nan, np.nan], [3, np.inf]])
    assert dev.last_run.mismatches == 0
