"""The scalar engine's functions: the stated errors, special values, and the instruction."""

import importlib.util
import math
from pathlib import Path

import ml_dtypes
import mpmath as mp
import numpy as np
import pytest
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import TINY
from makalu.rtl.arch.functions import ANGLE_DIRECT, PLANS, Reduction, load_tables
from makalu.rtl.arch.isa import AccessPattern, Activation, Engine, Function, Space
from makalu.sim.activation import evaluate, reduce_angle
from makalu.sim.arithmetic import fma32
from makalu.sim.golden import GoldenCore

SCRIPT = Path(__file__).parents[1] / "bench" / "functions.py"
LIMIT_ULP = 2
NAN = 0x7FC00000
F = Function

every = pytest.mark.parametrize("function", list(Function), ids=lambda f: f.name.lower())


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("functions_bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Errors -------------------------------------------------------------------------------------------


@every
def test_the_page_of_errors_holds(bench, function, rng):
    error, code = bench.read_page()[function]
    assert error <= LIMIT_ULP
    at = bench.errors(function, np.array([code], np.uint32))[0]
    assert at == pytest.approx(error, abs=6e-4), "run python tests/bench/functions.py --write"
    codes = bench.points(function, 1 << 14, rng)
    found = bench.errors(function, codes)
    worst = int(np.argmax(found))
    # The page's is the greatest of millions, which a few thousand hardly pass.
    assert found[worst] <= min(error + 0.03, LIMIT_ULP), f"{codes[worst]:#x}: {found[worst]} ULP"
    assert not np.isnan(found).any()


def test_the_page_is_of_these_tables(bench):
    page = bench.PAGE.read_text()
    count = int(page.split(" or more arguments")[0].rsplit(maxsplit=1)[-1].replace(",", ""))
    assert count >= 1 << 20
    assert page == bench.render(bench.read_page(), count)


@every
def test_the_reference_is_right_itself(bench, function, rng):
    """Binary64 against mpmath, where the errors are measured."""
    codes = rng.permutation(bench.points(function, 1 << 10, rng))[:300]
    x = codes.view(np.float32)
    x = x[np.isfinite(x) & (x != 0) & (np.abs(x) < 1e6)].astype(np.float64)
    if PLANS[function].reduction in (Reduction.LOG, Reduction.SQRT, Reduction.RSQRT):
        x = np.abs(x)
    if function is F.PRELU:
        x = np.abs(x)
    with np.errstate(all="ignore"):
        got = np.asarray(bench.BINARY64[function](x))
    want = np.array([float(bench.EXACT[function](mp.mpf(float(v)))) for v in x])
    got, want = (np.clip(v, -(2.0**128), 2.0**128) for v in (got, want))
    error = np.abs(got - want) / bench.ulp(want)
    near_root = np.abs(x - bench.ROOTS.get(function, math.inf)) < 1e-4
    assert np.max(error[~near_root]) < 1e-3
    assert np.max(error[near_root], initial=0) < 0.2


def test_a_wrong_table_has_a_greater_error(bench):
    """One bit of one coefficient: what the sample above would notice."""
    table = load_tables()[F.EXP]
    error, _ = bench.read_page()[F.EXP]
    codes = bench.borders(table)
    codes = codes[np.abs(codes.view(np.float32)) < 80]
    exact = np.exp(codes.view(np.float32).astype(np.float64))
    for column, bit in enumerate((10, 21, 20, 16, 12, 8, 4)):
        segments = table.segments.copy()
        segments[300, column] ^= 1 << bit
        broken = type(table)(segments, table.binades, table.bounds)
        got = evaluate(F.EXP, codes, table=broken).astype(np.float64)
        assert np.max(np.abs(got - exact) / bench.ulp(exact)) > 2 * error, column


# Special values -----------------------------------------------------------------------------------

INF = math.inf
# Of -inf, -1, -0, +0, 1, inf; None is an ordinary value.
SPECIAL = {
    F.COPY: (-INF, -1, -0.0, 0.0, 1, INF),
    F.SQUARE: (INF, 1, 0.0, 0.0, 1, INF),
    F.ABS: (INF, 1, 0.0, 0.0, 1, INF),
    F.SIGN: (-1, -1, -0.0, 0.0, 1, 1),
    F.RELU: (0.0, 0.0, 0.0, 0.0, 1, INF),
    F.PRELU: (-INF, -0.25, -0.0, 0.0, 1, INF),
    F.EXP: (0.0, None, 1, 1, None, INF),
    F.LOG: (math.nan, math.nan, -INF, -INF, 0.0, INF),
    F.SQRT: (math.nan, math.nan, -0.0, 0.0, 1, INF),
    F.RSQRT: (math.nan, math.nan, -INF, INF, 1, 0.0),
    F.RECIPROCAL: (-0.0, -1, -INF, INF, 1, 0.0),
    F.TANH: (-1, None, -0.0, 0.0, None, 1),
    F.SIGMOID: (0.0, None, 0.5, 0.5, None, 1),
    F.GELU: (-0.0, None, -0.0, 0.0, None, INF),
    F.GELU_DX: (-0.0, None, 0.5, 0.5, None, 1),
    F.GELU_TANH: (-0.0, None, -0.0, 0.0, None, INF),
    F.GELU_TANH_DX: (-0.0, None, 0.5, 0.5, None, 1),
    F.GELU_SIGMOID: (-0.0, None, -0.0, 0.0, None, INF),
    F.SILU: (-0.0, None, -0.0, 0.0, None, INF),
    F.SILU_DX: (-0.0, None, 0.5, 0.5, None, 1),
    F.SOFTPLUS: (0.0, None, np.float32(math.log(2)), np.float32(math.log(2)), None, INF),
    F.MISH: (-0.0, None, -0.0, 0.0, None, INF),
    F.ERF: (-1, None, -0.0, 0.0, None, 1),
    F.ERF_DX: (0.0, None, np.float32(2 / math.sqrt(math.pi)), np.float32(2 / math.sqrt(math.pi)),
               None, 0.0),
    F.SIN: (math.nan, None, -0.0, 0.0, None, math.nan),
    F.ARCTAN: (-np.float32(math.pi / 2), None, -0.0, 0.0, None, np.float32(math.pi / 2)),
}  # fmt: skip


@every
def test_special_values(function):
    x = np.float32([-INF, -1, -0.0, 0.0, 1, INF])
    got = evaluate(function, x, 0.25)
    for i, want in enumerate(SPECIAL[function]):
        if want is None:
            continue
        code = NAN if math.isnan(want) else int(np.float32(want).view(np.uint32))
        assert int(got.view(np.uint32)[i]) == code, f"{function.name}({x[i]}) = {got[i]}"
    nans = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
    assert (evaluate(function, nans, 0.25).view(np.uint32) == NAN).all()


def test_results_overflow_and_vanish_where_mathematics_does():
    def at(function, *values):
        return evaluate(function, np.float32(values)).tolist()

    top, least = 3.4028235e38, 2.0**-149
    # Above 128 ln 2 and below -150 ln 2.
    assert at(F.EXP, 88.722831, 88.722847) == [pytest.approx(top, rel=1e-5), INF]
    assert at(F.EXP, -103.5, -103.97210) == [least, 0]
    assert at(F.RECIPROCAL, 2.0**-128, 2.0**-128 * 1.5, 2.0**-127) == [
        INF, pytest.approx(2.268549e38), 2.0**127,
    ]  # fmt: skip
    assert at(F.RECIPROCAL, top, -(2.0**127)) == [2.0**-128, -(2.0**-127)]
    assert at(F.SQUARE, 2e19, 1e-23) == [INF, 0]
    assert at(F.SQRT, least) == [np.float32(2.0**-74.5)]
    assert at(F.RSQRT, 2.0**-148) == [2.0**74]
    assert at(F.LOG, 2.0**-149) == [np.float32(-149 * math.log(2))]
    assert at(F.SIN, 2.0**127)[0] == pytest.approx(math.sin(2.0**127), rel=2e-7)


def test_identities(rng):
    x = rng.integers(0, 0x7F800000, 20000).astype(np.uint32).view(np.float32)
    for function in (F.TANH, F.ERF, F.SIN, F.ARCTAN, F.RECIPROCAL):
        assert np.array_equal(evaluate(function, -x), -evaluate(function, x), equal_nan=True)
    assert np.array_equal(evaluate(F.ERF_DX, -x), evaluate(F.ERF_DX, x))
    # Powers of two have exact roots and reciprocals.
    powers = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    assert np.array_equal(evaluate(F.RECIPROCAL, powers), np.float32(1) / powers)
    assert np.array_equal(evaluate(F.SQRT, powers[::2]), np.sqrt(powers[::2]))
    assert np.array_equal(evaluate(F.RSQRT, powers[::2]), 1 / np.sqrt(powers[::2]))


def test_slope_and_square_are_rounded_once(rng):
    x = rng.integers(0, 1 << 32, 20000, np.uint32)
    value = x.view(np.float32)
    alpha = np.float32(-0.3)
    with np.errstate(all="ignore"):
        squares = value * value
        slopes = np.where(value < 0, value * alpha, value)
    number = ~np.isnan(value)
    assert np.array_equal(evaluate(F.SQUARE, x)[number], squares[number])
    assert np.array_equal(evaluate(F.PRELU, x, alpha)[number], slopes[number])
    assert np.array_equal(
        evaluate(F.PRELU, x, alpha), evaluate(F.PRELU, x, alpha.view(np.uint32)), equal_nan=True
    )


def test_angles_are_reduced_to_half_a_place(rng):
    """16367173 * 2**72 is the binary32 number closest to a multiple of pi / 2."""
    hard = [np.float32(16367173 * 2.0**72), np.float32(2.0**127), np.float32(math.pi)]
    codes = np.concatenate(
        [
            np.array(hard, np.float32).view(np.uint32),
            rng.integers(ANGLE_DIRECT + 1, 0x7F800000, 300).astype(np.uint32),
            rng.integers(ANGLE_DIRECT + 1, 0x42000000, 300).astype(np.uint32),
        ]
    )
    # Multiples of pi, rounded: where the distance is small.
    multiples = np.float32(np.pi * np.round(np.exp2(rng.uniform(0, 40, 300))))
    codes = np.concatenate([codes, multiples.view(np.uint32)])
    got, parity = reduce_angle(codes)
    with mp.workprec(300):
        for code, r, odd in zip(codes, got.view(np.float32), parity, strict=True):
            x = mp.mpf(float(np.uint32(code).view(np.float32)))
            turns = mp.floor(x / mp.pi)
            distance = x - turns * mp.pi
            distance = float(min(distance, mp.pi - distance))
            assert int(turns) % 2 == odd
            _, exponent = math.frexp(distance)
            assert abs(float(r) - distance) <= 0.51 * 2.0 ** (exponent - 24), hex(code)


# The instruction ----------------------------------------------------------------------------------


def tile(fmt, partitions, count, *, offset=0, start=0, space=Space.SBUF):
    return AccessPattern(fmt, start, partitions, offset, ((1, count),), space)


def run(core, instruction):
    word = np.frombuffer(instruction.encode(), np.uint8)
    core.hbm[: len(word)] = word
    return core.run({Engine.ACT: (0, 1)})


def bits(value):
    return int(np.float32(value).view(np.uint32))


def put(core, array, offset=0, space="sbuf"):
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)
    getattr(core, space)[: len(raw), offset : offset + raw.shape[1]] = raw


