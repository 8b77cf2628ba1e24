"""Random numbers and dropout in kernels: the words that a seed has, where, and what is refused."""

import makalu
import makalu.nki as nki
import makalu.nki.isa as nisa
import makalu.nki.language as nl
import ml_dtypes
import numpy as np
import pytest
from makalu.firmware.kernels import training
from makalu.nki import KernelError, TensorSpec
from makalu.rtl.arch import formats
from makalu.rtl.arch.config import SMALL, TINY, TRN

from .refusal import check_refused

LANE = 1 << 25
"""Numbers that a seed has for each partition."""


@pytest.fixture(scope="module", params=[TINY, SMALL], ids=lambda c: c.name)
def dev(request):
    with makalu.open(request.param, "golden", hbm=1 << 22) as device:
        yield device


def words(seed, shape, first=0):
    """The words of a tile, by Python's integers."""
    partitions, *axes = shape
    out = np.empty((partitions, int(np.prod(axes))), np.uint32)
    mask = 0xFFFFFFFF
    for p, i in np.ndindex(out.shape):
        x = (p * LANE + first + i) ^ (seed << 13 | seed >> 19) & mask
        x = (x ^ x >> 17) * 0xED5AD4BB & mask ^ (seed ^ seed >> 17) * 0xED5AD4BB & mask
        x = (x ^ x >> 11) * 0xAC4C1B51 & mask
        x = (x ^ x >> 15) * 0x31848BAB & mask
        out[p, i] = x ^ x >> 14
    return out.reshape(shape)


def uniform(seed, shape, first=0):
    return (words(seed, shape, first) >> 8).astype(np.float32) / np.float32(1 << 24)


def dropped(seed, shape, rate, first=0):
    return uniform(seed, shape, first) < np.float32(rate)


@nki.jit
def filled(shape, dtype, seed=None, engine=nisa.engine.unknown):
    out = nl.ndarray(shape, dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(shape, dtype, buffer=nl.sbuf)
    if seed is not None:
        nisa.set_rng_seed(seed)
    nisa.rng(tile, engine)
    nisa.dma_copy(out, tile)
    return out


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_integers_take_the_low_bits(dev, name):
    fmt = formats.format_of(name)
    got = dev.run(filled, (4, 3, 5), fmt, 77)
    want = words(77, (4, 3, 5)).astype(f"uint{fmt.bits}")
    np.testing.assert_array_equal(got.view(want.dtype), want)


def test_numbers_are_the_high_bits(dev):
    np.testing.assert_array_equal(dev.run(filled, (3, 40), nl.float32, 5), uniform(5, (3, 40)))


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, -1, -(1 << 31), 1 << 31])
def test_a_seed_has_32_bits(dev, seed):
    got = dev.run(filled, (4, 6), nl.uint32, seed)
    np.testing.assert_array_equal(got, words(seed & 0xFFFFFFFF, (4, 6)))


def test_without_a_seed_it_is_zero_and_the_engine_may_be_named(dev):
    got = dev.run(filled, (4, 6), nl.uint32, None, nisa.engine.gpsimd)
    np.testing.assert_array_equal(got, words(0, (4, 6)))


def test_a_seed_goes_on_and_begins_again(dev):
    @nki.jit
    def kernel():
        out = nl.ndarray((5, 4, 6), nl.uint32, buffer=nl.shared_hbm)
        for i in range(5):
            if i == 3:
                nl.random_seed(9)
            tile = nl.ndarray((4, 6), nl.uint32)
            nisa.rng(tile)
            nl.store(out[i], tile)
        return out

    got = dev.run(kernel)
    for i, (seed, first) in enumerate([(0, 0), (0, 6), (0, 12), (9, 0), (9, 6)]):
        np.testing.assert_array_equal(got[i], words(seed, (4, 6), first))
    assert len(set(got.reshape(-1).tolist())) == got.size


def test_an_element_has_its_number_by_its_index_whatever_the_view(dev):
    @nki.jit
    def kernel():
        out = nl.ndarray((4, 4, 6), nl.uint32, buffer=nl.shared_hbm)
        tile = nl.zeros((4, 4, 6), nl.uint32)
        nisa.rng(tile[:, 1:3, ::2])
        turned = nl.ndarray((4, 6, 4), nl.uint32)
        nisa.rng(turned.permute(0, 2, 1)[:, 3:])
        nisa.tensor_copy(tile[:, 3:], turned.permute(0, 2, 1)[:, 3:])
        nisa.dma_copy(out, tile)
        return out

    want = np.zeros((4, 4, 6), np.uint32)
    want[:, 1:3, ::2] = words(0, (4, 2, 3))
    want[:, 3:] = words(0, (4, 1, 6), first=6)
    np.testing.assert_array_equal(dev.run(kernel), want)


@pytest.mark.parametrize("own", [False, True], ids=["number", "tile"])
def test_partitions_count_from_the_first_one_of_the_tile(own):
    @nki.jit
    def kernel(seed):
        out = nl.ndarray((8, 6), nl.uint32, buffer=nl.shared_hbm)
        tile = nl.ndarray((16, 6), nl.uint32)
        nl.random_seed(nl.load(seed) if own else 40)
        nisa.rng(tile[8:16])
        nl.store(out, tile[8:16])
        return out

    with makalu.open(SMALL, "golden", hbm=1 << 20) as small:
        got = small.run(kernel, np.array([[40]], np.int32))
    np.testing.assert_array_equal(got, words(40, (8, 6)))


def test_a_seed_that_is_read_when_the_kernel_runs(dev):
    """One program for all seeds; each partition reads it for itself."""

    @nki.jit
    def kernel(seed):
        out = nl.ndarray((2, 4, 7), nl.uint32, buffer=nl.shared_hbm)
        nl.random_seed(nl.load(seed.reshape(1, 1)))
        for i in range(2):
            tile = nl.ndarray((4, 7), nl.uint32)
            nisa.rng(tile)
            nl.store(out[i], tile)
        return out

    program = kernel.compile(dev.config, TensorSpec((1,), "uint32"))
    assert any("seed=sbuf+" in line for line in program.disassemble().splitlines())
    for seed in (0, 5, 0xDEADBEEF):
        got = dev.run(kernel, np.array([seed], np.uint32))
        np.testing.assert_array_equal(got[0], words(seed, (4, 7)))
        np.testing.assert_array_equal(got[1], words(seed, (4, 7), first=7))


def test_an_instruction_for_each_tile_on_pool():
    program = filled.compile(TRN, (128, 512), nl.uint32, 3)
    lines = [line for line in program.disassemble().splitlines() if " rng " in line]
    assert len(lines) == 1
    assert program.stats["instructions"]["POOL"] == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3"])
def test_rand_rounds_to_its_format(dev, dtype):
    fmt = formats.format_of(dtype)

    @nki.jit
    def kernel():
        out = nl.ndarray((4, 40), fmt, buffer=nl.shared_hbm)
        nl.random_seed(8)
        nl.store(out, nl.rand((4, 40), fmt))
        return out

    want = fmt.encode(uniform(8, (4, 40)))
    np.testing.assert_array_equal(dev.run(kernel).view(np.uint8), want.view(np.uint8))


# Dropout ------------------------------------------------------------------------------------------