@pytest.mark.parametrize(
    ("scale_pointer", "bias_pointer"), [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str
)
def test_the_argument_is_scaled_and_biased_with_one_rounding(rng, scale_pointer, bias_pointer):
    core = GoldenCore(TINY, 4096)
    x = rng.normal(size=(TINY.partitions, 8)).astype(np.float32)
    scalars = rng.normal(size=(2, TINY.partitions)).astype(np.float32)
    put(core, x)
    put(core, scalars[0], 64)
    put(core, scalars[1], 72)
    pointers = {"scale": scale_pointer, "bias": bias_pointer}
    values, columns = {}, {}
    for i, name in enumerate(pointers):
        if pointers[name]:
            values |= {f"{name}_pointer": 1, name: (64, 72)[i]}
            columns[name] = scalars[i][:, None]
        else:
            values[name] = bits(0.75 - 2 * i)
            columns[name] = np.float32(0.75 - 2 * i)
    counters = run(
        core,
        Activation(
            dst=tile(formats.FP32, TINY.partitions, 8, offset=128),
            src=tile(formats.FP32, TINY.partitions, 8),
            function=F.GELU,
            **values,
        ),
    )
    want = evaluate(F.GELU, fma32(x, columns["scale"], columns["bias"]))
    got = core.sbuf[:, 128:160].copy().view(np.float32)
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))
    assert counters["act_elements"] == 8