def specials(shape, dtype):
    """Numbers of which some are infinite, NaN or -0."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal(shape).astype(np.float32)
    odd = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-40], np.float32)
    return np.where(rng.random(shape) < 0.3, odd[rng.integers(5, size=shape)], x).astype(dtype)


@nki.jit
def thinned(x, rate, in_place=False):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nl.random_seed(21)
    data = nl.load(x)
    dst = data if in_place else nl.ndarray(x.shape, x.dtype)
    nisa.dropout(dst, data, rate)
    nl.store(out, dst)
    return out


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e5m2, np.int8, np.int16,
        np.uint32,
    ],
    ids=lambda dtype: np.dtype(dtype).name,
)  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True])
def test_dropout_keeps_bits_or_makes_zeros(dev, dtype, in_place):
    shape = 4, 3, 10
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        x = np.random.default_rng(2).integers(info.min, info.max, shape, dtype, endpoint=True)
    else:
        x = specials(shape, dtype)
    got = dev.run(thinned, x, 0.4, in_place)
    code = f"uint{8 * x.itemsize}"
    gone = dropped(21, shape, 0.4)
    assert 0.25 < gone.mean() < 0.55
    np.testing.assert_array_equal(got.view(code), np.where(gone, 0, x.view(code)))


@pytest.mark.parametrize("rate", [0, 0.0, 1, 1.0, 2.0**-24, 1 - 2.0**-24, 0.3])
def test_all_is_kept_with_0_and_nothing_with_1(dev, rate):
    x = specials((4, 30), np.float32)
    got = dev.run(thinned, x, rate)
    want = np.where(dropped(21, x.shape, rate), 0, x.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.uint32), want)
    if rate in (0, 1):
        assert got.tobytes() == (np.zeros_like(x) if rate else x).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_probability_for_each_partition(dev, dtype):
    rates = np.array([[0], [0.25], [0.75], [1]], dtype)

    @nki.jit
    def kernel(x, rates):
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.dropout(nl.load(x), nl.load(rates)))
        return out

    x = np.ones((4, 50), np.float32)
    np.testing.assert_array_equal(dev.run(kernel, x, rates), ~dropped(0, x.shape, rates))


def test_dropout_of_the_upper_partitions_and_of_sums():
    """Where data and probabilities lie in other partitions, and where data is in PSUM."""

    @nki.jit
    def kernel(x, rates):
        out = nl.ndarray((2, 8, 8), nl.float32, buffer=nl.shared_hbm)
        tile, rate = nl.load(x), nl.load(rates)
        dst = nl.ndarray(x.shape, nl.float32)
        nisa.dropout(dst[8:16], tile[8:16], rate[8:16])
        nl.store(out[0], dst[8:16])
        sums = nl.ndarray((8, 8), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(sums, nl.shared_identity_matrix(8, nl.float32), tile[:8])
        thin = nl.ndarray((8, 8), nl.float32)
        nisa.dropout(thin, sums, 0.5)
        nl.store(out[1], thin)
        return out

    x = np.arange(1, 129, dtype=np.float32).reshape(16, 8)
    rates = np.linspace(0, 1, 16, dtype=np.float32)[:, None]
    with makalu.open(SMALL, "golden", hbm=1 << 20) as small:
        got = small.run(kernel, x, rates)
    np.testing.assert_array_equal(got[0], np.where(dropped(0, (8, 8), rates[8:]), 0, x[8:]))
    np.testing.assert_array_equal(got[1], np.where(dropped(0, (8, 8), 0.5, 8), 0, x[:8]))


def test_dropout_converts_last(dev):
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, nl.bfloat16, buffer=nl.shared_hbm)
        nl.store(out, nl.dropout(nl.load(x), 0.5, dtype=nl.bfloat16))
        return out

    x = specials((4, 20), np.float32)
    want = np.where(dropped(0, x.shape, 0.5), 0, x).astype(ml_dtypes.bfloat16)
    got, want = (v.astype(np.float32) for v in (dev.run(kernel, x), want))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 1000), (70, 37)])
def test_the_kernel_scales_what_it_keeps(dev, shape, dtype):
    x = (np.random.default_rng(3).standard_normal(shape) + 5).astype(dtype)
    seeds = [np.array([s], np.uint32) for s in (1, 1, 2)]
    got, again, other = (dev.run(training.dropout, x, seed, rate=0.3) for seed in seeds)
    assert got.tobytes() == again.tobytes()
    kept = got != 0
    want = training.dropout_reference(x, kept, 0.3)
    error = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    assert error <= (2e-7 if dtype is np.float32 else 8e-3)
    if x.size > 1000:
        assert abs(kept.mean() - 0.7) < 6 * np.sqrt(0.21 / x.size)
        assert abs(((other != 0) == kept).mean() - 0.58) < 6 * np.sqrt(0.25 / x.size)


def test_the_seed_of_the_kernel_may_be_a_number(dev):
    """A constant of the program then, and the same zeros as the input makes."""
    x = np.ones((5, 33), np.float32)
    want = dev.run(training.dropout, x, np.array([9], np.uint32), rate=np.float32(0.25))
    assert dev.run(training.dropout, x, 9, rate=0.25).tobytes() == want.tobytes()


@pytest.mark.parametrize("rate", [1, 1.0, 1.5, -0.1, float("nan"), "a", None])
def test_the_kernel_refuses_what_is_no_probability(rate):
    spec = TensorSpec((4, 20), "fp32"), TensorSpec((1,), "uint32")
    with pytest.raises(KernelError, match="must be a number from 0 to below 1"):
        training.dropout.compile(TINY, *spec, rate=rate)


def test_dropout_of_what_is_no_tile_is_refused():
    @nki.jit
    def kernel(a):
        return nl.dropout(3.0, 0.5)

    with pytest.raises(KernelError, match="needs a tile, not 3"):
        kernel.compile(TINY, TensorSpec((4, 4), "fp32"))


def test_the_whole_of_a_full_machine_is_compiled():
    spec = TensorSpec((300, 700), "bf16"), TensorSpec((1,), "uint32")
    program = training.dropout.compile(TRN, *spec, rate=0.1)
    words_of = [line for line in program.disassemble().splitlines() if " rng " in line]
    assert len(words_of) >= 3


# What is refused ----------------------------------------------------------------------------------


def tile(shape=(4, 8), dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray(shape, dtype, buffer=buffer, name="t")


def draw_all():
    """All numbers of a seed but seven, in a row."""
    from makalu.firmware.nki import trace

    trace.current().drawn = LANE - 7
    nisa.rng(tile((4, 7)))
    nisa.rng(tile((4, 1)))


def thin(dst=None, data=None, prob=0.5):
    nisa.dropout(tile() if dst is None else dst, tile() if data is None else data, prob)


REFUSED = {
    "psum": (
        lambda: nisa.rng(tile(buffer=nl.psum)),
        "rng dst .*must be in sbuf; allocate it with buffer=nl.sbuf",
    ),
    "a format that rounds": (
        lambda: nisa.rng(tile(dtype=nl.bfloat16)),
        "dst t .* must be of an integer format, or float32 .*nisa.tensor_copy converts",
    ),
    "engine": (
        lambda: nisa.rng(tile(), nisa.engine.vector), r"runs on engine\.gpsimd here, not on",
    ),
    "broadcast": (lambda: nisa.rng(tile((4, 1)).broadcast_to((4, 8))), "can only be read"),
    "more numbers than there are": (
        draw_all, "needs 1 numbers .* of 33554432 of a seed 33554432 are taken; set another",
    ),
    "a broken seed": (lambda: nisa.set_rng_seed(0.5), "must be an integer of 32 bits"),
    "a wide seed": (lambda: nl.random_seed(1 << 32), "must be an integer of 32 bits"),
    "words as seed": (lambda: nl.random_seed("1"), "must be a number or a tile"),
    "several seeds": (
        lambda: nisa.set_rng_seed(tile((4, 1), nl.uint32)), r"must be a tile \[1, 1\] of int32",
    ),
    "a float as seed": (
        lambda: nisa.set_rng_seed(tile((1, 1))), r"must be a tile \[1, 1\] of int32 or uint32",
    ),
    "a seed in hbm": (
        lambda: nisa.set_rng_seed(tile((1, 1), nl.uint32, nl.hbm)), "load it into SBUF",
    ),
    "integers from 0 to 1": (lambda: nl.rand((4, 8), nl.int8), r"are no int8; nisa\.rng fills"),
    "a probability above 1": (lambda: thin(prob=1.01), r"prob = 1\.01 must be a number from 0 to"),
    "a negative probability": (lambda: thin(prob=-0.1), "must be a number from 0 to 1"),
    "no probability": (lambda: thin(prob=float("nan")), "must be a number from 0 to 1"),
    "words as probability": (lambda: thin(prob="half"), "must be a number from 0 to 1"),
    "another format": (
        lambda: thin(dst=tile(dtype=nl.bfloat16)), "must have the same number format; convert",
    ),
    "another shape": (lambda: thin(data=tile((4, 2, 4))), "must have the same shape"),
    "fewer elements": (lambda: thin(data=tile((4, 7))), "must have the same partitions"),
    "probabilities of elements": (
        lambda: thin(prob=tile()), r"one number of a floating-point format .*\[4, 1\]",
    ),
    "probabilities of other partitions": (
        lambda: thin(prob=tile((2, 1))), r"for each partition of data, \[4, 1\]",
    ),
    "integers as probabilities": (
        lambda: thin(prob=tile((4, 1), nl.int8)), "one number of a floating-point format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_message_that_helps(name):
    check_refused(*REFUSED[name], __file__)