def test_formats_are_cast_on_the_way_in_and_out(rng):
    core = GoldenCore(TINY, 4096)
    x = rng.normal(size=(TINY.partitions, 8)).astype(ml_dtypes.bfloat16)
    put(core, x)
    run(
        core,
        Activation(
            dst=tile(formats.FP8_E4M3, TINY.partitions, 8, offset=64),
            src=tile(formats.BF16, TINY.partitions, 8),
            function=F.EXP,
            scale=bits(8),
            bias=0,
            saturate=1,
        ),
    )
    got = core.sbuf[:, 64:72].copy().view(ml_dtypes.float8_e4m3).astype(np.float32)
    value = evaluate(F.EXP, x.astype(np.float32) * 8)
    assert np.array_equal(got, formats.FP8_E4M3.round(value, saturate=True))


def test_psum_is_a_source_and_alpha_the_slope(rng):
    core = GoldenCore(TINY, 4096)
    x = rng.normal(size=(TINY.partitions, 4)).astype(np.float32)
    put(core, x, space="psum")
    run(
        core,
        Activation(
            dst=tile(formats.FP32, TINY.partitions, 4),
            src=tile(formats.FP32, TINY.partitions, 4, space=Space.PSUM),
            function=F.PRELU,
            scale=bits(1),
            alpha=bits(0.5),
        ),
    )
    got = core.sbuf[:, :16].copy().view(np.float32)
    assert np.array_equal(got, np.where(x < 0, x / 2, x))
